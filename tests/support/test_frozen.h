/* A stack of Linear layers over frozen weights, run for several steps under a policy, and what the
 * ledger says after each pass: for tests of how long columnwise planes live, on
 * any driver.
 */
#ifndef TENURE_TEST_FROZEN_H
#define TENURE_TEST_FROZEN_H

#include "tenure_lifetime.h"
#include "test_ops.h"

enum { FROZEN_LAYERS_MAX = 16, FROZEN_STEPS_MAX = 4 };

typedef struct frozen_config {
    int layers, steps;
    int64_t tokens, width; /* weights are width x width */
    tn_plane_policy policy;
    int has_both_planes;  /* weights are created with ROW and COL */
    int first_with_dgrad; /* layers below compute no gradient of their input */
    int recomputes;       /* backward runs a layer's forward again before it */
    int frozen_from;      /* the step from which the weights are frozen; 0: always */
    int derives_ahead;    /* the last forward and each backward have the plane that comes next
                             derived on another stream */
    int scratch_buffers;  /* of the weights' scope; 0: no slot of its own */
} frozen_config;

/* Bytes of the weights' columnwise planes, and of everything. */
typedef struct frozen_result {
    size_t col_after_forward[FROZEN_STEPS_MAX];
    size_t col_after_backward[FROZEN_STEPS_MAX];
    size_t total_after_step[FROZEN_STEPS_MAX];
    size_t peak_col_bytes;   /* of all steps */
    size_t peak_total_bytes; /* of all steps */
    size_t gradient_bytes;
    unsigned char *gradients; /* of the stack's input, each step; NULL on a device that moves no
                                 data */
} frozen_result;

/* Elements and scales of one plane of a weight: ROW and COL take the same. */
size_t frozen_plane_bytes(int64_t width);

/* What a buffer of a scratch slot takes: its data to a multiple of 256, and scales. */
size_t frozen_buffer_bytes(int64_t width);

/* Runs the stack in scopes of its own below ops->scope, gone afterwards. Fails the test if a call
 * fails or the ledger is not the pool's after any pass. */
void frozen_run(test_ops *ops, const frozen_config *config, frozen_result *out);
void frozen_result_free(frozen_result *result);

/* Columnwise bytes of the weights: after the first forward, then after every pass, and their
 * peak; and what else stays beside the ROW planes. Where planes are derived ahead, every forward
 * leaves as many as the first one, or those that stay. */
typedef struct frozen_bytes {
    size_t at_first, kept, peak, scratch;
    int scratch_from; /* the step that makes the slot */
} frozen_bytes;

void frozen_expect(const frozen_config *config, const frozen_result *result,
                   const frozen_bytes *bytes);

/* Also that they are no zeros. No-op on a device that moves no data. */
void frozen_expect_same_gradients(const frozen_config *config, const frozen_result *a,
                                  const frozen_result *b);

#endif
