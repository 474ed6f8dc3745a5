/* Each layer of tenure_layers.h with its tensors, in any way that it can be told, on any driver:
 * its calls, and what must be alive after each of them.
 */
#ifndef TENURE_TEST_LAYERS_H
#define TENURE_TEST_LAYERS_H

#include "tenure_layers.h"
#include "test_ops.h"

enum { LAYER_M = 70, LAYER_K = 136, LAYER_F = 72, LAYER_N = 40 };

typedef enum test_layer_kind {
    TEST_LINEAR = 0,
    TEST_NORM_LINEAR,
    TEST_NORM_MLP,
    TEST_LAYER_KINDS
} test_layer_kind;

typedef struct test_layer_config {
    test_layer_kind kind;
    tn_format format[2]; /* of the weights; the second is of an MLP */
    tn_dtype dtype;      /* of x, y, and a PLAIN weight */
    tn_norm norm;
    tn_activation activation;
    int gated;
    tn_backward_precision precision;
    tn_dtype gradient_dtype; /* 0: E4M3 */
    int recompute;
    int delay;
    unsigned frozen;        /* bit 0: the first weight, bit 1: the second */
    int has_residual;       /* and its sum */
    int has_normed;         /* an output of its own */
    int has_no_dx;          /* nor gradients of gamma and beta */
    tn_plane_policy policy; /* of the weights */
    int has_no_values;      /* the device computes nothing */
    int has_scales;         /* delayed scaling of x and dy, of FP8_TENSOR weights */
} test_layer_config;

typedef union test_layer_saved {
    tn_linear_saved linear;
    tn_norm_linear_saved norm_linear;
    tn_norm_mlp_saved mlp;
} test_layer_saved;

typedef struct test_layer {
    test_layer_config config;
    test_ops ops;
    tn_scope model, io, saved_scope, op;
    tn_tensor x, residual, sum, normed, y, dy, dx, added;
    tn_tensor gamma, beta, dgamma, dbeta;
    tn_tensor weight[2], bias[2], source[2], dweight[2], dbias[2];
    tn_tensor master[2], first[2], second[2], step; /* of test_layer_update */
    tn_tensor scale, history;                       /* of delayed scaling: see test_layer_slot */
    test_layer_saved saved;
    tn_delayed_gradient delayed[2];
} test_layer;

/* All inputs have values, weights their ROW planes; gradients hold zeros, other outputs nothing. */
test_layer test_layer_open(const test_ops *ops, const test_layer_config *config);

int test_layer_products(const test_layer *layer);
/* Rows and columns of a weight. */
void test_layer_shape(const test_layer_config *config, int product, int64_t *rows, int64_t *cols);

/* Of delayed scaling: of each product's x and dy. */
enum { LAYER_SLOTS = 4, LAYER_HISTORY = 3 };
int test_layer_slot(int product, int is_gradient);
int test_layer_is_delayed(const test_layer_config *config, int product);

/* The arguments as the configuration says; gradients are added to. */
tn_linear_forward_args test_linear_forward_args(const test_layer *layer);
tn_linear_backward_args test_linear_backward_args(const test_layer *layer);
tn_norm_linear_forward_args test_norm_linear_forward_args(const test_layer *layer);
tn_norm_linear_backward_args test_norm_linear_backward_args(const test_layer *layer);
tn_norm_mlp_forward_args test_norm_mlp_forward_args(const test_layer *layer);
tn_norm_mlp_backward_args test_norm_mlp_backward_args(const test_layer *layer);

tn_status test_layer_forward(test_layer *layer, tn_stream stream);
tn_status test_layer_backward(test_layer *layer, tn_stream stream);
tn_status test_layer_weight_gradients(test_layer *layer, tn_stream stream);

/* Masters and moments, and a step of AdamW that writes each weight that is not frozen. */
void test_layer_open_optimizer(test_layer *layer);
void test_layer_update(test_layer *layer);

/* Bytes that forward saves, and that backward leaves for delayed gradients. */
size_t test_layer_saved_bytes(const test_layer_config *config);
size_t test_layer_delayed_bytes(const test_layer_config *config);

/* A step of each configuration there is, with exactly that alive in every scope after each call;
 * how many configurations. `show`: prints the list of each. */
int test_layer_bytes(const test_ops *ops, int has_no_values, int show);

#endif
