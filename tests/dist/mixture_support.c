/* A mixture of experts over ranks, or alone: see mixture_support.h. */
#include "mixture_support.h"

#include <math.h>
#include <string.h>

int mixture_homes(const mixture_run *run) { return run->comm ? 1 : run->shape->ranks; }

int64_t mixture_own_experts(const mixture_run *run) {
    return run->comm ? run->shape->experts / run->shape->ranks : run->shape->experts;
}

static int rank_of(const mixture_run *run, int home) {
    return run->comm ? tn_comm_rank(run->comm) : home;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static void write_all(const mixture_run *run, tn_tensor tensor, const void *data, size_t bytes) {
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_DATA, data, bytes, NULL, 0, run->all->stream));
    EXPECT_OK(tn_stream_synchronize(run->all->device, run->all->stream));
}

static void read_all(const mixture_run *run, tn_tensor tensor, void *data, size_t bytes) {
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_DATA, data, bytes, NULL, 0, run->all->stream));
    EXPECT_OK(tn_stream_synchronize(run->all->device, run->all->stream));
}

tn_tensor mixture_map(const mixture_run *run, tn_scope scope, const int64_t *numbers, int64_t rows,
                      int64_t each) {
    tn_tensor map = test_plain(scope, TN_BYTE, rows, each * (int64_t)sizeof *numbers);
    write_all(run, map, numbers, (size_t)(rows * each) * sizeof *numbers);
    return map;
}

tn_tensor mixture_gathered(const mixture_run *run, tn_scope scope, tn_tensor src, tn_tensor map) {
    tn_gather_rows_args args = TN_GATHER_ROWS_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT, map_info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(src, &info));
    EXPECT_OK(tn_tensor_info_get(map, &map_info));
    args.src = src, args.map = map, args.error = run->error;
    args.dst = info.format == TN_FORMAT_PLAIN
                   ? test_plain(scope, info.dtype, map_info.rows, info.cols)
                   : test_fp8(scope, info.format, info.dtype, map_info.rows, info.cols);
    EXPECT_OK(tn_gather_rows(&args, run->all->stream));
    return args.dst;
}

/* bf16 of what travels in FP8. */
static tn_tensor dequantized(const mixture_run *run, tn_tensor src) {
    tn_dequantize_args args = TN_DEQUANTIZE_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(src, &info));
    args.src = src, args.dst = test_plain(run->scratch, TN_BF16, info.rows, info.cols);
    EXPECT_OK(tn_dequantize(&args, run->all->stream));
    return args.dst;
}

/* ---- routing --------------------------------------------------------------------------------- */

static void pick_two(const float *logits, int64_t experts, int64_t *pick, float *weight) {
    int64_t best = 0, second = 1;
    for (int64_t e = 1; e < experts; e++) {
        if (logits[e] > logits[best])
            second = best, best = e;
        else if (e != 1 && logits[e] > logits[second])
            second = e;
    }
    pick[0] = best, pick[1] = second;
    weight[0] = (float)(1.0 / (1.0 + exp((double)logits[second] - (double)logits[best])));
    weight[1] = (float)(1.0 - (double)weight[0]);
}

/* Rows by expert, then by token: counts, maps and weights of them. */
static void sort_rows(const mixture_run *run, tn_scope saved, mixture_home *home, int64_t *tokens) {
    const int64_t picks = home->rows * MIXTURE_PICKS;
    int64_t source[MIXTURE_ROWS_MAX * MIXTURE_PICKS], at = 0;
    float sorted[MIXTURE_ROWS_MAX * MIXTURE_PICKS];
    for (int64_t e = 0; e < run->shape->experts; e++) {
        const int64_t first = at;
        for (int64_t i = 0; i < picks; i++) {
            if (home->pick[i] != e) continue;
            source[at] = i / MIXTURE_PICKS, sorted[at] = home->weight[i];
            home->place[i] = at++;
        }
        tokens[e] = at - first;
    }
    home->sources = mixture_map(run, saved, source, picks, 1);
    home->places = mixture_map(run, saved, home->place, home->rows, MIXTURE_PICKS);
    home->weights = test_plain(saved, TN_FP32, picks, 1);
    write_all(run, home->weights, sorted, (size_t)picks * sizeof *sorted);
}

static void normalize(const mixture_run *run, const mixture_weights *weights, tn_scope saved,
                      mixture_home *home) {
    tn_norm_args args = TN_NORM_ARGS_INIT;
    args.x = home->x, args.gamma = weights->gain;
    args.y = home->normed = test_plain(saved, TN_BF16, home->rows, run->shape->hidden);
    args.rstd = home->rstd = test_plain(saved, TN_FP32, home->rows, 1);
    args.scope = run->scratch;
    EXPECT_OK(tn_norm_forward(&args, run->all->stream));
}

static void route(const mixture_run *run, const mixture_weights *weights, tn_scope saved,
                  mixture_home *home, int64_t *tokens) {
    const int64_t experts = run->shape->experts;
    float logits[MIXTURE_ROWS_MAX * MIXTURE_EXPERTS_MAX];
    tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
    normalize(run, weights, saved, home);
    args.x = home->normed, args.w.weight = weights->router;
    args.y = test_plain(run->scratch, TN_FP32, home->rows, experts);
    args.common.scope = run->scratch;
    EXPECT_OK(tn_linear_forward(&args, NULL, run->all->stream));
    read_all(run, args.y, logits, (size_t)(home->rows * experts) * sizeof *logits);
    for (int64_t t = 0; t < home->rows; t++)
        pick_two(logits + t * experts, experts, home->pick + t * MIXTURE_PICKS,
                 home->weight + t * MIXTURE_PICKS);
    sort_rows(run, saved, home, tokens);
}

/* ---- the way --------------------------------------------------------------------------------- */

static int64_t all_rows(const mixture_run *run) {
    return MIXTURE_PICKS * parallel_first(run->shape->rows, run->shape->ranks);
}

static int64_t own_rows(const mixture_run *run, const mixture *m) {
    return m->offsets[mixture_own_experts(run)];
}

static void make_offsets(const mixture_run *run, mixture *m) {
    const int64_t own = mixture_own_experts(run), experts = run->shape->experts;
    const int64_t first = run->comm ? own * tn_comm_rank(run->comm) : 0;
    for (int64_t e = 0; e < own; e++) {
        m->offsets[e + 1] = m->offsets[e];
        for (int r = 0; r < run->shape->ranks; r++)
            m->offsets[e + 1] += m->tokens[r * experts + first + e];
    }
}

/* Alone: where the rows of expert e of each home are, one home's behind the other's. */
static void make_maps(const mixture_run *run, tn_scope saved, mixture *m) {
    enum { ROWS = MIXTURE_RANKS_MAX * MIXTURE_ROWS_MAX * MIXTURE_PICKS };
    int64_t there[ROWS], back[ROWS], from[MIXTURE_RANKS_MAX], at = 0;
    for (int r = 0; r < run->shape->ranks; r++)
        from[r] = m->homes[r].first;
    for (int64_t e = 0; e < run->shape->experts; e++) {
        for (int r = 0; r < run->shape->ranks; r++) {
            for (int64_t i = 0; i < m->tokens[r * run->shape->experts + e]; i++) {
                back[from[r]] = at;
                there[at++] = from[r]++;
            }
        }
    }
    m->there = mixture_map(run, saved, there, at, 1);
    m->back = mixture_map(run, saved, back, at, 1);
}

static tn_expert_args travel_of(const mixture_run *run, const mixture *m, tn_tensor src,
                                tn_tensor dst) {
    tn_expert_args args = TN_EXPERT_ARGS_INIT;
    args.route.comm = run->comm, args.route.experts = run->shape->experts;
    args.route.tokens = m->tokens;
    args.src = src, args.dst = dst, args.scope = run->scratch;
    return args;
}

/* Alone: all homes' rows in one tensor of their type; they are the parts of it. */
static tn_tensor joined(const mixture_run *run, const mixture *m, const tn_tensor *parts) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(parts[0], &info));
    tn_tensor whole = test_plain(run->scratch, info.dtype, all_rows(run), info.cols);
    EXPECT_OK(tn_plane_fill(whole, TN_PLANE_DATA, 0, run->all->stream));
    for (int i = 0; i < mixture_homes(run); i++) {
        tn_convert_args args = TN_CONVERT_ARGS_INIT;
        const mixture_home *home = &m->homes[i];
        args.x = parts[i];
        EXPECT_OK(tn_tensor_view_rows(whole, home->first, home->rows * MIXTURE_PICKS, run->scratch,
                                      &args.y));
        EXPECT_OK(tn_convert(&args, run->all->stream));
        EXPECT_OK(tn_tensor_destroy(args.y, run->all->stream));
    }
    return whole;
}

/* Rows by expert of each home to the experts: PLAIN. */
static tn_tensor go_plain(const mixture_run *run, const mixture *m, const tn_tensor *parts) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    if (!run->comm) return mixture_gathered(run, run->scratch, joined(run, m, parts), m->there);
    EXPECT_OK(tn_tensor_info_get(parts[0], &info));
    tn_tensor dst = test_plain(run->scratch, info.dtype, own_rows(run, m), info.cols);
    const tn_expert_args args = travel_of(run, m, parts[0], dst);
    EXPECT_OK(tn_expert_dispatch(&args, run->all->stream));
    return dst;
}

/* And in FP8: tokens of each home are quantized, and their rows sorted and sent as they are. bf16
 * comes out. */
static tn_tensor go(const mixture_run *run, const mixture *m, const tn_tensor *tokens,
                    tn_dtype dtype) {
    tn_tensor parts[MIXTURE_RANKS_MAX];
    for (int i = 0; i < mixture_homes(run); i++) {
        tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
        args.src = tokens[i];
        args.dst = test_fp8(run->scratch, TN_FORMAT_FP8_BLOCK_1D, dtype, m->homes[i].rows,
                            run->shape->hidden);
        EXPECT_OK(tn_quantize(&args, run->all->stream));
        parts[i] = mixture_gathered(run, run->scratch, args.dst, m->homes[i].sources);
        if (!run->comm) parts[i] = dequantized(run, parts[i]);
    }
    if (!run->comm) return go_plain(run, m, parts);
    tn_tensor dst =
        test_fp8(run->scratch, TN_FORMAT_FP8_BLOCK_1D, dtype, own_rows(run, m), run->shape->hidden);
    const tn_expert_args args = travel_of(run, m, parts[0], dst);
    EXPECT_OK(tn_expert_dispatch(&args, run->all->stream));
    return dequantized(run, dst);
}

/* The experts' rows to each home. */
static void come_back(const mixture_run *run, const mixture *m, tn_tensor src, tn_tensor *parts) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(src, &info));
    if (run->comm) {
        parts[0] =
            test_plain(run->scratch, info.dtype, m->homes[0].rows * MIXTURE_PICKS, info.cols);
        const tn_expert_args args = travel_of(run, m, src, parts[0]);
        EXPECT_OK(tn_expert_combine(&args, run->all->stream));
        return;
    }
    tn_tensor whole = mixture_gathered(run, run->scratch, src, m->back);
    for (int i = 0; i < mixture_homes(run); i++)
        EXPECT_OK(tn_tensor_view_rows(whole, m->homes[i].first, m->homes[i].rows * MIXTURE_PICKS,
                                      run->scratch, &parts[i]));
}

/* Of each token, the sum of its two rows; and `more`. */
static tn_tensor summed(const mixture_run *run, const mixture_home *home, tn_tensor rows,
                        tn_tensor more) {
    tn_combine_rows_args args = TN_COMBINE_ROWS_ARGS_INIT;
    tn_axpy_args add = TN_AXPY_ARGS_INIT;
    args.src = rows, args.map = home->places, args.error = run->error;
    args.dst = test_plain(run->scratch, TN_BF16, home->rows, run->shape->hidden);
    EXPECT_OK(tn_combine_rows(&args, run->all->stream));
    add.x = more, add.y = args.dst;
    EXPECT_OK(tn_axpy(&add, run->all->stream));
    return args.dst;
}

/* ---- forward --------------------------------------------------------------------------------- */

static tn_experts experts_of(const mixture_run *run, const mixture *m, const tn_tensor *weights) {
    tn_experts experts = TN_EXPERTS_INIT;
    experts.groups = mixture_own_experts(run), experts.offsets = m->offsets;
    experts.device_offsets = m->device_offsets, experts.error = run->error;
    experts.weights = weights;
    return experts;
}

static void forward_linear(const mixture_run *run, const mixture *m, const tn_tensor *weights,
                           tn_scope saved, tn_tensor x, tn_tensor y, tn_grouped_saved *out) {
    tn_grouped_linear_forward_args args = TN_GROUPED_LINEAR_FORWARD_ARGS_INIT;
    args.experts = experts_of(run, m, weights);
    args.x = x, args.y = y;
    args.scope = run->scratch, args.saved_scope = saved;
    EXPECT_OK(tn_grouped_linear_forward(&args, out, run->all->stream));
}

/* A row's weight goes with its activation, so that its gradient comes with that of it. */
static tn_tensor forward_experts(const mixture_run *run, const mixture_weights *weights,
                                 tn_scope saved, tn_tensor x, mixture *m) {
    tn_activation_args activate = TN_ACTIVATION_ARGS_INIT;
    const int64_t rows = own_rows(run, m);
    tn_tensor y = test_plain(run->scratch, TN_BF16, rows, run->shape->hidden);
    m->hidden = test_plain(saved, TN_BF16, rows, run->shape->ffn);
    forward_linear(run, m, weights->up, saved, x, m->hidden, &m->up);
    activate.x = m->hidden, activate.weights = m->weights;
    activate.y = test_plain(run->scratch, TN_BF16, rows, run->shape->ffn);
    EXPECT_OK(tn_activation_forward(&activate, run->all->stream));
    forward_linear(run, m, weights->down, saved, activate.y, y, &m->down);
    return y;
}

static void count_tokens(const mixture_run *run, mixture *m, const int64_t *own) {
    if (!run->comm) return;
    EXPECT_OK(tn_counts_exchange(run->comm, own, run->shape->experts, m->tokens, run->scratch,
                                 run->all->stream));
}

void mixture_forward(const mixture_run *run, const mixture_weights *weights, tn_scope saved,
                     const tn_tensor *x, tn_tensor *y, mixture *out) {
    const int homes = mixture_homes(run);
    const int64_t experts = run->shape->experts;
    tn_tensor normed[MIXTURE_RANKS_MAX], sorted[MIXTURE_RANKS_MAX], rows[MIXTURE_RANKS_MAX];
    int64_t own[MIXTURE_EXPERTS_MAX], first = 0;
    memset(out, 0, sizeof *out);
    for (int i = 0; i < homes; i++) {
        mixture_home *home = &out->homes[i];
        home->x = x[i], home->rows = run->shape->rows[rank_of(run, i)], home->first = first;
        first += home->rows * MIXTURE_PICKS;
        route(run, weights, saved, home, run->comm ? own : out->tokens + i * experts);
        normed[i] = home->normed, sorted[i] = home->weights;
    }
    count_tokens(run, out, own);
    make_offsets(run, out);
    if (!run->comm) make_maps(run, saved, out);
    out->device_offsets = mixture_map(run, saved, out->offsets, 1, mixture_own_experts(run) + 1);
    out->weights = go_plain(run, out, sorted);
    EXPECT_OK(tn_tensor_move(out->weights, saved));
    come_back(run, out, forward_experts(run, weights, saved, go(run, out, normed, TN_E4M3), out),
              rows);
    for (int i = 0; i < homes; i++)
        y[i] = summed(run, &out->homes[i], rows[i], x[i]);
}

/* ---- backward -------------------------------------------------------------------------------- */

static void backward_linear(const mixture_run *run, const mixture *m, const tn_tensor *weights,
                            const tn_tensor *gradients, int accumulate, tn_tensor dy, tn_tensor dx,
                            tn_grouped_saved *saved) {
    tn_grouped_linear_backward_args args = TN_GROUPED_LINEAR_BACKWARD_ARGS_INIT;
    args.experts = experts_of(run, m, weights);
    args.dy = dy, args.dx = dx;
    args.dweights = gradients, args.accumulate = accumulate;
    args.gradient_dtype = TN_E5M2;
    args.scope = run->scratch;
    EXPECT_OK(tn_grouped_linear_backward(&args, saved, NULL, run->all->stream));
}

static tn_tensor backward_experts(const mixture_run *run, const mixture_weights *weights,
                                  const mixture_gradients *gradients, tn_tensor dy,
                                  tn_tensor *dweights, mixture *m) {
    tn_activation_backward_args activate = TN_ACTIVATION_BACKWARD_ARGS_INIT;
    const int64_t rows = own_rows(run, m);
    tn_tensor dx = test_plain(run->scratch, TN_BF16, rows, run->shape->hidden);
    activate.dy = test_plain(run->scratch, TN_BF16, rows, run->shape->ffn);
    backward_linear(run, m, weights->down, gradients->down, gradients->accumulate, dy, activate.dy,
                    &m->down);
    activate.x = m->hidden, activate.weights = m->weights;
    activate.dx = test_plain(run->scratch, TN_BF16, rows, run->shape->ffn);
    activate.dweights = *dweights = test_plain(run->scratch, TN_FP32, rows, 1);
    activate.scope = run->scratch;
    EXPECT_OK(tn_activation_backward(&activate, run->all->stream));
    backward_linear(run, m, weights->up, gradients->up, gradients->accumulate, activate.dx, dx,
                    &m->up);
    return dx;
}

/* Of the softmax over the two picks of each token; 0 for all other experts. */
static tn_tensor logit_gradients(const mixture_run *run, const mixture_home *home,
                                 tn_tensor dweights) {
    float rows[MIXTURE_ROWS_MAX * MIXTURE_PICKS];
    parallel_matrix d = parallel_zeros(home->rows, run->shape->experts);
    read_all(run, dweights, rows, (size_t)(home->rows * MIXTURE_PICKS) * sizeof *rows);
    for (int64_t t = 0; t < home->rows; t++) {
        const int64_t i = t * MIXTURE_PICKS;
        const double first = home->weight[i], second = home->weight[i + 1];
        const float change =
            (float)(first * second *
                    ((double)rows[home->place[i]] - (double)rows[home->place[i + 1]]));
        d.at[t * d.cols + home->pick[i]] = change;
        d.at[t * d.cols + home->pick[i + 1]] = -change;
    }
    tn_tensor tensor = parallel_tensor(run->all, run->scratch, TN_BF16, &d);
    parallel_free(&d);
    return tensor;
}

static tn_tensor backward_home(const mixture_run *run, const mixture_weights *weights,
                               const mixture_gradients *gradients, int i, tn_tensor dy,
                               tn_tensor rows, tn_tensor dweights, const mixture_home *home) {
    tn_linear_backward_args linear = TN_LINEAR_BACKWARD_ARGS_INIT;
    tn_norm_backward_args norm = TN_NORM_BACKWARD_ARGS_INIT;
    linear.dy = logit_gradients(run, home, dweights);
    linear.w.weight = weights->router, linear.x = home->normed;
    linear.dx = test_plain(run->scratch, TN_BF16, home->rows, run->shape->hidden);
    linear.gradient.dweight = gradients->router[i];
    linear.gradient.accumulate = gradients->accumulate;
    linear.common.scope = run->scratch;
    EXPECT_OK(tn_linear_backward(&linear, NULL, NULL, run->all->stream));
    norm.dy = summed(run, home, rows, linear.dx);
    norm.x = home->x, norm.rstd = home->rstd, norm.gamma = weights->gain;
    norm.added = dy;
    norm.dx = test_plain(run->scratch, TN_BF16, home->rows, run->shape->hidden);
    norm.dgamma = gradients->gain[i], norm.accumulate = gradients->accumulate;
    norm.scope = run->scratch;
    EXPECT_OK(tn_norm_backward(&norm, run->all->stream));
    return norm.dx;
}

void mixture_backward(const mixture_run *run, const mixture_weights *weights,
                      const mixture_gradients *gradients, const tn_tensor *dy, tn_tensor *dx,
                      mixture *m) {
    tn_tensor rows[MIXTURE_RANKS_MAX], dweights[MIXTURE_RANKS_MAX], of_experts = {0};
    tn_tensor back =
        backward_experts(run, weights, gradients, go(run, m, dy, TN_E5M2), &of_experts, m);
    come_back(run, m, back, rows);
    come_back(run, m, of_experts, dweights);
    for (int i = 0; i < mixture_homes(run); i++)
        dx[i] =
            backward_home(run, weights, gradients, i, dy[i], rows[i], dweights[i], &m->homes[i]);
}
