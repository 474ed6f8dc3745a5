/* Dispatch among engines by time, for callers whom other numbers than the formats' own will do.
 *
 * tn_gemm_tune times whole calls of each engine that takes the operands, dequantization included,
 * in turns as algorithms are (cuda_gemm_tune.c), into a D of its own. The device keeps which one is
 * the fastest beside the plan of the formats' own engine; tn_gemm looks there if its caller allows
 * it. Nothing is taken by time that was not timed, and no other engine without being allowed.
 */
#include "op_gemm.h"

#include <string.h>

#include "driver.h"
#include "time_median.h"

enum { ROUNDS = 7, TURNS_MIN = 3, TURNS_MAX = 200 };
_Static_assert((int)ROUNDS <= (int)TN__MEDIAN_MAX, "the median takes all rounds");

static const double turn_us = 1500.0;
static const double margin = 0.99;

typedef struct contest {
    const tn__driver *driver;
    tn__driver_device *state;
    tn_stream stream;
    tn__event begin, end;
    tn_gemm_args args[TN_GEMM_ENGINE_COUNT];
    int turns[TN_GEMM_ENGINE_COUNT]; /* 0: the engine is not in it */
    double rounds[TN_GEMM_ENGINE_COUNT][ROUNDS];
} contest;

/* ---- one time ------------------------------------------------------------------------------- */

/* us of one of so many calls: the first of them is not among what is timed. */
static tn_status measure(const contest *of, const tn_gemm_args *args, int turns, double *us) {
    TN_TRY(tn_gemm(args, of->stream));
    TN_TRY(of->driver->event_record(of->state, of->begin, of->stream));
    for (int i = 0; i < turns; i++)
        TN_TRY(tn_gemm(args, of->stream));
    TN_TRY(of->driver->event_record(of->state, of->end, of->stream));
    TN_TRY(of->driver->event_synchronize(of->state, of->begin));
    const double start = of->driver->now_us(of->state);
    TN_TRY(of->driver->event_synchronize(of->state, of->end));
    *us = (of->driver->now_us(of->state) - start) / turns;
    return TN_OK;
}

static tn_status find_turns(contest *of, int engine) {
    double us = 0.0;
    TN_TRY(measure(of, &of->args[engine], TURNS_MIN, &us));
    const double turns = turn_us / (us > 1.0 ? us : 1.0);
    of->turns[engine] = turns < TURNS_MIN ? TURNS_MIN : turns > TURNS_MAX ? TURNS_MAX : (int)turns;
    return TN_OK;
}

static tn_status one_round(contest *of, int round) {
    for (int turn = 0; turn < 2 * TN_GEMM_ENGINE_COUNT; turn++) {
        const int i = turn < TN_GEMM_ENGINE_COUNT ? turn : 2 * TN_GEMM_ENGINE_COUNT - 1 - turn;
        double us = 0.0;
        if (of->turns[i] == 0) continue;
        TN_TRY(measure(of, &of->args[i], of->turns[i], &us));
        of->rounds[i][round] += us / 2.0;
    }
    return TN_OK;
}

/* The fastest; the formats' own if no other is faster by more than what times differ by. */
static tn_gemm_engine choose(const contest *of, tn_gemm_engine own) {
    tn_gemm_engine best = own;
    double least = margin;
    for (int i = 0; i < TN_GEMM_ENGINE_COUNT; i++) {
        double shares[ROUNDS];
        if (of->turns[i] == 0 || i == (int)own) continue;
        for (int round = 0; round < ROUNDS; round++)
            shares[round] = of->rounds[i][round] / of->rounds[own][round];
        const double share = tn__median(shares, ROUNDS);
        if (share >= least) continue;
        least = share;
        best = (tn_gemm_engine)i;
    }
    return best;
}

/* ---- all of them ---------------------------------------------------------------------------- */

/* The engines that take the operands, tuned, each with a call of its own into d. */
static tn_status invite(const tn_gemm_args *args, tn_gemm_engine own, tn_tensor d, contest *of) {
    tn__saved_error error;
    tn__error_save(&error);
    for (int i = TN_GEMM_ENGINE_AUTO + 1; i < TN_GEMM_ENGINE_COUNT; i++) {
        if (tn__gemm_is_among_own((tn_gemm_engine)i)) continue;
        tn_gemm_choice choice = TN_GEMM_CHOICE_INIT;
        of->args[i] = *args;
        /* What the formats' own plan has chosen, ours among it, where nothing is pinned. */
        of->args[i].engine = i == (int)own ? TN_GEMM_ENGINE_AUTO : (tn_gemm_engine)i;
        of->args[i].algorithm = 0;
        of->args[i].d = d;
        of->turns[i] = tn_gemm_choice_get(&of->args[i], &choice) == TN_OK;
        if (of->turns[i] && i != (int)own) TN_TRY(tn_gemm_tune(&of->args[i], of->stream));
    }
    tn__error_restore(&error);
    return TN_OK;
}

static tn_status run(contest *of) {
    for (int i = 0; i < TN_GEMM_ENGINE_COUNT; i++)
        if (of->turns[i]) TN_TRY(find_turns(of, i));
    for (int round = 0; round < ROUNDS; round++)
        TN_TRY(one_round(of, round));
    return TN_OK;
}

static tn_status with_events(contest *of) {
    TN_TRY(of->driver->event_create(of->state, &of->begin));
    tn_status status = of->driver->event_create(of->state, &of->end);
    if (status == TN_OK) {
        status = run(of);
        tn_status waited = of->driver->stream_synchronize(of->state, of->stream);
        if (status == TN_OK) status = waited;
        (void)of->driver->event_destroy(of->state, of->end);
    }
    (void)of->driver->event_destroy(of->state, of->begin);
    return status;
}

/* In d's place. What is added to is 0 at first, and only the products' times count. */
static tn_status make_d(const tn_gemm_args *args, const tn_tensor_info *d, tn_stream stream,
                        tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_plane_view view;
    tn_lease lease;
    config.dtype = d->dtype;
    config.rank = 2;
    config.shape[0] = d->rows, config.shape[1] = d->cols;
    config.name = "timed product";
    TN_TRY(tn_tensor_create(args->scope, &config, out));
    tn_status status = tn_lease_begin(*out, TN_PLANE_DATA, TN_WRITE, stream, &lease, &view);
    if (status == TN_OK) {
        status = tn_fill(tn_pool_device(d->pool), view.data, 0, view.layout.data_bytes, stream);
        tn_status ended = tn_lease_end(lease);
        if (status == TN_OK) status = ended;
    }
    if (status != TN_OK) (void)tn_tensor_destroy(*out, stream);
    return status;
}

tn_status tn__gemm_time_engines(const tn_gemm_args *args, tn_gemm_engine own,
                                const tn_tensor_info *d, tn_stream stream, tn_gemm_engine *out) {
    tn_device *device = tn_pool_device(d->pool);
    contest of;
    tn_gemm_args plain = *args;
    tn_tensor aside;
    memset(&of, 0, sizeof of);
    of.driver = tn__device_driver(device);
    of.state = tn__device_state(device);
    of.stream = stream;
    plain.epilogue = TN_GEMM_EPILOGUE_NONE; /* a pass that is the same for all */
    plain.pre = plain.dbias = (tn_tensor){0};
    plain.accumulate_dbias = 0;
    TN_TRY(make_d(args, d, stream, &aside));
    tn_status status = invite(&plain, own, aside, &of);
    if (status == TN_OK) status = with_events(&of);
    tn_status ended = tn_tensor_destroy(aside, stream);
    if (status == TN_OK) status = ended;
    if (status == TN_OK) *out = choose(&of, own);
    return status;
}
