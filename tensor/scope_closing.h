/* Scopes that are closing: what is leased in them lives on until its last lease ends.
 *
 * Callers hold the books' lock.
 */
#ifndef TENURE_SCOPE_CLOSING_H
#define TENURE_SCOPE_CLOSING_H

#include "tensor_state.h"

/* Frees what closing scopes of the books have and nobody leases; for what could not be freed when
 * its last lease ended. */
void tn__closing_retry(tn__books *books);

/* Frees what a lease of the tensor, whose scope is closing, had been kept for, which may be tensor,
 * scope and books; and gives the lock up. */
void tn__closing_settle(const tn__tensor_object *tensor);

/* Gives the lock up after a lease of the tensor has ended. */
static inline void tn__closing_unlock(const tn__tensor_object *tensor) {
    if (tensor->scope->is_closing)
        tn__closing_settle(tensor);
    else
        tn__unlock(tensor->books->lock);
}

#endif
