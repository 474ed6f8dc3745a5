/* Clipping on the host: sums of squares in their stated order, of any length, added over tensors
 * and reduced over ranks; the factor; and bad input. */
#include "ops_planes_support.h"

#include "tenure_lifetime.h"
#include "tenure_train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = TN_SQUARE_SUMS, WIDTH = 1024 };

typedef struct fixture {
    test_ops ops;
    tn_square_sums_args squares;
    tn_clip_factor_args clip;
} fixture;

static fixture open_fixture(void) {
    fixture f = {.ops = test_ops_open_host()};
    f.squares = (tn_square_sums_args)TN_SQUARE_SUMS_ARGS_INIT;
    f.clip = (tn_clip_factor_args)TN_CLIP_FACTOR_ARGS_INIT;
    f.squares.sums = f.clip.sums = test_plain(f.ops.scope, TN_FP32, 1, BLOCKS);
    f.clip.norm = test_plain(f.ops.scope, TN_FP32, 1, 1);
    f.clip.factor = test_plain(f.ops.scope, TN_FP32, 1, 1);
    return f;
}

static void read_floats(const fixture *f, tn_tensor tensor, float *out, size_t count) {
    EXPECT_OK(
        tn_plane_read(tensor, TN_PLANE_DATA, out, count * sizeof *out, NULL, 0, f->ops.stream));
    EXPECT_OK(tn_stream_synchronize(f->ops.device, f->ops.stream));
}

/* All 262144 sums at once, each by its place. */
static void expect_sums(const tn__matrix *x, int64_t count, float *expected) {
    float *sums = calloc((size_t)BLOCKS * WIDTH, sizeof *sums);
    assert_non_null(sums);
    for (int64_t k = 0; k < count; k++) {
        const float value = test_matrix_get(x, k / x->cols, k % x->cols);
        float *sum = &sums[k / WIDTH % BLOCKS * WIDTH + k % WIDTH];
        *sum = fmaf(value, value, *sum);
    }
    for (int block = 0; block < BLOCKS; block++) {
        float *of = sums + (size_t)block * WIDTH;
        for (int half = WIDTH / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++)
                of[i] += of[i + half];
        expected[block] = of[0];
    }
    free(sums);
}

static void check_length(int64_t rows, int64_t cols, tn_dtype dtype) {
    float expected[BLOCKS], actual[BLOCKS];
    fixture f = open_fixture();
    tn__matrix x = test_matrix_make(dtype, rows, cols, (uint64_t)(rows + cols));
    f.squares.x = test_tensor_of(&f.ops, f.ops.scope, &x);
    expect_sums(&x, rows * cols, expected);
    EXPECT_OK(tn_square_sums(&f.squares, f.ops.stream));
    read_floats(&f, f.squares.sums, actual, BLOCKS);
    assert_memory_equal(actual, expected, sizeof actual);
    f.squares.accumulate = 1;
    EXPECT_OK(tn_square_sums(&f.squares, f.ops.stream));
    read_floats(&f, f.squares.sums, actual, BLOCKS);
    for (int i = 0; i < BLOCKS; i++)
        expected[i] = expected[i] + expected[i];
    assert_memory_equal(actual, expected, sizeof actual);
    test_matrix_free(&x);
    test_ops_close_host(&f.ops);
}

static void test_squares_are_added_in_their_stated_order(void **state) {
    (void)state;
    check_length(1, 1, TN_FP32);
    check_length(1, 1023, TN_BF16);
    check_length(5, 1025, TN_FP32);
    check_length(1030, 300, TN_FP16); /* beyond 262144: a second round of all blocks */
    check_length(0, 7, TN_FP32);
}

static void fill_sums(const fixture *f, float value) {
    float sums[BLOCKS];
    for (int i = 0; i < BLOCKS; i++)
        sums[i] = value;
    test_write(&f->ops, f->clip.sums, sums);
}

static void expect_clip(const fixture *f, float norm, float factor) {
    float actual[2];
    EXPECT_OK(tn_clip_factor(&f->clip, f->ops.stream));
    read_floats(f, f->clip.norm, &actual[0], 1);
    read_floats(f, f->clip.factor, &actual[1], 1);
    assert_true(memcmp(&actual[0], &norm, sizeof norm) == 0);
    assert_true(memcmp(&actual[1], &factor, sizeof factor) == 0);
}

static void test_the_factor_brings_the_norm_to_its_most(void **state) {
    (void)state;
    fixture f = open_fixture();
    fill_sums(&f, 4.0f); /* the norm is sqrt(1024) = 32 */
    f.clip.scale = 0.5f, f.clip.max_norm = 4.0f;
    expect_clip(&f, 16.0f, 0.125f);
    f.clip.max_norm = 16.0f;
    expect_clip(&f, 16.0f, 0.5f);
    f.clip.max_norm = INFINITY;
    expect_clip(&f, 16.0f, 0.5f);
    f.clip.max_norm = 1.0f;
    fill_sums(&f, 0.0f);
    expect_clip(&f, 0.0f, 0.5f);
    fill_sums(&f, INFINITY);
    expect_clip(&f, INFINITY, 0.0f);
    test_ops_close_host(&f.ops);
}

static void test_bad_input_is_refused_by_name(void **state) {
    (void)state;
    fixture f = open_fixture();
    tn_tensor right = f.squares.sums, wrong = test_plain(f.ops.scope, TN_FP32, 1, BLOCKS - 1);
    f.squares.x = test_plain(f.ops.scope, TN_FP32, 3, 3);
    EXPECT_STATUS(tn_square_sums(&f.squares, f.ops.stream), TN_INVALID_STATE);
    f.squares.sums = wrong;
    EXPECT_STATUS(tn_square_sums(&f.squares, f.ops.stream), TN_INVALID_ARGUMENT);
    f.squares.sums = right, f.squares.x = (tn_tensor){0};
    EXPECT_STATUS(tn_square_sums(&f.squares, f.ops.stream), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_square_sums(NULL, f.ops.stream), TN_INVALID_ARGUMENT);
    fill_sums(&f, 1.0f);
    f.clip.max_norm = 0.0f;
    EXPECT_STATUS(tn_clip_factor(&f.clip, f.ops.stream), TN_INVALID_ARGUMENT);
    f.clip.max_norm = NAN;
    EXPECT_STATUS(tn_clip_factor(&f.clip, f.ops.stream), TN_INVALID_ARGUMENT);
    f.clip.max_norm = 1.0f, f.clip.scale = INFINITY;
    EXPECT_STATUS(tn_clip_factor(&f.clip, f.ops.stream), TN_INVALID_ARGUMENT);
    f.clip.scale = 1.0f, f.clip.sums = wrong;
    EXPECT_STATUS(tn_clip_factor(&f.clip, f.ops.stream), TN_INVALID_ARGUMENT);
    f.clip.sums = right, f.clip.factor = wrong;
    EXPECT_STATUS(tn_clip_factor(&f.clip, f.ops.stream), TN_INVALID_ARGUMENT);
    test_ops_close_host(&f.ops);
}

/* Sums that lie within a block of the pool, as the ring's planes do: the pool is told of no use. */
static void test_an_output_may_be_adopted_from_within_a_block(void **state) {
    (void)state;
    fixture f = open_fixture();
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    tn_tensor block = test_plain(f.ops.scope, TN_FP32, 2, BLOCKS);
    tn_plane_view view;
    tn_lease lease;
    float actual[BLOCKS];
    EXPECT_OK(tn_lease_begin(block, TN_PLANE_DATA, TN_WRITE, f.ops.stream, &lease, &view));
    memory.data = (float *)view.data + BLOCKS, memory.data_bytes = BLOCKS * sizeof(float);
    memory.stream = f.ops.stream;
    config.rank = 2, config.shape[0] = 1, config.shape[1] = BLOCKS;
    EXPECT_OK(tn_tensor_adopt(f.ops.scope, &config, &memory, &f.squares.sums));
    tn__matrix x = test_matrix_make(TN_FP32, 1, 3, 5);
    f.squares.x = test_tensor_of(&f.ops, f.ops.scope, &x);
    EXPECT_OK(tn_square_sums(&f.squares, f.ops.stream));
    read_floats(&f, f.squares.sums, actual, BLOCKS);
    assert_true(actual[0] > 0.0f && actual[1] == 0.0f);
    EXPECT_OK(tn_tensor_destroy(f.squares.sums, f.ops.stream));
    EXPECT_OK(tn_lease_end(lease));
    test_matrix_free(&x);
    test_ops_close_host(&f.ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_squares_are_added_in_their_stated_order),
        cmocka_unit_test(test_the_factor_brings_the_norm_to_its_most),
        cmocka_unit_test(test_an_output_may_be_adopted_from_within_a_block),
        cmocka_unit_test(test_bad_input_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
