/* What planes must do, written from the public headers: an oracle without any code of tensor/.
 *
 * A model has two tensors of one format and a place for a third, which is a saved or cloned one. An
 * operation changes it and gives the status that the library must give; what a failed one changes
 * is said by its rule. Bytes follow from the states alone.
 *
 *     tensor A, B (0, 1)      tensor S (2): made by save and clone, ended by restore and destroy
 *        planes ROW, COL         state, derived or not, old memory under REPLACE
 *     leases, oldest first
 */
#ifndef TENURE_PLANE_MODEL_H
#define TENURE_PLANE_MODEL_H

#include "tenure_lifetime.h"

enum { MODEL_TENSORS = 3, MODEL_SAVED = 2, MODEL_PLANES = 2, MODEL_STREAMS = 2, MODEL_LEASES = 8 };

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
    MODEL_KINDS
} model_kind;

typedef struct model_operation {
    unsigned char kind, tensor, plane, stream, lease;
} model_operation;

typedef struct model_plane {
    unsigned char state; /* tn_plane_state */
    unsigned char is_derived;
    unsigned char has_old; /* under REPLACE, with memory from before */
    unsigned char old_state, is_old_derived;
    signed char writer;    /* stream of the last write, or of the allocation; -1: none */
    unsigned char readers; /* bits of streams, since then */
} model_plane;

typedef struct model_tensor {
    unsigned char is_alive, is_frozen, is_saved, is_moved;
    unsigned char contents; /* number of the last write; equal ones are the same values */
    model_plane planes[MODEL_PLANES];
} model_tensor;

typedef struct model_lease {
    unsigned char tensor, plane, access, stream;
    unsigned char has_made;   /* the plane was ABSENT */
    unsigned char has_staled; /* the other plane was VALID */
} model_lease;

typedef struct model {
    unsigned char format; /* tn_format: BLOCK_1D, BLOCK_2D or TENSOR */
    unsigned char policy; /* tn_plane_policy of the tensors: KEEP, UNTIL_LAST_USE, BACKWARD_END */
    unsigned char writes;
    unsigned char lease_count;
    model_tensor tensors[MODEL_TENSORS];
    model_lease leases[MODEL_LEASES];
} model;

void model_init(model *m, tn_format format, tn_plane_policy policy);

/* The operations that are tried in this state, of at most `leases_max` open leases; the count. */
int model_operations(const model *m, int leases_max, model_operation *operations, int limit);

tn_status model_step(model *m, model_operation operation);

/* Bytes of all planes that have memory. */
size_t model_bytes(const model *m);

/* The same for two states that differ only in the names of tensors A and B and of the streams, and
 * in how writes are numbered. */
uint64_t model_hash(const model *m);

/* In words: "replace B.COL on stream 1". */
void model_describe(model_operation operation, char *text, size_t text_bytes);

#endif
