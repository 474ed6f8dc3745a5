/* The format table. A format is a row; adding one is adding a row (and, where a plane is stored
 * in a new way, the function that says how).
 *
 *     format        planes     data            scales
 *     PLAIN         DATA       M x K           none
 *     FP8_BLOCK_1D  ROW        M x K           ceil(K/128) rows of M,          stride up4(M)
 *                   COL        K x M           ceil(M/128) rows of K,          stride up4(K)
 *     FP8_BLOCK_2D  ROW        M x K           ceil(M/128) rows of ceil(K/128), stride up4
 *                   COL        K x M           ceil(K/128) rows of ceil(M/128), stride up4
 *
 * Invariants: a plane's bytes depend on the format, dtype, M and K alone; in 2D the COL layout of
 * M x K is the ROW layout of K x M, which is why each plane is the other's exact transpose.
 */
#include "format_table.h"

#include <stdatomic.h>

/* ---- element types ------------------------------------------------------------------------- */

typedef struct dtype_row {
    const char *name;
    size_t bytes;
} dtype_row;

static const dtype_row dtype_table[TN_DTYPE_COUNT] = {
    [TN_FP32] = {"fp32", 4}, [TN_BF16] = {"bf16", 2}, [TN_FP16] = {"fp16", 2},
    [TN_E4M3] = {"e4m3", 1}, [TN_E5M2] = {"e5m2", 1}, [TN_BYTE] = {"byte", 1},
};

int tn__dtype_is_known(tn_dtype dtype) { return (int)dtype >= 0 && dtype < TN_DTYPE_COUNT; }

const char *tn_dtype_name(tn_dtype dtype) {
    return tn__dtype_is_known(dtype) ? dtype_table[dtype].name : "unknown dtype";
}

size_t tn_dtype_bytes(tn_dtype dtype) {
    return tn__dtype_is_known(dtype) ? dtype_table[dtype].bytes : 0;
}

/* ---- planes -------------------------------------------------------------------------------- */

int tn__plane_is_known(tn_plane plane) { return (int)plane >= 0 && plane < TN_PLANE_COUNT; }

const char *tn_plane_name(tn_plane plane) {
    static const char *const names[TN_PLANE_COUNT] = {"DATA", "ROW", "COL"};
    return tn__plane_is_known(plane) ? names[plane] : "unknown plane";
}

/* ---- scale layouts ------------------------------------------------------------------------- */

typedef struct scale_shape {
    int64_t rows;
    int64_t cols; /* valid floats of a row; the stride is up4 of it */
} scale_shape;

static int64_t blocks_of(int64_t elements) {
    return elements / TN__BLOCK + (elements % TN__BLOCK != 0);
}

/* 16-byte rows, as TMA and cuBLASLt want them. */
static int64_t up4(int64_t count) { return (count + 3) & ~INT64_C(3); }

/* Both shapes are given for the plane as it is stored: `rows` x `cols`, scaled along cols. */
static scale_shape scales_of_vectors(int64_t rows, int64_t cols) {
    return (scale_shape){blocks_of(cols), rows};
}

static scale_shape scales_of_tiles(int64_t rows, int64_t cols) {
    return (scale_shape){blocks_of(rows), blocks_of(cols)};
}

/* ---- the table ----------------------------------------------------------------------------- */

#define BIT(value) (1u << (value))

typedef struct format_row {
    const char *name;
    unsigned planes;                                   /* bits of tn_plane */
    unsigned dtypes;                                   /* bits of tn_dtype */
    scale_shape (*scales)(int64_t rows, int64_t cols); /* NULL: no scales */
    int is_exact_transpose;                            /* ROW and COL derive from each other */
    const char *why_not_derived;
} format_row;

static const format_row format_table[TN_FORMAT_COUNT] = {
    [TN_FORMAT_PLAIN] = {"plain", BIT(TN_PLANE_DATA),
                         BIT(TN_FP32) | BIT(TN_BF16) | BIT(TN_FP16) | BIT(TN_BYTE), NULL, 0,
                         "a plain tensor has no other plane"},
    [TN_FORMAT_FP8_BLOCK_1D] =
        {"fp8_block_1d", BIT(TN_PLANE_ROW) | BIT(TN_PLANE_COL), BIT(TN_E4M3) | BIT(TN_E5M2),
         scales_of_vectors, 0,
         "with 1D scaling each plane has scales of its own (ROW 1x128, COL 128x1) and is not the "
         "other's transpose; quantize it from the high-precision source"},
    [TN_FORMAT_FP8_BLOCK_2D] = {"fp8_block_2d", BIT(TN_PLANE_ROW) | BIT(TN_PLANE_COL),
                                BIT(TN_E4M3) | BIT(TN_E5M2), scales_of_tiles, 1, NULL},
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

/* rows * cols * item_bytes into *out; 0 if it exceeds 63 bits, which no memory has. */
static int bytes_of(int64_t rows, int64_t cols, size_t item_bytes, size_t *out) {
    uint64_t items, bytes;
    if (__builtin_mul_overflow((uint64_t)rows, (uint64_t)cols, &items)) return 0;
    if (__builtin_mul_overflow(items, (uint64_t)item_bytes, &bytes)) return 0;
    if (bytes > INT64_MAX) return 0;
    *out = (size_t)bytes;
    return 1;
}

tn_status tn__format_layout(tn_format format, tn_dtype dtype, int64_t m, int64_t k, tn_plane plane,
                            tn_plane_layout *out) {
    TN_ASSERT(m >= 0 && k >= 0);
    TN_REQUIRE(tn__format_has_plane(format, plane), "format %s has no plane %s (%d)",
               tn_format_name(format), tn_plane_name(plane), (int)plane);
    const format_row *row = &format_table[format];
    tn_plane_layout layout = {0};
    int is_transposed = plane == TN_PLANE_COL;
    layout.rows = is_transposed ? k : m;
    layout.cols = is_transposed ? m : k;
    int fits = bytes_of(layout.rows, layout.cols, tn_dtype_bytes(dtype), &layout.data_bytes);
    if (row->scales && m > 0 && k > 0) {
        scale_shape shape = row->scales(layout.rows, layout.cols);
        layout.scale_rows = shape.rows;
        layout.scale_cols = shape.cols;
        layout.scale_stride = up4(shape.cols);
        fits &= bytes_of(shape.rows, layout.scale_stride, sizeof(float), &layout.scale_bytes);
    }
    TN_REQUIRE(fits, "plane %s of %lld x %lld %s elements does not fit 63 bits of bytes",
               tn_plane_name(plane), (long long)m, (long long)k, tn_dtype_name(dtype));
    *out = layout;
    return TN_OK;
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
