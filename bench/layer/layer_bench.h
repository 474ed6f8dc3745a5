/* What tenure-bench-layer measures: the products of a transformer layer, forward and backward, in
 * block-scaled FP8 and in bf16, and what each of their steps takes and would take at its limit.
 *
 * A *side* is one way to do the work: a list of steps, each one call of a public op, in the order
 * in which the layers of ops/ make them. Sides come in pairs, FP8 and bf16, that take turns: what
 * happens to the chip's clock happens to both. The tensors live as long as the program, so that a
 * step can be repeated alone. The layers themselves are timed as a whole: what a backward reads its
 * forward must have saved before.
 */
#ifndef TENURE_LAYER_BENCH_H
#define TENURE_LAYER_BENCH_H

#include "gpu_bench.h"
#include "tenure_cast.h"
#include "tenure_gemm.h"
#include "tenure_layers.h"
#include "tenure_train.h"

enum {
    LAYER_STEPS_MAX = 40,
    LAYER_ROUNDS_MAX = 99,
    LAYER_TURNS = 4 /* of a side behind one gate: their launches fit the driver's queue */
};

typedef enum layer_pair {
    LAYER_PRODUCTS = 0, /* the four products with their casts: values come unquantized */
    LAYER_WHOLE,        /* with norms and GELU, which quantize what they make */
    LAYER_PAIRS
} layer_pair;

typedef enum layer_kind {
    LAYER_CAST = 0,
    LAYER_NORM,
    LAYER_ACTIVATION,
    LAYER_FPROP,
    LAYER_DGRAD,
    LAYER_WGRAD,
    LAYER_KINDS
} layer_kind;

/* What a step calls. */
typedef union layer_arguments {
    tn_quantize_args quantize;
    tn_transpose_args transpose;
    tn_gemm_args gemm;
    tn_norm_args norm;
    tn_norm_backward_args norm_backward;
    tn_activation_args activation;
    tn_activation_backward_args activation_backward;
} layer_arguments;

typedef struct layer_step {
    char name[40];
    layer_kind kind;
    gpu_bench_work work;
    layer_arguments arguments;
    double bytes;   /* that must move; 0 for products */
    double flop;    /* of products */
    double seconds; /* alone, again and again */
    double limit;   /* seconds: bytes at the copy's rate, or the best algorithm's time alone */
} layer_step;

typedef struct layer_side {
    const char *name;
    int is_fp8;
    layer_step steps[LAYER_STEPS_MAX];
    int count;
    double rounds[LAYER_ROUNDS_MAX]; /* seconds of the whole, one round each */
    double seconds;                  /* their median */
    double host_seconds;             /* to put the whole on the stream */
} layer_side;

/* The same work as LAYER_WHOLE through the layers of ops/: three calls forward, three backward. */
typedef struct layer_calls {
    tn_norm_linear_forward_args qkv;
    tn_linear_forward_args proj;
    tn_norm_mlp_forward_args mlp;
    tn_norm_mlp_backward_args mlp_backward;
    tn_linear_backward_args proj_backward;
    tn_norm_linear_backward_args qkv_backward;
    double rounds[LAYER_ROUNDS_MAX]; /* as of a side */
    double seconds, host_seconds;
} layer_calls;

typedef struct layer_shape {
    int64_t tokens, hidden, ffn;
    tn_dtype main_gradient; /* what weight gradients are added to: fp32 or bf16 */
} layer_shape;

enum { LAYER_FP8 = 0, LAYER_BF16, LAYER_SIDES };

/* Through the layers there is a third: FP8 whose weights' other planes are derived on a stream
 * beside the products before them. */
enum { LAYER_FP8_BESIDE = LAYER_SIDES, LAYER_CALLS };

typedef struct layer_report {
    layer_shape shape;
    layer_side sides[LAYER_PAIRS][LAYER_SIDES];
    double ratio[LAYER_PAIRS]; /* median over the rounds of bf16's time / FP8's */
    layer_calls calls[LAYER_CALLS];
    double calls_ratio;
    tn_stream side;   /* of LAYER_FP8_BESIDE */
    double copy_rate; /* bytes read and written in a second */
    int rounds;
} layer_report;

/* Makes all tensors in the bench's scope, and the steps. */
void layer_sides_make(gpu_bench *bench, layer_report *report);

/* Puts one layer's calls, `argument`, on the stream. */
void layer_calls_run(gpu_bench *bench, void *argument, int turn);

/* Fills in all that is measured. */
void layer_measure(gpu_bench *bench, layer_report *report);

/* 1 on success. */
int layer_report_print(const layer_report *report, const char *device, FILE *stream);
int layer_report_print_json(const layer_report *report, const char *device, FILE *stream);

#endif
