/* Steps of a small transformer over ranks, or alone, and one held against the other: see
 * rank_trainer_support.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rank_trainer_support.h"
#include "rank_values_support.h"

enum {
    H = TRAINER_HIDDEN,
    STEPS = TRAINER_STEPS,
    NUMBERS = PARTS + 2 * TRAINER_EXPERTS,
    PATIENCE_US = 120 * 1000 * 1000 /* of ranks that wait for the one that trains alone */
};

/* ---- a micro-batch --------------------------------------------------------------------------- */

/* The ranks' rows of a micro-batch, as this rank has them. */
static void fill_rows(const micro_batch *b, uint32_t seed, tn_tensor *homes) {
    const int64_t *rows = b->t->layout.rows;
    parallel_matrix whole =
        parallel_numbers(parallel_first(rows, b->t->layout.ranks), H, seed + (uint32_t)b->replica);
    for (int i = 0; i < trainer_homes(b->t); i++) {
        const int rank = trainer_rank(b->t, i);
        parallel_matrix own = parallel_part(&whole, parallel_first(rows, rank), rows[rank], 0, H);
        homes[i] = parallel_tensor(b->t->all, b->scope, TN_BF16, &own);
        parallel_free(&own);
    }
    parallel_free(&whole);
}

/* Adds half the sum of squares of y - target, made on the host, to `loss`; the difference is dy. */
static tn_tensor loss_of(const micro_batch *b, tn_tensor y, tn_tensor target, double *loss) {
    const rank_fixture *all = b->t->all;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_convert_args copy = TN_CONVERT_ARGS_INIT;
    tn_axpy_args minus = TN_AXPY_ARGS_INIT;
    EXPECT_OK(tn_tensor_info_get(y, &info));
    copy.x = y, copy.y = minus.y = test_plain(b->scope, TN_BF16, info.rows, info.cols);
    minus.x = target, minus.alpha = -1.0f;
    EXPECT_OK(tn_convert(&copy, all->stream));
    EXPECT_OK(tn_axpy(&minus, all->stream));
    parallel_matrix numbers = parallel_fetch(all, minus.y);
    for (int64_t i = 0; i < numbers.rows * numbers.cols; i++)
        *loss += 0.5 * (double)numbers.at[i] * (double)numbers.at[i];
    parallel_free(&numbers);
    return minus.y;
}

static void note_tokens(trainer *t, const mixture *m) {
    if (!t->layout.has_experts) return;
    for (int64_t e = 0; e < TRAINER_EXPERTS; e++) {
        int64_t tokens = 0;
        for (int r = 0; r < t->layout.ranks; r++)
            tokens += m->tokens[r * TRAINER_EXPERTS + e];
        t->empty += tokens == 0;
        t->changed += tokens != t->tokens[e];
        t->tokens[e] = tokens;
    }
}

/* Forward and backward; losses: of each rank. */
static void pass(trainer *t, const micro_batch *b, uint32_t seed, double *losses) {
    activations a[TRAINER_LAYERS_MAX + 1];
    tn_tensor target[TRAINER_RANKS_MAX], d[TRAINER_RANKS_MAX];
    fill_rows(b, seed, a[0].x);
    fill_rows(b, seed + 50, target);
    for (int i = 0; i < t->layout.layers; i++) {
        trainer_forward(b, &t->layers[i], a[i + 1].x, &a[i]);
        note_tokens(t, &a[i].mixture);
    }
    for (int i = 0; i < trainer_homes(t); i++)
        d[i] = loss_of(b, a[t->layout.layers].x[i], target[i], &losses[i]);
    for (int i = t->layout.layers; i-- > 0;)
        trainer_backward(b, &t->layers[i], d, &a[i]);
    ranks_wait(t->all);
    EXPECT_OK(tn_scope_close(b->scope));
}

/* ---- the update ------------------------------------------------------------------------------ */

static void sum_gradients(const trainer *t, const parameter *p) {
    const rank_fixture *all = t->all;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_plane_view view;
    tn_lease lease;
    if (t->is_alone) {
        for (int i = 1; i < trainer_count(&t->layout, p->extent); i++)
            (void)trainer_added(t, p->gradient[i], p->gradient[0]);
        return;
    }
    EXPECT_OK(tn_tensor_info_get(p->gradient[0], &info));
    EXPECT_OK(tn_lease_begin(p->gradient[0], TN_PLANE_DATA, TN_UPDATE, all->stream, &lease, &view));
    EXPECT_OK(tn_all_reduce(t->sums[p->extent], view.data, view.data,
                            (size_t)(info.rows * info.cols), TN_FP32, TN_REDUCE_SUM, all->stream));
    EXPECT_OK(tn_lease_end(lease));
}

static void update(trainer *t, int layer, parameter *p, void *context) {
    tn_adamw_args args = TN_ADAMW_ARGS_INIT;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    (void)layer, (void)context;
    if (p->is_frozen || p->has_no_gradient) return;
    sum_gradients(t, p);
    EXPECT_OK(tn_tensor_info_get(p->weight, &info));
    args.master = p->master, args.gradient = p->gradient[0];
    args.first = p->first, args.second = p->second;
    args.step = t->step, args.learning_rate = TRAINER_RATE;
    if (info.format != TN_FORMAT_PLAIN) args.weight = p->weight;
    if (info.dtype == TN_BF16) args.plain = p->weight;
    EXPECT_OK(tn_adamw(&args, t->all->stream));
}

static void update_all(trainer *t) {
    tn_adamw_advance_args advance = TN_ADAMW_ADVANCE_ARGS_INIT;
    if (t->layout.sharding && !t->is_alone) {
        trainer_update_sharded(t);
        return;
    }
    advance.step = t->step;
    EXPECT_OK(tn_adamw_advance(&advance, t->all->stream));
    trainer_each(t, update, NULL);
}

static void freeze(trainer *t, int layer, parameter *p, void *context) {
    (void)context;
    if (!trainer_freezes(t, layer, p)) return;
    p->is_frozen = 1;
    EXPECT_OK(tn_tensor_set_frozen(p->weight, 1));
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Of all ranks, in their order. */
static double total_loss(const trainer *t, const double *losses) {
    const rank_fixture *all = t->all;
    const size_t bytes = sizeof *losses;
    double ranks[TRAINER_RANKS_MAX] = {0}, total = 0;
    if (t->is_alone) {
        memcpy(ranks, losses, sizeof ranks);
    } else {
        char *blocks = ranks_take(all, bytes * ((size_t)all->count + 1));
        ranks_put(all, blocks, losses, bytes);
        EXPECT_OK(tn_all_gather(all->comm, blocks, blocks + bytes, bytes, all->stream));
        ranks_get(all, ranks, blocks + bytes, bytes * (size_t)all->count);
        ranks_give(all, blocks);
    }
    for (int i = 0; i < all->count; i++)
        total += ranks[i];
    return total;
}

static void run_batches(trainer *t, int step, double *losses) {
    const int alone = t->is_alone;
    for (int i = 0; i < t->layout.micro_batches; i++) {
        const uint32_t seed = 1000u + 100u * (uint32_t)(step * t->layout.micro_batches + i);
        for (int r = 0; r < (alone ? t->layout.replicas : 1); r++) {
            const micro_batch b = {.t = t,
                                   .scope = parallel_scope(t->all, TN_SCOPE_STEP, "micro-batch"),
                                   .replica = alone ? r : t->all->rank / t->layout.ranks,
                                   .accumulate = i > 0,
                                   .saving = (trainer_saving)(step % SAVINGS)};
            pass(t, &b, seed, losses + r * t->layout.ranks);
        }
    }
}

static void train(trainer *t) {
    for (int s = 0; s < STEPS; s++) {
        double losses[TRAINER_RANKS_MAX] = {0};
        if (s == STEPS / 2 && !t->layout.sharding) trainer_each(t, freeze, NULL);
        run_batches(t, s, losses);
        t->losses[s] = total_loss(t, losses);
        update_all(t);
        ranks_wait(t->all);
        t->live_bytes[s] = test_pool_stats(t->all->pool).live_bytes;
        if (s > 0) assert_int_equal(t->live_bytes[s], t->live_bytes[1]);
    }
    assert_true(t->losses[STEPS - 1] < t->losses[0]);
    if (!t->layout.has_experts) return;
    assert_true(t->empty > 0);
    assert_true(t->changed > STEPS * t->layout.layers);
}

/* ---- against one rank ------------------------------------------------------------------------ */

/* Master copies, of each rank one below the other. */
typedef struct masters {
    parallel_matrix at[TRAINER_LAYERS_MAX][NUMBERS];
} masters;

static void collect(trainer *t, int layer, parameter *p, void *context) {
    const rank_fixture *all = t->all;
    masters *m = context;
    parallel_matrix own =
        t->layout.sharding ? trainer_sharded_master(t, layer, p) : parallel_fetch(all, p->master);
    parallel_matrix whole = parallel_zeros(own.rows * all->count, own.cols);
    const size_t bytes = (size_t)(own.rows * own.cols) * sizeof *own.at;
    char *blocks = ranks_take(all, bytes * ((size_t)all->count + 1));
    ranks_put(all, blocks, own.at, bytes);
    EXPECT_OK(tn_all_gather(all->comm, blocks, blocks + bytes, bytes, all->stream));
    ranks_get(all, whole.at, blocks + bytes, bytes * (size_t)all->count);
    ranks_give(all, blocks);
    parallel_free(&own);
    m->at[layer][p->number] = whole;
}

/* What of one rank's master copy a rank has: all, or its part of what is cut. */
static parallel_matrix part_of(const trainer_layout *layout, const parameter *p, int rank,
                               const parallel_matrix *whole) {
    const int64_t at = (int64_t)TRAINER_BLOCK * (rank % layout->tensor_ranks);
    if (p->extent == OF_GROUP && (p->number == UP || p->number == QKV || p->number == KEYS))
        return parallel_part(whole, at, TRAINER_BLOCK, 0, H);
    if (p->extent == OF_GROUP && (p->number == DOWN || p->number == PROJECTION))
        return parallel_part(whole, 0, H, at, TRAINER_BLOCK);
    return parallel_part(whole, 0, whole->rows, 0, whole->cols);
}

static void expect_same(const trainer *whole, int layer, const parameter *p, int rank,
                        const parallel_matrix *found, parallel_matrix expected) {
    const int64_t count = expected.rows * expected.cols;
    assert_int_equal(found->rows, expected.rows * whole->all->count);
    assert_int_equal(found->cols, expected.cols);
    for (int64_t i = 0; i < count; i++) {
        const float a = found->at[rank * count + i], e = expected.at[i];
        if (!(a == e))
            fail_msg("rank %d of %d, layer %d, parameter %d: at %lld of %lld x %lld %a, expected "
                     "%a",
                     rank, whole->all->count, layer, p->number, (long long)i,
                     (long long)expected.rows, (long long)expected.cols, (double)a, (double)e);
    }
    parallel_free(&expected);
}

static void compare(trainer *whole, int layer, parameter *p, void *context) {
    const masters *found = context;
    const trainer_layout *layout = &whole->layout;
    const int own = TRAINER_EXPERTS / layout->ranks, expert = (p->number - PARTS) / 2;
    if (layout->sharding && (p->is_frozen || p->has_no_gradient)) return; /* no master copy */
    parallel_matrix values = parallel_fetch(whole->all, p->master);
    for (int rank = 0; rank < whole->all->count; rank++) {
        int number = p->number;
        if (p->extent == OF_REPLICA) {
            if (rank % layout->ranks != expert / own) continue;
            number -= 2 * own * (expert / own);
        }
        expect_same(whole, layer, p, rank, &found->at[layer][number],
                    part_of(layout, p, rank, &values));
    }
    parallel_free(&values);
}

static void compare_with_one_rank(const trainer *t, masters *found) {
    trainer *whole = trainer_open(t->all, &t->layout, 1);
    train(whole);
    for (int s = 0; s < STEPS; s++)
        if (whole->losses[s] != t->losses[s])
            fail_msg("%d ranks: step %d has loss %.17g, expected %.17g", t->all->count, s,
                     t->losses[s], whole->losses[s]);
    trainer_each(whole, compare, found);
    trainer_close(whole);
}

void trainer_compare(const rank_fixture *all, const char *name, const trainer_layout *layout) {
    tn_comm *patient = ranks_comm(all, "patient", PATIENCE_US);
    trainer *t = trainer_open(all, layout, 0);
    masters found = {0};
    train(t);
    trainer_each(t, collect, &found);
    if (all->rank == 0)
        printf("  %s: loss %.1f to %.1f, %zu bytes after each step, %d times no tokens\n", name,
               t->losses[0], t->losses[STEPS - 1], t->live_bytes[1], t->empty);
    if (!ranks_sum_in_order(all))
        (void)ranks_leaves_out(all, "its sums have an order of their own");
    else if (all->rank == 0)
        compare_with_one_rank(t, &found);
    for (int i = 0; i < TRAINER_LAYERS_MAX * NUMBERS; i++)
        parallel_free(&found.at[i / NUMBERS][i % NUMBERS]);
    trainer_close(t);
    EXPECT_OK(tn_barrier(patient, all->stream));
    EXPECT_OK(tn_comm_wait(patient));
    EXPECT_OK(tn_comm_destroy(patient));
}
