/* Exports and imports on the simulated driver: the order of the consumer's stream with ours, where
 * the memory is, and deleters that come while the driver or the host's memory fail.
 */
#include "tensor_fixture.h"

#include "dlpack_abi.h"
#include "driver.h"
#include "host_alloc.h"
#include "tenure_lifetime.h"

enum { ROWS = 64, COLS = 64, BYTES = ROWS * COLS * 4 };

static void touch(const tensor_fixture *f, const void *data, int is_write, tn_stream stream) {
    tn__range range = {data, BYTES, is_write};
    EXPECT_OK(tn__device_driver(f->device)->ghost_launch(tn__device_state(f->device), "touch",
                                                         &range, 1, 50.0, stream));
}

static void use(const tensor_fixture *f, tn_tensor tensor, tn_access access, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, access, stream, &lease, &view));
    touch(f, view.data, access != TN_READ, stream);
    EXPECT_OK(tn_lease_end(lease));
}

static tn__dl_versioned *export_to(tn_tensor tensor, tn_access access, tn_stream stream) {
    tn_dlpack_export_config config = TN_DLPACK_EXPORT_CONFIG_INIT;
    struct DLManagedTensorVersioned *managed = NULL;
    config.access = access;
    config.stream = stream;
    EXPECT_OK(tn_dlpack_export_versioned(tensor, &config, &managed));
    return (tn__dl_versioned *)managed;
}

/* ---- order --------------------------------------------------------------------------------- */

/* We write on one stream; the consumer reads, or writes, on another without any lease of ours; we
 * write again: only the export orders the three. */
static void a_consumer_comes_between_our_uses(void **state) {
    (void)state;
    for (int is_update = 0; is_update < 2; is_update++) {
        tensor_fixture f;
        tensor_fixture_open_sim(&f);
        tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_PLAIN, ROWS, COLS, "ours");
        use(&f, tensor, TN_WRITE, f.stream);
        uint64_t waits = fixture_waits(&f);
        tn__dl_versioned *managed = export_to(tensor, is_update ? TN_UPDATE : TN_READ, f.other);
        assert_int_equal(fixture_waits(&f) - waits, 1);
        assert_int_equal(managed->tensor.device.type, TN__DL_CUDA);
        assert_int_equal(managed->tensor.device.id, 0);
        touch(&f, managed->tensor.data, is_update, f.other);
        managed->deleter(managed);
        use(&f, tensor, TN_WRITE, f.stream);
        assert_int_equal(fixture_waits(&f) - waits, 2);
        assert_int_equal(test_sim_get()->race_count(), 0);
        tensor_fixture_close(&f);
    }
}

/* Memory that the consumer has used is given out again behind its work: the device has not enough
 * for both tensors. */
static void memory_is_given_out_again_behind_the_consumer(void **state) {
    tensor_fixture f;
    (void)state;
    tensor_fixture_open_sim(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_PLAIN, 3 << 20, COLS, "ours"); /* of 1 GiB */
    use(&f, tensor, TN_WRITE, f.stream);
    tn__dl_versioned *managed = export_to(tensor, TN_READ, f.other);
    touch(&f, managed->tensor.data, 0, f.other);
    managed->deleter(managed);
    EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
    tn_tensor next = fixture_tensor(&f, TN_FORMAT_PLAIN, 3 << 20, COLS, "next");
    use(&f, next, TN_WRITE, f.stream);
    assert_int_equal(test_sim_get()->race_count(), 0);
    tensor_fixture_close(&f);
}

/* What the test above would not see if the export did not order the consumer. */
static void a_consumer_after_its_deleter_races(void **state) {
    tensor_fixture f;
    (void)state;
    tensor_fixture_open_sim(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_PLAIN, ROWS, COLS, "ours");
    use(&f, tensor, TN_WRITE, f.stream);
    tn__dl_versioned *managed = export_to(tensor, TN_READ, f.other);
    void *data = managed->tensor.data;
    managed->deleter(managed);
    use(&f, tensor, TN_WRITE, f.stream);
    touch(&f, data, 0, f.other);
    assert_int_equal(test_sim_get()->race_count(), 1);
    EXPECT_OK(tn_device_synchronize(f.device));
    EXPECT_OK(tn_scope_close(f.scope));
    EXPECT_OK(tn_stream_destroy(f.device, f.stream));
    EXPECT_OK(tn_stream_destroy(f.device, f.other));
    EXPECT_OK(tn_pool_destroy(f.pool));
    EXPECT_OK(tn_device_destroy(f.device));
}

/* ---- failures ------------------------------------------------------------------------------ */

/* The pool can not be told of the consumer's use when the deleter comes: it is told later. */
static void a_deleter_never_fails(void **state) {
    (void)state;
    for (int is_update = 0; is_update < 2; is_update++) {
        tensor_fixture f;
        tensor_fixture_open_sim(&f);
        tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_PLAIN, 3 << 20, COLS, "ours");
        use(&f, tensor, TN_WRITE, f.stream);
        tn__dl_versioned *managed = export_to(tensor, is_update ? TN_UPDATE : TN_READ, f.other);
        touch(&f, managed->tensor.data, is_update, f.other);
        tn__host_alloc_fault(1, 1); /* the pool has not seen this stream yet and can not note it */
        managed->deleter(managed);
        tn__host_alloc_fault(0, 0);
        assert_int_equal(fixture_ledger(f.scope).leases, 0);
        assert_int_equal(fixture_state(tensor, TN_PLANE_DATA), TN_PLANE_VALID);
        EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
        tn_tensor next = fixture_tensor(&f, TN_FORMAT_PLAIN, 3 << 20, COLS, "next");
        use(&f, next, TN_WRITE, f.stream);
        assert_int_equal(test_sim_get()->race_count(), 0);
        tensor_fixture_close(&f);
    }
}

/* The consumer may have written, whether the pool could be told of it or not. */
static void an_update_whose_end_fails_is_a_write(void **state) {
    tensor_fixture f;
    tn_tensor saved;
    tn_plane_budget budget = TN_PLANE_BUDGET_INIT;
    tn_dlpack_export_config config = TN_DLPACK_EXPORT_CONFIG_INIT;
    struct DLManagedTensorVersioned *managed = NULL;
    (void)state;
    for (int is_kept = 0; is_kept < 2; is_kept++) {
        tensor_fixture_open_sim(&f);
        tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, 256, 128, "ours");
        fixture_write(tensor, TN_PLANE_ROW, f.stream);
        EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f.stream));
        if (is_kept) {
            EXPECT_OK(tn_scope_policy_set(f.scope, TN_POLICY_BUDGET));
            EXPECT_OK(tn_scope_budget_set(f.scope, 1 << 20));
            EXPECT_OK(tn_plane_release(tensor, TN_PLANE_COL, f.stream));
        } else {
            EXPECT_OK(
                tn_tensor_save(tensor, TN_PLANE_BIT(TN_PLANE_ROW), f.scope, f.stream, &saved));
        }
        config.plane = TN_PLANE_COL;
        config.access = TN_UPDATE;
        config.stream = f.other;
        EXPECT_OK(tn_dlpack_export_versioned(tensor, &config, &managed));
        tn__dl_versioned *exported = (tn__dl_versioned *)managed;
        tn__host_alloc_fault(1, 1);
        exported->deleter(exported);
        tn__host_alloc_fault(0, 0);
        assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_VALID);
        EXPECT_OK(tn_scope_budget_get(f.scope, &budget));
        assert_int_equal(budget.kept_bytes, 0);
        if (!is_kept) {
            EXPECT_STATUS(tn_tensor_restore_into(saved, tensor), TN_INVALID_STATE);
            EXPECT_ERROR_HAS("has been written since its planes were saved");
        }
        tensor_fixture_close(&f);
    }
}

/* ---- where the memory is ------------------------------------------------------------------- */

static void host_memory_is_exported_as_such(void **state) {
    static const struct {
        tn_pool_backing backing;
        int type;
    } cases[] = {{TN_BACKING_PINNED, TN__DL_CUDA_HOST}, {TN_BACKING_HOST, TN__DL_CPU}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tensor_fixture f;
        tn_pool *pool;
        tn_tensor tensor;
        tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
        tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
        tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
        tn_scope scope;
        tensor_fixture_open_sim(&f);
        pool_config.backing = cases[i].backing;
        EXPECT_OK(tn_pool_create(f.device, &pool_config, &pool));
        scope_config.pool = pool;
        EXPECT_OK(tn_scope_create(&scope_config, &scope));
        config.rank = 1;
        config.shape[0] = 1000;
        EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
        fixture_write(tensor, TN_PLANE_DATA, f.stream);
        tn__dl_versioned *managed = export_to(tensor, TN_READ, f.stream);
        assert_int_equal(managed->tensor.device.type, cases[i].type);
        assert_int_equal(managed->tensor.device.id, 0);
        managed->deleter(managed);
        EXPECT_OK(tn_scope_close(scope));
        EXPECT_OK(tn_pool_destroy(pool));
        tensor_fixture_close(&f);
    }
}

static int deleted;

static void delete_theirs(tn__dl_managed *managed) {
    (void)managed;
    deleted++;
}

static void imports_are_of_this_device(void **state) {
    tensor_fixture f;
    tn_tensor tensor;
    void *data;
    int64_t shape[1] = {BYTES / 4};
    (void)state;
    tensor_fixture_open_sim(&f);
    const tn__driver *driver = tn__device_driver(f.device);
    EXPECT_OK(driver->mem_alloc(tn__device_state(f.device), BYTES, &data));
    tn__dl_managed managed = {
        {data, {TN__DL_CUDA, 1}, 1, {TN__DL_FLOAT, 32, 1}, shape, NULL, 0}, NULL, delete_theirs};
    struct DLManagedTensor *theirs = (struct DLManagedTensor *)&managed;
    EXPECT_STATUS(tn_dlpack_import(f.scope, theirs, NULL, f.other, &tensor), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("on device 1 of kind 2, the scope's is CUDA device 0");
    managed.tensor.device = (tn__dl_device){TN__DL_CPU, 0};
    EXPECT_STATUS(tn_dlpack_import(f.scope, theirs, NULL, f.other, &tensor), TN_INVALID_ARGUMENT);
    managed.tensor.device = (tn__dl_device){TN__DL_CUDA, 0};
    managed.tensor.byte_offset = 8;
    EXPECT_STATUS(tn_dlpack_import(f.scope, theirs, NULL, f.other, &tensor), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("not aligned to 16 bytes");
    managed.tensor.byte_offset = 0;
    touch(&f, data, 1, f.other); /* the producer's last work before it hands the tensor over */
    deleted = 0;
    EXPECT_OK(tn_dlpack_import(f.scope, theirs, NULL, f.other, &tensor));
    use(&f, tensor, TN_UPDATE, f.stream);
    EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
    assert_int_equal(deleted, 1);
    touch(&f, data, 1, f.other); /* and its next */
    assert_int_equal(test_sim_get()->race_count(), 0);
    EXPECT_OK(tn_device_synchronize(f.device));
    EXPECT_OK(driver->mem_free(tn__device_state(f.device), data));
    tensor_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_consumer_comes_between_our_uses),
        cmocka_unit_test(memory_is_given_out_again_behind_the_consumer),
        cmocka_unit_test(a_consumer_after_its_deleter_races),
        cmocka_unit_test(a_deleter_never_fails),
        cmocka_unit_test(an_update_whose_end_fails_is_a_write),
        cmocka_unit_test(host_memory_is_exported_as_such),
        cmocka_unit_test(imports_are_of_this_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
