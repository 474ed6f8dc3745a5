/* Attention on the host: 64 queries of a head at a time, past which the keys and values go in tiles
 * of 64. tenure_attention.h has the formulas and the order of the sums. */
#include "host_attention_tile.h"

typedef struct forward {
    const tn__attention_work *work;
    int64_t head, first; /* token that the sequence begins with */
    tn__head_tile query, key, value, out;
    tn__turned_tile turned;
    tn__score_tile score;
    float largest[TN__HOST_TOKENS];
    float sum[TN__HOST_TOKENS][TN__ATTENTION_SUMS];
} forward;

/* Row i of the scores becomes weights; what was summed before is brought to the same base. */
TN__INLINE void weigh_row(forward *f, int i, int keys) {
    const int64_t head_dim = f->work->head_dim;
    float *score = f->score[i], largest = f->largest[i];
    for (int j = 0; j < keys; j++) {
        score[j] = f->work->scale * score[j];
        largest = tn__attention_larger(largest, score[j]);
    }
    const float base = tn__attention_base(largest);
    const float factor = tn__attention_rescale(f->largest[i], base);
    for (int b = 0; b < TN__ATTENTION_SUMS; b++)
        f->sum[i][b] = f->sum[i][b] * factor;
    for (int64_t d = 0; d < head_dim; d++)
        f->out[i][d] = f->out[i][d] * factor;
    for (int j = 0; j < keys; j++)
        score[j] = tn__attention_weight(score[j], base);
    for (int j = 0; j < keys; j++)
        f->sum[i][j % TN__ATTENTION_SUMS] += score[j];
    f->largest[i] = largest;
}

TN__INLINE void add_keys(forward *f, const tn__tile_pair *pair) {
    const tn__attention_work *work = f->work;
    const int64_t cols = tn__packed_columns(work), row = f->first + pair->key;
    const int64_t head_kv = f->head / (work->heads / work->heads_kv);
    tn__row_ranges ranges;
    tn__load_head(work, work->qkv, cols, row, tn__key_column(work, head_kv), pair->keys, f->key);
    tn__load_head(work, work->qkv, cols, row, tn__value_column(work, head_kv), pair->keys,
                  f->value);
    tn__turn(f->key, pair->keys, work->head_dim, f->turned);
    tn__ranges_of_queries(work, pair, ranges);
    tn__multiply_heads(f->query, pair->queries, f->turned, work->head_dim, f->score);
    for (int i = 0; i < pair->queries; i++)
        weigh_row(f, i, ranges[i].end);
    tn__add_heads(f->score, ranges, pair->queries, f->value, work->head_dim, f->out);
}

TN__INLINE void store_queries(forward *f, int64_t query, int queries) {
    const tn__attention_work *work = f->work;
    for (int i = 0; i < queries; i++) {
        const int64_t token = f->first + query + i;
        const float sum = tn__attention_total(f->sum[i]);
        for (int64_t d = 0; d < work->head_dim; d++)
            f->out[i][d] = f->out[i][d] / sum;
        tn__store_floats(work->dtype, work->y, (token * work->heads + f->head) * work->head_dim,
                         work->head_dim, f->out[i]);
        if (work->log_sum)
            work->log_sum[f->head * work->tokens + token] =
                tn__canonical(tn__attention_log_sum(tn__attention_base(f->largest[i]), sum));
    }
}

TN__INLINE void attend(forward *f, int64_t query) {
    const tn__attention_work *work = f->work;
    tn__tile_pair pair = tn__tile_pair_of(work, query, 0);
    const int64_t end = work->is_causal ? query + pair.queries : work->sequence;
    tn__load_head(work, work->qkv, tn__packed_columns(work), f->first + query,
                  tn__query_column(work, f->head), pair.queries, f->query);
    memset(f->out, 0, sizeof f->out);
    memset(f->sum, 0, sizeof f->sum);
    for (int i = 0; i < TN__HOST_TOKENS; i++)
        f->largest[i] = -INFINITY;
    for (int64_t key = 0; key < end; key += TN__HOST_TOKENS) {
        pair = tn__tile_pair_of(work, query, key);
        add_keys(f, &pair);
    }
    store_queries(f, query, pair.queries);
}

TN__INLINE void attention_body(const tn__attention_work *work) {
    forward f;
    memset(&f, 0, sizeof f);
    f.work = work;
    for (f.first = 0; f.first < work->tokens; f.first += work->sequence)
        for (f.head = 0; f.head < work->heads; f.head++)
            for (int64_t query = 0; query < work->sequence; query += TN__HOST_TOKENS)
                attend(&f, query);
}

static void attention_narrow(const tn__attention_work *work) { attention_body(work); }

#if TN__HAS_WIDE_CLONE
TN__WIDE_CLONE static void attention_wide(const tn__attention_work *work) { attention_body(work); }
#endif

void tn__host_attention(const tn__attention_work *work) {
#if TN__HAS_WIDE_CLONE
    if (tn__cpu_is_wide()) {
        attention_wide(work);
        return;
    }
#endif
    attention_narrow(work);
}
