/* Plans of random units: every byte of every plane is in one rank's shard and gets to its place.
 *
 * The planes are filled with bytes that depend on where they are. Each rank's shard is made of its
 * pieces by the layouts of tenure_tensor.h alone, element by element and scale by scale; then the
 * plan's segments are copied as a gather does, and the gathered buffer is compared. Elements of
 * buckets likewise. A failure is replayed by TENURE_FUZZ_SEED=S TENURE_FUZZ_FIRST=N, which it
 * prints.
 */
#include <stdlib.h>
#include <string.h>

#include "format_table.h"
#include "host_alloc.h"
#include "tenure_shard.h"
#include "test_support.h"

enum { TENSORS_MAX = 9, RANKS_MAX = 13, UNITS = 600 };

static uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static int random_below(uint64_t *state, int bound) {
    return (int)(random_next(state) % (uint64_t)bound);
}

static uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

/* ---- units ---------------------------------------------------------------------------------- */

typedef struct unit {
    int ranks, tensors;
    tn_shard_tensor tensor[TENSORS_MAX];
    tn_shard_plan *plan;
    tn_shard_plan_info info;
} unit;

static void random_tensor(uint64_t *state, tn_shard_tensor *tensor) {
    static const int64_t extents[] = {0,   1,   7,   64,  96,  127, 128, 129, 192, 200,
                                      256, 384, 500, 576, 130, 640, 33,  300, 16,  260};
    static const tn_dtype plain[] = {TN_FP32, TN_BF16, TN_FP16, TN_BYTE};
    enum { EXTENTS = sizeof extents / sizeof *extents };
    *tensor = (tn_shard_tensor){.format = (tn_format)random_below(state, TN_FORMAT_COUNT)};
    tensor->dtype = TN_E4M3;
    if (tensor->format == TN_FORMAT_PLAIN) tensor->dtype = plain[random_below(state, 4)];
    if (tensor->format == TN_FORMAT_NVFP4) tensor->dtype = TN_E2M1;
    tensor->rows = extents[random_below(state, EXTENTS)];
    tensor->cols = extents[random_below(state, EXTENTS)];
    if (random_below(state, 8) == 0) tensor->rows = 128 * (1 + random_below(state, 12));
    tensor->frozen = random_below(state, 3) == 0;
}

static int can_be_flat(const unit *u) {
    for (int i = 0; i < u->tensors; i++) {
        const tn_shard_tensor *t = &u->tensor[i];
        int is_cut = t->format == TN_FORMAT_PLAIN || t->format == TN_FORMAT_FP8_BLOCK_2D ||
                     t->format == TN_FORMAT_FP8_TENSOR;
        if (!is_cut && t->rows * t->cols > 0) return 0;
    }
    return 1;
}

static unit random_unit(uint64_t *state) {
    unit u = {.ranks = 1 + random_below(state, RANKS_MAX),
              .tensors = random_below(state, TENSORS_MAX + 1),
              .info = TN_SHARD_PLAN_INFO_INIT};
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    for (int i = 0; i < u.tensors; i++) {
        random_tensor(state, &u.tensor[i]);
        if (i > 0 && random_below(state, 2)) u.tensor[i].format = u.tensor[i - 1].format;
        if (i > 0 && u.tensor[i].format == u.tensor[i - 1].format)
            u.tensor[i].dtype = u.tensor[i - 1].dtype;
    }
    config.tensors = u.tensor, config.tensor_count = u.tensors;
    config.rank_count = u.ranks;
    config.layout = (tn_shard_layout)random_below(state, TN_SHARD_LAYOUT_COUNT);
    if (config.layout == TN_SHARD_FLAT && !can_be_flat(&u)) config.layout = TN_SHARD_RAGGED;
    if (random_below(state, 2)) config.costs = (tn_shard_costs){50000, 2000000, 9000, 100};
    EXPECT_OK(tn_shard_plan_create(&config, &u.plan));
    EXPECT_OK(tn_shard_plan_info_get(u.plan, &u.info));
    return u;
}

/* ---- bytes ---------------------------------------------------------------------------------- */

/* Never 0, which is what padding is. */
static uint8_t byte_at(int tensor, tn_plane plane, int is_scale, uint64_t offset) {
    uint64_t mixed = offset * 2654435761u + (uint64_t)(tensor * 8 + (int)plane * 2 + is_scale) * 97;
    mixed ^= mixed >> 15;
    return (uint8_t)(1 + mixed % 255);
}

static tn_plane_layout layout_of(const tn_shard_tensor *t, tn_plane plane, int64_t rows) {
    tn_plane_layout layout;
    EXPECT_OK(tn__format_layout(t->format, t->dtype, rows, t->cols, plane, &layout));
    return layout;
}

typedef struct plane_bytes {
    tn_plane_layout layout;
    uint8_t *data, *scale;
} plane_bytes;

/* Which rows of the tensor a line of stored scales (or a scale in it) belongs to. */
static int is_along_rows(const tn_shard_tensor *t, tn_plane plane) {
    if (t->format == TN_FORMAT_FP8_BLOCK_1D) return plane == TN_PLANE_ROW;
    return t->format == TN_FORMAT_NVFP4 && plane == TN_PLANE_COL;
}

static int64_t rows_per_scale(const tn_shard_tensor *t, tn_plane plane) {
    switch (t->format) {
    case TN_FORMAT_FP8_BLOCK_1D: return plane == TN_PLANE_ROW ? 1 : 128;
    case TN_FORMAT_FP8_BLOCK_2D: return 128;
    case TN_FORMAT_MXFP8: return plane == TN_PLANE_ROW ? 1 : 32;
    default: return 1; /* NVFP4 is never cut */
    }
}

static void *make_zeros(size_t bytes) {
    void *made = calloc(bytes ? bytes : 1, 1);
    assert_non_null(made);
    return made;
}

static plane_bytes make_plane(const tn_shard_tensor *t, int tensor, tn_plane plane) {
    plane_bytes out = {.layout = layout_of(t, plane, t->rows)};
    const tn_plane_layout *l = &out.layout;
    size_t size = l->scale_bytes ? tn_dtype_bytes(l->scale_dtype) : 0;
    out.data = make_zeros(l->data_bytes);
    out.scale = make_zeros(l->scale_bytes);
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

/* ---- shards --------------------------------------------------------------------------------- */

/* Elements of rows first ... first + rows - 1, as the plane of these rows alone has them. */
static void put_data(const tn_shard_tensor *t, const plane_bytes *whole, tn_plane plane,
                     const tn_shard_piece *piece, uint8_t *out) {
    tn_plane_layout alone = layout_of(t, plane, piece->row_count);
    int is_turned = whole->layout.rows != t->rows || alone.rows != piece->row_count;
    if (t->rows == piece->row_count) {
        memcpy(out, whole->data, whole->layout.data_bytes);
    } else if (plane == TN_PLANE_COL && t->format == TN_FORMAT_FP8_BLOCK_1D) {
        for (int64_t k = 0; k < t->cols; k++)
            memcpy(out + k * piece->row_count, whole->data + k * t->rows + piece->first_row,
                   (size_t)piece->row_count);
    } else {
        assert_false(is_turned);
        memcpy(out, whole->data + (size_t)piece->first_row * whole->layout.row_bytes,
               alone.data_bytes);
    }
}

static void put_scales(const tn_shard_tensor *t, const plane_bytes *whole, tn_plane plane,
                       const tn_shard_piece *piece, uint8_t *out) {
    tn_plane_layout alone = layout_of(t, plane, piece->row_count);
    size_t size = tn_dtype_bytes(alone.scale_dtype);
    int64_t skipped = piece->first_row / rows_per_scale(t, plane);
    if (t->format == TN_FORMAT_NVFP4 || t->format == TN_FORMAT_FP8_TENSOR) {
        memcpy(out, whole->scale, whole->layout.scale_bytes);
        return;
    }
    for (int64_t row = 0; row < alone.scale_rows; row++) {
        int64_t from = is_along_rows(t, plane) ? row * whole->layout.scale_stride + skipped
                                               : (row + skipped) * whole->layout.scale_stride;
        memcpy(out + (size_t)(row * alone.scale_stride) * size, whole->scale + (size_t)from * size,
               (size_t)alone.scale_cols * size);
    }
}

static void put_plane(const unit *u, int tensor, const plane_bytes *whole, tn_plane plane,
                      const tn_shard_piece *piece, uint8_t *shard) {
    const tn_shard_tensor *t = &u->tensor[tensor];
    int64_t data = plane == TN_PLANE_COL ? piece->col_data_offset : piece->data_offset;
    int64_t scale = plane == TN_PLANE_COL ? piece->col_scale_offset : piece->scale_offset;
    if (data >= 0) assert_int_equal(data % 16, 0);
    if (scale >= 0) assert_int_equal(scale % 16, 0);
    if (u->info.layout == TN_SHARD_FLAT) {
        size_t size = tn_dtype_bytes(t->dtype);
        if (piece->count)
            memcpy(shard + data, whole->data + (size_t)piece->first * size,
                   (size_t)piece->count * size);
        if (whole->layout.scale_bytes)
            memcpy(shard + scale, whole->scale, whole->layout.scale_bytes);
        return;
    }
    assert_int_equal(piece->first, piece->first_row * t->cols);
    assert_int_equal(piece->count, piece->row_count * t->cols);
    assert_int_equal(piece->count > 0, data >= 0);
    assert_int_equal(piece->count > 0 && whole->layout.scale_bytes > 0, scale >= 0);
    if (data >= 0) put_data(t, whole, plane, piece, shard + data);
    if (scale >= 0) put_scales(t, whole, plane, piece, shard + scale);
}

static int has_col(const tn_shard_tensor *t) {
    return t->format == TN_FORMAT_FP8_BLOCK_1D || t->format == TN_FORMAT_MXFP8 ||
           t->format == TN_FORMAT_NVFP4;
}

static tn_plane forward_plane(const tn_shard_tensor *t) {
    return t->format == TN_FORMAT_PLAIN ? TN_PLANE_DATA : TN_PLANE_ROW;
}

typedef struct planes {
    plane_bytes row[TENSORS_MAX], col[TENSORS_MAX];
} planes;

static uint8_t *make_shard(const unit *u, const planes *all, int rank) {
    size_t bytes;
    EXPECT_OK(tn_shard_bytes(u->plan, rank, &bytes));
    assert_int_equal(bytes % 16, 0);
    assert_true(bytes <= u->info.shard_bytes_max);
    uint8_t *shard = make_zeros(bytes);
    for (int i = 0; i < u->tensors; i++) {
        tn_shard_piece piece = TN_SHARD_PIECE_INIT;
        EXPECT_OK(tn_shard_piece_get(u->plan, rank, i, &piece));
        put_plane(u, i, &all->row[i], forward_plane(&u->tensor[i]), &piece, shard);
        if (has_col(&u->tensor[i])) put_plane(u, i, &all->col[i], TN_PLANE_COL, &piece, shard);
    }
    return shard;
}

/* ---- gathers -------------------------------------------------------------------------------- */

/* As tn_all_gather_uneven does. Segments are apart, and all that a rank sends is sent. */
static void gather(const unit *u, uint8_t *const *shards, tn_shard_phase phase, uint8_t *out) {
    const tn_segment *segments;
    size_t count, gathered = u->info.gathered_bytes[phase], sent[RANKS_MAX] = {0};
    uint8_t *seen = make_zeros(gathered);
    EXPECT_OK(tn_shard_segments(u->plan, phase, &segments, &count));
    for (size_t i = 0; i < count; i++) {
        const tn_segment *s = &segments[i];
        size_t offset, bytes;
        assert_in_range(s->rank, 0, u->ranks - 1);
        assert_true(s->count > 0 && s->offset + s->count <= gathered);
        EXPECT_OK(tn_shard_sent_bytes(u->plan, phase, s->rank, &offset, &bytes));
        assert_true(sent[s->rank] + s->count <= bytes);
        memcpy(out + s->offset, shards[s->rank] + offset + sent[s->rank], s->count);
        sent[s->rank] += s->count;
        for (size_t at = 0; at < s->count; at++)
            if (seen[s->offset + at]++) fail_msg("byte %zu is sent twice", s->offset + at);
    }
    for (int rank = 0; rank < u->ranks; rank++) {
        size_t offset, bytes, in_all;
        EXPECT_OK(tn_shard_sent_bytes(u->plan, phase, rank, &offset, &bytes));
        EXPECT_OK(tn_shard_bytes(u->plan, rank, &in_all));
        assert_int_equal(sent[rank], bytes);
        assert_true(offset + bytes <= in_all);
    }
    free(seen);
}

/* Takes what is expected out of the buffer; what is left must be 0. */
static void take_out(uint8_t *gathered, void *at, const uint8_t *expected, size_t bytes,
                     size_t alignment) {
    if (bytes == 0) return;
    assert_int_equal((size_t)((uint8_t *)at - gathered) % alignment, 0);
    assert_memory_equal(at, expected, bytes);
    memset(at, 0, bytes);
}

static void expect_planes(const unit *u, const planes *all, uint8_t *const *shards,
                          tn_shard_phase phase) {
    size_t bytes = u->info.gathered_bytes[phase];
    uint8_t *gathered = make_zeros(bytes);
    int is_flat = u->info.layout == TN_SHARD_FLAT;
    gather(u, shards, phase, gathered);
    for (int i = 0; i < u->tensors; i++) {
        int is_col = phase == TN_SHARD_BACKWARD && has_col(&u->tensor[i]);
        const plane_bytes *p = is_col ? &all->col[i] : &all->row[i];
        tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
        EXPECT_OK(tn_shard_plane_memory(u->plan, phase, i, shards[0], gathered, &memory));
        assert_int_equal(memory.plane, is_col ? TN_PLANE_COL : forward_plane(&u->tensor[i]));
        assert_int_equal(memory.data_bytes, p->layout.data_bytes);
        assert_int_equal(memory.scale_bytes, p->layout.scale_bytes);
        take_out(gathered, memory.data, p->data, memory.data_bytes, 256);
        if (is_flat && memory.scale_bytes)
            assert_memory_equal(memory.scale, p->scale, memory.scale_bytes);
        if (!is_flat) take_out(gathered, memory.scale, p->scale, memory.scale_bytes, 16);
    }
    for (size_t i = 0; i < bytes; i++)
        if (gathered[i]) fail_msg("byte %zu of the gathered buffer is not 0", i);
    free(gathered);
}

/* ---- buckets -------------------------------------------------------------------------------- */

/* Which rank the bucket's segments give each element to, and as which of its packed ones. */
static void expect_bucket(const unit *u) {
    const tn_segment *segments;
    size_t count, room = (size_t)u->info.bucket_elements;
    int64_t packed[RANKS_MAX] = {0};
    int *rank_of = make_zeros(room * sizeof *rank_of);
    int64_t *packed_at = make_zeros(room * sizeof *packed_at);
    EXPECT_OK(tn_shard_bucket_segments(u->plan, &segments, &count));
    for (size_t i = 0; i < count; i++) {
        for (size_t at = segments[i].offset; at < segments[i].offset + segments[i].count; at++) {
            if (at >= room || rank_of[at]) fail_msg("element %zu is given twice", at);
            rank_of[at] = segments[i].rank + 1;
            packed_at[at] = packed[segments[i].rank]++;
        }
    }
    for (int rank = 0; rank < u->ranks; rank++) {
        int64_t elements;
        EXPECT_OK(tn_shard_packed_elements(u->plan, rank, &elements));
        assert_int_equal(elements, packed[rank]);
        for (int i = 0; i < u->tensors; i++) {
            tn_shard_piece piece = TN_SHARD_PIECE_INIT;
            int64_t begin;
            EXPECT_OK(tn_shard_bucket_offset(u->plan, i, &begin));
            EXPECT_OK(tn_shard_piece_get(u->plan, rank, i, &piece));
            assert_int_equal(begin < 0, u->tensor[i].frozen);
            assert_int_equal(piece.packed_first < 0, u->tensor[i].frozen);
            if (begin < 0) continue;
            assert_int_equal(begin % 64, 0);
            if (piece.count > 0) assert_int_equal(piece.packed_first % 16, 0);
            for (int64_t at = 0; at < piece.count; at++) {
                if (rank_of[begin + piece.first + at] != rank + 1 ||
                    packed_at[begin + piece.first + at] != piece.packed_first + at)
                    fail_msg("element %lld of tensor %d is not rank %d's", (long long)at, i, rank);
            }
        }
    }
    free(rank_of);
    free(packed_at);
}

/* Pieces follow each other in the order of ranks or not, but have each element once. */
static void expect_partition(const unit *u) {
    for (int i = 0; i < u->tensors; i++) {
        int64_t sum = 0, whole = u->tensor[i].rows * u->tensor[i].cols;
        for (int rank = 0; rank < u->ranks; rank++) {
            tn_shard_piece piece = TN_SHARD_PIECE_INIT;
            EXPECT_OK(tn_shard_piece_get(u->plan, rank, i, &piece));
            if (piece.count > 0) assert_int_equal(piece.first, sum);
            sum += piece.count;
        }
        assert_int_equal(sum, whole);
    }
}

/* ---- units ---------------------------------------------------------------------------------- */

static void check(uint64_t seed) {
    uint64_t state = seed;
    unit u = random_unit(&state);
    planes all;
    uint8_t *shards[RANKS_MAX];
    for (int i = 0; i < u.tensors; i++) {
        all.row[i] = make_plane(&u.tensor[i], i, forward_plane(&u.tensor[i]));
        if (has_col(&u.tensor[i])) all.col[i] = make_plane(&u.tensor[i], i, TN_PLANE_COL);
    }
    for (int rank = 0; rank < u.ranks; rank++)
        shards[rank] = make_shard(&u, &all, rank);
    expect_partition(&u);
    expect_planes(&u, &all, shards, TN_SHARD_FORWARD);
    expect_planes(&u, &all, shards, TN_SHARD_BACKWARD);
    expect_bucket(&u);
    for (int rank = 0; rank < u.ranks; rank++)
        free(shards[rank]);
    for (int i = 0; i < u.tensors; i++) {
        free(all.row[i].data), free(all.row[i].scale);
        if (has_col(&u.tensor[i])) free(all.col[i].data), free(all.col[i].scale);
    }
    tn_shard_plan_destroy(u.plan);
}

static uint64_t seed_of_run, unit_of_run;
static int is_through;

static void every_byte_gets_to_its_place(void **state) {
    uint64_t first = setting("TENURE_FUZZ_FIRST", 0);
    long blocks = tn__host_live_blocks();
    (void)state;
    seed_of_run = setting("TENURE_FUZZ_SEED", 1);
    for (unit_of_run = first; unit_of_run < first + UNITS; unit_of_run++)
        check((seed_of_run << 32) + unit_of_run);
    assert_int_equal(tn__host_live_blocks(), blocks);
    is_through = 1;
}

static int say_how_to_replay(void **state) {
    (void)state;
    if (!is_through) {
        print_message("replay with TENURE_FUZZ_SEED=%llu TENURE_FUZZ_FIRST=%llu\n",
                      (unsigned long long)seed_of_run, (unsigned long long)unit_of_run);
    }
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(every_byte_gets_to_its_place, say_how_to_replay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
