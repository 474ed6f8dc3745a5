/* One call of a parallel layer while it runs: what it is told, what it has made, and how it ends.
 *
 *     tn__parallel_begin      checks what all layers check
 *     tn__parallel_make       tensors of the call: scratch, or kept for backward
 *     tn__parallel_let_go     ends one at its last use, in the order of a stream
 *     tn__parallel_leave      what a delayed gradient of a weight needs
 *     tn__parallel_end        after success only what is kept is left, after a failure nothing
 *
 * Invariant: every tensor that the call has made is in `made` until it is let go or the call ends.
 */
#ifndef TENURE_PARALLEL_CALL_H
#define TENURE_PARALLEL_CALL_H

#include "error.h"
#include "parallel_rows.h"

/* Ends a lease, or gives it up where the call has failed, whose failure stays the last error. */
tn_status tn__lease_close(tn_lease lease, tn_status status);

/* Destroys a tensor, also after a failure; {0} is fine. */
tn_status tn__tensor_close(tn_tensor tensor, tn_stream stream, tn_status status);

enum {
    TN__PARALLEL_MADE_MAX = 24,
    TN__PARALLEL_SPENT_MAX = 6,
    TN__PARALLEL_SUMS_MAX = 4,
    TN__PARALLEL_LEFT_MAX = 2
};

/* A sum over rows that is added to a gradient when all else has been done. */
typedef struct tn__parallel_sum {
    tn_tensor sums;   /* fp32, this rank's */
    tn_tensor target; /* the caller's */
    int accumulate;
    int over_ranks; /* of rows that are cut over ranks */
} tn__parallel_sum;

/* A weight's gradient that is left for later: written where the caller wants it if the call
 * succeeds. */
typedef struct tn__parallel_left {
    tn_delayed_gradient gradient;
    tn_delayed_gradient *out;
} tn__parallel_left;

typedef struct tn__parallel {
    const char *name;
    const tn_parallel *told;
    tn_layer_common common;
    tn_stream stream; /* of products */
    tn_stream wire;   /* of collectives */
    tn__row_cut cut;
    uint64_t puts; /* collectives before the call */
    tn_tensor made[TN__PARALLEL_MADE_MAX];
    int is_kept[TN__PARALLEL_MADE_MAX];
    int made_count;
    tn_tensor *spent[TN__PARALLEL_SPENT_MAX]; /* the caller's: ends if the call succeeds */
    int spent_count;
    tn_tensor *handed[TN__PARALLEL_SPENT_MAX]; /* the caller's: a delayed gradient has it then */
    int handed_count;
    tn__parallel_left left[TN__PARALLEL_LEFT_MAX];
    int left_count;
    tn__parallel_sum sums[TN__PARALLEL_SUMS_MAX];
    int sum_count;
} tn__parallel;

/* own: rows of this rank; saved: where a forward's handles go, or NULL. */
tn_status tn__parallel_begin(const char *name, const tn_parallel *told,
                             const tn_layer_common *common, int64_t own, tn_stream stream,
                             tn__parallel *out);

static inline int tn__is_given(tn_tensor tensor) { return tensor.value != 0; }

/* [rows, cols]; kept: in the saved scope, beyond the call if it succeeds. */
typedef struct tn__parallel_shape {
    tn_format format;
    tn_dtype dtype;
    int64_t rows, cols;
    tn_scale_mode scale_mode;
} tn__parallel_shape;
tn_status tn__parallel_make(tn__parallel *p, const char *name, const tn__parallel_shape *shape,
                            int is_kept, tn_tensor *out);

/* In the order of the stream of its last use; {0}, and what the call has not made, stay. */
tn_status tn__parallel_let_go(tn__parallel *p, tn_tensor tensor, tn_stream stream);

/* A saved tensor that this backward uses up. */
void tn__parallel_spend(tn__parallel *p, tn_tensor *tensor);

/* Leaves dweight = dy^T x for later. What the call has made of the two moves to the saved scope,
 * what it was to spend goes along; the rest is the caller's. */
tn_status tn__parallel_leave(tn__parallel *p, tn_tensor dy, tn_tensor x,
                             const tn_layer_gradient *gradient, tn_delayed_gradient *out);

/* Scratch for sums that are to be added to `target`; {0} if that is {0}. */
tn_status tn__parallel_sums(tn__parallel *p, tn_tensor target, int accumulate, int over_ranks,
                            tn_tensor *out);

/* Sums those that are cut over the ranks; then adds all to their targets. */
tn_status tn__parallel_reduce_sums(tn__parallel *p);
tn_status tn__parallel_add_sums(tn__parallel *p);

/* What has failed behind a collective can not be made again, and ends the communicator. */
tn_status tn__parallel_end(tn__parallel *p, tn_status status);

/* The calls of tenure_parallel.h with what the call knows. */
tn_status tn__parallel_gather(tn__parallel *p, const char *name, tn_tensor src, tn_plane plane,
                              int is_kept, tn_tensor *out);
tn_status tn__parallel_reduce(const tn__parallel *p, tn_tensor src, tn_tensor dst);

#endif
