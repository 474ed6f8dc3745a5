/* A unit: the weights that are gathered together, sharded over a group of ranks.
 *
 * With one rank in the group its weights are whole and stay; else each rank has a shard, its own
 * masters, moments and gradients as packed elements (tenure_shard.h), and the weights are gathered
 * into a ring around their use. Gradients of a sharded unit are whole only in a bucket, from
 * simulate_unit_begin of a backward to its end, where they are reduced on the side stream.
 */
#ifndef TENURE_SIMULATE_UNIT_H
#define TENURE_SIMULATE_UNIT_H

#include "simulate_groups.h"
#include "tenure_ring.h"
#include "tenure_shard.h"

typedef struct simulate_rank simulate_rank;

/* A parameter as the layers take it. */
typedef struct simulate_weight {
    tn_tensor value;
    tn_tensor gradient;              /* {0}: frozen; sharded: there in backward only */
    tn_tensor master, first, second; /* of a weight that is whole */
} simulate_weight;

typedef struct simulate_shape {
    int64_t rows, cols; /* cols 0: a vector of gains, in fp32 */
    int is_quantized;   /* else bf16 */
    int is_frozen;
    const char *name;
} simulate_shape;

typedef struct simulate_unit {
    const char *name;
    simulate_group group;
    int count, room;
    simulate_weight **weights; /* where the layers look */
    simulate_shape *shapes;
    int is_sharded;
    tn_shard_plan *plan; /* of a sharded unit, and all below */
    int index;           /* in the ring */
    tn_tensor shard;
    tn_tensor masters, first, second, gradients; /* packed; {0}: the rank has none */
    tn_tensor columns;                           /* gathered too, where L4 is off */
    tn_tensor bucket;
    tn_lease lease; /* of the bucket, while the layers write it */
    int is_reduced; /* gradients hold a micro-batch's sums */
} simulate_unit;

/* ---- what it is made of ---------------------------------------------------------------------- */

/* 0 without memory. */
int simulate_unit_add(simulate_unit *unit, const simulate_shape *shape, simulate_weight *weight);

/* The plan of its shapes over so many ranks. */
TN_MUST_USE tn_status simulate_unit_plan(const simulate_unit *unit, int rank_count,
                                         tn_shard_plan **out);

/* Memory of the host; those of the device end with their scopes. */
void simulate_unit_free(simulate_unit *unit);

/* ---- on a rank ------------------------------------------------------------------------------- */

TN_MUST_USE tn_status simulate_unit_make(simulate_rank *rank, simulate_unit *unit);

/* Around a use: the values can be leased, and in a backward the gradients be written. `next` is
 * gathered meanwhile (NULL: nothing is). */
TN_MUST_USE tn_status simulate_unit_begin(simulate_rank *rank, simulate_unit *unit,
                                          simulate_unit *next, int is_backward);
TN_MUST_USE tn_status simulate_unit_end(simulate_rank *rank, simulate_unit *unit, int is_backward);

/* Whether the layers add to what gradients hold, in a backward of this micro-batch. */
int simulate_unit_accumulates(const simulate_unit *unit, int microbatch);

/* AdamW, and the cast to the shard. */
TN_MUST_USE tn_status simulate_unit_update(simulate_rank *rank, simulate_unit *unit);

#endif
