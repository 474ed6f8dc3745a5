/* The kernels of a device: loading the embedded images, names, launches.
 *
 * The images are built from ops/cuda_*.cu and lie in this library as data
 * (cmake/cuda_kernels.cmake): machine code for sm_90a, and PTX that the driver compiles for any
 * other GPU from sm_80 on. There is no CUDA runtime in between, so a context that another library
 * made current is used as it is.
 */
#include "cuda_module.h"
#include "host_alloc.h"

#include <pthread.h>
#include <stdio.h>

extern const unsigned char tn__cuda_cast_image[];
extern const unsigned char tn__cuda_narrow_image[];
extern const unsigned char tn__cuda_small_image[];
extern const unsigned char tn__cuda_list_image[];
extern const unsigned char tn__cuda_mxfp8_image[];
extern const unsigned char tn__cuda_nvfp4_image[];
extern const unsigned char tn__cuda_rows_image[];
extern const unsigned char tn__cuda_shard_image[];
extern const unsigned char tn__cuda_tensor_image[];
extern const unsigned char tn__cuda_activation_image[];
extern const unsigned char tn__cuda_gate_image[];
extern const unsigned char tn__cuda_gradient_image[];
extern const unsigned char tn__cuda_gate_gradient_image[];
extern const unsigned char tn__cuda_norm_rows_image[];
extern const unsigned char tn__cuda_norm_tiles_image[];
extern const unsigned char tn__cuda_norm_bands_image[];
extern const unsigned char tn__cuda_requantize_image[];
extern const unsigned char tn__cuda_stochastic_image[];
extern const unsigned char tn__cuda_norm_gradient_image[];
extern const unsigned char tn__cuda_norm_gradient_rows_image[];
extern const unsigned char tn__cuda_norm_gradient_held_image[];
extern const unsigned char tn__cuda_norm_held_image[];
extern const unsigned char tn__cuda_train_image[];
extern const unsigned char tn__cuda_attention_image[];
extern const unsigned char tn__cuda_attention_gradient_image[];
extern const unsigned char tn__cuda_wgmma_image[];

enum {
    CAST_IMAGE = 0,
    NARROW_IMAGE,
    SMALL_IMAGE,
    LIST_IMAGE,
    ROWS_IMAGE,
    SHARD_IMAGE,
    TENSOR_IMAGE,
    MXFP8_IMAGE,
    NVFP4_IMAGE,
    ACTIVATION_IMAGE,
    GATE_IMAGE,
    GRADIENT_IMAGE,
    GATE_GRADIENT_IMAGE,
    NORM_ROWS_IMAGE,
    NORM_TILES_IMAGE,
    NORM_BANDS_IMAGE,
    REQUANTIZE_IMAGE,
    STOCHASTIC_IMAGE,
    NORM_GRADIENT_IMAGE,
    NORM_GRADIENT_ROWS_IMAGE,
    NORM_GRADIENT_HELD_IMAGE,
    NORM_HELD_IMAGE,
    TRAIN_IMAGE,
    ATTENTION_IMAGE,
    ATTENTION_GRADIENT_IMAGE,
    WGMMA_IMAGE,
    IMAGE_COUNT
};

static const unsigned char *const images[IMAGE_COUNT] = {
    [CAST_IMAGE] = tn__cuda_cast_image,
    [NARROW_IMAGE] = tn__cuda_narrow_image,
    [SMALL_IMAGE] = tn__cuda_small_image,
    [LIST_IMAGE] = tn__cuda_list_image,
    [ROWS_IMAGE] = tn__cuda_rows_image,
    [SHARD_IMAGE] = tn__cuda_shard_image,
    [TENSOR_IMAGE] = tn__cuda_tensor_image,
    [MXFP8_IMAGE] = tn__cuda_mxfp8_image,
    [NVFP4_IMAGE] = tn__cuda_nvfp4_image,
    [ACTIVATION_IMAGE] = tn__cuda_activation_image,
    [GATE_IMAGE] = tn__cuda_gate_image,
    [GRADIENT_IMAGE] = tn__cuda_gradient_image,
    [GATE_GRADIENT_IMAGE] = tn__cuda_gate_gradient_image,
    [NORM_ROWS_IMAGE] = tn__cuda_norm_rows_image,
    [NORM_TILES_IMAGE] = tn__cuda_norm_tiles_image,
    [NORM_BANDS_IMAGE] = tn__cuda_norm_bands_image,
    [REQUANTIZE_IMAGE] = tn__cuda_requantize_image,
    [STOCHASTIC_IMAGE] = tn__cuda_stochastic_image,
    [NORM_GRADIENT_IMAGE] = tn__cuda_norm_gradient_image,
    [NORM_GRADIENT_ROWS_IMAGE] = tn__cuda_norm_gradient_rows_image,
    [NORM_GRADIENT_HELD_IMAGE] = tn__cuda_norm_gradient_held_image,
    [NORM_HELD_IMAGE] = tn__cuda_norm_held_image,
    [TRAIN_IMAGE] = tn__cuda_train_image,
    [ATTENTION_IMAGE] = tn__cuda_attention_image,
    [ATTENTION_GRADIENT_IMAGE] = tn__cuda_attention_gradient_image,
    [WGMMA_IMAGE] = tn__cuda_wgmma_image,
};
_Static_assert((int)IMAGE_COUNT == (int)TN__CUDA_IMAGE_COUNT, "as the context has room for");

/* ---- kernels by name ---------------------------------------------------------------------- */

static const char *const float_names[] = {"fp32", "bf16", "fp16"};
static const char *const fp8_names[] = {"e4m3", "e5m2"};
static const char *const norm_names[] = {"rms", "layer"};
static const char *const plane_names[] = {"row", "col", "both", "stochastic"};

static int float_index(tn_dtype dtype) {
    TN_CHECK((int)dtype >= TN_FP32 && (int)dtype <= TN_FP16);
    return (int)dtype - TN_FP32;
}

static int fp8_index(tn_dtype dtype) {
    TN_CHECK(dtype == TN_E4M3 || dtype == TN_E5M2);
    return dtype == TN_E5M2;
}

static int planes_index(int has_row, int has_col) {
    TN_CHECK(has_row || has_col);
    return has_row && has_col ? 2 : has_col ? 1 : 0;
}

int tn__kernel_of_quantize(int family, int is_1d, int has_row, int has_col, tn_dtype src,
                           tn_dtype format) {
    int planes = planes_index(has_row, has_col);
    int index = ((!is_1d * 3 + planes) * 3 + float_index(src)) * 2 + fp8_index(format);
    return family + index;
}

int tn__kernel_of_dequantize(int is_col, tn_dtype format, tn_dtype dst) {
    return TN__KERNEL_DEQUANTIZE + (!!is_col * 2 + fp8_index(format)) * 3 + float_index(dst);
}

int tn__kernel_of_shard_amax(tn_dtype src) { return TN__KERNEL_SHARD_AMAX + float_index(src); }

int tn__kernel_of_shard_quantize(tn_dtype src, tn_dtype format) {
    return TN__KERNEL_SHARD_QUANTIZE + float_index(src) * 2 + fp8_index(format);
}

int tn__kernel_of_stochastic(int is_1d, tn_dtype src, tn_dtype format) {
    return TN__KERNEL_QUANTIZE_STOCHASTIC + (!is_1d * 3 + float_index(src)) * 2 + fp8_index(format);
}

/* NVFP4 has one type of elements, so that its index ends with the source. */
int tn__kernel_of_format(int family, const tn__quantize_work *work) {
    int planes = work->random ? 3 : planes_index(work->has_row, work->has_col);
    int index = planes * 3 + float_index(work->src.dtype);
    return family + (work->dtype == TN_E2M1 ? index : index * 2 + fp8_index(work->dtype));
}

int tn__kernel_of_format_back(int family, int is_col, tn_dtype format, tn_dtype dst) {
    int index = format == TN_E2M1 ? !!is_col : !!is_col * 2 + fp8_index(format);
    return family + index * 3 + float_index(dst);
}

int tn__kernel_of_amax(tn_dtype src) { return TN__KERNEL_AMAX + float_index(src); }

int tn__kernel_of_scale_finish(tn_dtype format) {
    return TN__KERNEL_SCALE_FINISH + fp8_index(format);
}

int tn__kernel_of_produce(int family, int is_1d, tn_dtype made, tn_dtype format) {
    if (family == TN__KERNEL_DIFFERENTIATE_PAIRS) return family + !is_1d * 2 + fp8_index(format);
    return family + (!is_1d * 3 + float_index(made)) * 2 + fp8_index(format);
}

const int64_t tn__norm_columns[TN__NORM_LENGTHS] = {2048, 4096, 8192, 16384};

const tn__norm_block tn__norm_block_of[TN__NORM_LENGTHS][2] = {
    {{128, 4}, {128, 4}}, {{128, 2}, {256, 2}}, {{128, 1}, {256, 2}}, {{256, 1}, {512, 1}}};

int tn__kernel_of_norm_rows(int length, int is_layer, tn_dtype x, tn_dtype format) {
    const int index = (length * 2 + !!is_layer) * 3 + float_index(x);
    return TN__KERNEL_NORM_ROWS + index * 2 + fp8_index(format);
}

int tn__kernel_of_norm_any_rows(tn_dtype x, tn_dtype format) {
    return TN__KERNEL_NORM_ANY_ROWS + float_index(x) * 2 + fp8_index(format);
}

/* As in cuda_norm_gradient_rows.cu. */
const tn__norm_gradient_rows tn__norm_gradient_rows_of[TN__NORM_GRADIENT_ROWS] = {
    {TN_FP32, 2048, 256, 3}, {TN_FP32, 4096, 512, 4}, {TN_BF16, 2048, 256, 6},
    {TN_BF16, 4096, 512, 8}, {TN_BF16, 8192, 512, 3}, {TN_FP16, 2048, 256, 6},
    {TN_FP16, 4096, 512, 8}, {TN_FP16, 8192, 512, 3},
};

int tn__norm_gradient_rows_index(int64_t cols, int is_layer, tn_dtype x) {
    for (int i = 0; i < TN__NORM_GRADIENT_ROWS; i++) {
        const tn__norm_gradient_rows *rows = &tn__norm_gradient_rows_of[i];
        if (rows->x == x && cols <= rows->columns) return !!is_layer * TN__NORM_GRADIENT_ROWS + i;
    }
    return -1;
}

int tn__kernel_of_norm_held(int family, int is_1d, tn_dtype x, tn_dtype format) {
    return family + (!is_1d * 2 + float_index(x) - 1) * 2 + fp8_index(format);
}

int tn__kernel_of_requantize(int is_1d, tn_dtype from, tn_dtype to) {
    return TN__KERNEL_REQUANTIZE + (!is_1d * 2 + fp8_index(from)) * 2 + fp8_index(to);
}

int tn__kernel_of_shift(tn_dtype format) { return TN__KERNEL_SHIFT + fp8_index(format); }

int tn__kernel_of_pair(int family, tn_dtype from, tn_dtype to) {
    return family + float_index(from) * 3 + float_index(to);
}

static void pair_name(const char *family, int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s_%s_%s", family, float_names[index / 3],
             float_names[index % 3]);
}

static void quantize_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "quantize_%s_%s_%s_%s", index / 18 ? "2d" : "1d",
             plane_names[index / 6 % 3], float_names[index / 2 % 3], fp8_names[index % 2]);
}

static void quantize_list_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "quantize_list_%s_%s_%s_%s", index / 18 ? "2d" : "1d",
             plane_names[index / 6 % 3], float_names[index / 2 % 3], fp8_names[index % 2]);
}

static void dequantize_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "dequantize_%s_%s_%s", plane_names[index / 6],
             fp8_names[index / 3 % 2], float_names[index % 3]);
}

static void finish_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    pair_name("finish", index, name);
}

static void convert_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    pair_name("convert", index, name);
}

static void axpy_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    pair_name("axpy", index, name);
}

static void cross_entropy_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    pair_name("cross_entropy", index, name);
}

static void produce_name(const char *family, int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s_%s_%s_%s", family, index / 6 ? "2d" : "1d",
             float_names[index / 2 % 3], fp8_names[index % 2]);
}

static void activate_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    produce_name("activate", index, name);
}

static void activate_gated_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    produce_name("activate_gated", index, name);
}

static void differentiate_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    produce_name("differentiate", index, name);
}

static void differentiate_gated_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    produce_name("differentiate_gated", index, name);
}

static void differentiate_pairs_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    produce_name("differentiate_pairs", index / 2 * 6 + 2 + index % 2, name);
}

static void norm_rows_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "norm_rows_%d_%s_%s_%s",
             (int)tn__norm_columns[index / 12], norm_names[index / 6 % 2],
             float_names[index / 2 % 3], fp8_names[index % 2]);
}

static void norm_tiles_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    produce_name("norm_tiles", index, name);
}

static void norm_bands_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    produce_name("norm_bands", index, name);
}

static void single_norm_begin_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    (void)index;
    snprintf(name, TN__KERNEL_NAME_BYTES, "norm_begin");
}

static void norm_any_rows_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "norm_any_rows_%s_%s", float_names[index / 2],
             fp8_names[index % 2]);
}

static void column_sums_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    (void)index;
    snprintf(name, TN__KERNEL_NAME_BYTES, "column_sums");
}

static void single_cast_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    static const char *const names[] = {"transpose_plane"};
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s", names[index]);
}

static void single_narrow_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    (void)index;
    snprintf(name, TN__KERNEL_NAME_BYTES, "transpose_plane_narrow");
}

static void single_small_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    static const char *const names[] = {"pad_bytes", "embed_rows"};
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s", names[index]);
}

static void single_list_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    static const char *const names[] = {"list_groups", "list_tensors"};
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s", names[index]);
}

static void combine_rows_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    pair_name("combine_rows", index, name);
}

static void single_rows_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    static const char *const names[] = {"pad_offsets", "pad_map", "gather_rows", "gather_scales"};
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s", names[index]);
}

static void shard_amax_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "shard_amax_%s", float_names[index]);
}

static void shard_quantize_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "shard_quantize_%s_%s", float_names[index / 2],
             fp8_names[index % 2]);
}

static void format_name(const char *format, int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "quantize_%s_%s_%s_%s", format, plane_names[index / 6],
             float_names[index / 2 % 3], fp8_names[index % 2]);
}

static void quantize_tensor_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    format_name("tensor", index, name);
}

static void quantize_mxfp8_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    format_name("mxfp8", index, name);
}

static void dequantize_mxfp8_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "dequantize_mxfp8_%s_%s_%s", plane_names[index / 6],
             fp8_names[index / 3 % 2], float_names[index % 3]);
}

static void quantize_nvfp4_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "quantize_nvfp4_%s_%s", plane_names[index / 3],
             float_names[index % 3]);
}

static void dequantize_nvfp4_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "dequantize_nvfp4_%s_%s", plane_names[index / 3],
             float_names[index % 3]);
}

static void amax_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "amax_%s", float_names[index]);
}

static void single_tensor_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    static const char *const names[] = {"amax_start", "scale_finish_e4m3", "scale_finish_e5m2",
                                        "scale_update"};
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s", names[index]);
}

static void single_nvfp4_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    static const char *const names[] = {"nvfp4_finish"};
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s", names[index]);
}

static void requantize_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "requantize_%s_%s_%s", index / 4 ? "2d" : "1d",
             fp8_names[index / 2 % 2], fp8_names[index % 2]);
}

static void quantize_stochastic_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "quantize_%s_stochastic_%s_%s", index / 6 ? "2d" : "1d",
             float_names[index / 2 % 3], fp8_names[index % 2]);
}

static void single_stochastic_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    (void)index;
    snprintf(name, TN__KERNEL_NAME_BYTES, "random_advance");
}

static void shift_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "shift_plane_%s", fp8_names[index]);
}

static void norm_gradient_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    produce_name("norm_gradient", index, name);
}

static void by_type_name(const char *family, int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s_%s", family, float_names[index]);
}

static void norm_gradient_means_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    by_type_name("norm_gradient_means", index, name);
}

static void norm_gradient_rows_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    const tn__norm_gradient_rows *rows = &tn__norm_gradient_rows_of[index % TN__NORM_GRADIENT_ROWS];
    snprintf(name, TN__KERNEL_NAME_BYTES, "norm_gradient_rows_%d_%s_%s", rows->columns,
             norm_names[index / TN__NORM_GRADIENT_ROWS], float_names[float_index(rows->x)]);
}

static void held_name(const char *family, int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s_%s_%s_%s", family, index / 4 ? "2d" : "1d",
             float_names[1 + index / 2 % 2], fp8_names[index % 2]);
}

static void norm_gradient_held_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    held_name("norm_gradient_held", index, name);
}

static void norm_held_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    held_name("norm_held", index, name);
}

static void adamw_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "adamw_%s_%s", index / 2 ? "2d" : "1d",
             fp8_names[index % 2]);
}

static void adamw_flat_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    by_type_name("adamw_flat", index, name);
}

static void adamw_advance_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    (void)index;
    snprintf(name, TN__KERNEL_NAME_BYTES, "adamw_advance");
}

static void clip_factor_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    (void)index;
    snprintf(name, TN__KERNEL_NAME_BYTES, "clip_factor");
}

static void square_sums_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    by_type_name("square_sums", index, name);
}

static void embed_gradient_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    by_type_name("embed_gradient", index, name);
}

static void row_products_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    by_type_name("row_products", index, name);
}

static void by_head_name(const char *family, int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s_%s_%s", family, index / 3 ? "128" : "64",
             float_names[index % 3]);
}

static void attention_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    by_head_name("attention", index, name);
}

static void attention_dq_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    by_head_name("attention_dq", index, name);
}

static void attention_dkv_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    by_head_name("attention_dkv", index, name);
}

static void product_name(int index, char name[TN__KERNEL_NAME_BYTES]) {
    static const char *const types[] = {"e4m3_e4m3", "e4m3_e5m2", "e5m2_e4m3"};
    snprintf(name, TN__KERNEL_NAME_BYTES, "product_%s_%s", index / 3 ? "vectors" : "tiles",
             types[index % 3]);
}

/* ---- families ----------------------------------------------------------------------------- */

/* In the order of their numbers: each ends where the next begins. */
static const struct kernel_family {
    int first;
    int image;
    void (*name)(int index, char name[TN__KERNEL_NAME_BYTES]);
} families[] = {
    {TN__KERNEL_QUANTIZE, CAST_IMAGE, quantize_name},
    {TN__KERNEL_DEQUANTIZE, CAST_IMAGE, dequantize_name},
    {TN__KERNEL_TRANSPOSE, CAST_IMAGE, single_cast_name},
    {TN__KERNEL_TRANSPOSE_NARROW, NARROW_IMAGE, single_narrow_name},
    {TN__KERNEL_FINISH, SMALL_IMAGE, finish_name},
    {TN__KERNEL_CONVERT, SMALL_IMAGE, convert_name},
    {TN__KERNEL_AXPY, SMALL_IMAGE, axpy_name},
    {TN__KERNEL_CROSS_ENTROPY, SMALL_IMAGE, cross_entropy_name},
    {TN__KERNEL_PAD, SMALL_IMAGE, single_small_name},
    {TN__KERNEL_SHARD_AMAX, SHARD_IMAGE, shard_amax_name},
    {TN__KERNEL_SHARD_QUANTIZE, SHARD_IMAGE, shard_quantize_name},
    {TN__KERNEL_COMBINE_ROWS, ROWS_IMAGE, combine_rows_name},
    {TN__KERNEL_PAD_OFFSETS, ROWS_IMAGE, single_rows_name},
    {TN__KERNEL_LIST_GROUPS, LIST_IMAGE, single_list_name},
    {TN__KERNEL_QUANTIZE_LIST, LIST_IMAGE, quantize_list_name},
    {TN__KERNEL_QUANTIZE_TENSOR, TENSOR_IMAGE, quantize_tensor_name},
    {TN__KERNEL_AMAX, TENSOR_IMAGE, amax_name},
    {TN__KERNEL_AMAX_START, TENSOR_IMAGE, single_tensor_name},
    {TN__KERNEL_QUANTIZE_MXFP8, MXFP8_IMAGE, quantize_mxfp8_name},
    {TN__KERNEL_DEQUANTIZE_MXFP8, MXFP8_IMAGE, dequantize_mxfp8_name},
    {TN__KERNEL_QUANTIZE_NVFP4, NVFP4_IMAGE, quantize_nvfp4_name},
    {TN__KERNEL_DEQUANTIZE_NVFP4, NVFP4_IMAGE, dequantize_nvfp4_name},
    {TN__KERNEL_NVFP4_FINISH, NVFP4_IMAGE, single_nvfp4_name},
    {TN__KERNEL_ACTIVATE, ACTIVATION_IMAGE, activate_name},
    {TN__KERNEL_COLUMN_SUMS, ACTIVATION_IMAGE, column_sums_name},
    {TN__KERNEL_ACTIVATE_GATED, GATE_IMAGE, activate_gated_name},
    {TN__KERNEL_DIFFERENTIATE, GRADIENT_IMAGE, differentiate_name},
    {TN__KERNEL_DIFFERENTIATE_GATED, GATE_GRADIENT_IMAGE, differentiate_gated_name},
    {TN__KERNEL_DIFFERENTIATE_PAIRS, GATE_GRADIENT_IMAGE, differentiate_pairs_name},
    {TN__KERNEL_NORM_ROWS, NORM_ROWS_IMAGE, norm_rows_name},
    {TN__KERNEL_NORM_TILES, NORM_TILES_IMAGE, norm_tiles_name},
    {TN__KERNEL_NORM_ANY_ROWS, NORM_TILES_IMAGE, norm_any_rows_name},
    {TN__KERNEL_NORM_BANDS, NORM_BANDS_IMAGE, norm_bands_name},
    {TN__KERNEL_NORM_BEGIN, NORM_BANDS_IMAGE, single_norm_begin_name},
    {TN__KERNEL_REQUANTIZE, REQUANTIZE_IMAGE, requantize_name},
    {TN__KERNEL_SHIFT, REQUANTIZE_IMAGE, shift_name},
    {TN__KERNEL_QUANTIZE_STOCHASTIC, STOCHASTIC_IMAGE, quantize_stochastic_name},
    {TN__KERNEL_RANDOM_ADVANCE, STOCHASTIC_IMAGE, single_stochastic_name},
    {TN__KERNEL_NORM_GRADIENT, NORM_GRADIENT_IMAGE, norm_gradient_name},
    {TN__KERNEL_NORM_GRADIENT_MEANS, NORM_GRADIENT_IMAGE, norm_gradient_means_name},
    {TN__KERNEL_NORM_GRADIENT_ROWS, NORM_GRADIENT_ROWS_IMAGE, norm_gradient_rows_name},
    {TN__KERNEL_NORM_GRADIENT_HELD, NORM_GRADIENT_HELD_IMAGE, norm_gradient_held_name},
    {TN__KERNEL_NORM_HELD, NORM_HELD_IMAGE, norm_held_name},
    {TN__KERNEL_ADAMW, TRAIN_IMAGE, adamw_name},
    {TN__KERNEL_ADAMW_FLAT, TRAIN_IMAGE, adamw_flat_name},
    {TN__KERNEL_ADAMW_ADVANCE, TRAIN_IMAGE, adamw_advance_name},
    {TN__KERNEL_CLIP_FACTOR, TRAIN_IMAGE, clip_factor_name},
    {TN__KERNEL_SQUARE_SUMS, TRAIN_IMAGE, square_sums_name},
    {TN__KERNEL_EMBED_GRADIENT, TRAIN_IMAGE, embed_gradient_name},
    {TN__KERNEL_ROW_PRODUCTS, TRAIN_IMAGE, row_products_name},
    {TN__KERNEL_ATTENTION, ATTENTION_IMAGE, attention_name},
    {TN__KERNEL_ATTENTION_DQ, ATTENTION_GRADIENT_IMAGE, attention_dq_name},
    {TN__KERNEL_ATTENTION_DKV, ATTENTION_GRADIENT_IMAGE, attention_dkv_name},
    {TN__KERNEL_PRODUCT, WGMMA_IMAGE, product_name},
};
enum { FAMILY_COUNT = sizeof families / sizeof *families };

static const struct kernel_family *family_of(int kernel) {
    const struct kernel_family *family = families + FAMILY_COUNT - 1;
    TN_CHECK(kernel >= 0 && kernel < TN__KERNEL_COUNT);
    while (kernel < family->first)
        family--;
    return family;
}

void tn__kernel_name(int kernel, char name[TN__KERNEL_NAME_BYTES]) {
    const struct kernel_family *family = family_of(kernel);
    family->name(kernel - family->first, name);
}

/* ---- a device's context ------------------------------------------------------------------- */

static const char context_key; /* its address tells our attachment from another layer's */

/* Ends what there is, also of a context that is half made. */
static void context_end(tn__attachment *attachment) {
    tn__cuda_context *context = (tn__cuda_context *)attachment;
    tn__cuda_gemm_end(context);
    for (int i = IMAGE_COUNT; i-- > 0;)
        if (context->modules[i] && !tn__driver_is_gone())
            (void)context->driver->module_unload(context->state, context->modules[i]);
    tn__host_free(context);
}

static tn_status load_images(tn__cuda_context *context) {
    for (int i = 0; i < IMAGE_COUNT; i++)
        TN_TRY(context->driver->module_load(context->state, images[i], &context->modules[i]));
    return TN_OK;
}

static tn_status find_kernels(tn__cuda_context *context) {
    for (int kernel = 0; kernel < TN__KERNEL_COUNT; kernel++) {
        void *module = context->modules[family_of(kernel)->image];
        char name[TN__KERNEL_NAME_BYTES];
        tn__kernel_name(kernel, name);
        TN_TRY(context->driver->module_function(context->state, module, name,
                                                &context->kernels[kernel]));
    }
    return TN_OK;
}

static tn_status require_hopper(const tn__cuda_context *context) {
    const tn__driver *driver = context->driver;
    const tn_device_info *info = &context->info;
    if (info->compute_major != 9 || info->compute_minor != 0)
        return TN_FAIL(TN_UNSUPPORTED, "it is for compute capability 9.0, and this GPU has %d.%d",
                       info->compute_major, info->compute_minor);
    if (!driver->multiprocessors || !driver->shared_max_set || !driver->box_map)
        return TN_FAIL(TN_UNSUPPORTED, "the driver %s has no such kernels", driver->name);
    return driver->box_map_check(context->state);
}

static tn_status find_processors(tn__cuda_context *context, int first, int count,
                                 unsigned shared_bytes, int *out) {
    const tn__driver *driver = context->driver;
    TN_TRY(require_hopper(context));
    for (int i = first; i < first + count; i++)
        TN_TRY(driver->shared_max_set(context->state, context->kernels[i], shared_bytes));
    return driver->multiprocessors(context->state, out);
}

/* The multiprocessors for kernels from `first` on, which want that much shared memory and have
 * boxes moved; 0 where GPU or driver do not do for them, and why: then it goes without them. */
static int processors_for(tn__cuda_context *context, int first, int count, unsigned shared_bytes,
                          char refusal[TN__REFUSAL_BYTES]) {
    int processors = 0;
    tn__saved_error error;
    tn__error_save(&error);
    const tn_status status = find_processors(context, first, count, shared_bytes, &processors);
    if (status != TN_OK) snprintf(refusal, TN__REFUSAL_BYTES, "%s", tn_error_last());
    tn__error_restore(&error);
    return status == TN_OK ? processors : 0;
}

static void prepare_hopper(tn__cuda_context *context) {
    char unused[TN__REFUSAL_BYTES];
    context->multiprocessors =
        processors_for(context, TN__KERNEL_TRANSPOSE_NARROW, 1, TN__NARROW_SHARED_BYTES, unused);
    context->product_processors = processors_for(context, TN__KERNEL_PRODUCT, TN__PRODUCT_KERNELS,
                                                 TN__WGMMA_SHARED_BYTES, context->product_refusal);
}

static tn_status context_make(tn_device *device, tn__cuda_context **out) {
    const tn__driver *driver = tn__device_driver(device);
    if (!driver->module_load || !driver->launch)
        return TN_FAIL(TN_UNSUPPORTED, "the driver %s of this device can not load CUDA kernels",
                       driver->name);
    tn__cuda_context *context = tn__host_alloc(1, sizeof *context);
    if (!context) return TN_OUT_OF_HOST_MEMORY;
    context->attachment.key = &context_key;
    context->attachment.end = context_end;
    context->device = device;
    context->driver = driver;
    context->state = tn__device_state(device);
    context->info.size = sizeof context->info;
    tn_status status = tn_device_info_get(device, &context->info);
    if (status == TN_OK) status = load_images(context);
    if (status == TN_OK) status = find_kernels(context);
    if (status == TN_OK) prepare_hopper(context);
    if (status == TN_OK) tn__cuda_norm_fit(context);
    if (status == TN_OK) tn__cuda_norm_gradient_fit(context);
    if (status != TN_OK) {
        context_end(&context->attachment);
        return status;
    }
    *out = context;
    return TN_OK;
}

tn_status tn__cuda_context_of(tn_device *device, tn__cuda_context **out) {
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    tn__attachment *attachment = tn__device_attachment(device, &context_key);
    tn_status status = TN_OK;
    if (!attachment) {
        pthread_mutex_lock(&making);
        attachment = tn__device_attachment(device, &context_key);
        if (!attachment) {
            tn__cuda_context *context = NULL;
            status = context_make(device, &context);
            if (status == TN_OK) {
                attachment = &context->attachment;
                tn__device_attach(device, attachment);
            }
        }
        pthread_mutex_unlock(&making);
    }
    if (status == TN_OK) *out = (tn__cuda_context *)attachment;
    return status;
}

/* Whether the kernel waits for the one ahead by itself, so that it may be launched early. */
static int is_waiting(int kernel) {
    static const struct {
        int first, count;
    } waiting[] = {{TN__KERNEL_TRANSPOSE, 1},    {TN__KERNEL_QUANTIZE_LIST, TN__QUANTIZE_KERNELS},
                   {TN__KERNEL_AMAX, 3},         {TN__KERNEL_QUANTIZE_TENSOR, TN__FORMAT_KERNELS},
                   {TN__KERNEL_SCALE_FINISH, 2}, {TN__KERNEL_QUANTIZE_NVFP4, TN__NVFP4_KERNELS},
                   {TN__KERNEL_NVFP4_FINISH, 1}, {TN__KERNEL_NORM_BANDS, TN__PRODUCE_KERNELS}};
    for (size_t f = 0; f < sizeof waiting / sizeof *waiting; f++)
        if (kernel >= waiting[f].first && kernel < waiting[f].first + waiting[f].count) return 1;
    return 0;
}

tn_status tn__kernel_launch_grid(tn__cuda_context *context, int kernel, const tn__grid *grid,
                                 void *argument, tn_stream stream) {
    if (grid->blocks <= 0 || grid->blocks > INT32_MAX) {
        char name[TN__KERNEL_NAME_BYTES];
        tn__kernel_name(kernel, name);
        return TN_FAIL(TN_UNSUPPORTED, "%s would need %lld blocks: a launch has 1 to %d", name,
                       (long long)grid->blocks, INT32_MAX);
    }
    void *parameters[1] = {argument};
    /* Compiled for Hopper they wait for the kernel ahead; from PTX they do not (cuda_tile.cuh). */
    int waits =
        is_waiting(kernel) && context->info.compute_major == 9 && context->info.compute_minor == 0;
    tn__launch launch = {.grid = {(unsigned)grid->blocks, 1, 1},
                         .block = {grid->threads, 1, 1},
                         .shared_bytes = grid->shared_bytes,
                         .cluster = grid->cluster,
                         .parameters = parameters,
                         .is_together = grid->is_together,
                         .starts_early = waits};
    return context->driver->launch(context->state, context->kernels[kernel], &launch, stream);
}

tn_status tn__kernel_launch_narrow(tn__cuda_context *context, unsigned blocks,
                                   tn__cuda_narrow_arguments *argument, tn_stream stream) {
    void *parameters[1] = {argument};
    tn__launch launch = {.grid = {blocks, 1, 1},
                         .block = {TN__NARROW_THREADS, 1, 1},
                         .shared_bytes = TN__NARROW_SHARED_BYTES,
                         .cluster = TN__NARROW_CLUSTER,
                         .parameters = parameters};
    return context->driver->launch(context->state, context->kernels[TN__KERNEL_TRANSPOSE_NARROW],
                                   &launch, stream);
}

tn_status tn__kernel_launch(tn__cuda_context *context, int kernel, int64_t blocks, unsigned threads,
                            void *argument, tn_stream stream) {
    const tn__grid grid = {.blocks = blocks, .threads = threads};
    return tn__kernel_launch_grid(context, kernel, &grid, argument, stream);
}
