/* What a scope, a tensor, a plane and a lease are, inside; and the books they belong to.
 *
 *     books (one per pool) ── root scopes ── child scopes
 *                                  └── tensors ── planes ── leases
 *
 * Invariants:
 * - Everything that belongs to one pool is guarded by the lock of that pool's books.
 * - A plane that is not ABSENT has exactly the parts (data, scales) that its layout says; a part
 *   of 0 bytes has no block. ABSENT planes have none, but for what a failing driver left.
 * - What a plane had before stays whole and as it was while a REPLACE lease is open.
 * - At most one WRITE, UPDATE or REPLACE lease on a plane, and then no other lease on it.
 * - Plane states change in the files of plane_transition.h only, blocks in plane_memory.c, the sums
 *   in ledger.c.
 * - A scope's sums are those of its tensors and of its child scopes; so the root's are all.
 */
#ifndef TENURE_TENSOR_STATE_H
#define TENURE_TENSOR_STATE_H

#include "driver.h"
#include "handle_table.h"
#include "pool_owned.h"
#include "tenure_lifetime.h"

typedef struct tn__books tn__books;
typedef struct tn__scope_object tn__scope_object;
typedef struct tn__tensor_object tn__tensor_object;
typedef struct tn__lease_object tn__lease_object;
typedef struct tn__saved_set tn__saved_set;           /* saved_set.h */
typedef struct tn__scratch_slot tn__scratch_slot;     /* scratch_slot.h */
typedef struct tn__scratch_buffer tn__scratch_buffer; /* the same */
typedef struct tn__foreign tn__foreign;               /* see adopt.h */
typedef struct tn__view tn__view;                     /* see tensor_view.h */
typedef struct tn__offload tn__offload;               /* see offload.h */

enum {
    TN__NAME_BYTES_MAX = 255,
    TN__READS_KEPT = 8,
    TN__RECENT_STREAMS = 16,
    TN__MARKS_KEPT = 4,
    TN__SITE_BYTES = 64
};

/* ---- books: all scopes of a pool ------------------------------------------------------------ */

/* The id of a stream whose end we hear of, so that the driver need not be asked each time. */
typedef struct tn__recent_id {
    tn_stream stream; /* one whose place is another: none */
    uint64_t stream_id;
} tn__recent_id;

struct tn__books {
    tn_pool *pool;
    tn_device *device;
    unsigned lock; /* see handle_table.h */
    tn__scope_object *first_root;
    uint64_t tensors_made; /* numbers tensors in the order of creation */
    uint64_t writes_made;
    size_t closing_scopes;
    tn__recent_id recent_ids[TN__RECENT_STREAMS];
    int checks_leases;              /* TENURE_CHECK_LEASES */
    tn__offload *offload;           /* NULL until a plane is offloaded */
    tn__lease_object *spare_leases; /* linked by next: of leases that have ended */
    tn__books *next;
};

/* ---- scopes --------------------------------------------------------------------------------- */

typedef struct tn__sums {
    size_t data_bytes[TN_PLANE_COUNT];
    size_t scale_bytes[TN_PLANE_COUNT];
    uint64_t tensors;
    uint64_t planes; /* that hold bytes */
    uint64_t leases;
    size_t foreign_bytes;   /* of planes whose memory was adopted: in none of the above */
    size_t offloaded_bytes; /* of planes in host memory: likewise */
    size_t format_bytes[TN_FORMAT_COUNT];
} tn__sums;

/* Of derived planes that stay when they are released; see plane_budget.h. */
typedef struct tn__plane_budget {
    int is_set; /* 0: the limit of a root is TENURE_PLANE_BUDGET, other scopes have none */
    size_t limit_bytes;
    size_t kept_bytes;
} tn__plane_budget;

struct tn__scope_object {
    tn_scope handle;
    tn__books *books;
    tn__scope_object *parent; /* NULL: a root */
    int is_closing;           /* and all below it: see scope_closing.c */
    tn__scope_object *first_child;
    tn__scope_object *previous, *next; /* siblings, or the books' roots */
    tn__tensor_object *first_tensor;
    tn_scope_kind kind;
    char *name;
    tn_plane_policy policy; /* of what is in it and has none of its own; DEFAULT: none */
    tn__scratch_slot *slot; /* NULL: none */
    tn__saved_set *saved;   /* NULL: none */
    tn_phase phase;         /* as set; tn__scope_phase says what it comes to */
    tn__sums sums;          /* with all scopes below */
    tn__plane_budget budget;
    size_t peak_total_bytes;
    size_t peak_plane_bytes[TN_PLANE_COUNT];
    size_t peak_phase_bytes[TN_PHASE_COUNT];
    char site[TN__SITE_BYTES];
};

/* ---- planes --------------------------------------------------------------------------------- */

typedef enum tn__part { TN__PART_DATA = 0, TN__PART_SCALE, TN__PART_COUNT } tn__part;

/* Whose memory a plane has. */
typedef enum tn__memory_kind {
    TN__MEMORY_OWNED = 0, /* blocks of the pool: the only kind that is in the ledger */
    TN__MEMORY_SLOT,      /* in a scratch slot of the scope */
    TN__MEMORY_FOREIGN,   /* adopted: the program's */
    TN__MEMORY_HOST       /* offloaded: pinned memory, which no lease is given */
} tn__memory_kind;

/* Work of a lease: which stream it is on, and whether the pool knows of all that has ended. Ids are
 * the driver's, with TN__STREAM_ID_MAY_GO for a stream that another library may destroy without a
 * word: of such a use, once its lease has ended, the fence is asked and never the stream. */
typedef struct tn__plane_use {
    tn_stream stream;
    uint64_t stream_id;
    int is_recorded;
    uint64_t capture; /* that it is in, if the id is TN__STREAM_ID_IN_CAPTURE */
    tn__fence fence;  /* of a stream that may go; epoch 0: there could be none */
} tn__plane_use;

static inline tn__plane_use tn__plane_use_on(tn_stream stream, uint64_t stream_id) {
    return (tn__plane_use){.stream = stream, .stream_id = stream_id, .is_recorded = 1};
}

/* A free that names no stream: behind all uses that the pool was told of. */
#define TN__NO_STREAM    ((tn_stream)UINTPTR_MAX)
#define TN__NO_STREAM_ID UINT64_MAX

/* The pool has been told of the use of a stream, while its use stamp (pool_owned.h) was this. */
typedef struct tn__use_mark {
    uint64_t stream_id;
    uint64_t stamp; /* 0: not a mark */
} tn__use_mark;

typedef struct tn__plane_object tn__plane_object;
struct tn__plane_object {
    tn_plane_state state;
    int is_derived;             /* its contents were made from another plane, not written */
    tn__memory_kind kind;       /* of the blocks; OWNED while there are none */
    tn__scratch_buffer *buffer; /* that it is in: kind SLOT; else NULL */
    void *blocks[TN__PART_COUNT];
    size_t bytes[TN__PART_COUNT];
    tn__plane_budget *kept_by;         /* that it is counted in; NULL: none */
    size_t kept_bytes;                 /* counted there */
    int is_chosen;                     /* to go, while a budget makes room */
    tn__foreign *foreign;              /* whose the blocks are; NULL unless FOREIGN */
    uint64_t home_stream_id;           /* of our stream that the blocks were allocated on: the pool
                                        * counts it as using them. TN__NO_STREAM_ID: none */
    const _Atomic uint64_t *use_stamp; /* of the pool; tn__plane_order_set_home */
    int has_write;
    tn__plane_use write;  /* the last write, or the allocation */
    tn__plane_use *reads; /* since then; each stream once, oldest first; own_reads or larger */
    tn__plane_use own_reads[TN__READS_KEPT];
    size_t read_count, read_limit;
    uint64_t next_capture; /* of the use that is noted next, if that is in one */
    int has_skips; /* a capture's border kept a use from waiting for another: see plane_order.c */
    tn_stream last_stream; /* of the last use of any kind, for frees that name no stream */
    uint64_t last_stream_id;
    tn__use_mark marks[TN__MARKS_KEPT]; /* since the blocks were allocated */
    unsigned next_mark;                 /* the one to forget next */
    tn__lease_object *first_lease;      /* open ones */
    tn__plane_object *replaced;         /* no leases in it; see below */
};

/* `replaced` is the memory that a plane had, with its state and uses, while a REPLACE lease writes
 * new memory; it is freed at the end, or is the plane's again. ABSENT: it could not be freed. */

struct tn__tensor_object {
    tn_tensor handle;
    tn__books *books;
    tn__scope_object *scope;
    tn__tensor_object *previous, *next; /* in the scope */
    uint64_t number;                    /* order of creation */
    tn_format format;
    unsigned plane_bits; /* TN_PLANE_BITs of the planes that the format has */
    tn_dtype dtype;
    int rank;
    int64_t shape[TN_RANK_MAX];
    int64_t rows, cols;
    tn_scale_mode scale_mode;
    tn_plane_policy policy;         /* as set; tn__tensor_policy says what it means */
    unsigned wants[TN_PLANE_COUNT]; /* see plane_budget.c */
    unsigned dropped; /* TN_PLANE_BITs of planes that had contents when the saved set was dropped */
    int is_rebuilt;   /* had no planes when its set began to be rebuilt */
    int is_frozen;
    int is_regatherable;  /* its contents can be had again: there is no last copy of them */
    int is_saved;         /* made by tn_tensor_save, and not restored */
    uint64_t contents;    /* which write they are of: tensors with equal numbers are equal */
    int is_of_library;    /* the program can not use it, only see it */
    unsigned block_flags; /* TN_ALLOC_ flags of the blocks of its planes */
    char *name;
    char site[TN__SITE_BYTES];
    tn__plane_object planes[TN_PLANE_COUNT];
    tn__view *view;                /* what makes it a view: its planes stay ABSENT; else NULL */
    tn__tensor_object *first_view; /* of it */
    tn_plane_layout layouts[TN_PLANE_COUNT]; /* of those that the format has; never change */
};

/* ---- leases --------------------------------------------------------------------------------- */

struct tn__lease_object {
    tn_lease handle;                   /* {0} for the leases that the library takes for itself */
    tn__handle_slot *slot;             /* of the handle */
    const void *caller;                /* of tn_lease_begin */
    uint64_t hash;                     /* of the plane's bytes, if is_checked */
    tn__lease_object *previous, *next; /* on the plane */
    tn__tensor_object *tensor;
    tn__plane_object *at; /* that plane of it */
    tn_stream stream;
    uint64_t stream_id;
    tn_plane plane;
    tn_access access;
    tn__tensor_object *through; /* from here on all is 0 in a new lease: the view of the tensor that
                                 * was leased; NULL: none */
    unsigned char is_checked;   /* the bytes must be the same when it ends (lease_check.h) */
    unsigned char is_derivation;   /* the library's own, to derive a plane: stales no other */
    unsigned char is_export;       /* held for another library, until it calls a deleter */
    unsigned char is_untouched;    /* nothing was done under it: abandoning leaves no trace */
    unsigned char is_stream_ended; /* our stream was destroyed meanwhile: its work is done */
    unsigned char has_made_plane;  /* it was ABSENT before */
    unsigned char state_before;    /* a tn_plane_state, of the plane itself */
    unsigned char stale_made;      /* bits of planes that were VALID and are STALE by this lease */
};

/* ---- questions ------------------------------------------------------------------------------ */

/* What the tensor's policy comes to: never DEFAULT, and KEEP if none of its planes can be derived
 * from another (plane_policy.c). */
tn_plane_policy tn__tensor_policy(const tn__tensor_object *tensor);

/* The phase of the scope, or of the nearest scope above it that has one (phase.c). */
tn_phase tn__scope_phase(const tn__scope_object *scope);

/* The lease that writes the plane; NULL if none does. */
static inline tn__lease_object *tn__plane_writer(const tn__plane_object *plane) {
    tn__lease_object *lease = plane->first_lease;
    return lease && lease->access != TN_READ ? lease : NULL;
}

/* The plane has the tensor's contents, wherever they are. */
static inline int tn__state_is_complete(tn_plane_state state) {
    return state == TN_PLANE_VALID || state == TN_PLANE_OFFLOADED;
}

/* What the ledger has of the plane: OWNED bytes only, with those of memory being replaced. */
void tn__plane_owned_bytes(const tn__plane_object *plane, size_t out[TN__PART_COUNT]);

/* Bytes of memory of that kind, with those of memory being replaced. */
size_t tn__plane_bytes_in(const tn__plane_object *plane, tn__memory_kind kind);

/* The pool's block that the part begins, to be told of uses; NULL if there is none. */
void *tn__plane_pool_block(const tn__plane_object *plane, tn__part part);

/* A block that could not be freed yet, though the plane does not have it any more. */
int tn__plane_has_remains(const tn__plane_object *plane);

/* "READ", "WRITE", "UPDATE", "REPLACE". */
const char *tn__access_name(tn_access access);
const char *tn__plane_state_name(tn_plane_state state);

tn_tensor_info tn__tensor_info_of(const tn__tensor_object *tensor);

/* That makes a tensor like this one; its name is the tensor's. */
tn_tensor_config tn__tensor_config_of(const tn__tensor_object *tensor);

/* The first lease found on any of its planes, or through it if it is a view; NULL: none. */
tn__lease_object *tn__tensor_lease(const tn__tensor_object *tensor);

/* Whether everything about one tensor that the invariants above say holds; for assertions. */
int tn__tensor_is_valid(const tn__tensor_object *tensor);

/* TN_IN_USE with tensor, plane, and the holder's access and stream. */
tn_status tn__fail_in_use(const tn__lease_object *holder, const char *refused);

/* TN_IN_USE with the tensor and the view of it. */
tn_status tn__fail_viewed(const tn__tensor_object *view, const char *refused);

/* ---- access by handle: with the lock held until tn__unlock(books->lock); NULL on failure --- */

tn_status tn__scope_acquire(tn_scope scope, tn__scope_object **out);
tn_status tn__fail_of_library(const tn__tensor_object *tensor);

static inline tn_status tn__tensor_acquire(tn_tensor tensor, tn__tensor_object **out) {
    tn__tensor_object *object = tn__handle_get(tensor.value, TN__HANDLE_TENSOR);
    *out = object;
    if (!object) return TN_STALE_HANDLE;
    if (__builtin_expect(object->is_of_library, 0)) return tn__fail_of_library(object);
    TN_ASSERT_SLOW(tn__tensor_is_valid(object));
    return TN_OK;
}

static inline tn_status tn__lease_acquire(tn_lease lease, tn__lease_object **out) {
    *out = tn__handle_get(lease.value, TN__HANDLE_LEASE);
    return *out ? TN_OK : TN_STALE_HANDLE;
}

static inline void tn__scope_unlock(const tn__scope_object *scope) {
    tn__unlock(scope->books->lock);
}

static inline void tn__tensor_unlock(const tn__tensor_object *tensor) {
    tn__unlock(tensor->books->lock);
}

/* A site without its folders, cut at the front if it is long; "" for NULL. */
void tn__site_copy(const char *site, char out[TN__SITE_BYTES]);

/* A copied name of at most TN__NAME_BYTES_MAX bytes; `otherwise` if text is NULL or "". */
tn_status tn__name_copy(const char *text, const char *otherwise, char **out);

#endif
