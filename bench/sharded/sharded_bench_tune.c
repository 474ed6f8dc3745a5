/* The products of the stack, tuned one by one on operands of their own: see sharded_bench.h. */
#include "sharded_bench.h"
#include "tenure_gemm.h"

/* Of y = x w^T, and back. */
typedef struct operands {
    tn_tensor x, w, dy; /* as they are multiplied */
    tn_tensor y, dx, dw;
} operands;

static tn_status make_operand(const sharded_place *place, tn_scope scope, tn_format format,
                              int64_t rows, int64_t cols, tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_quantize_args quantize = TN_QUANTIZE_ARGS_INIT;
    tn_tensor plain = {0};
    SHARDED_TRY(sharded_make_random(place, scope, rows, cols, 1.0f, (uint64_t)cols, &plain));
    if (format == TN_FORMAT_PLAIN) {
        *out = plain;
        return TN_OK;
    }
    config.format = format, config.dtype = TN_E4M3;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    SHARDED_TRY(tn_tensor_create(scope, &config, out));
    quantize.src = plain, quantize.dst = *out;
    quantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    SHARDED_TRY(tn_quantize(&quantize, place->stream));
    return tn_tensor_destroy(plain, place->stream);
}

static tn_status make_operands(const sharded_place *place, tn_scope scope,
                               const sharded_shape *shape, sharded_part part, operands *out) {
    const int64_t n = sharded_part_rows(shape, part), k = sharded_part_cols(shape, part);
    const int64_t m = shape->tokens;
    const tn_format values = shape->is_fp8 ? TN_FORMAT_FP8_BLOCK_1D : TN_FORMAT_PLAIN;
    const tn_format weight = shape->is_fp8 ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_PLAIN;
    SHARDED_TRY(make_operand(place, scope, values, m, k, &out->x));
    SHARDED_TRY(make_operand(place, scope, weight, n, k, &out->w));
    SHARDED_TRY(make_operand(place, scope, values, m, n, &out->dy));
    SHARDED_TRY(sharded_make(scope, TN_BF16, m, n, "y", &out->y));
    SHARDED_TRY(sharded_make(scope, TN_BF16, m, k, "dx", &out->dx));
    return sharded_make(scope, shape->gradient_dtype, n, k, "dw", &out->dw);
}

static tn_status tune_product(const sharded_place *place, tn_scope scope, tn_gemm_form form,
                              tn_tensor a, tn_tensor b, tn_tensor d) {
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.form = form;
    args.a = a, args.b = b, args.d = d;
    args.scope = scope;
    return tn_gemm_tune(&args, place->stream);
}

static tn_status tune_part(const sharded_place *place, tn_scope scope, const sharded_shape *shape,
                           sharded_part part) {
    operands of;
    SHARDED_TRY(make_operands(place, scope, shape, part, &of));
    SHARDED_TRY(tune_product(place, scope, TN_GEMM_FPROP, of.x, of.w, of.y));
    SHARDED_TRY(tune_product(place, scope, TN_GEMM_DGRAD, of.dy, of.w, of.dx));
    return tune_product(place, scope, TN_GEMM_WGRAD, of.dy, of.x, of.dw);
}

tn_status sharded_tune(const sharded_place *place, const sharded_shape *shape) {
    static const sharded_part products[] = {SHARDED_QKV, SHARDED_PROJECTION, SHARDED_UP,
                                            SHARDED_DOWN};
    tn_status status = TN_OK;
    for (int i = 0; i < 4 && status == TN_OK; i++) {
        tn_scope_config config = TN_SCOPE_CONFIG_INIT;
        tn_scope scope = {0};
        config.pool = place->pool;
        config.kind = TN_SCOPE_STEP;
        SHARDED_TRY(tn_scope_create(&config, &scope));
        status = tune_part(place, scope, shape, products[i]);
        const tn_status closed = tn_scope_close(scope);
        if (status == TN_OK) status = closed;
    }
    return status;
}
