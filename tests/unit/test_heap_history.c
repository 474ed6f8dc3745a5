/* The history of placements: what it expects, when it is trusted, and how it finds its way again
 * where a job leaves out a request or has one more. */
#include <string.h>

#include "heap_history.h"
#include "host_alloc.h"
#include "test_support.h"

enum { ROUND = 700 };

static int region_a;
static int region_b;

/* The i-th request of a round: of 64 sizes in an order that is not like itself anywhere. */
static uint64_t key_of(int i) {
    uint64_t hash = (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u;
    return 512 * (1 + (hash ^ (hash >> 29)) * 0xD6E8FEB86659FD93u % 64);
}

static void note(tn__history *history, uint64_t key, uintptr_t address) {
    tn__past now = {.key = key, .address = address};
    now.region = (struct tn__region *)(void *)&region_a;
    tn__history_note(history, &now);
}

/* One request; gives the address that was expected for it, 0 if none was. */
static uintptr_t step(tn__history *history, uint64_t key, uintptr_t address) {
    const tn__past *past = tn__history_expect(history, key);
    uintptr_t expected = past ? past->address : 0;
    note(history, key, address);
    return expected;
}

static uintptr_t address_of(int round, int i) {
    return (uintptr_t)(round + 1) * 0x10000000u + (uintptr_t)i * 512;
}

/* Plays a round and counts the requests that were expected where they had been the last time. */
static int play(tn__history *history, int round) {
    int as_before = 0;
    for (int i = 0; i < ROUND; i++)
        as_before += step(history, key_of(i), address_of(round, i)) == address_of(round - 1, i);
    return as_before;
}

static void a_repeated_job_is_expected_where_it_was(void **state) {
    tn__history history = {0};
    (void)state;
    assert_int_equal(play(&history, 1), 0);
    assert_int_equal(play(&history, 2), 0);
    assert_int_equal(play(&history, 3), ROUND - 304); /* trusted from the thousandth on */
    assert_int_equal(play(&history, 4), ROUND);
    assert_int_equal(play(&history, 5), ROUND);
    tn__history_clear(&history);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void nothing_is_expected_of_a_new_job(void **state) {
    tn__history history = {0};
    uint64_t random = 1;
    (void)state;
    for (int i = 0; i < 20000; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        assert_int_equal(step(&history, 512 * (1 + (random >> 33) % 4), 512), 0);
    }
    assert_false(tn__history_is_trusted(&history));
    tn__history_clear(&history);
}

/* One more request and one fewer: those after it are found again. */
static void others_between_are_gone_past(void **state) {
    tn__history history = {0};
    int missed = 0;
    (void)state;
    for (int round = 0; round < 4; round++)
        (void)play(&history, round);
    assert_int_equal(step(&history, 5119488, 512), 0);
    assert_int_equal(step(&history, key_of(0), address_of(4, 0)), address_of(3, 0));
    for (int i = 100; i < ROUND; i++) { /* 1 to 99 are left out */
        missed += step(&history, key_of(i), address_of(4, i)) != address_of(3, i);
    }
    assert_int_equal(missed, 90);
    assert_true(tn__history_is_trusted(&history));
    tn__history_clear(&history);
}

static void a_region_that_goes_is_forgotten(void **state) {
    tn__history history = {0};
    const tn__past *past;
    (void)state;
    for (int round = 0; round < 4; round++)
        (void)play(&history, round);
    tn__history_forget(&history, (struct tn__region *)(void *)&region_b);
    past = tn__history_expect(&history, key_of(0));
    assert_ptr_equal(past->region, &region_a);
    tn__history_forget(&history, (struct tn__region *)(void *)&region_a);
    assert_null(past->region);
    tn__history_clear(&history);
}

/* Longer than the log: the oldest are overwritten, and a shorter job is learnt after it. */
static void the_memory_is_bounded(void **state) {
    tn__history history = {0};
    (void)state;
    for (size_t i = 0; i < 3 * TN__HISTORY_MAX; i++)
        (void)step(&history, 512 * (uint64_t)(i + 1), 512);
    assert_int_equal(history.capacity, TN__HISTORY_MAX);
    for (int round = 0; round < 4; round++)
        (void)play(&history, round);
    assert_int_equal(play(&history, 4), ROUND);
    tn__history_clear(&history);
}

/* Each host allocation fails once: the history is shorter then, or there is none, and nothing is
 * recorded as an error. */
static void it_does_without_memory(void **state) {
    (void)state;
    for (long nth = 1; nth <= 12; nth++) {
        tn__history history = {0};
        tn__host_alloc_fault(nth, 1);
        for (int round = 0; round < 4; round++)
            (void)play(&history, round);
        tn__host_alloc_fault(0, 0);
        assert_true(history.capacity <= 4096);
        assert_int_equal(history.capacity == 0, nth <= 3);
        tn__history_clear(&history);
        assert_int_equal(tn__host_live_blocks(), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_repeated_job_is_expected_where_it_was),
        cmocka_unit_test(nothing_is_expected_of_a_new_job),
        cmocka_unit_test(others_between_are_gone_past),
        cmocka_unit_test(a_region_that_goes_is_forgotten),
        cmocka_unit_test(the_memory_is_bounded),
        cmocka_unit_test(it_does_without_memory),
    };
    return cmocka_run_group_tests_name("unit/heap_history", tests, NULL, NULL);
}
