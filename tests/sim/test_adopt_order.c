/* Adopted memory on the simulated driver: whose memory it is, and the order of its owner's stream
 * with ours. The owner touches it without any lease, so that only the adoption orders the two.
 */
#include "tensor_fixture.h"

#include <stdlib.h>

#include "driver.h"
#include "tenure_lifetime.h"
#include "test_graphs.h"

enum { ROWS = 64, COLS = 64, BYTES = ROWS * COLS * 4, OUT_OF_MEMORY = 2 };

typedef struct owner {
    tensor_fixture f;
    tn_stream stream; /* the owner's own */
    void *data;
    int released;
} owner;

static const tn__driver *driver_of(const owner *self) { return tn__device_driver(self->f.device); }

static void touch(const owner *self, int is_write, tn_stream stream) {
    tn__range range = {self->data, BYTES, is_write};
    EXPECT_OK(driver_of(self)->ghost_launch(tn__device_state(self->f.device), "touch", &range, 1,
                                            50.0, stream));
}

static void owner_open(owner *self) {
    tensor_fixture_open_sim(&self->f);
    self->released = 0;
    EXPECT_OK(tn_stream_create(self->f.device, &self->stream));
    EXPECT_OK(driver_of(self)->mem_alloc(tn__device_state(self->f.device), BYTES, &self->data));
}

static void owner_close(owner *self) {
    EXPECT_OK(tn_scope_close(self->f.scope));
    EXPECT_OK(tn_device_synchronize(self->f.device));
    EXPECT_OK(driver_of(self)->mem_free(tn__device_state(self->f.device), self->data));
    if (self->stream) EXPECT_OK(tn_stream_destroy(self->f.device, self->stream));
    tensor_fixture_close(&self->f);
}

/* The owner uses its memory again as soon as it has it back. */
static void release(void *context) {
    owner *self = context;
    self->released++;
    touch(self, 1, self->stream);
}

static tn_tensor_config config_of(void) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.rank = 2;
    config.shape[0] = ROWS;
    config.shape[1] = COLS;
    return config;
}

static tn_foreign_memory memory_of(owner *self, void *data) {
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    memory.data = data;
    memory.data_bytes = BYTES;
    memory.stream = self->stream;
    memory.release = release;
    memory.context = self;
    return memory;
}

static tn_tensor adopt(owner *self) {
    tn_tensor_config config = config_of();
    tn_foreign_memory memory = memory_of(self, self->data);
    tn_tensor tensor = {0};
    EXPECT_OK(tn_tensor_adopt(self->f.scope, &config, &memory, &tensor));
    return tensor;
}

static void use(owner *self, tn_tensor tensor, tn_access access, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, access, stream, &lease, &view));
    assert_ptr_equal(view.data, self->data);
    touch(self, access != TN_READ, stream);
    EXPECT_OK(tn_lease_end(lease));
}

/* ---- order --------------------------------------------------------------------------------- */

static void our_uses_come_between_the_owners(void **state) {
    (void)state;
    for (int uses = 0; uses < 3; uses++) {
        owner self;
        owner_open(&self);
        touch(&self, 1, self.stream);
        tn_tensor tensor = adopt(&self);
        uint64_t waits = fixture_waits(&self.f);
        if (uses > 0) use(&self, tensor, TN_READ, self.f.stream);
        if (uses > 1) use(&self, tensor, TN_READ, self.f.other);
        EXPECT_OK(tn_tensor_destroy(tensor, self.f.stream));
        assert_int_equal(self.released, 1);
        assert_int_equal(fixture_waits(&self.f) - waits, 2 * uses); /* there and back, no more */
        assert_int_equal(test_sim_get()->race_count(), 0);
        owner_close(&self);
    }
}

/* A capture can not be made to wait for what is outside of it, nor the other way round: the owner
 * would have memory back that is in use. */
static void nothing_goes_back_while_a_capture_is_between(void **state) {
    (void)state;
    for (int is_users = 0; is_users < 2; is_users++) {
        owner self;
        owner_open(&self);
        tn_tensor tensor = adopt(&self);
        use(&self, tensor, TN_UPDATE, self.f.stream);
        tn_stream captures = is_users ? self.f.stream : self.stream;
        test_capture_begin(self.f.device, captures, TEST_CAPTURE_RELAXED);
        EXPECT_STATUS(tn_tensor_destroy(tensor, self.f.other), TN_INVALID_STATE);
        EXPECT_ERROR_HAS("since a capture is between them");
        EXPECT_STATUS(tn_scope_close(self.f.scope), TN_INVALID_STATE);
        assert_int_equal(self.released, 0);
        assert_true(test_is_capturing(self.f.device, captures));
        test_graph graph = test_capture_end(self.f.device, captures);
        test_graph_destroy(self.f.device, &graph);
        EXPECT_OK(tn_tensor_destroy(tensor, self.f.other));
        assert_int_equal(self.released, 1);
        assert_int_equal(test_sim_get()->race_count(), 0);
        owner_close(&self);
    }
}

/* Within one capture the owner's stream waits as ever. */
static void a_captured_owner_waits_for_captured_uses(void **state) {
    owner self;
    (void)state;
    owner_open(&self);
    tn_tensor tensor = adopt(&self);
    test_capture_begin(self.f.device, self.stream, TEST_CAPTURE_RELAXED);
    EXPECT_OK(tn_stream_wait(self.f.device, self.f.stream, self.stream));
    use(&self, tensor, TN_UPDATE, self.f.stream);
    EXPECT_OK(tn_tensor_destroy(tensor, self.f.stream));
    assert_int_equal(self.released, 1);
    test_graph graph = test_capture_end(self.f.device, self.stream); /* all have joined it */
    test_graph_launch(self.f.device, &graph, self.stream);
    assert_int_equal(test_sim_get()->race_count(), 0);
    EXPECT_OK(tn_stream_synchronize(self.f.device, self.stream));
    test_graph_destroy(self.f.device, &graph);
    owner_close(&self);
}

/* What the tests above would not see, were it not for the waits. */
static void an_owner_that_does_not_wait_races(void **state) {
    owner self;
    tn_plane_view view;
    tn_lease lease;
    (void)state;
    owner_open(&self);
    touch(&self, 1, self.stream);
    tn_tensor tensor = adopt(&self);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_READ, self.f.stream, &lease, &view));
    touch(&self, 0, self.f.stream);
    touch(&self, 1, self.stream); /* before the release */
    assert_int_equal(test_sim_get()->race_count(), 1);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_device_synchronize(self.f.device));
    EXPECT_OK(tn_scope_close(self.f.scope));
    EXPECT_OK(tn_stream_destroy(self.f.device, self.stream));
    EXPECT_OK(tn_stream_destroy(self.f.device, self.f.stream));
    EXPECT_OK(tn_stream_destroy(self.f.device, self.f.other));
    EXPECT_OK(driver_of(&self)->mem_free(tn__device_state(self.f.device), self.data));
    EXPECT_OK(tn_pool_destroy(self.f.pool));
    EXPECT_OK(tn_device_destroy(self.f.device));
}

static void an_owner_whose_stream_has_ended_gets_it_back_on_the_default_stream(void **state) {
    owner self;
    (void)state;
    owner_open(&self);
    touch(&self, 1, self.stream);
    tn_tensor tensor = adopt(&self);
    use(&self, tensor, TN_UPDATE, self.f.stream);
    EXPECT_OK(tn_stream_destroy(self.f.device, self.stream));
    self.stream = NULL;
    use(&self, tensor, TN_READ, self.f.other);
    EXPECT_OK(tn_tensor_destroy(tensor, self.f.stream));
    assert_int_equal(self.released, 1);
    owner_close(&self);
}

/* The handle stays, and the memory goes to and fro: each use comes between two of the owner's. */
static void a_plane_that_comes_and_goes_is_between_the_owners_uses(void **state) {
    owner self;
    tn_tensor tensor;
    (void)state;
    owner_open(&self);
    tn_tensor_config config = config_of();
    tn_foreign_memory memory = memory_of(&self, self.data);
    config.regatherable = 1;
    EXPECT_OK(tn_tensor_create(self.f.scope, &config, &tensor));
    touch(&self, 1, self.stream);
    for (int round = 1; round <= 3; round++) {
        EXPECT_OK(tn_plane_adopt(tensor, &memory));
        use(&self, tensor, TN_READ, self.f.stream);
        use(&self, tensor, TN_READ, self.f.other);
        EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_DATA, self.f.stream));
        assert_int_equal(self.released, round);
        assert_int_equal(test_sim_get()->race_count(), 0);
    }
    owner_close(&self);
}

/* ---- failures ------------------------------------------------------------------------------ */

static void a_release_waits_until_the_driver_works(void **state) {
    static const char *const calls[] = {"cuEventRecord", "cuStreamWaitEvent"};
    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (int nth = 1; nth <= 2; nth++) {
            owner self;
            owner_open(&self);
            tn_tensor tensor = adopt(&self);
            use(&self, tensor, TN_READ, self.f.stream);
            use(&self, tensor, TN_READ, self.f.other);
            assert_int_equal(test_sim_get()->fault(calls[i], nth, 0, OUT_OF_MEMORY), 0);
            assert_int_not_equal(tn_tensor_destroy(tensor, self.f.stream), TN_OK);
            assert_int_equal(self.released, 0);
            assert_int_equal(fixture_state(tensor, TN_PLANE_DATA), TN_PLANE_VALID);
            use(&self, tensor, TN_UPDATE, self.f.stream);
            EXPECT_OK(tn_tensor_destroy(tensor, self.f.stream));
            assert_int_equal(self.released, 1);
            owner_close(&self);
        }
    }
}

/* ---- whose memory -------------------------------------------------------------------------- */

static void expect_refused(owner *self, void *data, const char *words) {
    tn_tensor_config config = config_of();
    tn_foreign_memory memory = memory_of(self, data);
    tn_tensor tensor;
    EXPECT_STATUS(tn_tensor_adopt(self->f.scope, &config, &memory, &tensor), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS(words);
    assert_int_equal(self->released, 0);
}

static void only_memory_that_the_device_reaches_is_adopted(void **state) {
    owner self;
    void *pinned;
    (void)state;
    owner_open(&self);
    const tn__driver *driver = driver_of(&self);
    tn__driver_device *device = tn__device_state(self.f.device);
    void *pageable = aligned_alloc(4096, BYTES);
    expect_refused(&self, pageable, "neither device memory nor locked host memory");
    free(pageable);
    expect_refused(&self, (char *)self.data + 8, "not aligned to 16 bytes");
    expect_refused(&self, (char *)self.data + (2 << 20) - 1024, "neither device memory nor locked");
    EXPECT_OK(driver->host_alloc(device, BYTES, &pinned));
    void *data = self.data;
    self.data = pinned;
    tn_tensor tensor = adopt(&self);
    use(&self, tensor, TN_READ, self.f.stream);
    EXPECT_OK(tn_tensor_destroy(tensor, self.f.stream));
    EXPECT_OK(tn_device_synchronize(self.f.device));
    EXPECT_OK(driver->host_free(device, pinned));
    self.data = data;
    owner_close(&self);
}

static void memory_of_another_device_is_refused(void **state) {
    tnsim_config sim_config = {.size = sizeof sim_config};
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *devices[2];
    void *data;
    tn__memory_place place = TN__PLACE_UNTOLD;
    (void)state;
    sim_config.device_count = 2;
    assert_int_equal(test_sim_get()->configure(&sim_config), 0);
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    for (int i = 0; i < 2; i++) {
        config.ordinal = i;
        EXPECT_OK(tn_device_create(&config, &devices[i]));
    }
    const tn__driver *driver = tn__device_driver(devices[0]);
    EXPECT_OK(driver->mem_alloc(tn__device_state(devices[1]), BYTES, &data));
    EXPECT_OK(driver->memory_place(tn__device_state(devices[0]), data, &place));
    assert_int_equal(place, TN__PLACE_PEER);
    EXPECT_OK(driver->memory_place(tn__device_state(devices[1]), data, &place));
    assert_int_equal(place, TN__PLACE_DEVICE);
    EXPECT_OK(driver->mem_free(tn__device_state(devices[1]), data));
    EXPECT_OK(tn_device_destroy(devices[1]));
    test_close_sim(devices[0]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(our_uses_come_between_the_owners),
        cmocka_unit_test(nothing_goes_back_while_a_capture_is_between),
        cmocka_unit_test(a_captured_owner_waits_for_captured_uses),
        cmocka_unit_test(a_plane_that_comes_and_goes_is_between_the_owners_uses),
        cmocka_unit_test(an_owner_that_does_not_wait_races),
        cmocka_unit_test(an_owner_whose_stream_has_ended_gets_it_back_on_the_default_stream),
        cmocka_unit_test(a_release_waits_until_the_driver_works),
        cmocka_unit_test(only_memory_that_the_device_reaches_is_adopted),
        cmocka_unit_test(memory_of_another_device_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
