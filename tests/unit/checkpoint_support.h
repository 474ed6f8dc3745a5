/* A small model to save and load: tensors of every kind that checkpoints have, in one process. */
#ifndef TENURE_CHECKPOINT_SUPPORT_H
#define TENURE_CHECKPOINT_SUPPORT_H

#include "tenure_checkpoint.h"
#include "tensor_fixture.h"

enum { MODEL_TENSORS = 4, MODEL_ENTRIES = 7, MODEL_PIECES = 3 };

typedef struct checkpoint_model {
    tensor_fixture on;
    tn_tensor tensors[MODEL_TENSORS];
    tn_checkpoint_entry entries[MODEL_ENTRIES];
    tn_checkpoint_piece pieces[MODEL_ENTRIES][MODEL_PIECES];
    tn_checkpoint_config config;
    char path[512]; /* of the checkpoint, in a directory of its own */
} checkpoint_model;

/* On a host device, nothing is valid yet. path NULL: in a new directory. */
void checkpoint_model_open(checkpoint_model *model, const char *path);

/* Fails if anything is left; removes the directory if it was made here. */
void checkpoint_model_close(checkpoint_model *model);

/* Writes what the seed says to all planes; whether they have it. */
void checkpoint_model_fill(checkpoint_model *model, unsigned seed);
int checkpoint_model_has(checkpoint_model *model, unsigned seed);

/* Saves with the seed as step. */
tn_status checkpoint_model_save(checkpoint_model *model, unsigned seed);

/* Fails unless what is loaded is what a seed had saved, and the directory has nothing else: gives
 * the seed. */
unsigned checkpoint_model_load(checkpoint_model *model);

/* "path/00000003/rank-00000.safetensors" of the checkpoint that is there. */
void checkpoint_model_file(const checkpoint_model *model, char *path, size_t path_bytes);

#endif
