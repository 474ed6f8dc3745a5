/* Trains the demo's model under a policy, beside one that keeps all planes, and measures what the
 * demo reports.
 */
#ifndef TENURE_DEMO_TRAIN_H
#define TENURE_DEMO_TRAIN_H

#include "demo_model.h"

enum { DEMO_OWNER_COUNT = 5 };

typedef struct demo_train_config {
    demo_shape shape;
    int steps;
    float learning_rate;
    const unsigned char *text; /* the data, at least steps * tokens + 1 bytes, read round */
    size_t text_bytes;
    tn_plane_policy policy; /* UNTIL_LAST_USE or BUDGET */
    size_t budget_bytes;    /* of BUDGET */
} demo_train_config;

typedef struct demo_owner {
    const char *name;
    size_t resident_bytes; /* after a step */
    size_t peak_bytes;     /* of this owner, at any time in the steps */
} demo_owner;

typedef struct demo_train_result {
    demo_owner owners[DEMO_OWNER_COUNT];
    size_t resident_bytes;
    size_t peak_bytes;                    /* of all owners together */
    size_t columnwise_bytes;              /* alive after the last backward */
    size_t columnwise_after_backward_max; /* the most alive after any backward */
    size_t reserved_bytes;
    size_t live_after_destroy_bytes;
    int balanced;      /* ledger equal to the pool, and the pool's books, after every step */
    double step_us;    /* median over the steps but the first two */
    double *loss;      /* [steps], means */
    float *token_loss; /* [steps * tokens] */
    float *gradients;  /* [steps * gradient_count] */
    size_t gradient_count;
} demo_train_result;

/* Trains two models in turn, step by step: one under TN_POLICY_KEEP and one under the policy of
 * `config`, each in a pool of its own. *ratio is the median of the times that the second took for a
 * step over those that the first took for the same one. On failure the results hold nothing. */
TN_MUST_USE tn_status demo_train(tn_device *device, const demo_train_config *config,
                                 const char *label, demo_train_result *kept,
                                 demo_train_result *other, double *ratio);
void demo_train_result_free(demo_train_result *result);

#endif
