/* The model of the checkpoints' tests: see checkpoint_support.h. */
#include "checkpoint_support.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MASTER, WEIGHT, BLOB, NOTHING };
enum { ROWS = 300, COLS = 70, BLOB_BYTES = 5000, STAGING = 4096 };

/* ---- the model ------------------------------------------------------------------------------- */

static tn_tensor make_tensor(const checkpoint_model *model, tn_format format, tn_dtype dtype,
                             int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = format, config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    EXPECT_OK(tn_tensor_create(model->on.scope, &config, &tensor));
    return tensor;
}

static tn_checkpoint_entry *add_entry(checkpoint_model *model, const char *name, tn_dtype dtype,
                                      int tensor, int64_t rows, int64_t cols) {
    tn_checkpoint_entry *entry = &model->entries[model->config.entry_count];
    tn_checkpoint_piece *pieces = model->pieces[model->config.entry_count++];
    *entry = (tn_checkpoint_entry){.name = name, .dtype = dtype, .rank = 2, .shape = {rows, cols}};
    entry->memory = model->tensors[tensor];
    entry->plane = tensor == WEIGHT ? TN_PLANE_ROW : TN_PLANE_DATA;
    entry->pieces = pieces, entry->piece_count = 1;
    pieces[0] = (tn_checkpoint_piece){0, rows * cols, 0};
    return entry;
}

/* Names need escapes, and sort otherwise than they are given. */
static void add_entries(checkpoint_model *model) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(model->tensors[WEIGHT], TN_PLANE_ROW, &layout));
    add_entry(model, "model.master", TN_FP32, MASTER, ROWS, COLS);
    add_entry(model, "model.weight", TN_E4M3, WEIGHT, ROWS, COLS);
    add_entry(model, "model.weight \"scale\" \\ \n \xC3\xA9 \xF0\x9F\x98\x80", TN_FP32, WEIGHT,
              layout.scale_padded_rows, layout.scale_stride)
        ->is_scale = 1;
    add_entry(model, "empty", TN_BF16, NOTHING, 0, 5);
    /* A blob of two tensors, one of them in pieces that lie the other way round. */
    add_entry(model, "blob.late", TN_BF16, BLOB, 1000, 1);
    model->pieces[4][0] = (tn_checkpoint_piece){0, 1000, 3000};
    tn_checkpoint_entry *early = add_entry(model, "blob.early", TN_BYTE, BLOB, 1500, 2);
    early->piece_count = 3;
    model->pieces[5][0] = (tn_checkpoint_piece){2000, 1000, 0};
    model->pieces[5][1] = (tn_checkpoint_piece){0, 500, 2500};
    model->pieces[5][2] = (tn_checkpoint_piece){500, 1500, 1000};
    tn_checkpoint_entry *scalar = add_entry(model, "A scalar", TN_E5M2, NOTHING, 1, 1);
    scalar->rank = 0, scalar->memory = model->tensors[MASTER];
    scalar->piece_count = 1; /* the master's first byte once more */
}

void checkpoint_model_open(checkpoint_model *model, const char *path) {
    memset(model, 0, sizeof *model);
    tensor_fixture_open(&model->on);
    if (path) {
        snprintf(model->path, sizeof model->path, "%s", path);
    } else {
        char directory[] = "checkpoint-XXXXXX";
        assert_non_null(mkdtemp(directory));
        snprintf(model->path, sizeof model->path, "%s/latest", directory);
    }
    model->tensors[MASTER] = make_tensor(model, TN_FORMAT_PLAIN, TN_FP32, ROWS, COLS);
    model->tensors[WEIGHT] = make_tensor(model, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, ROWS, COLS);
    model->tensors[BLOB] = make_tensor(model, TN_FORMAT_PLAIN, TN_BYTE, 1, BLOB_BYTES);
    model->tensors[NOTHING] = make_tensor(model, TN_FORMAT_PLAIN, TN_BF16, 0, 5);
    model->config = (tn_checkpoint_config)TN_CHECKPOINT_CONFIG_INIT;
    model->config.path = model->path;
    model->config.entries = model->entries;
    model->config.staging_bytes = STAGING;
    model->config.plan_hash = 0x123456789abcdef0u;
    add_entries(model);
}

void checkpoint_model_close(checkpoint_model *model) {
    tensor_fixture_close(&model->on);
    *strrchr(model->path, '/') = 0;
    test_remove_tree(model->path);
}

/* ---- contents -------------------------------------------------------------------------------- */

static void bytes_of(unsigned char *bytes, size_t count, unsigned seed, unsigned salt) {
    uint32_t state = seed * 2654435761u + salt * 40503u + 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        bytes[i] = (unsigned char)(state >> 24);
    }
}

typedef struct contents {
    size_t data_bytes, scale_bytes;
    unsigned char *data, *scale;
} contents;

static contents make_contents(const checkpoint_model *model, int tensor, tn_plane plane) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(model->tensors[tensor], plane, &layout));
    contents made = {layout.data_bytes, layout.scale_rows ? layout.scale_bytes : 0,
                     malloc(layout.data_bytes + 1), malloc(layout.scale_bytes + 1)};
    assert_true(made.data && made.scale);
    return made;
}

static tn_plane plane_of(int tensor) { return tensor == WEIGHT ? TN_PLANE_ROW : TN_PLANE_DATA; }

void checkpoint_model_fill(checkpoint_model *model, unsigned seed) {
    for (int i = 0; i < MODEL_TENSORS; i++) {
        contents all = make_contents(model, i, plane_of(i));
        bytes_of(all.data, all.data_bytes, seed, (unsigned)i);
        bytes_of(all.scale, all.scale_bytes, seed, (unsigned)i + 100);
        EXPECT_OK(tn_plane_write(model->tensors[i], plane_of(i), all.data, all.data_bytes,
                                 all.scale_bytes ? all.scale : NULL, all.scale_bytes,
                                 model->on.stream));
        EXPECT_OK(tn_stream_synchronize(model->on.device, model->on.stream));
        free(all.data);
        free(all.scale);
    }
}

int checkpoint_model_has(checkpoint_model *model, unsigned seed) {
    int is_same = 1;
    for (int i = 0; i < MODEL_TENSORS; i++) {
        contents expected = make_contents(model, i, plane_of(i));
        contents actual = make_contents(model, i, plane_of(i));
        bytes_of(expected.data, expected.data_bytes, seed, (unsigned)i);
        bytes_of(expected.scale, expected.scale_bytes, seed, (unsigned)i + 100);
        EXPECT_OK(tn_plane_read(model->tensors[i], plane_of(i), actual.data, actual.data_bytes,
                                actual.scale_bytes ? actual.scale : NULL, actual.scale_bytes,
                                model->on.stream));
        EXPECT_OK(tn_stream_synchronize(model->on.device, model->on.stream));
        is_same = is_same && memcmp(expected.data, actual.data, actual.data_bytes) == 0 &&
                  memcmp(expected.scale, actual.scale, actual.scale_bytes) == 0;
        free(expected.data);
        free(expected.scale);
        free(actual.data);
        free(actual.scale);
    }
    return is_same;
}

/* ---- saved and loaded ------------------------------------------------------------------------ */

tn_status checkpoint_model_save(checkpoint_model *model, unsigned seed) {
    checkpoint_model_fill(model, seed);
    model->config.step = seed;
    return tn_checkpoint_save(&model->config, model->on.stream);
}

unsigned checkpoint_model_load(checkpoint_model *model) {
    tn_checkpoint_info info = TN_CHECKPOINT_INFO_INIT;
    checkpoint_model_fill(model, 12345);
    EXPECT_OK(tn_checkpoint_load(&model->config, model->on.stream));
    EXPECT_OK(tn_checkpoint_info_get(model->path, &info));
    assert_int_equal(info.rank_count, 1);
    assert_int_equal(info.entry_count, MODEL_ENTRIES);
    assert_true(info.plan_hash == model->config.plan_hash);
    assert_true(checkpoint_model_has(model, (unsigned)info.step));
    return (unsigned)info.step;
}

static int is_generation(const struct dirent *entry) { return entry->d_name[0] == '0'; }

void checkpoint_model_file(const checkpoint_model *model, char *path, size_t path_bytes) {
    struct dirent **found = NULL;
    int count = scandir(model->path, &found, is_generation, alphasort);
    assert_int_equal(count, 1);
    snprintf(path, path_bytes, "%s/%s/rank-00000.safetensors", model->path, found[0]->d_name);
    free(found[0]);
    free(found);
}
