/* A ring whose leases are ended, and whose scopes are closed, by another thread than the one that
 * acquires, and ends it: both are allowed, and what the other thread has not done yet is TN_IN_USE.
 */
#include "ring_fixture.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { ROWS = 8, UNITS = 3, ROUNDS = 300 };

static const tn_scope NO_SCOPE = {0};

/* What the other thread is to end; it says 0 when it has. */
typedef struct helper {
    pthread_t thread;
    atomic_uint_least64_t lease;
    atomic_uint_least64_t scope;
    atomic_int is_over;
} helper;

static void *help(void *argument) {
    helper *self = argument;
    while (!atomic_load(&self->is_over)) {
        tn_lease lease = {atomic_load(&self->lease)};
        tn_scope scope = {atomic_load(&self->scope)};
        if (lease.value) {
            EXPECT_OK(tn_lease_end(lease));
            atomic_store(&self->lease, 0);
        }
        if (scope.value) {
            EXPECT_OK(tn_scope_close_deferred(scope));
            atomic_store(&self->scope, 0);
        }
        sched_yield();
    }
    return NULL;
}

static void helper_begin(helper *self) {
    atomic_init(&self->lease, 0);
    atomic_init(&self->scope, 0);
    atomic_init(&self->is_over, 0);
    assert_int_equal(pthread_create(&self->thread, NULL, help, self), 0);
}

static void helper_end(helper *self) {
    atomic_store(&self->is_over, 1);
    assert_int_equal(pthread_join(self->thread, NULL), 0);
}

static void await(const atomic_uint_least64_t *value) {
    while (atomic_load(value))
        sched_yield();
}

/* The release comes through as soon as the lease has ended, whenever that is. */
static void leases_end_on_another_thread(void **state) {
    ring_fixture f;
    helper other;
    (void)state;
    ring_fixture_open(&f, 0);
    ring_fixture_start(&f, UNITS, ROWS);
    helper_begin(&other);
    for (int round = 0; round < ROUNDS; round++) {
        int unit = round % UNITS;
        EXPECT_OK(tn_ring_acquire(f.ring, unit, NO_SCOPE, f.t.stream));
        tn_lease lease = fixture_lease(f.units[unit].weights[1], TN_PLANE_ROW, TN_READ, f.t.other);
        atomic_store(&other.lease, lease.value);
        tn_status status = TN_IN_USE;
        while (status == TN_IN_USE)
            status = tn_ring_release(f.ring, unit);
        EXPECT_OK(status);
        await(&other.lease);
        ring_fixture_expect_gone(&f, unit);
    }
    helper_end(&other);
    assert_int_equal(ring_fixture_stats(&f).live_bytes, 0);
    ring_fixture_close(&f);
}

static tn_scope acquire_all(const ring_fixture *f) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = f->t.scope;
    EXPECT_OK(tn_scope_create(&config, &scope));
    for (int unit = 0; unit < UNITS; unit++)
        EXPECT_OK(tn_ring_acquire(f->ring, unit, scope, f->t.stream));
    return scope;
}

/* While the other thread gives up a step's units, this one goes on with the next step. */
static void scopes_close_on_another_thread(void **state) {
    ring_fixture f;
    helper other;
    (void)state;
    ring_fixture_open(&f, 0);
    f.config.slots = UNITS;
    ring_fixture_start(&f, UNITS, ROWS);
    helper_begin(&other);
    for (int round = 0; round < ROUNDS; round++) {
        const tn_scope scope = acquire_all(&f);
        atomic_store(&other.scope, scope.value);
        for (int unit = 0; unit < UNITS; unit++) {
            EXPECT_OK(tn_ring_acquire(f.ring, unit, NO_SCOPE, f.t.other));
            EXPECT_OK(tn_ring_release(f.ring, unit));
        }
        await(&other.scope);
    }
    helper_end(&other);
    assert_int_equal(ring_fixture_stats(&f).live_bytes, 0);
    ring_fixture_close(&f);
}

/* Whoever closes a scope finds the ring there, or knows that it is gone. */
static void a_ring_ends_while_a_scope_closes(void **state) {
    ring_fixture f;
    helper other;
    (void)state;
    ring_fixture_open(&f, 0);
    f.config.slots = UNITS;
    for (int unit = 0; unit < UNITS; unit++)
        ring_fixture_add(&f, ROWS, 1);
    helper_begin(&other);
    for (int round = 0; round < ROUNDS; round++) {
        ring_fixture_make(&f);
        EXPECT_OK(tn_ring_seal(f.ring));
        const tn_scope scope = acquire_all(&f);
        atomic_store(&other.scope, scope.value);
        EXPECT_OK(tn_ring_destroy(f.ring));
        await(&other.scope);
    }
    f.ring = NULL;
    helper_end(&other);
    ring_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leases_end_on_another_thread),
        cmocka_unit_test(scopes_close_on_another_thread),
        cmocka_unit_test(a_ring_ends_while_a_scope_closes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
