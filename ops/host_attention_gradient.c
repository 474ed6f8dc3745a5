/* The gradient of attention on the host: that of the queries, 64 of a head at a time, and then
 * those of keys and values, 64 of a head at a time, each with the scores made anew.
 * tenure_attention.h has the formulas and the order of the sums. */
#include "host_attention_tile.h"

typedef struct backward {
    const tn__attention_work *work;
    int64_t first; /* token that the sequence begins with */
    tn__head_tile query, key, value, dy;
    tn__turned_tile turned[2];   /* of the tiles whose tokens are columns */
    tn__score_tile score, slope; /* weights, and what they are to the loss */
    tn__head_tile of_query;      /* or of keys: */
    tn__head_tile of_key, of_value;
} backward;

static int64_t head_kv_of(const tn__attention_work *work, int64_t head) {
    return head / (work->heads / work->heads_kv);
}

TN__INLINE void load_queries(backward *b, int64_t head, int64_t query, int queries) {
    const tn__attention_work *work = b->work;
    const int64_t row = b->first + query, col = tn__query_column(work, head);
    tn__load_head(work, work->qkv, tn__packed_columns(work), row, col, queries, b->query);
    tn__load_head(work, work->dy, work->heads * work->head_dim, row, col, queries, b->dy);
}

TN__INLINE void load_keys(backward *b, int64_t head_kv, int64_t key, int keys) {
    const tn__attention_work *work = b->work;
    const int64_t row = b->first + key, cols = tn__packed_columns(work);
    tn__load_head(work, work->qkv, cols, row, tn__key_column(work, head_kv), keys, b->key);
    tn__load_head(work, work->qkv, cols, row, tn__value_column(work, head_kv), keys, b->value);
}

TN__INLINE void store_scaled(const backward *b, tn__head_tile tile, float scale, int64_t token,
                             int64_t col, int count) {
    const tn__attention_work *work = b->work;
    for (int i = 0; i < count; i++) {
        for (int64_t d = 0; d < work->head_dim; d++)
            tile[i][d] = scale * tile[i][d];
        tn__store_floats(work->dtype, work->dqkv,
                         (b->first + token + i) * tn__packed_columns(work) + col, work->head_dim,
                         tile[i]);
    }
}

/* Element (r, c) of both score tiles, of the query whose row statistics are at `query`. */
TN__INLINE void weigh(backward *b, int r, int c, int64_t query) {
    const tn__attention_work *work = b->work;
    const float score = work->scale * b->score[r][c];
    const float weight = tn__attention_weight(score, work->log_sum[query]);
    b->slope[r][c] = tn__attention_slope(weight, b->slope[r][c], work->dots[query]);
    b->score[r][c] = weight;
}

/* ---- of queries ---------------------------------------------------------------------------- */

TN__INLINE void make_dots(const tn__attention_work *work, int64_t token, int64_t head) {
    const int64_t at = (token * work->heads + head) * work->head_dim;
    float dy[TN__HOST_HEAD], y[TN__HOST_HEAD], sum[TN__ATTENTION_SUMS] = {0};
    tn__load_floats(work->dtype, work->dy, at, work->head_dim, dy);
    tn__load_floats(work->dtype, work->y, at, work->head_dim, y);
    for (int64_t d = 0; d < work->head_dim; d++) {
        float *to = &sum[d % TN__ATTENTION_SUMS];
        *to = fmaf(dy[d], y[d], *to);
    }
    work->dots[head * work->tokens + token] = tn__canonical(tn__attention_total(sum));
}

TN__INLINE void add_keys(backward *b, int64_t head, const tn__tile_pair *pair) {
    const tn__attention_work *work = b->work;
    const int64_t head_dim = work->head_dim;
    const int64_t statistics = head * work->tokens + b->first + pair->query;
    tn__row_ranges ranges;
    load_keys(b, head_kv_of(work, head), pair->key, pair->keys);
    tn__turn(b->key, pair->keys, head_dim, b->turned[0]);
    tn__turn(b->value, pair->keys, head_dim, b->turned[1]);
    tn__multiply_heads(b->query, pair->queries, b->turned[0], head_dim, b->score);
    tn__multiply_heads(b->dy, pair->queries, b->turned[1], head_dim, b->slope);
    tn__ranges_of_queries(work, pair, ranges);
    for (int i = 0; i < pair->queries; i++)
        for (int j = ranges[i].first; j < ranges[i].end; j++)
            weigh(b, i, j, statistics + i);
    tn__add_heads(b->slope, ranges, pair->queries, b->key, head_dim, b->of_query);
}

TN__INLINE void make_queries(backward *b, int64_t head, int64_t query) {
    const tn__attention_work *work = b->work;
    tn__tile_pair pair = tn__tile_pair_of(work, query, 0);
    const int64_t end = work->is_causal ? query + pair.queries : work->sequence;
    for (int i = 0; i < pair.queries; i++)
        make_dots(work, b->first + query + i, head);
    load_queries(b, head, query, pair.queries);
    memset(b->of_query, 0, sizeof b->of_query);
    for (int64_t key = 0; key < end; key += TN__HOST_TOKENS) {
        pair = tn__tile_pair_of(work, query, key);
        add_keys(b, head, &pair);
    }
    store_scaled(b, b->of_query, work->scale, query, tn__query_column(work, head), pair.queries);
}

/* ---- of keys and values -------------------------------------------------------------------- */

TN__INLINE void add_queries(backward *b, int64_t head, const tn__tile_pair *pair) {
    const tn__attention_work *work = b->work;
    const int64_t head_dim = work->head_dim;
    const int64_t statistics = head * work->tokens + b->first + pair->query;
    tn__row_ranges ranges;
    load_queries(b, head, pair->query, pair->queries);
    tn__turn(b->query, pair->queries, head_dim, b->turned[0]);
    tn__turn(b->dy, pair->queries, head_dim, b->turned[1]);
    tn__multiply_heads(b->key, pair->keys, b->turned[0], head_dim, b->score);
    tn__multiply_heads(b->value, pair->keys, b->turned[1], head_dim, b->slope);
    tn__ranges_of_keys(work, pair, ranges);
    for (int j = 0; j < pair->keys; j++)
        for (int i = ranges[j].first; i < ranges[j].end; i++)
            weigh(b, j, i, statistics + i);
    tn__add_heads(b->score, ranges, pair->keys, b->dy, head_dim, b->of_value);
    tn__add_heads(b->slope, ranges, pair->keys, b->query, head_dim, b->of_key);
}

TN__INLINE void make_keys(backward *b, int64_t head_kv, int64_t key) {
    const tn__attention_work *work = b->work;
    const int64_t each = work->heads / work->heads_kv;
    tn__tile_pair pair = tn__tile_pair_of(work, 0, key);
    load_keys(b, head_kv, key, pair.keys);
    memset(b->of_key, 0, sizeof b->of_key);
    memset(b->of_value, 0, sizeof b->of_value);
    for (int64_t head = head_kv * each; head < (head_kv + 1) * each; head++) {
        for (int64_t query = work->is_causal ? key : 0; query < work->sequence;
             query += TN__HOST_TOKENS) {
            pair = tn__tile_pair_of(work, query, key);
            add_queries(b, head, &pair);
        }
    }
    store_scaled(b, b->of_key, work->scale, key, tn__key_column(work, head_kv), pair.keys);
    store_scaled(b, b->of_value, 1.0f, key, tn__value_column(work, head_kv), pair.keys);
}

/* ---- all of it ----------------------------------------------------------------------------- */

TN__INLINE void gradient_body(const tn__attention_work *work) {
    backward b;
    memset(&b, 0, sizeof b);
    b.work = work;
    for (b.first = 0; b.first < work->tokens; b.first += work->sequence) {
        for (int64_t tile = 0; tile < work->sequence; tile += TN__HOST_TOKENS)
            for (int64_t head = 0; head < work->heads; head++)
                make_queries(&b, head, tile);
        for (int64_t tile = 0; tile < work->sequence; tile += TN__HOST_TOKENS)
            for (int64_t head_kv = 0; head_kv < work->heads_kv; head_kv++)
                make_keys(&b, head_kv, tile);
    }
}

static void gradient_narrow(const tn__attention_work *work) { gradient_body(work); }

#if TN__HAS_WIDE_CLONE
TN__WIDE_CLONE static void gradient_wide(const tn__attention_work *work) { gradient_body(work); }
#endif

void tn__host_attention_gradient(const tn__attention_work *work) {
#if TN__HAS_WIDE_CLONE
    if (tn__cpu_is_wide()) {
        gradient_wide(work);
        return;
    }
#endif
    gradient_narrow(work);
}
