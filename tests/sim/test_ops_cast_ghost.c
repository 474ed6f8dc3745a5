/* Casts of lists, of shards and with a generator on the simulated device: leases put in every wait
 * between streams that their ranges need, and scratch lives for the call alone. */
#include "test_ops.h"

#include "tenure_grouped.h"

enum { ROWS = 1000, COLS = 520, ROUNDS = 6, COUNT = TN_QUANTIZE_LIST_MAX };

static tn_tensor valid(const test_ops *ops, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_plain(ops->scope, dtype, rows, cols);
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

typedef struct two_streams {
    test_ops ops;
    tn_stream stream[2];
} two_streams;

static two_streams open_streams(void) {
    two_streams s = {.ops = test_ops_open(test_open_sim(0, 0))};
    s.stream[0] = s.ops.stream;
    EXPECT_OK(tn_stream_create(s.ops.device, &s.stream[1]));
    return s;
}

static void close_streams(two_streams *s) {
    const test_sim *sim = test_sim_get();
    tn_device *device = s->ops.device;
    if (sim->race_count()) fail_msg("race: %s", sim->race_text(0));
    EXPECT_OK(tn_device_synchronize(device));
    EXPECT_OK(tn_stream_destroy(device, s->stream[1]));
    test_ops_close(&s->ops);
    test_close_sim(device);
}

/* The planes are written and the state is read and written in each round. */
static void stochastic_casts_on_alternating_streams_have_no_races(void **state) {
    static const tn_format formats[] = {TN_FORMAT_NVFP4, TN_FORMAT_MXFP8, TN_FORMAT_FP8_TENSOR,
                                        TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_FP8_BLOCK_2D};
    (void)state;
    two_streams s = open_streams();
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = valid(&s.ops, TN_BF16, ROWS, COLS);
    args.random = valid(&s.ops, TN_BYTE, 1, 16);
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        tn_dtype dtype = formats[f] == TN_FORMAT_NVFP4 ? TN_E2M1 : TN_E4M3;
        args.dst = test_fp8(s.ops.scope, formats[f], dtype, ROWS, COLS);
        for (int i = 0; i < ROUNDS; i++)
            EXPECT_OK(tn_quantize(&args, s.stream[i % 2]));
    }
    close_streams(&s);
}

static void lists_on_alternating_streams_have_no_races(void **state) {
    (void)state;
    two_streams s = open_streams();
    tn_quantize_list_args args = TN_QUANTIZE_LIST_ARGS_INIT;
    tn_tensor src[COUNT], dst[COUNT];
    for (int i = 0; i < COUNT; i++) {
        src[i] = valid(&s.ops, TN_BF16, 1 + i * 5, 40 + i);
        dst[i] = test_fp8(s.ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 1 + i * 5, 40 + i);
    }
    args.src = src, args.dst = dst, args.count = COUNT;
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    args.skip = valid(&s.ops, TN_FP32, 1, 1);
    args.scope = s.ops.scope;
    for (int i = 0; i < COUNT; i++) {
        test_declare_valid(&s.ops, dst[i], TN_PLANE_ROW);
        EXPECT_OK(tn_transpose(
            &(tn_transpose_args){sizeof(tn_transpose_args), dst[i], TN_PLANE_COL}, s.stream[0]));
    }
    tn_ledger before = test_ledger(s.ops.scope);
    for (int i = 0; i < ROUNDS; i++) {
        EXPECT_OK(tn_quantize_list(&args, s.stream[i % 2]));
        tn_ledger after = test_ledger(s.ops.scope);
        test_expect_same_ledger(&before, &after);
    }
    close_streams(&s);
}

/* Three ranks' parts of one weight, whose amaxes and bytes lie in tensors of their own. */
static void shards_on_alternating_streams_have_no_races(void **state) {
    static const int64_t cut[] = {0, 1000, 300000, (int64_t)ROWS * COLS};
    (void)state;
    two_streams s = open_streams();
    for (int rank = 0; rank < 3; rank++) {
        tn_shard_amax_args amax = TN_SHARD_AMAX_ARGS_INIT;
        tn_shard_quantize_args cast = TN_SHARD_QUANTIZE_ARGS_INIT;
        amax.src = cast.src = valid(&s.ops, TN_FP32, 1, cut[rank + 1] - cut[rank]);
        amax.rows = cast.rows = ROWS, amax.cols = cast.cols = COLS;
        amax.first = cast.first = cast.data_first = cut[rank];
        amax.amax = cast.amax = test_plain(s.ops.scope, TN_FP32, 8, 5);
        cast.data = valid(&s.ops, TN_BYTE, ROWS, COLS);
        cast.scale = test_plain(s.ops.scope, TN_FP32, 8, 8);
        for (int i = 0; i < ROUNDS; i++) {
            EXPECT_OK(tn_shard_amax(&amax, s.stream[i % 2]));
            EXPECT_OK(tn_shard_quantize(&cast, s.stream[(i + rank) % 2]));
        }
    }
    close_streams(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stochastic_casts_on_alternating_streams_have_no_races),
        cmocka_unit_test(lists_on_alternating_streams_have_no_races),
        cmocka_unit_test(shards_on_alternating_streams_have_no_races),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
