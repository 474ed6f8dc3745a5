/* Layers of a small transformer over ranks, or alone: see rank_trainer_support.h. */
#include <stdlib.h>
#include <string.h>

#include "rank_trainer_support.h"
#include "tenure_attention.h"

enum { H = TRAINER_HIDDEN, HEADS = 4, SEQUENCE = 8, BLOCK_HEADS = 2 };

static int64_t group_rows(const trainer *t, int group) {
    const int first = group * t->layout.tensor_ranks;
    return parallel_first(t->layout.rows + first, t->layout.tensor_ranks);
}

/* Which of a parameter's gradients are those of a home (or group, or replica). */
static tn_tensor gradient_of(const micro_batch *b, const parameter *p, int i) {
    const trainer_layout *layout = &b->t->layout;
    if (p->is_frozen || p->has_no_gradient) return (tn_tensor){0};
    if (!b->t->is_alone) return p->gradient[0];
    return p->gradient[b->replica * (trainer_count(layout, p->extent) / layout->replicas) + i];
}

/* ---- attention ------------------------------------------------------------------------------- */

static block_shape shape_of(const trainer *t, int home) {
    return (block_shape){.hidden = H,
                         .heads = HEADS,
                         .sequence = SEQUENCE,
                         .tokens = t->layout.rows[trainer_rank(t, home)]};
}

static block_weights attention_of(const micro_batch *b, const trained_layer *l, int home) {
    block_weights weights = {.accumulate = b->accumulate};
    for (int part = BLOCK_GAIN_1; part <= BLOCK_PROJECTION; part++) {
        weights.weight[part] = l->parts[part].weight;
        weights.gradient[part] = gradient_of(b, &l->parts[part], home);
    }
    return weights;
}

static void forward_attention(const micro_batch *b, const trained_layer *l, activations *a) {
    for (int i = 0; i < trainer_homes(b->t); i++) {
        const block_shape shape = shape_of(b->t, i);
        const block_run run = {&shape, b->scope, b->t->all->stream};
        const block_weights weights = attention_of(b, l, i);
        a->blocks[i] = (block){.saved = a->saved, .x = a->x[i]};
        a->sum[i] =
            trainer_added(b->t, a->x[i], block_attention_forward(&run, &weights, &a->blocks[i]));
    }
}

static void backward_attention(const micro_batch *b, const trained_layer *l, tn_tensor *dy,
                               activations *a) {
    for (int i = 0; i < trainer_homes(b->t); i++) {
        const block_shape shape = shape_of(b->t, i);
        const block_run run = {&shape, b->scope, b->t->all->stream};
        const block_weights weights = attention_of(b, l, i);
        dy[i] = block_attention_backward(&run, &weights, dy[i], 1, &a->blocks[i]);
    }
}

/* ---- the MLP --------------------------------------------------------------------------------- */

static int group_count(const trainer *t) {
    return t->is_alone ? t->layout.ranks / t->layout.tensor_ranks : 1;
}

/* Alone: the homes of a group one behind the other, and each of them from there. */
static void copy_parts(const micro_batch *b, int group, tn_tensor whole, tn_tensor *parts,
                       int is_join) {
    const int ranks = b->t->layout.tensor_ranks, first = group * ranks;
    const int64_t *rows = b->t->layout.rows + first;
    for (int i = 0; i < ranks; i++) {
        tn_convert_args copy = TN_CONVERT_ARGS_INIT;
        tn_tensor view;
        EXPECT_OK(tn_tensor_view_rows(whole, parallel_first(rows, i), rows[i], b->scope, &view));
        if (!is_join) parts[first + i] = test_plain(b->scope, TN_BF16, rows[i], H);
        copy.x = is_join ? parts[first + i] : view;
        copy.y = is_join ? view : parts[first + i];
        EXPECT_OK(tn_convert(&copy, b->t->all->stream));
        EXPECT_OK(tn_tensor_destroy(view, b->t->all->stream));
    }
}

static tn_tensor join(const micro_batch *b, int group, tn_tensor *parts) {
    if (!b->t->is_alone) return parts[0];
    tn_tensor whole = test_plain(b->scope, TN_BF16, group_rows(b->t, group), H);
    EXPECT_OK(tn_plane_fill(whole, TN_PLANE_DATA, 0, b->t->all->stream));
    copy_parts(b, group, whole, parts, 1);
    return whole;
}

static void hand_out(const micro_batch *b, int group, tn_tensor whole, tn_tensor *parts) {
    if (b->t->is_alone)
        copy_parts(b, group, whole, parts, 0);
    else
        parts[0] = whole;
}

static tn_parallel parallel_of(const trainer *t) {
    tn_parallel parallel = TN_PARALLEL_INIT;
    parallel.sequence.comm = t->group;
    parallel.sequence.rows =
        t->layout.rows + trainer_rank(t, 0) / t->layout.tensor_ranks * t->layout.tensor_ranks;
    parallel.stream = t->all->other;
    return parallel;
}

static tn_tensor new_rows(const micro_batch *b, int group) {
    const trainer *t = b->t;
    const int64_t rows = t->is_alone ? group_rows(t, group) : t->layout.rows[trainer_rank(t, 0)];
    return test_plain(b->scope, TN_BF16, rows, H);
}

static tn_layer_common common_of(const micro_batch *b, const activations *a) {
    tn_layer_common common = TN_LAYER_COMMON_INIT;
    common.scope = b->scope, common.saved_scope = a->saved;
    common.recompute = b->saving == RECOMPUTES_MLP;
    return common;
}

static void forward_mlp(const micro_batch *b, const trained_layer *l, activations *a) {
    const tn_parallel parallel = parallel_of(b->t);
    for (int g = 0; g < group_count(b->t); g++) {
        tn_norm_mlp_forward_args args = TN_NORM_MLP_FORWARD_ARGS_INIT;
        args.norm.x = a->joined[g] = join(b, g, a->sum);
        args.norm.gamma = l->parts[GAIN_2].weight;
        args.w1.weight = l->parts[UP].weight, args.w2.weight = l->parts[DOWN].weight;
        args.y = new_rows(b, g);
        args.common = common_of(b, a);
        EXPECT_OK(b->t->group ? tn_parallel_norm_mlp_forward(&parallel, &args, &a->mlp[g],
                                                             b->t->all->stream)
                              : tn_norm_mlp_forward(&args, &a->mlp[g], b->t->all->stream));
        hand_out(b, g, trainer_added(b->t, a->joined[g], args.y), a->value);
    }
}

static void do_late(const micro_batch *b, tn_delayed_gradient *delayed) {
    for (int i = 0; i < 2; i++)
        if (delayed[i].dweight.value)
            EXPECT_OK(tn_weight_gradient(&delayed[i], b->scope, b->t->all->stream));
}

static void backward_mlp(const micro_batch *b, const trained_layer *l, tn_tensor *dy,
                         activations *a) {
    const tn_parallel parallel = parallel_of(b->t);
    const int delays = b->saving == DELAYS_MLP && !b->t->is_alone;
    for (int g = 0; g < group_count(b->t); g++) {
        tn_norm_mlp_backward_args args = TN_NORM_MLP_BACKWARD_ARGS_INIT;
        tn_delayed_gradient delayed[2] = {TN_DELAYED_GRADIENT_INIT, TN_DELAYED_GRADIENT_INIT};
        args.dy = args.norm.added = join(b, g, dy);
        args.norm.x = a->joined[g], args.norm.gamma = l->parts[GAIN_2].weight;
        args.norm.dx = new_rows(b, g);
        args.norm.dgamma = gradient_of(b, &l->parts[GAIN_2], g);
        args.w1.weight = l->parts[UP].weight, args.w2.weight = l->parts[DOWN].weight;
        args.gradient1.dweight = gradient_of(b, &l->parts[UP], g);
        args.gradient2.dweight = gradient_of(b, &l->parts[DOWN], g);
        args.norm.accumulate = args.gradient1.accumulate = args.gradient2.accumulate =
            b->accumulate;
        args.gradient1.delay = delays && args.gradient1.dweight.value;
        args.gradient2.delay = delays && args.gradient2.dweight.value;
        args.common = common_of(b, a);
        EXPECT_OK(b->t->group
                      ? tn_parallel_norm_mlp_backward(&parallel, &args, &a->mlp[g], delayed,
                                                      b->t->all->stream)
                      : tn_norm_mlp_backward(&args, &a->mlp[g], delayed, b->t->all->stream));
        do_late(b, delayed);
        hand_out(b, g, args.norm.dx, dy);
    }
}

/* ---- attention whose heads are cut ----------------------------------------------------------- */

/* A block of 128 features is two heads of queries, or a head of keys and one of values. */
typedef struct cut_shape {
    int64_t tokens, blocks; /* of the group; that this rank has */
} cut_shape;

static cut_shape cut_shape_of(const trainer *t, int group) {
    const int tensor = t->layout.tensor_ranks;
    if (t->is_alone) return (cut_shape){group_rows(t, group), tensor};
    return (cut_shape){group_rows(t, trainer_rank(t, 0) / tensor), 1};
}

static tn_tensor copied(const micro_batch *b, tn_tensor from, int64_t rows, int64_t cols) {
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    args.x = from, args.y = test_plain(b->scope, TN_BF16, rows, cols);
    EXPECT_OK(tn_convert(&args, b->t->all->stream));
    return args.y;
}

/* Rows of 128, block by block, and of each block by token, `each` tensors of them side by side;
 * from those that lie tensor by tensor, and of each by token, then by block. Or the way back. */
static tn_tensor reordered(const micro_batch *b, tn_tensor from, const cut_shape *of, int each,
                           int is_back) {
    const mixture_run run = {.all = b->t->all, .scratch = b->scope, .error = b->t->error};
    const int64_t rows = of->tokens * of->blocks * each;
    int64_t *numbers = malloc((size_t)rows * sizeof *numbers);
    assert_non_null(numbers);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t part = i / each / of->tokens, token = i / each % of->tokens;
        const int64_t at = (i % each * of->tokens + token) * of->blocks + part;
        if (is_back)
            numbers[at] = i;
        else
            numbers[i] = at;
    }
    tn_tensor map = mixture_map(&run, b->scope, numbers, rows, 1);
    free(numbers);
    return mixture_gathered(&run, b->scope, copied(b, from, rows, TRAINER_BLOCK), map);
}

static void project(const micro_batch *b, const trained_layer *l, const activations *a, int part,
                    tn_tensor x, tn_tensor y, tn_norm_linear_saved *saved) {
    const tn_parallel parallel = parallel_of(b->t);
    tn_norm_linear_forward_args args = TN_NORM_LINEAR_FORWARD_ARGS_INIT;
    args.norm.x = x, args.norm.gamma = l->parts[GAIN_1].weight;
    args.w.weight = l->parts[part].weight, args.y = y;
    args.common = common_of(b, a);
    EXPECT_OK(b->t->group
                  ? tn_column_norm_linear_forward(&parallel, &args, saved, b->t->all->stream)
                  : tn_norm_linear_forward(&args, saved, b->t->all->stream));
}

/* Queries of all blocks, then keys and values. */
static tn_tensor project_both(const micro_batch *b, const trained_layer *l, const activations *a,
                              const cut_shape *of, cut_attention *c) {
    const int64_t rows = of->tokens * of->blocks;
    tn_tensor both = test_plain(b->scope, TN_BF16, 2 * rows, TRAINER_BLOCK);
    EXPECT_OK(tn_plane_fill(both, TN_PLANE_DATA, 0, b->t->all->stream));
    for (int i = 0; i < 2; i++) {
        tn_convert_args copy = TN_CONVERT_ARGS_INIT;
        copy.x = test_plain(b->scope, TN_BF16, of->tokens, of->blocks * TRAINER_BLOCK);
        project(b, l, a, i ? KEYS : QKV, c->x, copy.x, i ? &c->keys : &c->queries);
        EXPECT_OK(tn_tensor_view_rows(both, i * rows, rows, b->scope, &copy.y));
        EXPECT_OK(tn_convert(&copy, b->t->all->stream));
        EXPECT_OK(tn_tensor_destroy(copy.y, b->t->all->stream));
    }
    return both;
}

static void attend(const micro_batch *b, const activations *a, const cut_shape *of,
                   cut_attention *c) {
    tn_attention_forward_args args = TN_ATTENTION_FORWARD_ARGS_INIT;
    const int64_t rows = of->tokens * of->blocks;
    args.qkv = c->qkv;
    args.y = c->attended = test_plain(a->saved, TN_BF16, rows, TRAINER_BLOCK);
    args.log_sum = c->log_sum = test_plain(a->saved, TN_FP32, BLOCK_HEADS, rows);
    args.heads = BLOCK_HEADS, args.heads_kv = 1, args.sequence = SEQUENCE, args.is_causal = 1;
    EXPECT_OK(tn_attention_forward(&args, b->t->all->stream));
}

static void forward_cut_attention(const micro_batch *b, const trained_layer *l, activations *a) {
    const tn_parallel parallel = parallel_of(b->t);
    const tn_stream stream = b->t->all->stream;
    for (int g = 0; g < group_count(b->t); g++) {
        const cut_shape of = cut_shape_of(b->t, g);
        const int64_t rows = of.tokens * of.blocks;
        cut_attention *c = &a->cut[g];
        tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
        c->x = join(b, g, a->x);
        tn_tensor both = reordered(b, project_both(b, l, a, &of, c), &of, 2, 0);
        c->qkv = copied(b, both, rows, (int64_t)2 * TRAINER_BLOCK);
        attend(b, a, &of, c);
        c->merged =
            copied(b, reordered(b, c->attended, &of, 1, 1), of.tokens, of.blocks * TRAINER_BLOCK);
        args.x = c->merged, args.w.weight = l->parts[PROJECTION].weight;
        args.y = new_rows(b, g), args.common = common_of(b, a);
        EXPECT_OK(b->t->group ? tn_row_linear_forward(&parallel, &args, &c->projection, stream)
                              : tn_linear_forward(&args, &c->projection, stream));
        hand_out(b, g, trainer_added(b->t, c->x, args.y), a->sum);
    }
}

static tn_tensor back_attention(const micro_batch *b, tn_tensor dy, const cut_shape *of,
                                const cut_attention *c) {
    tn_attention_backward_args args = TN_ATTENTION_BACKWARD_ARGS_INIT;
    const int64_t rows = of->tokens * of->blocks;
    args.dy = reordered(b, dy, of, 1, 0);
    args.qkv = c->qkv, args.y = c->attended, args.log_sum = c->log_sum;
    args.dqkv = test_plain(b->scope, TN_BF16, rows, (int64_t)2 * TRAINER_BLOCK);
    args.heads = BLOCK_HEADS, args.heads_kv = 1, args.sequence = SEQUENCE, args.is_causal = 1;
    args.scope = b->scope;
    EXPECT_OK(tn_attention_backward(&args, b->t->all->stream));
    return reordered(b, args.dqkv, of, 2, 1);
}

static tn_tensor back_projection(const micro_batch *b, const trained_layer *l, int g, tn_tensor dy,
                                 const cut_shape *of, const activations *a, cut_attention *c) {
    const tn_parallel parallel = parallel_of(b->t);
    const tn_stream stream = b->t->all->stream;
    tn_linear_backward_args args = TN_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = dy, args.x = c->merged, args.w.weight = l->parts[PROJECTION].weight;
    args.dx = test_plain(b->scope, TN_BF16, of->tokens, of->blocks * TRAINER_BLOCK);
    args.gradient.dweight = gradient_of(b, &l->parts[PROJECTION], g);
    args.gradient.accumulate = b->accumulate;
    args.common = common_of(b, a);
    EXPECT_OK(b->t->group ? tn_row_linear_backward(&parallel, &args, &c->projection, NULL, stream)
                          : tn_linear_backward(&args, &c->projection, NULL, stream));
    return args.dx;
}

/* Of keys and values first (part KEYS), whose gradient of the gain that of the queries adds to. */
static tn_tensor back_part(const micro_batch *b, const trained_layer *l, int g, int part,
                           tn_tensor dy, tn_tensor added, const activations *a, cut_attention *c) {
    const tn_parallel parallel = parallel_of(b->t);
    const tn_stream stream = b->t->all->stream;
    tn_norm_linear_saved *saved = part == KEYS ? &c->keys : &c->queries;
    tn_norm_linear_backward_args args = TN_NORM_LINEAR_BACKWARD_ARGS_INIT;
    args.dy = dy, args.w.weight = l->parts[part].weight;
    args.norm.x = c->x, args.norm.gamma = l->parts[GAIN_1].weight;
    args.norm.added = added, args.norm.dx = new_rows(b, g);
    args.norm.dgamma = gradient_of(b, &l->parts[GAIN_1], g);
    args.norm.accumulate = b->accumulate || part == QKV;
    args.gradient.dweight = gradient_of(b, &l->parts[part], g);
    args.gradient.accumulate = b->accumulate;
    args.common = common_of(b, a);
    EXPECT_OK(b->t->group ? tn_column_norm_linear_backward(&parallel, &args, saved, NULL, stream)
                          : tn_norm_linear_backward(&args, saved, NULL, stream));
    return args.norm.dx;
}

static void backward_cut_attention(const micro_batch *b, const trained_layer *l, tn_tensor *dy,
                                   activations *a) {
    for (int g = 0; g < group_count(b->t); g++) {
        const cut_shape of = cut_shape_of(b->t, g);
        const int64_t rows = of.tokens * of.blocks, cols = of.blocks * TRAINER_BLOCK;
        cut_attention *c = &a->cut[g];
        tn_tensor d = join(b, g, dy);
        tn_tensor both = back_attention(b, back_projection(b, l, g, d, &of, a, c), &of, c);
        for (int part = KEYS;; part = QKV) {
            tn_tensor view;
            EXPECT_OK(tn_tensor_view_rows(both, part == KEYS ? rows : 0, rows, b->scope, &view));
            d = back_part(b, l, g, part, copied(b, view, of.tokens, cols), d, a, c);
            if (part == QKV) break;
        }
        hand_out(b, g, d, dy);
    }
}

/* ---- the mixture ----------------------------------------------------------------------------- */

/* What the mixture's calls are given, with arrays of the handles. */
typedef struct mixture_call {
    mixture_shape shape;
    mixture_run run;
    mixture_weights weights;
    mixture_gradients gradients;
    tn_tensor up[TRAINER_EXPERTS], down[TRAINER_EXPERTS], dup[TRAINER_EXPERTS],
        ddown[TRAINER_EXPERTS];
    tn_tensor dgain[TRAINER_RANKS_MAX], drouter[TRAINER_RANKS_MAX];
} mixture_call;

static void make_call(const micro_batch *b, const trained_layer *l, mixture_call *c) {
    const trainer *t = b->t;
    memset(c, 0, sizeof *c);
    c->shape = (mixture_shape){.hidden = H,
                               .ffn = TRAINER_EXPERT_FFN,
                               .experts = TRAINER_EXPERTS,
                               .ranks = t->layout.ranks,
                               .rows = t->layout.rows};
    c->run = (mixture_run){b->t->all, &c->shape, t->replica, b->scope, t->error};
    c->weights =
        (mixture_weights){l->parts[GAIN_3].weight, l->parts[ROUTER].weight, c->up, c->down};
    c->gradients = (mixture_gradients){c->dgain, c->drouter, c->dup, c->ddown, b->accumulate};
    for (int i = 0; i < trainer_homes(b->t); i++) {
        c->dgain[i] = gradient_of(b, &l->parts[GAIN_3], i);
        c->drouter[i] = gradient_of(b, &l->parts[ROUTER], i);
    }
    for (int64_t e = 0; e < trainer_own_experts(b->t); e++) {
        c->up[e] = l->expert_up[e].weight, c->down[e] = l->expert_down[e].weight;
        c->dup[e] = gradient_of(b, &l->expert_up[e], 0);
        c->ddown[e] = gradient_of(b, &l->expert_down[e], 0);
    }
}

static void forward_experts(const micro_batch *b, const trained_layer *l, tn_tensor *y,
                            activations *a) {
    mixture_call call;
    make_call(b, l, &call);
    mixture_forward(&call.run, &call.weights, a->saved, a->value, y, &a->mixture);
}

static void backward_experts(const micro_batch *b, const trained_layer *l, tn_tensor *dy,
                             activations *a) {
    tn_tensor dx[TRAINER_RANKS_MAX];
    mixture_call call;
    make_call(b, l, &call);
    mixture_backward(&call.run, &call.weights, &call.gradients, dy, dx, &a->mixture);
    memcpy(dy, dx, (size_t)trainer_homes(b->t) * sizeof *dx);
}

/* ---- a layer --------------------------------------------------------------------------------- */

static void run_forward(const micro_batch *b, const trained_layer *l, tn_tensor *y,
                        activations *a) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.parent = b->scope, config.kind = TN_SCOPE_SAVED, config.name = "layer";
    EXPECT_OK(tn_scope_create(&config, &a->saved));
    memset(a->mlp, 0, sizeof a->mlp);
    memset(a->cut, 0, sizeof a->cut);
    switch (b->t->layout.attention) {
    case OWN_TOKENS: forward_attention(b, l, a); break;
    case CUT_HEADS: forward_cut_attention(b, l, a); break;
    default: memcpy(a->sum, a->x, sizeof a->sum);
    }
    forward_mlp(b, l, a);
    if (b->t->layout.has_experts)
        forward_experts(b, l, y, a);
    else
        memcpy(y, a->value, sizeof a->value);
}

void trainer_forward(const micro_batch *b, const trained_layer *l, tn_tensor *y, activations *a) {
    trainer_put(b->t, tn_sharded_forward_begin, l);
    run_forward(b, l, y, a);
    if (b->saving == RECOMPUTES_LAYERS) EXPECT_OK(tn_scope_close(a->saved));
    trainer_put(b->t, tn_sharded_forward_end, l);
}

void trainer_backward(const micro_batch *b, const trained_layer *l, tn_tensor *dy, activations *a) {
    tn_tensor y[TRAINER_RANKS_MAX];
    trainer_put(b->t, tn_sharded_backward_begin, l);
    if (b->saving == RECOMPUTES_LAYERS) run_forward(b, l, y, a);
    if (b->t->layout.has_experts) backward_experts(b, l, dy, a);
    backward_mlp(b, l, dy, a);
    if (b->t->layout.attention == OWN_TOKENS) backward_attention(b, l, dy, a);
    if (b->t->layout.attention == CUT_HEADS) backward_cut_attention(b, l, dy, a);
    EXPECT_OK(tn_scope_close(a->saved));
    trainer_put(b->t, tn_sharded_backward_end, l);
}
