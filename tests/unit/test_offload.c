/* Offloading on the host driver: contents go to pinned memory and come back to the bit, the ledger
 * knows where they are, and whatever else is done to a plane meanwhile finds them.
 */
#include "tensor_fixture.h"

#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"
#include "options.h"
#include "tenure_lifetime.h"

enum { ROWS = 200, COLS = 300 };

static unsigned char byte_at(size_t index) { return (unsigned char)(index * 37 + index / 251); }

/* A plane with every byte known. */
static tn_plane_layout write_known(const tensor_fixture *f, tn_tensor tensor, tn_plane plane) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &layout));
    size_t bytes = layout.data_bytes + layout.scale_bytes;
    unsigned char *known = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++)
        known[i] = byte_at(i);
    EXPECT_OK(tn_plane_write(tensor, plane, known, layout.data_bytes,
                             layout.scale_bytes ? known + layout.data_bytes : NULL,
                             layout.scale_bytes, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    free(known);
    return layout;
}

/* Of what was derived only the data: the padding of its scales is written as 0. */
static void expect_known_part(const tensor_fixture *f, tn_tensor tensor, tn_plane plane,
                              int is_data_only) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &layout));
    size_t bytes = layout.data_bytes + layout.scale_bytes;
    unsigned char *read = malloc(bytes + 1);
    EXPECT_OK(tn_plane_read(tensor, plane, read, layout.data_bytes,
                            layout.scale_bytes ? read + layout.data_bytes : NULL,
                            layout.scale_bytes, f->other));
    EXPECT_OK(tn_stream_synchronize(f->device, f->other));
    for (size_t i = 0; i < (is_data_only ? layout.data_bytes : bytes); i++)
        assert_int_equal(read[i], byte_at(i));
    free(read);
}

static void expect_known(const tensor_fixture *f, tn_tensor tensor, tn_plane plane) {
    expect_known_part(f, tensor, plane, 0);
}

static void expect_bytes(const tensor_fixture *f, size_t owned, size_t offloaded) {
    tn_ledger ledger = fixture_ledger(f->scope);
    assert_int_equal(ledger.total_bytes, owned);
    assert_int_equal(ledger.offloaded_bytes, offloaded);
    assert_int_equal(fixture_owned_bytes(f), owned);
    EXPECT_OK(tn_ledger_check(f->pool));
}

static tn_tensor offloaded_tensor(const tensor_fixture *f, tn_format format, tn_plane plane,
                                  size_t *bytes) {
    tn_tensor tensor = fixture_tensor(f, format, ROWS, COLS, "w");
    tn_plane_layout layout = write_known(f, tensor, plane);
    EXPECT_OK(tn_plane_offload(tensor, plane, f->stream));
    assert_int_equal(fixture_state(tensor, plane), TN_PLANE_OFFLOADED);
    *bytes = layout.data_bytes + layout.scale_bytes;
    return tensor;
}

/* ---- there and back ------------------------------------------------------------------------ */

static void a_plane_comes_back_to_the_bit(void **state) {
    static const struct {
        tn_format format;
        tn_dtype dtype;
        tn_plane plane;
    } cases[] = {
        {TN_FORMAT_PLAIN, TN_BF16, TN_PLANE_DATA},
        {TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_PLANE_COL},
        {TN_FORMAT_FP8_BLOCK_2D, TN_E5M2, TN_PLANE_ROW},
        {TN_FORMAT_FP8_TENSOR, TN_E4M3, TN_PLANE_COL},
        {TN_FORMAT_MXFP8, TN_E4M3, TN_PLANE_ROW},
        {TN_FORMAT_NVFP4, TN_E2M1, TN_PLANE_ROW},
    };
    tensor_fixture f;
    (void)state;
    tensor_fixture_open(&f);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
        tn_tensor tensor;
        config.format = cases[i].format;
        config.dtype = cases[i].dtype;
        config.rank = 2;
        config.shape[0] = ROWS;
        config.shape[1] = COLS;
        EXPECT_OK(tn_tensor_create(f.scope, &config, &tensor));
        tn_plane_layout layout = write_known(&f, tensor, cases[i].plane);
        size_t bytes = layout.data_bytes + layout.scale_bytes;
        expect_bytes(&f, bytes, 0);
        EXPECT_OK(tn_plane_offload(tensor, cases[i].plane, f.stream));
        expect_bytes(&f, 0, bytes);
        EXPECT_OK(tn_plane_offload(tensor, cases[i].plane, f.stream)); /* it is */
        EXPECT_OK(tn_plane_prefetch(tensor, cases[i].plane, f.stream));
        assert_int_equal(fixture_state(tensor, cases[i].plane), TN_PLANE_VALID);
        expect_bytes(&f, bytes, 0);
        EXPECT_OK(tn_plane_prefetch(tensor, cases[i].plane, f.stream));
        expect_known(&f, tensor, cases[i].plane);
        EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
    }
    tensor_fixture_close(&f);
}

static void every_way_to_the_contents_brings_them_back(void **state) {
    tensor_fixture f;
    tn_plane_view view, old;
    tn_lease lease;
    size_t bytes;
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor tensor = offloaded_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, TN_PLANE_ROW, &bytes);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_ROW, f.other));
    expect_bytes(&f, bytes, 0);
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_ROW, f.other));
    expect_known(&f, tensor, TN_PLANE_ROW); /* a READ lease */
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_ROW, f.stream));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f.other, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
    expect_known(&f, tensor, TN_PLANE_ROW);
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_ROW, f.stream));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_REPLACE, f.other, &lease, &view));
    EXPECT_OK(tn_lease_old_view(lease, &old));
    assert_ptr_not_equal(old.data, view.data);
    expect_bytes(&f, 2 * bytes, 0);
    EXPECT_OK(tn_lease_abandon(lease));
    expect_known(&f, tensor, TN_PLANE_ROW);
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_ROW, f.stream));
    int calls = fixture_derive_calls();
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f.other)); /* its source comes back */
    assert_int_equal(fixture_derive_calls(), calls + 1);
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_VALID);
    expect_known(&f, tensor, TN_PLANE_ROW);
    tensor_fixture_close(&f);
}

/* Both planes of a tensor; each copy keeps its own contents. */
static void planes_go_one_by_one(void **state) {
    tensor_fixture f;
    size_t row_bytes;
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor tensor = offloaded_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, TN_PLANE_ROW, &row_bytes);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f.stream));
    size_t col_bytes = fixture_owned_bytes(&f) - row_bytes;
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_COL, f.stream));
    expect_bytes(&f, row_bytes, col_bytes);
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_ROW, f.stream));
    expect_bytes(&f, 0, row_bytes + col_bytes);
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f.stream)); /* COL holds the contents */
    expect_bytes(&f, 0, col_bytes);
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_COL, f.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("COL is OFFLOADED and the last copy");
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_ROW, f.stream));
    expect_known_part(&f, tensor, TN_PLANE_ROW, 1);
    tensor_fixture_close(&f);
}

/* ---- writes -------------------------------------------------------------------------------- */

static void a_write_gives_the_plane_new_memory(void **state) {
    (void)state;
    for (int is_abandoned = 0; is_abandoned < 2; is_abandoned++) {
        tensor_fixture f;
        tn_plane_view view;
        tn_lease lease;
        size_t bytes;
        tensor_fixture_open(&f);
        tn_tensor tensor = offloaded_tensor(&f, TN_FORMAT_PLAIN, TN_PLANE_DATA, &bytes);
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, f.other, &lease, &view));
        expect_bytes(&f, bytes, 0); /* what was there is not wanted, and was not copied */
        EXPECT_OK(is_abandoned ? tn_lease_abandon(lease) : tn_lease_end(lease));
        assert_int_equal(fixture_state(tensor, TN_PLANE_DATA),
                         is_abandoned ? TN_PLANE_ALLOCATED : TN_PLANE_VALID);
        tensor_fixture_close(&f);
    }
}

static void host_memory_of_a_plane_that_became_stale_is_freed(void **state) {
    (void)state;
    for (int is_abandoned = 0; is_abandoned < 2; is_abandoned++) {
        tensor_fixture f;
        tn_plane_view view;
        tn_lease lease;
        size_t bytes;
        tensor_fixture_open(&f);
        tn_tensor tensor = offloaded_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, TN_PLANE_ROW, &bytes);
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_WRITE, f.stream, &lease, &view));
        assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_STALE);
        EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, f.stream), TN_INVALID_STATE);
        assert_int_equal(fixture_ledger(f.scope).offloaded_bytes, bytes);
        EXPECT_OK(is_abandoned ? tn_lease_abandon(lease) : tn_lease_end(lease));
        assert_int_equal(fixture_state(tensor, TN_PLANE_ROW),
                         is_abandoned ? TN_PLANE_OFFLOADED : TN_PLANE_ABSENT);
        assert_int_equal(fixture_ledger(f.scope).offloaded_bytes, is_abandoned ? bytes : 0);
        if (is_abandoned) expect_known(&f, tensor, TN_PLANE_ROW);
        tensor_fixture_close(&f);
    }
}

/* ---- owners -------------------------------------------------------------------------------- */

static void offloaded_planes_change_owner_where_they_are(void **state) {
    tensor_fixture f;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope kept;
    tn_tensor saved, clone;
    size_t bytes;
    (void)state;
    tensor_fixture_open(&f);
    config.parent = f.scope;
    config.kind = TN_SCOPE_SAVED;
    EXPECT_OK(tn_scope_create(&config, &kept));
    tn_tensor tensor = offloaded_tensor(&f, TN_FORMAT_PLAIN, TN_PLANE_DATA, &bytes);
    EXPECT_OK(tn_tensor_save(tensor, TN_PLANE_BIT(TN_PLANE_DATA), kept, f.stream, &saved));
    assert_int_equal(fixture_state(saved, TN_PLANE_DATA), TN_PLANE_OFFLOADED);
    assert_int_equal(fixture_ledger(kept).offloaded_bytes, bytes);
    expect_bytes(&f, 0, bytes);
    EXPECT_OK(tn_tensor_move(saved, f.scope));
    assert_int_equal(fixture_ledger(kept).offloaded_bytes, 0);
    EXPECT_OK(tn_tensor_move(saved, kept));
    EXPECT_OK(tn_tensor_restore_into(saved, tensor));
    assert_int_equal(fixture_state(tensor, TN_PLANE_DATA), TN_PLANE_OFFLOADED);
    EXPECT_OK(tn_tensor_clone(tensor, kept, f.stream, &clone)); /* reads it */
    expect_bytes(&f, 2 * bytes, 0);
    expect_known(&f, clone, TN_PLANE_DATA);
    EXPECT_OK(tn_plane_offload(clone, TN_PLANE_DATA, f.stream));
    EXPECT_OK(tn_scope_close(kept));
    expect_bytes(&f, bytes, 0);
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_DATA, f.stream));
    EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
    expect_bytes(&f, 0, 0);
    tensor_fixture_close(&f);
}

static uint64_t memory_calls(const tensor_fixture *f) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    EXPECT_OK(tn_device_driver_stats(f->device, &stats));
    return stats.calls[TN_CALL_MEM_ALLOC] + stats.calls[TN_CALL_MEM_FREE];
}

static void pinned_memory_is_reused_and_goes_with_the_last_scope(void **state) {
    tensor_fixture f;
    size_t bytes;
    (void)state;
    tensor_fixture_open(&f);
    long blocks = tn__host_live_blocks();
    tn_tensor tensor = offloaded_tensor(&f, TN_FORMAT_PLAIN, TN_PLANE_DATA, &bytes);
    EXPECT_OK(tn_plane_prefetch(tensor, TN_PLANE_DATA, f.stream));
    uint64_t calls = memory_calls(&f);
    for (int i = 0; i < 20; i++) {
        EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_DATA, f.stream));
        EXPECT_OK(tn_plane_prefetch(tensor, TN_PLANE_DATA, f.stream));
    }
    assert_int_equal(memory_calls(&f), calls);
    expect_known(&f, tensor, TN_PLANE_DATA);
    EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_DATA, f.stream));
    EXPECT_OK(tn_scope_close(f.scope));
    assert_true(memory_calls(&f) > calls); /* the pool of pinned memory is gone, and its stream */
    tensor_fixture_close(&f);
    assert_true(tn__host_live_blocks() < blocks);
}

/* ---- the policy ---------------------------------------------------------------------------- */

static void under_the_policy_a_release_offloads(void **state) {
    tensor_fixture f;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_PLAIN, ROWS, COLS, "activation");
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_OFFLOAD));
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    assert_int_equal(info.policy, TN_POLICY_OFFLOAD);
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_DATA, f.stream)); /* absent: nothing to do */
    tn_plane_layout layout = write_known(&f, tensor, TN_PLANE_DATA);
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_DATA, f.stream));
    assert_int_equal(fixture_state(tensor, TN_PLANE_DATA), TN_PLANE_OFFLOADED);
    expect_bytes(&f, 0, layout.data_bytes);
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_DATA, f.stream));
    expect_known(&f, tensor, TN_PLANE_DATA);
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_READ, f.stream, &lease, &view));
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_DATA, f.stream)); /* another one still reads */
    assert_int_equal(fixture_state(tensor, TN_PLANE_DATA), TN_PLANE_VALID);
    EXPECT_OK(tn_lease_end(lease));
    assert_string_equal(tn_policy_name(TN_POLICY_OFFLOAD), "offload");
    tensor_fixture_close(&f);
}

static void pinned_memory_has_a_limit(void **state) {
    tensor_fixture f;
    (void)state;
    assert_int_equal(setenv("TENURE_OFFLOAD_LIMIT", "64KiB", 1), 0);
    tn__options_reload();
    tensor_fixture_open(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_PLAIN, ROWS, COLS, "activation"); /* 240000 */
    tn_plane_layout layout = write_known(&f, tensor, TN_PLANE_DATA);
    EXPECT_STATUS(tn_plane_offload(tensor, TN_PLANE_DATA, f.stream), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("offload");
    assert_int_equal(fixture_state(tensor, TN_PLANE_DATA), TN_PLANE_VALID);
    expect_bytes(&f, layout.data_bytes, 0);
    EXPECT_OK(tn_tensor_set_policy(tensor, TN_POLICY_OFFLOAD));
    EXPECT_OK(tn_plane_release(tensor, TN_PLANE_DATA, f.stream)); /* stays where it is */
    expect_bytes(&f, layout.data_bytes, 0);
    expect_known(&f, tensor, TN_PLANE_DATA);
    tensor_fixture_close(&f);
    assert_int_equal(unsetenv("TENURE_OFFLOAD_LIMIT"), 0);
    tn__options_reload();
}

/* ---- what is refused, and failures --------------------------------------------------------- */

static void what_can_not_be_offloaded_is_refused(void **state) {
    tensor_fixture f;
    tn_plane_view view;
    tn_lease lease;
    float memory[4] = {1, 2, 3, 4};
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_PLAIN, ROWS, COLS, "w");
    EXPECT_STATUS(tn_plane_offload(tensor, TN_PLANE_ROW, f.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_plane_offload(tensor, TN_PLANE_DATA, f.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("DATA is ABSENT: only a valid one is offloaded");
    EXPECT_STATUS(tn_plane_prefetch(tensor, TN_PLANE_DATA, f.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("DATA is ABSENT: there is nothing to fetch");
    fixture_write(tensor, TN_PLANE_DATA, f.stream);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_READ, f.other, &lease, &view));
    EXPECT_STATUS(tn_plane_offload(tensor, TN_PLANE_DATA, f.stream), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_STATUS(tn_plane_offload(tensor, TN_PLANE_DATA, (tn_stream)&f), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_plane_offload((tn_tensor){0}, TN_PLANE_DATA, f.stream), TN_STALE_HANDLE);
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_foreign_memory theirs = TN_FOREIGN_MEMORY_INIT;
    config.rank = 1;
    config.shape[0] = 4;
    theirs.data = memory;
    theirs.data_bytes = sizeof memory;
    EXPECT_OK(tn_tensor_adopt(f.scope, &config, &theirs, &tensor));
    EXPECT_STATUS(tn_plane_offload(tensor, TN_PLANE_DATA, f.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("not in memory of its own");
    tensor_fixture_close(&f);
}

/* Host memory fails at every place of the way there, and of the way back. */
/* It is refused, and what is refused changes nothing: the plane is not brought back for it. */
static void an_update_of_what_is_stale_in_host_memory_changes_nothing(void **state) {
    tensor_fixture f;
    tn_plane_view view;
    tn_lease write, update;
    size_t bytes = 0;
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor tensor = offloaded_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, TN_PLANE_COL, &bytes);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f.stream, &write, &view));
    size_t written = view.layout.data_bytes + view.layout.scale_bytes;
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_STALE);
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_COL, TN_UPDATE, f.stream, &update, &view),
                  TN_INVALID_STATE);
    expect_bytes(&f, written, bytes);
    EXPECT_OK(tn_lease_abandon(write));
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_OFFLOADED);
    expect_bytes(&f, 0, bytes);
    expect_known(&f, tensor, TN_PLANE_COL);
    tensor_fixture_close(&f);
}

static void host_memory_failures_leave_the_plane_whole(void **state) {
    tensor_fixture f;
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, ROWS, COLS, "w");
    tn_plane_layout layout = write_known(&f, tensor, TN_PLANE_ROW);
    size_t bytes = layout.data_bytes + layout.scale_bytes;
    int failures = 0;
    for (int is_back = 0; is_back < 2; is_back++) {
        for (int nth = 1;; nth++) {
            tn__host_alloc_fault(nth, 0);
            tn_status status = is_back ? tn_plane_prefetch(tensor, TN_PLANE_ROW, f.stream)
                                       : tn_plane_offload(tensor, TN_PLANE_ROW, f.stream);
            tn__host_alloc_fault(0, 0);
            if (status == TN_OK) break;
            assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
            assert_int_equal(fixture_state(tensor, TN_PLANE_ROW),
                             is_back ? TN_PLANE_OFFLOADED : TN_PLANE_VALID);
            expect_bytes(&f, is_back ? 0 : bytes, is_back ? bytes : 0);
            failures++;
        }
    }
    assert_true(failures >= 3); /* the offload, its pool, the new memory's record there and back */
    expect_known(&f, tensor, TN_PLANE_ROW);
    tensor_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plane_comes_back_to_the_bit),
        cmocka_unit_test(every_way_to_the_contents_brings_them_back),
        cmocka_unit_test(planes_go_one_by_one),
        cmocka_unit_test(a_write_gives_the_plane_new_memory),
        cmocka_unit_test(host_memory_of_a_plane_that_became_stale_is_freed),
        cmocka_unit_test(offloaded_planes_change_owner_where_they_are),
        cmocka_unit_test(pinned_memory_is_reused_and_goes_with_the_last_scope),
        cmocka_unit_test(under_the_policy_a_release_offloads),
        cmocka_unit_test(pinned_memory_has_a_limit),
        cmocka_unit_test(what_can_not_be_offloaded_is_refused),
        cmocka_unit_test(an_update_of_what_is_stale_in_host_memory_changes_nothing),
        cmocka_unit_test(host_memory_failures_leave_the_plane_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
