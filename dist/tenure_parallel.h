/* Tenure: tensor, sequence and expert parallelism: gathers of quantized activations, layers whose
 * weights are cut over ranks, tokens that travel to experts.
 *
 *     tn_parallel parallel = TN_PARALLEL_INIT;
 *     parallel.sequence.comm = tensor_comm;              (ranks that share each layer's weights)
 *     tn_linear_forward_args args = TN_LINEAR_FORWARD_ARGS_INIT;
 *     args.x = x, args.w.weight = weight, args.y = y;    (x: its rows; weight: its N / n)
 *     args.common.scope = op_scope, args.common.saved_scope = saved_scope;
 *     tn_column_linear_forward(&parallel, &args, &saved, stream);
 *
 * Every rank of a communicator makes the same calls in the same order. A call that fails on some
 * ranks and not on others leaves the communicator with collectives that do not match, which ends as
 * tenure_dist.h says. Shapes that do not fit are refused before any collective; what a product
 * refuses (a type, a bias), behind its gather.
 *
 * What is gathered or summed is complete in the order of the stream that the collectives are on:
 * a lease on any other stream waits for it on the device, as often as it likes, and what nobody
 * waits for ends with its scope.
 */
#ifndef TENURE_PARALLEL_H
#define TENURE_PARALLEL_H

#include "tenure_dist.h"
#include "tenure_layers.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- rows that are cut over ranks ------------------------------------------------------------ */

/* The rows of an activation (a sequence), one rank's after the other's. */
typedef struct tn_sequence {
    tn_comm *comm;
    const int64_t *rows; /* of each rank, any numbers; read during the call. NULL: all have as many
                          * as this one */
} tn_sequence;
#define TN_SEQUENCE_INIT                                                                           \
    { NULL, NULL }

/* all[r * count + i] = own[i] of rank r: where the ranks do not know each other's counts. Waits on
 * the host for the exchange; the scope is for 8 bytes of scratch for each count. */
TN_API TN_MUST_USE tn_status tn_counts_exchange(tn_comm *comm, const int64_t *own, int64_t count,
                                                int64_t *all, tn_scope scope, tn_stream stream);

/* Rows that a plane of all ranks' rows has, where this rank has `own`. */
TN_API TN_MUST_USE tn_status tn_sequence_rows(const tn_sequence *sequence, int64_t own,
                                              tn_plane plane, int64_t *out);

/* Gathers one plane of an activation, the one that its consumer reads, into its final layout:
 *
 *     src, and plane     dst
 *     PLAIN, DATA        the rows of all ranks
 *     1D, ROW            the ROW plane that tn_quantize makes of them
 *     1D, COL            the COL plane of each rank's rows alone, beside each other. A rank's rows
 *                        begin at a multiple of 128, as a scale is of 128 rows of one rank; rows in
 *                        between are 0 and add nothing to a weight's gradient. tn_sequence_rows
 *                        says how many there are with them. Where all ranks but the last have a
 *                        multiple of 128, there are none, and it is the COL plane of all rows.
 *
 * Each bit is that of quantizing each rank's rows by themselves, and they stay FP8 whatever their
 * number. dst is of src's format, type and scale mode, and another tensor for each plane.
 *
 * Scratch: ROW's scales and COL's elements lie strided over the ranks; they come through a slot of
 * at most TN_GATHER_SLOT_BYTES (or of one column of COL, one row of scales, if that is more), and
 * nothing else is as large as what is gathered. Wire: (n - 1) times this rank's plane, one
 * collective for what lies whole and the first slot, one for each slot after it. */
enum { TN_GATHER_SLOT_BYTES = 4 << 20 };

typedef struct tn_sequence_gather_args {
    size_t size;
    tn_sequence sequence;
    tn_tensor src; /* this rank's rows, the plane valid */
    tn_plane plane;
    tn_tensor dst;
    tn_scope scope;
} tn_sequence_gather_args;
#define TN_SEQUENCE_GATHER_ARGS_INIT                                                               \
    {                                                                                              \
        sizeof(tn_sequence_gather_args), TN_SEQUENCE_INIT, {0}, TN_PLANE_ROW, {0}, { 0 }           \
    }
TN_API TN_MUST_USE tn_status tn_sequence_gather(const tn_sequence_gather_args *args,
                                                tn_stream stream);

/* dst = this rank's rows of the sum of src over the ranks: in fp32, with MPI and TCP in their
 * order, rounded once to src's type, fp32 or bf16; then to dst's, if that is another one. */
typedef struct tn_sequence_reduce_args {
    size_t size;
    tn_sequence sequence;
    tn_tensor src;  /* PLAIN fp32 or bf16, all ranks' rows */
    tn_tensor dst;  /* PLAIN, this rank's */
    tn_scope scope; /* scratch: dst in src's type, where they differ */
} tn_sequence_reduce_args;
#define TN_SEQUENCE_REDUCE_ARGS_INIT                                                               \
    {                                                                                              \
        sizeof(tn_sequence_reduce_args), TN_SEQUENCE_INIT, {0}, {0}, { 0 }                         \
    }
TN_API TN_MUST_USE tn_status tn_sequence_reduce(const tn_sequence_reduce_args *args,
                                                tn_stream stream);

/* ---- layers ---------------------------------------------------------------------------------- */

typedef struct tn_parallel {
    tn_sequence sequence;
    /* Of the collectives, so that they run beside products; the same on all calls. NULL: the call's
     * own. */
    tn_stream stream;
    tn_dtype partial_dtype; /* of products that are summed over ranks: TN_FP32 or TN_BF16 */
    int keep_gathered;      /* 1: column-parallel layers save the gathered COL plane, not the rank's
                             * own, and backward gathers none. Both are told. */
} tn_parallel;
#define TN_PARALLEL_INIT                                                                           \
    { TN_SEQUENCE_INIT, NULL, TN_FP32, 0 }

/* Linear: y = x w^T + bias with the weight cut over the ranks, and its gradients.
 *
 *     column-parallel   weight [N / n, K], bias N / n    x, dx this rank's rows   y, dy all rows
 *     row-parallel      weight [N, K / n], bias N        x, dx all rows           y, dy this rank's
 *
 * Arguments, saved sets and rules are those of tn_linear_forward and _backward, with these:
 *
 * - Weights are FP8_BLOCK_2D or PLAIN, precision is AS_FORWARD.
 * - Column-parallel, ROW of the quantized x is gathered in forward and COL in backward; saved is
 *   this rank's COL alone, or with keep_gathered that of all. Row-parallel, ROW and COL of the
 *   quantized dy are gathered in backward. A gathered tensor ends at its last use in the stream's
 *   order. Under PLAIN weights it is x and dy themselves.
 * - Row-parallel y and column-parallel dx are tn_sequence_reduce of each rank's product, in
 *   partial_dtype; the first rank's has the bias, which all ranks are given. The gradient of that
 *   bias is the sum, in fp32 over the ranks, of tn_bias_gradient of each rank's rows, and the same
 *   on all ranks.
 * - Where not all ranks but the last have whole tiles of 128 rows, wgrad's operands that this rank
 *   makes of all rows are quantized rank by rank, as the gathered ones are.
 * - With gradient.delay dweight is left for tn_weight_gradient, which has no collective: `delayed`,
 *   as of tn_linear_backward, has dy and x of all rows then, what was gathered of them included. It
 *   needs common.saved_scope, where they are, of common.scope's pool.
 * - What adds to gradients comes last, one gradient after the other: if one fails (host memory, a
 *   driver that refuses work), those before it are added already. */
TN_API TN_MUST_USE tn_status tn_column_linear_forward(const tn_parallel *parallel,
                                                      const tn_linear_forward_args *args,
                                                      tn_linear_saved *saved, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_column_linear_backward(const tn_parallel *parallel,
                                                       const tn_linear_backward_args *args,
                                                       tn_linear_saved *saved,
                                                       tn_delayed_gradient *delayed,
                                                       tn_stream stream);
TN_API TN_MUST_USE tn_status tn_row_linear_forward(const tn_parallel *parallel,
                                                   const tn_linear_forward_args *args,
                                                   tn_linear_saved *saved, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_row_linear_backward(const tn_parallel *parallel,
                                                    const tn_linear_backward_args *args,
                                                    tn_linear_saved *saved,
                                                    tn_delayed_gradient *delayed, tn_stream stream);

/* LayerNormLinear: the norm is of this rank's rows; then as a column-parallel Linear. The gradients
 * of gamma and beta, which all ranks have, are summed over the ranks, in fp32. */
TN_API TN_MUST_USE tn_status tn_column_norm_linear_forward(const tn_parallel *parallel,
                                                           const tn_norm_linear_forward_args *args,
                                                           tn_norm_linear_saved *saved,
                                                           tn_stream stream);
TN_API TN_MUST_USE tn_status tn_column_norm_linear_backward(
    const tn_parallel *parallel, const tn_norm_linear_backward_args *args,
    tn_norm_linear_saved *saved, tn_delayed_gradient *delayed, tn_stream stream);

/* LayerNormMLP: w1 [F / n, K] (gated: both halves' rows of this rank's features, [2 F / n, K]) is
 * column-parallel, w2 [N, F / n] row-parallel; x and y are this rank's rows, and what is between
 * the products is of all rows and this rank's features. `delayed` is of two, w1's and w2's. */
TN_API TN_MUST_USE tn_status tn_parallel_norm_mlp_forward(const tn_parallel *parallel,
                                                          const tn_norm_mlp_forward_args *args,
                                                          tn_norm_mlp_saved *saved,
                                                          tn_stream stream);
TN_API TN_MUST_USE tn_status tn_parallel_norm_mlp_backward(const tn_parallel *parallel,
                                                           const tn_norm_mlp_backward_args *args,
                                                           tn_norm_mlp_saved *saved,
                                                           tn_delayed_gradient *delayed,
                                                           tn_stream stream);

/* ---- experts --------------------------------------------------------------------------------- */

/* Which tokens go where: experts are cut evenly over the ranks, in order, and `tokens` says for
 * each rank and expert how many rows of the rank go to it, tokens[rank * experts + expert]; any
 * numbers, read during the call, the same on all ranks (tn_counts_exchange). */
typedef struct tn_expert_route {
    tn_comm *comm;
    int64_t experts; /* a multiple of the ranks */
    const int64_t *tokens;
} tn_expert_route;
#define TN_EXPERT_ROUTE_INIT                                                                       \
    { NULL, 0, NULL }

/* Where the rows of each of this rank's experts are among what comes: experts / ranks + 1 numbers,
 * as tn_experts of tenure_experts.h takes them. */
TN_API TN_MUST_USE tn_status tn_expert_offsets(const tn_expert_route *route, int64_t *offsets);

/* dispatch: src holds this rank's rows, sorted by expert; dst the rows of its experts, sorted by
 * expert, then by the rank that they are of. combine: the way back, src and dst the other way
 * round. The gradient of the one is the other.
 *
 * Both tensors are PLAIN of one type, or FP8_BLOCK_1D of one type and scale mode: then the ROW
 * plane travels, data and scales in one grouped collective, and is to the bit what quantizing the
 * rows that come would make. Nothing is padded on the way; ranks and experts without rows are fine.
 *
 * Scratch: of FP8, the scales of both sides, 4 bytes for each 128 columns of a row. Wire: this
 * rank's rows for other ranks; of FP8 K bytes each, and 4 for each 128 columns. */
typedef struct tn_expert_args {
    size_t size;
    tn_expert_route route;
    tn_tensor src;
    tn_tensor dst;
    tn_scope scope;
} tn_expert_args;
#define TN_EXPERT_ARGS_INIT                                                                        \
    {                                                                                              \
        sizeof(tn_expert_args), TN_EXPERT_ROUTE_INIT, {0}, {0}, { 0 }                              \
    }
TN_API TN_MUST_USE tn_status tn_expert_dispatch(const tn_expert_args *args, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_expert_combine(const tn_expert_args *args, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
