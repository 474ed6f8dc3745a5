/* Tokens that travel to experts and back: every bit, whatever the counts; and a mixture of experts
 * over ranks that has, to the bit, the outputs and gradients of one rank with all experts and all
 * tokens.
 */
#include "parallel_support.h"
#include "tenure_experts.h"

#include <stdlib.h>
#include <string.h>

enum { OWN_EXPERTS = 3, EXPERTS_MAX = OWN_EXPERTS * PARALLEL_RANKS_MAX, K = 136, N = 72 };

static rank_fixture all;

typedef struct routing {
    int64_t experts;
    int64_t tokens[PARALLEL_RANKS_MAX * EXPERTS_MAX];
} routing;

static int64_t tokens_of(const routing *r, int rank, int64_t expert) {
    return r->tokens[rank * r->experts + expert];
}

/* Some experts have no rows of anybody, and the last rank has none for anybody, if `is_sparse`. */
static routing make_routing(uint32_t seed, int is_sparse) {
    routing r = {.experts = (int64_t)OWN_EXPERTS * all.count};
    for (int rank = 0; rank < all.count; rank++) {
        for (int64_t e = 0; e < r.experts; e++) {
            const uint32_t mixed = ((uint32_t)rank * 31u + (uint32_t)e * 17u + seed) * 2654435761u;
            int64_t count = mixed >> 26;
            if (is_sparse && (e % 3 == 1 || (rank == all.count - 1 && all.count > 1))) count = 0;
            r.tokens[rank * r.experts + e] = count;
        }
    }
    return r;
}

static int64_t home_rows(const routing *r, int rank) {
    int64_t rows = 0;
    for (int64_t e = 0; e < r->experts; e++)
        rows += tokens_of(r, rank, e);
    return rows;
}

/* Where a rank's rows for an expert are among all experts' rows. */
static int64_t global_first(const routing *r, int rank, int64_t expert) {
    int64_t first = 0;
    for (int64_t e = 0; e <= expert; e++)
        for (int s = 0; s < all.count && (e < expert || s < rank); s++)
            first += tokens_of(r, s, e);
    return first;
}

static int64_t expert_first(const routing *r, int64_t expert) { return global_first(r, 0, expert); }

static int64_t total_rows(const routing *r) { return expert_first(r, r->experts); }

/* All tokens by expert and rank; what a rank has of them, by expert. */
static parallel_matrix home_part(const routing *r, const parallel_matrix *tokens, int rank) {
    parallel_matrix home = parallel_zeros(home_rows(r, rank), tokens->cols);
    int64_t at = 0;
    for (int64_t e = 0; e < r->experts; e++) {
        const int64_t rows = tokens_of(r, rank, e);
        memcpy(home.at + at * tokens->cols, tokens->at + global_first(r, rank, e) * tokens->cols,
               (size_t)(rows * tokens->cols) * sizeof(float));
        at += rows;
    }
    return home;
}

static parallel_matrix away_part(const routing *r, const parallel_matrix *tokens) {
    const int64_t first = expert_first(r, (int64_t)all.rank * OWN_EXPERTS);
    const int64_t end = expert_first(r, (int64_t)(all.rank + 1) * OWN_EXPERTS);
    return parallel_part(tokens, first, end - first, 0, tokens->cols);
}

static tn_expert_args args_of(const routing *r, tn_scope scope, tn_tensor src, tn_tensor dst) {
    tn_expert_args args = TN_EXPERT_ARGS_INIT;
    args.route.comm = all.comm, args.route.experts = r->experts, args.route.tokens = r->tokens;
    args.src = src, args.dst = dst, args.scope = scope;
    return args;
}

static tn_tensor quantized(tn_scope scope, tn_tensor src, tn_dtype dtype) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(src, &info));
    args.src = src;
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, dtype, info.rows, info.cols);
    EXPECT_OK(tn_quantize(&args, all.stream));
    return args.dst;
}

static tn_tensor dequantized(tn_scope scope, tn_tensor src) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(src, &info));
    args.src = src, args.plane = TN_PLANE_ROW;
    args.dst = test_plain(scope, TN_BF16, info.rows, info.cols);
    EXPECT_OK(tn_dequantize(&args, all.stream));
    return args.dst;
}

static void expect_same_row(tn_tensor actual, tn_tensor expected) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(expected, TN_PLANE_ROW, &layout));
    const size_t bytes = layout.data_bytes + layout.scale_bytes;
    char *a = calloc(1, bytes + 1), *e = calloc(1, bytes + 1);
    const tn_tensor tensors[] = {actual, expected};
    for (int i = 0; i < 2; i++) {
        char *to = i ? e : a;
        EXPECT_OK(tn_plane_read(tensors[i], TN_PLANE_ROW, to, layout.data_bytes,
                                to + layout.data_bytes, layout.scale_bytes, all.stream));
    }
    ranks_wait(&all);
    assert_memory_equal(a, e, bytes);
    free(a), free(e);
}

/* ---- travelling ------------------------------------------------------------------------------ */

static void travel(const routing *r, int64_t cols) {
    tn_scope scope = parallel_scope(&all, TN_SCOPE_OP, "travel");
    tn_scope op = parallel_scope(&all, TN_SCOPE_OP, "op");
    parallel_matrix tokens = parallel_numbers(total_rows(r), cols, 9);
    parallel_matrix home = home_part(r, &tokens, all.rank), away = away_part(r, &tokens);
    tn_tensor x = parallel_tensor(&all, scope, TN_BF16, &home);
    tn_tensor came = test_plain(scope, TN_BF16, away.rows, cols);
    tn_tensor back = test_plain(scope, TN_BF16, home.rows, cols);
    tn_expert_args args = args_of(r, op, x, came);
    EXPECT_OK(tn_expert_dispatch(&args, all.stream));
    parallel_expect(&all, "dispatch", came, parallel_part(&away, 0, away.rows, 0, cols));
    args = args_of(r, op, came, back);
    EXPECT_OK(tn_expert_combine(&args, all.stream));
    parallel_expect(&all, "combine", back, parallel_part(&home, 0, home.rows, 0, cols));

    tn_tensor expected = quantized(scope, parallel_tensor(&all, scope, TN_BF16, &away), TN_E4M3);
    tn_tensor q = quantized(scope, x, TN_E4M3);
    tn_tensor q_came = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, away.rows, cols);
    tn_tensor q_back = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, home.rows, cols);
    const tn_comm_stats before = ranks_stats(&all);
    args = args_of(r, op, q, q_came);
    EXPECT_OK(tn_expert_dispatch(&args, all.stream));
    const tn_comm_stats after = ranks_stats(&all);
    int64_t leaves = home.rows;
    for (int64_t e = 0; e < OWN_EXPERTS; e++)
        leaves -= tokens_of(r, all.rank, (int64_t)all.rank * OWN_EXPERTS + e);
    assert_int_equal(after.wire_bytes[TN_ALL_TO_ALL_UNEVEN] -
                         before.wire_bytes[TN_ALL_TO_ALL_UNEVEN],
                     leaves * (cols + 4 * ((cols + 127) / 128)));
    assert_int_equal(after.groups - before.groups, 1);
    expect_same_row(q_came, expected);
    args = args_of(r, op, q_came, q_back);
    EXPECT_OK(tn_expert_combine(&args, all.stream));
    expect_same_row(q_back, q);
    assert_int_equal(test_ledger(op).total_bytes, 0);
    parallel_free(&tokens), parallel_free(&home), parallel_free(&away);
    EXPECT_OK(tn_scope_close(op));
    EXPECT_OK(tn_scope_close(scope));
}

static void rows_come_where_they_belong_and_go_home(void **state) {
    (void)state;
    for (uint32_t seed = 1; seed <= 2; seed++) {
        for (int is_sparse = 0; is_sparse < 2; is_sparse++) {
            const routing r = make_routing(seed, is_sparse);
            travel(&r, seed == 1 ? 300 : 1);
        }
    }
    const routing nothing = {.experts = (int64_t)OWN_EXPERTS * all.count};
    travel(&nothing, 130);
}

/* ---- a mixture of experts -------------------------------------------------------------------- */

typedef struct mixture {
    tn_scope scope;
    int64_t groups;
    tn_tensor y, dx, weights[EXPERTS_MAX], dweights[EXPERTS_MAX];
} mixture;

/* Experts first to first + groups - 1 on their rows: forward and backward. */
static mixture run_experts(tn_scope scope, const routing *r, int64_t first, int64_t groups,
                           tn_tensor x, tn_tensor dy) {
    mixture m = {.scope = scope, .groups = groups};
    int64_t offsets[EXPERTS_MAX + 1];
    const uint32_t zero = 0;
    tn_grouped_linear_forward_args forward = TN_GROUPED_LINEAR_FORWARD_ARGS_INIT;
    tn_grouped_linear_backward_args backward = TN_GROUPED_LINEAR_BACKWARD_ARGS_INIT;
    tn_grouped_saved saved = TN_GROUPED_SAVED_INIT;
    for (int64_t i = 0; i <= groups; i++)
        offsets[i] = expert_first(r, first + i) - expert_first(r, first);
    for (int64_t i = 0; i < groups; i++) {
        parallel_matrix w = parallel_numbers(N, K, 100u + (uint32_t)(first + i));
        m.weights[i] = parallel_weight(&all, scope, TN_FORMAT_FP8_BLOCK_2D, &w);
        m.dweights[i] = test_plain(scope, TN_FP32, N, K);
        parallel_free(&w);
    }
    m.y = test_plain(scope, TN_BF16, offsets[groups], N);
    m.dx = test_plain(scope, TN_BF16, offsets[groups], K);
    forward.experts.groups = groups, forward.experts.offsets = offsets;
    forward.experts.device_offsets = test_plain(scope, TN_BYTE, 1, 8 * (groups + 1));
    forward.experts.error = test_plain(scope, TN_BYTE, 1, 4);
    forward.experts.weights = m.weights;
    EXPECT_OK(tn_plane_write(forward.experts.device_offsets, TN_PLANE_DATA, offsets,
                             8 * (size_t)(groups + 1), NULL, 0, all.stream));
    EXPECT_OK(tn_plane_write(forward.experts.error, TN_PLANE_DATA, &zero, 4, NULL, 0, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    forward.x = x, forward.y = m.y, forward.scope = forward.saved_scope = scope;
    backward.experts = forward.experts, backward.dy = dy, backward.dx = m.dx;
    backward.dweights = m.dweights, backward.scope = scope;
    EXPECT_OK(tn_grouped_linear_forward(&forward, &saved, all.stream));
    EXPECT_OK(tn_grouped_linear_backward(&backward, &saved, NULL, all.stream));
    return m;
}

/* PLAIN values that the experts see of rows: as they travel in FP8. */
static tn_tensor as_travelled(tn_scope scope, const parallel_matrix *rows, tn_dtype dtype) {
    return dequantized(scope, quantized(scope, parallel_tensor(&all, scope, TN_BF16, rows), dtype));
}

static tn_tensor dispatched(const routing *r, tn_scope scope, const parallel_matrix *of,
                            tn_dtype dtype) {
    parallel_matrix home = home_part(r, of, all.rank);
    tn_tensor q = quantized(scope, parallel_tensor(&all, scope, TN_BF16, &home), dtype);
    int64_t offsets[OWN_EXPERTS + 1];
    tn_expert_args args = args_of(r, scope, q, (tn_tensor){0});
    EXPECT_OK(tn_expert_offsets(&args.route, offsets));
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, dtype, offsets[OWN_EXPERTS], of->cols);
    EXPECT_OK(tn_expert_dispatch(&args, all.stream));
    parallel_free(&home);
    return dequantized(scope, args.dst);
}

static void expect_home(const routing *r, tn_scope scope, const char *what, tn_tensor away,
                        tn_tensor whole, int64_t cols) {
    tn_tensor home = test_plain(scope, TN_BF16, home_rows(r, all.rank), cols);
    const tn_expert_args args = args_of(r, scope, away, home);
    EXPECT_OK(tn_expert_combine(&args, all.stream));
    parallel_matrix expected = parallel_fetch(&all, whole);
    parallel_expect(&all, what, home, home_part(r, &expected, all.rank));
    parallel_free(&expected);
}

static void experts_over_ranks_are_those_of_one_rank(void **state) {
    const routing r = make_routing(5, 1);
    tn_scope one = parallel_scope(&all, TN_SCOPE_OP, "one rank");
    tn_scope many = parallel_scope(&all, TN_SCOPE_OP, "many ranks");
    const int64_t first = (int64_t)all.rank * OWN_EXPERTS;
    parallel_matrix x = parallel_numbers(total_rows(&r), K, 11);
    parallel_matrix dy = parallel_numbers(total_rows(&r), N, 12);
    (void)state;
    const mixture whole = run_experts(one, &r, 0, r.experts, as_travelled(one, &x, TN_E4M3),
                                      as_travelled(one, &dy, TN_E5M2));
    const mixture part =
        run_experts(many, &r, first, OWN_EXPERTS, dispatched(&r, many, &x, TN_E4M3),
                    dispatched(&r, many, &dy, TN_E5M2));
    expect_home(&r, many, "y", part.y, whole.y, N);
    expect_home(&r, many, "dx", part.dx, whole.dx, K);
    for (int64_t i = 0; i < OWN_EXPERTS; i++)
        parallel_expect(&all, "dweight", part.dweights[i],
                        parallel_fetch(&all, whole.dweights[first + i]));
    parallel_free(&x), parallel_free(&dy);
    EXPECT_OK(tn_scope_close(one));
    EXPECT_OK(tn_scope_close(many));
}

static void what_does_not_fit_is_refused_before_any_collective(void **state) {
    routing r = make_routing(3, 0);
    tn_scope scope = parallel_scope(&all, TN_SCOPE_OP, "refusals");
    const tn_comm_stats before = ranks_stats(&all);
    tn_tensor few = test_plain(scope, TN_BF16, 1, K);
    tn_tensor home = test_plain(scope, TN_BF16, home_rows(&r, all.rank), K);
    tn_expert_args args = args_of(&r, scope, few, few);
    int64_t offsets[OWN_EXPERTS + 1];
    (void)state;
    EXPECT_STATUS(tn_expert_dispatch(&args, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("this rank's tokens");
    args.src = home;
    EXPECT_STATUS(tn_expert_dispatch(&args, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("those of its experts");
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 1, K);
    EXPECT_STATUS(tn_expert_dispatch(&args, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("must have one format");
    args.src = args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 1, K);
    EXPECT_STATUS(tn_expert_dispatch(&args, all.stream), TN_UNSUPPORTED);
    r.tokens[0] = -1;
    EXPECT_STATUS(tn_expert_offsets(&args.route, offsets), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("says -1 of rank 0 for expert 0");
    args.route.experts = 0;
    EXPECT_STATUS(tn_expert_offsets(&args.route, offsets), TN_INVALID_ARGUMENT);
    args.route.tokens = NULL, args.route.experts = all.count;
    EXPECT_STATUS(tn_expert_offsets(&args.route, offsets), TN_INVALID_ARGUMENT);
    const tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&after, &before, sizeof before);
    EXPECT_OK(tn_scope_close(scope));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_come_where_they_belong_and_go_home),
        cmocka_unit_test(experts_over_ranks_are_those_of_one_rank),
        cmocka_unit_test(what_does_not_fit_is_refused_before_any_collective),
    };
    return RANKS_RUN(&all, tests);
}
