/* The bytes that are alive after each sub-step of a training step: a list that is written in one
 * step and must be the same in every other one, whatever the device.
 */
#ifndef TENURE_TRAINER_TRAIL_H
#define TENURE_TRAINER_TRAIL_H

#include <stdio.h>

#include "trainer_model.h"

typedef struct trainer_trail_row {
    char name[48];
    size_t model_bytes; /* parameters, gradients, optimizer state, batches */
    size_t saved_bytes;
    size_t activation_bytes; /* what runs from one sub-step to the next */
} trainer_trail_row;

typedef struct trainer_trail {
    trainer_trail_row *rows;
    int count, capacity;
    int position;    /* in the step that is under way */
    int differences; /* sub-steps of later steps that were not as in the first */
    int is_first;
} trainer_trail;

void trainer_trail_begin_step(trainer_trail *trail);
void trainer_trail_end_step(trainer_trail *trail);

/* What is alive now. */
TN_MUST_USE tn_status trainer_trail_note(trainer_trail *trail, const trainer_model *model,
                                         tn_scope saved, tn_scope scratch, const char *name);

/* As CSV. 0 if the stream has failed. */
int trainer_trail_print(const trainer_trail *trail, FILE *stream);

void trainer_trail_free(trainer_trail *trail);

#endif
