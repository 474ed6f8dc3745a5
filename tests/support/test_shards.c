/* Planes cut into shards and gathered again: see test_shards.h. */
#include "test_shards.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "format_table.h"

enum { RANKS_MAX = 64 };

void *shard_zeros(size_t bytes) {
    void *made = calloc(bytes ? bytes : 1, 1);
    assert_non_null(made);
    return made;
}

int shard_has_col(const tn_shard_tensor *tensor) {
    return tensor->format == TN_FORMAT_FP8_BLOCK_1D || tensor->format == TN_FORMAT_MXFP8 ||
           tensor->format == TN_FORMAT_NVFP4;
}

tn_plane shard_forward_plane(const tn_shard_tensor *tensor) {
    return tensor->format == TN_FORMAT_PLAIN ? TN_PLANE_DATA : TN_PLANE_ROW;
}

tn_plane_layout shard_plane_layout(const tn_shard_tensor *t, tn_plane plane, int64_t rows) {
    tn_plane_layout layout;
    EXPECT_OK(tn__format_layout(t->format, t->dtype, rows, t->cols, plane, &layout));
    return layout;
}

/* ---- bytes ---------------------------------------------------------------------------------- */

/* Never 0, which is what padding is. */
static uint8_t byte_at(int tensor, tn_plane plane, int is_scale, uint64_t offset) {
    uint64_t mixed = offset * 2654435761u + (uint64_t)(tensor * 8 + (int)plane * 2 + is_scale) * 97;
    mixed ^= mixed >> 15;
    return (uint8_t)(1 + mixed % 255);
}

shard_plane shard_plane_make(const tn_shard_tensor *t, int tensor, tn_plane plane) {
    shard_plane out = {.layout = shard_plane_layout(t, plane, t->rows)};
    const tn_plane_layout *l = &out.layout;
    size_t size = l->scale_bytes ? tn_dtype_bytes(l->scale_dtype) : 0;
    out.data = shard_zeros(l->data_bytes);
    out.scale = shard_zeros(l->scale_bytes);
    for (size_t i = 0; i < l->data_bytes; i++)
        out.data[i] = byte_at(tensor, plane, 0, i);
    for (int64_t row = 0; row < l->scale_rows; row++) {
        for (size_t i = 0; i < (size_t)l->scale_cols * size; i++) {
            size_t at = (size_t)(row * l->scale_stride) * size + i;
            out.scale[at] = byte_at(tensor, plane, 1, at);
        }
    }
    if (l->global_scale_offset > 0) memset(out.scale + l->global_scale_offset, 0x77, 4);
    return out;
}

void shard_plane_free(shard_plane *plane) {
    free(plane->data);
    free(plane->scale);
    *plane = (shard_plane){.data = NULL};
}

/* ---- pieces --------------------------------------------------------------------------------- */

/* Whether a row of stored scales has one for each row of the tensor, or one row of them is for so
 * many rows. */
static int is_along_rows(const tn_shard_tensor *t, tn_plane plane) {
    return t->format == TN_FORMAT_FP8_BLOCK_1D && plane == TN_PLANE_ROW;
}

static int64_t rows_per_scale(const tn_shard_tensor *t, tn_plane plane) {
    switch (t->format) {
    case TN_FORMAT_FP8_BLOCK_1D: return plane == TN_PLANE_ROW ? 1 : 128;
    case TN_FORMAT_FP8_BLOCK_2D: return 128;
    case TN_FORMAT_MXFP8: return plane == TN_PLANE_ROW ? 1 : 32;
    default: return 1; /* the others have no scales of rows, or are never cut */
    }
}

static void put_data(const tn_shard_tensor *t, const shard_plane *whole, tn_plane plane,
                     const tn_shard_piece *piece, uint8_t *out) {
    tn_plane_layout alone = shard_plane_layout(t, plane, piece->row_count);
    if (t->rows == piece->row_count) {
        memcpy(out, whole->data, whole->layout.data_bytes);
    } else if (plane == TN_PLANE_COL && t->format == TN_FORMAT_FP8_BLOCK_1D) {
        for (int64_t k = 0; k < t->cols; k++)
            memcpy(out + k * piece->row_count, whole->data + k * t->rows + piece->first_row,
                   (size_t)piece->row_count);
    } else {
        assert_int_equal(alone.rows, piece->row_count);
        memcpy(out, whole->data + (size_t)piece->first_row * whole->layout.row_bytes,
               alone.data_bytes);
    }
}

static void put_scales(const tn_shard_tensor *t, const shard_plane *whole, tn_plane plane,
                       const tn_shard_piece *piece, uint8_t *out) {
    tn_plane_layout alone = shard_plane_layout(t, plane, piece->row_count);
    size_t size = tn_dtype_bytes(alone.scale_dtype);
    int64_t skipped = piece->first_row / rows_per_scale(t, plane);
    if (t->format == TN_FORMAT_NVFP4 || t->format == TN_FORMAT_FP8_TENSOR) {
        memcpy(out, whole->scale, whole->layout.scale_bytes);
        return;
    }
    memset(out, 0, alone.scale_bytes);
    for (int64_t row = 0; row < alone.scale_rows; row++) {
        int64_t from = is_along_rows(t, plane) ? row * whole->layout.scale_stride + skipped
                                               : (row + skipped) * whole->layout.scale_stride;
        memcpy(out + (size_t)(row * alone.scale_stride) * size, whole->scale + (size_t)from * size,
               (size_t)alone.scale_cols * size);
    }
}

static void put_flat(const tn_shard_tensor *t, const shard_plane *whole,
                     const tn_shard_piece *piece, uint8_t *shard) {
    size_t size = tn_dtype_bytes(t->dtype);
    if (piece->count) {
        memcpy(shard + piece->data_offset, whole->data + (size_t)piece->first * size,
               (size_t)piece->count * size);
    }
    if (whole->layout.scale_bytes)
        memcpy(shard + piece->scale_offset, whole->scale, whole->layout.scale_bytes);
}

static tn_shard_plan_info info_of(const tn_shard_plan *plan) {
    tn_shard_plan_info info = TN_SHARD_PLAN_INFO_INIT;
    EXPECT_OK(tn_shard_plan_info_get(plan, &info));
    return info;
}

void shard_put_piece(const tn_shard_plan *plan, int rank, int tensor, const shard_plane *whole,
                     tn_plane plane, uint8_t *shard) {
    tn_shard_piece piece = TN_SHARD_PIECE_INIT;
    tn_shard_tensor t;
    EXPECT_OK(tn_shard_tensor_get(plan, tensor, &t));
    EXPECT_OK(tn_shard_piece_get(plan, rank, tensor, &piece));
    int64_t data = plane == TN_PLANE_COL ? piece.col_data_offset : piece.data_offset;
    int64_t scale = plane == TN_PLANE_COL ? piece.col_scale_offset : piece.scale_offset;
    if (data >= 0) assert_int_equal(data % 16, 0);
    if (scale >= 0) assert_int_equal(scale % 16, 0);
    if (info_of(plan).layout == TN_SHARD_FLAT) {
        put_flat(&t, whole, &piece, shard);
        return;
    }
    assert_int_equal(piece.first, piece.first_row * t.cols);
    assert_int_equal(piece.count, piece.row_count * t.cols);
    assert_int_equal(piece.count > 0, data >= 0);
    assert_int_equal(piece.count > 0 && whole->layout.scale_bytes > 0, scale >= 0);
    if (data >= 0) put_data(&t, whole, plane, &piece, shard + data);
    if (scale >= 0) put_scales(&t, whole, plane, &piece, shard + scale);
}

/* ---- gathers -------------------------------------------------------------------------------- */

void shard_gather(const tn_shard_plan *plan, uint8_t *const *shards, tn_shard_phase phase,
                  uint8_t *out) {
    const tn_shard_plan_info info = info_of(plan);
    const tn_segment *segments;
    size_t count, gathered = info.gathered_bytes[phase], sent[RANKS_MAX] = {0};
    uint8_t *seen = shard_zeros(gathered);
    assert_in_range(info.rank_count, 1, RANKS_MAX);
    EXPECT_OK(tn_shard_segments(plan, phase, &segments, &count));
    for (size_t i = 0; i < count; i++) {
        const tn_segment *s = &segments[i];
        size_t offset, bytes;
        assert_in_range(s->rank, 0, info.rank_count - 1);
        assert_true(s->count > 0 && s->offset + s->count <= gathered);
        EXPECT_OK(tn_shard_sent_bytes(plan, phase, s->rank, &offset, &bytes));
        assert_true(sent[s->rank] + s->count <= bytes);
        memcpy(out + s->offset, shards[s->rank] + offset + sent[s->rank], s->count);
        sent[s->rank] += s->count;
        for (size_t at = s->offset; at < s->offset + s->count; at++)
            if (seen[at]++) fail_msg("byte %zu is sent twice", at);
    }
    for (int rank = 0; rank < info.rank_count; rank++) {
        size_t offset, bytes, in_all;
        EXPECT_OK(tn_shard_sent_bytes(plan, phase, rank, &offset, &bytes));
        EXPECT_OK(tn_shard_bytes(plan, rank, &in_all));
        assert_int_equal(sent[rank], bytes);
        assert_true(offset + bytes <= in_all);
    }
    free(seen);
}

static void take_out(const uint8_t *gathered, void *at, const uint8_t *expected, size_t bytes,
                     size_t alignment) {
    if (bytes == 0) return;
    assert_int_equal((size_t)((uint8_t *)at - gathered) % alignment, 0);
    assert_memory_equal(at, expected, bytes);
    memset(at, 0, bytes);
}

void shard_take_plane(const tn_shard_plan *plan, tn_shard_phase phase, int tensor,
                      const shard_plane *whole, uint8_t *shard, uint8_t *gathered) {
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    tn_shard_tensor t;
    EXPECT_OK(tn_shard_tensor_get(plan, tensor, &t));
    int is_col = phase == TN_SHARD_BACKWARD && shard_has_col(&t);
    EXPECT_OK(tn_shard_plane_memory(plan, phase, tensor, shard, gathered, &memory));
    assert_int_equal(memory.plane, is_col ? TN_PLANE_COL : shard_forward_plane(&t));
    assert_int_equal(memory.data_bytes, whole->layout.data_bytes);
    assert_int_equal(memory.scale_bytes, whole->layout.scale_bytes);
    take_out(gathered, memory.data, whole->data, memory.data_bytes, 256);
    if (info_of(plan).layout != TN_SHARD_FLAT)
        take_out(gathered, memory.scale, whole->scale, memory.scale_bytes, 16);
    else if (memory.scale_bytes)
        assert_memory_equal(memory.scale, whole->scale, memory.scale_bytes);
}

/* ---- whole tensors -------------------------------------------------------------------------- */

static uint32_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)(value >> 16);
}

/* Tiles differ in size by powers of two, so that their scales do; a few numbers are special. */
static float value_at(int tensor, int64_t i, int64_t cols) {
    uint32_t random = mixed((uint64_t)i * 64 + (uint64_t)tensor + 1);
    int64_t tile = i / cols / 128 * 7 + i % cols / 128 + tensor;
    float value = ldexpf((float)(random & 0xFFFF) / 65536.0f + 0.01f, (int)(tile % 9) - 4);
    if (random >> 16 == 1) return NAN;
    if (random >> 16 == 2) return 0.0f;
    return random & 0x10000 ? -value : value;
}

static size_t width_of(tn_dtype dtype) { return tn_dtype_bytes(dtype); }

static tn_dtype master_dtype(const shard_unit *u, int tensor) {
    return u->tensor[tensor].dtype == TN_BYTE ? TN_BYTE : u->master_dtype;
}

/* The fp32 numbers in another type, by the library's own conversion. */
static void fill_whole(const test_ops *ops, shard_unit *u, int tensor) {
    const tn_shard_tensor *t = &u->tensor[tensor];
    int64_t count = t->rows * t->cols;
    tn_dtype dtype = master_dtype(u, tensor);
    float *values = shard_zeros((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++)
        values[i] = value_at(tensor, i, t->cols);
    u->bytes[tensor] = shard_zeros((size_t)count * width_of(dtype));
    u->whole[tensor] = test_plain(u->scope, dtype, t->rows, t->cols);
    if (dtype == TN_BYTE) {
        for (int64_t i = 0; i < count; i++)
            u->bytes[tensor][i] = (uint8_t)mixed((uint64_t)i);
        test_write(ops, u->whole[tensor], u->bytes[tensor]);
    } else {
        tn_convert_args convert = TN_CONVERT_ARGS_INIT;
        convert.x = test_plain(u->scope, TN_FP32, t->rows, t->cols);
        convert.y = u->whole[tensor];
        test_write(ops, convert.x, values);
        EXPECT_OK(tn_convert(&convert, ops->stream));
        test_read(ops, u->whole[tensor], u->bytes[tensor]);
        EXPECT_OK(tn_tensor_destroy(convert.x, ops->stream));
    }
    free(values);
}

static shard_plane read_plane(const test_ops *ops, tn_tensor tensor, tn_plane plane) {
    shard_plane out;
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &out.layout));
    out.data = shard_zeros(out.layout.data_bytes);
    out.scale = shard_zeros(out.layout.scale_bytes);
    EXPECT_OK(tn_plane_read(tensor, plane, out.data, out.layout.data_bytes,
                            out.layout.scale_bytes ? out.scale : NULL, out.layout.scale_bytes,
                            ops->stream));
    test_ops_wait(ops);
    return out;
}

static void cast_whole(const test_ops *ops, shard_unit *u, int tensor) {
    const tn_shard_tensor *t = &u->tensor[tensor];
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    config.format = t->format, config.dtype = t->dtype, config.scale_mode = t->scale_mode;
    config.rank = 2, config.shape[0] = t->rows, config.shape[1] = t->cols;
    fill_whole(ops, u, tensor);
    if (t->dtype == TN_BYTE) {
        u->row[tensor] = read_plane(ops, u->whole[tensor], TN_PLANE_DATA);
        return;
    }
    EXPECT_OK(tn_tensor_create(u->scope, &config, &quantize.dst));
    quantize.src = convert.x = u->whole[tensor];
    convert.y = quantize.dst;
    quantize.planes = TN_QUANTIZE_ROW | (shard_has_col(t) ? TN_QUANTIZE_COL : 0);
    quantize.amax_epsilon = u->epsilon;
    EXPECT_OK(t->format == TN_FORMAT_PLAIN ? tn_convert(&convert, ops->stream)
                                           : tn_quantize(&quantize, ops->stream));
    u->cast[tensor] = quantize.dst;
    u->row[tensor] = read_plane(ops, quantize.dst, shard_forward_plane(t));
    if (shard_has_col(t)) u->col[tensor] = read_plane(ops, quantize.dst, TN_PLANE_COL);
}

void shard_unit_open(const test_ops *ops, shard_unit *u, tn_shard_layout layout) {
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    config.tensors = u->tensor, config.tensor_count = u->count;
    config.rank_count = u->ranks, config.layout = layout;
    u->info = (tn_shard_plan_info)TN_SHARD_PLAN_INFO_INIT;
    EXPECT_OK(tn_shard_plan_create(&config, &u->plan));
    EXPECT_OK(tn_shard_plan_info_get(u->plan, &u->info));
    u->scope = test_ops_scope(ops, TN_SCOPE_OP, "unit");
    for (int i = 0; i < u->count; i++)
        cast_whole(ops, u, i);
}

void shard_unit_close(shard_unit *u) {
    for (int i = 0; i < u->count; i++) {
        free(u->bytes[i]);
        shard_plane_free(&u->row[i]);
        shard_plane_free(&u->col[i]);
    }
    EXPECT_OK(tn_scope_close(u->scope));
    tn_shard_plan_destroy(u->plan);
}

tn_tensor shard_unit_master(const test_ops *ops, const shard_unit *u, tn_scope scope, int rank,
                            int tensor) {
    tn_shard_piece piece = TN_SHARD_PIECE_INIT;
    tn_dtype dtype = master_dtype(u, tensor);
    EXPECT_OK(tn_shard_piece_get(u->plan, rank, tensor, &piece));
    if (piece.count == 0 && u->info.layout != TN_SHARD_FLAT) return (tn_tensor){0};
    tn_tensor master = test_plain(scope, dtype, 1, piece.count);
    test_write(ops, master, u->bytes[tensor] + (size_t)piece.first * width_of(dtype));
    return master;
}

tn_shard_tensor shard_tensor_of(tn_format format, int64_t rows, int64_t cols) {
    tn_shard_tensor tensor = {.format = format, .dtype = TN_E4M3, .rows = rows, .cols = cols};
    if (format == TN_FORMAT_PLAIN) tensor.dtype = TN_BF16;
    if (format == TN_FORMAT_NVFP4) tensor.dtype = TN_E2M1;
    return tensor;
}
