/* Epilogues of tn_gemm: passes over the product, or over dy, that follow it on the stream.
 *
 * They are the passes of tn_activation_forward, tn_activation_backward and tn_bias_gradient, so
 * that a product with an epilogue has the bits of the two calls. cuBLASLt's own epilogues give
 * other ones, which differ from one algorithm to the next.
 *
 *     GELU           product -> pre, or scratch          pass: that -> d
 *     GELU_GRADIENT  product -> scratch (dy)             pass: pre, dy -> d, and the sums of d
 *     NONE, dbias    product -> d                        pass: a -> its sums
 */
#include "op_gemm.h"

static int is_wanted(tn_tensor tensor) { return !tn__is_no_tensor(tensor); }

/* ---- checks --------------------------------------------------------------------------------- */

static tn_status check_pre(tn__op_call *call, const tn_gemm_args *args, tn__gemm_tensors *t) {
    if (!is_wanted(args->pre)) {
        TN_REQUIRE(args->epilogue == TN_GEMM_EPILOGUE_GELU,
                   "%s: pre is {0}: the gradient of GELU reads it", call->name);
        return TN_OK;
    }
    TN_TRY(tn__op_tensor(call, "pre", args->pre, &t->pre));
    TN_TRY(tn__op_require_float(call, "pre", &t->pre));
    TN_TRY(tn__op_require_dtype(call, "pre", &t->pre, t->d.dtype));
    return tn__op_require_shape(call, "pre", &t->pre, t->d.rows, t->d.cols, "d's shape");
}

static tn_status check_gelu(tn__op_call *call, const tn_gemm_args *args, tn__gemm_tensors *t) {
    const int is_gradient = args->epilogue == TN_GEMM_EPILOGUE_GELU_GRADIENT;
    TN_REQUIRE(!args->accumulate, "%s: accumulate is set, and an epilogue does not add to d",
               call->name);
    TN_REQUIRE(!is_gradient || !is_wanted(args->bias),
               "%s: a bias is given, and the gradient of GELU has none", call->name);
    TN_REQUIRE(is_gradient || !is_wanted(args->dbias),
               "%s: dbias is given, and a product with GELU has no gradient of a bias", call->name);
    TN_TRY(check_pre(call, args, t));
    return tn__op_check_column_sums(call, "dbias", args->dbias, t->d.cols, &t->dbias);
}

static tn_status check_dbias(tn__op_call *call, const tn_gemm_args *args, tn__gemm_tensors *t) {
    TN_REQUIRE(!is_wanted(args->pre), "%s: pre is given, and there is no epilogue", call->name);
    if (!is_wanted(args->dbias)) return TN_OK;
    TN_REQUIRE(args->form != TN_GEMM_FPROP,
               "%s: dbias is given: it goes with DGRAD, WGRAD or the gradient of GELU", call->name);
    if (t->a.format != TN_FORMAT_PLAIN)
        return TN_FAIL(TN_UNSUPPORTED,
                       "%s: dbias is given and a (tensor %s) is %s: it is summed up of what a was "
                       "made of, by tn_bias_gradient as it is cast",
                       call->name, t->a.name, tn_format_name(t->a.format));
    return tn__op_check_column_sums(call, "dbias", args->dbias, t->a.cols, &t->dbias);
}

tn_status tn__gemm_check_epilogue(tn__op_call *call, const tn_gemm_args *args,
                                  tn__gemm_tensors *t) {
    TN_REQUIRE((unsigned)args->epilogue < TN_GEMM_EPILOGUE_COUNT,
               "%s: epilogue is %d, expected one of the %d of tn_gemm_epilogue", call->name,
               (int)args->epilogue, TN_GEMM_EPILOGUE_COUNT);
    TN_REQUIRE(is_wanted(args->dbias) || !args->accumulate_dbias,
               "%s: accumulate_dbias is set, and dbias is {0}", call->name);
    if (args->epilogue == TN_GEMM_EPILOGUE_NONE) return check_dbias(call, args, t);
    return check_gelu(call, args, t);
}

/* ---- leases --------------------------------------------------------------------------------- */

/* A matrix of d's shape that lives as long as the call. */
static tn_status lease_aside(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                             tn__matrix *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor aside;
    config.dtype = t->d.dtype;
    config.rank = 2;
    config.shape[0] = t->d.rows, config.shape[1] = t->d.cols;
    config.name = "product";
    TN_TRY(tn__op_scratch(call, args->scope, &config, &aside));
    return tn__op_lease_matrix(call, aside, &t->d, TN_WRITE, out);
}

/* Where the pass writes, and that it makes nothing but values. */
static void make_values(tn__produce_work *made, tn__matrix values) {
    made->cast =
        (tn__quantize_work){.src = values, .format = TN_FORMAT_FP8_BLOCK_1D, .dtype = TN_E4M3};
}

static tn_status lease_sums(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                            tn__gemm_pass *pass) {
    TN_TRY(tn__op_lease_column_sums(call, "dbias", args->dbias, &t->dbias,
                                    args->accumulate_dbias != 0, NULL, &pass->sums));
    return tn__op_tile_sums(call, args->scope, pass->made.x.rows, &pass->sums);
}

static tn_status lease_gelu(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                            tn__gemm_work *work, tn__gemm_pass *pass) {
    tn__matrix values;
    if (is_wanted(args->pre))
        TN_TRY(tn__op_lease_matrix(call, args->pre, &t->pre, TN_WRITE, &work->d));
    else
        TN_TRY(lease_aside(call, args, t, &work->d));
    TN_TRY(tn__op_lease_matrix(call, args->d, &t->d, TN_WRITE, &values));
    pass->made.producer = TN__PRODUCE_ACTIVATION;
    pass->made.x = work->d;
    make_values(&pass->made, values);
    return TN_OK;
}

static tn_status lease_gelu_gradient(tn__op_call *call, const tn_gemm_args *args,
                                     const tn__gemm_tensors *t, tn__gemm_work *work,
                                     tn__gemm_pass *pass) {
    tn__matrix values;
    TN_TRY(tn__op_lease_matrix(call, args->pre, &t->pre, TN_READ, &pass->made.x));
    TN_TRY(lease_aside(call, args, t, &work->d));
    TN_TRY(tn__op_lease_matrix(call, args->d, &t->d, TN_WRITE, &values));
    pass->made.producer = TN__PRODUCE_GRADIENT;
    pass->made.dy = work->d.data;
    make_values(&pass->made, values);
    return lease_sums(call, args, t, pass);
}

static tn_status lease_plain(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                             tn__gemm_work *work, tn__gemm_pass *pass) {
    const tn_access access = args->accumulate ? TN_UPDATE : TN_WRITE;
    TN_TRY(tn__op_lease_matrix(call, args->d, &t->d, access, &work->d));
    pass->is_wanted = is_wanted(args->dbias);
    if (!pass->is_wanted) return TN_OK;
    pass->made.producer = TN__PRODUCE_ACTIVATION;
    pass->made.curve = (tn__curve){.kind = TN__CURVE_IDENTITY};
    pass->made.x = (tn__matrix){t->a.dtype, (void *)work->a.data, t->a.rows, t->a.cols};
    make_values(&pass->made, (tn__matrix){t->a.dtype, NULL, t->a.rows, t->a.cols});
    return lease_sums(call, args, t, pass);
}

tn_status tn__gemm_lease_outputs(tn__op_call *call, const tn_gemm_args *args,
                                 const tn__gemm_tensors *t, tn__gemm_work *work,
                                 tn__gemm_pass *pass) {
    *pass = (tn__gemm_pass){.is_wanted = 1, .sums = {.accumulate = 0}};
    TN_TRY(tn__op_activation_curve(call, TN_ACTIVATION_GELU, &pass->made.curve));
    switch (args->epilogue) {
    case TN_GEMM_EPILOGUE_GELU: return lease_gelu(call, args, t, work, pass);
    case TN_GEMM_EPILOGUE_GELU_GRADIENT: return lease_gelu_gradient(call, args, t, work, pass);
    default: return lease_plain(call, args, t, work, pass);
    }
}

/* ---- the pass ------------------------------------------------------------------------------- */

tn_status tn__gemm_run_pass(tn__op_call *call, tn__gemm_pass *pass) {
    const tn__matrix *x = &pass->made.x;
    if (!pass->is_wanted || x->cols == 0) return TN_OK;
    pass->made.tile_sums = pass->sums.tile_sums;
    if (x->rows > 0) TN_TRY(TN__OP_RUN(call, produce, &pass->made));
    return tn__op_add_up_tiles(call, x->rows, NULL, &pass->sums);
}

size_t tn__gemm_pass_bytes(const tn_gemm_args *args, const tn__gemm_tensors *t) {
    const int is_gelu = args->epilogue == TN_GEMM_EPILOGUE_GELU;
    const tn_tensor_info *summed = args->epilogue == TN_GEMM_EPILOGUE_NONE ? &t->a : &t->d;
    size_t bytes = 0;
    if (args->epilogue != TN_GEMM_EPILOGUE_NONE && !(is_gelu && is_wanted(args->pre)))
        bytes += (size_t)t->d.rows * (size_t)t->d.cols * tn_dtype_bytes(t->d.dtype);
    if (is_wanted(args->dbias))
        bytes += (size_t)((summed->rows + 127) / 128) * (size_t)summed->cols * sizeof(float);
    return bytes;
}
