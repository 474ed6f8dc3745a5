/* Units whose tensors fill neither their places in a bucket nor a tile row of every rank. */
#include "host_alloc.h"
#include "model_support.h"

#include <math.h>

enum { UNITS = 2, WIDE_ROWS = 8, WIDE_COLS = 64, ODD_ROWS = 3, ODD_COLS = 5, LINE = 7 };

static rank_fixture all;

typedef struct uneven {
    tn_scope scope;
    tn_sharded_model *model;
} uneven;

static tn_sharded_tensor tensor_of(tn_scope scope, const char *name, int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_sharded_tensor tensor = {
        .name = name, .format = TN_FORMAT_PLAIN, .dtype = TN_FP32, .rows = rows, .cols = cols};
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor.initial));
    EXPECT_OK(tn_plane_fill(tensor.initial, TN_PLANE_DATA, 0, all.stream));
    return tensor;
}

/* Unit 0 fills the one bucket, and unit 1 takes it after it, with two tensors and a gap behind
 * each. */
static uneven uneven_open(tn_shard_layout layout) {
    tn_scope_config scope = TN_SCOPE_CONFIG_INIT;
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    uneven u = {.model = NULL};
    int number = -1;
    scope.pool = all.pool;
    EXPECT_OK(tn_scope_create(&scope, &u.scope));
    config.scope = u.scope, config.comm = all.comm, config.stream = all.stream;
    config.comm_stream = all.other;
    config.gradient_slots = 1;
    EXPECT_OK(tn_sharded_create(&config, &u.model));
    const tn_sharded_tensor wide[] = {tensor_of(u.scope, "wide", WIDE_ROWS, WIDE_COLS)};
    const tn_sharded_tensor odd[] = {tensor_of(u.scope, "odd", ODD_ROWS, ODD_COLS),
                                     tensor_of(u.scope, "line", 1, LINE)};
    for (int i = 0; i < UNITS; i++) {
        tn_sharded_unit_config unit = TN_SHARDED_UNIT_CONFIG_INIT;
        unit.tensors = i ? odd : wide, unit.tensor_count = i ? 2 : 1;
        unit.layout = layout;
        EXPECT_OK(tn_sharded_unit_add(u.model, &unit, &number));
    }
    EXPECT_OK(tn_sharded_seal(u.model));
    return u;
}

static void uneven_close(uneven *u) {
    ranks_wait(&all);
    EXPECT_OK(tn_sharded_destroy(u->model));
    EXPECT_OK(tn_scope_close(u->scope));
}

static void forward(const uneven *u, int unit) {
    EXPECT_OK(tn_sharded_forward_begin(u->model, unit));
    EXPECT_OK(tn_sharded_forward_end(u->model, unit));
}

/* Every byte 0x3f: each gradient is 0x1.7e7e7ep-1. */
static void begin_backward(const uneven *u, int unit) {
    tn_tensor gradient;
    EXPECT_OK(tn_sharded_backward_begin(u->model, unit));
    for (int i = 0; (gradient = tn_sharded_gradient(u->model, unit, i)).value; i++)
        EXPECT_OK(tn_plane_fill(gradient, TN_PLANE_DATA, 0x3f, all.stream));
}

static void pass_until_last_end(const uneven *u) {
    for (int i = 0; i < UNITS; i++)
        forward(u, i);
    for (int i = 0; i < UNITS; i++) {
        if (i > 0) EXPECT_OK(tn_sharded_backward_end(u->model, i - 1));
        begin_backward(u, i);
    }
}

static void pass(const uneven *u) {
    pass_until_last_end(u);
    EXPECT_OK(tn_sharded_backward_end(u->model, UNITS - 1));
}

static void update(const uneven *u) {
    tn_sharded_update_args args = TN_SHARDED_UPDATE_ARGS_INIT;
    args.max_norm = 1000.0f;
    EXPECT_OK(tn_sharded_update(u->model, &args));
}

static float first_of(tn_tensor tensor, size_t bytes) {
    float values[WIDE_ROWS * WIDE_COLS];
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_DATA, values, bytes, NULL, 0, all.stream));
    ranks_wait(&all);
    return values[0];
}

static void expect_norm(const uneven *u) {
    const float elements = WIDE_ROWS * WIDE_COLS + ODD_ROWS * ODD_COLS + LINE;
    const float expected = 0x1.7e7e7ep-1f * sqrtf(elements);
    const float norm = first_of(tn_sharded_norm(u->model), sizeof norm);
    assert_true(fabsf(norm - expected) <= 0x1p-18f * expected);
}

static void what_lies_between_gradients_counts_for_nothing(void **state) {
    (void)state;
    for (int layout = TN_SHARD_TILES; layout < TN_SHARD_LAYOUT_COUNT; layout++) {
        uneven u = uneven_open((tn_shard_layout)layout);
        pass(&u), update(&u);
        expect_norm(&u);
        uneven_close(&u);
    }
}

/* With TILES the first rank has all of a unit, and writes it; the others are to know of that, or
 * they would not gather with it what had been gathered ahead. */
static void ranks_without_a_part_gather_again_with_the_others(void **state) {
    (void)state;
    uneven u = uneven_open(TN_SHARD_TILES);
    for (int step = 0; step < 3; step++) {
        pass(&u);
        if (step == 0) forward(&u, 0); /* from then on gathered ahead here, for the next step */
        update(&u);
    }
    EXPECT_OK(tn_sharded_forward_begin(u.model, 0));
    const float last =
        first_of(tn_sharded_weight(u.model, 0, 0), sizeof(float) * WIDE_ROWS * WIDE_COLS);
    assert_true(last < -2.5e-3f);
    EXPECT_OK(tn_sharded_forward_end(u.model, 0));
    uneven_close(&u);
}

/* Host memory fails at each place of the last backward's end, one after the other. By itself, as
 * ranks would not fail alike. */
static void a_reduction_that_failed_is_made_again(void **state) {
    (void)state;
    if (all.count > 1) return;
    uneven u = uneven_open(TN_SHARD_TILES);
    tn_status status = TN_INVALID_STATE;
    long nth = 0;
    pass_until_last_end(&u);
    while (status != TN_OK) {
        tn__host_alloc_fault(++nth, 0);
        status = tn_sharded_backward_end(u.model, UNITS - 1);
        tn__host_alloc_fault(0, 0);
        assert_true(status == TN_OK || status == TN_OUT_OF_HOST_MEMORY);
    }
    assert_true(nth > 1);
    update(&u);
    expect_norm(&u);
    uneven_close(&u);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_lies_between_gradients_counts_for_nothing),
        cmocka_unit_test(ranks_without_a_part_gather_again_with_the_others),
        cmocka_unit_test(a_reduction_that_failed_is_made_again),
    };
    return RANKS_RUN(&all, tests);
}
