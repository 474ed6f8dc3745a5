/* Casts of parts of a weight on the host device: put together they are the cast of the whole,
 * whatever the cut, and nothing beside a part is touched. */
#include "ops_groups_support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS_MAX = 9, BEFORE = 0xA5 };

static int64_t tiles_of(int64_t extent) { return (extent + 127) / 128; }

/* A weight cut into ranges that follow each other; a rank may hold nothing. */
typedef struct sharded {
    tn__matrix weight;
    int ranks;
    int64_t cut[RANKS_MAX + 1];
    tn_dtype dtype;
    tn_scale_mode mode;
    float epsilon;
} sharded;

static int64_t amax_count(const sharded *s) {
    return tiles_of(s->weight.rows) * tiles_of(s->weight.cols);
}

/* A rank's elements as a tensor of one row. */
static tn_tensor part_of(const test_ops *ops, tn_scope scope, const sharded *s, int rank) {
    tn__matrix part = s->weight;
    part.rows = 1;
    part.cols = s->cut[rank + 1] - s->cut[rank];
    part.data = (char *)part.data + (size_t)s->cut[rank] * tn_dtype_bytes(part.dtype);
    return test_tensor_of(ops, scope, &part);
}

/* What the ranks would have after their reduction by maximum. */
static void reduce_amaxes(const test_ops *ops, tn_scope scope, const sharded *s, float *reduced) {
    float *own = malloc((size_t)amax_count(s) * sizeof *own);
    memset(reduced, 0, (size_t)amax_count(s) * sizeof *reduced);
    for (int rank = 0; rank < s->ranks; rank++) {
        tn_shard_amax_args args = TN_SHARD_AMAX_ARGS_INIT;
        args.src = part_of(ops, scope, s, rank);
        args.rows = s->weight.rows, args.cols = s->weight.cols;
        args.first = s->cut[rank];
        args.amax = test_plain(scope, TN_FP32, 1, amax_count(s));
        EXPECT_OK(tn_shard_amax(&args, ops->stream));
        test_read(ops, args.amax, own);
        for (int64_t i = 0; i < amax_count(s); i++) {
            assert_true(own[i] >= 0.0f);
            reduced[i] = fmaxf(reduced[i], own[i]);
        }
    }
    free(own);
}

/* Each rank writes into a copy of its own that is full of other bytes, and all scales. */
static void cast_part(const test_ops *ops, tn_scope scope, const sharded *s, int rank,
                      tn_tensor amax, const test_plane *whole) {
    const size_t bytes = whole->view.layout.data_bytes, scales = whole->view.layout.scale_bytes;
    uint8_t *data = malloc(bytes + 1), *scale = malloc(scales + 1);
    tn_shard_quantize_args args = TN_SHARD_QUANTIZE_ARGS_INIT;
    memset(data, BEFORE, bytes);
    args.src = part_of(ops, scope, s, rank);
    args.rows = s->weight.rows, args.cols = s->weight.cols;
    args.first = args.data_first = s->cut[rank];
    args.amax = amax;
    args.dtype = s->dtype, args.scale_mode = s->mode, args.amax_epsilon = s->epsilon;
    args.data = test_bytes(ops, scope, data, bytes);
    args.scale = test_plain(scope, TN_FP32, 1, (int64_t)(scales / sizeof(float)));
    EXPECT_OK(tn_shard_quantize(&args, ops->stream));
    test_read(ops, args.data, data);
    test_read(ops, args.scale, scale);
    for (int64_t i = 0; i < (int64_t)bytes; i++) {
        int is_held = i >= s->cut[rank] && i < s->cut[rank + 1];
        assert_int_equal(data[i], is_held ? ((uint8_t *)whole->view.data)[i] : BEFORE);
    }
    assert_memory_equal(scale, whole->view.scale, scales);
    free(data), free(scale);
}

static void check(const test_ops *ops, const sharded *s) {
    tn_scope scope = test_ops_scope(ops, TN_SCOPE_OP, "shards");
    test_plane whole = test_plane_make(TN_FORMAT_FP8_BLOCK_2D, TN_PLANE_ROW, s->dtype,
                                       s->weight.rows, s->weight.cols);
    float *reduced = malloc((size_t)amax_count(s) * sizeof *reduced);
    tn_tensor amax = test_plain(scope, TN_FP32, 1, amax_count(s));
    test_quantize(&s->weight, &whole, NULL, s->mode, s->epsilon);
    reduce_amaxes(ops, scope, s, reduced);
    test_write(ops, amax, reduced);
    for (int rank = 0; rank < s->ranks; rank++)
        cast_part(ops, scope, s, rank, amax, &whole);
    free(reduced);
    test_plane_free(&whole);
    EXPECT_OK(tn_scope_close(scope));
}

static uint32_t next_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Equal parts, then cuts anywhere: in a tile, in a row, at its ends, twice at one place. */
static void cut_at_random(sharded *s, unsigned seed) {
    uint32_t random = seed * 2654435761u + 1;
    int64_t count = s->weight.rows * s->weight.cols;
    s->ranks = 1 + (int)(seed % RANKS_MAX);
    for (int r = 0; r <= s->ranks; r++)
        s->cut[r] = count * r / s->ranks;
    for (int r = 1; seed % 3 && r < s->ranks; r++) {
        int64_t span = s->cut[r + 1] - s->cut[r - 1] + 1;
        s->cut[r] = s->cut[r - 1] + (int64_t)(next_random(&random) % (uint32_t)span);
        if (seed % 3 == 2) s->cut[r] = s->cut[r] / s->weight.cols * s->weight.cols;
        if (s->cut[r] < s->cut[r - 1]) s->cut[r] = s->cut[r - 1];
    }
}

static void parts_put_together_are_the_whole(void **state) {
    static const tn_dtype types[] = {TN_FP32, TN_BF16, TN_FP16};
    static const int64_t shapes[][2] = {{300, 200}, {1, 1}, {129, 515}, {256, 128}, {7, 1000}};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (unsigned seed = 0; seed < 45; seed++) {
        const int64_t *shape = shapes[seed % 5];
        sharded s = {.weight = test_matrix_make(types[seed % 3], shape[0], shape[1], seed),
                     .dtype = seed % 4 == 3 ? TN_E5M2 : TN_E4M3,
                     .mode = seed % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2,
                     .epsilon = seed % 7 == 5 ? 0.5f : 0.0f};
        cut_at_random(&s, seed);
        check(&ops, &s);
        test_matrix_free(&s.weight);
    }
    test_ops_close_host(&ops);
}

/* NaN is ignored, an infinity makes the tile's scale 1, a tile of zeros too. */
static void special_values_are_those_of_the_whole(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    sharded s = {.weight = test_matrix_make(TN_FP32, 260, 260, 3), .dtype = TN_E4M3, .ranks = 3};
    for (int64_t i = 0; i < 128; i++)
        for (int64_t j = 0; j < 128; j++)
            test_matrix_set(&s.weight, i, j, 0.0f);
    test_matrix_set(&s.weight, 5, 200, NAN);
    test_matrix_set(&s.weight, 200, 5, -INFINITY);
    test_matrix_set(&s.weight, 259, 259, 1e-40f);
    s.cut[1] = 131 * 260 + 7, s.cut[2] = 200 * 260 + 5, s.cut[3] = (int64_t)260 * 260;
    check(&ops, &s);
    test_matrix_free(&s.weight);
    test_ops_close_host(&ops);
}

static void the_skip_flag_leaves_data_and_scales(void **state) {
    const float flags[] = {1.0f, 0.0f};
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 2; i++) {
        uint8_t data[12], scale[16], before[16];
        tn__matrix part = test_matrix_make(TN_BF16, 3, 4, 1);
        tn_shard_quantize_args args = TN_SHARD_QUANTIZE_ARGS_INIT;
        memset(before, BEFORE, sizeof before);
        args.src = test_tensor_of(&ops, ops.scope, &part);
        args.rows = 3, args.cols = 4;
        args.amax = test_plain(ops.scope, TN_FP32, 1, 1);
        args.skip = test_plain(ops.scope, TN_FP32, 1, 1);
        args.data = test_bytes(&ops, ops.scope, before, sizeof data);
        args.scale = test_plain(ops.scope, TN_FP32, 1, 4);
        test_write(&ops, args.amax, &flags[0]);
        test_write(&ops, args.skip, &flags[i]);
        test_write(&ops, args.scale, before);
        EXPECT_OK(tn_shard_quantize(&args, ops.stream));
        test_read(&ops, args.data, data);
        test_read(&ops, args.scale, scale);
        assert_int_equal(memcmp(data, before, sizeof data) == 0, i == 0);
        assert_int_equal(memcmp(scale, before, sizeof scale) == 0, i == 0);
        test_matrix_free(&part);
    }
    test_ops_close_host(&ops);
}

/* ---- one scale ------------------------------------------------------------------------------- */

static tn_tensor one_scale(tn_scope scope, tn_scale_mode mode, int64_t rows) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    config.format = TN_FORMAT_FP8_TENSOR, config.dtype = TN_E4M3, config.scale_mode = mode;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = 45;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

static tn_tensor rows_of(const test_ops *ops, const tn__matrix *whole, int64_t first,
                         int64_t rows) {
    tn__matrix part = *whole;
    part.rows = rows;
    part.data = (char *)whole->data + (size_t)(first * whole->cols) * tn_dtype_bytes(whole->dtype);
    return test_tensor_of(ops, ops->scope, &part);
}

/* Casts some rows with that amax, or their own. */
static void cast_rows(const test_ops *ops, const tn__matrix *whole, int64_t first, int64_t rows,
                      tn_scale_mode mode, const float *amax, uint8_t *data, uint8_t *scale) {
    tn_quantize_args cast = TN_QUANTIZE_ARGS_INIT;
    cast.src = rows_of(ops, whole, first, rows);
    cast.dst = one_scale(ops->scope, mode, rows);
    if (amax) {
        cast.whole_amax = test_plain(ops->scope, TN_FP32, 1, 1);
        test_write(ops, cast.whole_amax, amax);
    }
    EXPECT_OK(tn_quantize(&cast, ops->stream));
    EXPECT_OK(
        tn_plane_read(cast.dst, TN_PLANE_ROW, data, (size_t)rows * 45, scale, 16, ops->stream));
    test_ops_wait(ops);
}

/* The amax of a tensor that only some rows of are here, or none. */
static void parts_of_a_tensor_with_one_scale_are_the_whole(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (unsigned seed = 0; seed < 12; seed++) {
        tn__matrix whole = test_matrix_make(seed % 2 ? TN_BF16 : TN_FP32, 20, 45, seed);
        tn_scale_mode mode = seed % 3 ? TN_SCALE_FP32 : TN_SCALE_POW2;
        uint8_t data[20 * 45], scale[16], part[5 * 45], part_scale[16];
        float amax = 0.0f;
        cast_rows(&ops, &whole, 0, 20, mode, NULL, data, scale);
        for (int64_t at = 0; at <= 20; at += 5) {
            tn_shard_amax_args args = TN_SHARD_AMAX_ARGS_INIT;
            float own = -1.0f;
            args.src = rows_of(&ops, &whole, at, at < 20 ? 5 : 0);
            args.rows = 20, args.cols = 45, args.first = at * 45;
            args.amax = test_plain(ops.scope, TN_FP32, 1, 1), args.whole = 1;
            EXPECT_OK(tn_shard_amax(&args, ops.stream));
            test_read(&ops, args.amax, &own);
            assert_true(own >= 0.0f && (at < 20 || own == 0.0f));
            amax = fmaxf(amax, own);
        }
        for (int64_t at = 0; at < 20; at += 5) {
            cast_rows(&ops, &whole, at, 5, mode, &amax, part, part_scale);
            assert_memory_equal(part, data + at * 45, sizeof part);
            assert_memory_equal(part_scale, scale, sizeof scale);
        }
        test_matrix_free(&whole);
    }
    test_ops_close_host(&ops);
}

/* ---- mistakes -------------------------------------------------------------------------------- */

static void each_mistake_is_refused_by_name(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn_tensor src = test_plain(ops.scope, TN_FP32, 1, 500);
    tn_tensor tiles = test_plain(ops.scope, TN_FP32, 1, 2),
              one = test_plain(ops.scope, TN_FP32, 1, 1);
    tn_tensor bytes = test_plain(ops.scope, TN_BYTE, 1, 600);
    tn_tensor fp8 = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 10, 200);
    tn_tensor scale = test_plain(ops.scope, TN_FP32, 1, 4);
    const tn_tensor all[] = {src, tiles, one, bytes, scale};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        test_declare_valid(&ops, all[i], TN_PLANE_DATA);
    tn_shard_amax_args amax = TN_SHARD_AMAX_ARGS_INIT;
    amax.src = src, amax.rows = 10, amax.cols = 200, amax.first = 1500, amax.amax = tiles;
    tn_shard_quantize_args cast = TN_SHARD_QUANTIZE_ARGS_INIT;
    cast.src = src, cast.rows = 10, cast.cols = 200, cast.first = 1500, cast.amax = tiles;
    cast.data = bytes, cast.data_first = 100, cast.scale = scale;
    tn_quantize_args part = TN_QUANTIZE_ARGS_INIT;
    part.src = src, part.dst = test_fp8(ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, 1, 500);
    part.whole_amax = one;
    tn_ledger before = test_ledger(ops.scope);
#define REFUSED(op, args, change, status, words)                                                   \
    do {                                                                                           \
        __typeof__(args) wrong = (args);                                                           \
        wrong.change;                                                                              \
        EXPECT_STATUS(op(&wrong, ops.stream), status);                                             \
        EXPECT_ERROR_HAS(words);                                                                   \
    } while (0)
    REFUSED(tn_shard_amax, amax, size--, TN_INVALID_ARGUMENT, "initializer macro");
    REFUSED(tn_shard_amax, amax, first = 1501, TN_INVALID_ARGUMENT, "the weight has 2000");
    REFUSED(tn_shard_amax, amax, first = -1, TN_INVALID_ARGUMENT, "from -1 on");
    REFUSED(tn_shard_amax, amax, rows = -1, TN_INVALID_ARGUMENT, "sizes of at least 0");
    REFUSED(tn_shard_amax, amax, cols = INT64_MAX, TN_INVALID_ARGUMENT, "the weight is");
    REFUSED(tn_shard_amax, amax, src = bytes, TN_INVALID_ARGUMENT, "src");
    REFUSED(tn_shard_amax, amax, src = fp8, TN_INVALID_ARGUMENT, "src");
    REFUSED(tn_shard_amax, amax, amax = one, TN_INVALID_ARGUMENT, "1 elements, expected 2");
    REFUSED(tn_shard_amax, amax, amax = bytes, TN_INVALID_ARGUMENT, "amax");
    REFUSED(tn_shard_amax, amax, whole = 2, TN_INVALID_ARGUMENT, "whole is 2, expected 0 or 1");
    REFUSED(tn_shard_amax, amax, whole = 1, TN_INVALID_ARGUMENT, "2 elements, expected 1");
    REFUSED(tn_shard_amax, amax, amax.value = 0, TN_STALE_HANDLE, "");
    REFUSED(tn_shard_quantize, cast, size++, TN_INVALID_ARGUMENT, "initializer macro");
    REFUSED(tn_shard_quantize, cast, dtype = TN_FP16, TN_INVALID_ARGUMENT, "dtype");
    REFUSED(tn_shard_quantize, cast, amax_epsilon = INFINITY, TN_INVALID_ARGUMENT, "amax_epsilon");
    REFUSED(tn_shard_quantize, cast, scale_mode = (tn_scale_mode)9, TN_INVALID_ARGUMENT, "mode");
    REFUSED(tn_shard_quantize, cast, data_first = 101, TN_INVALID_ARGUMENT,
            "expected 500 from 101");
    REFUSED(tn_shard_quantize, cast, data_first = -1, TN_INVALID_ARGUMENT, "from -1");
    REFUSED(tn_shard_quantize, cast, data = scale, TN_INVALID_ARGUMENT, "data");
    REFUSED(tn_shard_quantize, cast, scale = one, TN_INVALID_ARGUMENT, "with padding");
    REFUSED(tn_shard_quantize, cast, skip = tiles, TN_INVALID_ARGUMENT, "one tensor is given");
    REFUSED(tn_shard_quantize, cast, skip = scale, TN_INVALID_ARGUMENT, "one tensor is given");
    REFUSED(tn_shard_quantize, cast, src.value = 0, TN_STALE_HANDLE, "");
    REFUSED(tn_quantize, part, whole_amax = tiles, TN_INVALID_ARGUMENT, "2 elements, expected one");
    REFUSED(tn_quantize, part, whole_amax = bytes, TN_INVALID_ARGUMENT, "whole_amax");
    REFUSED(tn_quantize, part, scale = one, TN_INVALID_ARGUMENT, "exclude each other");
    REFUSED(tn_quantize, part, amax_history = one, TN_INVALID_ARGUMENT, "exclude each other");
    REFUSED(tn_quantize, part, dst = fp8, TN_INVALID_ARGUMENT, "dst");
    tn_ledger after = test_ledger(ops.scope);
    test_expect_same_ledger(&before, &after);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        assert_int_equal(test_state(all[i], TN_PLANE_DATA), TN_PLANE_VALID);
    EXPECT_OK(tn_shard_amax(&amax, ops.stream));
    EXPECT_OK(tn_shard_quantize(&cast, ops.stream));
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_put_together_are_the_whole),
        cmocka_unit_test(special_values_are_those_of_the_whole),
        cmocka_unit_test(the_skip_flag_leaves_data_and_scales),
        cmocka_unit_test(parts_of_a_tensor_with_one_scale_are_the_whole),
        cmocka_unit_test(each_mistake_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
