/* Tenure: checkpoints of sharded tensors, saved by any number of ranks and loaded by any other.
 *
 *     tn_checkpoint_piece mine = {.first = 4096 * rank, .count = 4096, .offset = 0};
 *     tn_checkpoint_entry entry = {.name = "layers.0.weight.master", .dtype = TN_FP32,
 *                                  .rank = 2, .shape = {8192, 2}, .memory = master,
 *                                  .plane = TN_PLANE_DATA, .pieces = &mine, .piece_count = 1};
 *     tn_checkpoint_config config = TN_CHECKPOINT_CONFIG_INIT;
 *     config.path = "run/checkpoint", config.comm = comm, config.scope = scope;
 *     config.entries = &entry, config.entry_count = 1;
 *     if (tn_checkpoint_save(&config, stream) != TN_OK) puts(tn_error_last());
 *     ...
 *     if (tn_checkpoint_load(&config, stream) != TN_OK) puts(tn_error_last());
 *
 * An *entry* is a tensor of the whole model; each rank says which of its elements, counted
 * row-major from 0, it holds where. What was saved on four ranks is loaded on two, three or one by
 * saying other pieces: every element comes from the file that has it.
 *
 * On disk a checkpoint is a directory:
 *
 *     index.json                     which elements of which tensor are in which file, with sizes
 *                                    and checksums
 *     00000007/rank-00001.safetensors   a valid safetensors file: what a rank held, a tensor of
 *                                    one dimension for each entry (of the entry's shape if the
 *                                    rank held all of it), and in __metadata__ whose file it is
 *
 * The index is replaced in one step once every rank's file is on the disk; only then is the
 * directory of the files before it removed. A program that is killed at any moment, a full disk or
 * a failed rank leave the checkpoint before as it was, and what was half written is removed by
 * the next save. All ranks see the same directory.
 *
 * Loading checks before it writes anywhere: a file that is missing, cut off, damaged or of another
 * checkpoint is TN_CORRUPT_INPUT, and the text names it and what differs. Then, and when another
 * rank's check has failed, no destination has been changed on any rank. What fails when elements
 * are on their way leaves the planes that they go to undefined, on all ranks.
 *
 * Threads: one save at a time for each path, and one call for each communicator. Both calls wait
 * for their work. A program that saves while others load at the path does them no harm: all ranks
 * load the one or the other, or are told to load again (TN_INVALID_STATE).
 */
#ifndef TENURE_CHECKPOINT_H
#define TENURE_CHECKPOINT_H

#include "tenure_dist.h"
#include "tenure_tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements first ... first + count - 1 of the entry, which are `offset` bytes into its memory. */
typedef struct tn_checkpoint_piece {
    int64_t first;
    int64_t count;
    size_t offset;
} tn_checkpoint_piece;

typedef struct tn_checkpoint_entry {
    const char *name; /* UTF-8; no other entry's; not "__metadata__" */
    tn_dtype dtype;   /* of the elements; E2M1 as BYTE, two elements in each; E8M0 likewise */
    int rank;         /* of the shape; 0 is one element */
    int64_t shape[TN_RANK_MAX]; /* of the whole tensor */
    tn_tensor memory;           /* where this rank's elements are: any tensor; {0} without pieces */
    tn_plane plane;             /* of it: must be valid to be saved */
    int is_scale;               /* 1: in the plane's scales; 0: in its data */
    const tn_checkpoint_piece *pieces; /* what this rank holds: saved from, loaded to */
    size_t piece_count;                /* 0: nothing of it, but every rank names every entry */
} tn_checkpoint_entry;

typedef struct tn_checkpoint_config {
    size_t size;
    const char *path; /* the directory; its parent must exist */
    tn_comm *comm;    /* the ranks that save or load together; NULL: this process alone */
    tn_scope scope;   /* with comm: for a few bytes of device memory, while the call lasts */
    const tn_checkpoint_entry *entries;
    size_t entry_count;
    uint64_t plan_hash;   /* save: kept for tn_checkpoint_info; load: 0, or what it has to be */
    uint64_t step;        /* save: kept likewise */
    size_t staging_bytes; /* pinned host memory for the copies; 0: 8 MiB */
} tn_checkpoint_config;
#define TN_CHECKPOINT_CONFIG_INIT                                                                  \
    { sizeof(tn_checkpoint_config), NULL, NULL, {0}, NULL, 0, 0, 0, 0 }

/* Saves what the entries hold when `stream` comes here, and returns once it is on the disk. Every
 * element of every entry is saved by exactly one rank.
 * Errors: TN_INVALID_ARGUMENT (names the entry: elements that no rank or two ranks save, ranks that
 * do not agree on an entry, pieces outside of the tensor or its memory), TN_INVALID_STATE (a plane
 * that is not valid), TN_IO (names the file and why), out of memory, what the communicator says.
 * A rank that fails makes all fail; the checkpoint before is as it was, unless only the last step
 * failed, which brings the new index, already in place, to the disk: then either is found. So it is
 * where a rank is lost behind that. */
TN_API TN_MUST_USE tn_status tn_checkpoint_save(const tn_checkpoint_config *config,
                                                tn_stream stream);

/* Loads the pieces of all entries in the order of `stream`, and returns once they are there. Planes
 * that are absent are made; all elements of a plane that is loaded are to be loaded in one call,
 * or were there before. Entries that the checkpoint has and the caller does not name are passed
 * over.
 * Errors: as above, TN_CORRUPT_INPUT (the file and what differs), TN_INVALID_ARGUMENT (an entry
 * that the checkpoint does not have, or has with another dtype or shape; another plan hash),
 * TN_INVALID_STATE (another checkpoint was put in its place while it was read: load again). */
TN_API TN_MUST_USE tn_status tn_checkpoint_load(const tn_checkpoint_config *config,
                                                tn_stream stream);

/* What the index at the path says. */
typedef struct tn_checkpoint_info {
    size_t size;
    int rank_count; /* that saved it */
    uint64_t plan_hash;
    uint64_t step;
    size_t entry_count;
    uint64_t bytes; /* of all elements */
} tn_checkpoint_info;
#define TN_CHECKPOINT_INFO_INIT                                                                    \
    { sizeof(tn_checkpoint_info), 0, 0, 0, 0, 0 }
TN_API TN_MUST_USE tn_status tn_checkpoint_info_get(const char *path, tn_checkpoint_info *out);

#ifdef __cplusplus
}
#endif
#endif
