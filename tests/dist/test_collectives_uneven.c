/* Uneven gathers and reductions against their definition: any segments of any rank, in place or
 * not, and nothing between them touched. Lists are random; a failure names the seed, and the one
 * list of a seed is the same in every run. */
#include "rank_values_support.h"

#include <stdlib.h>
#include <string.h>

enum { SEEDS = 40, SEGMENTS_MAX = 24, GUARD = 0xC7 };

static rank_fixture all;

/* ---- lists ---------------------------------------------------------------------------------- */

typedef struct list {
    unsigned seed;
    tn_segment segments[SEGMENTS_MAX];
    size_t count;
    size_t whole; /* elements of the buffer, gaps and all */
    size_t mine;
    size_t total;
} list;

static unsigned next_random(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static size_t random_count(unsigned *random, size_t most) {
    switch (next_random(random) % 4) {
    case 0: return 0;
    case 1: return 1 + next_random(random) % 3;
    default: return next_random(random) % most;
    }
}

/* Segments of random ranks (some have none) behind each other with gaps, then shuffled. */
static list random_list(unsigned seed, size_t most) {
    list made = {.seed = seed};
    unsigned random = seed * 7919u + 1;
    made.count = next_random(&random) % (SEGMENTS_MAX + 1);
    int ranks = 1 + (int)(next_random(&random) % (unsigned)all.count);
    for (size_t i = 0; i < made.count; i++) {
        tn_segment *segment = &made.segments[i];
        segment->rank = (int)(next_random(&random) % (unsigned)ranks);
        segment->offset = made.whole + next_random(&random) % 4;
        segment->count = random_count(&random, most);
        made.whole = segment->offset + segment->count;
    }
    for (size_t i = made.count; i > 1 && seed % 2; i--) {
        size_t other = next_random(&random) % i;
        tn_segment kept = made.segments[i - 1];
        made.segments[i - 1] = made.segments[other];
        made.segments[other] = kept;
    }
    for (size_t i = 0; i < made.count; i++) {
        made.total += made.segments[i].count;
        if (made.segments[i].rank == all.rank) made.mine += made.segments[i].count;
    }
    return made;
}

static void expect_bytes(const void *actual, const void *expected, size_t bytes, const list *made,
                         const char *what) {
    for (size_t i = 0; i < bytes; i++) {
        if (((const char *)actual)[i] == ((const char *)expected)[i]) continue;
        fail_msg("%s, list of seed %u on %d ranks: byte %zu of %zu differs on rank %d", what,
                 made->seed, all.count, i, bytes, all.rank);
    }
}

/* ---- gathers -------------------------------------------------------------------------------- */

/* Element `at` of a whole buffer is byte `at` of the rank that has the segment. */
static void gather(const list *made, int in_place) {
    size_t bytes = made->whole + 1, packed = 0;
    unsigned char *expected = malloc(bytes), *given = malloc(bytes), *mine = malloc(made->mine + 1);
    unsigned char *actual = malloc(bytes), *dst = ranks_take(&all, bytes);
    unsigned char *src = in_place ? dst : made->mine ? ranks_take(&all, made->mine) : NULL;
    memset(expected, GUARD, bytes);
    memset(given, GUARD, bytes);
    for (size_t i = 0; i < made->count; i++) {
        const tn_segment *segment = &made->segments[i];
        for (size_t at = segment->offset; at < segment->offset + segment->count; at++) {
            expected[at] = ranks_byte(segment->rank, at);
            if (segment->rank != all.rank) continue;
            mine[packed++] = expected[at];
            if (in_place) given[at] = expected[at];
        }
    }
    ranks_put(&all, dst, given, bytes);
    if (!in_place && made->mine) ranks_put(&all, src, mine, made->mine);
    EXPECT_OK(tn_all_gather_uneven(all.comm, src, dst, made->segments, made->count, all.stream));
    ranks_get(&all, actual, dst, bytes);
    expect_bytes(actual, expected, bytes, made, in_place ? "in place" : "packed");
    if (!in_place && src) ranks_give(&all, src);
    ranks_give(&all, dst);
    free(expected);
    free(given);
    free(mine);
    free(actual);
}

static void a_gather_puts_every_segment_in_its_place_and_nothing_else(void **state) {
    (void)state;
    for (unsigned seed = 1; seed <= SEEDS; seed++) {
        list made = random_list(seed, seed % 5 ? 3000 : 200000);
        gather(&made, 0);
        gather(&made, 1);
    }
}

/* ---- reductions ----------------------------------------------------------------------------- */

static void reduce(const list *made, tn_dtype dtype, tn_reduce kind, int in_place) {
    size_t width = tn_dtype_bytes(dtype), whole = made->whole + 1, packed = 0;
    char *given = malloc(whole * width), *expected = malloc((whole + made->mine) * width);
    char *actual = malloc((whole + made->mine) * width), *src = ranks_take(&all, whole * width);
    char *dst = in_place ? src : made->mine ? ranks_take(&all, made->mine * width) : NULL;
    size_t result_bytes = (in_place ? whole : made->mine) * width;
    for (size_t at = 0; at < whole; at++)
        ranks_store(given, at, dtype, ranks_number(all.rank, at));
    memcpy(expected, given, whole * width);
    ranks_put(&all, src, given, whole * width);
    EXPECT_OK(tn_reduce_scatter_uneven(all.comm, src, dst, made->segments, made->count, dtype, kind,
                                       all.stream));
    if (result_bytes) ranks_get(&all, actual, dst, result_bytes);
    for (size_t i = 0; i < made->count; i++) {
        const tn_segment *segment = &made->segments[i];
        if (segment->rank != all.rank) continue;
        for (size_t at = segment->offset; at < segment->offset + segment->count; at++) {
            size_t place = in_place ? at : packed++;
            float value = ranks_reduced_as(&all, dtype, kind, at, actual, place);
            ranks_store(expected, place, dtype, value);
        }
    }
    expect_bytes(actual, expected, result_bytes, made, in_place ? "in place" : "packed");
    ranks_wait(&all);
    if (!in_place && dst) ranks_give(&all, dst);
    ranks_give(&all, src);
    free(given);
    free(expected);
    free(actual);
}

static void a_reduction_gives_each_rank_its_segments_reduced(void **state) {
    (void)state;
    for (unsigned seed = 1; seed <= SEEDS; seed++) {
        list made = random_list(seed, seed % 5 ? 700 : 60000);
        tn_dtype dtype = seed % 2 ? TN_BF16 : TN_FP32;
        reduce(&made, dtype, seed % 3 ? TN_REDUCE_SUM : TN_REDUCE_MAX, 0);
        reduce(&made, dtype, seed % 3 ? TN_REDUCE_SUM : TN_REDUCE_MAX, 1);
    }
}

/* ---- counts --------------------------------------------------------------------------------- */

static void bytes_on_the_wire_are_the_closed_form(void **state) {
    (void)state;
    uint64_t others = (uint64_t)all.count - 1;
    for (unsigned seed = 1; seed <= SEEDS; seed++) {
        list made = random_list(seed, 500);
        tn_comm_stats before = ranks_stats(&all);
        gather(&made, 1);
        reduce(&made, TN_BF16, TN_REDUCE_SUM, 1);
        tn_comm_stats after = ranks_stats(&all);
        uint64_t gathered = after.wire_bytes[TN_ALL_GATHER_UNEVEN];
        uint64_t reduced = after.wire_bytes[TN_REDUCE_SCATTER_UNEVEN];
        gathered -= before.wire_bytes[TN_ALL_GATHER_UNEVEN];
        reduced -= before.wire_bytes[TN_REDUCE_SCATTER_UNEVEN];
        assert_int_equal(gathered, others * made.mine);
        assert_int_equal(reduced, (made.total - made.mine) * 2);
        for (int kind = 0; kind < TN_COLLECTIVE_COUNT; kind++) {
            int is_put = kind == TN_ALL_GATHER_UNEVEN || kind == TN_REDUCE_SCATTER_UNEVEN;
            assert_int_equal(after.calls[kind] - before.calls[kind], is_put && made.total > 0);
        }
    }
}

static void lists_without_elements_put_nothing(void **state) {
    (void)state;
    const tn_segment empty[] = {{0, 5, 0}, {all.count - 1, 0, 0}};
    tn_comm_stats before = ranks_stats(&all);
    EXPECT_OK(tn_all_gather_uneven(all.comm, NULL, NULL, NULL, 0, all.stream));
    EXPECT_OK(tn_all_gather_uneven(all.comm, NULL, NULL, empty, 2, all.stream));
    EXPECT_OK(tn_reduce_scatter_uneven(all.comm, NULL, NULL, empty, 2, TN_BF16, TN_REDUCE_SUM,
                                       all.stream));
    tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&before, &after, sizeof before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gather_puts_every_segment_in_its_place_and_nothing_else),
        cmocka_unit_test(a_reduction_gives_each_rank_its_segments_reduced),
        cmocka_unit_test(bytes_on_the_wire_are_the_closed_form),
        cmocka_unit_test(lists_without_elements_put_nothing),
    };
    return RANKS_RUN(&all, tests);
}
