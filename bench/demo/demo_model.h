/* The demo's model: a stack of frozen FP8 Linear layers with LoRA adapters, in public calls only.
 *
 *     x      = table[bytes]                                  frozen bf16 table
 *     h[0]   = x + B[0] (A[0] x)                             adapter under the stack
 *     h[i+1] = h[i] + W[i] h[i] + B[i+1] (A[i+1] h[i])       W frozen, FP8 2D block-scaled
 *     loss   = mean of cross entropy of h[layers] head^T     frozen bf16 head
 *
 * All activations are [tokens, hidden] bf16, adapters A [rank, hidden] and B [hidden, rank] are
 * trained by gradient descent on fp32 masters. The adapter under the stack makes every frozen
 * layer compute an input gradient, which is what reads the columnwise planes.
 *
 * Owners are scopes: what the demo prints is read from their ledgers.
 */
#ifndef TENURE_DEMO_MODEL_H
#define TENURE_DEMO_MODEL_H

#include "tenure_layers.h"

/* Returns from the calling function with the status of `call` if that is not TN_OK. */
#define DEMO_TRY(call)                                                                             \
    do {                                                                                           \
        tn_status demo_try_status = (call);                                                        \
        if (demo_try_status != TN_OK) return demo_try_status;                                      \
    } while (0)

typedef struct demo_shape {
    int layers;
    int64_t hidden;
    int64_t tokens;
    int64_t rank;
} demo_shape;

typedef struct demo_adapter {
    tn_tensor a, b;               /* bf16 copies that the GEMMs read */
    tn_tensor master_a, master_b; /* fp32 */
    tn_tensor grad_a, grad_b;     /* fp32 */
} demo_adapter;

typedef struct demo_model {
    demo_shape shape;
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_stream side; /* where the next layer's columnwise plane is derived */
    tn_scope root;
    tn_scope frozen;  /* FP8 weights of the stack */
    tn_scope edges;   /* embedding table and head */
    tn_scope trained; /* adapters, masters, gradients */
    tn_scope saved;   /* saved for backward */
    tn_scope scratch; /* everything else of a step */
    tn_tensor table, head;
    tn_tensor *weights;     /* [layers] */
    demo_adapter *adapters; /* [layers + 1] */
} demo_model;

/* Builds the model with weights from a fixed seed; `policy` is that of the frozen weights, and
 * with KEEP their columnwise planes are made at once. On failure nothing is left. */
TN_MUST_USE tn_status demo_model_create(demo_model *model, tn_device *device, tn_pool *pool,
                                        tn_stream stream, tn_stream side, const demo_shape *shape,
                                        tn_plane_policy policy);

/* Frees everything; after a failure anywhere too. */
tn_status demo_model_destroy(demo_model *model);

/* One step on tokens[0 .. T) predicting targets[0 .. T), both in host memory: forward, backward,
 * update. loss_out [T] in host memory gets each token's loss, once the stream is done. */
TN_MUST_USE tn_status demo_model_step(demo_model *model, const unsigned char *tokens,
                                      const unsigned char *targets, float learning_rate,
                                      float *loss_out);

/* Floats in all gradients, and a copy of them in a fixed order, once the stream is done. */
size_t demo_model_gradient_count(const demo_model *model);
TN_MUST_USE tn_status demo_model_read_gradients(const demo_model *model, float *out);

/* Bytes of the frozen weights' columnwise planes now, from the ledger, and by the formula. */
TN_MUST_USE tn_status demo_model_columnwise_bytes(const demo_model *model, size_t *out);
size_t demo_model_columnwise_bytes_of_one(const demo_shape *shape);

#endif
