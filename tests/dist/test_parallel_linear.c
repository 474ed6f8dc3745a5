/* Column- and row-parallel Linear on any count of ranks: each bit is that of tn_linear_forward and
 * _backward on one rank with all rows and this rank's part of the weight; where sums go over ranks,
 * that of the ranks' products added in their order.
 *
 * Where rows are no whole tiles, wgrad is that of one rank whose rows lie in the ranks' tiles, with
 * zeros between: these change no scale and add nothing.
 */
#include "parallel_support.h"

#include <string.h>

enum { K = 136, N = 72 }; /* of one rank's part of the dimension that is cut, K or N of the other */

static rank_fixture all;

typedef struct setup {
    const char *what;
    tn_format format;
    tn_dtype partial;
    int recompute, keep_gathered, side, frozen, no_dx, delay;
    int64_t rows[PARALLEL_RANKS_MAX];
} setup;

#define TILES                                                                                      \
    { 128, 128, 128, 128, 128, 128, 128, 128 }
#define ANY                                                                                        \
    { 5, 130, 127, 77, 0, 2, 3, 4 }

static const setup setups[] = {
    {"tiles", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 0, 0, 0, 0, 0, TILES},
    {"any rows", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 0, 0, 0, 0, 0, ANY},
    {"any rows, on another stream", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 0, 1, 0, 0, 0, ANY},
    {"recomputed", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 1, 0, 0, 0, 0, 0, ANY},
    {"gathered once", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 1, 0, 0, 0, 0, ANY},
    {"gathered once, tiles", TN_FORMAT_FP8_BLOCK_2D, TN_BF16, 0, 1, 1, 0, 0, 0, TILES},
    {"frozen", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 0, 0, 1, 0, 0, ANY},
    {"without dx", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 0, 0, 0, 1, 0, ANY},
    {"plain", TN_FORMAT_PLAIN, TN_FP32, 0, 0, 0, 0, 0, 0, ANY},
    {"delayed", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 0, 0, 0, 0, 1, TILES},
    {"delayed, any rows, on another stream", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 0, 1, 0, 0, 1,
     ANY},
    {"delayed, gathered once", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 1, 0, 0, 0, 1, ANY},
    {"delayed, recomputed", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 1, 0, 0, 0, 0, 1, ANY},
    {"delayed, plain", TN_FORMAT_PLAIN, TN_FP32, 0, 0, 0, 0, 0, 1, ANY},
    {"plain, bf16 sums", TN_FORMAT_PLAIN, TN_BF16, 0, 0, 1, 0, 0, 0, TILES},
};

/* What one rank makes of all takes longer with each rank: three or more have a third of it. */
static int is_run(size_t i) { return all.count <= 2 || i % 3 == (size_t)all.count % 3; }

/* ---- one rank with all rows ------------------------------------------------------------------ */

typedef struct reference {
    parallel_matrix y, dx, dweight, dbias;
} reference;

static void forget(reference *r) {
    parallel_free(&r->y), parallel_free(&r->dx);
    parallel_free(&r->dweight), parallel_free(&r->dbias);
}

/* y and dx in `dtype`, then as fp32. */
static reference layer_of(const setup *way, const parallel_matrix *x, const parallel_matrix *w,
                          const parallel_matrix *bias, const parallel_matrix *dy, tn_dtype dtype) {
    tn_scope scope = parallel_scope(&all, TN_SCOPE_OP, "one rank");
    tn_linear_forward_args forward = TN_LINEAR_FORWARD_ARGS_INIT;
    tn_linear_backward_args backward = TN_LINEAR_BACKWARD_ARGS_INIT;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    reference r;
    forward.x = parallel_tensor(&all, scope, TN_BF16, x);
    forward.w.weight = parallel_weight(&all, scope, way->format, w);
    if (bias) forward.w.bias = parallel_tensor(&all, scope, TN_FP32, bias);
    forward.y = test_plain(scope, dtype, x->rows, w->rows);
    forward.common.scope = forward.common.saved_scope = scope;
    backward.dy = parallel_tensor(&all, scope, TN_BF16, dy);
    backward.w = forward.w, backward.x = forward.x;
    backward.dx = test_plain(scope, dtype, x->rows, x->cols);
    backward.gradient.dweight = test_plain(scope, TN_FP32, w->rows, w->cols);
    backward.gradient.dbias = test_plain(scope, TN_FP32, 1, w->rows);
    backward.common = forward.common;
    EXPECT_OK(tn_linear_forward(&forward, &saved, all.stream));
    EXPECT_OK(tn_linear_backward(&backward, &saved, NULL, all.stream));
    r = (reference){parallel_fetch(&all, forward.y), parallel_fetch(&all, backward.dx),
                    parallel_fetch(&all, backward.gradient.dweight),
                    parallel_fetch(&all, backward.gradient.dbias)};
    EXPECT_OK(tn_scope_close(scope));
    return r;
}

/* dweight, of rows that lie in tiles, and twice that for a gradient that is added to itself. */
static parallel_matrix dweight_of(const setup *way, const parallel_matrix *x,
                                  const parallel_matrix *w, const parallel_matrix *dy) {
    const int in_tiles = way->format != TN_FORMAT_PLAIN;
    parallel_matrix xs = in_tiles ? parallel_in_tiles(x, way->rows, all.count)
                                  : parallel_part(x, 0, x->rows, 0, x->cols);
    parallel_matrix dys = in_tiles ? parallel_in_tiles(dy, way->rows, all.count)
                                   : parallel_part(dy, 0, dy->rows, 0, dy->cols);
    reference r = layer_of(way, &xs, w, NULL, &dys, TN_FP32);
    parallel_matrix dweight = parallel_part(&r.dweight, 0, w->rows, 0, w->cols);
    forget(&r);
    parallel_free(&xs), parallel_free(&dys);
    return dweight;
}

/* ---- the layer of all ranks ------------------------------------------------------------------ */

typedef struct layer {
    const setup *way;
    tn_parallel parallel;
    tn_scope io, saved_scope, op;
    tn_linear_forward_args forward;
    tn_linear_backward_args backward;
    tn_linear_saved saved;
} layer;

/* x, y, dy and dx are those of the whole problem; the call sees this rank's parts. */
static layer open_layer(const setup *way, const parallel_matrix *x, const parallel_matrix *w,
                        const parallel_matrix *bias, const parallel_matrix *dy) {
    layer l = {.way = way, .parallel = TN_PARALLEL_INIT};
    l.io = parallel_scope(&all, TN_SCOPE_STEP, "io");
    l.saved_scope = parallel_scope(&all, TN_SCOPE_SAVED, "saved");
    l.op = parallel_scope(&all, TN_SCOPE_OP, "op");
    l.parallel.sequence.comm = all.comm, l.parallel.sequence.rows = way->rows;
    l.parallel.stream = way->side ? all.other : NULL;
    l.parallel.partial_dtype = way->partial;
    l.parallel.keep_gathered = way->keep_gathered;
    l.forward = (tn_linear_forward_args)TN_LINEAR_FORWARD_ARGS_INIT;
    l.forward.x = parallel_tensor(&all, l.io, TN_BF16, x);
    l.forward.w.weight = parallel_weight(&all, l.io, way->format, w);
    EXPECT_OK(tn_tensor_set_frozen(l.forward.w.weight, way->frozen));
    l.forward.w.bias = parallel_tensor(&all, l.io, TN_FP32, bias);
    l.forward.common.scope = l.op, l.forward.common.saved_scope = l.saved_scope;
    l.forward.common.recompute = way->recompute;
    l.backward = (tn_linear_backward_args)TN_LINEAR_BACKWARD_ARGS_INIT;
    l.backward.x = l.forward.x, l.backward.w = l.forward.w, l.backward.common = l.forward.common;
    l.backward.dy = parallel_tensor(&all, l.io, TN_BF16, dy);
    if (!way->no_dx) l.backward.dx = test_plain(l.io, TN_BF16, x->rows, x->cols);
    if (!way->frozen) l.backward.gradient.dweight = test_plain(l.io, TN_FP32, w->rows, w->cols);
    l.backward.gradient.dbias = test_plain(l.io, TN_FP32, 1, w->rows);
    l.backward.gradient.delay = way->delay;
    l.forward.y = test_plain(l.io, TN_BF16, dy->rows, w->rows);
    return l;
}

static void expect_nothing_left(const layer *l) {
    assert_int_equal(test_ledger(l->op).tensors, 0);
    assert_int_equal(test_ledger(l->saved_scope).tensors, 0);
    assert_int_equal(test_ledger(l->io).leases, 0);
}

static void close_layer(layer *l) {
    expect_nothing_left(l);
    ranks_wait(&all);
    EXPECT_OK(tn_scope_close(l->op));
    EXPECT_OK(tn_scope_close(l->saved_scope));
    EXPECT_OK(tn_scope_close(l->io));
}

/* On every rank, before anything is sent. */
static void expect_scales_refused(const layer *l, int is_column) {
    tn_linear_forward_args args = l->forward;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    args.w.x_scale.scale = args.w.bias;
    EXPECT_STATUS(is_column ? tn_column_linear_forward(&l->parallel, &args, &saved, all.stream)
                            : tn_row_linear_forward(&l->parallel, &args, &saved, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("delayed scaling is given with w.weight");
}

static void run_back(layer *l, int is_column, tn_delayed_gradient *delayed) {
    EXPECT_OK(
        is_column
            ? tn_column_linear_backward(&l->parallel, &l->backward, &l->saved, delayed, all.stream)
            : tn_row_linear_backward(&l->parallel, &l->backward, &l->saved, delayed, all.stream));
    assert_int_equal(l->saved.x.value, 0);
}

/* What is left needs nothing that the layer was told, and is done on any stream. */
static void run_late(const layer *l, tn_delayed_gradient *delayed) {
    const tn_tensor dweight = l->backward.gradient.dweight;
    if (!l->backward.gradient.accumulate)
        assert_int_equal(test_state(dweight, TN_PLANE_DATA), TN_PLANE_ABSENT);
    assert_int_equal(delayed->dweight.value, dweight.value);
    EXPECT_OK(tn_weight_gradient(delayed, l->op, all.other));
    EXPECT_STATUS(tn_weight_gradient(delayed, l->op, all.other), TN_INVALID_STATE);
}

/* Twice: the second time gradients are added. */
static void run_layer(layer *l, int is_column) {
    expect_scales_refused(l, is_column);
    for (int i = 0; i < 2; i++) {
        tn_delayed_gradient delayed = TN_DELAYED_GRADIENT_INIT;
        l->backward.gradient.accumulate = i;
        EXPECT_OK(is_column
                      ? tn_column_linear_forward(&l->parallel, &l->forward, &l->saved, all.stream)
                      : tn_row_linear_forward(&l->parallel, &l->forward, &l->saved, all.stream));
        run_back(l, is_column, &delayed);
        if (l->way->delay) run_late(l, &delayed);
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */

/* What is left could not move there, and that would show behind the collectives only. */
static void expect_another_pool_refused(layer *l, tn_delayed_gradient *delayed) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_pool *pool = test_open_pool(all.device, TN_BACKING_AUTO, 0);
    tn_scope scope;
    config.pool = pool;
    EXPECT_OK(tn_scope_create(&config, &scope));
    l->backward.common.saved_scope = scope;
    EXPECT_STATUS(
        tn_column_linear_backward(&l->parallel, &l->backward, &l->saved, delayed, all.stream),
        TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("common.scope and common.saved_scope are of different pools");
    l->backward.common.saved_scope = (tn_scope){0};
    EXPECT_OK(tn_scope_close(scope));
    EXPECT_OK(tn_pool_destroy(pool));
}

static void a_delay_without_a_place_is_refused(void **state) {
    static const setup way = {"refused", TN_FORMAT_FP8_BLOCK_2D, TN_FP32, 0, 0, 0, 0, 0, 1, TILES};
    parallel_matrix x = parallel_numbers(128, K, 1), w = parallel_numbers(N, K, 2);
    parallel_matrix bias = parallel_numbers(1, N, 3);
    parallel_matrix dy = parallel_numbers((int64_t)128 * all.count, N, 4);
    layer l = open_layer(&way, &x, &w, &bias, &dy);
    tn_delayed_gradient delayed = TN_DELAYED_GRADIENT_INIT;
    tn_linear_backward_args *args = &l.backward;
    const tn_comm_stats before = ranks_stats(&all);
    (void)state;
    EXPECT_STATUS(tn_column_linear_backward(&l.parallel, args, &l.saved, NULL, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("delayed is NULL");
    delayed.dweight = args->gradient.dweight;
    EXPECT_STATUS(tn_column_linear_backward(&l.parallel, args, &l.saved, &delayed, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("still holds another gradient");
    delayed.dweight = (tn_tensor){0}, args->common.saved_scope = (tn_scope){0};
    EXPECT_STATUS(tn_column_linear_backward(&l.parallel, args, &l.saved, &delayed, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("common.saved_scope is {0}");
    expect_another_pool_refused(&l, &delayed);
    args->gradient.dweight = (tn_tensor){0};
    EXPECT_STATUS(tn_column_linear_backward(&l.parallel, args, &l.saved, &delayed, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("is {0}, but is to be delayed");
    args->gradient.delay = 2;
    EXPECT_STATUS(tn_column_linear_backward(&l.parallel, args, &l.saved, &delayed, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("expected 0 or 1");
    const tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&after, &before, sizeof before);
    parallel_free(&x), parallel_free(&w), parallel_free(&bias), parallel_free(&dy);
    close_layer(&l);
}

static parallel_matrix twice(parallel_matrix matrix) {
    parallel_add(&matrix, &matrix);
    return matrix;
}

static parallel_matrix own_rows(const parallel_matrix *of, const int64_t *rows) {
    return parallel_part(of, parallel_first(rows, all.rank), rows[all.rank], 0, of->cols);
}

/* ---- column-parallel ------------------------------------------------------------------------- */

static void column(const setup *way) {
    const int64_t total = parallel_first(way->rows, all.count), whole = (int64_t)N * all.count;
    parallel_matrix x = parallel_numbers(total, K, 1), w = parallel_numbers(whole, K, 2);
    parallel_matrix bias = parallel_numbers(1, whole, 3), dy = parallel_numbers(total, whole, 4);
    parallel_matrix sum = parallel_zeros(total, K), own_x = own_rows(&x, way->rows);
    for (int r = 0; r < all.count; r++) {
        parallel_matrix wr = parallel_part(&w, (int64_t)r * N, N, 0, K);
        parallel_matrix br = parallel_part(&bias, 0, 1, (int64_t)r * N, N);
        parallel_matrix dyr = parallel_part(&dy, 0, total, (int64_t)r * N, N);
        reference one = layer_of(way, &x, &wr, &br, &dyr, TN_FP32);
        if (way->partial == TN_BF16) parallel_round(&one.dx);
        parallel_add(&sum, &one.dx);
        if (r == all.rank) {
            layer l = open_layer(way, &own_x, &wr, &br, &dyr);
            l.forward.y = test_plain(l.io, TN_BF16, total, N);
            run_layer(&l, 1);
            parallel_round(&one.y);
            parallel_expect(&all, way->what, l.forward.y, parallel_part(&one.y, 0, total, 0, N));
            parallel_expect(&all, "dbias", l.backward.gradient.dbias,
                            twice(parallel_part(&one.dbias, 0, 1, 0, N)));
            if (!way->frozen)
                parallel_expect(&all, "dweight", l.backward.gradient.dweight,
                                twice(dweight_of(way, &x, &wr, &dyr)));
            parallel_free(&own_x);
            if (!way->no_dx) own_x = parallel_fetch(&all, l.backward.dx);
            close_layer(&l);
        }
        parallel_free(&wr), parallel_free(&br), parallel_free(&dyr);
        forget(&one);
    }
    parallel_round(&sum);
    if (!way->no_dx) {
        parallel_matrix expected = own_rows(&sum, way->rows);
        assert_memory_equal(own_x.at, expected.at,
                            (size_t)(expected.rows * expected.cols) * sizeof(float));
        parallel_free(&expected), parallel_free(&own_x);
    }
    parallel_free(&x), parallel_free(&w), parallel_free(&bias), parallel_free(&dy);
    parallel_free(&sum);
}

static void column_parallel_is_one_rank_with_all_rows(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++)
        if (is_run(i)) column(&setups[i]);
}

/* ---- row-parallel ---------------------------------------------------------------------------- */

/* The ranks' sums of their rows of dy, added in their order. */
static parallel_matrix dbias_of(const parallel_matrix *dy, const int64_t *rows) {
    tn_scope scope = parallel_scope(&all, TN_SCOPE_OP, "dbias");
    parallel_matrix sum = parallel_zeros(1, dy->cols);
    for (int r = 0; r < all.count; r++) {
        tn_bias_gradient_args args = TN_BIAS_GRADIENT_ARGS_INIT;
        parallel_matrix part = parallel_part(dy, parallel_first(rows, r), rows[r], 0, dy->cols);
        args.dy = parallel_tensor(&all, scope, TN_BF16, &part);
        args.dbias = test_plain(scope, TN_FP32, 1, dy->cols), args.scope = scope;
        EXPECT_OK(tn_bias_gradient(&args, all.stream));
        parallel_matrix one = parallel_fetch(&all, args.dbias);
        parallel_add(&sum, &one);
        parallel_free(&one), parallel_free(&part);
    }
    EXPECT_OK(tn_scope_close(scope));
    return sum;
}

static void row(const setup *way) {
    const int64_t total = parallel_first(way->rows, all.count), whole = (int64_t)K * all.count;
    parallel_matrix x = parallel_numbers(total, whole, 1), w = parallel_numbers(N, whole, 2);
    parallel_matrix bias = parallel_numbers(1, N, 3), dy = parallel_numbers(total, N, 4);
    parallel_matrix sum = parallel_zeros(total, N), own_y = parallel_zeros(0, N);
    for (int r = 0; r < all.count; r++) {
        parallel_matrix wr = parallel_part(&w, 0, N, (int64_t)r * K, K);
        parallel_matrix xr = parallel_part(&x, 0, total, (int64_t)r * K, K);
        reference one = layer_of(way, &xr, &wr, r == 0 ? &bias : NULL, &dy, TN_FP32);
        if (way->partial == TN_BF16) parallel_round(&one.y);
        parallel_add(&sum, &one.y);
        if (r == all.rank) {
            parallel_matrix own_dy = own_rows(&dy, way->rows);
            layer l = open_layer(way, &xr, &wr, &bias, &own_dy);
            run_layer(&l, 0);
            parallel_round(&one.dx);
            if (!way->no_dx)
                parallel_expect(&all, way->what, l.backward.dx,
                                parallel_part(&one.dx, 0, total, 0, K));
            parallel_expect(&all, "dbias", l.backward.gradient.dbias,
                            twice(dbias_of(&dy, way->rows)));
            if (!way->frozen)
                parallel_expect(&all, "dweight", l.backward.gradient.dweight,
                                twice(dweight_of(way, &xr, &wr, &dy)));
            parallel_free(&own_y), parallel_free(&own_dy);
            own_y = parallel_fetch(&all, l.forward.y);
            close_layer(&l);
        }
        parallel_free(&wr), parallel_free(&xr);
        forget(&one);
    }
    parallel_round(&sum);
    parallel_matrix expected = own_rows(&sum, way->rows);
    assert_memory_equal(own_y.at, expected.at,
                        (size_t)(expected.rows * expected.cols) * sizeof(float));
    parallel_free(&expected), parallel_free(&own_y);
    parallel_free(&x), parallel_free(&w), parallel_free(&bias), parallel_free(&dy);
    parallel_free(&sum);
}

static void row_parallel_is_the_sum_of_the_ranks_products(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++)
        if (is_run(i)) row(&setups[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(column_parallel_is_one_rank_with_all_rows),
        cmocka_unit_test(row_parallel_is_the_sum_of_the_ranks_products),
        cmocka_unit_test(a_delay_without_a_place_is_refused),
    };
    return RANKS_RUN(&all, tests);
}
