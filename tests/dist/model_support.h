/* Transformers for the tests of sharded models: the sharded one on all ranks, and one that knows
 * nothing of ranks, which rank 0 runs over the data of all and whose numbers are the right ones. */
#ifndef TENURE_MODEL_SUPPORT_H
#define TENURE_MODEL_SUPPORT_H

#include "block_support.h"
#include "ranks_support.h"
#include "tenure_sharded.h"

enum { MODEL_LAYERS_MAX = 8 };

typedef enum model_precision {
    MODEL_BF16 = 0,
    MODEL_FP8,        /* shards of FP8 */
    MODEL_FP8_OF_BF16 /* shards of bf16, quantized for each use */
} model_precision;

typedef struct model_options {
    block_shape shape;
    int layers;
    model_precision precision;
    tn_shard_layout layout;
    int frozen_layers;     /* the first ones, wholly */
    unsigned frozen_parts; /* bits, of all layers */
    int micro_batches;
    tn_gradient_sum sum;
    tn_gradient_wire wire;
    tn_dtype gradient_dtype;
    int keep_after_forward, keep_after_backward;
    int recompute;
    int shards_from_masters;
    int update_ahead;
    int ring_slots;     /* likewise */
    int gradient_slots; /* 0: the model's own choice */
    float max_norm;
    float amax_epsilon; /* of each update from here on */
} model_options;

/* The shape that lifetimes are shown with, and a small one for many steps. */
model_options model_options_full(int layers);
model_options model_options_small(int layers);

int model_is_frozen(const model_options *options, int layer, int part);

/* ---- the sharded one ------------------------------------------------------------------------- */

/* Told after "forward", "backward" of each layer, and after "loss" (layer -1). */
typedef struct test_model test_model;
typedef void (*model_note)(void *context, test_model *model, const char *after, int layer);

struct test_model {
    const rank_fixture *ranks;
    model_options options;
    tn_comm *comm;           /* of its own, so that its bytes are counted alone */
    tn_scope scope, scratch; /* the model's, and one for each pass's tensors */
    tn_sharded_model *sharded;
    block blocks[MODEL_LAYERS_MAX];
    float loss; /* of this rank's last micro-batch */
    model_note note;
    void *note_context;
};

/* From its initial values, or from a trained model's. */
struct reference_model;
test_model *model_open(const rank_fixture *ranks, const model_options *options,
                       const struct reference_model *trained);
void model_close(test_model *model);

/* Forward and backward of one micro-batch of this rank's. */
void model_pass(test_model *model, int step, int micro_batch);

void model_update(test_model *model);

/* model_pass for all micro-batches, then model_update. */
void model_step(test_model *model, int step);

tn_comm_stats model_stats(const test_model *model);
tn_sharded_report model_report(const test_model *model);

/* ---- the one without ranks ------------------------------------------------------------------- */

typedef struct reference_part {
    tn_tensor master, first, second; /* fp32 */
    tn_tensor weight, source;        /* as layers read them */
    tn_tensor gradient;              /* of one micro-batch, or of one rank's */
    tn_tensor arrived;               /* fp32: over ranks */
    tn_tensor total;                 /* that the update takes */
} reference_part;

typedef struct reference_model {
    const rank_fixture *ranks;
    model_options options;
    int data_ranks; /* whose data it runs over */
    tn_scope scope, scratch;
    tn_tensor step, squares, norm, factor;
    reference_part parts[MODEL_LAYERS_MAX][BLOCK_PARTS];
    float loss[8];            /* of the last micro-batch of each rank */
    const test_model *pieces; /* gradients pass FP8 by the pieces of this one's plans; or NULL */
} reference_model;

reference_model *reference_open(const rank_fixture *ranks, const model_options *options);
void reference_close(reference_model *model);

/* Gradients of a step in `total`, added up in the order that the options say; and the update. On
 * rank 0; the others get gradients and masters from it. */
void reference_gradients(reference_model *model, int step);
void reference_update(reference_model *model);

/* ---- both ------------------------------------------------------------------------------------ */

/* Initial values of a parameter, fp32 rows x cols, the same everywhere. */
void model_initial_fill(const rank_fixture *ranks, tn_tensor tensor, int layer, int part);

/* Input of a micro-batch, and what the model is to say to it. */
tn_tensor model_input(const rank_fixture *ranks, const block_run *run, int step, int rank,
                      int micro_batch);

/* Loss, and its gradient in scratch: the values, [tokens, hidden], are logits of 256 bytes each. y
 * ends. */
tn_tensor model_loss(const rank_fixture *ranks, const block_run *run, tn_tensor y, int step,
                     int rank, int micro_batch, float *loss);

/* Fails unless this rank's parts of the reduced gradients (or of masters) are the reference's, bit
 * for bit; returns how many elements were compared. */
size_t model_compare_gradients(const test_model *model, const reference_model *reference);
size_t model_compare_masters(const test_model *model, const reference_model *reference);

/* The largest difference of a master from the reference's. */
float model_master_distance(const test_model *model, const reference_model *reference);

#endif
