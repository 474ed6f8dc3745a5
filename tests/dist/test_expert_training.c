/* Training with experts over ranks has the losses and weights of one rank, bit for bit: by
 * themselves, beside tensor-parallel ranks with sequence-parallel activations, in replicas over
 * other data, and with all that ranks have in common in shards. What is trained, and why the bits
 * are equal, says rank_trainer_support.h. */
#include "rank_trainer_support.h"

static rank_fixture all;

static int few_layers(void) { return all.count > 2 ? 1 : TRAINER_LAYERS_MAX; }

static trainer_layout layout_of(int replicas, int ranks, int tensor_ranks) {
    return (trainer_layout){.replicas = replicas,
                            .ranks = ranks,
                            .tensor_ranks = tensor_ranks,
                            .layers = 1,
                            .micro_batches = 1,
                            .attention = OWN_TOKENS,
                            .has_experts = 1};
}

/* All ranks have all else, with any numbers of tokens. */
static void experts_over_ranks_train_as_on_one_rank(void **state) {
    static const int64_t rows[TRAINER_RANKS_MAX] = {72, 40, 128, 24};
    trainer_layout layout = layout_of(1, all.count, 1);
    (void)state;
    layout.layers = few_layers(), layout.micro_batches = 2;
    for (int r = 0; r < all.count; r++)
        layout.rows[r] = rows[r];
    trainer_compare(&all, "experts", &layout);
}

static void replicas_of_experts_train_as_one_rank(void **state) {
    (void)state;
    if (all.count % 2 != 0) return;
    trainer_layout layout = layout_of(2, all.count / 2, 1);
    layout.micro_batches = 2;
    layout.rows[0] = 72, layout.rows[1] = 40;
    trainer_compare(&all, "experts x data", &layout);
}

static void experts_over_tensor_ranks_train_as_on_one_rank(void **state) {
    trainer_layout layout = layout_of(1, all.count, all.count);
    (void)state;
    if (all.count == 1) return;
    if (all.count == 2) layout.attention = CUT_HEADS;
    for (int r = 0; r < all.count; r++)
        layout.rows[r] = r == all.count - 1 ? 40 : 128;
    trainer_compare(&all, "experts x tensor", &layout);
}

static void experts_over_tensor_groups_train_as_on_one_rank(void **state) {
    trainer_layout layout = layout_of(1, 4, 2);
    (void)state;
    if (all.count != 4) return;
    layout.rows[0] = layout.rows[2] = 128, layout.rows[1] = 40, layout.rows[3] = 24;
    trainer_compare(&all, "experts over tensor groups", &layout);
}

/* What ranks have in common is in shards on them: experts over replicas, the MLP over tensor
 * groups, all else over all ranks. */
static void train_in_shards(const char *name, trainer_layout layout, trainer_sharding sharding) {
    const int is_cut = layout.tensor_ranks > 1;
    layout.layers = few_layers(), layout.micro_batches = is_cut ? 1 : 2;
    layout.attention = is_cut ? CUT_HEADS : OWN_TOKENS;
    for (int r = 0; r < layout.ranks; r++)
        layout.rows[r] = r == layout.ranks - 1 ? 24 : is_cut ? 128 : 40;
    layout.sharding = sharding;
    trainer_compare(&all, name, &layout);
}

static void shards_of_experts_and_of_all_else_train_as_one_rank(void **state) {
    const int is_even = all.count % 2 == 0;
    const trainer_layout layout = layout_of(is_even ? 2 : 1, all.count / (is_even ? 2 : 1), 1);
    (void)state;
    if (all.count == 1) return;
    train_in_shards("experts in shards", layout, SHARDED);
    if (all.count == 2) {
        train_in_shards("experts in shards, kept after forward", layout, KEPT_AFTER_FORWARD);
        train_in_shards("experts in shards, kept after backward", layout, KEPT_AFTER_BACKWARD);
    }
    if (all.count == 4)
        train_in_shards("experts x tensor x data in shards", layout_of(2, 2, 2),
                        KEPT_AFTER_FORWARD);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_over_ranks_train_as_on_one_rank),
        cmocka_unit_test(replicas_of_experts_train_as_one_rank),
        cmocka_unit_test(experts_over_tensor_ranks_train_as_on_one_rank),
        cmocka_unit_test(experts_over_tensor_groups_train_as_on_one_rank),
        cmocka_unit_test(shards_of_experts_and_of_all_else_train_as_one_rank),
    };
    return RANKS_RUN(&all, tests);
}
