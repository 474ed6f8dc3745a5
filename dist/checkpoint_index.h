/* The index of a checkpoint: which elements of which tensor are in which file.
 *
 *     {"format":"tenure-checkpoint","version":1,"generation":7,"step":100,
 *      "plan_hash":"0123456789abcdef",
 *      "files":[{"name":"rank-00000.safetensors","bytes":..,"header_bytes":..,
 *                "header_crc32":".."}],
 *      "tensors":[{"name":"..","dtype":"F32","shape":[..],
 *                  "parts":[{"file":0,"begin":..,"bytes":..,"crc32":"..",
 *                            "pieces":[[first,count]]}]}],
 *     "crc32":"0badcafe"}
 *
 * A part is what one file has of a tensor: its elements are piece after piece, from byte `begin` of
 * the file on. The last line is the checksum of all before it.
 *
 * Every rank's file says the same of itself, in the notes of its header, of which rank 0 makes
 * the index: "part/NAME" = "crc32 [extent,extent] first+count first+count".
 *
 * Invariants of an index that was read or made: tensors are sorted by name, no two alike; the
 * pieces of each cover its elements once; parts lie within their files.
 */
#ifndef TENURE_CHECKPOINT_INDEX_H
#define TENURE_CHECKPOINT_INDEX_H

#include "safetensors.h"

#define TN__CHECKPOINT_INDEX "index.json"
#define TN__CHECKPOINT_PART  "part/" /* before the name, in the notes of a file */

enum { TN__CHECKPOINT_VERSION = 1, TN__CHECKPOINT_NAME_BYTES = 32 };

typedef struct tn__index_run {
    int64_t first; /* elements of the tensor */
    int64_t count;
} tn__index_run;

typedef struct tn__index_part {
    size_t file;
    uint64_t begin; /* in the file */
    uint64_t bytes;
    uint32_t crc;
    size_t first_run; /* of the index */
    size_t run_count;
} tn__index_part;

typedef struct tn__index_tensor {
    const char *name;
    const char *dtype; /* as in safetensors files */
    int rank;
    int64_t shape[TN_RANK_MAX];
    int64_t elements;
    size_t first_part; /* of the index */
    size_t part_count;
} tn__index_tensor;

typedef struct tn__index_file {
    char name[TN__CHECKPOINT_NAME_BYTES];
    uint64_t bytes;
    uint64_t header_bytes; /* with the length before it: where the data begins */
    uint32_t header_crc;
} tn__index_file;

typedef struct tn__index {
    uint64_t generation;
    uint64_t step;
    uint64_t plan_hash;
    tn__index_file *files; /* by rank */
    size_t file_count;
    size_t file_total; /* while it is made: that will be added */
    tn__index_tensor *tensors;
    size_t tensor_count;
    tn__index_part *parts;
    size_t part_count;
    tn__index_run *runs;
    size_t run_count;
    char *text;   /* that the names are of; NULL: they are another's */
    uint32_t crc; /* of one that was read */
} tn__index;

/* Adds what the file of the next rank, of file_total, says: the names are the header's, which must
 * outlive the index. TN_CORRUPT_INPUT names the file and what its notes lack; TN_INVALID_ARGUMENT
 * the entry that ranks do not agree on. */
tn_status tn__index_add_file(tn__index *index, size_t file_total, const tn__index_file *file,
                             const tn__safetensors *header);

/* Parts that are not within their files are TN_CORRUPT_INPUT, elements that no part or two parts
 * have are `when_not`; both name the tensor. */
tn_status tn__index_check(const tn__index *index, tn_status when_not);

/* The index as text, measured and written by the same call. */
void tn__index_write(tn__text *out, const tn__index *index);

/* Takes the text over: it is freed with the index, or on failure. TN_CORRUPT_INPUT names the path
 * and what is wrong. */
tn_status tn__index_read(const char *path, char *text, size_t bytes, tn__index *out);

void tn__index_free(tn__index *index);

/* NULL: there is none of this name. */
const tn__index_tensor *tn__index_find(const tn__index *index, const char *name);

/* Bytes of an element of a dtype of the index; 0: none that checkpoints have. */
unsigned tn__index_dtype_bytes(const char *dtype);

uint32_t tn__crc32(uint32_t crc, const void *data, size_t bytes); /* 0 to begin with */

#endif
