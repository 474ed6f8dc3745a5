/* A training step of a stack of Linear layers, for tests that do not look at its values: it can
 * fail anywhere, and says where it first did.
 *
 * Frozen weights get no gradient; with `trainable` every layer saves x and computes dw. */
#ifndef TENURE_TEST_OPS_STEP_H
#define TENURE_TEST_OPS_STEP_H

#include "test_ops.h"

enum { TEST_LAYERS_MAX = 16 };

typedef struct test_stack {
    int layers;
    int64_t tokens, width; /* weights are width x width */
    tn_plane_policy policy;
    int trainable;
    tn_tensor weights[TEST_LAYERS_MAX];
    char failure[2048]; /* tn_error_last() of the first call that failed */
} test_stack;

/* Makes the weights in `scope` and quantizes them, from sources that are gone afterwards. */
tn_status test_stack_load(test_stack *stack, tn_scope scope, tn_stream stream);

/* Forward on one stream, backward on another (which may be the same), in a step scope below
 * `parent` that is closed at the end; if a call fails, as well as can be. */
tn_status test_stack_step(test_stack *stack, tn_scope parent, tn_stream forward,
                          tn_stream backward);

#endif
