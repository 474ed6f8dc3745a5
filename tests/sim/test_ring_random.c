/* Random programs on a ring, against a model of its own, on the simulated device with its race
 * detector: units of unlike sizes, acquires with and without scopes, leases on four streams that
 * stay open, shards that are written, gathers that fail, streams that stall.
 *
 *     sim_test_ring_random                       what ctest runs
 *     sim_test_ring_random SEED STEPS            one program, for as long as you like
 *     sim_test_ring_random --expect-failure      for builds in which a fault has been planted
 *
 * The model knows units, holds and versions of shards; of memory it knows only where each gather
 * went, and checks that nothing that is held lies there. After each step it compares everything
 * that can be asked of the ring.
 */
#include "ring_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNITS = 7, STREAMS = 4, HOLDS_MAX = 4, LEASES_MAX = 4, ROUND_STEPS = 2000 };

/* ---- the model ----------------------------------------------------------------------------- */

typedef struct model_unit {
    int holds, forsaken;
    int scoped[HOLDS_MAX]; /* of the holds that have not been forsaken, the newest last */
    int is_there;
    int is_wanted;
    uint64_t gathered; /* when; and when it began to be wanted */
    uint64_t wanted;
    unsigned version, gathered_version; /* of the shard */
    char *address;
    int leases;
} model_unit;

typedef struct open_lease {
    tn_lease lease;
    int unit;
} open_lease;

typedef struct world {
    ring_fixture f;
    model_unit units[UNITS];
    tn_stream streams[STREAMS];
    tn_scope step;
    open_lease leases[LEASES_MAX];
    int lease_count;
    int slots;
    uint64_t clock, gathers, displaced, abandoned;
    int fault; /* the next gather fails */
    uint64_t seed, random, at;
    uint64_t all_gathers, all_acquires, all_displaced, all_deferred, all_abandoned;
    size_t budget_bytes;
} world;

static int expects_failure;

#define DEMAND(w, condition) demand((w), (condition), #condition, __LINE__)

static void demand(const world *w, int holds, const char *what, int line) {
    if (holds) return;
    fprintf(stderr, "line %d: not so at step %llu: %s\nreplay: sim_test_ring_random %llu %llu\n",
            line, (unsigned long long)w->at, what, (unsigned long long)w->seed,
            (unsigned long long)w->at + 1);
    if (expects_failure) _Exit(0);
    exit(1);
}

static unsigned pick(world *w, unsigned below) {
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return (unsigned)((w->random >> 20) % below);
}

/* Most often one that is acquired, if there is any. */
static int pick_held(world *w) {
    int unit = (int)pick(w, UNITS), tries = pick(w, 8) ? UNITS : 0;
    for (; tries > 0 && w->units[unit].holds == 0; tries--)
        unit = (unit + 1) % UNITS;
    return unit;
}

static int count_there(const world *w) {
    int count = 0;
    for (int i = 0; i < UNITS; i++)
        count += w->units[i].is_there;
    return count;
}

static void on_gather(void *context, int unit, void *buffer) {
    world *w = context;
    w->units[unit].address = buffer;
}

/* TN_OK, or the failure that was asked for. */
static tn_status model_gather(world *w, int unit) {
    model_unit *of = &w->units[unit];
    of->is_there = 0;
    if (w->fault) {
        w->fault = 0;
        return TN_COMM_ERROR;
    }
    of->is_there = 1;
    of->is_wanted = 0;
    of->gathered = ++w->clock;
    of->gathered_version = of->version;
    w->gathers++;
    return TN_OK;
}

/* What fails stays wanted, and nothing is gathered before it. */
static tn_status model_start_wanted(world *w) {
    for (;;) {
        int first = -1;
        for (int i = 0; i < UNITS; i++) {
            if (!w->units[i].is_wanted) continue;
            if (first < 0 || w->units[i].wanted < w->units[first].wanted) first = i;
        }
        if (first < 0 || count_there(w) == w->slots) return TN_OK;
        const tn_status status = model_gather(w, first);
        if (status != TN_OK) return status;
    }
}

static void model_drop(world *w, int unit) {
    model_unit *of = &w->units[unit];
    of->holds = of->forsaken = of->is_there = 0;
}

static tn_status model_settle(world *w) {
    for (int i = 0; i < UNITS; i++) {
        model_unit *of = &w->units[i];
        for (; of->forsaken > 0 && of->holds > 1; of->forsaken--)
            of->holds--;
        if (of->forsaken == 0 || of->leases > 0) continue;
        model_drop(w, i);
    }
    return model_start_wanted(w);
}

static tn_status model_refresh(world *w, int unit) {
    const model_unit *of = &w->units[unit];
    if (!of->is_there || of->holds > 0 || of->gathered_version == of->version) return TN_OK;
    return model_gather(w, unit);
}

static tn_status model_make_room(world *w) {
    while (count_there(w) == w->slots) {
        int oldest = -1;
        for (int i = 0; i < UNITS; i++) {
            if (!w->units[i].is_there || w->units[i].holds > 0) continue;
            if (oldest < 0 || w->units[i].gathered < w->units[oldest].gathered) oldest = i;
        }
        if (oldest < 0) return TN_IN_USE;
        w->units[oldest].is_there = 0;
        w->displaced++;
    }
    return TN_OK;
}

static tn_status model_prefetch(world *w, int unit) {
    model_unit *of = &w->units[unit];
    const tn_status settled = model_settle(w);
    if (settled != TN_OK) return settled;
    if (of->is_there) return model_refresh(w, unit);
    if (count_there(w) < w->slots) return model_gather(w, unit);
    if (!of->is_wanted) of->wanted = ++w->clock;
    of->is_wanted = 1;
    return TN_OK;
}

static tn_status model_acquire(world *w, int unit, int is_scoped) {
    model_unit *of = &w->units[unit];
    tn_status status = model_settle(w);
    if (status == TN_OK) status = model_refresh(w, unit);
    if (status == TN_OK && !of->is_there) status = model_make_room(w);
    if (status == TN_OK && !of->is_there) status = model_gather(w, unit);
    if (status == TN_OK) of->scoped[of->holds++ - of->forsaken] = is_scoped;
    return status;
}

static tn_status model_release(world *w, int unit) {
    model_unit *of = &w->units[unit];
    (void)model_settle(w);
    if (of->holds == of->forsaken) return TN_INVALID_STATE;
    if (of->holds == 1 && of->leases > 0) return TN_IN_USE;
    if (--of->holds == 0) model_drop(w, unit);
    (void)model_start_wanted(w);
    return TN_OK;
}

/* Scoped holds are forsaken, the rest keeps its order. Without any the ring hears of nothing. */
static void model_close(world *w) {
    uint64_t before = w->abandoned;
    for (int i = 0; i < UNITS; i++) {
        model_unit *of = &w->units[i];
        int kept = 0, listed = of->holds - of->forsaken;
        for (int h = 0; h < listed; h++) {
            if (!of->scoped[h]) of->scoped[kept++] = 0;
        }
        of->forsaken += listed - kept;
        w->abandoned += (uint64_t)(listed - kept);
    }
    if (w->abandoned != before) (void)model_settle(w);
}

/* ---- comparing ----------------------------------------------------------------------------- */

static void compare_unit(const world *w, int unit) {
    const model_unit *of = &w->units[unit];
    const ring_unit *real = &w->f.units[unit];
    tn_ring_unit_info info = TN_RING_UNIT_INFO_INIT;
    DEMAND(w, tn_ring_unit_info_get(w->f.ring, unit, &info) == TN_OK);
    tn_plane_state plane = of->holds > 0 ? TN_PLANE_VALID : TN_PLANE_ABSENT;
    tn_ring_state state = of->holds > 0  ? TN_RING_IN_USE
                          : of->is_there ? TN_RING_READY
                                         : TN_RING_EMPTY;
    DEMAND(w, info.state == state);
    DEMAND(w, info.holds == of->holds);
    DEMAND(w, fixture_state(real->weights[0], TN_PLANE_DATA) == plane);
    DEMAND(w, fixture_state(real->weights[1], TN_PLANE_ROW) == plane);
    if (of->is_there) DEMAND(w, of->address == w->f.ring->base + info.offset);
    if (of->holds > 0) DEMAND(w, of->gathered_version == of->version);
}

/* Of two units that are there neither lies in the other one. */
static void compare_places(const world *w, int unit) {
    const model_unit *of = &w->units[unit];
    for (int i = 0; i < unit; i++) {
        const model_unit *other = &w->units[i];
        if (!of->is_there || !other->is_there) continue;
        DEMAND(w, of->address + w->f.units[unit].bytes <= other->address ||
                      other->address + w->f.units[i].bytes <= of->address);
    }
}

static void compare(const world *w) {
    tn_ring_stats stats = ring_fixture_stats(&w->f);
    size_t live = 0;
    DEMAND(w, tn__ring_is_valid(w->f.ring));
    for (int i = 0; i < UNITS; i++) {
        compare_unit(w, i);
        compare_places(w, i);
        if (w->units[i].is_there) live += ring_fixture_unit_bytes(&w->f, i);
    }
    DEMAND(w, stats.live_bytes == live);
    DEMAND(w, stats.peak_live_bytes <= stats.buffer_bytes);
    DEMAND(w, stats.buffer_bytes <= w->budget_bytes);
    DEMAND(w, stats.gathers == w->gathers);
    DEMAND(w, stats.displaced == w->displaced);
    DEMAND(w, stats.abandoned == w->abandoned);
    DEMAND(w, test_sim_get()->race_count() == 0);
}

/* ---- steps --------------------------------------------------------------------------------- */

/* Whether the fault is used up the model finds out by itself. */
static void arm_fault(world *w) { w->f.gather_fault = w->fault; }

static void do_prefetch(world *w) {
    int unit = (int)pick(w, UNITS);
    arm_fault(w);
    tn_status status = tn_ring_prefetch(w->f.ring, unit);
    DEMAND(w, status == model_prefetch(w, unit));
}

static void do_acquire(world *w) {
    int unit = (int)pick(w, UNITS), is_scoped = (int)pick(w, 2);
    tn_stream stream = w->streams[pick(w, STREAMS)];
    tn_scope none = {0};
    if (w->units[unit].holds == HOLDS_MAX) return;
    arm_fault(w);
    tn_status status = tn_ring_acquire(w->f.ring, unit, is_scoped ? w->step : none, stream);
    DEMAND(w, status == model_acquire(w, unit, is_scoped));
}

static void do_release(world *w) {
    int unit = pick_held(w);
    arm_fault(w);
    tn_status status = tn_ring_release(w->f.ring, unit);
    DEMAND(w, status == model_release(w, unit));
}

/* Which plane of which weight; COL is derived. */
static tn_plane pick_plane(world *w, int weight) {
    if (weight == 0) return TN_PLANE_DATA;
    return pick(w, 4) == 0 ? TN_PLANE_COL : TN_PLANE_ROW;
}

static void do_lease(world *w) {
    int unit = pick_held(w), weight = (int)pick(w, RING_WEIGHTS);
    tn_stream stream = w->streams[pick(w, STREAMS)];
    tn_plane plane = pick_plane(w, weight);
    tn_plane_view view;
    tn_lease lease;
    if (w->lease_count == LEASES_MAX) return;
    tn_status status =
        tn_lease_begin(w->f.units[unit].weights[weight], plane, TN_READ, stream, &lease, &view);
    DEMAND(w, status == (w->units[unit].holds > 0 ? TN_OK : TN_INVALID_STATE));
    if (status != TN_OK) return;
    if (plane == TN_PLANE_DATA) DEMAND(w, view.data == w->units[unit].address);
    fixture_touch(&w->f.t, &view, 0, stream);
    w->leases[w->lease_count++] = (open_lease){lease, unit};
    w->units[unit].leases++;
}

static void do_end_lease(world *w) {
    if (w->lease_count == 0) return;
    int at = (int)pick(w, (unsigned)w->lease_count);
    open_lease ended = w->leases[at];
    w->leases[at] = w->leases[--w->lease_count];
    w->units[ended.unit].leases--;
    DEMAND(w, tn_lease_end(ended.lease) == TN_OK);
}

static void do_write_shard(world *w) {
    int unit = (int)pick(w, UNITS);
    tn_status status =
        tn_plane_fill(w->f.units[unit].shard, TN_PLANE_DATA, 1, w->streams[pick(w, STREAMS)]);
    DEMAND(w, status == (w->units[unit].holds > 0 ? TN_IN_USE : TN_OK));
    if (status == TN_OK) w->units[unit].version++;
}

static void open_step_scope(world *w) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    config.parent = w->f.t.scope;
    config.kind = TN_SCOPE_STEP;
    DEMAND(w, tn_scope_create(&config, &w->step) == TN_OK);
}

/* Without a fault: each token that ends tries again what has failed at the one before. */
static void do_close_scope(world *w) {
    const int fault = w->fault;
    w->fault = 0;
    arm_fault(w);
    DEMAND(w, tn_scope_close(w->step) == TN_OK);
    model_close(w);
    w->fault = fault;
    open_step_scope(w);
}

static void do_stall(world *w) {
    (void)test_sim_get()->stall(w->streams[pick(w, STREAMS)], (int)pick(w, 2));
}

static void do_fault(world *w) { w->fault = 1; }

static const struct {
    void (*run)(world *w);
    unsigned weight;
} steps[] = {{do_prefetch, 16}, {do_acquire, 22},    {do_release, 30},
             {do_lease, 16},    {do_end_lease, 34},  {do_write_shard, 4},
             {do_stall, 3},     {do_close_scope, 1}, {do_fault, 1}};

enum { KINDS = sizeof steps / sizeof *steps };

static void take_step(world *w) {
    unsigned all = 0, kind = 0;
    for (unsigned i = 0; i < KINDS; i++)
        all += steps[i].weight;
    for (unsigned at = pick(w, all); at >= steps[kind].weight; kind++)
        at -= steps[kind].weight;
    steps[kind].run(w);
    compare(w);
}

/* ---- rounds -------------------------------------------------------------------------------- */

static void begin_round(world *w) {
    ring_fixture_open(&w->f, 1);
    w->f.on_gather = on_gather;
    w->f.context = w;
    memset(w->units, 0, sizeof w->units);
    w->gathers = w->displaced = w->abandoned = 0;
    w->fault = 0;
    for (int i = 0; i < UNITS; i++)
        ring_fixture_add(&w->f, 1 + (int)pick(w, 200), 1);
    w->slots = 1 + (int)pick(w, 4);
    w->f.config.slots = w->slots;
    ring_fixture_make(&w->f);
    EXPECT_OK(tn_ring_seal(w->f.ring));
    w->budget_bytes = 0;
    for (int i = 0; i < UNITS; i++) {
        size_t bytes = (size_t)w->slots * ring_fixture_unit_bytes(&w->f, i);
        if (bytes > w->budget_bytes) w->budget_bytes = bytes;
    }
    w->streams[0] = w->f.t.stream, w->streams[1] = w->f.t.other;
    for (int i = 2; i < STREAMS; i++)
        EXPECT_OK(tn_stream_create(w->f.t.device, &w->streams[i]));
    open_step_scope(w);
}

/* Whatever waits for whatever comes to an end once nothing is stalled. */
static void end_round(world *w) {
    for (int i = 0; i < STREAMS; i++)
        (void)test_sim_get()->stall(w->streams[i], 0);
    while (w->lease_count > 0)
        do_end_lease(w);
    EXPECT_OK(tn_device_synchronize(w->f.t.device));
    tn_ring_stats stats = ring_fixture_stats(&w->f);
    w->all_gathers += stats.gathers, w->all_acquires += stats.acquires;
    w->all_displaced += stats.displaced, w->all_deferred += stats.deferred;
    w->all_abandoned += stats.abandoned;
    EXPECT_OK(tn_scope_close(w->step));
    EXPECT_OK(tn_ring_destroy(w->f.ring));
    w->f.ring = NULL;
    EXPECT_OK(tn_device_synchronize(w->f.t.device));
    for (int i = 2; i < STREAMS; i++)
        EXPECT_OK(tn_stream_destroy(w->f.t.device, w->streams[i]));
    ring_fixture_close(&w->f);
}

static void run(uint64_t seed, uint64_t count) {
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->seed = seed;
    w->random = seed * UINT64_C(0x9E3779B97F4A7C15) + 1;
    for (w->at = 0; w->at < count; w->at++) {
        if (w->at % ROUND_STEPS == 0) begin_round(w);
        take_step(w);
        if (w->at % ROUND_STEPS == ROUND_STEPS - 1 || w->at == count - 1) end_round(w);
    }
    printf("seed %llu: %llu steps, no race, the budget kept: %llu gathers, %llu acquires, %llu "
           "displaced, %llu deferred, %llu abandoned\n",
           (unsigned long long)seed, (unsigned long long)count, (unsigned long long)w->all_gathers,
           (unsigned long long)w->all_acquires, (unsigned long long)w->all_displaced,
           (unsigned long long)w->all_deferred, (unsigned long long)w->all_abandoned);
    free(w);
}

static uint64_t given_seed, given_steps;

static void random_programs_keep_to_the_model(void **state) {
    (void)state;
    if (given_steps) {
        run(given_seed, given_steps);
        return;
    }
    for (uint64_t seed = 1; seed <= 4; seed++)
        run(seed, 20000);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_programs_keep_to_the_model)};
    expects_failure = argc == 2 && strcmp(argv[1], "--expect-failure") == 0;
    if (argc == 3) given_seed = strtoull(argv[1], NULL, 10);
    if (argc == 3) given_steps = strtoull(argv[2], NULL, 10);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return expects_failure ? failed == 0 : failed;
}
