/* A unit of experts: what a grouped Linear leaves alive of sharded weights, and its gradients over
 * ranks against those of one rank that has all rows. One group is empty, and one is frozen. */
#include "model_support.h"

#include <stdlib.h>
#include <string.h>

#include "tenure_experts.h"

static rank_fixture all;

enum { EXPERTS = 4, N = 200, K = 136, ROWS = 70, FROZEN = 2 };

static const int64_t offsets[EXPERTS + 1] = {0, 24, 24, 40, ROWS};

typedef struct fixture {
    tn_scope scope, scratch;
    tn_tensor device_offsets, error;
    tn_tensor initial[EXPERTS];
    tn_sharded_model *sharded;
    tn_comm *comm;
} fixture;

static tn_scope open_scope(const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.pool = all.pool;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_tensor open_tensor(tn_scope scope, tn_format format, tn_dtype dtype, int64_t rows,
                             int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = format, config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

static tn_tensor open_filled(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols,
                             uint32_t seed) {
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    const size_t count = (size_t)(rows * cols);
    float *values = malloc(count * sizeof *values);
    assert_non_null(values);
    for (size_t i = 0; i < count; i++)
        values[i] = (float)((int)((i * 2654435761u + seed * 97u) >> 7 & 1023u) - 512) / 1024.0f;
    convert.x = open_tensor(scope, TN_FORMAT_PLAIN, TN_FP32, rows, cols);
    EXPECT_OK(tn_plane_write(convert.x, TN_PLANE_DATA, values, count * sizeof *values, NULL, 0,
                             all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    free(values);
    if (dtype == TN_FP32) return convert.x;
    convert.y = open_tensor(scope, TN_FORMAT_PLAIN, dtype, rows, cols);
    EXPECT_OK(tn_convert(&convert, all.stream));
    EXPECT_OK(tn_tensor_destroy(convert.x, all.stream));
    return convert.y;
}

static void open_device_words(fixture *f) {
    static const uint32_t no_error = 0;
    f->device_offsets = open_tensor(f->scope, TN_FORMAT_PLAIN, TN_BYTE, 1, (int64_t)sizeof offsets);
    f->error = open_tensor(f->scope, TN_FORMAT_PLAIN, TN_BYTE, 1, (int64_t)sizeof no_error);
    EXPECT_OK(tn_plane_write(f->device_offsets, TN_PLANE_DATA, offsets, sizeof offsets, NULL, 0,
                             all.stream));
    EXPECT_OK(
        tn_plane_write(f->error, TN_PLANE_DATA, &no_error, sizeof no_error, NULL, 0, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
}

static fixture open_fixture(void) {
    static const char *const names[EXPERTS] = {"first", "empty", "frozen", "last"};
    fixture f = {.scope = open_scope("experts"), .scratch = open_scope("scratch")};
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    tn_sharded_unit_config unit = TN_SHARDED_UNIT_CONFIG_INIT;
    tn_sharded_tensor tensors[EXPERTS];
    int number;
    open_device_words(&f);
    for (int i = 0; i < EXPERTS; i++) {
        f.initial[i] = open_filled(f.scope, TN_FP32, N, K, (uint32_t)i);
        tensors[i] = (tn_sharded_tensor){.name = names[i],
                                         .format = TN_FORMAT_FP8_BLOCK_2D,
                                         .dtype = TN_E4M3,
                                         .rows = N,
                                         .cols = K,
                                         .frozen = i == FROZEN,
                                         .initial = f.initial[i]};
    }
    f.comm = ranks_comm(&all, "experts", 0);
    config.scope = f.scope, config.comm = f.comm, config.stream = all.stream;
    EXPECT_OK(tn_sharded_create(&config, &f.sharded));
    unit.tensors = tensors, unit.tensor_count = EXPERTS;
    EXPECT_OK(tn_sharded_unit_add(f.sharded, &unit, &number));
    EXPECT_OK(tn_sharded_seal(f.sharded));
    return f;
}

static void close_fixture(fixture *f) {
    ranks_wait(&all);
    EXPECT_OK(tn_sharded_destroy(f->sharded));
    EXPECT_OK(tn_comm_destroy(f->comm));
    EXPECT_OK(tn_scope_close(f->scratch));
    EXPECT_OK(tn_scope_close(f->scope));
}

/* ---- a pass --------------------------------------------------------------------------------- */

typedef struct weights {
    tn_tensor weight[EXPERTS];
    tn_tensor gradient[EXPERTS];
} weights;

static tn_experts experts_of(const fixture *f, const weights *w) {
    tn_experts experts = TN_EXPERTS_INIT;
    experts.groups = EXPERTS;
    experts.offsets = offsets;
    experts.device_offsets = f->device_offsets, experts.error = f->error;
    experts.weights = w->weight;
    return experts;
}

/* Rows and their gradient are those of a rank. */
static void forward(const fixture *f, const weights *w, int rank, tn_grouped_saved *saved) {
    tn_grouped_linear_forward_args args = TN_GROUPED_LINEAR_FORWARD_ARGS_INIT;
    args.experts = experts_of(f, w);
    args.x = open_filled(f->scratch, TN_BF16, ROWS, K, 100u + (uint32_t)rank);
    args.y = open_tensor(f->scratch, TN_FORMAT_PLAIN, TN_BF16, ROWS, N);
    args.scope = args.saved_scope = f->scratch;
    EXPECT_OK(tn_grouped_linear_forward(&args, saved, all.stream));
    EXPECT_OK(tn_tensor_destroy(args.x, all.stream));
    EXPECT_OK(tn_tensor_destroy(args.y, all.stream));
}

static void backward(const fixture *f, const weights *w, int rank, tn_grouped_saved *saved) {
    tn_grouped_linear_backward_args args = TN_GROUPED_LINEAR_BACKWARD_ARGS_INIT;
    args.experts = experts_of(f, w);
    args.dy = open_filled(f->scratch, TN_BF16, ROWS, N, 200u + (uint32_t)rank);
    args.dx = open_tensor(f->scratch, TN_FORMAT_PLAIN, TN_BF16, ROWS, K);
    args.dweights = w->gradient;
    args.scope = f->scratch;
    EXPECT_OK(tn_grouped_linear_backward(&args, saved, NULL, all.stream));
    EXPECT_OK(tn_tensor_destroy(args.dy, all.stream));
    EXPECT_OK(tn_tensor_destroy(args.dx, all.stream));
}

static weights sharded_weights(const fixture *f) {
    weights w;
    for (int i = 0; i < EXPERTS; i++) {
        w.weight[i] = tn_sharded_weight(f->sharded, 0, i);
        w.gradient[i] = tn_sharded_gradient(f->sharded, 0, i);
    }
    return w;
}

/* Columns of one expert at a time, and none of them left. */
static void sharded_pass(const fixture *f) {
    const weights w = sharded_weights(f);
    tn_grouped_saved saved = TN_GROUPED_SAVED_INIT;
    tn_ledger before = TN_LEDGER_INIT, after = TN_LEDGER_INIT;
    EXPECT_OK(tn_scope_ledger(f->scope, &before));
    EXPECT_OK(tn_sharded_forward_begin(f->sharded, 0));
    forward(f, &w, all.rank, &saved);
    EXPECT_OK(tn_sharded_forward_end(f->sharded, 0));
    EXPECT_OK(tn_scope_ledger(f->scope, &after));
    assert_int_equal(after.total_bytes, before.total_bytes); /* what is gathered is in the ring */
    for (int i = 0; i < EXPERTS; i++)
        TN_EXPECT_PLANE_STATE(w.weight[i], TN_PLANE_COL, TN_PLANE_ABSENT);
    EXPECT_OK(tn_sharded_backward_begin(f->sharded, 0));
    backward(f, &w, all.rank, &saved);
    for (int i = 0; i < EXPERTS; i++)
        TN_EXPECT_PLANE_STATE(w.weight[i], TN_PLANE_COL, TN_PLANE_ABSENT);
    EXPECT_OK(tn_sharded_backward_end(f->sharded, 0));
    EXPECT_OK(tn_scope_ledger(f->scope, &after));
    assert_int_equal(after.data_bytes[TN_PLANE_COL] + after.scale_bytes[TN_PLANE_COL], 0);
    assert_int_equal(after.data_bytes[TN_PLANE_ROW] + after.scale_bytes[TN_PLANE_ROW], 0);
    TN_EXPECT_LIVE_BYTES(f->scratch, 0);
}

/* ---- against one rank ----------------------------------------------------------------------- */

/* The sum over ranks of the gradient of each expert, in rank order. */
static weights reference_sums(const fixture *f) {
    weights w = {.gradient = {{0}}};
    weights sums = {.gradient = {{0}}};
    for (int i = 0; i < EXPERTS; i++) {
        tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
        w.weight[i] = open_tensor(f->scratch, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, N, K);
        quantize.src = f->initial[i], quantize.dst = w.weight[i];
        EXPECT_OK(tn_quantize(&quantize, all.stream));
        if (i == FROZEN) {
            EXPECT_OK(tn_tensor_set_frozen(w.weight[i], 1));
            continue;
        }
        w.gradient[i] = open_tensor(f->scratch, TN_FORMAT_PLAIN, TN_FP32, N, K);
        sums.gradient[i] = open_tensor(f->scratch, TN_FORMAT_PLAIN, TN_FP32, N, K);
    }
    for (int rank = 0; rank < all.count; rank++) {
        tn_grouped_saved saved = TN_GROUPED_SAVED_INIT;
        forward(f, &w, rank, &saved);
        backward(f, &w, rank, &saved);
        for (int i = 0; i < EXPERTS; i++) {
            tn_convert_args convert = TN_CONVERT_ARGS_INIT;
            tn_axpy_args axpy = TN_AXPY_ARGS_INIT;
            if (i == FROZEN) continue;
            axpy.x = convert.x = w.gradient[i], axpy.y = convert.y = sums.gradient[i];
            EXPECT_OK(rank == 0 ? tn_convert(&convert, all.stream) : tn_axpy(&axpy, all.stream));
        }
    }
    return sums;
}

static float *read_floats(tn_tensor tensor, size_t count) {
    float *values = malloc(count * sizeof *values);
    assert_non_null(values);
    EXPECT_OK(
        tn_plane_read(tensor, TN_PLANE_DATA, values, count * sizeof *values, NULL, 0, all.stream));
    ranks_wait(&all);
    return values;
}

static void compare(const fixture *f, const weights *sums) {
    tn_sharded_unit_info unit = TN_SHARDED_UNIT_INFO_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_comm_wait(f->comm));
    EXPECT_OK(tn_sharded_unit_info_get(f->sharded, 0, &unit));
    if (unit.gradient.value == 0) return;
    EXPECT_OK(tn_tensor_info_get(unit.gradient, &info));
    float *actual = read_floats(unit.gradient, (size_t)(info.rows * info.cols));
    for (int i = 0; i < EXPERTS; i++) {
        tn_shard_piece piece = TN_SHARD_PIECE_INIT;
        EXPECT_OK(tn_shard_piece_get(unit.plan, all.rank, i, &piece));
        if (i == FROZEN || piece.count == 0) continue;
        float *expected = read_floats(sums->gradient[i], (size_t)N * K);
        assert_memory_equal(actual + piece.packed_first, expected + piece.first,
                            (size_t)piece.count * sizeof *actual);
        free(expected);
    }
    free(actual);
}

static void experts_leave_no_columns_and_have_one_ranks_gradients(void **state) {
    (void)state;
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    fixture f = open_fixture();
    sharded_pass(&f);
    const weights sums = reference_sums(&f);
    compare(&f, &sums);
    EXPECT_OK(tn_scope_close(f.scratch));
    f.scratch = open_scope("scratch");
    EXPECT_OK(tn_sharded_update(f.sharded, &update));
    for (int step = 1; step < 4; step++) {
        sharded_pass(&f);
        EXPECT_OK(tn_sharded_update(f.sharded, &update));
    }
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_leave_no_columns_and_have_one_ranks_gradients),
    };
    return RANKS_RUN(&all, tests);
}
