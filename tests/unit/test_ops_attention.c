/* Attention and its gradient on the host: against softmax in double, against finite differences,
 * the order of the sums, and what infinities and NaN do. */
#include "ops_planes_support.h"

#include "exact_attention.h"
#include "tenure_attention.h"

#include <math.h>
#include <stdlib.h>

typedef struct shape {
    int64_t sequences, length, heads, heads_kv, head_dim;
    int is_causal;
} shape;

static const shape shapes[] = {{1, 1, 1, 1, 8, 0},    {1, 1, 2, 1, 16, 1},  {2, 7, 3, 3, 24, 1},
                               {3, 64, 2, 2, 64, 0},  {1, 65, 4, 2, 32, 1}, {2, 100, 4, 1, 72, 1},
                               {1, 193, 2, 1, 128, 0}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef struct fixture {
    test_ops ops;
    shape s;
    float scale;
    tn__matrix qkv, dy;
    tn_attention_forward_args forward;
    tn_attention_backward_args backward;
} fixture;

static int64_t tokens_of(const shape *s) { return s->sequences * s->length; }
static int64_t packed_of(const shape *s) { return (s->heads + 2 * s->heads_kv) * s->head_dim; }

/* Evenly in [-1, 1). */
static tn__matrix even_matrix(tn_dtype dtype, int64_t rows, int64_t cols, uint32_t seed) {
    tn__matrix matrix = test_matrix_make(dtype, rows, cols, seed);
    uint32_t state = seed * 2654435761u + 12345;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            state = state * 1664525u + 1013904223u;
            test_matrix_set(&matrix, r, c, (float)(state >> 8) * 0x1p-23f - 1.0f);
        }
    return matrix;
}

static void open_calls(fixture *f, tn_dtype dtype) {
    const shape *s = &f->s;
    const tn_scope scope = f->ops.scope;
    tn_attention_forward_args forward = TN_ATTENTION_FORWARD_ARGS_INIT;
    tn_attention_backward_args backward = TN_ATTENTION_BACKWARD_ARGS_INIT;
    forward.qkv = backward.qkv = test_tensor_of(&f->ops, scope, &f->qkv);
    forward.y = backward.y = test_plain(scope, dtype, tokens_of(s), s->heads * s->head_dim);
    forward.log_sum = backward.log_sum = test_plain(scope, TN_FP32, s->heads, tokens_of(s));
    forward.heads = backward.heads = s->heads;
    forward.heads_kv = backward.heads_kv = s->heads_kv == s->heads ? 0 : s->heads_kv;
    forward.sequence = backward.sequence = s->length;
    forward.is_causal = backward.is_causal = s->is_causal;
    backward.dy = test_tensor_of(&f->ops, scope, &f->dy);
    backward.dqkv = test_plain(scope, dtype, tokens_of(s), packed_of(s));
    backward.scope = scope;
    f->forward = forward, f->backward = backward;
}

static fixture open_fixture(tn_dtype dtype, shape s) {
    fixture f = {.ops = test_ops_open_host(), .s = s};
    f.scale = 1.0f / sqrtf((float)s.head_dim);
    f.qkv = even_matrix(dtype, tokens_of(&s), packed_of(&s), 3);
    f.dy = even_matrix(dtype, tokens_of(&s), s.heads * s.head_dim, 4);
    open_calls(&f, dtype);
    return f;
}

static void close_fixture(fixture *f) {
    test_matrix_free(&f->qkv), test_matrix_free(&f->dy);
    test_ops_close_host(&f->ops);
}

static void run(const fixture *f) {
    EXPECT_OK(tn_attention_forward(&f->forward, f->ops.stream));
    EXPECT_OK(tn_attention_backward(&f->backward, f->ops.stream));
}

/* ---- places in the packed tensor ----------------------------------------------------------- */

typedef enum part { QUERY, KEY, VALUE } part;

/* Column of element d of a head; of a query's head those of the keys and values that it reads. */
static int64_t column(const shape *s, part of, int64_t head, int64_t d) {
    const int64_t head_kv = head / (s->heads / s->heads_kv);
    const int64_t at = of == QUERY ? head
                       : of == KEY ? s->heads + head_kv
                                   : s->heads + s->heads_kv + head_kv;
    return at * s->head_dim + d;
}

static float packed(const fixture *f, part of, int64_t token, int64_t head, int64_t d) {
    return test_matrix_get(&f->qkv, token, column(&f->s, of, head, d));
}

static float dy_at(const fixture *f, int64_t token, int64_t head, int64_t d) {
    return test_matrix_get(&f->dy, token, head * f->s.head_dim + d);
}

/* Keys that query i of a sequence sees. */
static int64_t seen(const shape *s, int64_t i) { return s->is_causal ? i + 1 : s->length; }

/* ---- in double ----------------------------------------------------------------------------- */

typedef struct reference {
    double *weight; /* of one query: [length] */
    double log_sum;
} reference;

static void weigh(const fixture *f, int64_t first, int64_t i, int64_t head, reference *r) {
    double largest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < seen(&f->s, i); j++) {
        double score = 0;
        for (int64_t d = 0; d < f->s.head_dim; d++)
            score +=
                (double)packed(f, QUERY, first + i, head, d) * packed(f, KEY, first + j, head, d);
        r->weight[j] = score * (double)f->scale;
        largest = fmax(largest, r->weight[j]);
    }
    for (int64_t j = 0; j < seen(&f->s, i); j++)
        sum += r->weight[j] = exp(r->weight[j] - largest);
    for (int64_t j = 0; j < seen(&f->s, i); j++)
        r->weight[j] /= sum;
    r->log_sum = largest + log(sum);
}

/* What an output is, and of what size the terms of its sum are. */
typedef struct wanted {
    double *value, *size;
} wanted;

static wanted make_wanted(int64_t count) {
    wanted w = {calloc((size_t)count, sizeof(double)), calloc((size_t)count, sizeof(double))};
    assert_true(w.value && w.size);
    return w;
}

static void end_wanted(wanted *w) {
    free(w->value);
    free(w->size);
}

static void add_sized(wanted *w, int64_t at, double term, double size) {
    w->value[at] += term;
    w->size[at] += fabs(size);
}
static void add(wanted *w, int64_t at, double term) { add_sized(w, at, term, term); }

static double half_ulp(tn_dtype dtype) {
    return dtype == TN_FP32 ? 0x1p-24 : dtype == TN_BF16 ? 0x1p-8 : 0x1p-11;
}

/* `bound` is that of fp32's sums, in units of the terms' sizes; one rounding comes at the end. */
static void expect_near(const tn__matrix *got, const wanted *w, double bound) {
    const double rounding = half_ulp(got->dtype);
    for (int64_t r = 0; r < got->rows; r++)
        for (int64_t c = 0; c < got->cols; c++) {
            const int64_t at = r * got->cols + c;
            const double error = fabs(test_matrix_get(got, r, c) - w->value[at]);
            const double most = bound * w->size[at] + rounding * fabs(w->value[at]) + 0x1p-25;
            if (!(error <= most))
                fail_msg("(%lld, %lld) is %g off %g, at most %g", (long long)r, (long long)c, error,
                         w->value[at], most);
        }
}

static void want_y(const fixture *f, wanted *y, wanted *log_sum) {
    const shape *s = &f->s;
    reference r = {malloc((size_t)s->length * sizeof(double)), 0};
    for (int64_t token = 0; token < tokens_of(s); token++)
        for (int64_t head = 0; head < s->heads; head++) {
            const int64_t i = token % s->length, first = token - i;
            weigh(f, first, i, head, &r);
            add(log_sum, head * tokens_of(s) + token, r.log_sum);
            for (int64_t j = 0; j < seen(s, i); j++)
                for (int64_t d = 0; d < s->head_dim; d++)
                    add(y, (token * s->heads + head) * s->head_dim + d,
                        r.weight[j] * packed(f, VALUE, first + j, head, d));
        }
    free(r.weight);
}

/* What query `i` gives to the gradients, from the y that forward has left. */
static void want_of_query(const fixture *f, const tn__matrix *y, int64_t first, int64_t i,
                          int64_t head, const reference *r, wanted *dqkv) {
    const shape *s = &f->s;
    const int64_t cols = packed_of(s), token = first + i;
    double dot = 0, dot_size = 0;
    for (int64_t d = 0; d < s->head_dim; d++) {
        const double term =
            (double)dy_at(f, token, head, d) * test_matrix_get(y, token, head * s->head_dim + d);
        dot += term, dot_size += fabs(term);
    }
    for (int64_t j = 0; j < seen(s, i); j++) {
        double product = 0, size = dot_size;
        for (int64_t d = 0; d < s->head_dim; d++) {
            const double term =
                (double)dy_at(f, token, head, d) * packed(f, VALUE, first + j, head, d);
            product += term, size += fabs(term);
        }
        const double factor = r->weight[j] * (double)f->scale;
        for (int64_t d = 0; d < s->head_dim; d++) {
            const double k = factor * packed(f, KEY, first + j, head, d);
            const double q = factor * packed(f, QUERY, token, head, d);
            add_sized(dqkv, token * cols + column(s, QUERY, head, d), k * (product - dot),
                      k * size);
            add_sized(dqkv, (first + j) * cols + column(s, KEY, head, d), q * (product - dot),
                      q * size);
            add(dqkv, (first + j) * cols + column(s, VALUE, head, d),
                r->weight[j] * dy_at(f, token, head, d));
        }
    }
}

static void test_both_directions_are_near_those_in_double(void **state) {
    (void)state;
    for (int i = 0; i < 3 * SHAPES; i++) {
        const tn_dtype dtype = (tn_dtype)(TN_FP32 + i % 3);
        fixture f = open_fixture(dtype, shapes[i / 3]);
        const shape *s = &f.s;
        const int64_t tokens = tokens_of(s);
        wanted y = make_wanted(tokens * s->heads * s->head_dim), dqkv;
        wanted log_sum = make_wanted(tokens * s->heads);
        reference r = {malloc((size_t)s->length * sizeof(double)), 0};
        run(&f);
        tn__matrix got = test_fetch_matrix(&f.ops, f.forward.y);
        tn__matrix got_sum = test_fetch_matrix(&f.ops, f.forward.log_sum);
        tn__matrix got_dqkv = test_fetch_matrix(&f.ops, f.backward.dqkv);
        want_y(&f, &y, &log_sum);
        expect_near(&got, &y, 1e-6);
        expect_near(&got_sum, &log_sum, 1e-6);
        dqkv = make_wanted(tokens * packed_of(s));
        for (int64_t token = 0; token < tokens; token++)
            for (int64_t head = 0; head < s->heads; head++) {
                weigh(&f, token - token % s->length, token % s->length, head, &r);
                want_of_query(&f, &got, token - token % s->length, token % s->length, head, &r,
                              &dqkv);
            }
        expect_near(&got_dqkv, &dqkv, 4e-6);
        free(r.weight);
        end_wanted(&y), end_wanted(&log_sum), end_wanted(&dqkv);
        test_matrix_free(&got), test_matrix_free(&got_sum), test_matrix_free(&got_dqkv);
        close_fixture(&f);
    }
}

/* ---- finite differences -------------------------------------------------------------------- */

/* The sum of dy * y for this qkv. */
static double loss_of(const fixture *f, const tn__matrix *qkv) {
    tn_attention_forward_args forward = f->forward;
    double loss = 0;
    forward.qkv = test_tensor_of(&f->ops, f->ops.scope, qkv);
    forward.y = test_plain(f->ops.scope, TN_FP32, f->dy.rows, f->dy.cols);
    forward.log_sum.value = 0;
    EXPECT_OK(tn_attention_forward(&forward, f->ops.stream));
    tn__matrix y = test_fetch_matrix(&f->ops, forward.y);
    for (int64_t r = 0; r < y.rows; r++)
        for (int64_t c = 0; c < y.cols; c++)
            loss += (double)test_matrix_get(&f->dy, r, c) * test_matrix_get(&y, r, c);
    test_matrix_free(&y);
    EXPECT_OK(tn_tensor_destroy(forward.qkv, f->ops.stream));
    EXPECT_OK(tn_tensor_destroy(forward.y, f->ops.stream));
    return loss;
}

/* Both ways along a direction of signs, in the columns of queries, of keys, or of values: what the
 * loss changes by is what the gradient says. */
static void expect_slope(const fixture *f, const tn__matrix *gradient, part of, uint32_t seed) {
    const double step = 0x1p-7;
    const shape *s = &f->s;
    const int64_t first = column(s, of, 0, 0);
    const int64_t end = of == QUERY ? column(s, KEY, 0, 0)
                        : of == KEY ? column(s, VALUE, 0, 0)
                                    : packed_of(s);
    tn__matrix sign = even_matrix(TN_FP32, f->qkv.rows, f->qkv.cols, seed);
    double want = 0, size = 0, loss[2];
    for (int side = 0; side < 2; side++) {
        tn__matrix moved = even_matrix(TN_FP32, f->qkv.rows, f->qkv.cols, seed);
        for (int64_t r = 0; r < moved.rows; r++)
            for (int64_t c = 0; c < moved.cols; c++) {
                const float d =
                    c < first || c >= end ? 0.0f : copysignf(1.0f, test_matrix_get(&sign, r, c));
                test_matrix_set(&moved, r, c,
                                test_matrix_get(&f->qkv, r, c) + (side ? 1 : -1) * (float)step * d);
                if (side == 0) want += (double)test_matrix_get(gradient, r, c) * d;
                if (side == 0 && d != 0.0f) size += fabs((double)test_matrix_get(gradient, r, c));
            }
        loss[side] = loss_of(f, &moved);
        test_matrix_free(&moved);
    }
    const double got = (loss[1] - loss[0]) / (2 * step);
    if (!(fabs(got - want) <= 1e-3 * size + 1e-6))
        fail_msg("part %d: slope %g, expected %g of %g", (int)of, got, want, size);
    test_matrix_free(&sign);
}

static void test_gradients_are_those_of_finite_differences(void **state) {
    (void)state;
    for (int i = 0; i < SHAPES; i++) {
        fixture f = open_fixture(TN_FP32, shapes[i]);
        run(&f);
        tn__matrix gradient = test_fetch_matrix(&f.ops, f.backward.dqkv);
        for (uint32_t seed = 1; seed <= 6; seed++)
            expect_slope(&f, &gradient, (part)(seed % 3), seed);
        test_matrix_free(&gradient);
        close_fixture(&f);
    }
}

/* ---- the order of the sums, in fp32 --------------------------------------------------------- */

enum { LENGTH_MAX = 193, HEAD_MAX = 128, SUMS = 16, BLOCK = 64 };

static float total(float *sum) {
    for (int apart = SUMS / 2; apart > 0; apart /= 2)
        for (int b = 0; b < apart; b++)
            sum[b] += sum[b + apart];
    return sum[0];
}

static float score_in_order(const fixture *f, int64_t query, int64_t key, int64_t head) {
    float score = 0;
    for (int64_t d = 0; d < f->s.head_dim; d++)
        score = fmaf(packed(f, QUERY, query, head, d), packed(f, KEY, key, head, d), score);
    return f->scale * score;
}

/* A row of y and its log_sum, as the header has them. */
static float row_in_order(const fixture *f, int64_t first, int64_t i, int64_t head, float *out) {
    float sum[SUMS] = {0}, score[LENGTH_MAX], before = -INFINITY;
    memset(out, 0, HEAD_MAX * sizeof *out);
    for (int64_t block = 0; block < seen(&f->s, i); block += BLOCK) {
        const int64_t end = tn__least(block + BLOCK, seen(&f->s, i));
        float largest = before;
        for (int64_t j = block; j < end; j++) {
            score[j] = score_in_order(f, first + i, first + j, head);
            if (score[j] > largest) largest = score[j];
        }
        const float factor = tn__exact_exp_minus(largest - before);
        for (int b = 0; b < SUMS; b++)
            sum[b] *= factor;
        for (int64_t d = 0; d < f->s.head_dim; d++)
            out[d] *= factor;
        for (int64_t j = block; j < end; j++) {
            const float weight = tn__exact_exp_minus(largest - score[j]);
            sum[j % SUMS] += weight;
            for (int64_t d = 0; d < f->s.head_dim; d++)
                out[d] = fmaf(weight, packed(f, VALUE, first + j, head, d), out[d]);
        }
        before = largest;
    }
    const float all = total(sum);
    for (int64_t d = 0; d < f->s.head_dim; d++)
        out[d] /= all;
    return before + tn__exact_log(all);
}

typedef struct slopes {
    float weight, slope;
} slopes;

static slopes slope_in_order(const fixture *f, const tn__matrix *y, const tn__matrix *log_sum,
                             int64_t query, int64_t key, int64_t head) {
    const int64_t head_dim = f->s.head_dim;
    float dots[SUMS] = {0}, product = 0;
    for (int64_t d = 0; d < head_dim; d++) {
        const float dy = dy_at(f, query, head, d);
        dots[d % SUMS] = fmaf(dy, test_matrix_get(y, query, head * head_dim + d), dots[d % SUMS]);
        product = fmaf(dy, packed(f, VALUE, key, head, d), product);
    }
    const float below = test_matrix_get(log_sum, head, query) - score_in_order(f, query, key, head);
    slopes of = {tn__exact_exp_minus(below < 0 ? 0 : below), 0};
    of.slope = of.weight * (product - total(dots));
    return of;
}

/* The gradients of one key of one head of keys, and of its value. */
static void key_in_order(const fixture *f, const tn__matrix *y, const tn__matrix *log_sum,
                         int64_t first, int64_t j, int64_t head_kv, float *dk, float *dv) {
    const int64_t each = f->s.heads / f->s.heads_kv;
    memset(dk, 0, HEAD_MAX * sizeof *dk);
    memset(dv, 0, HEAD_MAX * sizeof *dv);
    for (int64_t head = head_kv * each; head < (head_kv + 1) * each; head++)
        for (int64_t i = 0; i < f->s.length; i++) {
            if (j >= seen(&f->s, i)) continue;
            const slopes of = slope_in_order(f, y, log_sum, first + i, first + j, head);
            for (int64_t d = 0; d < f->s.head_dim; d++) {
                dk[d] = fmaf(of.slope, packed(f, QUERY, first + i, head, d), dk[d]);
                dv[d] = fmaf(of.weight, dy_at(f, first + i, head, d), dv[d]);
            }
        }
    for (int64_t d = 0; d < f->s.head_dim; d++)
        dk[d] *= f->scale;
}

static void expect_row(const tn__matrix *got, int64_t row, int64_t col, const float *want,
                       int64_t count) {
    for (int64_t d = 0; d < count; d++)
        if (test_matrix_get(got, row, col + d) != want[d])
            fail_msg("(%lld, %lld) is %a, expected %a", (long long)row, (long long)(col + d),
                     (double)test_matrix_get(got, row, col + d), (double)want[d]);
}

static void expect_in_order(const fixture *f) {
    const shape *s = &f->s;
    tn__matrix y = test_fetch_matrix(&f->ops, f->forward.y);
    tn__matrix log_sum = test_fetch_matrix(&f->ops, f->forward.log_sum);
    tn__matrix dqkv = test_fetch_matrix(&f->ops, f->backward.dqkv);
    for (int64_t token = 0; token < tokens_of(s); token += 1 + s->length / 9) {
        const int64_t i = token % s->length, first = token - i;
        float want[HEAD_MAX], other[HEAD_MAX];
        for (int64_t head = 0; head < s->heads; head++) {
            const float of_sum = row_in_order(f, first, i, head, want);
            assert_true(test_matrix_get(&log_sum, head, token) == of_sum);
            expect_row(&y, token, head * s->head_dim, want, s->head_dim);
            memset(want, 0, sizeof want);
            for (int64_t j = 0; j < seen(s, i); j++) {
                const slopes of = slope_in_order(f, &y, &log_sum, token, first + j, head);
                for (int64_t d = 0; d < s->head_dim; d++)
                    want[d] = fmaf(of.slope, packed(f, KEY, first + j, head, d), want[d]);
            }
            for (int64_t d = 0; d < s->head_dim; d++)
                want[d] *= f->scale;
            expect_row(&dqkv, token, column(s, QUERY, head, 0), want, s->head_dim);
        }
        for (int64_t head_kv = 0; head_kv < s->heads_kv; head_kv++) {
            const int64_t head = head_kv * (s->heads / s->heads_kv);
            key_in_order(f, &y, &log_sum, first, i, head_kv, want, other);
            expect_row(&dqkv, token, column(s, KEY, head, 0), want, s->head_dim);
            expect_row(&dqkv, token, column(s, VALUE, head, 0), other, s->head_dim);
        }
    }
    test_matrix_free(&y), test_matrix_free(&log_sum), test_matrix_free(&dqkv);
}

static void test_sums_have_the_order_of_the_header(void **state) {
    (void)state;
    for (int i = 0; i < SHAPES; i++) {
        fixture f = open_fixture(TN_FP32, shapes[i]);
        if (i % 2) f.scale = f.forward.scale = f.backward.scale = 0.375f;
        run(&f);
        expect_in_order(&f);
        close_fixture(&f);
    }
}

/* ---- what is not finite -------------------------------------------------------------------- */

static void set(fixture *f, part of, int64_t token, float value) {
    for (int64_t d = 0; d < f->s.head_dim; d++)
        test_matrix_set(&f->qkv, token, column(&f->s, of, 0, d), value);
    test_write(&f->ops, f->forward.qkv, f->qkv.data);
}

static int is_row(const tn__matrix *y, int64_t token, int (*is)(float value)) {
    for (int64_t c = 0; c < y->cols; c++)
        if (!is(test_matrix_get(y, token, c))) return 0;
    return 1;
}
static int is_nan_value(float value) { return isnan(value); }
static int is_finite_value(float value) { return isfinite(value); }

/* Token 70 is NaN, or infinite: queries before it are what they were, and neither is their
 * gradient. */
static void test_what_a_query_does_not_see_changes_nothing(void **state) {
    static const float values[] = {NAN, INFINITY, -INFINITY};
    const shape s = {1, 100, 1, 1, 16, 1};
    (void)state;
    for (int i = 0; i < 9; i++) {
        fixture f = open_fixture(TN_FP32, s);
        run(&f);
        tn__matrix before = test_fetch_matrix(&f.ops, f.forward.y);
        set(&f, (part)(i / 3), 70, values[i % 3]);
        run(&f);
        tn__matrix after = test_fetch_matrix(&f.ops, f.forward.y);
        tn__matrix dqkv = test_fetch_matrix(&f.ops, f.backward.dqkv);
        const size_t bytes = 70 * (size_t)s.head_dim * sizeof(float);
        assert_memory_equal(before.data, after.data, bytes);
        assert_false(is_row(&after, 70, is_finite_value));
        for (int64_t token = 0; token < 70; token++)
            for (int64_t d = 0; d < s.head_dim; d++)
                assert_true(isfinite(test_matrix_get(&dqkv, token, column(&s, QUERY, 0, d))));
        if (i / 3 == QUERY) assert_true(is_row(&after, 71, is_finite_value));
        if (i / 3 == KEY && i % 3 == 0) assert_true(is_row(&after, 71, is_nan_value));
        test_matrix_free(&before), test_matrix_free(&after), test_matrix_free(&dqkv);
        close_fixture(&f);
    }
}

/* Scores of -infinity have no weight, be they a whole block of keys; if all are, all is NaN. */
static void test_scores_of_minus_infinity_have_no_weight(void **state) {
    const shape s = {1, 66, 1, 1, 8, 0};
    fixture f = open_fixture(TN_FP32, s);
    (void)state;
    for (int64_t token = 0; token < 66; token++)
        set(&f, QUERY, token, token == 5 ? -1.0f : 0x1p100f);
    for (int64_t token = 0; token < 65; token++)
        set(&f, KEY, token, -0x1p100f);
    set(&f, KEY, 65, 0.0f);
    EXPECT_OK(tn_attention_forward(&f.forward, f.ops.stream));
    tn__matrix y = test_fetch_matrix(&f.ops, f.forward.y);
    tn__matrix log_sum = test_fetch_matrix(&f.ops, f.forward.log_sum);
    for (int64_t d = 0; d < 8; d++)
        assert_true(test_matrix_get(&y, 0, d) == packed(&f, VALUE, 65, 0, d));
    assert_true(test_matrix_get(&log_sum, 0, 0) == 0.0f);
    assert_true(is_row(&y, 5, is_finite_value)); /* large finite scores */
    test_matrix_free(&y), test_matrix_free(&log_sum);
    set(&f, KEY, 65, -0x1p100f);
    EXPECT_OK(tn_attention_forward(&f.forward, f.ops.stream));
    y = test_fetch_matrix(&f.ops, f.forward.y);
    log_sum = test_fetch_matrix(&f.ops, f.forward.log_sum);
    assert_true(is_row(&y, 0, is_nan_value) && isnan(test_matrix_get(&log_sum, 0, 0)));
    assert_true(is_row(&y, 5, is_finite_value));
    set(&f, KEY, 1, 0x1p100f); /* a score of +infinity */
    EXPECT_OK(tn_attention_forward(&f.forward, f.ops.stream));
    test_matrix_free(&y);
    y = test_fetch_matrix(&f.ops, f.forward.y);
    assert_true(is_row(&y, 0, is_nan_value));
    test_matrix_free(&y), test_matrix_free(&log_sum);
    close_fixture(&f);
}

/* Any log_sum at all: no weight is above 1. */
static void test_a_log_sum_of_nonsense_does_no_more_than_spoil_the_result(void **state) {
    static const float values[] = {0.0f, -1e30f, 1e30f, -INFINITY, INFINITY, NAN};
    const shape s = {1, 9, 2, 1, 8, 1};
    fixture f = open_fixture(TN_FP32, s);
    (void)state;
    EXPECT_OK(tn_attention_forward(&f.forward, f.ops.stream));
    tn__matrix log_sum = test_fetch_matrix(&f.ops, f.forward.log_sum);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        for (int64_t c = 0; c < log_sum.cols; c++)
            test_matrix_set(&log_sum, 1, c, values[i]);
        test_write(&f.ops, f.backward.log_sum, log_sum.data);
        EXPECT_OK(tn_attention_backward(&f.backward, f.ops.stream));
        tn__matrix dqkv = test_fetch_matrix(&f.ops, f.backward.dqkv);
        for (int64_t t = 0; t < 9; t++)
            for (int64_t d = 0; d < 8; d++) {
                assert_true(isfinite(test_matrix_get(&dqkv, t, column(&s, QUERY, 0, d))));
                const float of_value = test_matrix_get(&dqkv, t, column(&s, VALUE, 0, d));
                assert_true(isnan(values[i]) ? isnan(of_value) : fabsf(of_value) <= 18.0f);
            }
        test_matrix_free(&dqkv);
    }
    test_matrix_free(&log_sum);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_directions_are_near_those_in_double),
        cmocka_unit_test(test_gradients_are_those_of_finite_differences),
        cmocka_unit_test(test_sums_have_the_order_of_the_header),
        cmocka_unit_test(test_what_a_query_does_not_see_changes_nothing),
        cmocka_unit_test(test_scores_of_minus_infinity_have_no_weight),
        cmocka_unit_test(test_a_log_sum_of_nonsense_does_no_more_than_spoil_the_result),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
