/* What attention and its gradient on the host are made of: tiles of 64 tokens of one head in fp32,
 * and their products. tenure_attention.h has the order of the sums.
 *
 * A tile is [64 tokens][128 elements], of which those beyond head_dim stay 0; a turned one is
 * [128][64]. Tiles lie on the stack of the stream's thread. All is forced inline into two clones of
 * each direction (host_simd.h).
 */
#ifndef TENURE_HOST_ATTENTION_TILE_H
#define TENURE_HOST_ATTENTION_TILE_H

#include <math.h>
#include <string.h>

#include "exact_attention.h"
#include "host_kernels.h"
#include "host_number.h"
#include "tenure_attention.h"

enum {
    TN__HOST_TOKENS = TN__ATTENTION_TILE,
    TN__HOST_HEAD = TN_ATTENTION_HEAD_DIM_MAX,
    TN__HOST_LANES = 32 /* sums that are made at once */
};

typedef float tn__head_tile[TN__HOST_TOKENS][TN__HOST_HEAD];
typedef float tn__turned_tile[TN__HOST_HEAD][TN__HOST_TOKENS];
typedef float tn__score_tile[TN__HOST_TOKENS][TN__HOST_TOKENS];

/* What each row of a product takes of the contracted dimension. */
typedef struct tn__row_range {
    int first, end;
} tn__row_range;
typedef tn__row_range tn__row_ranges[TN__HOST_TOKENS];

/* Queries `query` ... of a sequence, and keys `key` ...; both tiles begin at multiples of 64. */
typedef struct tn__tile_pair {
    int64_t query, key;
    int queries, keys;
} tn__tile_pair;

static inline tn__tile_pair tn__tile_pair_of(const tn__attention_work *work, int64_t query,
                                             int64_t key) {
    const int64_t length = work->sequence;
    tn__tile_pair pair = {query, key, (int)tn__least(TN__HOST_TOKENS, length - query),
                          (int)tn__least(TN__HOST_TOKENS, length - key)};
    return pair;
}

/* The keys that each query sees, and the queries that see each key. */
static inline void tn__ranges_of_queries(const tn__attention_work *work, const tn__tile_pair *pair,
                                         tn__row_ranges ranges) {
    const int is_diagonal = work->is_causal && pair->query == pair->key;
    for (int i = 0; i < pair->queries; i++)
        ranges[i] = (tn__row_range){0, is_diagonal ? i + 1 : pair->keys};
}

static inline void tn__ranges_of_keys(const tn__attention_work *work, const tn__tile_pair *pair,
                                      tn__row_ranges ranges) {
    const int is_diagonal = work->is_causal && pair->query == pair->key;
    for (int j = 0; j < pair->keys; j++)
        ranges[j] = (tn__row_range){is_diagonal ? j : 0, pair->queries};
}

/* ---- loads ---------------------------------------------------------------------------------- */

/* Columns of a head in qkv: of queries, keys, or values. */
static inline int64_t tn__query_column(const tn__attention_work *work, int64_t head) {
    return head * work->head_dim;
}
static inline int64_t tn__key_column(const tn__attention_work *work, int64_t head_kv) {
    return (work->heads + head_kv) * work->head_dim;
}
static inline int64_t tn__value_column(const tn__attention_work *work, int64_t head_kv) {
    return (work->heads + work->heads_kv + head_kv) * work->head_dim;
}
static inline int64_t tn__packed_columns(const tn__attention_work *work) {
    return (work->heads + 2 * work->heads_kv) * work->head_dim;
}

/* `count` rows of a matrix of `cols` columns from (row, col) on. */
static inline void tn__load_head(const tn__attention_work *work, const void *data, int64_t cols,
                                 int64_t row, int64_t col, int count, tn__head_tile out) {
    for (int i = 0; i < count; i++)
        tn__load_floats(work->dtype, data, (row + i) * cols + col, work->head_dim, out[i]);
}

static inline void tn__turn(const tn__head_tile tile, int count, int64_t head_dim,
                            tn__turned_tile out) {
    for (int i = 0; i < count; i++)
        for (int64_t d = 0; d < head_dim; d++)
            out[d][i] = tile[i][d];
}

/* ---- products ------------------------------------------------------------------------------- */

/* out[r][c] = fmaf(a[r][k], b[k][c], out[r][c]) in rising k of the row's range, where a[r][k] is
 * a[r * a_row + k * a_step]; `width` columns, in whole groups of lanes. */
TN__INLINE void tn__add_products(const float *a, int a_row, int a_step, const float *b, int b_row,
                                 const tn__row_range *ranges, int rows, int width, float *out) {
    for (int r = 0; r < rows; r++) {
        for (int col = 0; col < width; col += TN__HOST_LANES) {
            float sum[TN__HOST_LANES], *to = out + (size_t)r * (size_t)b_row + col;
            memcpy(sum, to, sizeof sum);
            for (int k = ranges[r].first; k < ranges[r].end; k++) {
                const float factor = a[r * a_row + k * a_step];
                const float *from = b + (size_t)k * (size_t)b_row + col;
                for (int c = 0; c < TN__HOST_LANES; c++)
                    sum[c] = fmaf(factor, from[c], sum[c]);
            }
            memcpy(to, sum, sizeof sum);
        }
    }
}

/* Rows of one tile by those of a turned one: scores, from 0. */
TN__INLINE void tn__multiply_heads(const tn__head_tile rows, int count, const tn__turned_tile cols,
                                   int64_t head_dim, tn__score_tile out) {
    tn__row_ranges ranges;
    for (int r = 0; r < count; r++)
        ranges[r] = (tn__row_range){0, (int)head_dim};
    memset(out, 0, sizeof(tn__score_tile));
    tn__add_products(rows[0], TN__HOST_HEAD, 1, cols[0], TN__HOST_TOKENS, ranges, count,
                     TN__HOST_TOKENS, out[0]);
}

/* out[r] += sum over the row's range of factors[r][k] * tile[k]. */
TN__INLINE void tn__add_heads(const tn__score_tile factors, const tn__row_ranges ranges, int count,
                              const tn__head_tile tile, int64_t head_dim, tn__head_tile out) {
    const int width = ((int)head_dim + TN__HOST_LANES - 1) / TN__HOST_LANES * TN__HOST_LANES;
    tn__add_products(factors[0], TN__HOST_TOKENS, 1, tile[0], TN__HOST_HEAD, ranges, count, width,
                     out[0]);
}

/* Of the 16 sums of a row. */
TN__INLINE float tn__attention_total(const float *sums) {
    float left[TN__ATTENTION_SUMS];
    memcpy(left, sums, sizeof left);
    for (int apart = TN__ATTENTION_SUMS / 2; apart > 0; apart /= 2)
        for (int b = 0; b < apart; b++)
            left[b] = left[b] + left[b + apart];
    return left[0];
}

#endif
