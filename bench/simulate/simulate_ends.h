/* The two ends of a model: the embedding before the first layer, head and loss behind the last.
 *
 * A vocabulary of 256 is that of bytes: each rank embeds its own tokens and has all logits of them.
 * A larger one is cut over the tensor-parallel ranks; there is no op for its lookup and its loss,
 * so that these are declared to the simulated device as what they would touch, and are refused on
 * others.
 */
#ifndef TENURE_SIMULATE_ENDS_H
#define TENURE_SIMULATE_ENDS_H

#include "simulate_block.h"

typedef struct simulate_end_state {
    tn_tensor sum, dlogits;
    tn_norm_linear_saved saved;
} simulate_end_state;

/* pass->x out of tokens. */
TN_MUST_USE tn_status simulate_embed_forward(simulate_pass *pass);
/* The table's gradient out of pass->gradient, which ends. */
TN_MUST_USE tn_status simulate_embed_backward(simulate_pass *pass);

/* The loss of pass->x and the residual, and the gradient of the logits. */
TN_MUST_USE tn_status simulate_head_forward(simulate_pass *pass, simulate_end_state *state);
/* pass->gradient out of it. */
TN_MUST_USE tn_status simulate_head_backward(simulate_pass *pass, simulate_end_state *state);

#endif
