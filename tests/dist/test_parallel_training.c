/* Training over tensor-parallel ranks with sequence-parallel activations, attention's heads and the
 * MLP cut, and with data-parallel groups of them, has the losses and weights of one rank, bit for
 * bit. What is trained, and why the bits are equal, says rank_trainer_support.h. */
#include "rank_trainer_support.h"

static rank_fixture all;

static void train_and_compare(const char *name, int groups, int layers, int micro_batches,
                              trainer_attention attention) {
    trainer_layout layout = {.replicas = groups,
                             .layers = layers,
                             .micro_batches = micro_batches,
                             .attention = attention};
    layout.ranks = layout.tensor_ranks = all.count / groups;
    for (int r = 0; r < layout.ranks; r++)
        layout.rows[r] = r == layout.ranks - 1 ? 40 : 128;
    trainer_compare(&all, name, &layout);
}

static void tensor_parallel_training_is_that_of_one_rank(void **state) {
    const int is_small = all.count > 2;
    (void)state;
    train_and_compare("tensor", 1, is_small ? 1 : TRAINER_LAYERS_MAX, is_small ? 1 : 2,
                      NO_ATTENTION);
}

static void heads_over_tensor_ranks_train_as_on_one_rank(void **state) {
    (void)state;
    if (all.count <= 2) train_and_compare("tensor, with attention", 1, 1, 1, CUT_HEADS);
}

static void tensor_times_data_parallel_training_is_that_of_one_rank(void **state) {
    (void)state;
    if (all.count % 2 == 0) train_and_compare("tensor x data", 2, 1, 2, NO_ATTENTION);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensor_parallel_training_is_that_of_one_rank),
        cmocka_unit_test(heads_over_tensor_ranks_train_as_on_one_rank),
        cmocka_unit_test(tensor_times_data_parallel_training_is_that_of_one_rank),
    };
    return RANKS_RUN(&all, tests);
}
