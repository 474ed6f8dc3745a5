/* Scopes: a tree in which closing frees everything below, or nothing. */
#include "tensor_fixture.h"

#include <stdio.h>
#include <string.h>

#include "handle_table.h"
#include "host_alloc.h"
#include "tensor_internal.h"

static tn_scope child_of(tn_scope parent, tn_scope_kind kind, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = parent;
    config.kind = kind;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_tensor vector_in(tn_scope scope, int64_t count, const char *name, tn_stream stream) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.shape[0] = count;
    config.name = name;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    fixture_write(tensor, TN_PLANE_DATA, stream);
    return tensor;
}

static void configs_that_do_not_fit_are_refused(void **state) {
    const tensor_fixture *f = *state;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_pool *pool;
    char long_name[400];
    tn_scope scope = {9};
    EXPECT_STATUS(tn_scope_create(&config, &scope), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("a root scope needs a pool");
    EXPECT_STATUS(tn_scope_create(NULL, &scope), TN_INVALID_ARGUMENT);
    config.pool = f->pool;
    EXPECT_STATUS(tn_scope_create(&config, NULL), TN_INVALID_ARGUMENT);
    config.kind = (tn_scope_kind)6;
    EXPECT_STATUS(tn_scope_create(&config, &scope), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("unknown kind 6");
    config.kind = TN_SCOPE_OP;
    memset(long_name, 'n', sizeof long_name), long_name[300] = 0;
    config.name = long_name;
    EXPECT_STATUS(tn_scope_create(&config, &scope), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("longer than 255 bytes");
    config.name = NULL;
    EXPECT_OK(tn_pool_create(f->device, &pool_config, &pool));
    config.pool = pool;
    config.parent = f->scope;
    EXPECT_STATUS(tn_scope_create(&config, &scope), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("the pool is not that of the parent, scope model");
    EXPECT_OK(tn_pool_destroy(pool));
    assert_int_equal(scope.value, 9);
}

static void closing_frees_all_that_is_below(void **state) {
    const tensor_fixture *f = *state;
    tn_scope step = child_of(f->scope, TN_SCOPE_STEP, "step");
    tn_scope layer = child_of(step, TN_SCOPE_LAYER, "layer");
    tn_scope op = child_of(layer, TN_SCOPE_OP, NULL);
    tn_tensor kept = vector_in(f->scope, 1000, "kept", f->stream);
    tn_tensor deep = vector_in(op, 7, "deep", f->stream);
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_ledger ledger = TN_LEDGER_INIT;
    (void)vector_in(step, 20, "a", f->stream);
    (void)vector_in(layer, 300, "b", f->other);
    assert_int_equal(fixture_owned_bytes(f), 1327);
    assert_int_equal(fixture_ledger(op).total_bytes, 7);
    assert_int_equal(fixture_ledger(layer).total_bytes, 307);
    assert_int_equal(fixture_ledger(step).total_bytes, 327);
    assert_int_equal(fixture_ledger(f->scope).total_bytes, 1327);
    EXPECT_OK(tn_scope_close(step));
    assert_int_equal(fixture_owned_bytes(f), 1000);
    assert_int_equal(fixture_ledger(f->scope).tensors, 1);
    EXPECT_STATUS(tn_scope_ledger(step, &ledger), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_scope_ledger(layer, &ledger), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_scope_ledger(op, &ledger), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_info_get(deep, &info), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_scope_close(step), TN_STALE_HANDLE);
    EXPECT_OK(tn_tensor_info_get(kept, &info));
    EXPECT_OK(tn_scope_close((tn_scope){0}));
}

static void a_live_lease_anywhere_below_keeps_everything(void **state) {
    const tensor_fixture *f = *state;
    tn_scope step = child_of(f->scope, TN_SCOPE_STEP, "step");
    tn_scope layer = child_of(step, TN_SCOPE_LAYER, "layer");
    tn_tensor first = vector_in(step, 20, "first", f->stream);
    tn_tensor held = vector_in(layer, 300, "held", f->stream);
    tn_plane_view view;
    tn_lease lease;
    char stream[64];
    EXPECT_OK(tn_lease_begin(held, TN_PLANE_DATA, TN_READ, f->other, &lease, &view));
    tn_ledger before = fixture_ledger(f->scope);
    EXPECT_STATUS(tn_scope_close(step), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor held, plane DATA is under a READ lease");
    snprintf(stream, sizeof stream, "on stream %p", f->other);
    EXPECT_ERROR_HAS(stream);
    tn_ledger after = fixture_ledger(f->scope);
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(fixture_state(first, TN_PLANE_DATA), TN_PLANE_VALID);
    EXPECT_STATUS(tn_scope_close(f->scope), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_scope_close(step));
    assert_int_equal(fixture_owned_bytes(f), 0);
}

static void a_closed_scope_takes_no_tensor_and_no_child(void **state) {
    const tensor_fixture *f = *state;
    tn_scope step = child_of(f->scope, TN_SCOPE_STEP, "step");
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config tensor_config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    tn_scope scope;
    EXPECT_OK(tn_scope_close(step));
    tn_scope again = child_of(f->scope, TN_SCOPE_STEP, "again");
    assert_int_equal((uint32_t)again.value, (uint32_t)step.value); /* its slot */
    config.parent = step;
    EXPECT_STATUS(tn_scope_create(&config, &scope), TN_STALE_HANDLE);
    EXPECT_ERROR_HAS("scope 0x");
    EXPECT_STATUS(tn_tensor_create(step, &tensor_config, &tensor), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_create((tn_scope){0}, &tensor_config, &tensor), TN_STALE_HANDLE);
    assert_int_equal(fixture_ledger(f->scope).tensors, 0);
}

static void a_tensor_moves_with_its_planes_and_leases(void **state) {
    const tensor_fixture *f = *state;
    tn_scope op = child_of(f->scope, TN_SCOPE_OP, "op");
    tn_scope saved = child_of(f->scope, TN_SCOPE_SAVED, "saved");
    tn_tensor tensor = vector_in(op, 640, "x", f->stream);
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_READ, f->stream, &lease, &view));
    EXPECT_OK(tn_tensor_move(tensor, saved));
    EXPECT_OK(tn_tensor_move(tensor, saved)); /* where it is: no change */
    assert_int_equal(fixture_ledger(op).total_bytes, 0);
    assert_int_equal(fixture_ledger(op).tensors, 0);
    assert_int_equal(fixture_ledger(op).leases, 0);
    assert_int_equal(fixture_ledger(saved).total_bytes, 640);
    assert_int_equal(fixture_ledger(saved).leases, 1);
    assert_int_equal(fixture_ledger(f->scope).total_bytes, 640);
    assert_int_equal(fixture_ledger(f->scope).peak_total_bytes, 640); /* never counted twice */
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    assert_int_equal(info.scope.value, saved.value);
    EXPECT_OK(tn_scope_close(op)); /* the tensor is no longer in it */
    EXPECT_OK(tn_ledger_check(f->pool));
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_state(tensor, TN_PLANE_DATA), TN_PLANE_VALID);
    EXPECT_OK(tn_scope_close(saved));
}

static void a_tensor_does_not_move_to_another_pool(void **state) {
    const tensor_fixture *f = *state;
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_pool *pools[32];
    tn_scope scopes[32];
    tn_tensor tensor = vector_in(f->scope, 10, "x", f->stream);
    /* More pools than locks, so that some share the tensor's lock. */
    for (int i = 0; i < 32; i++) {
        EXPECT_OK(tn_pool_create(f->device, &pool_config, &pools[i]));
        config.pool = pools[i];
        EXPECT_OK(tn_scope_create(&config, &scopes[i]));
        EXPECT_STATUS(tn_tensor_move(tensor, scopes[i]), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("it is not of the pool of scope model");
    }
    for (int i = 0; i < 32; i++) {
        EXPECT_OK(tn_scope_close(scopes[i]));
        EXPECT_OK(tn_pool_destroy(pools[i]));
    }
    EXPECT_STATUS(tn_tensor_move(tensor, scopes[0]), TN_STALE_HANDLE);
}

/* Handles end with their scope and leave nothing behind, however deep or wide the tree. */
static void deep_and_wide_trees_close(void **state) {
    const tensor_fixture *f = *state;
    uint64_t handles = tn__handle_count();
    tn_scope root = child_of(f->scope, TN_SCOPE_MODEL, "root");
    tn_scope at = root;
    for (int depth = 0; depth < 3000; depth++) {
        at = child_of(at, TN_SCOPE_LAYER, NULL);
        if (depth % 100 == 0) (void)vector_in(at, 1, NULL, f->stream);
    }
    for (int width = 0; width < 300; width++) {
        (void)vector_in(child_of(root, TN_SCOPE_OP, NULL), 2, NULL, f->stream);
    }
    assert_int_equal(fixture_ledger(root).total_bytes, 30 + 600);
    assert_int_equal(fixture_ledger(at).total_bytes, 0);
    EXPECT_OK(tn_ledger_check(f->pool));
    EXPECT_OK(tn_scope_close(root));
    assert_int_equal(fixture_owned_bytes(f), 0);
    assert_int_equal(tn__handle_count(), handles);
}

static void names_are_copied_and_have_defaults(void **state) {
    const tensor_fixture *f = *state;
    char name[8] = "before";
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_tensor tensor = vector_in(f->scope, 1, name, f->stream);
    memcpy(name, "after!", 7);
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    assert_string_equal(info.name, "before");
    EXPECT_OK(tn_tensor_info_get(vector_in(f->scope, 1, NULL, f->stream), &info));
    assert_string_equal(info.name, "tensor");
    assert_ptr_equal(info.pool, f->pool);
    info.size = 1;
    EXPECT_STATUS(tn_tensor_info_get(tensor, &info), TN_INVALID_ARGUMENT);
}

static void sister_libraries_find_the_device_and_the_pool(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = vector_in(f->scope, 1, "x", f->stream);
    tn_device *device = NULL;
    tn_pool *pool = NULL;
    EXPECT_OK(tn__tensor_device(tensor, &device));
    assert_ptr_equal(device, f->device);
    EXPECT_OK(tn__scope_device(f->scope, &device));
    assert_ptr_equal(device, f->device);
    EXPECT_OK(tn__scope_pool(f->scope, &pool));
    assert_ptr_equal(pool, f->pool);
    EXPECT_STATUS(tn__scope_pool((tn_scope){0}, &pool), TN_STALE_HANDLE);
    EXPECT_STATUS(tn__tensor_device((tn_tensor){0}, &device), TN_STALE_HANDLE);
}

static void a_root_that_could_not_be_made_leaves_nothing(void **state) {
    const tensor_fixture *f = *state;
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {3};
    int failures = 0;
    EXPECT_OK(tn_pool_create(f->device, &pool_config, &config.pool));
    long blocks = tn__host_live_blocks();
    for (long nth = 1;; nth++) {
        tn__host_alloc_fault(nth, 0);
        tn_status status = tn_scope_create(&config, &scope);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) break;
        assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
        assert_int_equal(tn__host_live_blocks(), blocks);
        assert_int_equal(scope.value, 3);
        failures++;
    }
    assert_true(failures >= 3); /* the books, the scope, its name */
    EXPECT_OK(tn_scope_close(scope));
    assert_int_equal(tn__host_live_blocks(), blocks);
    EXPECT_OK(tn_pool_destroy(config.pool));
}

/* A scope that is left open keeps the device from being closed under it. */
/* Also one that has no memory of it: what is made there later would come from it. */
static void an_open_scope_keeps_the_pool_and_the_device_open(void **state) {
    (void)state;
    tensor_fixture fixture;
    tensor_fixture_open(&fixture);
    EXPECT_STATUS(tn_pool_destroy(fixture.pool), TN_IN_USE);
    EXPECT_ERROR_HAS("pool fixture has scopes of tensors");
    tn_tensor tensor = vector_in(fixture.scope, 1000, "later", fixture.stream);
    EXPECT_STATUS(tn_pool_destroy(fixture.pool), TN_LEAK);
    EXPECT_OK(tn_tensor_destroy(tensor, fixture.stream));
    EXPECT_OK(tn_stream_destroy(fixture.device, fixture.stream));
    EXPECT_OK(tn_stream_destroy(fixture.device, fixture.other));
    EXPECT_STATUS(tn_device_destroy(fixture.device), TN_IN_USE);
    EXPECT_OK(tn_scope_close(fixture.scope));
    EXPECT_OK(tn_pool_destroy(fixture.pool));
    EXPECT_OK(tn_device_destroy(fixture.device));
}

static void a_lease_in_a_closing_scope_keeps_the_pool(void **state) {
    (void)state;
    tensor_fixture fixture;
    tensor_fixture_open(&fixture);
    tn_tensor tensor = fixture_tensor(&fixture, TN_FORMAT_PLAIN, 0, 4, "empty");
    tn_lease lease = fixture_lease(tensor, TN_PLANE_DATA, TN_WRITE, fixture.stream);
    EXPECT_OK(tn_scope_close_deferred(fixture.scope));
    EXPECT_STATUS(tn_pool_destroy(fixture.pool), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_stream_destroy(fixture.device, fixture.stream));
    EXPECT_OK(tn_stream_destroy(fixture.device, fixture.other));
    EXPECT_OK(tn_pool_destroy(fixture.pool));
    EXPECT_OK(tn_device_destroy(fixture.device));
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(configs_that_do_not_fit_are_refused),
        WITH_FIXTURE(closing_frees_all_that_is_below),
        WITH_FIXTURE(a_live_lease_anywhere_below_keeps_everything),
        WITH_FIXTURE(a_closed_scope_takes_no_tensor_and_no_child),
        WITH_FIXTURE(a_tensor_moves_with_its_planes_and_leases),
        WITH_FIXTURE(a_tensor_does_not_move_to_another_pool),
        WITH_FIXTURE(deep_and_wide_trees_close),
        WITH_FIXTURE(names_are_copied_and_have_defaults),
        WITH_FIXTURE(sister_libraries_find_the_device_and_the_pool),
        WITH_FIXTURE(a_root_that_could_not_be_made_leaves_nothing),
        cmocka_unit_test(an_open_scope_keeps_the_pool_and_the_device_open),
        cmocka_unit_test(a_lease_in_a_closing_scope_keeps_the_pool),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
