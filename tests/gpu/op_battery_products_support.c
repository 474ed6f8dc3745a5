/* The battery's products of groups. Those of FP8 and PLAIN operands come from cuBLASLt, near the
 * host's definition and not the same: each run is held to another one, and so are replays. How near
 * they are: test_gemm_grouped_lists.c. */
#include "op_battery_support.h"
#include "tenure_grouped.h"

enum { GROUPS = 6, OUT_COLS = 40, PRODUCT_WAYS = 3 * 2 * 3 * 2 };

static tn_gemm_form form_of(const battery_case *c) { return (tn_gemm_form)(c->way % 3); }
static int is_wgrad(const battery_case *c) { return form_of(c) == TN_GEMM_WGRAD; }
static int is_plain(const battery_case *c) { return c->way / 3 % 2; }
static int accumulates(const battery_case *c) { return c->way / 18 % 2; }

/* With something to contract. */
static int has_bias(const battery_case *c) {
    return form_of(c) == TN_GEMM_FPROP && c->cols > 0 && c->seed % 2;
}

/* One group has nothing, and the last rows are in none. */
static void find_offsets(const battery_case *c, int64_t offsets[GROUPS + 1]) {
    int64_t left = c->rows - c->rows / 20;
    offsets[0] = 0;
    for (int g = 0; g < GROUPS; g++) {
        int64_t rows = g == 2            ? 0
                       : g == GROUPS - 1 ? left
                                         : left * (1 + (int64_t)(c->seed % 3)) / 5;
        offsets[g + 1] = offsets[g] + rows;
        left -= rows;
    }
}

/* Two inputs, data and scale: a grouped plane of the rows, or a matrix of them and nothing. */
static void keep_operand(gpu_side *side, const battery_case *c, battery_operands *operands,
                         int64_t cols, uint64_t salt) {
    const tn_plane plane = is_wgrad(c) ? TN_PLANE_COL : TN_PLANE_ROW;
    const uint32_t no_error = 0;
    int64_t offsets[GROUPS + 1], floats = 0;
    tn_grouped_quantize_args args = TN_GROUPED_QUANTIZE_ARGS_INIT;
    tn_grouped_plane made;
    args.src = battery_input(side, c, operands, TN_BF16, c->rows, cols, salt);
    if (is_plain(c)) {
        battery_keep(operands, (tn_tensor){0});
        return;
    }
    operands->in_count--; /* the planes take its place */
    find_offsets(c, offsets);
    EXPECT_OK(
        tn_grouped_scale_floats(TN_FORMAT_FP8_BLOCK_1D, plane, GROUPS, c->rows, cols, &floats));
    made.data = gpu_plain(side, TN_BYTE, c->rows, cols);
    made.scale = gpu_plain(side, TN_FP32, 1, floats);
    args.offsets = gpu_plain(side, TN_BYTE, 1, sizeof offsets);
    args.error = gpu_plain(side, TN_BYTE, 1, sizeof no_error);
    gpu_upload(side, args.offsets, offsets), gpu_upload(side, args.error, &no_error);
    *(is_wgrad(c) ? &args.col : &args.row) = made;
    args.scope = side->scope;
    EXPECT_OK(tn_grouped_quantize(&args, side->stream));
    gpu_destroy(side, args.src), gpu_destroy(side, args.offsets), gpu_destroy(side, args.error);
    battery_keep(operands, made.data), battery_keep(operands, made.scale);
}

/* One for all groups. */
static void keep_weight(gpu_side *side, const battery_case *c, battery_operands *operands) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = battery_input(side, c, operands, TN_BF16, OUT_COLS, c->cols, 3);
    if (is_plain(c)) return;
    operands->in_count--;
    args.dst = gpu_fp8(side, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_SCALE_POW2, OUT_COLS, c->cols);
    args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    EXPECT_OK(tn_quantize(&args, side->stream));
    gpu_destroy(side, args.src);
    battery_keep(operands, args.dst);
}

enum { A = 0, B = 2, WEIGHT = 4, BIAS }; /* places of inputs */

static void prepare_products(gpu_side *side, const battery_case *c, battery_operands *operands) {
    const tn_dtype type = battery_floats[c->way / 6 % 3];
    const int64_t rows = is_wgrad(c) ? OUT_COLS : c->rows;
    const int64_t cols = form_of(c) == TN_GEMM_FPROP ? OUT_COLS : c->cols;
    keep_operand(side, c, operands, form_of(c) == TN_GEMM_FPROP ? c->cols : OUT_COLS, 1);
    keep_operand(side, c, operands, c->cols, 2);
    keep_weight(side, c, operands);
    (void)battery_input(side, c, operands, TN_FP32, 1, OUT_COLS, 4);
    tn_tensor before = battery_input(side, c, operands, type, rows, cols, 5);
    for (int g = 0; g < (is_wgrad(c) ? GROUPS : 1); g++) {
        tn_tensor d = gpu_plain(side, type, rows, cols);
        if (accumulates(c))
            battery_updated_add(operands, "sums", d, before);
        else
            battery_output_add(operands, "products", d, TN_PLANE_DATA);
    }
}

static tn_status launch_products(gpu_side *side, const battery_case *c,
                                 const battery_operands *operands) {
    tn_grouped_gemm_args args = TN_GROUPED_GEMM_ARGS_INIT;
    tn_tensor weights[GROUPS], biases[GROUPS] = {{0}}, d[GROUPS];
    int64_t offsets[GROUPS + 1];
    find_offsets(c, offsets);
    for (int g = 0; g < GROUPS; g++) {
        weights[g] = operands->in[WEIGHT];
        if (g % 2) biases[g] = operands->in[BIAS];
        d[g] = operands->out[is_wgrad(c) ? g : 0].tensor;
    }
    args.form = form_of(c), args.groups = GROUPS, args.offsets = offsets;
    args.n = OUT_COLS, args.k = c->cols;
    args.a = (tn_grouped_plane){operands->in[A], operands->in[A + 1]};
    if (is_wgrad(c)) args.b = (tn_grouped_plane){operands->in[B], operands->in[B + 1]};
    if (!is_wgrad(c)) args.weights = weights;
    if (has_bias(c)) args.biases = biases;
    args.d = d, args.accumulate = accumulates(c), args.scope = side->scope;
    return tn_grouped_gemm(&args, side->stream);
}

static const char name[] = "grouped gemm";

void battery_look_for_products(gpu_side *device) {
    const float one = 1.0f;
    tn_gemm_args args = TN_GEMM_ARGS_INIT;
    args.a = args.b = gpu_plain(device, TN_FP32, 1, 1);
    args.d = gpu_plain(device, TN_FP32, 1, 1), args.scope = device->scope;
    gpu_upload(device, args.a, &one);
    tn_status status = tn_gemm(&args, device->stream);
    if (status == TN_UNSUPPORTED)
        battery_leave_out(name);
    else
        EXPECT_OK(status);
    gpu_destroy(device, args.a), gpu_destroy(device, args.d);
}

static const battery_op products[] = {
    {name, PRODUCT_WAYS, prepare_products, launch_products},
};

const battery_table battery_products = {products, sizeof products / sizeof *products, 1};
