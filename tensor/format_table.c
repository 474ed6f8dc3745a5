/* The format table. A format is a row: its planes, the types that they take, how its scales are
 * laid out, what derives from what, which plane a GEMM reads. Adding one is adding a row and, where
 * its scales are laid out in a new way, the function that says how (docs/formats.md).
 *
 *     format        planes     data               scales, valid part          padded to
 *     PLAIN         DATA       M x K              none
 *     FP8_BLOCK_1D  ROW        M x K              ceil(K/128) rows of M         columns to 4
 *                   COL        K x M              ceil(M/128) rows of K         columns to 4
 *     FP8_BLOCK_2D  ROW        M x K              ceil(M/128) x ceil(K/128)     columns to 4
 *                   COL        K x M              ceil(K/128) x ceil(M/128)     columns to 4
 *     FP8_TENSOR    ROW        M x K              1                             columns to 4
 *                   COL        K x M              1                             columns to 4
 *     MXFP8         ROW        M x K              M rows of ceil(K/32)          rows 128, columns 4
 *                   COL        M x K              ceil(M/32) rows of K          rows 4, columns 128
 *     NVFP4         ROW        M x K, two a byte  M rows of ceil(K/16), and 1   rows 128, columns 4
 *                   COL        K x M, two a byte  K rows of ceil(M/16), and 1   rows 128, columns 4
 *
 * Invariants: a plane's bytes depend on the format, dtype, M and K alone; where planes derive
 * from each other, the COL layout of M x K is the ROW layout of K x M, which is why each is the
 * other's exact transpose.
 */
#include "format_table.h"

#include <stdatomic.h>

/* ---- element types ------------------------------------------------------------------------- */

typedef struct dtype_row {
    const char *name;
    size_t bits;
} dtype_row;

static const dtype_row dtype_table[TN_DTYPE_COUNT] = {
    [TN_FP32] = {"fp32", 32}, [TN_BF16] = {"bf16", 16}, [TN_FP16] = {"fp16", 16},
    [TN_E4M3] = {"e4m3", 8},  [TN_E5M2] = {"e5m2", 8},  [TN_BYTE] = {"byte", 8},
    [TN_E2M1] = {"e2m1", 4},  [TN_E8M0] = {"e8m0", 8},
};

int tn__dtype_is_known(tn_dtype dtype) { return (int)dtype >= 0 && dtype < TN_DTYPE_COUNT; }

const char *tn_dtype_name(tn_dtype dtype) {
    return tn__dtype_is_known(dtype) ? dtype_table[dtype].name : "unknown dtype";
}

size_t tn_dtype_bits(tn_dtype dtype) {
    return tn__dtype_is_known(dtype) ? dtype_table[dtype].bits : 0;
}

size_t tn_dtype_bytes(tn_dtype dtype) { return tn_dtype_bits(dtype) / 8; }

/* ---- planes -------------------------------------------------------------------------------- */

int tn__plane_is_known(tn_plane plane) { return (int)plane >= 0 && plane < TN_PLANE_COUNT; }

const char *tn_plane_name(tn_plane plane) {
    static const char *const names[TN_PLANE_COUNT] = {"DATA", "ROW", "COL"};
    return tn__plane_is_known(plane) ? names[plane] : "unknown plane";
}

/* ---- scale layouts ------------------------------------------------------------------------- */

/* A matrix of scales: the valid part, and what it is padded to. */
typedef struct scale_shape {
    int64_t rows, cols;
    int64_t padded_rows, padded_cols;
} scale_shape;

static int64_t ceil_div(int64_t count, int64_t by) { return count / by + (count % by != 0); }

static int64_t round_up(int64_t count, int64_t to) { return ceil_div(count, to) * to; }

static scale_shape padded(int64_t rows, int64_t cols, int64_t row_multiple, int64_t col_multiple) {
    return (scale_shape){rows, cols, round_up(rows, row_multiple), round_up(cols, col_multiple)};
}

/* The functions below get a plane as it is stored. 16-byte rows of fp32 scales are what TMA and
 * cuBLASLt want; 128 x 4 tiles of scales of one byte are what a Blackwell GEMM reads. */

static scale_shape scales_of_vectors(tn_plane plane, int64_t rows, int64_t cols) {
    (void)plane;
    return padded(ceil_div(cols, TN__BLOCK), rows, 1, 4);
}

static scale_shape scales_of_tiles(tn_plane plane, int64_t rows, int64_t cols) {
    (void)plane;
    return padded(ceil_div(rows, TN__BLOCK), ceil_div(cols, TN__BLOCK), 1, 4);
}

static scale_shape scales_of_tensor(tn_plane plane, int64_t rows, int64_t cols) {
    (void)plane, (void)rows, (void)cols;
    return padded(1, 1, 1, 4);
}

/* COL is not stored transposed, and nor are its scales. */
static scale_shape scales_of_mxfp8(tn_plane plane, int64_t rows, int64_t cols) {
    if (plane == TN_PLANE_COL) return padded(ceil_div(rows, TN__MXFP8_BLOCK), cols, 4, 128);
    return padded(rows, ceil_div(cols, TN__MXFP8_BLOCK), 128, 4);
}

static scale_shape scales_of_nvfp4(tn_plane plane, int64_t rows, int64_t cols) {
    (void)plane;
    return padded(rows, ceil_div(cols, TN__NVFP4_BLOCK), 128, 4);
}

/* ---- the table ----------------------------------------------------------------------------- */

#define BIT(value) (1u << (value))

/* Where a format's one fp32 scale for the whole tensor lies. */
typedef enum global_scale {
    GLOBAL_NONE = 0,
    GLOBAL_ONLY, /* it is all the scales there are */
    GLOBAL_LAST  /* after the others, and zeros to 16 bytes */
} global_scale;

/* What an architecture's GEMMs read of a format. */
typedef enum operand_rule {
    OPERANDS_NONE = 0,
    OPERANDS_DATA,
    OPERANDS_ROW,  /* ROW, whichever dimension is contracted: any mix of transposed operands */
    OPERANDS_INNER /* the plane that is quantized along the contracted dimension */
} operand_rule;

typedef struct format_row {
    const char *name;
    unsigned planes; /* bits of tn_plane */
    unsigned dtypes; /* bits of tn_dtype */
    tn_dtype scale_dtype;
    scale_shape (*scales)(tn_plane plane, int64_t rows, int64_t cols); /* NULL: no scales */
    global_scale global;
    int is_col_transposed;  /* COL is stored K x M */
    int row_block;          /* rows that share scales, or a tile of them, in ROW or DATA */
    int col_block;          /* and in COL */
    int is_exact_transpose; /* ROW and COL derive from each other */
    int has_frozen_rule;    /* UNTIL_LAST_USE drops a plane that can be derived again */
    const char *why_not_derived;
    unsigned char operands[TN_ARCHITECTURE_COUNT]; /* operand_rule */
    const char *why_no_gemm;
} format_row;

#define PLANES_FP8 (BIT(TN_PLANE_ROW) | BIT(TN_PLANE_COL))
#define DTYPES_FP8 (BIT(TN_E4M3) | BIT(TN_E5M2))

/* FP8 GEMMs of Ada, Hopper and RTX Blackwell contract along the stored rows of both operands (TN
 * in BLAS's words), so that DGRAD's weight and both operands of WGRAD are COL planes; Blackwell
 * reads any mix of transposed operands where all elements share a scale. */
static const format_row format_table[TN_FORMAT_COUNT] = {
    [TN_FORMAT_PLAIN] = {.name = "plain",
                         .row_block = 1,
                         .col_block = 1,
                         .planes = BIT(TN_PLANE_DATA),
                         .dtypes = BIT(TN_FP32) | BIT(TN_BF16) | BIT(TN_FP16) | BIT(TN_BYTE),
                         .why_not_derived = "a plain tensor has no other plane",
                         .operands = {OPERANDS_DATA, OPERANDS_DATA, OPERANDS_DATA, OPERANDS_DATA,
                                      OPERANDS_DATA, OPERANDS_DATA}},
    [TN_FORMAT_FP8_BLOCK_1D] =
        {.name = "fp8_block_1d",
         .row_block = 1,
         .col_block = TN__BLOCK,
         .planes = PLANES_FP8,
         .dtypes = DTYPES_FP8,
         .scale_dtype = TN_FP32,
         .scales = scales_of_vectors,
         .is_col_transposed = 1,
         .why_not_derived =
             "with 1D scaling each plane has scales of its own (ROW 1x128, COL 128x1) and is not "
             "the other's transpose; quantize it from the high-precision source",
         .operands =
             {[TN_ARCHITECTURE_HOST] = OPERANDS_INNER, [TN_ARCHITECTURE_HOPPER] = OPERANDS_INNER},
         .why_no_gemm = "GEMMs with fp32 scales of blocks exist on compute capability 9.0 only"},
    [TN_FORMAT_FP8_BLOCK_2D] =
        {.name = "fp8_block_2d",
         .row_block = TN__BLOCK,
         .col_block = TN__BLOCK,
         .planes = PLANES_FP8,
         .dtypes = DTYPES_FP8,
         .scale_dtype = TN_FP32,
         .scales = scales_of_tiles,
         .is_col_transposed = 1,
         .is_exact_transpose = 1,
         .has_frozen_rule = 1,
         .operands =
             {[TN_ARCHITECTURE_HOST] = OPERANDS_INNER, [TN_ARCHITECTURE_HOPPER] = OPERANDS_INNER},
         .why_no_gemm = "GEMMs with fp32 scales of blocks exist on compute capability 9.0 only"},
    [TN_FORMAT_FP8_TENSOR] = {.name = "fp8_tensor",
                              .row_block = 1,
                              .col_block = 1,
                              .planes = PLANES_FP8,
                              .dtypes = DTYPES_FP8,
                              .scale_dtype = TN_FP32,
                              .scales = scales_of_tensor,
                              .global = GLOBAL_ONLY,
                              .is_col_transposed = 1,
                              .is_exact_transpose = 1,
                              .operands = {[TN_ARCHITECTURE_HOST] = OPERANDS_INNER,
                                           [TN_ARCHITECTURE_ADA] = OPERANDS_INNER,
                                           [TN_ARCHITECTURE_HOPPER] = OPERANDS_INNER,
                                           [TN_ARCHITECTURE_BLACKWELL] = OPERANDS_ROW,
                                           [TN_ARCHITECTURE_BLACKWELL_RTX] = OPERANDS_INNER},
                              .why_no_gemm = "FP8 GEMMs begin with compute capability 8.9"},
    [TN_FORMAT_MXFP8] =
        {.name = "mxfp8",
         .row_block = TN__BLOCK,
         .col_block = TN__BLOCK,
         .planes = PLANES_FP8,
         .dtypes = DTYPES_FP8,
         .scale_dtype = TN_E8M0,
         .scales = scales_of_mxfp8,
         .why_not_derived =
             "ROW is scaled along the columns and COL along the rows, each with scales of its "
             "own; quantize it from the high-precision source",
         .operands = {[TN_ARCHITECTURE_BLACKWELL] = OPERANDS_INNER},
         .why_no_gemm = "GEMMs of MXFP8 in all three forms exist on compute capability 10.x and "
                        "11.x only"},
    [TN_FORMAT_NVFP4] =
        {.name = "nvfp4",
         .row_block = TN__BLOCK,
         .col_block = TN__BLOCK,
         .planes = PLANES_FP8,
         .dtypes = BIT(TN_E2M1),
         .scale_dtype = TN_E4M3,
         .scales = scales_of_nvfp4,
         .global = GLOBAL_LAST,
         .is_col_transposed = 1,
         .why_not_derived =
             "each plane has scales of its own, of 16 elements along its stored rows, and is not "
             "the other's transpose; quantize it from the high-precision source",
         .operands = {[TN_ARCHITECTURE_BLACKWELL] = OPERANDS_INNER,
                      [TN_ARCHITECTURE_BLACKWELL_RTX] = OPERANDS_INNER},
         .why_no_gemm = "GEMMs of E2M1 begin with compute capability 10.0"},
};

int tn__format_is_known(tn_format format) { return (int)format >= 0 && format < TN_FORMAT_COUNT; }

const char *tn_format_name(tn_format format) {
    return tn__format_is_known(format) ? format_table[format].name : "unknown format";
}

int tn__format_has_plane(tn_format format, tn_plane plane) {
    if (!tn__format_is_known(format) || !tn__plane_is_known(plane)) return 0;
    return (format_table[format].planes & BIT(plane)) != 0;
}

int tn__format_takes_dtype(tn_format format, tn_dtype dtype) {
    if (!tn__format_is_known(format) || !tn__dtype_is_known(dtype)) return 0;
    return (format_table[format].dtypes & BIT(dtype)) != 0;
}

int tn__format_has_frozen_rule(tn_format format) {
    TN_ASSERT(tn__format_is_known(format));
    return format_table[format].has_frozen_rule;
}

int tn__format_source(tn_format format, tn_plane plane, tn_plane *source, const char **why) {
    TN_ASSERT(tn__format_has_plane(format, plane));
    if (!format_table[format].is_exact_transpose) {
        *why = format_table[format].why_not_derived;
        return 0;
    }
    *source = plane == TN_PLANE_ROW ? TN_PLANE_COL : TN_PLANE_ROW;
    return 1;
}

/* ---- layouts ------------------------------------------------------------------------------- */

/* a * b into *out; 0 if it exceeds 63 bits, which no memory has. */
static int product_of(int64_t a, int64_t b, size_t *out) {
    int64_t product;
    if (__builtin_mul_overflow(a, b, &product)) return 0;
    *out = (size_t)product;
    return 1;
}

/* Elements of half a byte: an odd one out has the byte to itself. */
static int row_bytes_of(tn_dtype dtype, int64_t cols, size_t *out) {
    size_t bytes = tn_dtype_bytes(dtype);
    if (bytes > 0) return product_of(cols, (int64_t)bytes, out);
    *out = (size_t)ceil_div(cols, 2);
    return 1;
}

static int lay_out_data(tn_dtype dtype, tn_plane_layout *layout) {
    if (!row_bytes_of(dtype, layout->cols, &layout->row_bytes)) return 0;
    return product_of(layout->rows, (int64_t)layout->row_bytes, &layout->data_bytes);
}

static int lay_out_scales(const format_row *row, tn_plane plane, tn_plane_layout *layout) {
    scale_shape shape = row->scales(plane, layout->rows, layout->cols);
    size_t count, all;
    layout->scale_dtype = row->scale_dtype;
    layout->scale_rows = shape.rows;
    layout->scale_cols = shape.cols;
    layout->scale_stride = shape.padded_cols;
    layout->scale_padded_rows = shape.padded_rows;
    if (!product_of(shape.padded_rows, shape.padded_cols, &count)) return 0;
    if (!product_of((int64_t)count, (int64_t)tn_dtype_bytes(row->scale_dtype), &all)) return 0;
    if (row->global == GLOBAL_ONLY) layout->global_scale_offset = 0;
    if (row->global == GLOBAL_LAST) {
        TN_ASSERT(all % TN__GLOBAL_SCALE_BYTES == 0);
        layout->global_scale_offset = (int64_t)all;
        all += TN__GLOBAL_SCALE_BYTES;
        if (all > INT64_MAX) return 0;
    }
    layout->scale_bytes = all;
    return 1;
}

tn_status tn__format_layout(tn_format format, tn_dtype dtype, int64_t m, int64_t k, tn_plane plane,
                            tn_plane_layout *out) {
    TN_ASSERT(m >= 0 && m <= TN__ELEMENTS_MAX);
    TN_ASSERT(k >= 0 && k <= TN__ELEMENTS_MAX);
    TN_REQUIRE(tn__format_has_plane(format, plane), "format %s has no plane %s (%d)",
               tn_format_name(format), tn_plane_name(plane), (int)plane);
    const format_row *row = &format_table[format];
    tn_plane_layout layout = {.global_scale_offset = -1};
    int is_transposed = plane == TN_PLANE_COL && row->is_col_transposed;
    layout.rows = is_transposed ? k : m;
    layout.cols = is_transposed ? m : k;
    int fits = 1;
    if (m > 0 && k > 0) {
        fits = lay_out_data(dtype, &layout);
        if (fits && row->scales) fits = lay_out_scales(row, plane, &layout);
    }
    TN_REQUIRE(fits, "plane %s of %lld x %lld %s elements does not fit 63 bits of bytes",
               tn_plane_name(plane), (long long)m, (long long)k, tn_dtype_name(dtype));
    *out = layout;
    return TN_OK;
}

/* ---- rows of a plane ----------------------------------------------------------------------- */

static size_t data_offset_of(const tn_plane_layout *plane, tn_dtype dtype, int64_t first,
                             int is_contiguous) {
    if (is_contiguous) return (size_t)first * plane->row_bytes;
    return (size_t)(first * tn_dtype_bits(dtype) / 8);
}

/* The scales of the rows before `first` say where these begin: they are whole rows of scales, or
 * else whole columns, whichever of the two grows with the rows of the tensor. */
static void slice_scales(const format_row *row, const tn_plane_layout *whole, scale_shape before,
                         tn__slice *out) {
    tn_plane_layout *layout = &out->layout;
    int64_t item_bytes = (int64_t)tn_dtype_bytes(row->scale_dtype), offset = 0;
    if (row->global == GLOBAL_ONLY) return;
    if (before.rows < whole->scale_rows)
        offset = before.rows * whole->scale_stride;
    else
        offset = before.cols;
    int64_t padded_rows = layout->scale_padded_rows;
    layout->scale_bytes = (size_t)(padded_rows * layout->scale_stride * item_bytes);
    if (layout->scale_rows == whole->scale_rows && layout->scale_cols < whole->scale_cols) {
        out->is_scale_interleaved = 1;
        layout->scale_stride = whole->scale_stride;
        layout->scale_padded_rows = layout->scale_rows;
        layout->scale_bytes =
            (size_t)(((layout->scale_rows - 1) * layout->scale_stride + layout->scale_cols) *
                     item_bytes);
    }
    out->scale_offset = (size_t)(offset * item_bytes);
    if (row->global == GLOBAL_LAST) {
        layout->global_scale_offset = whole->global_scale_offset - (int64_t)out->scale_offset;
    }
}

int tn__format_slice(tn_format format, tn_dtype dtype, int64_t m, int64_t k, tn_plane plane,
                     int64_t first, int64_t rows, tn__slice *out, const char **why) {
    const format_row *row = &format_table[format];
    int is_transposed = plane == TN_PLANE_COL && row->is_col_transposed;
    int block = plane == TN_PLANE_COL ? row->col_block : row->row_block;
    tn_plane_layout whole;
    TN_ASSERT(first >= 0 && rows >= 0 && first <= m - rows);
    if (first % block != 0 || (rows % block != 0 && first + rows != m)) {
        *why = "128 rows share scales: first_row and rows must be multiples of 128, but for the "
               "tensor's last rows";
        return 0;
    }
    TN_CHECK(tn__format_layout(format, dtype, m, k, plane, &whole) == TN_OK);
    *out = (tn__slice){.is_contiguous = !is_transposed || rows == m};
    TN_CHECK(tn__format_layout(format, dtype, rows, k, plane, &out->layout) == TN_OK);
    if (rows == m || out->layout.data_bytes == 0) return 1;
    out->data_offset = data_offset_of(&whole, dtype, first, out->is_contiguous);
    if (!out->is_contiguous) out->layout.row_bytes = whole.row_bytes;
    if (!row->scales) return 1;
    scale_shape before =
        is_transposed ? row->scales(plane, k, first) : row->scales(plane, first, k);
    slice_scales(row, &whole, before, out);
    return 1;
}

/* ---- operands of GEMMs --------------------------------------------------------------------- */

static const char *const architecture_names[TN_ARCHITECTURE_COUNT] = {
    [TN_ARCHITECTURE_HOST] = "the host",
    [TN_ARCHITECTURE_OTHER] = "a GPU without FP8",
    [TN_ARCHITECTURE_ADA] = "Ada",
    [TN_ARCHITECTURE_HOPPER] = "Hopper",
    [TN_ARCHITECTURE_BLACKWELL] = "Blackwell",
    [TN_ARCHITECTURE_BLACKWELL_RTX] = "Blackwell RTX",
};

static int architecture_is_known(tn_architecture architecture) {
    return (int)architecture >= 0 && architecture < TN_ARCHITECTURE_COUNT;
}

const char *tn_architecture_name(tn_architecture architecture) {
    return architecture_is_known(architecture) ? architecture_names[architecture]
                                               : "unknown architecture";
}

tn_architecture tn_device_architecture(tn_device *device) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    if (!device || tn_device_info_get(device, &info) != TN_OK) return TN_ARCHITECTURE_OTHER;
    if (info.driver == TN_DRIVER_HOST) return TN_ARCHITECTURE_HOST;
    switch (info.compute_major) {
    case 8: return info.compute_minor == 9 ? TN_ARCHITECTURE_ADA : TN_ARCHITECTURE_OTHER;
    case 9: return TN_ARCHITECTURE_HOPPER;
    case 10:
    case 11: return TN_ARCHITECTURE_BLACKWELL;
    case 12: return TN_ARCHITECTURE_BLACKWELL_RTX;
    default: return TN_ARCHITECTURE_OTHER;
    }
}

/* The plane that is quantized along the dimension which this operand's form contracts. */
static tn_plane inner_plane(tn_operand operand) {
    switch (operand) {
    case TN_OPERAND_DGRAD_B:
    case TN_OPERAND_WGRAD_A:
    case TN_OPERAND_WGRAD_B: return TN_PLANE_COL;
    default: return TN_PLANE_ROW;
    }
}

tn_status tn_format_operand(tn_format format, tn_architecture architecture, tn_operand operand,
                            tn_plane *out) {
    TN_REQUIRE(out, "tn_format_operand: out is NULL");
    TN_REQUIRE(tn__format_is_known(format), "tn_format_operand: unknown format %d", (int)format);
    TN_REQUIRE(architecture_is_known(architecture), "tn_format_operand: unknown architecture %d",
               (int)architecture);
    TN_REQUIRE((int)operand >= 0 && operand < TN_OPERAND_COUNT,
               "tn_format_operand: unknown operand %d", (int)operand);
    switch ((operand_rule)format_table[format].operands[architecture]) {
    case OPERANDS_DATA: *out = TN_PLANE_DATA; return TN_OK;
    case OPERANDS_ROW: *out = TN_PLANE_ROW; return TN_OK;
    case OPERANDS_INNER: *out = inner_plane(operand); return TN_OK;
    case OPERANDS_NONE: break;
    }
    return TN_FAIL(TN_UNSUPPORTED, "format %s has no GEMM on %s: %s", tn_format_name(format),
                   tn_architecture_name(architecture), format_table[format].why_no_gemm);
}

/* ---- how planes are derived ---------------------------------------------------------------- */

static _Atomic(tn_derive_function) derive_table[TN_FORMAT_COUNT];

tn_status tn_format_set_derive(tn_format format, tn_derive_function derive) {
    TN_REQUIRE(tn__format_is_known(format), "unknown format %d", (int)format);
    TN_REQUIRE(format_table[format].is_exact_transpose, "format %s: planes can not be derived: %s",
               tn_format_name(format), format_table[format].why_not_derived);
    atomic_store(&derive_table[format], derive);
    return TN_OK;
}

tn_derive_function tn__format_derive(tn_format format) {
    return atomic_load(&derive_table[format]);
}
