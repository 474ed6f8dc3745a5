/* A mixture of experts for tests of training: norm, a router that picks two experts for each token,
 * the experts' MLP, and the way there and back; forward and backward, of public calls. The experts
 * are cut over the ranks of a communicator; or one program, without a communicator and without
 * tn_expert_dispatch, has all of them and the tokens of all ranks ("homes").
 *
 *     x - norm - router - two experts a token ---- rows by expert, FP8 ----> w1, activation, w2
 *     |                   and their weights   <--- rows by expert, bf16 ---  of this rank's experts
 *     +-------------------------------------------- + ---> y
 *
 * The router is a Linear whose logits the host reads, since the host must know the counts: it sorts
 * by expert, then by token, and makes the softmax of the two and its gradient. */
#ifndef TENURE_MIXTURE_SUPPORT_H
#define TENURE_MIXTURE_SUPPORT_H

#include "parallel_support.h"
#include "tenure_experts.h"
#include "tenure_layers.h"
#include "tenure_lifetime.h"

enum { MIXTURE_RANKS_MAX = 4, MIXTURE_EXPERTS_MAX = 12, MIXTURE_ROWS_MAX = 128, MIXTURE_PICKS = 2 };

typedef struct mixture_shape {
    int64_t hidden, ffn, experts; /* experts: a multiple of the ranks */
    int ranks;
    const int64_t *rows; /* tokens of each rank */
} mixture_shape;

typedef struct mixture_run {
    const rank_fixture *all;
    const mixture_shape *shape;
    tn_comm *comm;    /* of the ranks; NULL: alone, with all homes and all experts */
    tn_scope scratch; /* of what ends with the micro-batch, also y and dx */
    tn_tensor error;  /* 4 bytes, 0: where ops of groups and maps say what went wrong */
} mixture_run;

int mixture_homes(const mixture_run *run);
int64_t mixture_own_experts(const mixture_run *run);

/* A map of rows, `each` numbers a row; and the rows that it names, of src's kind. */
tn_tensor mixture_map(const mixture_run *run, tn_scope scope, const int64_t *numbers, int64_t rows,
                      int64_t each);
tn_tensor mixture_gathered(const mixture_run *run, tn_scope scope, tn_tensor src, tn_tensor map);

/* Experts: this rank's. Of gradients, gain and router have one for each home. */
typedef struct mixture_weights {
    tn_tensor gain, router;     /* fp32 [1, hidden], bf16 [experts, hidden] */
    const tn_tensor *up, *down; /* FP8 [ffn, hidden], [hidden, ffn] */
} mixture_weights;

typedef struct mixture_gradients {
    const tn_tensor *gain, *router;
    const tn_tensor *up, *down; /* {0}: frozen */
    int accumulate;
} mixture_gradients;

/* A rank's tokens, and where they are among its rows by expert. */
typedef struct mixture_home {
    int64_t rows, first; /* first: of its first row by expert among those of all homes */
    tn_tensor x, normed, rstd;
    tn_tensor sources; /* of each row by expert, the token */
    tn_tensor places;  /* of each token, its two rows */
    tn_tensor weights; /* of each row by expert, fp32 */
    int64_t pick[MIXTURE_ROWS_MAX * MIXTURE_PICKS], place[MIXTURE_ROWS_MAX * MIXTURE_PICKS];
    float weight[MIXTURE_ROWS_MAX * MIXTURE_PICKS]; /* of each token */
} mixture_home;

/* What a forward leaves for its backward, in the scope that it was given. */
typedef struct mixture {
    mixture_home homes[MIXTURE_RANKS_MAX];
    int64_t tokens[MIXTURE_RANKS_MAX * MIXTURE_EXPERTS_MAX]; /* of each rank for each expert */
    int64_t offsets[MIXTURE_EXPERTS_MAX + 1];                /* of the own experts */
    tn_tensor device_offsets;
    tn_tensor there, back; /* alone: maps between all homes' rows and all experts' */
    tn_tensor hidden, weights;
    tn_grouped_saved up, down;
} mixture;

/* x and y: of each home. x stays until backward, or until a forward that makes all again. */
void mixture_forward(const mixture_run *run, const mixture_weights *weights, tn_scope saved,
                     const tn_tensor *x, tn_tensor *y, mixture *out);

/* dy and dx: of each home. */
void mixture_backward(const mixture_run *run, const mixture_weights *weights,
                      const mixture_gradients *gradients, const tn_tensor *dy, tn_tensor *dx,
                      mixture *m);

#endif
