/* What planes must do, written from the public headers: an oracle without any code of tensor/.
 *
 * A model has two tensors of one format, a place for a third, which is a saved or cloned one, and
 * for a view of any of them. An operation changes it and gives the status that the library must
 * give; what a failed one changes is said by its rule. Bytes follow from the states alone.
 *
 *     tensor A, B (0, 1)      tensor S (2): made by save and clone, ended by restore and destroy
 *        planes ROW, COL         state, derived or not, where it is, old memory under REPLACE
 *     view V (3)              of some rows or of all, of A, B or S
 *     leases, oldest first
 *     scratch slot            one or two buffers, and whose plane is in each
 *
 * Sequences are of the *narrow* operations: planes, leases, save, restore, clone. The *wide* ones
 * are for random runs: memory of other kinds, views, slots, budgets, changing policies.
 */
#ifndef TENURE_PLANE_MODEL_H
#define TENURE_PLANE_MODEL_H

#include "tenure_lifetime.h"

enum {
    MODEL_TENSORS = 3,
    MODEL_SAVED = 2,
    MODEL_VIEW = 3, /* as a tensor of operations: it has no planes of its own */
    MODEL_PLANES = 2,
    MODEL_STREAMS = 2,
    MODEL_LEASES = 8,
    MODEL_BUFFERS = 2,
    MODEL_ROWS = 130,
    MODEL_COLS = 600,
    MODEL_VIEW_PART = 128 /* rows of a view of some */
};

typedef enum model_kind {
    MODEL_MAKE = 0,
    MODEL_REQUIRE,
    MODEL_DROP,
    MODEL_RELEASE,
    MODEL_READ,
    MODEL_WRITE,
    MODEL_UPDATE,
    MODEL_REPLACE,
    MODEL_END,     /* of lease `lease` */
    MODEL_ABANDON, /* likewise */
    MODEL_SAVE,
    MODEL_RESTORE, /* S into the tensor */
    MODEL_CLONE,
    MODEL_MOVE, /* to the other scope, and back */
    MODEL_FREEZE,
    MODEL_DESTROY,
    MODEL_END_BACKWARD, /* of all tensors */
    /* wide */
    MODEL_CREATE, /* A or B again, without planes */
    MODEL_ADOPT,  /* A or B again, its plane in memory of others; `lease`: read only */
    MODEL_OFFLOAD,
    MODEL_PREFETCH,
    MODEL_VIEW_ROWS,    /* V of the tensor's first 128 rows */
    MODEL_VIEW_ALL,     /* V of all, in another shape */
    MODEL_POLICY,       /* of the tensor: `lease` */
    MODEL_BUDGET,       /* of the root: `lease` planes and some bytes */
    MODEL_SLOT_BUFFERS, /* `lease` of them, from the next derivation on */
    MODEL_SLOT_RESERVE,
    MODEL_SLOT_RELEASE,
    MODEL_RENEW, /* the stream ends, and another one takes its place */
    MODEL_KINDS
} model_kind;

typedef struct model_operation {
    unsigned char kind, tensor, plane, stream, lease;
} model_operation;

/* Where a plane's memory is. */
typedef enum model_place {
    PLACE_OWN = 0, /* of the pool; of no meaning while ABSENT */
    PLACE_SLOT,
    PLACE_HOST,
    PLACE_FOREIGN,
    PLACE_READ_ONLY /* foreign, too */
} model_place;

typedef struct model_memory {
    unsigned char state; /* tn_plane_state; of old memory: what it would be again */
    unsigned char is_derived;
    unsigned char place;
    unsigned char is_kept; /* by the budget */
} model_memory;

typedef struct model_plane {
    model_memory now;
    model_memory old;      /* if has_old */
    unsigned char has_old; /* under REPLACE, with memory from before */
    signed char writer;    /* stream of the last write, or of the allocation; -1: none */
    unsigned char readers; /* bits of streams, since then */
} model_plane;

typedef struct model_tensor {
    unsigned char is_alive, is_frozen, is_saved, is_moved;
    unsigned char contents; /* number of the last write; equal ones are the same values */
    unsigned char policy;   /* tn_plane_policy */
    model_plane planes[MODEL_PLANES];
} model_tensor;

typedef struct model_view {
    unsigned char is_alive, is_moved, is_part, base;
} model_view;

typedef struct model_lease {
    unsigned char tensor, plane, access, stream;
    unsigned char has_made;   /* the plane was ABSENT, or left the slot */
    unsigned char has_staled; /* the other plane was VALID */
    unsigned char is_through; /* the view */
} model_lease;

typedef struct model_buffer {
    unsigned char has_memory, is_used, tensor, plane;
} model_buffer;

typedef struct model {
    unsigned char format; /* tn_format: BLOCK_1D, BLOCK_2D or TENSOR */
    unsigned char policy; /* of tensors when they are made */
    unsigned char writes;
    unsigned char lease_count;
    unsigned char is_choosing; /* the budget drops planes, of those that model_may_choose names */
    unsigned char buffer_count, next_buffer;
    model_tensor tensors[MODEL_TENSORS];
    model_view view;
    model_lease leases[MODEL_LEASES];
    model_buffer buffers[MODEL_BUFFERS];
    unsigned char budget; /* in planes: model_budget_of */
} model;

void model_init(model *m, tn_format format, tn_plane_policy policy);

/* The operations that are tried in this state, of at most `leases_max` open leases; the count. */
int model_operations(const model *m, int leases_max, int is_wide, model_operation *operations,
                     int limit);

tn_status model_step(model *m, model_operation operation);

/* After a step that is_choosing: the plane has been seen to be gone. 0: it must not be. */
int model_choose(model *m, int tensor, int plane);
/* That was all. NULL, or what is wrong with the choice. */
const char *model_chosen(model *m);

/* Bytes of all planes that have memory of the pool, and of the slot; of those elsewhere. */
size_t model_bytes(const model *m);
size_t model_slot_bytes(const model *m);
size_t model_offloaded_bytes(const model *m);
size_t model_foreign_bytes(const model *m);
int model_foreign_planes(const model *m);
size_t model_kept_bytes(const model *m);
size_t model_budget_of(const model *m, int planes); /* so many, and not one more */

/* The same for two states that differ only in the names of tensors A and B and of the streams, and
 * in how writes are numbered. Of narrow states. */
uint64_t model_hash(const model *m);

/* In words: "replace B.COL on stream 1". */
void model_describe(model_operation operation, char *text, size_t text_bytes);

#endif
