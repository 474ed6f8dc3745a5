/* The table of blocks: against an array, when host memory is short, and read while it changes. */
#include <pthread.h>
#include <string.h>

#include "block_table.h"
#include "heap.h"
#include "host_alloc.h"
#include "test_support.h"

enum { KEYS = 3000, STEPS = 40000 };

static tn__piece pieces[KEYS];
static int is_in[KEYS];

/* Two of three addresses are neighbours, as blocks are; the third is far away. */
static uintptr_t address_of(size_t i) {
    uintptr_t base = (uintptr_t)0x700000000000;
    if (i % 3 == 2) base += (uintptr_t)0xf0000000000 + (i << 21);
    return base + (i + 1) * TN__BLOCK_ALIGN;
}

static uint64_t next_random(uint64_t *random) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return *random >> 33;
}

static void the_table_finds_what_is_in_it_and_nothing_else(void **state) {
    tn__block_table table = {NULL, 0};
    uint64_t random = 99;
    size_t count = 0;
    (void)state;
    assert_null(tn__block_table_find(&table, address_of(0)));
    for (int step = 0; step < STEPS; step++) {
        /* Mostly full in the first half, mostly empty in the second. */
        size_t i = next_random(&random) % KEYS;
        int wanted = next_random(&random) % 8 < (step < STEPS / 2 ? 6 : 1);
        if (wanted && !is_in[i]) {
            EXPECT_OK(tn__block_table_reserve(&table, 1));
            tn__block_table_insert(&table, address_of(i), &pieces[i]);
            count++;
        } else if (!wanted && is_in[i]) {
            tn__block_table_remove(&table, address_of(i));
            count--;
        }
        is_in[i] = wanted;
        if (step % 500 != 0) continue;
        for (size_t k = 0; k < KEYS; k++) {
            assert_ptr_equal(tn__block_table_find(&table, address_of(k)),
                             is_in[k] ? &pieces[k] : NULL);
        }
        assert_int_equal(table.count, count);
    }
    tn__block_table_clear(&table);
    assert_int_equal(tn__host_live_blocks(), 0);
}

static void a_table_that_can_not_grow_stays_as_it_was(void **state) {
    tn__block_table table = {NULL, 0};
    (void)state;
    EXPECT_OK(tn__block_table_reserve(&table, 1));
    tn__block_table_insert(&table, address_of(1), &pieces[1]);
    tn__host_alloc_fault(1, 1);
    EXPECT_STATUS(tn__block_table_reserve(&table, 100), TN_OUT_OF_HOST_MEMORY);
    EXPECT_OK(tn__block_table_reserve(&table, 31)); /* half of 64, less the one that is there */
    EXPECT_STATUS(tn__block_table_reserve(&table, 32), TN_OUT_OF_HOST_MEMORY);
    tn__host_alloc_fault(0, 0);
    assert_ptr_equal(tn__block_table_find(&table, address_of(1)), &pieces[1]);
    EXPECT_OK(tn__block_table_reserve(&table, 100));
    assert_ptr_equal(tn__block_table_find(&table, address_of(1)), &pieces[1]);
    tn__block_table_clear(&table);
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* ---- readers beside a writer --------------------------------------------------------------- */

enum { STABLE = 100, READERS = 2, ROUNDS = 300 };

typedef struct shared_table {
    tn__block_table table;
    atomic_int is_over;
    atomic_size_t wrong;
} shared_table;

/* A stable address may be missed while its entry moves; it is never taken for another's. */
static void *read_stable(void *argument) {
    shared_table *shared = argument;
    while (!atomic_load(&shared->is_over)) {
        for (size_t i = 0; i < STABLE; i++) {
            const tn__piece *piece = tn__block_table_find(&shared->table, address_of(i));
            uint64_t wanted = tn__block_tag(address_of(i), TN__BLOCK_LIVE);
            if (!piece || atomic_load(&piece->tag) != wanted) continue;
            if (piece != &pieces[i]) atomic_fetch_add(&shared->wrong, 1);
        }
    }
    return NULL;
}

static void readers_see_right_pieces_while_the_table_changes_and_grows(void **state) {
    static shared_table shared;
    pthread_t readers[READERS];
    (void)state;
    for (size_t i = 0; i < KEYS; i++) {
        atomic_store(&pieces[i].tag, tn__block_tag(address_of(i), TN__BLOCK_LIVE));
    }
    EXPECT_OK(tn__block_table_reserve(&shared.table, STABLE));
    for (size_t i = 0; i < STABLE; i++)
        tn__block_table_insert(&shared.table, address_of(i), &pieces[i]);
    for (int i = 0; i < READERS; i++)
        assert_int_equal(pthread_create(&readers[i], NULL, read_stable, &shared), 0);
    for (int round = 0; round < ROUNDS; round++) {
        size_t end = STABLE + 8 * (size_t)(round + 1);
        EXPECT_OK(tn__block_table_reserve(&shared.table, end));
        for (size_t i = STABLE; i < end; i++)
            tn__block_table_insert(&shared.table, address_of(i), &pieces[i]);
        for (size_t i = end; i > STABLE; i--)
            tn__block_table_remove(&shared.table, address_of(i - 1));
    }
    atomic_store(&shared.is_over, 1);
    for (int i = 0; i < READERS; i++)
        pthread_join(readers[i], NULL);
    assert_int_equal(atomic_load(&shared.wrong), 0);
    for (size_t i = 0; i < KEYS; i++) {
        assert_ptr_equal(tn__block_table_find(&shared.table, address_of(i)),
                         i < STABLE ? &pieces[i] : NULL);
    }
    tn__block_table_clear(&shared.table);
    assert_int_equal(tn__host_live_blocks(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table_finds_what_is_in_it_and_nothing_else),
        cmocka_unit_test(a_table_that_can_not_grow_stays_as_it_was),
        cmocka_unit_test(readers_see_right_pieces_while_the_table_changes_and_grows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
