/* Every sequence of calls up to a length, none at random. See simulation.h.
 *
 * A call is: allocate one of four sizes on one of two streams; free, or use, any live block on one
 * of two streams. A sequence of n calls shows all of its beginnings too, and what it leaves is
 * freed: so only sequences that end with an allocation are run. Streams are alike: the first call
 * is on the first. The pool is emptied in between, so that each begins without memory.
 *
 *     choices   2 0 9 1     which of the calls that are possible there; counted up like an odometer
 *     possible  4 8 12 8    how many there were
 *
 * Several processes may share the work: each takes every n-th of the beginnings of three calls.
 */
#include "simulation.h"

enum { SEQUENCE_MAX = 12, SIZES = 4, STREAMS = 2, BEGINNING = 3 };

typedef struct sequence {
    int length;
    size_t choices[SEQUENCE_MAX];
    size_t possible[SEQUENCE_MAX];
} sequence;

static size_t possible_calls(const world *w, const sequence *s, int at) {
    if (at == 0) return SIZES;
    if (at == s->length - 1) return (size_t)SIZES * STREAMS;
    return (size_t)SIZES * STREAMS + 2 * STREAMS * w->oracle.count;
}

static void make_call(world *w, size_t choice) {
    static const size_t sizes[SIZES] = {512, 700 << 10, 2 << 20, (5 << 20) - 1};
    int stream = (int)(choice % STREAMS);
    size_t rest = choice / STREAMS;
    if (rest < SIZES) {
        (void)world_alloc(w, 0, sizes[rest], 0, stream);
        return;
    }
    rest -= SIZES;
    if (rest < w->oracle.count) {
        world_expect_ok(w, world_free(w, rest, stream), "a block is freed");
        return;
    }
    rest -= w->oracle.count;
    world_use(w, rest, stream, 1, 100);
    if (stream != w->oracle.blocks[rest].own) {
        world_expect_ok(w, world_record_use(w, rest, stream), "a use is recorded");
    }
}

static void check_step(world *w) {
    tn_pool_stats stats;
    world_check_pool(w, 0, &stats);
    world_check_races(w);
}

/* The first choice of the first call has only streams that are alike. */
static void make_calls(world *w, sequence *s, int count) {
    for (int at = 0; at < count; at++) {
        s->possible[at] = possible_calls(w, s, at);
        make_call(w, at == 0 ? s->choices[0] * STREAMS : s->choices[at]);
        check_step(w);
    }
}

static void empty_pool(world *w) {
    while (w->oracle.count > 0)
        world_expect_ok(w, world_free(w, 0, (int)(w->oracle.count % STREAMS)), "a block is freed");
    check_step(w);
    world_synchronize(w, 0);
    world_expect_ok(w, world_trim(w, 0, 0), "the pool is emptied");
}

static void run_sequence(world *w, sequence *s) {
    make_calls(w, s, s->length);
    world_walk(w);
    empty_pool(w);
    w->counts->steps += (uint64_t)s->length + 1;
}

/* Another process runs those that begin so; only what else is possible is found out. */
static void pass_beginning(world *w, sequence *s, int length) {
    make_calls(w, s, length);
    empty_pool(w);
}

/* The next choices of the first `length` calls: the call that has another one now; -1 if those were
 * the last. */
static int count_up(sequence *s, int length) {
    for (int at = length - 1; at >= 0; at--) {
        if (++s->choices[at] < s->possible[at]) return at;
        s->choices[at] = 0;
    }
    return -1;
}

uint64_t world_run_sequences(world *w, int length, world_shard shard) {
    sequence s = {.length = length};
    int beginning_length = length < BEGINNING ? length : BEGINNING;
    uint64_t beginning = 0;
    uint64_t count = 0;
    int changed;
    WORLD_EXPECT(w, length >= 1 && length <= SEQUENCE_MAX, "sequences have 1 to %d calls",
                 SEQUENCE_MAX);
    w->doing = "a sequence";
    do {
        int is_ours = beginning % shard.count == shard.index;
        if (is_ours) {
            w->step = count++;
            run_sequence(w, &s);
        } else {
            pass_beginning(w, &s, beginning_length);
        }
        changed = count_up(&s, is_ours ? length : beginning_length);
        beginning += changed < beginning_length;
    } while (changed >= 0);
    return count;
}
