/* A training step with collectives, as a program captures it: a layer's forward and backward, the
 * reduction of its gradients on a second stream, there and back, and the update. */
#ifndef TENURE_TEST_COMM_STEP_H
#define TENURE_TEST_COMM_STEP_H

#include "tenure_dist.h"
#include "test_layers.h"

/* What a step calls. */
enum { TEST_COMM_STEP_BATCHES = 3, TEST_COMM_STEP_REDUCTIONS = 4, TEST_COMM_STEP_GROUPS = 1 };

typedef struct test_comm_step {
    test_layer layer;
    tn_comm *comm;
    tn_stream other;
    float *sums[2]; /* of the gradients */
} test_comm_step;

/* A LayerNormMLP in FP8 and its optimizer. has_no_values: the device computes nothing. */
test_comm_step test_comm_step_open(const test_ops *ops, tn_comm *comm, tn_stream other,
                                   int has_no_values);
void test_comm_step_close(test_comm_step *step);

/* All on the layer's stream and `other`, which is behind it before and before it behind. */
void test_comm_step_run(test_comm_step *step);

#endif
