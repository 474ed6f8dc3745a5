/* Quantization to the formats other than blocks of 128 on the host: the definition.
 *
 *     TENSOR   one factor: of the whole tensor's amax, or given (delayed scaling)
 *     MXFP8    blocks of 32 along a row (ROW) or a column (COL), which is not stored turned
 *     NVFP4    blocks of 16 likewise, COL stored turned, or of 16 x 16; and a scale of the tensor
 *
 * The source is read in bands: one row for a ROW plane of MXFP8, else as many rows as a block has,
 * by 128 columns. The padding of scales is not written here.
 */
#include "host_kernels.h"
#include "host_number.h"

#include <math.h>

enum { BAND_ROWS = TN__MXFP8_BLOCK, BAND_COLS = TN__BLOCK };

/* Some columns of the source's rows `top` and after. */
typedef struct band {
    int64_t top, left;
    int rows, cols;
    float value[BAND_ROWS][BAND_COLS];
} band;

static void load_band(const tn__matrix *src, int64_t top, int64_t left, int rows, band *b) {
    b->top = top, b->left = left;
    b->rows = (int)tn__least(rows, src->rows - top);
    b->cols = (int)tn__least(BAND_COLS, src->cols - left);
    for (int r = 0; r < b->rows; r++)
        tn__load_floats(src->dtype, src->data, (top + r) * src->cols + left, b->cols, b->value[r]);
}

/* Calls `take` for all bands of so many rows, in order. */
typedef void (*band_function)(const tn__quantize_work *work, const band *b, void *state);

static void for_each_band(const tn__quantize_work *work, int rows, band_function take,
                          void *state) {
    band b;
    for (int64_t top = 0; top < work->src.rows; top += rows) {
        for (int64_t left = 0; left < work->src.cols; left += BAND_COLS) {
            load_band(&work->src, top, left, rows, &b);
            take(work, &b, state);
        }
    }
}

static void raise_amax(const tn__quantize_work *work, const band *b, void *state) {
    uint32_t *amax = state;
    (void)work;
    for (int r = 0; r < b->rows; r++) {
        uint32_t of_row = tn__host_row_amax(b->value[r], b->cols);
        *amax = of_row > *amax ? of_row : *amax;
    }
}

static float amax_of(const tn__quantize_work *work) {
    uint32_t amax = 0;
    for_each_band(work, BAND_ROWS, raise_amax, &amax);
    return tn__float_of(amax);
}

/* ---- one scale for the tensor --------------------------------------------------------------- */

static void cast_band(const tn__quantize_work *work, const band *b, void *state) {
    const float *factor = state;
    float scaled[BAND_COLS];
    uint8_t code[BAND_COLS];
    for (int r = 0; r < b->rows; r++) {
        const int64_t row = b->top + r;
        for (int c = 0; c < b->cols; c++)
            scaled[c] = b->value[r][c] * *factor;
        tn__host_encode(work, (tn__run){row, b->left, 0}, b->cols, scaled, code);
        for (int c = 0; c < b->cols; c++) {
            const int64_t col = b->left + c;
            if (work->has_row) ((uint8_t *)work->row.data)[row * work->src.cols + col] = code[c];
            if (work->has_col) ((uint8_t *)work->col.data)[col * work->src.rows + row] = code[c];
        }
    }
}

/* As numbers of 32 bits, which is how an atomic maximum compares them. */
static void raise_to(float *amax, float value) {
    if ((int32_t)tn__bits_of(value) > (int32_t)tn__bits_of(*amax)) *amax = value;
}

static void quantize_tensor(const tn__quantize_work *work) {
    int is_read = !work->whole_amax && (!work->factor || work->amax);
    float amax = is_read ? amax_of(work) : 0.0f;
    if (work->whole_amax) amax = *work->whole_amax;
    tn__block_scale scale =
        tn__scale_of_amax(amax, work->amax_epsilon, work->dtype, TN_FP32, work->scale_mode);
    if (work->factor) scale.factor = *work->factor;
    if (work->factor) scale.inverse = tn__canonical(1.0f / scale.factor);
    for_each_band(work, BAND_ROWS, cast_band, &scale.factor);
    if (work->has_row) *work->row.global_scale = scale.inverse;
    if (work->has_col) *work->col.global_scale = scale.inverse;
    if (work->amax) raise_to(work->amax, amax);
}

/* ---- blocks --------------------------------------------------------------------------------- */

/* A block, taken out of its row or column, and what becomes of it. */
typedef struct block {
    tn__run run;
    int count;
    float value[BAND_ROWS];
    uint8_t code[BAND_ROWS];
    uint8_t scale;
} block;

static block row_block(const band *b, int r, int first, int size) {
    block out = {.run = {b->top + r, b->left + first, 0},
                 .count = (int)tn__least(size, b->cols - first)};
    memcpy(out.value, &b->value[r][first], (size_t)out.count * sizeof *out.value);
    return out;
}

static block col_block(const band *b, int c) {
    block out = {.run = {b->top, b->left + c, 1}, .count = b->rows};
    for (int r = 0; r < b->rows; r++)
        out.value[r] = b->value[r][c];
    return out;
}

static uint8_t *scale_at(const tn_plane_view *view, int64_t row, int64_t col) {
    return (uint8_t *)view->scale + row * view->layout.scale_stride + col;
}

/* ---- MXFP8 ---------------------------------------------------------------------------------- */

/* The scale is amax / max_of_format in fp32 (by the rounded reciprocal), rounded up to a power of
 * two: no element saturates but an infinite one. */
static void encode_mxfp8(const tn__quantize_work *work, block *b) {
    float amax = tn__float_of(tn__host_row_amax(b->value, b->count));
    if (amax < work->amax_epsilon) amax = work->amax_epsilon;
    b->scale = tn__float_to_e8m0_up(amax * (1.0f / tn__dtype_max(work->dtype)));
    float factor = tn__e8m0_inverse(b->scale);
    for (int i = 0; i < b->count; i++)
        b->value[i] *= factor;
    tn__host_encode(work, b->run, b->count, b->value, b->code);
}

static void mxfp8_rows(const tn__quantize_work *work, const band *b, void *state) {
    const tn_plane_view *row = &work->row;
    (void)state;
    for (int first = 0; first < b->cols; first += TN__MXFP8_BLOCK) {
        block one = row_block(b, 0, first, TN__MXFP8_BLOCK);
        int64_t left = b->left + first;
        encode_mxfp8(work, &one);
        memcpy((uint8_t *)row->data + b->top * work->src.cols + left, one.code, (size_t)one.count);
        *scale_at(row, b->top, left / TN__MXFP8_BLOCK) = one.scale;
    }
}

static void mxfp8_cols(const tn__quantize_work *work, const band *b, void *state) {
    const tn_plane_view *col = &work->col;
    (void)state;
    for (int c = 0; c < b->cols; c++) {
        block one = col_block(b, c);
        encode_mxfp8(work, &one);
        for (int r = 0; r < one.count; r++)
            ((uint8_t *)col->data)[(b->top + r) * work->src.cols + b->left + c] = one.code[r];
        *scale_at(col, b->top / TN__MXFP8_BLOCK, b->left + c) = one.scale;
    }
}

/* ---- NVFP4 ---------------------------------------------------------------------------------- */

/* The tensor's: its amax becomes 6 * 448, the largest element times the largest scale. */
static tn__block_scale nvfp4_global_scale(float amax) {
    tn__block_scale scale = {1.0f, 1.0f};
    if (amax == 0.0f || isinf(amax)) return scale;
    scale.factor = fminf(2688.0f / amax, tn__dtype_max(TN_FP32));
    scale.inverse = 1.0f / scale.factor;
    return scale;
}

static float block_amax(const block *b) {
    return tn__float_of(tn__host_row_amax(b->value, b->count));
}

/* Of the 16 columns of the band that begin at `first`. */
static float square_amax(const band *b, int first) {
    float amax = 0.0f;
    for (int r = 0; r < b->rows; r++) {
        block row = row_block(b, r, first, TN__NVFP4_BLOCK);
        amax = fmaxf(amax, block_amax(&row));
    }
    return amax;
}

static void encode_nvfp4(const tn__quantize_work *work, const tn__block_scale *global, float amax,
                         block *b) {
    b->scale = tn__float_to_e4m3(amax / 6.0f * global->factor);
    float stored = tn__fp8_values(TN_E4M3)[b->scale] * global->inverse;
    float factor = fminf(1.0f / stored, tn__dtype_max(TN_FP32)); /* the stored scale may be 0 */
    for (int i = 0; i < b->count; i++)
        b->value[i] *= factor;
    tn__host_encode(work, b->run, b->count, b->value, b->code);
}

/* Two to a byte, the first in the low half; after an odd one, 0. */
static void put_nvfp4(const tn_plane_view *view, int64_t row, int64_t col, const block *b) {
    uint8_t *to = (uint8_t *)view->data + (size_t)row * view->layout.row_bytes + col / 2;
    for (int i = 0; i < b->count; i += 2)
        to[i / 2] = (uint8_t)(b->code[i] | (i + 1 < b->count ? b->code[i + 1] << 4 : 0));
    *scale_at(view, row, col / TN__NVFP4_BLOCK) = b->scale;
}

static void nvfp4_rows(const tn__quantize_work *work, const band *b, void *state) {
    for (int first = 0; first < b->cols; first += TN__NVFP4_BLOCK) {
        const float amax = work->square_blocks ? square_amax(b, first) : 0.0f;
        for (int r = 0; r < b->rows; r++) {
            block one = row_block(b, r, first, TN__NVFP4_BLOCK);
            encode_nvfp4(work, state, work->square_blocks ? amax : block_amax(&one), &one);
            put_nvfp4(&work->row, b->top + r, b->left + first, &one);
        }
    }
}

static void nvfp4_cols(const tn__quantize_work *work, const band *b, void *state) {
    for (int c = 0; c < b->cols; c++) {
        block one = col_block(b, c);
        const int first = c / TN__NVFP4_BLOCK * TN__NVFP4_BLOCK;
        encode_nvfp4(work, state, work->square_blocks ? square_amax(b, first) : block_amax(&one),
                     &one);
        put_nvfp4(&work->col, b->left + c, b->top, &one);
    }
}

static void quantize_nvfp4(const tn__quantize_work *work) {
    float amax = amax_of(work);
    tn__block_scale global =
        nvfp4_global_scale(amax < work->amax_epsilon ? work->amax_epsilon : amax);
    if (work->has_row) for_each_band(work, TN__NVFP4_BLOCK, nvfp4_rows, &global);
    if (work->has_col) for_each_band(work, TN__NVFP4_BLOCK, nvfp4_cols, &global);
    if (work->has_row) *work->row.global_scale = global.inverse;
    if (work->has_col) *work->col.global_scale = global.inverse;
}

void tn__host_quantize_formats(const tn__quantize_work *work) {
    switch (work->format) {
    case TN_FORMAT_FP8_TENSOR: quantize_tensor(work); break;
    case TN_FORMAT_MXFP8:
        if (work->has_row) for_each_band(work, 1, mxfp8_rows, NULL);
        if (work->has_col) for_each_band(work, TN__MXFP8_BLOCK, mxfp8_cols, NULL);
        break;
    case TN_FORMAT_NVFP4: quantize_nvfp4(work); break;
    default: TN_CHECK(!"a format that has no cast");
    }
}

/* ---- delayed scaling ------------------------------------------------------------------------ */

/* Rolls the history of one tensor and gives the largest amax that was in it. */
static float roll(const tn__scale_update_work *work, int64_t column, float recent) {
    float *history = work->history + column;
    float amax = 0.0f;
    for (int64_t i = 0; i < work->length; i++) {
        float next = i + 1 < work->length ? history[(i + 1) * work->count] : recent;
        if (next > amax) amax = next;
        history[i * work->count] = i > 0 ? next : 0.0f;
    }
    return amax;
}

void tn__host_scale_update(const tn__scale_update_work *work) {
    if (tn__host_is_skipped(work->skip)) return;
    for (int64_t column = 0; column < work->count; column++) {
        float recent = work->history[column];
        float most = roll(work, column, recent);
        float amax = work->is_most_recent ? recent : most;
        float scale = work->scale[column];
        if (isfinite(amax) && amax > 0.0f) scale = work->target / amax;
        work->scale[column] = isinf(scale) ? tn__dtype_max(TN_FP32) : scale;
    }
}
