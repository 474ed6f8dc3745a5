/* What is alive within a parallel Linear or LayerNormLinear: after every sub-step of forward and
 * backward as the lists below have it, byte for byte.
 *
 * A list is what the call's scratch scope holds after each sub-step. The ledger keeps the most that
 * there was in all and of each plane: both must be the list's. What is saved, and that nothing is
 * left, is compared between the calls.
 */
#include "parallel_support.h"

#include <string.h>

#include "tenure_gemm.h"

enum { K = 136, N = 72 };

static rank_fixture all;

typedef struct setup {
    const char *what;
    int keep_gathered, frozen, recompute, delay;
    int64_t rows[PARALLEL_RANKS_MAX];
} setup;

#define TILES                                                                                      \
    { 128, 128, 128, 128, 128, 128, 128, 128 }
#define ANY                                                                                        \
    { 5, 130, 27, 77, 0, 2, 3, 4 }

static const setup setups[] = {
    {"tiles", 0, 0, 0, 0, TILES},
    {"any rows", 0, 0, 0, 0, ANY},
    {"gathered once", 1, 0, 0, 0, TILES},
    {"gathered once, any rows", 1, 0, 0, 0, ANY},
    {"frozen", 0, 1, 0, 0, ANY},
    {"recomputed", 0, 0, 1, 0, TILES},
    {"recomputed, any rows", 0, 0, 1, 0, ANY},
    {"delayed", 0, 0, 0, 1, TILES},
    {"delayed, any rows", 0, 0, 0, 1, ANY},
    {"delayed, gathered once", 1, 0, 0, 1, ANY},
    {"delayed, recomputed", 0, 0, 1, 1, ANY},
};

/* ---- byte lists ------------------------------------------------------------------------------ */

/* What is alive now, and the most that was, by plane and in all. */
typedef struct list {
    size_t now[TN_PLANE_COUNT], most[TN_PLANE_COUNT];
    size_t most_total;
} list;

static void alive(list *l, tn_plane plane, size_t bytes) {
    size_t total = 0;
    l->now[plane] += bytes;
    if (l->now[plane] > l->most[plane]) l->most[plane] = l->now[plane];
    for (int i = 0; i < TN_PLANE_COUNT; i++)
        total += l->now[i];
    if (total > l->most_total) l->most_total = total;
}

static void gone(list *l, tn_plane plane, size_t bytes) { l->now[plane] -= bytes; }

/* Within a sub-step only. */
static void passing(list *l, tn_plane plane, size_t bytes) {
    alive(l, plane, bytes);
    gone(l, plane, bytes);
}

static size_t up(int64_t number, int64_t multiple) {
    return (size_t)((number + multiple - 1) / multiple * multiple);
}

static size_t row_bytes(int64_t rows, int64_t cols) {
    if (rows == 0 || cols == 0) return 0;
    return (size_t)(rows * cols) + 4 * (up(cols, 128) / 128) * up(rows, 4);
}

static size_t col_bytes(int64_t rows, int64_t cols) {
    if (rows == 0 || cols == 0) return 0;
    return (size_t)(rows * cols) + 4 * (up(rows, 128) / 128) * up(cols, 4);
}

static size_t plain_bytes(int64_t rows, int64_t cols, size_t element) {
    return (size_t)(rows * cols) * element;
}

/* Scratch of a product: on the host a constant, which tn_gemm_choice_get tells. */
static size_t product_scratch;

static void learn_product_scratch(void) {
    tn_scope scope = parallel_scope(&all, TN_SCOPE_OP, "product");
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 128, K);
    args.b = test_fp8(scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, N, K);
    args.d = test_plain(scope, TN_FP32, 128, N), args.scope = scope;
    EXPECT_OK(tn_gemm_choice_get(&args, &choice));
    product_scratch = choice.scratch_bytes;
    EXPECT_OK(tn_scope_close(scope));
}

static void product(list *l) { passing(l, TN_PLANE_DATA, product_scratch); }

/* The sizes of a call. */
typedef struct sizes {
    int64_t own, total, in_tiles;
    int is_aligned;
    const int64_t *rows;
} sizes;

static sizes sizes_of(const setup *of) {
    sizes s = {.own = of->rows[all.rank], .rows = of->rows};
    s.total = parallel_first(of->rows, all.count);
    s.in_tiles = parallel_total_in_tiles(of->rows, all.count);
    s.is_aligned = s.total == s.in_tiles;
    return s;
}

/* A gather: the output, and a slot that passes. */
static void gather_row(list *l, const sizes *s, int64_t cols) {
    size_t strip = 0;
    for (int r = 0; r < all.count; r++)
        strip += 4 * up(s->rows[r], 4);
    alive(l, TN_PLANE_ROW, row_bytes(s->total, cols));
    passing(l, TN_PLANE_DATA, strip * (up(cols, 128) / 128));
}

static void gather_col(list *l, const sizes *s, int64_t cols) {
    alive(l, TN_PLANE_COL, col_bytes(s->in_tiles, cols));
    passing(l, TN_PLANE_DATA, (size_t)(s->total * cols));
}

/* The cast of what is of all rows, with tiles' sums where bias's gradient is wanted. */
static void cast_whole(list *l, const sizes *s, int64_t cols, int row, int col, int sums) {
    const size_t tiles = sums ? 4 * (size_t)cols * (up(s->total, 128) / 128) : 0;
    if (row) alive(l, TN_PLANE_ROW, row_bytes(s->total, cols));
    if (col && s->is_aligned) alive(l, TN_PLANE_COL, col_bytes(s->total, cols));
    passing(l, TN_PLANE_DATA, tiles);
    if (!col || s->is_aligned) return;
    alive(l, TN_PLANE_COL, col_bytes(s->in_tiles, cols));
    for (int r = 0; r < all.count; r++)
        passing(l, TN_PLANE_COL, col_bytes(s->rows[r], cols));
}

/* A product that is summed over ranks: fp32 of all rows, and of this rank's until it is rounded to
 * what `result` bytes are made for meanwhile. */
static void partial(list *l, const sizes *s, int64_t cols, size_t result) {
    alive(l, TN_PLANE_DATA, plain_bytes(s->total, cols, 4));
    product(l);
    alive(l, TN_PLANE_DATA, plain_bytes(s->own, cols, 4));
    alive(l, TN_PLANE_DATA, result);
    gone(l, TN_PLANE_DATA, plain_bytes(s->own, cols, 4));
    gone(l, TN_PLANE_DATA, plain_bytes(s->total, cols, 4));
}

/* ---- the calls' lists ------------------------------------------------------------------------ */

/* x: where the quantized x of this rank's rows is scratch. */
static list column_forward_list(const setup *of, const sizes *s) {
    const int trains = !of->frozen && !of->recompute;
    const int in_scratch = !trains || of->keep_gathered;
    list l = {.most_total = 0};
    if (in_scratch) alive(&l, TN_PLANE_ROW, row_bytes(s->own, K));
    if (in_scratch && trains) alive(&l, TN_PLANE_COL, col_bytes(s->own, K));
    gather_row(&l, s, K);
    product(&l);
    gone(&l, TN_PLANE_ROW, row_bytes(s->total, K));
    if (in_scratch) gone(&l, TN_PLANE_ROW, row_bytes(s->own, K));
    if (trains && of->keep_gathered) passing(&l, TN_PLANE_DATA, (size_t)(s->total * K));
    return l;
}

static size_t column_saved(const setup *of, const sizes *s) {
    if (of->frozen || of->recompute) return 0;
    return of->keep_gathered ? col_bytes(s->in_tiles, K) : col_bytes(s->own, K);
}

/* From dy to dx; of LayerNormLinear with the gradient of the norm's value beside it. */
static list column_backward_list(const setup *of, const sizes *s, int is_norm) {
    const int trains = !of->frozen;
    list l = {.most_total = 0};
    if (is_norm && of->recompute) {
        alive(&l, TN_PLANE_DATA, plain_bytes(s->own, 2, 4)); /* mean, rstd */
        alive(&l, TN_PLANE_COL, col_bytes(s->own, K));
    }
    alive(&l, TN_PLANE_DATA, plain_bytes(1, N, 4));
    if (trains && !is_norm && of->recompute) alive(&l, TN_PLANE_COL, col_bytes(s->own, K));
    if (trains && (!of->keep_gathered || of->recompute)) gather_col(&l, s, K);
    if (trains && of->recompute) gone(&l, TN_PLANE_COL, col_bytes(s->own, K));
    cast_whole(&l, s, N, 1, trains, 1);
    partial(&l, s, K, is_norm ? plain_bytes(s->own, K, 2) : 0);
    if (trains) gone(&l, TN_PLANE_ROW, row_bytes(s->total, N));
    if (is_norm) {
        alive(&l, TN_PLANE_DATA, 2 * plain_bytes(1, K, 4));
        passing(&l, TN_PLANE_DATA,
                plain_bytes(s->own, 2, 4) + 2 * 4 * (size_t)K * (up(s->own, 128) / 128));
        gone(&l, TN_PLANE_DATA, plain_bytes(s->own, K, 2));
    }
    if (trains && !of->delay) product(&l);
    return l;
}

static list row_forward_list(const setup *of, const sizes *s) {
    const int trains = !of->frozen && !of->recompute;
    list l = {.most_total = 0};
    if (!trains || !s->is_aligned) alive(&l, TN_PLANE_ROW, row_bytes(s->total, K));
    for (int r = 0; trains && !s->is_aligned && r < all.count; r++)
        passing(&l, TN_PLANE_COL, col_bytes(s->rows[r], K));
    partial(&l, s, N, 0);
    return l;
}

static size_t row_saved(const setup *of, const sizes *s) {
    return of->frozen || of->recompute ? 0 : col_bytes(s->in_tiles, K);
}

static list row_backward_list(const setup *of, const sizes *s) {
    const int trains = !of->frozen;
    list l = {.most_total = 0};
    alive(&l, TN_PLANE_DATA, plain_bytes(1, N, 4));
    if (trains && of->recompute) cast_whole(&l, s, K, 0, 1, 0);
    alive(&l, TN_PLANE_ROW, row_bytes(s->own, N));
    if (trains) alive(&l, TN_PLANE_COL, col_bytes(s->own, N));
    passing(&l, TN_PLANE_DATA, 4 * (size_t)N * (up(s->own, 128) / 128));
    gather_row(&l, s, N);
    if (trains) gather_col(&l, s, N);
    gone(&l, TN_PLANE_ROW, row_bytes(s->own, N));
    if (trains) gone(&l, TN_PLANE_COL, col_bytes(s->own, N));
    product(&l);
    gone(&l, TN_PLANE_ROW, row_bytes(s->total, N));
    if (trains && !of->delay) product(&l);
    return l;
}

/* What a backward leaves for the weight's gradient: COL of dy and of x, of all rows. */
static size_t delayed_bytes(const setup *of, const sizes *s) {
    return of->delay ? col_bytes(s->in_tiles, N) + col_bytes(s->in_tiles, K) : 0;
}

/* ---- the calls ------------------------------------------------------------------------------- */

typedef struct layer {
    tn_parallel parallel;
    tn_scope io, saved_scope, op;
    tn_layer_common common;
    tn_layer_weight w;
} layer;

static tn_tensor numbers(const layer *l, tn_dtype dtype, int64_t rows, int64_t cols) {
    parallel_matrix matrix = parallel_numbers(rows, cols, 7);
    tn_tensor tensor = parallel_tensor(&all, l->io, dtype, &matrix);
    parallel_free(&matrix);
    return tensor;
}

static layer open_layer(const setup *of) {
    layer l = {
        .parallel = TN_PARALLEL_INIT, .common = TN_LAYER_COMMON_INIT, .w = TN_LAYER_WEIGHT_INIT};
    parallel_matrix w = parallel_numbers(N, K, 3);
    l.io = parallel_scope(&all, TN_SCOPE_STEP, "io");
    l.saved_scope = parallel_scope(&all, TN_SCOPE_SAVED, "saved");
    l.op = parallel_scope(&all, TN_SCOPE_OP, "op");
    l.parallel.sequence.comm = all.comm, l.parallel.sequence.rows = of->rows;
    l.parallel.keep_gathered = of->keep_gathered;
    l.common.scope = l.op, l.common.saved_scope = l.saved_scope;
    l.common.recompute = of->recompute;
    l.w.weight = parallel_weight(&all, l.io, TN_FORMAT_FP8_BLOCK_2D, &w);
    l.w.bias = numbers(&l, TN_FP32, 1, N);
    EXPECT_OK(tn_tensor_set_frozen(l.w.weight, of->frozen));
    parallel_free(&w);
    return l;
}

static void close_layer(layer *l) {
    ranks_wait(&all);
    EXPECT_OK(tn_scope_close(l->op));
    EXPECT_OK(tn_scope_close(l->saved_scope));
    EXPECT_OK(tn_scope_close(l->io));
}

/* After a call: the most that its scratch was, that nothing is left of it, and what is saved. */
static void expect_list(const layer *l, const char *what, const char *call, const list *expected,
                        size_t saved) {
    const tn_ledger op = test_ledger(l->op);
    const int is_gpu = all.place == RANKS_ON_CUDA;
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        if (is_gpu && i == TN_PLANE_DATA) continue;
        if (op.peak_plane_bytes[i] == expected->most[i]) continue;
        fail_msg("rank %d of %d, %s, %s: %zu bytes of %s at most, expected %zu", all.rank,
                 all.count, what, call, op.peak_plane_bytes[i], tn_plane_name((tn_plane)i),
                 expected->most[i]);
    }
    if (op.peak_total_bytes != expected->most_total && !is_gpu)
        fail_msg("rank %d of %d, %s, %s: %zu bytes at most, expected %zu", all.rank, all.count,
                 what, call, op.peak_total_bytes, expected->most_total);
    assert_int_equal(op.total_bytes, 0);
    assert_int_equal(test_ledger(l->saved_scope).total_bytes, saved);
    EXPECT_OK(tn_scope_ledger_reset_peaks(l->op));
}

static void late_bytes(const layer *l, const setup *of, tn_delayed_gradient *delayed) {
    list late = {.most_total = 0};
    if (!of->delay) return;
    product(&late);
    EXPECT_OK(tn_weight_gradient(delayed, l->op, all.stream));
    expect_list(l, of->what, "delayed gradient", &late, 0);
}

static void linear_bytes(const setup *of, int is_column) {
    const sizes s = sizes_of(of);
    const int64_t x_rows = is_column ? s.own : s.total, y_rows = is_column ? s.total : s.own;
    tn_linear_forward_args forward = TN_LINEAR_FORWARD_ARGS_INIT;
    tn_linear_backward_args backward = TN_LINEAR_BACKWARD_ARGS_INIT;
    tn_linear_saved saved = TN_LINEAR_SAVED_INIT;
    tn_delayed_gradient delayed = TN_DELAYED_GRADIENT_INIT;
    layer l = open_layer(of);
    const list lists[2] = {is_column ? column_forward_list(of, &s) : row_forward_list(of, &s),
                           is_column ? column_backward_list(of, &s, 0) : row_backward_list(of, &s)};
    forward.x = numbers(&l, TN_BF16, x_rows, K), forward.w = l.w, forward.common = l.common;
    forward.y = test_plain(l.io, TN_BF16, y_rows, N);
    backward.dy = numbers(&l, TN_BF16, y_rows, N), backward.x = forward.x, backward.w = l.w;
    backward.dx = test_plain(l.io, TN_BF16, x_rows, K), backward.common = l.common;
    if (!of->frozen) backward.gradient.dweight = test_plain(l.io, TN_FP32, N, K);
    backward.gradient.dbias = test_plain(l.io, TN_FP32, 1, N);
    backward.gradient.delay = of->delay;
    EXPECT_OK(is_column ? tn_column_linear_forward(&l.parallel, &forward, &saved, all.stream)
                        : tn_row_linear_forward(&l.parallel, &forward, &saved, all.stream));
    expect_list(&l, of->what, is_column ? "column forward" : "row forward", &lists[0],
                is_column ? column_saved(of, &s) : row_saved(of, &s));
    EXPECT_OK(is_column
                  ? tn_column_linear_backward(&l.parallel, &backward, &saved, &delayed, all.stream)
                  : tn_row_linear_backward(&l.parallel, &backward, &saved, &delayed, all.stream));
    expect_list(&l, of->what, is_column ? "column backward" : "row backward", &lists[1],
                delayed_bytes(of, &s));
    late_bytes(&l, of, &delayed);
    close_layer(&l);
}

static void norm_linear_bytes(const setup *of) {
    const sizes s = sizes_of(of);
    tn_norm_linear_forward_args forward = TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    tn_norm_linear_backward_args backward = TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    tn_norm_linear_saved saved = TN_NORM_LINEAR_SAVED_INIT;
    tn_delayed_gradient delayed = TN_DELAYED_GRADIENT_INIT;
    layer l = open_layer(of);
    const list back_list = column_backward_list(of, &s, 1);
    list forward_list = column_forward_list(of, &s);
    const size_t statistics = of->recompute ? 0 : plain_bytes(s.own, 2, 4);
    /* Statistics that nobody keeps are scratch of the norm, beside what it quantizes. */
    if (of->recompute) {
        list norm = {.most_total = 0};
        alive(&norm, TN_PLANE_ROW, row_bytes(s.own, K));
        passing(&norm, TN_PLANE_DATA, plain_bytes(s.own, 2, 4));
        for (int i = 0; i < TN_PLANE_COUNT; i++)
            if (norm.most[i] > forward_list.most[i]) forward_list.most[i] = norm.most[i];
    }
    forward.norm.norm = TN_NORM_LAYER;
    forward.norm.x = numbers(&l, TN_BF16, s.own, K),
    forward.norm.gamma = numbers(&l, TN_FP32, 1, K);
    forward.norm.beta = numbers(&l, TN_FP32, 1, K);
    forward.w = l.w, forward.common = l.common;
    forward.y = test_plain(l.io, TN_BF16, s.total, N);
    backward.dy = numbers(&l, TN_BF16, s.total, N), backward.w = l.w, backward.common = l.common;
    backward.norm.norm = TN_NORM_LAYER, backward.norm.x = forward.norm.x;
    backward.norm.gamma = forward.norm.gamma, backward.norm.beta = forward.norm.beta;
    backward.norm.dx = test_plain(l.io, TN_BF16, s.own, K);
    backward.norm.dgamma = test_plain(l.io, TN_FP32, 1, K);
    backward.norm.dbeta = test_plain(l.io, TN_FP32, 1, K);
    if (!of->frozen) backward.gradient.dweight = test_plain(l.io, TN_FP32, N, K);
    backward.gradient.dbias = test_plain(l.io, TN_FP32, 1, N);
    backward.gradient.delay = of->delay;
    EXPECT_OK(tn_column_norm_linear_forward(&l.parallel, &forward, &saved, all.stream));
    expect_list(&l, of->what, "norm forward", &forward_list, statistics + column_saved(of, &s));
    EXPECT_OK(tn_column_norm_linear_backward(&l.parallel, &backward, &saved, &delayed, all.stream));
    expect_list(&l, of->what, "norm backward", &back_list, delayed_bytes(of, &s));
    late_bytes(&l, of, &delayed);
    close_layer(&l);
}

static void linears_hold_what_their_lists_say(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++) {
        linear_bytes(&setups[i], 1);
        linear_bytes(&setups[i], 0);
    }
}

static void norm_linear_holds_what_its_list_says(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++)
        if (!(setups[i].frozen && setups[i].recompute)) norm_linear_bytes(&setups[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linears_hold_what_their_lists_say),
        cmocka_unit_test(norm_linear_holds_what_its_list_says),
    };
    all = ranks_open();
    learn_product_scratch();
    if (all.place == RANKS_ON_CUDA)
        print_message("left out: bytes of DATA: a GPU's products have scratch by their shapes\n");
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    ranks_close(&all);
    return failed;
}
