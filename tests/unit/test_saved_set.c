/* Saved-for-backward sets: dropped and rebuilt, with the exact bytes of each moment. */
#include "tensor_fixture.h"

#include <string.h>

#include "error.h"
#include "tenure_pool.h"

enum { PLAIN_BYTES = 64 * 32 * 2 };                              /* bf16 */
enum { ROW_BYTES = 256 * 128 + 32, COL_BYTES = 256 * 128 + 16 }; /* 2D, 256 x 128 */

typedef struct saved_fixture {
    tensor_fixture base;
    tn_scope set;
    tn_tensor plain, block;
    int calls;
    tn_status fails_with; /* after all has been written, or as the next says */
    int skips_block, leaves_lease, makes_others, writes_col, is_read_meanwhile;
    tn_lease left;
    tn_lease theirs; /* of another thread */
    tn_tensor made;
} saved_fixture;

static tn_tensor make(tn_scope scope, tn_format format, const char *name) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = format;
    config.dtype = format == TN_FORMAT_PLAIN ? TN_BF16 : TN_E4M3;
    config.rank = 2;
    config.shape[0] = format == TN_FORMAT_PLAIN ? 64 : 256;
    config.shape[1] = format == TN_FORMAT_PLAIN ? 32 : 128;
    config.name = name;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    return tensor;
}

static void fill(const saved_fixture *f, tn_tensor tensor, unsigned char byte) {
    EXPECT_OK(tn_plane_fill(tensor, TN_PLANE_DATA, byte, f->base.stream));
}

/* As a forward pass would: writes what the set has. */
static tn_status recompute(void *context, tn_scope scope, tn_stream stream) {
    saved_fixture *f = context;
    tn_plane_view view;
    f->calls++;
    assert_ptr_equal(stream, f->base.other);
    assert_int_equal(scope.value, f->set.value);
    TN_TRY(tn_plane_fill(f->plain, TN_PLANE_DATA, 7, stream));
    if (f->makes_others) {
        f->made = make(scope, TN_FORMAT_PLAIN, "made");
        TN_TRY(tn_plane_fill(f->made, TN_PLANE_DATA, 1, stream));
    }
    if (f->leaves_lease) {
        TN_TRY(tn_lease_begin(f->plain, TN_PLANE_DATA, TN_UPDATE, stream, &f->left, &view));
    }
    if (f->is_read_meanwhile) {
        EXPECT_OK(
            tn_lease_begin(f->plain, TN_PLANE_DATA, TN_READ, f->base.stream, &f->theirs, &view));
    }
    if (f->skips_block) return f->fails_with;
    fixture_write(f->block, f->writes_col ? TN_PLANE_COL : TN_PLANE_ROW, stream);
    if (f->fails_with != TN_OK) return TN_FAIL(f->fails_with, "the forward pass broke");
    return TN_OK;
}

static int open_set(void **state) {
    static saved_fixture f;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    memset(&f, 0, sizeof f);
    tensor_fixture_open(&f.base);
    config.parent = f.base.scope;
    config.kind = TN_SCOPE_SAVED;
    config.name = "layer 3";
    EXPECT_OK(tn_scope_create(&config, &f.set));
    f.plain = make(f.set, TN_FORMAT_PLAIN, "x");
    f.block = make(f.set, TN_FORMAT_FP8_BLOCK_2D, "q");
    fill(&f, f.plain, 7);
    fixture_write(f.block, TN_PLANE_ROW, f.base.stream);
    EXPECT_OK(tn_saved_recompute_set(f.set, recompute, &f));
    *state = &f;
    return 0;
}

static int close_set(void **state) {
    saved_fixture *f = *state;
    tensor_fixture_close(&f->base);
    return 0;
}

static int is_dropped(const saved_fixture *f) {
    int dropped = -1;
    EXPECT_OK(tn_saved_is_dropped(f->set, &dropped));
    return dropped;
}

static size_t owned(const saved_fixture *f) {
    EXPECT_OK(tn_ledger_check(f->base.pool));
    assert_int_equal(fixture_ledger(f->set).total_bytes, fixture_owned_bytes(&f->base));
    return fixture_owned_bytes(&f->base);
}

/* ---- tests ---------------------------------------------------------------------------------- */

static void a_set_is_dropped_and_rebuilt_to_the_byte(void **state) {
    saved_fixture *f = *state;
    unsigned char bytes[PLAIN_BYTES];
    assert_int_equal(owned(f), PLAIN_BYTES + ROW_BYTES);
    for (int step = 1; step <= 3; step++) {
        EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
        assert_int_equal(is_dropped(f), 1);
        assert_int_equal(owned(f), 0);
        assert_int_equal(fixture_ledger(f->set).tensors, 2); /* the handles stay */
        EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
        EXPECT_OK(tn_saved_rebuild(f->set, f->base.other));
        assert_int_equal(is_dropped(f), 0);
        assert_int_equal(f->calls, step);
        assert_int_equal(owned(f), PLAIN_BYTES + ROW_BYTES);
        EXPECT_OK(tn_saved_rebuild(f->set, f->base.other)); /* it is whole: no call */
        assert_int_equal(f->calls, step);
    }
    EXPECT_OK(tn_plane_read(f->plain, TN_PLANE_DATA, bytes, sizeof bytes, NULL, 0, f->base.other));
    EXPECT_OK(tn_stream_synchronize(f->base.device, f->base.other));
    for (int i = 0; i < PLAIN_BYTES; i++)
        assert_int_equal(bytes[i], 7);
}

static void what_is_dropped_says_so(void **state) {
    saved_fixture *f = *state;
    tn_lease lease;
    tn_plane_view view;
    tn_stream stream = f->base.stream;
    EXPECT_OK(tn_saved_drop(f->set, stream));
    for (int access = TN_READ; access <= TN_UPDATE; access++) {
        EXPECT_STATUS(
            tn_lease_begin(f->plain, TN_PLANE_DATA, (tn_access)access, stream, &lease, &view),
            TN_INVALID_STATE);
        EXPECT_ERROR_HAS("tensor x is of the saved set layer 3, which is dropped");
    }
    EXPECT_STATUS(tn_plane_require(f->block, TN_PLANE_COL, stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tn_saved_rebuild first");
    EXPECT_STATUS(tn_plane_make(f->block, TN_PLANE_ROW, stream), TN_INVALID_STATE);
    EXPECT_STATUS(tn_tensor_move(f->plain, f->base.scope), TN_INVALID_STATE);
    assert_int_equal(owned(f), 0);
    assert_int_equal(fixture_state(f->plain, TN_PLANE_DATA), TN_PLANE_ABSENT);
    EXPECT_OK(tn_tensor_destroy(f->plain, stream)); /* not needed any more */
    f->plain = make(f->set, TN_FORMAT_PLAIN, "x again");
    EXPECT_OK(tn_saved_rebuild(f->set, f->base.other));
    assert_int_equal(owned(f), PLAIN_BYTES + ROW_BYTES);
}

static void a_leased_plane_stops_the_drop(void **state) {
    saved_fixture *f = *state;
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_lease_begin(f->block, TN_PLANE_ROW, TN_READ, f->base.other, &lease, &view));
    EXPECT_STATUS(tn_saved_drop(f->set, f->base.stream), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor q, plane ROW");
    EXPECT_ERROR_HAS("dropping its saved set must wait");
    assert_int_equal(owned(f), PLAIN_BYTES + ROW_BYTES);
    assert_int_equal(is_dropped(f), 0);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    assert_int_equal(owned(f), 0);
}

static void a_function_that_fails_leaves_nothing(void **state) {
    saved_fixture *f = *state;
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    f->fails_with = TN_COMM_ERROR;
    f->makes_others = f->leaves_lease = 1;
    EXPECT_STATUS(tn_saved_rebuild(f->set, f->base.other), TN_COMM_ERROR);
    EXPECT_ERROR_HAS("the forward pass broke");
    assert_int_equal(owned(f), 0);
    assert_int_equal(is_dropped(f), 1);
    assert_int_equal(fixture_ledger(f->set).leases, 0);
    assert_int_equal(fixture_ledger(f->set).tensors, 2);
    EXPECT_STATUS(tn_lease_end(f->left), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_destroy(f->made, f->base.stream), TN_STALE_HANDLE);
    f->fails_with = TN_OK;
    f->makes_others = f->leaves_lease = 0;
    EXPECT_OK(tn_saved_rebuild(f->set, f->base.other));
    assert_int_equal(owned(f), PLAIN_BYTES + ROW_BYTES);
}

/* The function has its leases on the stream that it is given; what is on another is not its own. */
static void a_function_that_fails_ends_no_lease_of_others(void **state) {
    saved_fixture *f = *state;
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    f->fails_with = TN_COMM_ERROR;
    f->is_read_meanwhile = 1;
    EXPECT_STATUS(tn_saved_rebuild(f->set, f->base.other), TN_COMM_ERROR);
    assert_int_equal(is_dropped(f), 1);
    assert_int_equal(owned(f), PLAIN_BYTES); /* while it is read */
    EXPECT_OK(tn_lease_end(f->theirs));
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    assert_int_equal(owned(f), 0);
    f->fails_with = TN_OK;
    f->is_read_meanwhile = 0;
    EXPECT_OK(tn_saved_rebuild(f->set, f->base.other));
    assert_int_equal(owned(f), PLAIN_BYTES + ROW_BYTES);
}

static void what_it_makes_stays_if_it_succeeds(void **state) {
    saved_fixture *f = *state;
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    f->makes_others = 1;
    EXPECT_OK(tn_saved_rebuild(f->set, f->base.other));
    assert_int_equal(owned(f), 2 * PLAIN_BYTES + ROW_BYTES);
    EXPECT_OK(tn_tensor_destroy(f->made, f->base.stream));
}

/* Contents that are in host memory are contents. */
static void what_was_offloaded_must_come_back(void **state) {
    saved_fixture *f = *state;
    EXPECT_OK(tn_plane_offload(f->block, TN_PLANE_ROW, f->base.stream));
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    f->skips_block = 1;
    EXPECT_STATUS(tn_saved_rebuild(f->set, f->base.other), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("left tensor q, plane ROW without contents");
    f->skips_block = 0;
    EXPECT_OK(tn_saved_rebuild(f->set, f->base.other));
    assert_int_equal(fixture_state(f->block, TN_PLANE_ROW), TN_PLANE_VALID);
}

static void a_function_that_leaves_something_out_has_failed(void **state) {
    saved_fixture *f = *state;
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    f->skips_block = 1;
    EXPECT_STATUS(tn_saved_rebuild(f->set, f->base.other), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("left tensor q, plane ROW without contents");
    assert_int_equal(owned(f), 0);
    f->skips_block = 0;
    f->leaves_lease = 1;
    EXPECT_STATUS(tn_saved_rebuild(f->set, f->base.other), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor x, plane DATA is under a UPDATE lease");
    assert_int_equal(owned(f), 0);
    assert_int_equal(is_dropped(f), 1);
    f->leaves_lease = 0;
    f->writes_col = 1; /* from which ROW can be derived: whole */
    EXPECT_OK(tn_saved_rebuild(f->set, f->base.other));
    assert_int_equal(owned(f), PLAIN_BYTES + COL_BYTES);
    EXPECT_OK(tn_plane_require(f->block, TN_PLANE_ROW, f->base.stream));
}

static tn_status rebuild_inside(void *context, tn_scope scope, tn_stream stream) {
    EXPECT_STATUS(tn_saved_rebuild(scope, stream), TN_INVALID_STATE);
    EXPECT_STATUS(tn_saved_drop(scope, stream), TN_INVALID_STATE);
    return recompute(context, scope, stream);
}

static tn_status close_inside(void *context, tn_scope scope, tn_stream stream) {
    (void)context, (void)stream;
    return tn_scope_close(scope);
}

static void the_function_can_not_pull_the_set_from_under_it(void **state) {
    saved_fixture *f = *state;
    EXPECT_OK(tn_saved_recompute_set(f->set, rebuild_inside, f));
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    EXPECT_OK(tn_saved_rebuild(f->set, f->base.other));
    assert_int_equal(owned(f), PLAIN_BYTES + ROW_BYTES);
    EXPECT_OK(tn_saved_recompute_set(f->set, close_inside, f));
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    EXPECT_STATUS(tn_saved_rebuild(f->set, f->base.other), TN_STALE_HANDLE);
    assert_int_equal(fixture_owned_bytes(&f->base), 0);
}

static void only_saved_scopes_with_a_function_are_sets(void **state) {
    saved_fixture *f = *state;
    EXPECT_STATUS(tn_saved_recompute_set(f->base.scope, recompute, f), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("scope model is not of kind TN_SCOPE_SAVED");
    EXPECT_STATUS(tn_saved_recompute_set(f->set, NULL, f), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_saved_drop(f->base.scope, f->base.stream), TN_INVALID_STATE);
    EXPECT_STATUS(tn_saved_rebuild(f->base.scope, f->base.stream), TN_INVALID_STATE);
    EXPECT_STATUS(tn_saved_is_dropped(f->set, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_saved_drop((tn_scope){0}, f->base.stream), TN_STALE_HANDLE);
}

/* An inner set is its own business; what is below without a set goes with the outer one. */
static void an_inner_set_stays(void **state) {
    saved_fixture *f = *state;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope inner = {0}, below = {0};
    config.parent = f->set;
    config.kind = TN_SCOPE_SAVED;
    EXPECT_OK(tn_scope_create(&config, &inner));
    EXPECT_OK(tn_scope_create(&config, &below));
    EXPECT_OK(tn_saved_recompute_set(inner, recompute, f));
    tn_tensor in_inner = make(inner, TN_FORMAT_PLAIN, "inner");
    tn_tensor in_below = make(below, TN_FORMAT_PLAIN, "below");
    fill(f, in_inner, 1);
    fill(f, in_below, 1);
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    assert_int_equal(owned(f), PLAIN_BYTES);
    assert_int_equal(fixture_state(in_inner, TN_PLANE_DATA), TN_PLANE_VALID);
    assert_int_equal(fixture_state(in_below, TN_PLANE_DATA), TN_PLANE_ABSENT);
    EXPECT_OK(tn_scope_close(f->set)); /* also while it is dropped */
    assert_int_equal(fixture_owned_bytes(&f->base), 0);
}

static tn_status fill_plain_then_block(void *context, tn_scope scope, tn_stream stream) {
    const saved_fixture *f = context;
    (void)scope;
    TN_TRY(tn_plane_fill(f->plain, TN_PLANE_DATA, 7, stream));
    return tn_plane_fill(f->block, TN_PLANE_ROW, 7, stream);
}

/* One that runs out of device memory half-way: what it had written is freed. */
static void a_shortage_in_the_function_is_undone(void **state) {
    saved_fixture *f = *state;
    static void *blocks[4096];
    int count = 0;
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(tn_saved_recompute_set(f->set, fill_plain_then_block, f));
    EXPECT_OK(tn_saved_drop(f->set, f->base.stream));
    EXPECT_OK(tn_pool_stats_get(f->base.pool, &stats));
    EXPECT_OK(tn_process_limits_set(stats.reserved_bytes, 0));
    while (count < 4096 && tn_alloc(f->base.pool, 16384, f->base.other, NULL, &blocks[count]) == 0)
        count++;
    EXPECT_OK(tn_free(blocks[--count], f->base.other)); /* room for x, not for q */
    EXPECT_STATUS(tn_saved_rebuild(f->set, f->base.other), TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(owned(f), 0);
    assert_int_equal(is_dropped(f), 1);
    while (count > 0)
        EXPECT_OK(tn_free(blocks[--count], f->base.other));
    EXPECT_OK(tn_process_limits_set(0, 0));
    EXPECT_OK(tn_saved_rebuild(f->set, f->base.other));
    assert_int_equal(owned(f), PLAIN_BYTES + ROW_BYTES);
}

int main(void) {
#define WITH_SET(test) cmocka_unit_test_setup_teardown(test, open_set, close_set)
    const struct CMUnitTest tests[] = {
        WITH_SET(a_set_is_dropped_and_rebuilt_to_the_byte),
        WITH_SET(what_is_dropped_says_so),
        WITH_SET(a_leased_plane_stops_the_drop),
        WITH_SET(a_function_that_fails_leaves_nothing),
        WITH_SET(a_function_that_fails_ends_no_lease_of_others),
        WITH_SET(what_it_makes_stays_if_it_succeeds),
        WITH_SET(a_function_that_leaves_something_out_has_failed),
        WITH_SET(what_was_offloaded_must_come_back),
        WITH_SET(the_function_can_not_pull_the_set_from_under_it),
        WITH_SET(only_saved_scopes_with_a_function_are_sets),
        WITH_SET(an_inner_set_stays),
        WITH_SET(a_shortage_in_the_function_is_undone),
    };
    return cmocka_run_group_tests_name("unit/saved_set", tests, NULL, NULL);
}
