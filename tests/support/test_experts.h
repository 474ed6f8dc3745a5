/* A small mixture of experts on any driver: its tensors, and the calls on them, for tests.
 *
 * One expert has no rows, one a whole tile of 128, the others odd numbers; most begin at no
 * multiple of 16 bytes. There are rows behind the last one.
 */
#ifndef TENURE_TEST_EXPERTS_H
#define TENURE_TEST_EXPERTS_H

#include "tenure_experts.h"
#include "test_ops.h"

enum { EXPERTS = 5, EXPERTS_ROWS = 151, EXPERTS_SPARE = 3, EXPERTS_N = 40, EXPERTS_K = 72 };
extern const int64_t test_experts_offsets[EXPERTS + 1];

typedef struct test_experts_config {
    tn_format format; /* FP8_BLOCK_2D, FP8_TENSOR or PLAIN */
    tn_dtype dtype;   /* PLAIN: of the weights, x and dy; FP8: of x and dy */
    tn_scale_mode mode;
    unsigned frozen;        /* a bit for each expert */
    tn_plane_policy policy; /* of the weights */
    int has_scales;         /* FP8_TENSOR: delayed scaling, x in the first slots, dy behind them */
} test_experts_config;

typedef struct test_experts {
    test_experts_config config;
    tn_scope op, saved;
    tn_tensor x, y, dy, dx;
    tn_tensor weights[EXPERTS], biases[EXPERTS], dweights[EXPERTS], dbiases[EXPERTS];
    tn_experts experts;
    tn_tensor scale, history; /* of delayed scaling */
} test_experts;

enum { EXPERTS_HISTORY = 2, EXPERTS_SLOTS = 2 * EXPERTS };

/* Outputs have no planes yet. */
test_experts test_experts_open(const test_ops *ops, const test_experts_config *config);

/* With biases; saving if saved_scope is to be given. */
tn_grouped_linear_forward_args test_experts_forward(const test_experts *t, int saves);
/* With dx, dbiases and the dweights of experts that are not frozen, none of which may be changed in
 * place: they are t's. */
tn_grouped_linear_backward_args test_experts_backward(const test_experts *t);

/* Element i of a tensor's contents: eighths from -2 to 2, so that fp32 adds thousands of products
 * without a rounding. */
float test_experts_value(uint32_t seed, int64_t i);
void test_experts_fill(const test_ops *ops, tn_tensor tensor, uint32_t seed);

/* What a grouped plane of all rows takes that x and dy become beside weights of that format: `cols`
 * bytes a row, and the scales. */
size_t test_experts_plane_bytes(tn_format weight, tn_plane plane, int64_t cols);
/* And COL of one weight. */
size_t test_experts_weight_bytes(void);

/* Forward and backward in each way, with exactly the bytes of the closed form alive in every scope
 * after each call, and of COL at its peak; the same on every driver. */
void test_experts_bytes(const test_ops *ops);

#endif
