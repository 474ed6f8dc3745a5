/* One rank of a simulated job: its device, pool, communicators, scopes, and the step that it runs.
 *
 *     simulate_rank_run(&job, stage, within, &record, error);        (rank `within` of the stage)
 *
 * The rank is a real program on the library: the sharding planner, the ring, the layers and the
 * casts are those that a program would call; the ops are ghosts, which declare what they touch.
 * On the host driver (job->sim is NULL) the same code runs with real numbers, as a rank of MPI.
 *
 * A first step warms everything up; the second one is recorded.
 */
#ifndef TENURE_SIMULATE_RANK_H
#define TENURE_SIMULATE_RANK_H

#include "sim_library.h"
#include "simulate_pipeline.h"
#include "simulate_unit.h"
#include "tenure_experts.h"
#include "tenure_layers.h"
#include "tenure_lifetime.h"
#include "tenure_simulated.h"

/* Returns from the calling function with the status of `call` if that is not TN_OK. */
#define SIMULATE_TRY(call)                                                                         \
    do {                                                                                           \
        tn_status simulate_try_status = (call);                                                    \
        if (simulate_try_status != TN_OK) return simulate_try_status;                              \
    } while (0)

/* Which of docs/simulate.md's four lifetimes end as here (1), or are as they were (0): then
 * tensors are kept as those stacks keep them. */
typedef struct simulate_lifetimes {
    int frozen_columns;       /* L1 */
    int planes_by_use;        /* L2 */
    int gathered_activations; /* L3 */
    int gather_rows_only;     /* L4 */
} simulate_lifetimes;

typedef struct simulate_job {
    simulate_model model;
    simulate_lifetimes lifetimes;
    tn_simulated_links links;
    size_t device_bytes; /* of a simulated device; 0: as much as it takes */
    const sim_library *sim;
} simulate_job;

/* What a layer's weights are called, in the order in which a unit has them. */
typedef enum simulate_part {
    SIMULATE_GAIN_1 = 0, /* fp32, of hidden elements */
    SIMULATE_QKV,        /* with a kv_rank: down to query_rank + kv_rank */
    SIMULATE_QUERY_UP,   /* with it only */
    SIMULATE_KV_UP,
    SIMULATE_PROJECTION,
    SIMULATE_GAIN_2,
    SIMULATE_UP, /* of dense layers; gate and up as one */
    SIMULATE_DOWN,
    SIMULATE_ROUTER, /* of layers with experts */
    SIMULATE_SHARED_UP,
    SIMULATE_SHARED_DOWN,
    SIMULATE_PART_COUNT
} simulate_part;

typedef struct simulate_layer {
    int64_t index;
    int has_experts;
    int is_frozen;
    simulate_weight parts[SIMULATE_PART_COUNT]; /* value {0}: it has none such */
    simulate_weight *expert_up, *expert_down;   /* of this rank's experts */
    simulate_unit unit, experts;
    tn_scope kept_rows, kept_columns; /* L1, L2: made when they are first kept */
} simulate_layer;

enum { SIMULATE_LOCAL_EXPERTS_MAX = 4096 };

/* Where the rows of a layer with experts go: the same in all of them, and for every micro-batch. */
typedef struct simulate_route {
    int64_t rows;       /* of this rank's tokens, one for each of their experts */
    int64_t *offsets;   /* where each expert's begin among them */
    int64_t local_rows; /* of this rank's experts, from all ranks of their group */
    int64_t
        *local_offsets; /* where each of those begins: by expert, then by the rank they are of */
    size_t *parts;      /* four lists of the group's ranks, for an exchange */
    int64_t *permutation, *inverse;
    tn_tensor device_permutation,
        device_inverse; /* as tn_gather_rows and tn_combine_rows take them */
    tn_tensor device_offsets, error;
} simulate_route;

struct simulate_rank {
    const simulate_job *job;
    const simulate_model *model;
    simulate_record *record;
    int stage;
    int within; /* of the ranks of the stage */
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_stream side;                        /* of communication */
    tn_comm *world;                        /* NULL: the job has one rank */
    tn_comm *groups[SIMULATE_GROUP_COUNT]; /* NULL: one rank */
    tn_ring *rings[SIMULATE_GROUP_COUNT];
    tn_scope root;
    tn_scope owners[SIMULATE_OWNER_COUNT];
    simulate_layer *layers; /* of all chunks of this stage, chunk by chunk */
    int64_t layer_count;
    simulate_weight table, last_gain, head; /* of the first and the last stage */
    simulate_unit table_unit, head_unit;
    tn_tensor step;       /* of tn_adamw_advance */
    int64_t local_tokens; /* rows of this rank between layers */
    int64_t tokens;       /* of the whole tensor-parallel group */
    int64_t local_experts;
    simulate_route route; /* where there are experts */
};

/* 1 if the step ran; 0 with the words. record is closed then. */
int simulate_rank_run(const simulate_job *job, int stage, int within, simulate_record *record,
                      char *error);

/* Which rank of MPI this process is, if the job has more than one: 0 with the words. */
int simulate_rank_find(const simulate_job *job, int *rank, char *error);

/* ---- what the parts of a rank share ---------------------------------------------------------- */

/* A PLAIN tensor of rows x cols (0 columns: of rows elements) in an owner's scope. */
TN_MUST_USE tn_status simulate_make(const simulate_rank *rank, simulate_owner owner, tn_dtype dtype,
                                    int64_t rows, int64_t cols, const char *name, tn_tensor *out);

/* Ends the tensor in the stream's order, and sets the handle to {0}; {0} is a no-op. */
TN_MUST_USE tn_status simulate_drop(const simulate_rank *rank, tn_tensor *tensor);

/* The layers of the stage's chunks, chunk by chunk, without weights: rank->layers, to be freed. */
TN_MUST_USE tn_status simulate_layers_open(simulate_rank *rank);

TN_MUST_USE tn_status simulate_route_open(simulate_rank *rank, simulate_route *route);
void simulate_route_close(simulate_route *route);

/* What is alive of each owner. */
TN_MUST_USE tn_status simulate_mark(const simulate_rank *rank, const char *name, int64_t index);

static inline tn_dtype simulate_dtype(void) { return TN_BF16; } /* of activations */

static inline int simulate_is_first(const simulate_rank *rank) { return rank->stage == 0; }
static inline int simulate_is_last(const simulate_rank *rank) {
    return rank->stage == (int)rank->model->pp - 1;
}

#endif
