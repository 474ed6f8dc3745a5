/* One training step, and a pass over held-out text.
 *
 * What a step makes lies in two scopes: `saved` has what forward leaves for backward, `scratch` the
 * activation (or its gradient) that goes from one sub-step to the next. Both are empty when a step
 * is over. They have a pool of their own, so that a step can be captured with a graph pool.
 */
#ifndef TENURE_TRAINER_STEP_H
#define TENURE_TRAINER_STEP_H

#include "trainer_trail.h"

typedef struct trainer_scopes {
    tn_scope root, saved, scratch;
} trainer_scopes;

/* Empty scopes in a pool; on failure nothing is left. */
TN_MUST_USE tn_status trainer_scopes_open(trainer_scopes *scopes, tn_pool *pool);
tn_status trainer_scopes_close(trainer_scopes *scopes);

/* Puts a whole step on the model's stream: forward and backward of each micro-batch, update. Reads
 * tokens, targets and rate from the model's tensors and leaves the losses there. After a failure
 * the scopes are empty again. */
TN_MUST_USE tn_status trainer_step(const trainer_model *model, const trainer_scopes *scopes,
                                   trainer_trail *trail);

/* Forward only, of the first micro-batch's tokens: the loss of each token is left there. */
TN_MUST_USE tn_status trainer_evaluate(const trainer_model *model, const trainer_scopes *scopes);

#endif
