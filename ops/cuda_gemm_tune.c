/* Timing what is offered for a shape, and telling what is chosen.
 *
 * A candidate's time is that of `turns` products in a row, from the moment when the GPU has done
 * `lead` products of it to the one when it has done the rest: the host has put all of them on the
 * stream by then, so that its own time does not count. If the lead is over before that, the GPU is
 * faster than the host launches (some 4 us): what is measured then is the host's time for both,
 * which the product's own is no longer than. Nothing is gained by another algorithm where the
 * first is bound by the host so.
 *
 * A GPU at its limit of power lowers its clock within milliseconds, and by more than algorithms
 * differ. So they are compared within a round only, in which each has two turns, one right after
 * the other there and back, so that what changes evenly is the same for all; and each by what its
 * time is to that of the first offer in the same round, of which the median over the rounds counts.
 * Before, the GPU is brought to the clock that it has under such load.
 *
 *     glance    each a few products: who is `slow` times the best is out
 *     sift      few short rounds of those that are left: the best FINALISTS, within `close`
 *     final     more rounds, longer: these decide
 *
 * The first offer that runs is always there, and stays if no other is faster by more than what such
 * times differ by anyway. Operands and D are as warm in L2 as a product leaves them.
 */
#include "cuda_gemm.h"

#include <string.h>

#include "time_median.h"

enum { SIFT_ROUNDS = 3, FINAL_ROUNDS = 9, FINALISTS = 10 };
_Static_assert((int)FINAL_ROUNDS <= (int)TN__MEDIAN_MAX, "the median takes all rounds");
enum { TURNS_MIN = 2, TURNS_MAX = 400, LEAD_MIN = 1, LEAD_MAX = 400 };

static const double glance_us = 200.0; /* what each is measured for, by stage */
static const double sift_us = 500.0;
static const double final_us = 2000.0;
static const double warm_us = 30000.0; /* of load before the first round */
static const double launch_us = 5.0;   /* the host needs at most, for each of the turns */
static const double us_least = 0.001;  /* that a file can hold */
static const double slow = 1.25;
static const double close = 1.05;
static const double margin = 0.99;

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
    if (*us < us_least) *us = us_least; /* below what the clock tells, and measured */
    return TN_OK;
}

/* ---- all of them ---------------------------------------------------------------------------- */

typedef struct times {
    double rounds[TN__GEMM_CANDIDATES_MAX + 1][FINAL_ROUNDS]; /* of this stage: us of two turns */
    double us[TN__GEMM_CANDIDATES_MAX + 1];                   /* so far; less than 0: refused */
    double share[TN__GEMM_CANDIDATES_MAX + 1]; /* of the time of the first that runs */
    int is_out[TN__GEMM_CANDIDATES_MAX + 1];
    int host_turns[TN__GEMM_CANDIDATES_MAX + 1]; /* turns in which the host was measured */
    int first;                                   /* that runs */
} times;

/* Loads what is loaded at a first launch, and finds how often each is to be run. */
static tn_status glance(const timer *t, times *of) {
    const int count = t->by->plan->count;
    double best = -1.0;
    int is_host = 0;
    for (int i = 0; i < count; i++) {
        double *us = &of->us[i];
        TN_TRY(measure(t, i, 1, 1, us, &is_host));
        if (*us > 0.0) {
            const int turns = count_of(glance_us, *us, LEAD_MIN, TURNS_MAX);
            TN_TRY(measure(t, i, 1, turns, us, &is_host));
        }
        if (*us > 0.0 && (best < 0.0 || *us < best)) best = *us;
    }
    of->first = 0;
    while (of->first < count && of->us[of->first] < 0.0)
        of->first++;
    for (int i = 0; i < count; i++)
        of->is_out[i] = of->us[i] < 0.0 || (of->us[i] > slow * best && i != of->first);
    return TN_OK;
}

static tn_status warm(const timer *t, const times *of) {
    double us = 0.0;
    int is_host = 0;
    const int turns = count_of(warm_us, of->us[of->first], TURNS_MIN, 10 * TURNS_MAX);
    return measure(t, of->first, LEAD_MIN, turns, &us, &is_host);
}

static tn_status measure_turn(const timer *t, int candidate, int round, double long_us, times *of) {
    const double us = of->us[candidate];
    const int turns = count_of(long_us, us, TURNS_MIN, TURNS_MAX);
    const int lead = count_of(launch_us * turns, us, LEAD_MIN, LEAD_MAX);
    double measured = 0.0;
    int is_host = 0;
    TN_TRY(measure(t, candidate, lead, turns, &measured, &is_host));
    of->host_turns[candidate] += is_host;
    of->rounds[candidate][round] += measured;
    if (measured > 0.0) return TN_OK;
    of->is_out[candidate] = 1; /* it ran, and now it does not */
    of->us[candidate] = -1.0;
    return TN_OK;
}

static void sum_up(int count, int rounds, times *of) {
    double shares[FINAL_ROUNDS];
    for (int i = 0; i < count; i++) {
        if (of->is_out[i]) continue;
        for (int round = 0; round < rounds; round++)
            shares[round] = of->rounds[i][round] / of->rounds[of->first][round];
        of->share[i] = tn__median(shares, rounds);
        of->us[i] = tn__median(of->rounds[i], rounds) / 2;
    }
}

/* One stage: everybody who is not out. */
static tn_status run_rounds(const timer *t, int rounds, double long_us, times *of) {
    const int count = t->by->plan->count;
    memset(of->host_turns, 0, sizeof of->host_turns);
    memset(of->rounds, 0, sizeof of->rounds);
    for (int round = 0; round < rounds; round++) {
        for (int turn = 0; turn < 2 * count; turn++) {
            const int i = turn < count ? turn : 2 * count - 1 - turn;
            if (!of->is_out[i]) TN_TRY(measure_turn(t, i, round, long_us, of));
        }
        if (of->is_out[of->first])
            return TN_FAIL(TN_DRIVER_ERROR, "an algorithm that ran runs no longer");
    }
    sum_up(count, rounds, of);
    return TN_OK;
}

/* How many are faster. */
static int rank_of(const times *of, int count, int candidate) {
    int rank = 0;
    for (int i = 0; i < count; i++)
        rank += !of->is_out[i] && of->share[i] < of->share[candidate];
    return rank;
}

static void keep_finalists(int count, times *of) {
    int stays[TN__GEMM_CANDIDATES_MAX + 1];
    double best = 1.0;
    for (int i = 0; i < count; i++)
        if (!of->is_out[i] && of->share[i] < best) best = of->share[i];
    for (int i = 0; i < count; i++)
        stays[i] =
            !of->is_out[i] && of->share[i] <= close * best && rank_of(of, count, i) < FINALISTS;
    for (int i = 0; i < count; i++)
        of->is_out[i] = !stays[i] && i != of->first;
}

static tn_status measure_all(const timer *t, times *of) {
    const int count = t->by->plan->count;
    TN_TRY(glance(t, of));
    if (of->first == count) return TN_OK;
    TN_TRY(warm(t, of));
    TN_TRY(run_rounds(t, SIFT_ROUNDS, sift_us, of));
    keep_finalists(count, of);
    return run_rounds(t, FINAL_ROUNDS, final_us, of);
}

/* The fastest; the first that runs, if that is as good as the fastest or as the host. */
static int choose(const times *of, int count) {
    int best = of->first;
    if (of->first == count || of->host_turns[of->first] > FINAL_ROUNDS) return best;
    for (int i = 0; i < count; i++)
        if (!of->is_out[i] && of->share[i] < margin && of->share[i] < of->share[best]) best = i;
    return best;
}

/* Of who was out before the last stage: by its share in the stage before, if it had one, so that
 * all times are of one clock. */
static double comparable_us(const times *of, int candidate) {
    if (!of->is_out[candidate] || of->us[candidate] < 0.0) return of->us[candidate];
    return of->share[candidate] * of->us[of->first];
}

static void keep(tn__gemm_preparation *by, const times *of, int chosen) {
    pthread_mutex_lock(&by->gemm->lock);
    for (int i = 0; i < by->plan->count; i++)
        by->plan->candidates[i].us = comparable_us(of, i);
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
    const int chosen = choose(&of, by->plan->count);
    if (chosen == by->plan->count) {
        char text[TN__BLAS_TEXT_BYTES];
        tn__blas_shape_text(&by->layout.shape, text);
        return TN_FAIL(TN_UNSUPPORTED, "none of the %d algorithms runs for %s", by->plan->count,
                       text);
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
    tn__error_scope_begin(); /* one that does not run is passed over */
    tn_status status = tune(&by, work, stream);
    tn__gemm_unprepare(&by);
    return tn__error_scope_end(status);
}

tn_status tn__cuda_gemm_prefer(tn_device *device, const tn__gemm_work *work,
                               tn_gemm_engine engine) {
    tn__gemm_preparation by;
    TN_TRY(tn__gemm_prepare(device, work, &by));
    pthread_mutex_lock(&by.gemm->lock);
    by.plan->engine = engine;
    pthread_mutex_unlock(&by.gemm->lock);
    tn__gemm_unprepare(&by);
    return TN_OK;
}

/* ---- the choice ----------------------------------------------------------------------------- */

/* cuBLASLt's numbers: those of its enumerations in cublasLt.h. */
static void describe(const tn__blas *blas, const cublasLtMatmulAlgo_t *algorithm, char *text,
                     size_t bytes) {
    if (tn__gemm_is_own(algorithm)) {
        snprintf(text, bytes, "Tenure: wgmma, tile %d x %d", TN__WGMMA_ROWS, TN__WGMMA_COLS);
        return;
    }
    snprintf(text, bytes, "cuBLASLt %zu: algorithm %u, tile %u, stages %u, cluster %u, split %u",
             blas->GetVersion(), tn__gemm_attribute(blas, algorithm, CUBLASLT_ALGO_CONFIG_ID),
             tn__gemm_attribute(blas, algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
             tn__gemm_attribute(blas, algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID),
             tn__gemm_attribute(blas, algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
             tn__gemm_attribute(blas, algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM));
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
    if (work->may_differ) choice.engine = by.plan->engine;
    if (choice.engine == TN_GEMM_ENGINE_AUTO && tn__gemm_is_own(&chosen->algorithm))
        choice.engine = TN_GEMM_ENGINE_WGMMA;
    choice.is_measured = by.plan->is_measured;
    choice.us = time_of(chosen);
    choice.first_us = time_of(&by.plan->candidates[0]);
    pthread_mutex_unlock(&by.gemm->lock);
    describe(by.gemm->blas, &chosen->algorithm, choice.description, sizeof choice.description);
    tn__gemm_unprepare(&by);
    *out = choice;
    return TN_OK;
}
