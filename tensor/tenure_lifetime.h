/* Tenure: how long planes live, and how tensors change hands.
 *
 * tenure_tensor.h is what every user of tensors needs; this header is what else they can do. The
 * same rules hold: handles with generations, one tensor by one thread at a time, everything in
 * stream order, and a call that fails has changed nothing.
 */
#ifndef TENURE_LIFETIME_H
#define TENURE_LIFETIME_H

#include "tenure_pool.h"
#include "tenure_tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the planes that GEMMs take ------------------------------------------------------------ */

/* What decides which operands a GEMM takes. */
typedef enum tn_architecture {
    TN_ARCHITECTURE_HOST = 0,      /* the host driver: what libtenure-ops does there */
    TN_ARCHITECTURE_OTHER,         /* a GPU without FP8: PLAIN only */
    TN_ARCHITECTURE_ADA,           /* compute capability 8.9 */
    TN_ARCHITECTURE_HOPPER,        /* 9.x */
    TN_ARCHITECTURE_BLACKWELL,     /* 10.x, 11.x */
    TN_ARCHITECTURE_BLACKWELL_RTX, /* 12.x */
    TN_ARCHITECTURE_COUNT
} tn_architecture;

/* Operands by form: D = A B^T (FPROP), A B (DGRAD), A^T B (WGRAD) of A and B as M x K matrices;
 * so x w^T, dy w and dy^T x of a layer y = x w^T. */
typedef enum tn_operand {
    TN_OPERAND_FPROP_A = 0,
    TN_OPERAND_FPROP_B,
    TN_OPERAND_DGRAD_A,
    TN_OPERAND_DGRAD_B,
    TN_OPERAND_WGRAD_A,
    TN_OPERAND_WGRAD_B,
    TN_OPERAND_COUNT
} tn_operand;

TN_API const char *tn_architecture_name(tn_architecture architecture);

/* Of a device; a simulated one is what it says it is. NULL is TN_ARCHITECTURE_OTHER. */
TN_API tn_architecture tn_device_architecture(tn_device *device);

/* The plane of a tensor of this format that the operand is read from: the one quantized along the
 * contracted dimension, or the one whose exact values the GEMM reads either way. TN_UNSUPPORTED
 * names format, architecture and reason where there is no GEMM of it. Thread-safe. */
TN_API TN_MUST_USE tn_status tn_format_operand(tn_format format, tn_architecture architecture,
                                               tn_operand operand, tn_plane *out);

/* ---- replacing, saving, cloning, viewing --------------------------------------------------- */

/* What the plane was when a TN_REPLACE lease began: readable on the lease's stream, while new
 * memory, which tn_lease_begin gave the address of, is written. This is how a plane is transposed,
 * quantized again, re-arranged or gathered again "in place": tn_lease_end frees the old memory in
 * the order of the stream, and tn_lease_abandon frees the new one and leaves the plane as it was.
 * TN_INVALID_STATE for another access, or if the plane had no contents. Any thread. */
TN_API TN_MUST_USE tn_status tn_lease_old_view(tn_lease lease, tn_plane_view *out);

/* Sets every byte of the plane, elements and scales: a write like tn_plane_write. */
TN_API TN_MUST_USE tn_status tn_plane_fill(tn_tensor tensor, tn_plane plane, unsigned char byte,
                                           tn_stream stream);

#define TN_PLANE_BIT(plane) (1u << (plane))

/* Saves planes (TN_PLANE_BIT of each) for later: they move, without a copy, to a new tensor in
 * `scope`, which is like this one; here they are ABSENT from now on. So the two never share one,
 * and what this tensor is written with next does not change what was saved. A plane that is not
 * valid is derived first, on `stream` (and stays so here if the rest fails). One in a scratch slot
 * that would be the last copy left here is dropped. TN_IN_USE if a plane that goes is leased;
 * TN_INVALID_STATE if one to save is in a scratch slot. */
TN_API TN_MUST_USE tn_status tn_tensor_save(tn_tensor tensor, unsigned planes, tn_scope scope,
                                            tn_stream stream, tn_tensor *saved);

/* A saved tensor becomes an ordinary one of `scope`: the handle `saved` ends, and *out is the same
 * planes. TN_INVALID_STATE if it is not a saved one; TN_IN_USE while it is leased. */
TN_API TN_MUST_USE tn_status tn_tensor_restore(tn_tensor saved, tn_scope scope, tn_tensor *out);

/* Moves the planes back into a tensor of the same format and shape, most often the one that they
 * were saved from, where they are absent; the handle `saved` ends. TN_INVALID_STATE if that tensor
 * has such a plane, or has been written since they were saved. TN_IN_USE while either is leased. */
TN_API TN_MUST_USE tn_status tn_tensor_restore_into(tn_tensor saved, tn_tensor tensor);

/* A new tensor in `scope`, of the same pool, with copies of all valid planes, made on the device in
 * the order of `stream`. TN_IN_USE while a plane is being written. After a failure `scope` holds
 * nothing of it, unless the driver also refuses to take memory back: that the scope frees. */
TN_API TN_MUST_USE tn_status tn_tensor_clone(tn_tensor tensor, tn_scope scope, tn_stream stream,
                                             tn_tensor *out);

/* The same of some rows (of the M x K matrix): a tensor rows x K. TN_UNSUPPORTED where they share
 * scales with others: they are never quantized anew. COL of rows takes a copy for each stored row,
 * so it is left out where it can be derived again from ROW. */
TN_API TN_MUST_USE tn_status tn_tensor_copy_rows(tn_tensor tensor, int64_t first_row, int64_t rows,
                                                 tn_scope scope, tn_stream stream, tn_tensor *out);

/* A view: a tensor in `scope`, of the same pool, whose planes are rows of the base's: it has no
 * memory of its own. A lease on it is one on the base's plane, so that states, order and exclusion
 * are the base's; a write of a part is an UPDATE of the base, which must be valid.
 * tn_plane_layout_get has its strides: the scales of 1D rows keep those of the base. A view has a
 * frozen mark and a policy of its own, and ends with tn_tensor_destroy or its scope; the base, and
 * the base's scope, can not end before it (TN_IN_USE). A view of a view is one of the same base.
 *
 * Planes of rows that share scales with others, and COL where it is stored transposed, can not be
 * used in place: a lease, or the view itself if no plane is left, is TN_UNSUPPORTED, and the text
 * says what tn_tensor_copy_rows can do. What has scales that are not the part's own, 1D and those
 * with one scale for the tensor, can be read and not written. */
TN_API TN_MUST_USE tn_status tn_tensor_view_rows(tn_tensor base, int64_t first_row, int64_t rows,
                                                 tn_scope scope, tn_tensor *out);

/* A view of the whole base in another shape of as many elements; where there are scales, the last
 * dimension must stay. */
TN_API TN_MUST_USE tn_status tn_tensor_view_shape(tn_tensor base, int rank, const int64_t *shape,
                                                  tn_scope scope, tn_tensor *out);

/* Closes a scope in which planes may still be leased, which tn_scope_close refuses. The handles of
 * the scope, of those below and of all tensors in them end with the call (TN_STALE_HANDLE), so that
 * nothing can be made, moved there or leased any more. What nobody leases is freed at once, each
 * other plane when its last lease ends, in the order of its last use; tensors and scopes go when
 * they have nothing left. Any thread may end those leases. The ledgers of scopes above count all
 * that is still there, and these scopes can not be closed before it is gone. TN_IN_USE if a tensor
 * elsewhere is a view of one in it, or while another thread derives a plane there. {0}: a no-op. */
TN_API tn_status tn_scope_close_deferred(tn_scope scope);

/* ---- policies and phases ------------------------------------------------------------------- */

/* For tensors in the scope and below that have no policy of their own, nor a nearer scope that has
 * one. TN_POLICY_DEFAULT: the scope has none. Any thread. Nothing is dropped by setting a policy:
 * each plane meets its new one at the next release, end of a write, or change of phase. */
TN_API TN_MUST_USE tn_status tn_scope_policy_set(tn_scope scope, tn_plane_policy policy);

/* For all tensors of the process that have no policy, nor their scopes. Where this is DEFAULT too,
 * TENURE_PLANE_POLICY says, then TENURE_RELEASE_FROZEN_COLUMNWISE (frozen 2D weights:
 * UNTIL_LAST_USE), else KEEP. Any thread. */
TN_API TN_MUST_USE tn_status tn_policy_default_set(tn_plane_policy policy);

TN_API const char *tn_phase_name(tn_phase phase);

/* Leaving backward (from BACKWARD or RECOMPUTE to any other phase) drops, in the order of `stream`,
 * all planes under UNTIL_BACKWARD_END in the scope and below that can be derived again, whichever
 * pass made them. TN_IN_USE names one that is leased: then nothing is dropped and the phase stays.
 * A scope below that has no phase of its own is in this one's. */
TN_API TN_MUST_USE tn_status tn_scope_phase_set(tn_scope scope, tn_phase phase, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_scope_phase_get(tn_scope scope, tn_phase *out);

/* How a weight is used in a phase. */
typedef struct tn_phase_config {
    size_t size;
    tn_phase phase;
    int wants_dgrad; /* a gradient of the input is wanted: not so below the first trainable layer */
    int recomputes;  /* backward computes the forward pass of its unit again */
} tn_phase_config;
#define TN_PHASE_CONFIG_INIT                                                                       \
    { sizeof(tn_phase_config), TN_PHASE_FORWARD, 1, 0 }

typedef enum tn_plane_origin {
    TN_ORIGIN_GIVEN = 0, /* it has to be there: kept, gathered, or quantized from its source */
    TN_ORIGIN_DERIVED    /* made from `source` here, if it is not there */
} tn_plane_origin;

enum { TN_PHASE_READS_MAX = 2 };

typedef struct tn_phase_plan {
    size_t size;
    int count; /* of reads; 0: no plane of the weight is needed in the phase */
    struct {
        tn_plane plane;
        tn_plane_origin origin;
        tn_plane source; /* of a DERIVED plane */
    } reads[TN_PHASE_READS_MAX];
} tn_phase_plan;
#define TN_PHASE_PLAN_INIT                                                                         \
    {                                                                                              \
        sizeof(tn_phase_plan), 0, {                                                                \
            { TN_PLANE_DATA, TN_ORIGIN_GIVEN, TN_PLANE_DATA }                                      \
        }                                                                                          \
    }

/* The planes of a weight that the layers read in a phase, in order, so that no other one is made or
 * gathered: FORWARD and RECOMPUTE the one of the forward GEMM; BACKWARD that one first if it
 * recomputes, then the one of dgrad if that is wanted; UPDATE none. Which they are, and whether the
 * second can be derived, the format says for the tensor's device: where all elements share a scale
 * Blackwell reads one plane for both. TN_UNSUPPORTED where the format has no GEMM there. */
TN_API TN_MUST_USE tn_status tn_phase_plan_get(tn_tensor tensor, const tn_phase_config *config,
                                               tn_phase_plan *out);

/* ---- scratch slots ------------------------------------------------------------------------- */

/* Planes under TN_POLICY_SCRATCH are derived into a slot: memory that all tensors of a scope share,
 * as large as the largest of them, at an address that stays. The slot is that of the nearest scope
 * that has one (tn_scope_scratch_config_set, tn_scope_scratch_reserve), else of the root scope,
 * made at first need. Its bytes are in the ledger once, as a tensor of the library's own called
 * "scratch"; the planes in it own 0 bytes. A buffer takes the larger of a tensor's derivable
 * planes: data, rounded up to 256 bytes, and scales.
 *
 * A plane is in the slot from its derivation until tn_plane_release, or until another takes its
 * place: then it is ABSENT. What is derived next waits on the device for all uses of the buffer, on
 * any stream. A plane that is leased, or the last copy of its contents, is not displaced: the other
 * derivation is TN_IN_USE or TN_INVALID_STATE and names it. UPDATE leases refuse a plane in the
 * slot; a WRITE or REPLACE gives it memory of its own. Tensors that move to a scope with another
 * slot leave theirs.
 *
 * Captures: every derivation, read and address is in the graph, and the same at each launch. What
 * was derived in a capture is not taken for valid outside of it, nor the other way round; once a
 * graph may use the slot, an eager read derives again unless a lease was held since. From then on
 * the slot does not grow by itself. Graphs that share a slot must not run at the same time. */
typedef struct tn_scratch_config {
    size_t size;
    int buffers; /* taken in turn: with 2 the next layer's plane can be derived while one is read */
} tn_scratch_config;
#define TN_SCRATCH_CONFIG_INIT                                                                     \
    { sizeof(tn_scratch_config), 1 }

/* Gives the scope a slot of its own with 1 to 8 buffers, as yet without memory. TN_INVALID_STATE if
 * it has one with memory. */
TN_API TN_MUST_USE tn_status tn_scope_scratch_config_set(tn_scope scope,
                                                         const tn_scratch_config *config);

/* Makes the scope's slot large enough for all tensors that would use it now, and pins it: from here
 * a tensor that needs more is TN_INVALID_STATE, so that the addresses are good for graphs and for
 * whoever else relies on them. To call it again is to say that nothing does: it grows if it must.
 * TN_IN_USE if it must and a plane in it is leased. */
TN_API TN_MUST_USE tn_status tn_scope_scratch_reserve(tn_scope scope, tn_stream stream);

/* Frees the slot's memory in the order of `stream`, and forgets its configuration. TN_IN_USE
 * while a plane in it is leased. Success if the scope has no slot. */
TN_API tn_status tn_scope_scratch_release(tn_scope scope, tn_stream stream);

/* ---- byte budgets --------------------------------------------------------------------------- */

/* Planes under TN_POLICY_BUDGET stay when they are released as long as the budget of their scope
 * has room: that of the nearest scope that has one, else of the root scope TENURE_PLANE_BUDGET
 * (none: nothing is kept). When it is full, the planes stay that cost most to derive again for
 * their bytes (a launch and the bytes moved) times how often they were released; a plane
 * displaces another only if it is clearly worth more, so that a cycle of equal layers keeps the
 * same ones. A plane that is replaced, or that moves to another scope with its tensor, is out of
 * the budget until it is released again.
 *
 * TN_IN_USE if fewer bytes than are kept can not be had because of a lease; then nothing
 * changes. What is kept above `bytes` is dropped, least worth first, each in the order of its
 * last use. */
TN_API TN_MUST_USE tn_status tn_scope_budget_set(tn_scope scope, size_t bytes);

typedef struct tn_plane_budget {
    size_t size;
    size_t limit_bytes; /* of the budget that tensors in the scope come under */
    size_t kept_bytes;  /* of planes that it keeps: never more than limit_bytes */
} tn_plane_budget;
#define TN_PLANE_BUDGET_INIT                                                                       \
    { sizeof(tn_plane_budget), 0, 0 }

TN_API TN_MUST_USE tn_status tn_scope_budget_get(tn_scope scope, tn_plane_budget *out);

/* ---- saved sets and recomputation ---------------------------------------------------------- */

/* A scope of kind TN_SCOPE_SAVED with a recompute function is a saved set: its planes can be
 * dropped after forward and written again by the function before backward reads them. It is made
 * of the tensors in the scope and below, but for those in an inner set and those of adopted
 * memory.
 *
 * The function writes each tensor's planes again under leases on `stream`, and may make others,
 * in this scope too. It is called without any lock held. */
typedef tn_status (*tn_recompute_function)(void *context, tn_scope scope, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_saved_recompute_set(tn_scope scope, tn_recompute_function function,
                                                    void *context);

/* Frees all planes of the set in the order of `stream`. The handles stay; until the set is rebuilt,
 * to read, write or move one of its tensors is TN_INVALID_STATE. TN_IN_USE names a plane that is
 * leased: then nothing is dropped. If the driver fails half-way the set is dropped, and the call
 * may be repeated for what is left. Success if it is dropped already. */
TN_API TN_MUST_USE tn_status tn_saved_drop(tn_scope scope, tn_stream stream);

/* Calls the function, and has the set whole again: each plane that had contents when it was dropped
 * is valid, or can be derived from one that is. If the function fails, or leaves a plane without
 * contents or under lease, its status (or TN_INVALID_STATE, TN_IN_USE) is returned: leases that are
 * open on `stream` in the set are abandoned, all planes and tensors that it made there are freed
 * again, but what is under a lease on another stream, and the set is still dropped. Success without
 * a call if it is not dropped. */
TN_API TN_MUST_USE tn_status tn_saved_rebuild(tn_scope scope, tn_stream stream);
TN_API TN_MUST_USE tn_status tn_saved_is_dropped(tn_scope scope, int *out);

/* ---- offloading to host memory ------------------------------------------------------------- */

/* Moves a valid plane to pinned host memory. A stream of the library's own copies it, behind its
 * last write and what is now on `stream`, and overlaps with work that follows there; the device
 * memory is free behind the copy and all uses. No host wait. The plane is TN_PLANE_OFFLOADED: its
 * contents are kept, also if it is the last copy, in 0 bytes of device memory (the ledger has
 * offloaded_bytes). READ, UPDATE and REPLACE leases and tn_plane_require bring it back, and wait
 * for the copy on the device; a WRITE gives it new memory. Success if it is offloaded already.
 * TN_IN_USE while leased; TN_INVALID_STATE if it is not valid, not in memory of its own (adopted,
 * a view, a scratch slot), or the stream captures; TN_OUT_OF_DEVICE_MEMORY if TENURE_OFFLOAD_LIMIT
 * or the driver allows no more pinned memory. That memory is reused, and goes back when the last
 * root scope of the pool closes; that waits for copies under way. */
TN_API TN_MUST_USE tn_status tn_plane_offload(tn_tensor tensor, tn_plane plane, tn_stream stream);

/* Begins to bring an offloaded plane back, behind what is now on `stream`: later leases wait for
 * the rest of the copy only. Success if it is valid; TN_INVALID_STATE if it is neither. */
TN_API TN_MUST_USE tn_status tn_plane_prefetch(tn_tensor tensor, tn_plane plane, tn_stream stream);

/* ---- foreign memory and DLPack ------------------------------------------------------------- */

typedef void (*tn_release_function)(void *context);

/* Memory of somebody else's that is to be a tensor's plane. */
typedef struct tn_foreign_memory {
    size_t size;
    tn_plane plane;    /* which plane it is: its layout says what lies where */
    void *data;        /* memory of the pool's device, or locked host memory */
    size_t data_bytes; /* at least as many as the layout says; likewise below */
    void *scale;       /* NULL in formats without */
    size_t scale_bytes;
    tn_stream stream; /* the contents are ready in its order; it lives till the release */
    int read_only;    /* 1: WRITE and UPDATE leases are refused */
    tn_release_function release; /* may be NULL */
    void *context;
} tn_foreign_memory;
#define TN_FOREIGN_MEMORY_INIT                                                                     \
    { sizeof(tn_foreign_memory), TN_PLANE_DATA, NULL, 0, NULL, 0, NULL, 0, NULL, NULL }

/* A tensor in the scope whose plane is valid and lies in memory of somebody else's. It is no
 * memory of the pool: the ledger has it as foreign_bytes. Planes that are derived from it are the
 * pool's. When the plane is dropped or the tensor ends, memory->stream is made to wait on the
 * device for all uses of the plane, and then release(context) is called, once, by that thread and
 * with no lock held. While a capture is between that stream and a use, so that it can not wait,
 * such a call is TN_INVALID_STATE. A call that fails has changed nothing and calls no release.
 * TN_INVALID_ARGUMENT: a config that tn_tensor_create refuses, a plane that the format has not,
 * NULL, too few bytes, an address that is not aligned (16 bytes on CUDA; on the host driver that of
 * the element), or that is not this device's. */
TN_API TN_MUST_USE tn_status tn_tensor_adopt(tn_scope scope, const tn_tensor_config *config,
                                             const tn_foreign_memory *memory, tn_tensor *out);

/* The same for a plane of a tensor that is there and has no planes: its handle stays while memory
 * comes and goes. The plane is dropped as ever, and the memory is released behind its uses then. Of
 * a tensor that is regatherable the last plane may be. TN_INVALID_STATE if the tensor has a plane,
 * or is a view; TN_IN_USE while one is leased; else as tn_tensor_adopt. */
TN_API TN_MUST_USE tn_status tn_plane_adopt(tn_tensor tensor, const tn_foreign_memory *memory);

/* Tensors for other libraries and from them, without a copy. The structs are those of dlpack.h, of
 * DLPack 1.x (versioned) and of the time before: a program that looks into them includes it. */
struct DLManagedTensor;
struct DLManagedTensorVersioned;

typedef enum tn_dlpack_part {
    TN_DLPACK_DATA = 0,   /* the elements, in the tensor's shape; a transposed COL plane as K x M */
    TN_DLPACK_SCALE,      /* the valid scales: scale_rows x scale_cols, rows scale_stride apart */
    TN_DLPACK_SCALE_BLOCK /* all scale_bytes, with padding and global scale, as bytes */
} tn_dlpack_part;

typedef struct tn_dlpack_export_config {
    size_t size;
    tn_plane plane;
    tn_dlpack_part part;
    tn_access access; /* READ (the versioned struct says read-only), or UPDATE */
    tn_stream stream; /* the consumer's: where it uses the tensor; it lives till the deleter */
    int pairs;        /* 1: E2M1 in elements of two lanes, as PyTorch has them; 0: of one */
} tn_dlpack_export_config;
#define TN_DLPACK_EXPORT_CONFIG_INIT                                                               \
    { sizeof(tn_dlpack_export_config), TN_PLANE_DATA, TN_DLPACK_DATA, TN_READ, NULL, 0 }

/* A part of a plane as a DLPack tensor, under a lease that ends when its deleter is called: from
 * any thread, at any time. Until then whatever the lease forbids is TN_IN_USE, and the text says
 * that the plane is exported. Work put on `stream` from now on comes after earlier work on the
 * plane; what comes after the deleter waits for the stream. Of host memory (kDLCPU, kDLCUDAHost)
 * the contents are there when the call returns. Errors are those of tn_lease_begin, and
 * TN_UNSUPPORTED for a part that the plane has not, or pairs of what has an odd row. */
TN_API TN_MUST_USE tn_status tn_dlpack_export(tn_tensor tensor,
                                              const tn_dlpack_export_config *config,
                                              struct DLManagedTensor **out);
TN_API TN_MUST_USE tn_status tn_dlpack_export_versioned(tn_tensor tensor,
                                                        const tn_dlpack_export_config *config,
                                                        struct DLManagedTensorVersioned **out);

/* What the imported tensor is to be, and where the scales of its plane are. */
typedef struct tn_dlpack_import_config {
    size_t size;
    tn_format format;
    tn_plane plane;
    tn_scale_mode scale_mode;
    tn_plane_policy policy;
    int frozen;
    const char *name;              /* copied */
    struct DLManagedTensor *scale; /* all of the plane's scale_bytes, as bytes or scales */
    struct DLManagedTensorVersioned *scale_versioned; /* of tn_dlpack_import_versioned */
    const char *site;                                 /* as that of a tensor */
} tn_dlpack_import_config;
#define TN_DLPACK_IMPORT_CONFIG_INIT                                                               \
    {                                                                                              \
        sizeof(tn_dlpack_import_config), TN_FORMAT_PLAIN, TN_PLANE_DATA, TN_SCALE_POW2,            \
            TN_POLICY_DEFAULT, 0, NULL, NULL, NULL, TN_SITE                                        \
    }

/* Adopts a DLPack tensor (tn_tensor_adopt) and its scales; their deleters are the release. config
 * may be NULL: a plain tensor. The contents are ready in the order of `stream`, and the deleters
 * are called when it waits for our uses: name the stream that the producer frees in the order of.
 * Of host memory the uses are waited for on the host before that. A read-only tensor stays so.
 * After a failure all is still the caller's, deleters and all. TN_UNSUPPORTED: what can not be
 * represented (gaps between elements, an unknown element type, one that the format does not take,
 * more than TN_RANK_MAX dimensions, another major version: of that only the deleter may be used).
 * TN_INVALID_ARGUMENT: another device, an address that is not aligned, shapes that do not fit. */
TN_API TN_MUST_USE tn_status tn_dlpack_import(tn_scope scope, struct DLManagedTensor *managed,
                                              const tn_dlpack_import_config *config,
                                              tn_stream stream, tn_tensor *out);
TN_API TN_MUST_USE tn_status tn_dlpack_import_versioned(tn_scope scope,
                                                        struct DLManagedTensorVersioned *managed,
                                                        const tn_dlpack_import_config *config,
                                                        tn_stream stream, tn_tensor *out);

/* ---- reports, differences, expectations ---------------------------------------------------- */

/* The scope and all below it as a tree: of each tensor format, shape, policy and where it was made;
 * of each plane that has memory its state and bytes; and who holds it: access, stream and the call
 * of each open lease. JSON is described in docs/formats.md. Returns the bytes that the whole needs
 * without the closing 0, as tn_pool_report does; 0 for a scope that is not alive or an unknown
 * format. */
TN_API size_t tn_scope_report(tn_scope scope, tn_report_format format, char *text,
                              size_t text_bytes);

/* What lies between two readings of ledgers, of one scope or of two; negative: there is less. */
typedef struct tn_ledger_change {
    size_t size;
    int64_t total_bytes;
    int64_t data_bytes[TN_PLANE_COUNT];
    int64_t scale_bytes[TN_PLANE_COUNT];
    int64_t format_bytes[TN_FORMAT_COUNT];
    int64_t foreign_bytes;
    int64_t tensors;
    int64_t planes;
    int64_t leases;
} tn_ledger_change;
#define TN_LEDGER_CHANGE_INIT                                                                      \
    { sizeof(tn_ledger_change), 0, {0}, {0}, {0}, 0, 0, 0, 0 }

TN_API TN_MUST_USE tn_status tn_ledger_diff(const tn_ledger *before, const tn_ledger *after,
                                            tn_ledger_change *out);

/* It in a line, without what has not changed: "+4096 bytes (ROW +4000 data, +96 scales), +1 plane",
 * or "no change". Returns and cuts as tn_scope_report does. */
TN_API size_t tn_ledger_change_text(const tn_ledger_change *change, char *text, size_t text_bytes);

/* Expectations, for the tests of those who use this library. One that holds does nothing; one that
 * does not gives the handler a text: file and line, what was expected and found, and the report of
 * the scope. Each is 1 if it holds, 0 if the handler has returned. */
#define TN_EXPECT_LIVE_BYTES(scope, bytes) tn_expect_live_bytes((scope), (bytes), TN_SITE)
#define TN_EXPECT_PLANE_BYTES(scope, plane, bytes)                                                 \
    tn_expect_plane_bytes((scope), (plane), (bytes), TN_SITE)
#define TN_EXPECT_PLANE_STATE(tensor, plane, state)                                                \
    tn_expect_plane_state((tensor), (plane), (state), TN_SITE)
#define TN_EXPECT_NO_LEASES(scope)         tn_expect_no_leases((scope), TN_SITE)
#define TN_EXPECT_NO_GROWTH(scope, before) tn_expect_growth((scope), (before), 0, TN_SITE)
#define TN_EXPECT_GROWTH(scope, before, growth)                                                    \
    tn_expect_growth((scope), (before), (growth), TN_SITE)

/* What they are made of. Growth is of total bytes, against an earlier tn_scope_ledger of it; if it
 * is 0, no tensor or lease more or less is there either. */
TN_API int tn_expect_live_bytes(tn_scope scope, size_t bytes, const char *site);
TN_API int tn_expect_plane_bytes(tn_scope scope, tn_plane plane, size_t bytes, const char *site);
TN_API int tn_expect_plane_state(tn_tensor tensor, tn_plane plane, tn_plane_state state,
                                 const char *site);
TN_API int tn_expect_no_leases(tn_scope scope, const char *site);
TN_API int tn_expect_growth(tn_scope scope, const tn_ledger *before, int64_t growth,
                            const char *site);

/* Called for each expectation that does not hold, by the thread that has it and with no lock held.
 * It may return, abort, longjmp or throw; the text is valid until then. NULL: print to stderr and
 * abort, as it is from the start. Set it before threads expect something. */
typedef void (*tn_expect_handler)(void *context, const char *text);
TN_API void tn_expect_handler_set(tn_expect_handler handler, void *context);

#ifdef __cplusplus
}
#endif
#endif
