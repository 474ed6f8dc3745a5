/* Casts of a part of a weight on the host: the definition. A tile row by row, and of each row what
 * the part holds. */
#include "host_grouped.h"
#include "host_number.h"

typedef struct tile_place {
    int64_t top, left, bottom, right;
} tile_place;

static tile_place tile_at(const tn__shard *s, int64_t row, int64_t col) {
    tile_place at = {row * TN__BLOCK, col * TN__BLOCK, 0, 0};
    at.bottom = tn__least(at.top + TN__BLOCK, s->rows);
    at.right = tn__least(at.left + TN__BLOCK, s->cols);
    return at;
}

/* Elements of row r of the tile that the part holds: their first number in the weight, and how
 * many. */
static int64_t held_in_row(const tn__shard *s, const tile_place *tile, int64_t r, int64_t *first) {
    int64_t from = r * s->cols + tile->left, to = r * s->cols + tile->right;
    *first = from > s->first ? from : s->first;
    to = tn__least(to, s->end);
    return to > *first ? to - *first : 0;
}

static float amax_of(const tn__shard *s, const tile_place *tile) {
    uint32_t amax = 0;
    for (int64_t r = tile->top; r < tile->bottom; r++) {
        float value[TN__BLOCK];
        int64_t first, count = held_in_row(s, tile, r, &first);
        if (count == 0) continue;
        tn__load_floats(s->src.dtype, s->src.data, first - s->first, count, value);
        for (int64_t i = 0; i < count; i++) {
            uint32_t magnitude = tn__bits_of(value[i]) & TN__FP32_MAGNITUDE;
            if (magnitude <= TN__FP32_INFINITY && magnitude > amax) amax = magnitude;
        }
    }
    return tn__float_of(amax);
}

static float amax_of_all(const tn__shard *s) {
    tn__shard as_row = {.src = s->src, .rows = 1, .cols = s->end - s->first};
    float amax = 0.0f;
    as_row.end = as_row.cols;
    for (int64_t col = 0; col < tn__units_of(as_row.cols, TN__BLOCK); col++) {
        tile_place tile = tile_at(&as_row, 0, col);
        float of_tile = amax_of(&as_row, &tile);
        if (of_tile > amax) amax = of_tile;
    }
    return amax;
}

void tn__host_shard_amax(const tn__shard_amax_work *work) {
    const tn__shard *s = &work->shard;
    if (work->is_whole) {
        *work->amax = amax_of_all(s);
        return;
    }
    int64_t down = tn__units_of(s->rows, TN__BLOCK), across = tn__units_of(s->cols, TN__BLOCK);
    for (int64_t row = 0; row < down; row++) {
        for (int64_t col = 0; col < across; col++) {
            tile_place tile = tile_at(s, row, col);
            work->amax[row * across + col] = amax_of(s, &tile);
        }
    }
}

static void cast_tile(const tn__shard_quantize_work *work, const tile_place *tile, float factor) {
    const tn__shard *s = &work->shard;
    for (int64_t r = tile->top; r < tile->bottom; r++) {
        float value[TN__BLOCK];
        int64_t first, count = held_in_row(s, tile, r, &first);
        if (count == 0) continue;
        tn__load_floats(s->src.dtype, s->src.data, first - s->first, count, value);
        for (int64_t i = 0; i < count; i++)
            value[i] *= factor;
        tn__store_floats(work->dtype, work->data, first - s->first, count, value);
    }
}

/* What pads the row of scales behind its last tile is 0. */
static void put_scale(const tn__shard_quantize_work *work, int64_t row, int64_t col, int64_t across,
                      float inverse) {
    int64_t stride = 4 * tn__units_of(across, 4);
    float *scales = work->scale + row * stride;
    scales[col] = inverse;
    for (int64_t i = across; col + 1 == across && i < stride; i++)
        scales[i] = 0.0f;
}

void tn__host_shard_quantize(const tn__shard_quantize_work *work) {
    const tn__shard *s = &work->shard;
    int64_t down = tn__units_of(s->rows, TN__BLOCK), across = tn__units_of(s->cols, TN__BLOCK);
    if (tn__host_is_skipped(work->skip)) return;
    for (int64_t row = 0; row < down; row++) {
        for (int64_t col = 0; col < across; col++) {
            tile_place tile = tile_at(s, row, col);
            tn__block_scale scale =
                tn__scale_of_amax(work->amax[row * across + col], work->amax_epsilon, work->dtype,
                                  s->src.dtype, work->scale_mode);
            cast_tile(work, &tile, scale.factor);
            if (work->scale) put_scale(work, row, col, across, scale.inverse);
        }
    }
}
