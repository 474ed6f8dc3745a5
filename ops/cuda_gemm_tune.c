/* Timing what is offered for a shape, and telling what is chosen.
 *
 * A candidate's time is that of `turns` products in a row, from the moment when the GPU has done
 * `lead` products of it to the one when it has done the rest: the host has put all of them on the
 * stream by then, so that its own time does not count. If the lead is over before that, the GPU is
 * faster than the host launches (some 4 us): what is measured then is the host's time for both,
 * which the product's own is no longer than. Nothing is gained by another algorithm where the
 * first is bound by the host so.
 *
 * All of them take turns in each round and the median of the rounds counts, so that a clock that
 * changes meanwhile is nobody's advantage. Who is SLOW times the best in the first round is out.
 * Another than the first offer must be faster by more than what such times differ by anyway.
 */
#include "cuda_gemm.h"

#include <string.h>

enum { ROUNDS = 5, TURNS_MIN = 4, TURNS_MAX = 100, LEAD_MIN = 2, LEAD_MAX = 200 };

static const double turns_us = 1000.0; /* a round of a candidate lasts so long */
static const double launch_us = 5.0;   /* the host needs at most, for each of the turns */
static const double slow = 1.25;
static const double margin = 0.995;

/* ---- one time ------------------------------------------------------------------------------- */

typedef struct timer {
    const tn__gemm_preparation *by;
    const tn__gemm_work *work;
    tn__gemm_placed placed;
    tn_stream stream;
    tn__event begin, end;
} timer;

static int count_of(double total_us, double each_us, int least, int most) {
    double count = total_us / (each_us > 0.1 ? each_us : 0.1);
    return count < least ? least : count > most ? most : (int)count;
}

static cublasStatus_t repeat(const timer *t, int candidate, int turns) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < turns && status == CUBLAS_STATUS_SUCCESS; i++)
        status = tn__gemm_multiply(t->by, t->work, &t->placed, candidate, t->stream);
    return status;
}

/* us of one of `turns` products, or less than 0 if the candidate does not run; and whether that is
 * the host's time. */
static tn_status measure(const timer *t, int candidate, int lead, int turns, double *us,
                         int *is_host) {
    const tn__cuda_context *context = t->by->context;
    const tn__driver *driver = context->driver;
    tn__driver_device *state = context->state;
    *us = -1.0;
    if (repeat(t, candidate, lead) != CUBLAS_STATUS_SUCCESS) return TN_OK;
    TN_TRY(driver->event_record(state, t->begin, t->stream));
    double start = driver->now_us(state);
    if (repeat(t, candidate, turns) != CUBLAS_STATUS_SUCCESS) return TN_OK;
    TN_TRY(driver->event_record(state, t->end, t->stream));
    TN_TRY(driver->event_is_done(state, t->begin, is_host));
    if (!*is_host) {
        TN_TRY(driver->event_synchronize(state, t->begin));
        start = driver->now_us(state);
    }
    TN_TRY(driver->event_synchronize(state, t->end));
    *us = (driver->now_us(state) - start) / turns;
    if (*us <= 0.0) *us = 0.001; /* below what the clock tells, and measured */
    return TN_OK;
}

/* ---- all of them ---------------------------------------------------------------------------- */

typedef struct times {
    double rounds[TN__GEMM_CANDIDATES_MAX + 1][ROUNDS];
    double us[TN__GEMM_CANDIDATES_MAX + 1]; /* so far; less than 0: refused */
    int is_out[TN__GEMM_CANDIDATES_MAX + 1];
    int host_rounds[TN__GEMM_CANDIDATES_MAX + 1]; /* in which the host was measured */
} times;

/* Loads what is loaded at a first launch, and finds how often each is to be run. */
static tn_status warm(const timer *t, times *of) {
    int is_host = 0;
    for (int i = 0; i < t->by->plan->count; i++) {
        TN_TRY(measure(t, i, 1, 1, &of->us[i], &is_host));
        if (of->us[i] > 0.0) TN_TRY(measure(t, i, 1, LEAD_MIN, &of->us[i], &is_host));
        of->is_out[i] = of->us[i] < 0.0;
    }
    return TN_OK;
}

static double best_of(const times *of, int count) {
    double best = -1.0;
    for (int i = 0; i < count; i++) {
        if (of->us[i] > 0.0 && (best < 0.0 || of->us[i] < best)) best = of->us[i];
    }
    return best;
}

static tn_status one_round(const timer *t, int round, times *of) {
    for (int i = 0; i < t->by->plan->count; i++) {
        const double us = of->us[i];
        const int turns = count_of(turns_us, us, TURNS_MIN, TURNS_MAX);
        const int lead = count_of(launch_us * turns, us, LEAD_MIN, LEAD_MAX);
        int is_host = 0;
        if (of->is_out[i]) continue;
        TN_TRY(measure(t, i, lead, turns, &of->rounds[i][round], &is_host));
        of->host_rounds[i] += is_host;
        of->is_out[i] = of->rounds[i][round] < 0.0;
        if (round == 0 || of->is_out[i]) of->us[i] = of->rounds[i][round];
    }
    return TN_OK;
}

static void drop_slow(times *of, int count) {
    double best = best_of(of, count);
    for (int i = 0; i < count; i++)
        of->is_out[i] = of->is_out[i] || of->us[i] > slow * best;
}

static double median(double *values) {
    for (int i = 1; i < ROUNDS; i++) {
        double value = values[i];
        int at = i;
        for (; at > 0 && values[at - 1] > value; at--)
            values[at] = values[at - 1];
        values[at] = value;
    }
    return values[ROUNDS / 2];
}

static tn_status measure_all(const timer *t, times *of) {
    int count = t->by->plan->count;
    TN_TRY(warm(t, of));
    for (int round = 0; round < ROUNDS; round++) {
        TN_TRY(one_round(t, round, of));
        if (round == 0) drop_slow(of, count);
    }
    for (int i = 0; i < count; i++)
        if (!of->is_out[i]) of->us[i] = median(of->rounds[i]);
    return TN_OK;
}

/* The fastest; the first that runs, if that is as good as the fastest or as the host. */
static int choose(const times *of, int count) {
    double best = best_of(of, count);
    int first = 0;
    while (first < count && of->us[first] < 0.0)
        first++;
    if (first == count || of->us[first] * margin <= best) return first;
    if (of->host_rounds[first] > ROUNDS / 2) return first;
    for (int i = first; i < count; i++)
        if (of->us[i] == best) return i;
    return first;
}

static void keep(tn__gemm_preparation *by, const times *of, int chosen) {
    pthread_mutex_lock(&by->gemm->lock);
    for (int i = 0; i < by->plan->count; i++)
        by->plan->candidates[i].us = of->us[i];
    by->plan->chosen = chosen;
    by->plan->is_measured = 1;
    pthread_mutex_unlock(&by->gemm->lock);
}

/* ---- tuning --------------------------------------------------------------------------------- */

static tn_status time_plan(timer *t, tn__gemm_preparation *by) {
    times of;
    memset(&of, 0, sizeof of);
    TN_TRY(tn__gemm_place(by, t->work, t->stream, &t->placed));
    TN_TRY(measure_all(t, &of));
    int chosen = choose(&of, by->plan->count);
    if (chosen == by->plan->count) {
        char text[TN__BLAS_TEXT_BYTES];
        tn__blas_shape_text(&by->layout.shape, text);
        return TN_FAIL(TN_UNSUPPORTED, "none of the %d algorithms of cuBLASLt runs for %s",
                       by->plan->count, text);
    }
    keep(by, &of, chosen);
    return TN_OK;
}

static tn_status tune(tn__gemm_preparation *by, const tn__gemm_work *work, tn_stream stream) {
    const tn__driver *driver = by->context->driver;
    tn__driver_device *state = by->context->state;
    timer t = {.by = by, .work = work, .stream = stream};
    TN_REQUIRE(work->scratch_bytes >= by->layout.bytes + tn__gemm_plan_workspace(by->plan),
               "gemm got %zu bytes of scratch to tune with and needs %zu", work->scratch_bytes,
               by->layout.bytes + tn__gemm_plan_workspace(by->plan));
    TN_TRY(driver->event_create(state, &t.begin));
    tn_status status = driver->event_create(state, &t.end);
    if (status == TN_OK) {
        status = time_plan(&t, by);
        tn_status waited = driver->stream_synchronize(state, stream);
        if (status == TN_OK) status = waited;
        (void)driver->event_destroy(state, t.end);
    }
    (void)driver->event_destroy(state, t.begin);
    return status;
}

tn_status tn__cuda_gemm_tune(tn_device *device, const tn__gemm_work *work, tn_stream stream) {
    tn__gemm_preparation by;
    TN_TRY(tn__gemm_prepare(device, work, &by));
    tn_status status = tune(&by, work, stream);
    tn__gemm_unprepare(&by);
    return status;
}

/* ---- the choice ----------------------------------------------------------------------------- */

static int attribute_of(const tn__blas *blas, const cublasLtMatmulAlgo_t *algorithm,
                        cublasLtMatmulAlgoConfigAttributes_t which) {
    int32_t value = 0;
    uint16_t narrow = 0;
    size_t written = 0;
    if (which == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID) {
        (void)blas->MatmulAlgoConfigGetAttribute(algorithm, which, &narrow, sizeof narrow,
                                                 &written);
        return narrow;
    }
    (void)blas->MatmulAlgoConfigGetAttribute(algorithm, which, &value, sizeof value, &written);
    return value;
}

/* cuBLASLt's numbers: those of its enumerations in cublasLt.h. */
static void describe(const tn__blas *blas, const cublasLtMatmulAlgo_t *algorithm, char *text,
                     size_t bytes) {
    snprintf(text, bytes, "cuBLASLt %zu: algorithm %d, tile %d, stages %d, cluster %d, split %d",
             blas->GetVersion(), attribute_of(blas, algorithm, CUBLASLT_ALGO_CONFIG_ID),
             attribute_of(blas, algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
             attribute_of(blas, algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID),
             attribute_of(blas, algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
             attribute_of(blas, algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM));
}

static double time_of(const tn__gemm_candidate *candidate) {
    return candidate->us > 0.0 ? candidate->us : 0.0;
}

tn_status tn__cuda_gemm_choice(tn_device *device, const tn__gemm_work *work, tn_gemm_choice *out) {
    tn__gemm_preparation by;
    TN_TRY(tn__gemm_prepare(device, work, &by));
    const tn__gemm_candidate *chosen = &by.plan->candidates[by.chosen];
    tn_gemm_choice choice = {.size = sizeof choice,
                             .algorithm = by.chosen + 1,
                             .algorithms = by.plan->count,
                             .workspace_bytes = chosen->workspace_bytes,
                             .scratch_bytes = by.layout.bytes + chosen->workspace_bytes};
    pthread_mutex_lock(&by.gemm->lock);
    choice.is_measured = by.plan->is_measured;
    choice.us = time_of(chosen);
    choice.first_us = time_of(&by.plan->candidates[0]);
    pthread_mutex_unlock(&by.gemm->lock);
    describe(by.gemm->blas, &chosen->algorithm, choice.description, sizeof choice.description);
    tn__gemm_unprepare(&by);
    *out = choice;
    return TN_OK;
}
