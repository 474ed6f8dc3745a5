/* A training run: steps, validation, and all that the report says about them. */
#ifndef TENURE_TRAINER_RUN_H
#define TENURE_TRAINER_RUN_H

#include "trainer_step.h"
#include "trainer_text.h"

typedef struct trainer_config {
    trainer_shape shape;
    int steps;
    int validate_every; /* steps; before the first and after the last one always */
    int uses_graph;     /* all steps but the first are launches of one graph */
    const trainer_text *text;
} trainer_config;

/* What one owner has between steps, and had at most. */
typedef struct trainer_owner {
    const char *name;
    size_t resident_bytes;
    size_t peak_bytes;
} trainer_owner;

enum { TRAINER_OWNER_COUNT = 7 };

typedef struct trainer_result {
    double *loss;     /* [steps]: mean over the step's tokens, before its update */
    double *norm;     /* [steps]: of all gradients, before they are clipped */
    double *held_out; /* [steps + 1]: before step i; below 0: not measured */
    double step_us;   /* mean, without the first two steps where there are more than four */
    double wall_s;    /* of all */
    uint64_t parameters;
    trainer_owner owners[TRAINER_OWNER_COUNT];
    size_t live_bytes;     /* between steps */
    size_t peak_bytes;     /* the most that was live in each pool, added up */
    size_t reserved_bytes; /* from the device, at the end */
    size_t live_after_destroy_bytes;
    int is_simulated;            /* no losses then, only memory */
    int is_balanced;             /* after every step */
    uint64_t memory_calls;       /* into the driver, in the first two steps ... */
    uint64_t later_memory_calls; /* ... and in all later ones */
    uint64_t replays;            /* launches of the graph */
    int replays_are_stable;      /* no memory call in these, the same live and reserved bytes */
    trainer_trail trail;
} trainer_result;

/* 1, or 0 with the reason in `message`. `out` is to be freed in either case. */
int trainer_run(tn_device *device, const trainer_config *config, trainer_result *out,
                char message[TRAINER_MESSAGE_BYTES]);
void trainer_result_free(trainer_result *result);

/* The mean of the last 20 losses, or of all if there are fewer. */
enum { TRAINER_FINAL_STEPS = 20 };
double trainer_result_final_loss(const trainer_result *result, int steps);

#endif
