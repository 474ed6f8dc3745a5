/* What saving and loading a checkpoint have in common: the arguments checked and sorted, the
 * planes leased, staging memory, and the ranks in step.
 *
 * Both calls go in phases, and after each the ranks agree: a rank that has failed tells the others,
 * so that all go on or none does.
 */
#ifndef TENURE_CHECKPOINT_CALL_H
#define TENURE_CHECKPOINT_CALL_H

#include "checkpoint_index.h"
#include "driver.h"
#include "tenure_checkpoint.h"

enum { TN__CHECKPOINT_HALVES = 2 };

/* A plane that entries have their memory in. */
typedef struct tn__checkpoint_lease {
    tn_tensor memory;
    tn_plane plane;
    tn_lease lease;
    tn_plane_view view;
    int is_begun;
} tn__checkpoint_lease;

typedef struct tn__checkpoint_item {
    const tn_checkpoint_entry *entry;
    const char *dtype;
    unsigned element_bytes;
    int64_t elements; /* of the whole tensor */
    int64_t held;     /* by this rank */
    size_t lease;     /* of no meaning if nothing is held */
} tn__checkpoint_item;

typedef struct tn__checkpoint {
    const tn_checkpoint_config *config;
    tn_stream stream;
    int rank;
    int rank_count;
    uint64_t puts;     /* the communicator's collectives before the call */
    tn_device *device; /* NULL: nothing is in any memory */
    const tn__driver *driver;
    tn__driver_device *on;
    tn__checkpoint_item *items; /* in the order of names */
    tn__checkpoint_lease *leases;
    size_t lease_count;

    unsigned char *halves[TN__CHECKPOINT_HALVES]; /* pinned */
    size_t half_bytes;
    tn__event copied[TN__CHECKPOINT_HALVES]; /* what was put on the stream for a half */
    void *block;                             /* the ranks' device memory; NULL without comm */
    unsigned char *words;                    /* pinned: what goes to and comes from it */
} tn__checkpoint;

/* Checks the arguments and gets memory; end with tn__checkpoint_end in any case. */
tn_status tn__checkpoint_begin(tn__checkpoint *call, const tn_checkpoint_config *config,
                               tn_stream stream);
void tn__checkpoint_end(tn__checkpoint *call);

/* Leases of all planes: to read; or to write, and those that are valid to update. */
tn_status tn__checkpoint_lease_all(tn__checkpoint *call, int is_to_write);

/* Ends them: are_written 1, what was leased to write has been; 0, it is as before; -1, it is
 * undefined. */
tn_status tn__checkpoint_release_all(tn__checkpoint *call, int are_written);

/* This rank's status if it is a failure; else that of a rank that has failed, which is named. */
tn_status tn__checkpoint_agree(tn__checkpoint *call, tn_status mine);

/* Rank 0's number, on every rank. */
tn_status tn__checkpoint_share(tn__checkpoint *call, uint64_t *number);

/* The address of an item's piece; its lease has begun. */
char *tn__checkpoint_address(const tn__checkpoint *call, const tn__checkpoint_item *item,
                             const tn_checkpoint_piece *piece);

/* "path/index.json", "path/00000007", "path/00000007/rank-00001.safetensors"; NULL: no memory. */
char *tn__checkpoint_index_path(const char *path);
char *tn__checkpoint_directory(const char *path, uint64_t generation);
char *tn__checkpoint_file(const char *path, uint64_t generation, const char *name);

/* The index at the path. *is_there 0: there is none, and *out is empty. */
tn_status tn__checkpoint_read_index(const char *path, int *is_there, tn__index *out);

#endif
