/* Tenure: tensors that own their planes, leases to use them, scopes to bound them, a ledger.
 *
 *     tn_scope model, op;
 *     tn_tensor weight;
 *     tn_lease lease;
 *     tn_plane_view view;
 *     tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
 *     tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
 *     scope_config.pool = pool;
 *     tn_scope_create(&scope_config, &model);
 *     config.format = TN_FORMAT_FP8_BLOCK_2D;
 *     config.dtype = TN_E4M3;
 *     config.rank = 2, config.shape[0] = 4096, config.shape[1] = 4096;
 *     tn_tensor_create(model, &config, &weight);             (no plane yet: 0 bytes)
 *     tn_lease_begin(weight, TN_PLANE_ROW, TN_WRITE, stream, &lease, &view);
 *     ... work on `stream` writes view.data and view.scale ...
 *     tn_lease_end(lease);                                   (the plane is valid, the use known)
 *     tn_scope_close(model);                                 (everything in it is freed)
 *
 * A tensor is flattened to a matrix of M rows (all dimensions but the last) and K columns (the
 * last). A *plane* is one complete copy of its values with the scales that belong to it:
 *
 *     DATA  M x K elements of a high-precision type, row-major
 *     ROW   M x K quantized row-major, and its scales: quantized along K
 *     COL   K x M quantized row-major (stored transposed; MXFP8: M x K), and its scales: along M
 *
 * Scale layouts (dequantization scales, fp32 where nothing else is said, row-major; up4 and up128
 * round up to a multiple; what is beyond the valid part is written as 0). docs/formats.md says
 * more, and which plane derives from which:
 *
 *     1D     ROW [ceil(K/128), up4(M)]   scale of (m, k) at [k/128][m]
 *            COL [ceil(M/128), up4(K)]   scale of (m, k) at [m/128][k]
 *     2D     ROW [ceil(M/128), up4(ceil(K/128))]   at [m/128][k/128]
 *            COL [ceil(K/128), up4(ceil(M/128))]   at [k/128][m/128]
 *     TENSOR [1, 4]   one scale, and 0 three times
 *     MXFP8  ROW [up128(M), up4(ceil(K/32))] of E8M0    at [m][k/32]
 *            COL [up4(ceil(M/32)), up128(K)] of E8M0    at [m/32][k]
 *     NVFP4  ROW [up128(M), up4(ceil(K/16))] of E4M3    at [m][k/16], then [1, 4] as in TENSOR
 *            COL [up128(K), up4(ceil(M/16))] of E4M3    at [k][m/16], then [1, 4]
 *
 * Only the tensor owns plane memory and only a lease gives an address. Handles are values with a
 * generation: one that is not alive is TN_STALE_HANDLE, never undefined behaviour; {0} is none.
 *
 * Threads: handles may be used from any thread; one tensor, and one scope's list of tensors, by
 * one thread at a time. Leases may be ended by any thread.
 */
#ifndef TENURE_TENSOR_H
#define TENURE_TENSOR_H

#include "tenure_alloc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tn_scope {
    uint64_t value;
} tn_scope;
typedef struct tn_tensor {
    uint64_t value;
} tn_tensor;
typedef struct tn_lease {
    uint64_t value;
} tn_lease;

/* ---- formats ------------------------------------------------------------------------------ */

typedef enum tn_dtype {
    TN_FP32 = 0,
    TN_BF16,
    TN_FP16,
    TN_E4M3, /* 4 exponent, 3 mantissa bits, maximum 448, NaN but no infinity */
    TN_E5M2, /* 5 exponent, 2 mantissa bits, maximum 57344 */
    TN_BYTE, /* bytes without a meaning: workspaces, token ids */
    TN_E2M1, /* 2 exponent bits, 1 of mantissa, maximum 6. Two to a byte along a stored row, the
              * first in the low half; a row begins at a byte, and the half left over is 0 */
    TN_E8M0, /* 2^(byte - 127), 0xFF is NaN: of scales only */
    TN_DTYPE_COUNT
} tn_dtype;

typedef enum tn_format {
    TN_FORMAT_PLAIN = 0,    /* DATA in fp32, bf16, fp16 or bytes */
    TN_FORMAT_FP8_BLOCK_1D, /* ROW scaled 1x128, COL scaled 128x1: COL is not derived from ROW */
    TN_FORMAT_FP8_BLOCK_2D, /* ROW and COL scaled 128x128: each is the other's exact transpose */
    TN_FORMAT_FP8_TENSOR,   /* one scale (delayed or current): each the other's exact transpose */
    TN_FORMAT_MXFP8,        /* 32 FP8 elements share a scale, ROW along K, COL along M */
    TN_FORMAT_NVFP4,        /* E2M1, 16 share a scale, the tensor another one */
    TN_FORMAT_COUNT
} tn_format;

typedef enum tn_plane { TN_PLANE_DATA = 0, TN_PLANE_ROW, TN_PLANE_COL, TN_PLANE_COUNT } tn_plane;

typedef enum tn_scale_mode {
    TN_SCALE_POW2 = 0, /* scales are powers of two */
    TN_SCALE_FP32
} tn_scale_mode;

/* How long a plane lives that can be derived again from another one of its tensor: no policy ever
 * touches a plane that can not, or the last one. Of two planes the one that was derived is the one
 * to go; where both were written, COL. What comes before what: tn_policy_default_set. */
typedef enum tn_plane_policy {
    TN_POLICY_DEFAULT = 0,        /* as the scope says, or the process, or the environment */
    TN_POLICY_KEEP,               /* until dropped */
    TN_POLICY_UNTIL_LAST_USE,     /* frozen 2D tensors only: until tn_plane_release */
    TN_POLICY_UNTIL_BACKWARD_END, /* until tn_scope_phase_set leaves TN_PHASE_BACKWARD */
    TN_POLICY_SCRATCH,            /* in a slot of the scope, until released or displaced */
    TN_POLICY_BUDGET,             /* until released, but for those that the scope's budget keeps */
    TN_POLICY_OFFLOAD,            /* every plane: tn_plane_release moves it to host memory */
    TN_POLICY_COUNT
} tn_plane_policy;

TN_API const char *tn_dtype_name(tn_dtype dtype);
TN_API const char *tn_format_name(tn_format format);
TN_API const char *tn_plane_name(tn_plane plane);
TN_API const char *tn_policy_name(tn_plane_policy policy); /* as TENURE_PLANE_POLICY takes it */
TN_API size_t tn_dtype_bits(tn_dtype dtype);
TN_API size_t tn_dtype_bytes(tn_dtype dtype); /* 0 for E2M1, which is half a byte */

/* ---- scopes ------------------------------------------------------------------------------- */

typedef enum tn_scope_kind {
    TN_SCOPE_PROCESS = 0,
    TN_SCOPE_MODEL,
    TN_SCOPE_STEP,
    TN_SCOPE_LAYER,
    TN_SCOPE_OP,
    TN_SCOPE_SAVED /* saved for backward */
} tn_scope_kind;

/* "file:line" of where it is written: of the _CONFIG_INIT that it is a part of. */
#define TN_SITE               __FILE__ ":" TN_SITE_TEXT(__LINE__)
#define TN_SITE_TEXT(line)    TN_SITE_LITERAL(line)
#define TN_SITE_LITERAL(line) #line

typedef struct tn_scope_config {
    size_t size;
    tn_pool *pool;   /* of a root scope; NULL in a child: its parent's */
    tn_scope parent; /* {0}: a root scope */
    tn_scope_kind kind;
    const char *name; /* copied */
    const char *site; /* where it is made, for reports: "file:line"; the end of it is copied */
} tn_scope_config;
#define TN_SCOPE_CONFIG_INIT                                                                       \
    { sizeof(tn_scope_config), NULL, {0}, TN_SCOPE_PROCESS, NULL, TN_SITE }

TN_API TN_MUST_USE tn_status tn_scope_create(const tn_scope_config *config, tn_scope *out);

/* Destroys the tensors in the scope and in its children, and those scopes, in stream order.
 * TN_IN_USE if any plane in it is leased: nothing is destroyed, and the text names tensor, plane
 * and the lease's stream. {0} is a no-op. Each plane is freed in the order of its last use. */
TN_API tn_status tn_scope_close(tn_scope scope);

/* ---- tensors ------------------------------------------------------------------------------ */

#define TN_RANK_MAX 8

typedef struct tn_tensor_config {
    size_t size;
    tn_format format;
    tn_dtype dtype;             /* element type of its planes */
    int rank;                   /* 0 is one element */
    int64_t shape[TN_RANK_MAX]; /* any may be 0 */
    tn_scale_mode scale_mode;   /* of fp32 scales of blocks and tensors */
    tn_plane_policy policy;
    int frozen;       /* 1: no gradient of it is wanted */
    const char *name; /* copied */
    int regatherable; /* 1: its contents can be had again: the last copy may be dropped */
    const char *site; /* where it is made, as that of a scope */
} tn_tensor_config;
#define TN_TENSOR_CONFIG_INIT                                                                      \
    {                                                                                              \
        sizeof(tn_tensor_config), TN_FORMAT_PLAIN, TN_FP32, 0, {0}, TN_SCALE_POW2,                 \
            TN_POLICY_DEFAULT, 0, NULL, 0, TN_SITE                                                 \
    }

/* A tensor with no planes. TN_INVALID_ARGUMENT names what does not fit (FP8 format with a
 * high-precision dtype, a size that overflows, ...). */
TN_API TN_MUST_USE tn_status tn_tensor_create(tn_scope scope, const tn_tensor_config *config,
                                              tn_tensor *out);

/* Frees all planes in the order of `stream` and ends the handle. TN_IN_USE while leased.
 * TN_IN_USE while there are views of it. {0} is a no-op. */
TN_API tn_status tn_tensor_destroy(tn_tensor tensor, tn_stream stream);

typedef struct tn_tensor_info {
    size_t size;
    tn_format format;
    tn_dtype dtype;
    int rank;
    int64_t shape[TN_RANK_MAX];
    int64_t rows; /* M */
    int64_t cols; /* K */
    tn_scale_mode scale_mode;
    tn_plane_policy policy; /* what it comes to; KEEP where no plane can be derived again */
    int frozen;
    tn_scope scope;
    tn_pool *pool;
    const char *name; /* as long as the tensor lives; likewise the site ("" if there is none) */
    tn_tensor base;   /* of a view; {0}: it is none */
    const char *site;
} tn_tensor_info;
#define TN_TENSOR_INFO_INIT                                                                        \
    {                                                                                              \
        sizeof(tn_tensor_info), TN_FORMAT_PLAIN, TN_FP32, 0, {0}, 0, 0, TN_SCALE_POW2,             \
            TN_POLICY_DEFAULT, 0, {0}, NULL, NULL, {0}, NULL                                       \
    }

TN_API TN_MUST_USE tn_status tn_tensor_info_get(tn_tensor tensor, tn_tensor_info *out);

/* From now on no gradient of it is wanted (or again wanted). */
TN_API TN_MUST_USE tn_status tn_tensor_set_frozen(tn_tensor tensor, int frozen);
TN_API TN_MUST_USE tn_status tn_tensor_set_regatherable(tn_tensor tensor, int regatherable);
TN_API TN_MUST_USE tn_status tn_tensor_set_policy(tn_tensor tensor, tn_plane_policy policy);

/* Into another scope of the same pool: how outputs outlive the scope that made them. */
TN_API TN_MUST_USE tn_status tn_tensor_move(tn_tensor tensor, tn_scope scope);

/* ---- planes ------------------------------------------------------------------------------- */

typedef enum tn_plane_state {
    TN_PLANE_ABSENT = 0, /* no memory */
    TN_PLANE_ALLOCATED,  /* memory, contents undefined */
    TN_PLANE_VALID,
    TN_PLANE_STALE,    /* another plane has been written since */
    TN_PLANE_OFFLOADED /* valid, and in host memory: READ and UPDATE bring it back */
} tn_plane_state;

typedef struct tn_plane_layout {
    int64_t rows; /* as stored: COL has K rows, but for MXFP8 */
    int64_t cols;
    size_t row_bytes; /* from one stored row to the next; 0 without elements */
    size_t data_bytes;
    tn_dtype scale_dtype;        /* of no meaning without scales */
    int64_t scale_rows;          /* 0: no scales */
    int64_t scale_cols;          /* valid columns of a scale row */
    int64_t scale_stride;        /* scales from one scale row to the next */
    int64_t scale_padded_rows;   /* scale_rows, and the rows of padding after them */
    int64_t global_scale_offset; /* bytes into the scales to the tensor's fp32 one; -1: none */
    size_t scale_bytes;          /* of all of it, with padding */
} tn_plane_layout;

/* Shape and bytes of a plane, present or not. TN_INVALID_ARGUMENT if the format has none such. */
TN_API TN_MUST_USE tn_status tn_plane_layout_get(tn_tensor tensor, tn_plane plane,
                                                 tn_plane_layout *out);
TN_API TN_MUST_USE tn_status tn_plane_state_get(tn_tensor tensor, tn_plane plane,
                                                tn_plane_state *out);

/* Allocates the plane, contents undefined; success if it has memory already. */
TN_API TN_MUST_USE tn_status tn_plane_make(tn_tensor tensor, tn_plane plane, tn_stream stream);

/* Makes the plane valid: success if it is, else derives it from the other plane where the format
 * says how (2D and TENSOR, either way). TN_UNSUPPORTED where it can not be derived;
 * TN_INVALID_STATE if there is nothing valid to derive it from. */
TN_API TN_MUST_USE tn_status tn_plane_require(tn_tensor tensor, tn_plane plane, tn_stream stream);

/* Frees the plane in the order of `stream`. TN_IN_USE while it is leased; TN_INVALID_STATE if it
 * is the last valid plane, unless the tensor is regatherable (else destroy the tensor instead).
 * Absent is success. */
TN_API TN_MUST_USE tn_status tn_plane_drop(tn_tensor tensor, tn_plane plane, tn_stream stream);

/* The consumer is done with the plane for now: drops it, in the order of `stream`, if the
 * tensor's policy says so and it can be derived again (the other plane is valid in memory of its
 * own, this one is not leased); success without effect otherwise. UNTIL_LAST_USE asks for a
 * frozen 2D tensor; SCRATCH and BUDGET do not, and drop the derived plane only, BUDGET perhaps
 * that of another tensor instead. KEEP and UNTIL_BACKWARD_END never drop here. */
TN_API TN_MUST_USE tn_status tn_plane_release(tn_tensor tensor, tn_plane plane, tn_stream stream);

/* How a plane is derived: set once for a format by the library that can (libtenure-ops does so
 * when it is first used). Puts work on `stream`; both addresses are valid and leased. */
typedef struct tn_plane_view tn_plane_view;
typedef tn_status (*tn_derive_function)(tn_device *device, const tn_plane_view *from,
                                        const tn_plane_view *to, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_format_set_derive(tn_format format, tn_derive_function derive);

/* ---- leases ------------------------------------------------------------------------------- */

typedef enum tn_access {
    TN_READ = 0, /* the plane must be valid (or derivable: then it is derived) */
    TN_WRITE,    /* all of it will be written: makes it if absent */
    TN_UPDATE,   /* read and written: must be valid */
    TN_REPLACE   /* all of it will be written, to new memory: see tn_lease_old_view */
} tn_access;

struct tn_plane_view {
    tn_dtype dtype;
    tn_plane plane;
    void *data;          /* NULL if the plane has no elements */
    void *scale;         /* of layout.scale_dtype; NULL without scales */
    float *global_scale; /* of the whole tensor (TENSOR: equal to scale; NVFP4); else NULL */
    tn_plane_layout layout;
};

/* Gives the plane's addresses for work on `stream`, until tn_lease_end. Any number of READ
 * leases at once; all others exclude each other and READ on that plane (TN_IN_USE names the
 * holder). Work that earlier leases put on other streams is waited for on the device; what another
 * thread put on its per-thread default stream can not be named and is waited for on the host.
 * Beginning to write makes the tensor's other planes stale, but for those that are themselves
 * under WRITE or REPLACE (an op that makes both at once); planes under READ refuse it. */
TN_API TN_MUST_USE tn_status tn_lease_begin(tn_tensor tensor, tn_plane plane, tn_access access,
                                            tn_stream stream, tn_lease *lease, tn_plane_view *view);

/* The work is on the stream: records the use there; a written plane is valid from here, and under
 * any policy but KEEP a derivable plane that it has made stale is freed, in the stream's order.
 * With TENURE_CHECK_LEASES=1 a READ lease under which the plane's bytes have changed (on a
 * simulated device: were written) is TN_INVALID_STATE. A lease ended before is TN_STALE_HANDLE.
 * Another failure leaves it open: abandon it, or end it again. A lease on a per-thread default
 * stream is ended by the thread that began it. The stream is there until then: of one that another
 * library has destroyed before (TN_INVALID_ARGUMENT, if the driver can tell) the lease can only be
 * abandoned, and its work is waited for with the device. */
TN_API TN_MUST_USE tn_status tn_lease_end(tn_lease lease);

/* Ends a lease whose work was not (wholly) put on the stream: a written plane's contents are
 * undefined (it is ALLOCATED, or freed again if this lease made it; under REPLACE it is what it
 * was), and planes that only this write had made stale are valid again. Fails only for a handle
 * that is not alive. */
TN_API TN_MUST_USE tn_status tn_lease_abandon(tn_lease lease);

/* Copies a whole plane from or to host memory, in stream order; the sizes must be exact.
 * scale is NULL and scale_bytes 0 where there are none. Writing makes a plane that is absent.
 * The host side must stay valid until the stream has done the copy. A write that fails half-way
 * leaves the plane ALLOCATED (absent if it was); a read that fails leaves a plane that it had to
 * derive derived. */
TN_API TN_MUST_USE tn_status tn_plane_write(tn_tensor tensor, tn_plane plane, const void *data,
                                            size_t data_bytes, const void *scale,
                                            size_t scale_bytes, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_plane_read(tn_tensor tensor, tn_plane plane, void *data,
                                           size_t data_bytes, void *scale, size_t scale_bytes,
                                           tn_stream stream);

/* ---- the ledger --------------------------------------------------------------------------- */

/* What a scope is at. A step of training goes FORWARD, BACKWARD, UPDATE; where a unit computes
 * its activations again in backward, BACKWARD, RECOMPUTE, BACKWARD. */
typedef enum tn_phase {
    TN_PHASE_NONE = 0,
    TN_PHASE_FORWARD,
    TN_PHASE_BACKWARD,
    TN_PHASE_RECOMPUTE, /* a part of backward */
    TN_PHASE_UPDATE,
    TN_PHASE_COUNT
} tn_phase;

typedef struct tn_ledger {
    size_t size;
    size_t total_bytes;
    size_t data_bytes[TN_PLANE_COUNT];  /* by plane, elements */
    size_t scale_bytes[TN_PLANE_COUNT]; /* by plane, scales */
    size_t peak_total_bytes;
    size_t peak_plane_bytes[TN_PLANE_COUNT]; /* elements and scales, each plane's own peak */
    uint64_t tensors;
    uint64_t planes;        /* with memory */
    uint64_t leases;        /* open now */
    size_t foreign_bytes;   /* adopted memory (tenure_lifetime.h): in none of the bytes above */
    size_t offloaded_bytes; /* host memory of planes that are OFFLOADED: likewise */
    size_t format_bytes[TN_FORMAT_COUNT];
    size_t peak_phase_bytes[TN_PHASE_COUNT]; /* the most in total while the scope was in each */
} tn_ledger;
#define TN_LEDGER_INIT                                                                             \
    {                                                                                              \
        sizeof(tn_ledger), 0, {0}, {0}, 0, {0}, 0, 0, 0, 0, 0, {0}, { 0 }                          \
    }

/* What the scope and all below it own now, and the peaks since it was made or last reset. */
TN_API TN_MUST_USE tn_status tn_scope_ledger(tn_scope scope, tn_ledger *out);
TN_API TN_MUST_USE tn_status tn_scope_ledger_reset_peaks(tn_scope scope);

/* One call per tensor with memory below the scope, in order of creation. */
typedef void (*tn_ledger_visitor)(void *argument, tn_tensor tensor, const tn_tensor_info *info,
                                  const size_t data_bytes[TN_PLANE_COUNT],
                                  const size_t scale_bytes[TN_PLANE_COUNT]);
TN_API TN_MUST_USE tn_status tn_scope_visit(tn_scope scope, tn_ledger_visitor visitor,
                                            void *argument);

/* TN_OK if the bytes of all tensors of the pool, counted plane by plane, equal the scopes' sums
 * and the pool's owned_bytes; else TN_LEAK with the three numbers. */
TN_API TN_MUST_USE tn_status tn_ledger_check(tn_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
