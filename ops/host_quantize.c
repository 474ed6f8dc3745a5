/* Quantization to block-scaled FP8 on the host: the definition, and the oracle for CUDA.
 *
 * The source is read once, in tiles of 128 x 128, each of which holds whole blocks of every kind:
 *
 *                 128 columns
 *           +-----------------+
 *           |=================|  1D ROW: each row of the tile is a block
 *           |||||||||||||||||||  1D COL: each column of the tile is a block
 *       128 |        #        |  2D: the tile is the block
 *           +-----------------+
 *
 * At the edges the tile is smaller and its blocks cover only what is there. The COL plane is
 * stored turned, so a tile is quantized into a buffer and written column by column.
 */
#include "host_kernels.h"
#include "host_number.h"

typedef struct tile {
    int64_t top, left; /* in the source */
    int rows, cols;
    float value[TN__BLOCK][TN__BLOCK];
    uint8_t code[TN__BLOCK][TN__BLOCK];
} tile;

static void place_tile(const tn__matrix *src, int64_t top, int64_t left, tile *t) {
    t->top = top, t->left = left;
    t->rows = (int)tn__least(TN__BLOCK, src->rows - top);
    t->cols = (int)tn__least(TN__BLOCK, src->cols - left);
}

/* The source as it lies in memory. */
static void load_row(void *context, int64_t row, int64_t col, int count, float *out) {
    const tn__matrix *src = context;
    tn__load_floats(src->dtype, src->data, row * src->cols + col, count, out);
}

uint32_t tn__host_row_amax(const float *value, int64_t count) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = tn__magnitude_of(value[i]);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

static void col_amaxes(const tile *t, uint32_t amax[TN__BLOCK]) {
    memset(amax, 0, TN__BLOCK * sizeof *amax);
    for (int r = 0; r < t->rows; r++) {
        for (int c = 0; c < t->cols; c++) {
            uint32_t magnitude = tn__magnitude_of(t->value[r][c]);
            amax[c] = magnitude > amax[c] ? magnitude : amax[c];
        }
    }
}

static tn__block_scale scale_of(const tn__quantize_work *work, uint32_t amax) {
    return tn__scale_of_amax(tn__float_of(amax), work->amax_epsilon, work->dtype, work->src.dtype,
                             work->scale_mode);
}

static void encode_row(const tn__quantize_work *work, tile *t, int r, const float *factor) {
    float scaled[TN__BLOCK];
    for (int c = 0; c < t->cols; c++)
        scaled[c] = t->value[r][c] * factor[c];
    tn__host_encode(work, (tn__run){t->top + r, t->left, 0}, t->cols, scaled, t->code[r]);
}

static void fill_floats(float *out, float value, int count) {
    for (int i = 0; i < count; i++)
        out[i] = value;
}

/* ---- writing a tile of codes ---------------------------------------------------------------- */

static void write_row_codes(const tile *t, const tn_plane_view *row) {
    uint8_t *out = row->data;
    for (int r = 0; r < t->rows; r++) {
        memcpy(out + (t->top + r) * row->layout.cols + t->left, t->code[r], (size_t)t->cols);
    }
}

static void write_col_codes(const tile *t, const tn_plane_view *col) {
    for (int c = 0; c < t->cols; c++) {
        uint8_t *out = (uint8_t *)col->data + (t->left + c) * col->layout.cols + t->top;
        for (int r = 0; r < t->rows; r++)
            out[r] = t->code[r][c];
    }
}

/* ---- the three kinds of block --------------------------------------------------------------- */

static void quantize_row_1d(const tn__quantize_work *work, tile *t) {
    float factor[TN__BLOCK] = {0};
    float *scale = tn__scale_row(&work->row, t->left / TN__BLOCK) + t->top;
    for (int r = 0; r < t->rows; r++) {
        tn__block_scale block = scale_of(work, tn__host_row_amax(t->value[r], t->cols));
        scale[r] = block.inverse;
        fill_floats(factor, block.factor, t->cols);
        encode_row(work, t, r, factor);
    }
    write_row_codes(t, &work->row);
}

static void quantize_col_1d(const tn__quantize_work *work, tile *t) {
    uint32_t amax[TN__BLOCK];
    float factor[TN__BLOCK] = {0};
    float *scale = tn__scale_row(&work->col, t->top / TN__BLOCK) + t->left;
    col_amaxes(t, amax);
    for (int c = 0; c < t->cols; c++) {
        tn__block_scale block = scale_of(work, amax[c]);
        scale[c] = block.inverse;
        factor[c] = block.factor;
    }
    for (int r = 0; r < t->rows; r++)
        encode_row(work, t, r, factor);
    write_col_codes(t, &work->col);
}

static void quantize_2d(const tn__quantize_work *work, tile *t) {
    float factor[TN__BLOCK] = {0};
    uint32_t amax = 0;
    int64_t tile_row = t->top / TN__BLOCK, tile_col = t->left / TN__BLOCK;
    for (int r = 0; r < t->rows; r++) {
        uint32_t of_row = tn__host_row_amax(t->value[r], t->cols);
        amax = of_row > amax ? of_row : amax;
    }
    tn__block_scale block = scale_of(work, amax);
    fill_floats(factor, block.factor, t->cols);
    for (int r = 0; r < t->rows; r++)
        encode_row(work, t, r, factor);
    if (work->has_row) {
        tn__scale_row(&work->row, tile_row)[tile_col] = block.inverse;
        write_row_codes(t, &work->row);
    }
    if (work->has_col) {
        tn__scale_row(&work->col, tile_col)[tile_row] = block.inverse;
        write_col_codes(t, &work->col);
    }
}

static void quantize_tile(const tn__quantize_work *work, tile *t) {
    if (work->format == TN_FORMAT_FP8_BLOCK_2D) {
        if (work->has_row || work->has_col) quantize_2d(work, t);
        return;
    }
    if (work->has_row) quantize_row_1d(work, t);
    if (work->has_col) quantize_col_1d(work, t);
}

static void quantize_tiles(const tn__quantize_work *work, tn__make_row make, void *context) {
    tile t;
    for (int64_t top = 0; top < work->src.rows; top += TN__BLOCK) {
        for (int64_t left = 0; left < work->src.cols; left += TN__BLOCK) {
            place_tile(&work->src, top, left, &t);
            for (int r = 0; r < t.rows; r++)
                make(context, top + r, left, t.cols, t.value[r]);
            quantize_tile(work, &t);
        }
    }
}

void tn__host_zero_scale_padding(const tn_plane_view *view) {
    const tn_plane_layout *layout = &view->layout;
    size_t item_bytes = tn_dtype_bytes(layout->scale_dtype);
    size_t row_bytes = (size_t)layout->scale_stride * item_bytes;
    size_t valid_bytes = (size_t)layout->scale_cols * item_bytes;
    char *scale = view->scale;
    for (int64_t row = 0; row < layout->scale_padded_rows; row++, scale += row_bytes) {
        size_t from = row < layout->scale_rows ? valid_bytes : 0;
        memset(scale + from, 0, row_bytes - from);
    }
    if (view->global_scale && (char *)view->global_scale == scale)
        memset(view->global_scale + 1, 0, 3 * sizeof *view->global_scale);
}

static void zero_padding(const tn__quantize_work *work) {
    if (work->has_row) tn__host_zero_scale_padding(&work->row);
    if (work->has_col) tn__host_zero_scale_padding(&work->col);
}

void tn__host_quantize_made(const tn__quantize_work *work, tn__make_row make, void *context) {
    quantize_tiles(work, make, context);
    zero_padding(work);
}

void tn__host_quantize(const tn__quantize_work *work) {
    tn__matrix src = work->src;
    if (tn__host_is_skipped(work->skip)) return;
    if (work->format == TN_FORMAT_FP8_BLOCK_1D || work->format == TN_FORMAT_FP8_BLOCK_2D)
        quantize_tiles(work, load_row, &src);
    else
        tn__host_quantize_formats(work);
    zero_padding(work);
    if (work->random) work->random->offset++;
}

/* ---- the transpose of a plane, of tiles or of a whole tensor that share a scale ------------- */

static void transpose_scales(const tn_plane_view *from, const tn_plane_view *to) {
    for (int64_t row = 0; row < from->layout.scale_rows; row++) {
        for (int64_t col = 0; col < from->layout.scale_cols; col++)
            tn__scale_row(to, col)[row] = tn__scale_row(from, row)[col];
    }
    tn__host_zero_scale_padding(to);
}

static void transpose_bytes(const tn_plane_view *from, const tn_plane_view *to, int64_t top,
                            int64_t left) {
    int64_t bottom = tn__least(top + TN__BLOCK, from->layout.rows);
    int64_t right = tn__least(left + TN__BLOCK, from->layout.cols);
    const uint8_t *in = from->data;
    uint8_t *out = to->data;
    for (int64_t c = left; c < right; c++) {
        for (int64_t r = top; r < bottom; r++) {
            out[c * to->layout.cols + r] = in[r * from->layout.cols + c];
        }
    }
}

void tn__host_transpose(const tn__transpose_work *work) {
    const tn_plane_view *from = &work->from, *to = &work->to;
    for (int64_t top = 0; top < from->layout.rows; top += TN__BLOCK) {
        for (int64_t left = 0; left < from->layout.cols; left += TN__BLOCK) {
            transpose_bytes(from, to, top, left);
        }
    }
    transpose_scales(from, to);
}
