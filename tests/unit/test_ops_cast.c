/* tn_quantize, tn_dequantize and tn_transpose on tensors of the host device. */
#include "ops_planes_support.h"

#include <math.h>
#include <semaphore.h>
#include <string.h>

#include "host_alloc.h"
#include "tenure_lifetime.h"

static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};
static const tn_dtype sources[] = {TN_FP32, TN_BF16, TN_FP16};

static uint64_t launches(const test_ops *ops) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(ops->device, &stats));
    return stats.calls[TN_CALL_LAUNCH];
}

static void expect_plane(const test_ops *ops, tn_tensor tensor, tn_plane plane,
                         const tn__matrix *src, tn_scale_mode mode, float epsilon) {
    test_plane fetched = test_fetch_plane(ops, tensor, plane);
    test_plane_expect_quantized(&fetched, src, mode, epsilon);
    test_plane_free(&fetched);
}

static void quantizing_makes_the_planes_that_are_asked_for(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (unsigned i = 0; i < 24; i++) {
        tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        tn_scope scope = test_ops_scope(&ops, TN_SCOPE_OP, "one");
        tn__matrix src = test_matrix_make(sources[i % 3], 131, 260, i);
        config.format = formats[i / 3 % 2];
        config.dtype = i % 5 ? TN_E4M3 : TN_E5M2;
        config.scale_mode = i % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2;
        config.rank = 3;
        config.shape[0] = 1, config.shape[1] = 131, config.shape[2] = 260;
        EXPECT_OK(tn_tensor_create(scope, &config, &args.dst));
        args.src = test_tensor_of(&ops, scope, &src);
        args.planes = i / 6; /* none of them means ROW */
        args.amax_epsilon = i % 7 ? 0.0f : 0.5f;
        EXPECT_OK(tn_quantize(&args, ops.stream));
        int wants_col = (args.planes & TN_QUANTIZE_COL) != 0;
        int wants_row = (args.planes & TN_QUANTIZE_ROW) != 0 || !wants_col;
        assert_int_equal(test_state(args.dst, TN_PLANE_ROW),
                         wants_row ? TN_PLANE_VALID : TN_PLANE_ABSENT);
        assert_int_equal(test_state(args.dst, TN_PLANE_COL),
                         wants_col ? TN_PLANE_VALID : TN_PLANE_ABSENT);
        for (int plane = TN_PLANE_ROW; plane <= TN_PLANE_COL; plane++) {
            if (!(plane == TN_PLANE_ROW ? wants_row : wants_col)) continue;
            expect_plane(&ops, args.dst, (tn_plane)plane, &src, config.scale_mode,
                         args.amax_epsilon);
        }
        test_matrix_free(&src);
        EXPECT_OK(tn_scope_close(scope));
    }
    test_ops_close_host(&ops);
}

static void quantizing_one_plane_anew_makes_the_other_stale(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix src = test_matrix_make(TN_BF16, 130, 70, 1);
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.dst = test_quantized(&ops, ops.scope, &src, TN_FORMAT_FP8_BLOCK_1D,
                              TN_QUANTIZE_ROW | TN_QUANTIZE_COL);
    args.src = test_tensor_of(&ops, ops.scope, &src);
    args.planes = TN_QUANTIZE_ROW;
    EXPECT_OK(tn_quantize(&args, ops.stream));
    assert_int_equal(test_state(args.dst, TN_PLANE_ROW), TN_PLANE_VALID);
    assert_int_equal(test_state(args.dst, TN_PLANE_COL), TN_PLANE_STALE);
    test_matrix_free(&src);
    test_ops_close_host(&ops);
}

static void dequantizing_gives_code_times_scale(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 12; i++) {
        tn_scope scope = test_ops_scope(&ops, TN_SCOPE_OP, "one");
        tn__matrix src = test_matrix_make(TN_FP32, 129, 130, 7);
        tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
        args.src =
            test_quantized(&ops, scope, &src, formats[i % 2], TN_QUANTIZE_ROW | TN_QUANTIZE_COL);
        args.plane = i / 2 % 2 ? TN_PLANE_COL : TN_PLANE_DATA;
        args.dst = test_plain(scope, sources[i / 4], 129, 130);
        EXPECT_OK(tn_dequantize(&args, ops.stream));
        tn_plane plane = args.plane == TN_PLANE_COL ? TN_PLANE_COL : TN_PLANE_ROW;
        test_plane quantized = test_fetch_plane(&ops, args.src, plane);
        tn__matrix result = test_fetch_matrix(&ops, args.dst);
        for (int64_t m = 0; m < 129; m++) {
            for (int64_t k = 0; k < 130; k++) { /* exact: powers of two, few bits */
                double value = (double)test_matrix_get(&result, m, k);
                assert_true(value == test_plane_value(&quantized, m, k));
            }
        }
        test_plane_free(&quantized);
        test_matrix_free(&src), test_matrix_free(&result);
        EXPECT_OK(tn_scope_close(scope));
    }
    test_ops_close_host(&ops);
}

/* Both ways, by the op and by tn_plane_require, to the bytes that quantizing makes. */
static void a_2d_plane_is_made_from_the_other(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 4; i++) {
        tn__matrix src = test_matrix_make(TN_BF16, 300, 515, 3);
        unsigned from = i % 2 ? TN_QUANTIZE_ROW : TN_QUANTIZE_COL;
        tn_transpose_args args = TN_TRANSPOSE_ARGS_INIT;
        args.tensor = test_quantized(&ops, ops.scope, &src, TN_FORMAT_FP8_BLOCK_2D, from);
        args.to = i % 2 ? TN_PLANE_COL : TN_PLANE_ROW;
        if (i / 2) EXPECT_OK(tn_transpose(&args, ops.stream));
        if (!(i / 2)) EXPECT_OK(tn_plane_require(args.tensor, args.to, ops.stream));
        expect_plane(&ops, args.tensor, args.to, &src, TN_SCALE_POW2, 0.0f);
        uint64_t before = launches(&ops);
        EXPECT_OK(tn_transpose(&args, ops.stream)); /* valid already */
        assert_int_equal(launches(&ops), before);
        test_matrix_free(&src);
    }
    test_ops_close_host(&ops);
}

static void reading_an_absent_2d_plane_derives_it(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix src = test_matrix_make(TN_BF16, 20, 200, 3);
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    args.src = test_quantized(&ops, ops.scope, &src, TN_FORMAT_FP8_BLOCK_2D, TN_QUANTIZE_ROW);
    args.plane = TN_PLANE_COL;
    args.dst = test_plain(ops.scope, TN_FP32, 20, 200);
    EXPECT_OK(tn_dequantize(&args, ops.stream));
    assert_int_equal(test_state(args.src, TN_PLANE_COL), TN_PLANE_VALID);
    args.src = test_quantized(&ops, ops.scope, &src, TN_FORMAT_FP8_BLOCK_1D, TN_QUANTIZE_ROW);
    EXPECT_STATUS(tn_dequantize(&args, ops.stream), TN_UNSUPPORTED);
    test_matrix_free(&src);
    test_ops_close_host(&ops);
}

/* (0, K) and (M, 0): the planes become valid, nothing is launched. */
static void empty_tensors_are_done_without_a_launch(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    for (int i = 0; i < 4; i++) {
        int64_t m = i % 2 ? 0 : 64, k = i % 2 ? 64 : 0;
        tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
        tn_dequantize_args dequantize = TN_DEQUANTIZE_ARGS_INIT;
        quantize.src = test_plain(ops.scope, TN_BF16, m, k);
        quantize.dst = test_fp8(ops.scope, formats[i / 2], TN_E4M3, m, k);
        quantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        test_declare_valid(&ops, quantize.src, TN_PLANE_DATA);
        uint64_t before = launches(&ops);
        EXPECT_OK(tn_quantize(&quantize, ops.stream));
        assert_int_equal(test_state(quantize.dst, TN_PLANE_ROW), TN_PLANE_VALID);
        assert_int_equal(test_state(quantize.dst, TN_PLANE_COL), TN_PLANE_VALID);
        dequantize.src = quantize.dst;
        dequantize.dst = test_plain(ops.scope, TN_FP32, m, k);
        EXPECT_OK(tn_dequantize(&dequantize, ops.stream));
        assert_int_equal(test_state(dequantize.dst, TN_PLANE_DATA), TN_PLANE_VALID);
        assert_int_equal(launches(&ops), before);
    }
    test_ops_close_host(&ops);
}

static void wait_for_post(void *gate) { sem_wait(gate); }

/* The stream is held at a gate, so nothing that the ops put on it can be done: they return all
 * the same, and their results are there once the gate is open. */
static void a_front_does_not_wait_for_the_device(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix src = test_matrix_make(TN_BF16, 130, 200, 3);
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_dequantize_args dequantize = TN_DEQUANTIZE_ARGS_INIT;
    sem_t gate;
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    quantize.src = test_tensor_of(&ops, ops.scope, &src);
    quantize.dst = test_fp8(ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 130, 200);
    dequantize.src = quantize.dst;
    dequantize.plane = TN_PLANE_COL;
    dequantize.dst = test_plain(ops.scope, TN_FP32, 130, 200);
    EXPECT_OK(tn__device_driver(ops.device)
                  ->host_task(tn__device_state(ops.device), wait_for_post, &gate, ops.stream));
    EXPECT_OK(tn_quantize(&quantize, ops.stream));
    EXPECT_OK(tn_dequantize(&dequantize, ops.stream));
    assert_int_equal(sem_post(&gate), 0);
    expect_plane(&ops, quantize.dst, TN_PLANE_COL, &src, TN_SCALE_POW2, 0.0f);
    test_matrix_free(&src);
    test_ops_close_host(&ops);
    sem_destroy(&gate);
}

/* Straight at the table, so that the only allocations are the task's and, now and then, the room
 * in the stream's queue: the second one fails until it is the queue that wanted it. */
static void a_task_that_finds_no_room_on_its_stream_is_freed(void **state) {
    (void)state;
    enum { TASKS_MAX = 100000 };
    test_ops ops = test_ops_open_host();
    float value = 1.0f;
    tn__matrix one = {TN_FP32, &value, 1, 1};
    tn__axpy_work work = {one, one, 0.0f};
    tn_status status = TN_OK;
    sem_t gate;
    long before = 0;
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    EXPECT_OK(tn__device_driver(ops.device)
                  ->host_task(tn__device_state(ops.device), wait_for_post, &gate, ops.stream));
    for (int i = 0; i < TASKS_MAX && status == TN_OK; i++) {
        before = tn__host_live_blocks();
        tn__host_alloc_fault(2, 0);
        status = tn__op_table_host.axpy(ops.device, &work, ops.stream);
    }
    tn__host_alloc_fault(0, 0);
    assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
    assert_int_equal(tn__host_live_blocks(), before);
    assert_int_equal(sem_post(&gate), 0);
    test_ops_close_host(&ops);
    sem_destroy(&gate);
}

/* A view of rows begins inside of a block. */
static void an_op_writes_rows_through_a_view(void **state) {
    (void)state;
    test_ops ops = test_ops_open_host();
    tn__matrix old = test_matrix_make(TN_FP32, 5, 7, 1), row = test_matrix_make(TN_FP32, 2, 7, 2);
    tn_tensor base = test_tensor_of(&ops, ops.scope, &old);
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    args.x = test_tensor_of(&ops, ops.scope, &row);
    EXPECT_OK(tn_tensor_view_rows(base, 2, 2, ops.scope, &args.y));
    EXPECT_OK(tn_convert(&args, ops.stream));
    tn__matrix now = test_fetch_matrix(&ops, base);
    for (int64_t r = 0; r < 5; r++) {
        for (int64_t c = 0; c < 7; c++) {
            const int is_in = r == 2 || r == 3;
            const float want =
                is_in ? test_matrix_get(&row, r - 2, c) : test_matrix_get(&old, r, c);
            assert_memory_equal(&want, (float *)now.data + r * 7 + c, sizeof want);
        }
    }
    test_matrix_free(&old), test_matrix_free(&row), test_matrix_free(&now);
    test_ops_close_host(&ops);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantizing_makes_the_planes_that_are_asked_for),
        cmocka_unit_test(quantizing_one_plane_anew_makes_the_other_stale),
        cmocka_unit_test(dequantizing_gives_code_times_scale),
        cmocka_unit_test(a_2d_plane_is_made_from_the_other),
        cmocka_unit_test(reading_an_absent_2d_plane_derives_it),
        cmocka_unit_test(empty_tensors_are_done_without_a_launch),
        cmocka_unit_test(a_front_does_not_wait_for_the_device),
        cmocka_unit_test(an_op_writes_rows_through_a_view),
        cmocka_unit_test(a_task_that_finds_no_room_on_its_stream_is_freed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
