/* A small transformer (attention, an MLP, a mixture of experts, or some of these) that is trained
 * over ranks, and the same by one rank alone: with FP8 weights and AdamW, 20 steps, whose losses
 * and weights are then compared bit for bit. What the ranks have in common and what is cut over
 * them a layout says.
 *
 * Gradients are accumulated over micro-batches. By turns a step saves what backward reads, has the
 * MLP make it again, has whole layers make all again, and over ranks delays the MLP's gradients.
 * Half-way the MLPs' first weights and the first layer's experts are frozen (where weights are
 * sharded: from the beginning); one expert of each layer always is, and some get no tokens.
 *
 * The order of sums allows for equality:
 *
 * - Rows of an expert lie by the rank that they are of, then by token, wherever it is; its
 *   products, blocks of 128 rows included, are one rank's. Nothing is summed over the ranks of a
 *   replica.
 * - What all ranks have (attention, norms, router) has a gradient of each rank's tokens, and these
 *   are added in the order of the ranks; so are gradients of experts over replicas, and of the cut
 *   MLP over tensor groups. Alone, one rank accumulates those of each rank's (replica's, group's)
 *   tokens apart and adds them up in this order.
 * - The cut MLP, and attention where its heads are cut, add products of blocks of 128 features, one
 *   a rank, in the order of ranks, as one rank does (scales are powers of two), and rows are whole
 *   tiles but for the last rank's. Their gains are trained on up to two tensor ranks: of more tiles
 *   tn_norm_backward has another order. */
#ifndef TENURE_RANK_TRAINER_SUPPORT_H
#define TENURE_RANK_TRAINER_SUPPORT_H

#include "block_support.h"
#include "mixture_support.h"
#include "tenure_sharded.h"

enum {
    TRAINER_HIDDEN = 32,
    TRAINER_BLOCK = 128, /* features of the MLP that a rank has */
    TRAINER_EXPERT_FFN = 40,
    TRAINER_EXPERTS = MIXTURE_EXPERTS_MAX,
    TRAINER_LAYERS_MAX = 2,
    TRAINER_RANKS_MAX = MIXTURE_RANKS_MAX,
    TRAINER_STEPS = 20
};
#define TRAINER_RATE 2e-3f /* of learning */

/* Whether each rank keeps all that it shares with others, or a shard of it, of which all is
 * gathered for forward and for backward, once for both, or once a step. */
typedef enum trainer_sharding {
    NOT_SHARDED = 0,
    SHARDED,
    KEPT_AFTER_FORWARD,
    KEPT_AFTER_BACKWARD
} trainer_sharding;

/* Heads of all ranks on each rank's own tokens; or a part of the heads on those of its group. */
typedef enum trainer_attention { NO_ATTENTION = 0, OWN_TOKENS, CUT_HEADS } trainer_attention;

/* The ranks: replica after replica, of each the tensor groups one after the other. Experts are cut
 * over a replica's ranks, the MLP over a group's; the MLP is in every layer. */
typedef struct trainer_layout {
    int replicas, ranks, tensor_ranks; /* ranks: of a replica */
    int layers, micro_batches;         /* micro_batches: of each replica */
    trainer_attention attention;
    int has_experts;
    trainer_sharding sharding;
    int64_t rows[TRAINER_RANKS_MAX]; /* of each rank of a replica, in whole sequences of 8 */
} trainer_layout;

/* Trains and compares: of all ranks, on the first one. Fails, too, unless the loss has fallen, the
 * live bytes are the same after each step from the second on and none are left; with experts,
 * unless some got no tokens and the counts changed from step to step. Where sums have another order
 * than that of the ranks nothing is compared. */
void trainer_compare(const rank_fixture *all, const char *name, const trainer_layout *layout);

/* ---- between its files ----------------------------------------------------------------------- */

/* Whose tokens make a gradient: one rank's, a tensor group's, a replica's. */
typedef enum trainer_extent { OF_RANK, OF_GROUP, OF_REPLICA, EXTENTS } trainer_extent;

/* The first ones are block_support's. Of heads that are cut QKV are the queries, KEYS keys and
 * values, so that each rank has a block of 128 features of either. */
enum { GAIN_1, QKV, PROJECTION, GAIN_2, UP, DOWN, GAIN_3, ROUTER, KEYS, PARTS };

typedef struct parameter {
    trainer_extent extent;
    int is_there, tensor; /* tensor: of the sharded unit that it is in */
    int number; /* in its layer: a part's, then up and down of each expert, from PARTS on */
    int is_frozen, has_no_gradient;
    tn_tensor master, first, second, weight; /* weight: as layers read it; a gain's is the master */
    tn_tensor gradient[TRAINER_RANKS_MAX];   /* alone: of each rank, group or replica; else one */
} parameter;

typedef struct trained_layer {
    parameter parts[PARTS];
    parameter expert_up[TRAINER_EXPERTS], expert_down[TRAINER_EXPERTS]; /* of the own experts */
} trained_layer;

typedef struct trainer {
    const rank_fixture *all;
    trainer_layout layout;
    int is_alone;
    tn_comm *group, *replica;           /* this rank's, of one or more ranks; NULL: alone */
    tn_comm *sums[EXTENTS];             /* of those whose gradients are added up */
    tn_sharded_model *sharded[EXTENTS]; /* NULL: not sharded, or there is nothing of it */
    tn_scope scope;
    tn_tensor step, error;
    trained_layer layers[TRAINER_LAYERS_MAX];
    double losses[TRAINER_STEPS];
    size_t bytes_before, live_bytes[TRAINER_STEPS]; /* of the pool; after each step */
    int64_t tokens[TRAINER_EXPERTS];                /* of a replica's experts, at the last look */
    int empty, changed; /* experts without tokens; with other counts than before */
} trainer;

trainer *trainer_open(const rank_fixture *all, const trainer_layout *layout, int is_alone);
void trainer_close(trainer *t);

/* Gradients of one kind that one rank has, alone; else that are added up. */
int trainer_count(const trainer_layout *layout, trainer_extent of);

int64_t trainer_own_experts(const trainer *t);

/* Ranks whose tokens this one has, and which they are in their replica. */
int trainer_homes(const trainer *t);
int trainer_rank(const trainer *t, int home);

/* Frozen half-way, or sharded: from the beginning. */
int trainer_freezes(const trainer *t, int layer, const parameter *p);

/* In an order that is the same on all ranks. */
typedef void (*parameter_function)(trainer *t, int layer, parameter *p, void *context);
void trainer_each(trainer *t, parameter_function visit, void *context);

/* y += x, which is y. */
tn_tensor trainer_added(const trainer *t, tn_tensor x, tn_tensor y);

typedef enum trainer_saving {
    SAVES,
    RECOMPUTES_MLP,
    RECOMPUTES_LAYERS,
    DELAYS_MLP, /* its weights' gradients; alone not */
    SAVINGS
} trainer_saving;

typedef struct micro_batch {
    const trainer *t;
    tn_scope scope;
    int replica, accumulate;
    trainer_saving saving;
} micro_batch;

/* Of heads that are cut. */
typedef struct cut_attention {
    tn_tensor x, qkv, attended, log_sum, merged;
    tn_norm_linear_saved queries, keys;
    tn_linear_saved projection;
} cut_attention;

/* What a layer has of a micro-batch, of each home or group that this rank has. */
typedef struct activations {
    tn_scope saved;
    tn_tensor x[TRAINER_RANKS_MAX], sum[TRAINER_RANKS_MAX], joined[TRAINER_RANKS_MAX];
    tn_tensor value[TRAINER_RANKS_MAX];
    block blocks[TRAINER_RANKS_MAX];
    cut_attention cut[TRAINER_RANKS_MAX];
    tn_norm_mlp_saved mlp[TRAINER_RANKS_MAX];
    mixture mixture;
} activations;

/* Over ranks, of a layout that is sharded: from whole parameters, and for each unit of a layer. */
void trainer_shard(trainer *t);
void trainer_unshard(trainer *t);
typedef tn_status (*trainer_call)(tn_sharded_model *model, int unit);
void trainer_put(const trainer *t, trainer_call call, const trained_layer *l);
void trainer_update_sharded(const trainer *t);

/* A master copy, on all ranks; 0 of one that never trains. */
parallel_matrix trainer_sharded_master(const trainer *t, int layer, const parameter *p);

/* Of a->x. What is saved is in a->saved, and with RECOMPUTES_LAYERS that is gone at once. */
void trainer_forward(const micro_batch *b, const trained_layer *l, tn_tensor *y, activations *a);

/* dy becomes dx. */
void trainer_backward(const micro_batch *b, const trained_layer *l, tn_tensor *dy, activations *a);

#endif
