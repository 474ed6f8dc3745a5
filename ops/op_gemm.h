/* The steps of a GEMM that tn_gemm and the layers share.
 *
 * A form says which plane each operand is read from and how that plane is seen as rows by the
 * contracted dimension (tenure_ops.h has the table):
 *
 *     form    A rows  B rows  contracted   PLAIN operands stored turned
 *     FPROP   M       N       K            none
 *     DGRAD   M       K       N            B
 *     WGRAD   N       K       M            A and B
 *
 * FP8 planes are never turned: COL is stored so that its rows are contracted along.
 */
#ifndef TENURE_OP_GEMM_H
#define TENURE_OP_GEMM_H

#include "op_produce.h"
#include "tenure_lifetime.h"

/* The planes that a GEMM reads on the call's device, by the format table. TN_UNSUPPORTED names a
 * format that has no GEMM there. */
typedef struct tn__gemm_plane_pair {
    tn_plane a, b;
} tn__gemm_plane_pair;

tn_status tn__gemm_planes(const tn__op_call *call, tn_gemm_form form, tn_format a, tn_format b,
                          tn__gemm_plane_pair *out);

/* An FP8 plane as an operand. */
tn__operand tn__gemm_operand(tn_format format, const tn_plane_view *view);

/* The same without addresses, of a plane that may not be there yet. */
tn_status tn__gemm_outline(tn_tensor tensor, const tn_tensor_info *info, tn_plane plane,
                           tn__operand *out);

/* A PLAIN matrix; turned: it is stored [contracted, rows]. */
tn__operand tn__gemm_plain_operand(const tn__matrix *matrix, int is_turned);

/* ---- engines -------------------------------------------------------------------------------- */

typedef struct tn__gemm_engine tn__gemm_engine;

/* What a call works on, and how. */
typedef struct tn__gemm_tensors {
    tn_tensor_info a, b, d, bias, pre, dbias;
    tn__gemm_plane_pair planes; /* that an engine of the formats' own reads */
    tn_gemm_engine id;
    const tn__gemm_engine *engine;
} tn__gemm_tensors;

/* A row of the table in op_gemm_engine.c. */
struct tn__gemm_engine {
    const char *name;
    const char *where; /* it is, in words; NULL: everywhere */
    int is_automatic;  /* taken without being asked for */
    int is_among_own;  /* one of the algorithms of a device's own, chosen among them by time */
    int (*exists)(const tn__op_call *call);
    /* Whether it takes the operands, of which only shapes have been checked to be matrices: the
     * status says why not. */
    tn_status (*check)(const tn__op_call *call, tn_gemm_form form, tn__gemm_tensors *t);
    /* Leases a and b, or makes in scratch what it wants of them, and fills in the operands. */
    tn_status (*lease)(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                       tn__gemm_work *work);
    /* Whether it takes operands as they are put together already, of which the kinds are looked at:
     * by a layer, or group by group. */
    int (*takes)(const tn__gemm_work *work);
    /* The operands without their addresses. */
    tn_status (*outline)(const tn_gemm_args *args, const tn__gemm_tensors *t, tn__gemm_work *work);
};

/* ---- epilogues (op_gemm_epilogue.c) --------------------------------------------------------- */

/* What follows the product on the stream: a pass over it, or over dy. */
typedef struct tn__gemm_pass {
    int is_wanted;
    tn__produce_work made;
    tn__column_sums sums;
} tn__gemm_pass;

/* Of the arguments, once shapes and formats have been checked. */
tn_status tn__gemm_check_epilogue(tn__op_call *call, const tn_gemm_args *args, tn__gemm_tensors *t);

/* Leases d, pre and dbias, makes what scratch they want, and says where the product goes. */
tn_status tn__gemm_lease_outputs(tn__op_call *call, const tn_gemm_args *args,
                                 const tn__gemm_tensors *t, tn__gemm_work *work,
                                 tn__gemm_pass *pass);

tn_status tn__gemm_run_pass(tn__op_call *call, tn__gemm_pass *pass);

/* Scratch of an epilogue beside that of the product. */
size_t tn__gemm_pass_bytes(const tn_gemm_args *args, const tn__gemm_tensors *t);

/* ---- dispatch (op_gemm_dispatch.c) ---------------------------------------------------------- */

/* The engine that the call, or the environment, pins; AUTO: none. */
tn_gemm_engine tn__gemm_pinned(const tn_gemm_args *args);

/* What the environment pins, for a product that is no call of its own: into work->engine, unless
 * one is there. TN_UNSUPPORTED if the device has not that engine, or it does not take the operands.
 */
tn_status tn__gemm_take_pin(const tn__op_call *call, tn__gemm_work *work);

int tn__gemm_is_among_own(tn_gemm_engine engine);

/* Whether the call leaves the engine to us, and whom other numbers will do. */
int tn__gemm_may_differ(const tn_gemm_args *args);

/* The engine whose calls take the least time, `own` unless another is clearly faster; waits. */
tn_status tn__gemm_time_engines(const tn_gemm_args *args, tn_gemm_engine own,
                                const tn_tensor_info *d, tn_stream stream, tn_gemm_engine *out);

/* All checks that need no plane, and the choice of the engine. */
tn_status tn__gemm_check(tn__op_call *call, const tn_gemm_args *args, tn__gemm_tensors *t);

/* ---- steps ---------------------------------------------------------------------------------- */

/* work->d and work->accumulate, for operands that are in it already: what scratch it needs, with
 * d's shape but not its memory, so that it can be made before the outputs are leased. */
tn_status tn__gemm_scratch(tn__op_call *call, tn_scope scope, const tn_tensor_info *d,
                           tn__gemm_work *work);

/* Whether there is something to multiply; else nothing is read. */
int tn__gemm_has_product(const tn__gemm_work *work);

/* Whether the device takes the addresses of a product; tn__gemm_launch asks it, too. */
tn_status tn__gemm_require_aligned(const tn__op_call *call, const tn__gemm_work *work);

/* Puts it on the call's stream: nothing without elements, a fill for nothing to contract. */
tn_status tn__gemm_launch(tn__op_call *call, const tn__gemm_work *work);

#endif
