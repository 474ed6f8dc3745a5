/* Tenure: which algorithm a GEMM runs with: timed, pinned, told, kept in a file.
 *
 *     tn_gemm_table_load(device, "gemms.txt");       (of an earlier run; or TN_IO, TN_UNSUPPORTED)
 *     ...
 *     tn_gemm_tune(&args, stream);                   (once a shape, outside of captures: waits)
 *     tn_gemm(&args, stream);                        (as always; never waits, can be captured)
 *     ...
 *     tn_gemm_table_save(device, "gemms.txt");
 *
 * A device keeps a plan for each shape, of which the sizes, the types, the scaling of both operands
 * and whether D is added to are part, and nothing else: not the tensors. Without tuning a shape
 * runs with what cuBLASLt's heuristic offers first, or, if that is nothing, with our own product
 * where that takes it. A device keeps 1024 plans; beyond that the one that was used longest ago is
 * given up, those that were not tuned first.
 *
 * Which algorithm runs decides on the order of sums, so on the last bits of D. One algorithm gives
 * the same bits each time.
 */
#ifndef TENURE_GEMM_H
#define TENURE_GEMM_H

#include "tenure_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Times what there is for tn_gemm(args) on args' own operands and keeps the fastest for all calls
 * of that shape from now on. D is not touched: scratch has a D of its own, and the largest
 * workspace that any algorithm asks for. From now on the shape has more algorithms than before, at
 * most 96: those that were offered keep their places, behind them come variations that cuBLASLt
 * takes and does not offer. They are compared in turns, so that a clock that falls under load is
 * nobody's advantage; the first offer stays if none is faster by 1 %. Waits for the device many
 * times and takes some 0.2 to 1 s. Where other work runs on the device meanwhile, the times are
 * worth less. On the host and the simulated device, which have one way, it only checks.
 * args->algorithm is not looked at; an epilogue is another pass, and not timed. With may_differ and
 * AUTO the other engines that take the operands are tuned, too, and whole calls of all compared:
 * one that is faster than the formats' own by 1 % is kept for calls that say may_differ.
 * Errors: as tn_gemm; TN_INVALID_STATE while the stream captures. */
TN_API TN_MUST_USE tn_status tn_gemm_tune(const tn_gemm_args *args, tn_stream stream);

/* What tn_gemm(args) would do now. Puts nothing on a stream; planes need not be there. */
typedef struct tn_gemm_choice {
    size_t size;
    tn_gemm_engine engine;  /* never AUTO */
    int algorithm;          /* its place among those that there are, from 1 on */
    int algorithms;         /* that there are; more once the shape has been tuned */
    int is_measured;        /* chosen by time: tuned, or loaded */
    double us;              /* of it, as measured; 0: it was not */
    double first_us;        /* of the one that is offered first; likewise */
    size_t workspace_bytes; /* that it wants */
    size_t scratch_bytes;   /* workspace, padded copies, an epilogue's; what an engine dequantizes
                               aside */
    char description[120];  /* of the algorithm, for people */
} tn_gemm_choice;
#define TN_GEMM_CHOICE_INIT                                                                        \
    { sizeof(tn_gemm_choice), TN_GEMM_ENGINE_AUTO, 0, 0, 0, 0.0, 0.0, 0, 0, "" }
TN_API TN_MUST_USE tn_status tn_gemm_choice_get(const tn_gemm_args *args, tn_gemm_choice *out);

/* Writes what was measured on this device to a text file, which is there whole or not at all.
 * TN_IO; TN_UNSUPPORTED on the host and the simulated device, where nothing is. */
TN_API TN_MUST_USE tn_status tn_gemm_table_save(tn_device *device, const char *path);

/* Reads such a file: its choices take the place of those that there are for the same shapes, but
 * for choices of WGMMA where this driver or version of the library does not run what was timed:
 * these are left out, and their shapes are as they were before, for tn_gemm_tune to time.
 * TN_UNSUPPORTED if it was written on another kind of device or by another cuBLASLt, and on the
 * host and the simulated device; TN_CORRUPT_INPUT names the line; TN_IO. All or nothing. */
TN_API TN_MUST_USE tn_status tn_gemm_table_load(tn_device *device, const char *path);

#ifdef __cplusplus
}
#endif
#endif
