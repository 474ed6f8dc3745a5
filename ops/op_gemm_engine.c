/* The engines of GEMMs: ways to multiply. One is a row of the table at the end.
 *
 *     reference         the host's definition (host_gemm.c)
 *     cublaslt          cuBLASLt on CUDA; on the simulated device a declaration of it
 *     wgmma             ours on Hopper, the same numbers: measured among cuBLASLt's algorithms
 *     dequantize-bf16   what is quantized becomes bf16 in scratch, then PLAIN; any format
 *     dequantize-fp32   the same in fp32
 *
 * Without a pin it is the first automatic row that the device has. The others give other numbers
 * than the formats' own GEMM, and take memory and time that nobody would expect: they must be
 * asked for, or allowed. Then one of them is taken where the formats have no GEMM of their own, or
 * where it was measured to be faster (op_gemm_dispatch.c).
 *
 * Layers and products of groups put their operands together by themselves: of a pin by the
 * environment they ask only whether it takes these.
 *
 * Another engine is another row: a name, where it exists, which operands it takes, what it leases
 * or makes of them, and its value of tn_gemm_engine. All else asks the table.
 */
#include "op_gemm.h"

#include "options.h"

/* ---- shapes and types ------------------------------------------------------------------------ */

static int is_quantized(const tn_tensor_info *info) { return info->format != TN_FORMAT_PLAIN; }

static tn_status check_shapes(const tn__op_call *call, tn_gemm_form form,
                              const tn__gemm_tensors *t) {
    const tn_tensor_info *a = &t->a, *b = &t->b, *d = &t->d;
    switch (form) {
    case TN_GEMM_FPROP:
        TN_TRY(tn__op_require_shape(call, "b", b, b->rows, a->cols, "its columns are a's"));
        return tn__op_require_shape(call, "d", d, a->rows, b->rows, "a's rows x b's rows");
    case TN_GEMM_DGRAD:
        TN_TRY(tn__op_require_shape(call, "b", b, a->cols, b->cols, "its rows are a's columns"));
        return tn__op_require_shape(call, "d", d, a->rows, b->cols, "a's rows x b's columns");
    default:
        TN_TRY(tn__op_require_shape(call, "b", b, a->rows, b->cols, "its rows are a's"));
        return tn__op_require_shape(call, "d", d, a->cols, b->cols, "a's columns x b's columns");
    }
}

/* ---- the formats' own GEMM ------------------------------------------------------------------- */

static int is_blocks(const tn_tensor_info *info) {
    return info->format == TN_FORMAT_FP8_BLOCK_1D || info->format == TN_FORMAT_FP8_BLOCK_2D;
}

static tn_status check_has_engine(const tn__op_call *call, const char *role,
                                  const tn_tensor_info *info) {
    if (is_blocks(info) || info->format == TN_FORMAT_FP8_TENSOR) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED,
                   "%s: no engine multiplies %s (tensor %s) as %s: pin one that dequantizes, as "
                   "TN_GEMM_ENGINE_DEQUANTIZE_BF16",
                   call->name, role, info->name, tn_format_name(info->format));
}

static tn_status check_formats(const tn__op_call *call, const tn__gemm_tensors *t) {
    const tn_tensor_info *a = &t->a, *b = &t->b;
    TN_REQUIRE(is_quantized(a) && is_quantized(b),
               "%s: a (tensor %s) is %s and b (tensor %s) is %s: both must be FP8, or both %s",
               call->name, a->name, tn_format_name(a->format), b->name, tn_format_name(b->format),
               tn_format_name(TN_FORMAT_PLAIN));
    TN_TRY(check_has_engine(call, "a", a));
    TN_TRY(check_has_engine(call, "b", b));
    TN_REQUIRE(is_blocks(a) == is_blocks(b),
               "%s: a (tensor %s) is %s and b (tensor %s) is %s: scales of blocks go together, and "
               "so does one scale for each tensor",
               call->name, a->name, tn_format_name(a->format), b->name, tn_format_name(b->format));
    if (a->format == TN_FORMAT_FP8_BLOCK_2D && b->format == TN_FORMAT_FP8_BLOCK_2D)
        return TN_FAIL(TN_UNSUPPORTED,
                       "%s: a (tensor %s) and b (tensor %s) are both %s: one must be %s",
                       call->name, a->name, b->name, tn_format_name(TN_FORMAT_FP8_BLOCK_2D),
                       tn_format_name(TN_FORMAT_FP8_BLOCK_1D));
    return TN_OK;
}

/* A format that has no GEMM on the device at all is told so before which ones go together. */
static tn_status check_own(const tn__op_call *call, tn_gemm_form form, tn__gemm_tensors *t) {
    if (!is_quantized(&t->a) && !is_quantized(&t->b)) {
        TN_TRY(tn__op_require_float(call, "a", &t->a));
        TN_TRY(tn__op_require_float(call, "b", &t->b));
        TN_TRY(tn__op_require_dtype(call, "b", &t->b, t->a.dtype));
        return tn__gemm_planes(call, form, t->a.format, t->b.format, &t->planes);
    }
    if (t->a.format == t->b.format)
        TN_TRY(tn__gemm_planes(call, form, t->a.format, t->b.format, &t->planes));
    TN_TRY(check_formats(call, t));
    if (t->a.dtype == TN_E5M2 && t->b.dtype == TN_E5M2) {
        return TN_FAIL(TN_UNSUPPORTED,
                       "%s: a (tensor %s) and b (tensor %s) are both E5M2: one must be E4M3",
                       call->name, t->a.name, t->b.name);
    }
    return tn__gemm_planes(call, form, t->a.format, t->b.format, &t->planes);
}

static tn_status lease_own(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                           tn__gemm_work *work) {
    tn_plane_view a, b;
    tn__matrix plain_a, plain_b;
    if (is_quantized(&t->a)) {
        TN_TRY(tn__op_lease_derived(call, args->a, t->planes.a, &a));
        TN_TRY(tn__op_lease_derived(call, args->b, t->planes.b, &b));
        work->a = tn__gemm_operand(t->a.format, &a);
        work->b = tn__gemm_operand(t->b.format, &b);
        return TN_OK;
    }
    TN_TRY(tn__op_lease_matrix(call, args->a, &t->a, TN_READ, &plain_a));
    TN_TRY(tn__op_lease_matrix(call, args->b, &t->b, TN_READ, &plain_b));
    work->a = tn__gemm_plain_operand(&plain_a, args->form == TN_GEMM_WGRAD);
    work->b = tn__gemm_plain_operand(&plain_b, args->form != TN_GEMM_FPROP);
    return TN_OK;
}

tn_status tn__gemm_outline(tn_tensor tensor, const tn_tensor_info *info, tn_plane plane,
                           tn__operand *out) {
    tn_plane_view view = {.dtype = info->dtype};
    TN_TRY(tn_plane_layout_get(tensor, plane, &view.layout));
    *out = tn__gemm_operand(info->format, &view);
    return TN_OK;
}

static void outline_plain(const tn_gemm_args *args, const tn__gemm_tensors *t, tn_dtype dtype,
                          tn__gemm_work *work) {
    const tn__matrix a = {dtype, NULL, t->a.rows, t->a.cols};
    const tn__matrix b = {dtype, NULL, t->b.rows, t->b.cols};
    work->a = tn__gemm_plain_operand(&a, args->form == TN_GEMM_WGRAD);
    work->b = tn__gemm_plain_operand(&b, args->form != TN_GEMM_FPROP);
}

static tn_status outline_own(const tn_gemm_args *args, const tn__gemm_tensors *t,
                             tn__gemm_work *work) {
    if (!is_quantized(&t->a)) {
        outline_plain(args, t, t->a.dtype, work);
        return TN_OK;
    }
    TN_TRY(tn__gemm_outline(args->a, &t->a, t->planes.a, &work->a));
    return tn__gemm_outline(args->b, &t->b, t->planes.b, &work->b);
}

static int is_host(const tn__op_call *call) { return call->ops == &tn__op_table_host; }

static int is_cuda(const tn__op_call *call) { return !is_host(call); }

/* ---- dequantizing ---------------------------------------------------------------------------- */

static int is_any(const tn__op_call *call) {
    (void)call;
    return 1;
}

/* The plane that is quantized along the contracted dimension. Where both planes are the same
 * values, the one that is there. */
static tn_status plane_of(const tn_tensor_info *info, tn_tensor tensor, int is_along_rows,
                          tn_plane *out) {
    tn_plane_state state;
    *out = is_along_rows ? TN_PLANE_COL : TN_PLANE_ROW;
    if (info->format == TN_FORMAT_PLAIN) *out = TN_PLANE_DATA;
    if (info->format != TN_FORMAT_FP8_BLOCK_2D && info->format != TN_FORMAT_FP8_TENSOR)
        return TN_OK;
    TN_TRY(tn_plane_state_get(tensor, TN_PLANE_ROW, &state));
    *out = state == TN_PLANE_VALID ? TN_PLANE_ROW : TN_PLANE_COL;
    return TN_OK;
}

static tn_status check_dequantize(const tn__op_call *call, const char *role,
                                  const tn_tensor_info *info, tn_dtype dtype) {
    if (is_quantized(info)) return TN_OK;
    TN_REQUIRE(info->dtype == dtype,
               "%s: %s (tensor %s) is %s of %s, and the other is dequantized to %s", call->name,
               role, info->name, tn_format_name(info->format), tn_dtype_name(info->dtype),
               tn_dtype_name(dtype));
    return TN_OK;
}

static tn_status check_bf16(const tn__op_call *call, tn_gemm_form form, tn__gemm_tensors *t) {
    (void)form;
    TN_TRY(check_dequantize(call, "a", &t->a, TN_BF16));
    return check_dequantize(call, "b", &t->b, TN_BF16);
}

static tn_status check_fp32(const tn__op_call *call, tn_gemm_form form, tn__gemm_tensors *t) {
    (void)form;
    TN_TRY(check_dequantize(call, "a", &t->a, TN_FP32));
    return check_dequantize(call, "b", &t->b, TN_FP32);
}

/* The tensor's values as a PLAIN matrix: its own, or a copy in scratch. */
static tn_status lease_dequantized(tn__op_call *call, tn_scope scope, tn_tensor tensor,
                                   const tn_tensor_info *info, int is_along_rows, tn_dtype dtype,
                                   tn__matrix *out) {
    tn__dequantize_work work = {.format = info->format};
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor_info copy_info;
    tn_tensor copy;
    tn_plane plane;
    if (!is_quantized(info)) return tn__op_lease_matrix(call, tensor, info, TN_READ, out);
    TN_TRY(plane_of(info, tensor, is_along_rows, &plane));
    config.dtype = dtype;
    config.rank = 2;
    config.shape[0] = info->rows, config.shape[1] = info->cols;
    config.name = "dequantized operand";
    TN_TRY(tn__op_scratch(call, scope, &config, &copy));
    TN_TRY(tn__op_tensor(call, config.name, copy, &copy_info));
    TN_TRY(tn__op_lease_derived(call, tensor, plane, &work.src));
    TN_TRY(tn__op_lease_matrix(call, copy, &copy_info, TN_WRITE, &work.dst));
    *out = work.dst;
    return tn__is_empty(info) ? TN_OK : call->ops->dequantize(call->device, &work, call->stream);
}

static tn_status lease_both(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                            tn_dtype dtype, tn__gemm_work *work) {
    int a_turned = args->form == TN_GEMM_WGRAD, b_turned = args->form != TN_GEMM_FPROP;
    tn__matrix a, b;
    TN_TRY(lease_dequantized(call, args->scope, args->a, &t->a, a_turned, dtype, &a));
    TN_TRY(lease_dequantized(call, args->scope, args->b, &t->b, b_turned, dtype, &b));
    work->a = tn__gemm_plain_operand(&a, a_turned);
    work->b = tn__gemm_plain_operand(&b, b_turned);
    return TN_OK;
}

static tn_status lease_bf16(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                            tn__gemm_work *work) {
    return lease_both(call, args, t, TN_BF16, work);
}

static tn_status lease_fp32(tn__op_call *call, const tn_gemm_args *args, const tn__gemm_tensors *t,
                            tn__gemm_work *work) {
    return lease_both(call, args, t, TN_FP32, work);
}

static tn_status outline_bf16(const tn_gemm_args *args, const tn__gemm_tensors *t,
                              tn__gemm_work *work) {
    outline_plain(args, t, TN_BF16, work);
    return TN_OK;
}

static tn_status outline_fp32(const tn_gemm_args *args, const tn__gemm_tensors *t,
                              tn__gemm_work *work) {
    outline_plain(args, t, TN_FP32, work);
    return TN_OK;
}

/* ---- our own --------------------------------------------------------------------------------- */

static tn_status check_wgmma(const tn__op_call *call, tn_gemm_form form, tn__gemm_tensors *t) {
    TN_TRY(check_own(call, form, t));
    if (t->a.format == TN_FORMAT_FP8_BLOCK_1D && is_blocks(&t->b)) return TN_OK;
    return TN_FAIL(
        TN_UNSUPPORTED,
        "%s: the engine wgmma is pinned: it multiplies %s by blocks, and a (tensor %s) is "
        "%s: leave the engine to be chosen",
        call->name, tn_format_name(TN_FORMAT_FP8_BLOCK_1D), t->a.name, tn_format_name(t->a.format));
}

/* ---- operands that are put together ---------------------------------------------------------- */

static int takes_own(const tn__gemm_work *work) {
    (void)work;
    return 1;
}

static int takes_wgmma(const tn__gemm_work *work) {
    return work->a.kind == TN__OPERAND_VECTOR &&
           (work->b.kind == TN__OPERAND_VECTOR || work->b.kind == TN__OPERAND_TILE);
}

/* What would be dequantized would want scratch of its own. */
static int takes_plain(const tn__gemm_work *work, tn_dtype dtype) {
    return work->a.kind == TN__OPERAND_PLAIN && work->a.dtype == dtype;
}

static int takes_bf16(const tn__gemm_work *work) { return takes_plain(work, TN_BF16); }

static int takes_fp32(const tn__gemm_work *work) { return takes_plain(work, TN_FP32); }

/* ---- the table ------------------------------------------------------------------------------- */

static const tn__gemm_engine engines[TN_GEMM_ENGINE_COUNT] = {
    [TN_GEMM_ENGINE_REFERENCE] = {.name = "reference",
                                  .where = "the host driver",
                                  .is_automatic = 1,
                                  .exists = is_host,
                                  .check = check_own,
                                  .takes = takes_own,
                                  .lease = lease_own,
                                  .outline = outline_own},
    [TN_GEMM_ENGINE_CUBLASLT] = {.name = "cublaslt",
                                 .where = "CUDA",
                                 .is_automatic = 1,
                                 .exists = is_cuda,
                                 .check = check_own,
                                 .takes = takes_own,
                                 .lease = lease_own,
                                 .outline = outline_own},
    [TN_GEMM_ENGINE_DEQUANTIZE_BF16] = {.name = "dequantize-bf16",
                                        .exists = is_any,
                                        .check = check_bf16,
                                        .takes = takes_bf16,
                                        .lease = lease_bf16,
                                        .outline = outline_bf16},
    [TN_GEMM_ENGINE_DEQUANTIZE_FP32] = {.name = "dequantize-fp32",
                                        .exists = is_any,
                                        .check = check_fp32,
                                        .takes = takes_fp32,
                                        .lease = lease_fp32,
                                        .outline = outline_fp32},
    [TN_GEMM_ENGINE_WGMMA] = {.name = "wgmma",
                              .where = "CUDA",
                              .is_among_own = 1,
                              .exists = is_cuda,
                              .check = check_wgmma,
                              .takes = takes_wgmma,
                              .lease = lease_own,
                              .outline = outline_own},
};

int tn__gemm_is_among_own(tn_gemm_engine engine) { return engines[engine].is_among_own; }

const char *tn_gemm_engine_name(tn_gemm_engine engine) {
    if (engine == TN_GEMM_ENGINE_AUTO) return "auto";
    if ((unsigned)engine >= TN_GEMM_ENGINE_COUNT) return "unknown engine";
    return engines[engine].name;
}

tn_gemm_engine tn__gemm_pinned(const tn_gemm_args *args) {
    return args->engine != TN_GEMM_ENGINE_AUTO ? args->engine
                                               : (tn_gemm_engine)tn__options_get()->gemm_engine;
}

static tn_status require_exists(const tn__op_call *call, tn_gemm_engine pinned) {
    if (engines[pinned].exists(call)) return TN_OK;
    return TN_FAIL(TN_UNSUPPORTED, "%s: the engine %s is pinned, but it is of %s only", call->name,
                   engines[pinned].name, engines[pinned].where);
}

tn_status tn__gemm_take_pin(const tn__op_call *call, tn__gemm_work *work) {
    const tn_gemm_engine pinned = (tn_gemm_engine)tn__options_get()->gemm_engine;
    if (work->engine != TN_GEMM_ENGINE_AUTO || pinned == TN_GEMM_ENGINE_AUTO) return TN_OK;
    TN_TRY(require_exists(call, pinned));
    if (!engines[pinned].takes(work))
        return TN_FAIL(TN_UNSUPPORTED,
                       "%s: TENURE_GEMM_ENGINE pins the engine %s, which does not take its product "
                       "of %s by %s: leave the engine to be chosen",
                       call->name, engines[pinned].name, tn_dtype_name(work->a.dtype),
                       tn_dtype_name(work->b.dtype));
    work->engine = pinned;
    return TN_OK;
}

static tn_status pick(const tn__op_call *call, tn_gemm_engine wanted, tn_gemm_engine *out) {
    TN_REQUIRE((unsigned)wanted < TN_GEMM_ENGINE_COUNT,
               "%s: engine is %d, expected one of the %d of tn_gemm_engine", call->name,
               (int)wanted, TN_GEMM_ENGINE_COUNT);
    if (wanted == TN_GEMM_ENGINE_AUTO) wanted = (tn_gemm_engine)tn__options_get()->gemm_engine;
    *out = wanted;
    if (wanted != TN_GEMM_ENGINE_AUTO) return require_exists(call, wanted);
    for (int i = TN_GEMM_ENGINE_AUTO + 1; i < TN_GEMM_ENGINE_COUNT; i++) {
        *out = (tn_gemm_engine)i;
        if (engines[i].is_automatic && engines[i].exists(call)) return TN_OK;
    }
    TN_CHECK(!"a device has a GEMM of its own");
    return TN_UNSUPPORTED;
}

static tn_status check_bias(tn__op_call *call, const tn_gemm_args *args, tn__gemm_tensors *t) {
    int64_t contracted = args->form == TN_GEMM_WGRAD ? t->a.rows : t->a.cols;
    if (tn__is_no_tensor(args->bias)) return TN_OK;
    TN_TRY(tn__op_require_vector(call, "bias", args->bias, t->d.cols, "one for each column of d",
                                 &t->bias));
    TN_REQUIRE(contracted > 0, "%s: a bias is given, but there is nothing to contract", call->name);
    return TN_OK;
}

/* Where the formats have no engine of their own, or that has nothing for the product, and another
 * will do: the first that takes them. */
static tn_status take_another(const tn__op_call *call, const tn_gemm_args *args,
                              tn__gemm_tensors *t, tn_status refused) {
    tn__saved_error refusal;
    if (refused != TN_UNSUPPORTED || !tn__gemm_may_differ(args)) return refused;
    tn__error_save(&refusal);
    for (int i = TN_GEMM_ENGINE_AUTO + 1; i < TN_GEMM_ENGINE_COUNT; i++) {
        if (engines[i].is_automatic || engines[i].is_among_own || !engines[i].exists(call))
            continue;
        if (engines[i].check(call, args->form, t) != TN_OK) continue;
        t->id = (tn_gemm_engine)i;
        t->engine = &engines[i];
        return TN_OK;
    }
    tn__error_restore(&refusal);
    return refused;
}

/* The engine that was measured to be faster than the formats' own; a pinned algorithm is one of the
 * formats' own, whose number says nothing of another's. */
static tn_status take_preferred(const tn__op_call *call, const tn_gemm_args *args,
                                tn__gemm_tensors *t) {
    const int64_t contracted = args->form == TN_GEMM_WGRAD ? t->a.rows : t->a.cols;
    tn__gemm_work work = {
        .accumulate = args->accumulate != 0, .contracted = contracted, .may_differ = 1};
    tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
    if (!tn__gemm_may_differ(args) || !t->engine->is_automatic) return TN_OK;
    if (args->algorithm != 0) return TN_OK;
    if (tn__is_empty(&t->d) || contracted == 0) return TN_OK;
    work.d = (tn__matrix){t->d.dtype, NULL, t->d.rows, t->d.cols};
    if (!tn__is_no_tensor(args->bias)) work.bias = (tn__matrix){t->bias.dtype, NULL, 1, t->d.cols};
    TN_TRY(t->engine->outline(args, t, &work));
    const tn_status status = call->ops->gemm_choice(call->device, &work, &choice);
    if (status != TN_OK) return take_another(call, args, t, status);
    if (choice.engine == TN_GEMM_ENGINE_AUTO || engines[choice.engine].is_among_own) return TN_OK;
    TN_TRY(engines[choice.engine].check(call, args->form, t));
    t->id = choice.engine;
    t->engine = &engines[choice.engine];
    return TN_OK;
}

int tn__gemm_may_differ(const tn_gemm_args *args) {
    return args->may_differ && args->engine == TN_GEMM_ENGINE_AUTO &&
           tn__options_get()->gemm_engine == TN_GEMM_ENGINE_AUTO;
}

tn_status tn__gemm_check(tn__op_call *call, const tn_gemm_args *args, tn__gemm_tensors *t) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_REQUIRE((unsigned)args->form <= TN_GEMM_WGRAD,
               "%s: form is %d, expected TN_GEMM_FPROP, TN_GEMM_DGRAD or TN_GEMM_WGRAD", call->name,
               (int)args->form);
    TN_TRY(tn__op_tensor(call, "a", args->a, &t->a));
    TN_TRY(tn__op_tensor(call, "b", args->b, &t->b));
    TN_TRY(tn__op_tensor(call, "d", args->d, &t->d));
    TN_TRY(tn__op_require_float(call, "d", &t->d));
    TN_TRY(pick(call, args->engine, &t->id));
    t->engine = &engines[t->id];
    if (!is_quantized(&t->a)) TN_TRY(tn__op_require_float(call, "a", &t->a));
    if (!is_quantized(&t->b)) TN_TRY(tn__op_require_float(call, "b", &t->b));
    TN_TRY(take_another(call, args, t, t->engine->check(call, args->form, t)));
    TN_TRY(check_shapes(call, args->form, t));
    TN_TRY(check_bias(call, args, t));
    TN_TRY(tn__gemm_check_epilogue(call, args, t));
    return take_preferred(call, args, t);
}
