/* One call of an op while it runs: what it has leased, what scratch it made, and how it ends.
 *
 *     tn__op_call call = tn__op_begin("tn_axpy", stream);
 *     TN_TRY(tn__op_tensor(&call, "x", args->x, &x));           checks: nothing to undo yet
 *     ...
 *     status = tn__op_lease(&call, args->x, TN_PLANE_DATA, TN_READ, &view);
 *     if (status == TN_OK) status = ... lease outputs last, put the work on the stream ...
 *     return tn__op_finish(&call, status);                      ends or undoes all of it
 *
 * Invariants:
 * - Every lease that a call holds is in `leases`, every scratch tensor in `scratch`; only
 *   tn__op_finish, tn__op_end_lease, tn__op_end_plane and tn__op_let_go give them up.
 * - Once a call is finished, nothing of it is left: after success every output is valid; after a
 *   failure one that work may have touched is not, others are what they were, planes that it made
 *   are freed, and this thread's last error is the failure, whatever went wrong after it.
 */
#ifndef TENURE_OP_CALL_H
#define TENURE_OP_CALL_H

#include "op_kernels.h"

enum {
    TN__OP_LEASES_MAX = 18,
    TN__OP_SCRATCH_MAX = 24,
    TN__OP_SAVED_MAX = 6,
    TN__OP_SPENT_MAX = 6,
    TN__OP_DERIVED_MAX = 2
};

/* A plane that the call had derived: dropped again if the call fails. */
typedef struct tn__op_derived {
    tn_tensor tensor;
    tn_plane plane;
} tn__op_derived;

typedef struct tn__op_lease_slot {
    tn_lease lease; /* {0}: ended */
    tn_tensor tensor;
    tn_plane plane;
    int is_output;   /* of the caller's: ends last */
    int is_held;     /* no work has had its address yet */
    int is_derived;  /* the lease derived the plane */
    int runs_before; /* call->runs when it began, or was held no more */
    void *blocks[2]; /* an output's memory: data and scales; or scratch bytes */
} tn__op_lease_slot;

typedef struct tn__op_call {
    const char *name;
    tn_stream stream;
    tn_device *device; /* of all its tensors; NULL before the first */
    const tn__op_table *ops;
    int runs; /* of work that may be on the stream */
    tn__op_lease_slot leases[TN__OP_LEASES_MAX];
    tn__op_lease_slot *more_leases; /* of an op on a list; NULL: none */
    int more_count;
    int lease_count;
    tn_tensor scratch[TN__OP_SCRATCH_MAX];
    int scratch_count;
    tn_tensor saved[TN__OP_SAVED_MAX]; /* made for the caller: destroyed if the call fails */
    int saved_count;
    tn_tensor *spent[TN__OP_SPENT_MAX]; /* the caller's: destroyed if the call succeeds */
    int spent_count;
    tn__op_derived derived[TN__OP_DERIVED_MAX]; /* ahead, without a lease */
    int derived_count;
} tn__op_call;

tn__op_call tn__op_begin(const char *name, tn_stream stream);

/* ---- checks ---------------------------------------------------------------------------------- */

/* args is not NULL and of the size that this library knows. */
#define TN__OP_REQUIRE_ARGS(op_name, args)                                                         \
    do {                                                                                           \
        TN_REQUIRE((args) != NULL, "%s: args is NULL", (op_name));                                 \
        TN_REQUIRE((args)->size == sizeof *(args),                                                 \
                   "%s: args->size is %zu, expected %zu: start from the initializer macro",        \
                   (op_name), (args)->size, sizeof *(args));                                       \
    } while (0)

static inline int tn__is_no_tensor(tn_tensor tensor) { return tensor.value == 0; }

/* What the tensor is; it must be on the device of the call's other tensors. */
tn_status tn__op_tensor(tn__op_call *call, const char *role, tn_tensor tensor,
                        tn_tensor_info *info);

/* PLAIN fp32, bf16 or fp16. */
tn_status tn__op_require_float(const tn__op_call *call, const char *role,
                               const tn_tensor_info *info);
tn_status tn__op_require_format(const tn__op_call *call, const char *role,
                                const tn_tensor_info *info, tn_format format);
tn_status tn__op_require_dtype(const tn__op_call *call, const char *role,
                               const tn_tensor_info *info, tn_dtype dtype);

/* rows x cols; `reason` says what asks for them. */
tn_status tn__op_require_shape(const tn__op_call *call, const char *role,
                               const tn_tensor_info *info, int64_t rows, int64_t cols,
                               const char *reason);

static inline int tn__is_empty(const tn_tensor_info *info) {
    return info->rows == 0 || info->cols == 0;
}

/* A tensor of the caller's as messages call it; {0}: none. */
typedef struct tn__op_named {
    const char *role;
    tn_tensor tensor;
} tn__op_named;

enum { TN__OP_APART_MAX = 8 };

/* Outputs and operands, at most APART_MAX, that no lease of the call is on when the outputs are
 * written, so that no lease tells, share no memory, as one tensor or as views of one. {0}, and an
 * operand that is not alive any more and that the call does not read, is apart from all. */
tn_status tn__op_require_apart(const tn__op_call *call, const tn__op_named *outputs,
                               int output_count, const tn__op_named *operands, int operand_count);

/* ---- resources ------------------------------------------------------------------------------- */

/* Room for so many leases, where those that every call has are too few; before the first one. */
tn_status tn__op_reserve_leases(tn__op_call *call, int count);

/* Leases for the call. A WRITE or UPDATE is an output, except on the call's own scratch. */
tn_status tn__op_lease(tn__op_call *call, tn_tensor tensor, tn_plane plane, tn_access access,
                       tn_plane_view *view);

/* The same for DATA of a PLAIN tensor, seen as a matrix. */
tn_status tn__op_lease_matrix(tn__op_call *call, tn_tensor tensor, const tn_tensor_info *info,
                              tn_access access, tn__matrix *matrix);

/* The output that was leased last is written only by work that comes after tn__op_hold_no_more:
 * if the call fails before, it is what it was. */
void tn__op_hold(tn__op_call *call);
void tn__op_hold_no_more(tn__op_call *call);

/* The flag in device memory that says whether to leave all outputs alone: an fp32 tensor of one
 * element, under READ; NULL for {0}. With one, outputs must be valid before. */
tn_status tn__op_lease_skip(tn__op_call *call, tn_tensor skip, const float **out);

/* A GPU's kernels that work on whole 16 bytes take no other addresses (all of them, or-ed). Asked
 * before anything runs: then outputs are what they were. */
tn_status tn__op_require_whole_16(const tn__op_call *call, uintptr_t addresses);

/* With a skip flag, an output must be valid before: asked of all of a tensor's planes before the
 * first is leased for WRITE, which makes the others stale. */
tn_status tn__op_require_kept(const tn__op_call *call, const float *skip, const char *role,
                              tn_tensor tensor, tn_plane plane);

/* READ of a plane that is derived if it is not valid; what this call has derived, here or ahead, is
 * dropped again if it fails. */
tn_status tn__op_lease_derived(tn__op_call *call, tn_tensor tensor, tn_plane plane,
                               tn_plane_view *view);

/* The call's stream waits here and now for whoever wrote a plane that is valid: a lease of it that
 * comes later then makes it wait for nothing. A plane that is not valid is left alone. */
tn_status tn__op_await(const tn__op_call *call, tn_tensor tensor, tn_plane plane);

/* Has a plane derived on `side` for a later call, beside what this call puts on its own stream from
 * now on and after what is there; dropped again if the call fails. A plane that is valid is left
 * alone. That there is no memory for it now, or no free buffer of its scratch slot, is success: the
 * later call derives it then. `beside` is the product that this call launches next: where it can do
 * without some of the device's multiprocessors, the derivation gets them, and beside->spared says
 * so. */
tn_status tn__op_derive_ahead(tn__op_call *call, tn_tensor tensor, tn_plane plane, tn_stream side,
                              tn__gemm_work *beside);

/* Where this thread's derivations run from now on: on so many multiprocessors that a product leaves
 * to them, or, 0, on all. */
void tn__op_derive_on(int processors);

/* Puts work on the stream: a function of the device's table, with what it takes between device and
 * stream. All work on outputs goes through here, or is told of with its status. */
#define TN__OP_RUN(call, op, ...)                                                                  \
    tn__op_ran((call), (call)->ops->op((call)->device, __VA_ARGS__, (call)->stream))
tn_status tn__op_ran(tn__op_call *call, tn_status status);

/* Ends one lease before the rest: `index` was call->lease_count when it was begun. */
tn_status tn__op_end_lease(tn__op_call *call, int index);

/* The same for the lease of a plane, if there is one. */
tn_status tn__op_end_plane(tn__op_call *call, tn_tensor tensor, tn_plane plane);

/* A tensor in a scope that the caller has named; the scope must be of the device of the call's
 * tensors: what is made in another one, the call's stream can not destroy. */
tn_status tn__op_create(const tn__op_call *call, tn_scope scope, const tn_tensor_config *config,
                        tn_tensor *out);

/* Such a one that lives until tn__op_finish. */
tn_status tn__op_scratch(tn__op_call *call, tn_scope scope, const tn_tensor_config *config,
                         tn_tensor *out);

/* Ends all leases of a tensor of the call's own, and the tensor if it is scratch: before the rest,
 * in the stream's order. */
tn_status tn__op_let_go(tn__op_call *call, tn_tensor tensor);

/* A tensor in the caller's scope that is the caller's if the call succeeds, and else destroyed. Its
 * leases end before those of outputs. */
tn_status tn__op_saved(tn__op_call *call, tn_scope scope, const tn_tensor_config *config,
                       tn_tensor *out);

/* A tensor of the caller's that the call uses up: when it has succeeded it is destroyed, or ends
 * with its scope if that can not be, and {0}. */
void tn__op_spend(tn__op_call *call, tn_tensor *tensor);

/* `bytes` of scratch memory; NULL for 0. */
tn_status tn__op_scratch_bytes(tn__op_call *call, tn_scope scope, size_t bytes, void **out);

/* Frees it before the rest, in the stream's order; NULL is fine. */
tn_status tn__op_let_go_bytes(tn__op_call *call, const void *bytes);

/* Ends the call with the status so far and returns what became of it. */
tn_status tn__op_finish(tn__op_call *call, tn_status status);

/* ---- planes ---------------------------------------------------------------------------------- */

/* Teaches the 2D format how its planes are derived from each other; every front calls it, and so
 * does the loading of the library. */
tn_status tn__op_init(void);

#endif
