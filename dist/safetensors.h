/* Files of the safetensors format: their header written, and read with all of its rules held.
 *
 *     8 bytes      length of the header, little endian
 *     header       JSON: {"name": {"dtype": .., "shape": [..], "data_offsets": [begin, end]}, ..,
 *                  "__metadata__": {"key": "value", ..}}, padded with spaces
 *     data         of all tensors, without holes and overlaps
 *
 * The header is padded so that the data begins at a multiple of TN__SAFETENSORS_ALIGNMENT.
 */
#ifndef TENURE_SAFETENSORS_H
#define TENURE_SAFETENSORS_H

#include "error.h"
#include "tenure_tensor.h"
#include "text_sink.h"

enum {
    TN__SAFETENSORS_LENGTH_BYTES = 8,
    TN__SAFETENSORS_ALIGNMENT = 64,
    TN__SAFETENSORS_HEADER_MAX = 100 * 1000 * 1000 /* as the format has it */
};

typedef struct tn__safetensor {
    const char *name;
    const char *dtype; /* "F32" */
    int rank;          /* at most TN_RANK_MAX: files may have more, and are refused */
    int64_t shape[TN_RANK_MAX];
    uint64_t begin; /* bytes into the data */
    uint64_t end;
} tn__safetensor;

typedef struct tn__safetensors_note {
    const char *key;
    const char *value;
} tn__safetensors_note;

typedef struct tn__safetensors {
    tn__safetensor *tensors;
    size_t tensor_count;
    tn__safetensors_note *notes; /* __metadata__ */
    size_t note_count;
} tn__safetensors;

/* "BF16"; NULL for a dtype that the format does not have: E2M1 and E8M0 are saved as bytes. */
const char *tn__safetensors_dtype(tn_dtype dtype);

/* ---- writing: the JSON text without padding, into a sink ------------------------------------- */

void tn__safetensors_write(tn__text *out, const tn__safetensors *header);

/* Bytes of a header with `text_bytes` of text, with its padding. */
uint64_t tn__safetensors_padded(uint64_t text_bytes);

/* ---- reading --------------------------------------------------------------------------------- */

/* Takes the header's JSON text apart, in place: all names are of `text`, which must outlive them.
 * TN_CORRUPT_INPUT says what rule of the format is broken and where; `file` is named. data_bytes:
 * what follows the header. End with tn__safetensors_free. */
tn_status tn__safetensors_read(const char *file, char *text, size_t text_bytes, uint64_t data_bytes,
                               tn__safetensors *out);
void tn__safetensors_free(tn__safetensors *header);

/* The value of a note; NULL: there is none. */
const char *tn__safetensors_note_of(const tn__safetensors *header, const char *key);

#endif
