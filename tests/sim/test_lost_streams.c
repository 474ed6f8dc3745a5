/* Streams of another library that are destroyed without a word, while planes, scopes and the pool
 * still know of what was done there. A driver that is asked for such a stream may crash: so it is
 * never asked, and what waits waits for the use. Each case runs twice: the handle is nobody's, and
 * the handle is that of a new stream that does nothing any more, so that who waits there hangs.
 */
#include "tensor_fixture.h"

#include <dlfcn.h>

#include "dlpack_abi.h"
#include "driver.h"
#include "host_alloc.h"
#include "tenure_pool.h"
#include "test_graphs.h"

enum { SIDE = 256, BYTES = SIDE * SIDE, OUT_OF_MEMORY = 2, NON_BLOCKING = 1 };

#define MIB INT64_C(1048576)

typedef struct foreign_streams {
    tensor_fixture base;
    tn_stream stream;  /* another library's; NULL once it is gone */
    tn_stream new_one; /* with the handle of the one that is gone; NULL: there is none */
    int reissues;
} foreign_streams;

/* ---- another library ------------------------------------------------------------------------ */

static int (*create)(tn_stream *out, unsigned flags);
static int (*destroy)(tn_stream stream);

static tn_stream make_stream(const foreign_streams *f) {
    tn_stream stream = NULL;
    const tn__driver *driver = tn__device_driver(f->base.device);
    void *library = test_sim_get()->library;
    *(void **)&create = dlsym(library, "cuStreamCreate");
    *(void **)&destroy = dlsym(library, "cuStreamDestroy_v2");
    EXPECT_OK(driver->make_current(tn__device_state(f->base.device)));
    assert_int_equal(create(&stream, NON_BLOCKING), 0);
    return stream;
}

static void open_all(foreign_streams *f, int reissues) {
    tensor_fixture_open_sim(&f->base);
    f->reissues = reissues;
    f->new_one = NULL;
    f->stream = make_stream(f);
}

static void lose_stream(foreign_streams *f) {
    tn_stream old = f->stream;
    assert_int_equal(destroy(old), 0);
    f->stream = NULL;
    if (!f->reissues) return;
    f->new_one = make_stream(f);
    assert_ptr_equal(f->new_one, old);
    assert_int_equal(test_sim_get()->stall(f->new_one, 1), 0);
}

static void expect_not_asked(void) {
    assert_int_equal(test_sim_get()->lost_stream_uses(), 0);
    assert_int_equal(test_sim_get()->race_count(), 0);
}

/* Nothing that was put on our streams waits for the stream that does nothing. */
static void close_all(foreign_streams *f) {
    EXPECT_OK(tn_stream_synchronize(f->base.device, f->base.stream));
    EXPECT_OK(tn_stream_synchronize(f->base.device, f->base.other));
    if (f->new_one) {
        assert_int_equal(test_sim_get()->stall(f->new_one, 0), 0);
        assert_int_equal(destroy(f->new_one), 0);
    }
    if (f->stream) assert_int_equal(destroy(f->stream), 0);
    tensor_fixture_close(&f->base);
}

#define FOR_BOTH(f)                                                                                \
    for (int reissues_ = 0; reissues_ < 2; reissues_++)                                            \
        for (int once_ = (open_all((f), reissues_), 1); once_; once_ = (close_all(f), 0))

/* ---- shorthands ------------------------------------------------------------------------------ */

static tn_tensor block_tensor(const foreign_streams *f, const char *name) {
    return fixture_tensor(&f->base, TN_FORMAT_FP8_BLOCK_2D, SIDE, SIDE, name);
}

static void touch(const foreign_streams *f, const void *data, size_t bytes, int is_write,
                  tn_stream stream) {
    tn__range range = {data, bytes, is_write};
    EXPECT_OK(
        tn__device_driver(f->base.device)
            ->ghost_launch(tn__device_state(f->base.device), "touch", &range, 1, 50.0, stream));
}

static void use_plane(const foreign_streams *f, tn_tensor tensor, tn_plane plane, tn_access access,
                      tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, plane, access, stream, &lease, &view));
    fixture_touch(&f->base, &view, access != TN_READ, stream);
    EXPECT_OK(tn_lease_end(lease));
}

static void use_row(const foreign_streams *f, tn_tensor tensor, tn_access access,
                    tn_stream stream) {
    use_plane(f, tensor, TN_PLANE_ROW, access, stream);
}

/* Takes most of the memory of 1 GiB and writes it: behind all who used it, or that races. */
static void reuse_all(const foreign_streams *f) {
    void *block = NULL;
    size_t bytes = (size_t)(900 * MIB);
    EXPECT_OK(tn_alloc(f->base.pool, bytes, f->base.other, NULL, &block));
    touch(f, block, bytes, 1, f->base.other);
    EXPECT_OK(tn_free(block, f->base.other));
}

/* ---- leases ---------------------------------------------------------------------------------- */

static void a_lease_waits_for_a_use_whose_stream_is_gone(void **state) {
    static const tn_access accesses[][2] = {{TN_WRITE, TN_READ},  {TN_WRITE, TN_WRITE},
                                            {TN_READ, TN_WRITE},  {TN_READ, TN_UPDATE},
                                            {TN_UPDATE, TN_READ}, {TN_REPLACE, TN_REPLACE}};
    foreign_streams f;
    (void)state;
    for (size_t i = 0; i < sizeof accesses / sizeof *accesses; i++) {
        FOR_BOTH(&f) {
            tn_tensor tensor = block_tensor(&f, "tensor");
            if (accesses[i][0] != TN_WRITE) use_row(&f, tensor, TN_WRITE, f.base.stream);
            use_row(&f, tensor, accesses[i][0], f.stream);
            lose_stream(&f);
            use_row(&f, tensor, accesses[i][1], f.base.other);
            use_row(&f, tensor, TN_WRITE, f.base.stream);
            expect_not_asked();
        }
    }
}

/* The wait is for the use: what the stream does afterwards is no concern of ours. */
static void the_rest_of_the_stream_is_not_waited_for(void **state) {
    foreign_streams f;
    (void)state;
    open_all(&f, 0);
    tn_tensor tensor = block_tensor(&f, "tensor");
    use_row(&f, tensor, TN_WRITE, f.stream);
    assert_int_equal(test_sim_get()->stall(f.stream, 1), 0);
    uint64_t waits = fixture_waits(&f.base);
    use_row(&f, tensor, TN_WRITE, f.base.stream);
    assert_int_equal(fixture_waits(&f.base) - waits, 1);
    EXPECT_OK(tn_stream_synchronize(f.base.device, f.base.stream));
    assert_int_equal(test_sim_get()->stall(f.stream, 0), 0);
    expect_not_asked();
    close_all(&f);
}

static void a_plane_that_was_only_made_there_is_waited_for(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        tn_tensor tensor = block_tensor(&f, "tensor");
        EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, f.stream));
        lose_stream(&f);
        use_row(&f, tensor, TN_WRITE, f.base.stream);
        expect_not_asked();
    }
}

/* The ninth reader of a plane takes the place of one that is gone. */
static void readers_that_are_gone_make_room(void **state) {
    foreign_streams f;
    (void)state;
    for (int reissues = 0; reissues < 2; reissues++) {
        tn_stream streams[20];
        open_all(&f, reissues);
        tn_tensor tensor = block_tensor(&f, "tensor");
        use_row(&f, tensor, TN_WRITE, f.base.stream);
        for (int i = 0; i < 20; i++) {
            streams[i] = make_stream(&f);
            use_row(&f, tensor, TN_READ, streams[i]);
            if (i % 2 || reissues) assert_int_equal(destroy(streams[i]), 0);
        }
        use_row(&f, tensor, TN_WRITE, f.base.other);
        expect_not_asked();
        for (int i = 0; i < 20 && !reissues; i += 2)
            assert_int_equal(destroy(streams[i]), 0);
        close_all(&f);
    }
}

static void a_lease_whose_fence_fails_stays_open(void **state) {
    static const char *const calls[] = {"cuEventCreate", "cuEventRecord"};
    foreign_streams f;
    (void)state;
    for (int i = 0; i < 3; i++) {
        FOR_BOTH(&f) {
            tn_plane_view view;
            tn_lease lease;
            tn_tensor tensor = block_tensor(&f, "tensor");
            use_row(&f, tensor, TN_WRITE, f.base.stream);
            EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f.stream, &lease, &view));
            fixture_touch(&f.base, &view, 1, f.stream);
            if (i < 2)
                assert_int_equal(test_sim_get()->fault(calls[i], 1, 0, OUT_OF_MEMORY), 0);
            else
                tn__host_alloc_fault(1, 0);
            assert_int_not_equal(tn_lease_end(lease), TN_OK);
            tn__host_alloc_fault(0, 0);
            assert_int_equal(fixture_ledger(f.base.scope).leases, 1);
            assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_ALLOCATED);
            EXPECT_OK(tn_lease_end(lease));
            lose_stream(&f);
            use_row(&f, tensor, TN_READ, f.base.other);
            expect_not_asked();
        }
    }
}

/* The lease can only be abandoned then; and that is all that is known of its work. */
static void a_use_without_a_fence_is_waited_for_with_the_device(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        tn_plane_view view;
        tn_lease lease;
        tn_tensor tensor = block_tensor(&f, "tensor");
        use_row(&f, tensor, TN_WRITE, f.base.stream);
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, f.stream, &lease, &view));
        fixture_touch(&f.base, &view, 0, f.stream);
        assert_int_equal(test_sim_get()->fault("cuEventRecord", 1, 0, OUT_OF_MEMORY), 0);
        EXPECT_OK(tn_lease_abandon(lease));
        f.reissues = 0; /* the device could not be waited for */
        lose_stream(&f);
        EXPECT_OK(tn_no_wait_begin());
        EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f.base.stream, &lease, &view),
                      TN_INVALID_STATE);
        EXPECT_ERROR_HAS("not to be waited for now");
        EXPECT_STATUS(tn_scope_close(f.base.scope), TN_INVALID_STATE);
        EXPECT_OK(tn_no_wait_end());
        use_row(&f, tensor, TN_WRITE, f.base.stream);
        expect_not_asked();
    }
}

/* The program is wrong: a lease's stream is there until its end. Its work is waited for even so. */
static void a_lease_whose_stream_is_gone_can_be_abandoned(void **state) {
    static const tn_access accesses[] = {TN_WRITE, TN_REPLACE, TN_READ};
    foreign_streams f;
    (void)state;
    for (int i = 0; i < 3; i++) {
        tn_plane_view view;
        tn_lease lease;
        open_all(&f, 1);
        tn_tensor tensor = fixture_tensor(&f.base, TN_FORMAT_PLAIN, 40 * MIB, 2, "tensor");
        if (i > 0) use_plane(&f, tensor, TN_PLANE_DATA, TN_WRITE, f.base.stream);
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, accesses[i], f.stream, &lease, &view));
        fixture_touch(&f.base, &view, i < 2, f.stream);
        lose_stream(&f);
        assert_int_equal(test_sim_get()->stall(f.new_one, 0), 0);
        EXPECT_STATUS(tn_lease_end(lease), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("was destroyed, and another one has its handle");
        EXPECT_OK(tn_lease_abandon(lease));
        EXPECT_OK(tn_tensor_destroy(tensor, f.base.stream));
        reuse_all(&f);
        expect_not_asked();
        close_all(&f);
    }
}

/* What was noted while it was another library's is forgotten with the rest. */
static void the_end_of_an_adopted_stream_is_heard_of(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        tn_plane_view view;
        tn_lease lease;
        tn_tensor tensor = block_tensor(&f, "tensor");
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f.stream, &lease, &view));
        fixture_touch(&f.base, &view, 1, f.stream);
        EXPECT_OK(tn_stream_adopt(f.base.device, f.stream));
        EXPECT_OK(tn_stream_forget(f.base.device, f.stream));
        lose_stream(&f);
        EXPECT_OK(tn_lease_end(lease));
        use_row(&f, tensor, TN_UPDATE, f.base.stream);
        expect_not_asked();
    }
}

/* ---- captures -------------------------------------------------------------------------------- */

/* The stream captures by now; what it did before runs all the same, and has an event. */
static void a_use_from_before_a_capture_is_waited_for_in_it(void **state) {
    foreign_streams f;
    (void)state;
    open_all(&f, 0);
    tn_tensor tensor = block_tensor(&f, "tensor");
    use_row(&f, tensor, TN_WRITE, f.stream);
    test_capture_begin(f.base.device, f.stream, TEST_CAPTURE_THREAD_LOCAL);
    uint64_t waits = fixture_waits(&f.base);
    use_row(&f, tensor, TN_UPDATE, f.base.stream);
    assert_int_equal(fixture_waits(&f.base) - waits, 1);
    assert_true(test_is_capturing(f.base.device, f.stream));
    test_graph graph = test_capture_end(f.base.device, f.stream);
    test_graph_destroy(f.base.device, &graph);
    expect_not_asked();
    close_all(&f);
}

/* What is in a capture is ordered by who launches its graph: the stream need not be there. */
static void a_stream_whose_capture_has_ended_is_not_asked(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        tn_stream second = make_stream(&f);
        tn_tensor tensor = block_tensor(&f, "tensor");
        EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, f.base.stream));
        EXPECT_OK(tn_device_synchronize(f.base.device));
        test_capture_begin(f.base.device, f.stream, TEST_CAPTURE_RELAXED);
        use_row(&f, tensor, TN_WRITE, f.stream);
        test_graph first = test_capture_end(f.base.device, f.stream);
        lose_stream(&f);
        test_capture_begin(f.base.device, second, TEST_CAPTURE_RELAXED);
        use_row(&f, tensor, TN_WRITE, second);
        test_graph last = test_capture_end(f.base.device, second);
        use_row(&f, tensor, TN_READ, f.base.stream);
        test_graph_destroy(f.base.device, &first);
        test_graph_destroy(f.base.device, &last);
        assert_int_equal(destroy(second), 0);
        expect_not_asked();
    }
}

/* A stream of ours has one id, in a capture or not; another library's has not. */
static void both_kinds_of_streams_are_ordered_in_a_capture(void **state) {
    foreign_streams f;
    (void)state;
    for (int ours_first = 0; ours_first < 2; ours_first++) {
        open_all(&f, 0);
        tn_tensor tensor = block_tensor(&f, "tensor");
        tn_stream first = ours_first ? f.base.stream : f.stream;
        tn_stream second = ours_first ? f.stream : f.base.stream;
        EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, f.base.other));
        EXPECT_OK(tn_device_synchronize(f.base.device));
        test_capture_begin(f.base.device, first, TEST_CAPTURE_RELAXED);
        EXPECT_OK(tn_stream_wait(f.base.device, second, first));
        use_row(&f, tensor, TN_WRITE, first);
        use_row(&f, tensor, TN_READ, second);
        use_row(&f, tensor, TN_WRITE, first);
        EXPECT_OK(tn_stream_wait(f.base.device, first, second));
        test_graph graph = test_capture_end(f.base.device, first);
        test_graph_launch(f.base.device, &graph, f.base.stream);
        EXPECT_OK(tn_device_synchronize(f.base.device));
        test_graph_destroy(f.base.device, &graph);
        expect_not_asked();
        close_all(&f);
    }
}

/* ---- frees ----------------------------------------------------------------------------------- */

static void planes_used_last_on_a_stream_that_is_gone_are_freed(void **state) {
    foreign_streams f;
    (void)state;
    for (int made_there = 0; made_there < 2; made_there++) {
        for (int names_stream = 0; names_stream < 2; names_stream++) {
            FOR_BOTH(&f) {
                tn_tensor tensor = fixture_tensor(&f.base, TN_FORMAT_PLAIN, 50 * MIB, 2, "tensor");
                tn_stream first = made_there ? f.stream : f.base.stream;
                use_plane(&f, tensor, TN_PLANE_DATA, TN_WRITE, first);
                use_plane(&f, tensor, TN_PLANE_DATA, TN_READ, f.stream);
                lose_stream(&f);
                if (names_stream)
                    EXPECT_OK(tn_tensor_destroy(tensor, f.base.stream));
                else
                    EXPECT_OK(tn_scope_close(f.base.scope));
                assert_int_equal(fixture_owned_bytes(&f.base), 0);
                reuse_all(&f);
                expect_not_asked();
            }
        }
    }
}

/* Nothing was done on the stream but what the allocation waited for there. */
static void memory_made_on_a_stream_that_is_gone_keeps_its_order(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        tn_tensor first = fixture_tensor(&f.base, TN_FORMAT_PLAIN, 100 * MIB, 2, "first");
        use_plane(&f, first, TN_PLANE_DATA, TN_WRITE, f.base.stream);
        EXPECT_OK(tn_tensor_destroy(first, f.base.stream));
        tn_tensor second = fixture_tensor(&f.base, TN_FORMAT_PLAIN, 100 * MIB, 2, "second");
        EXPECT_OK(tn_plane_make(second, TN_PLANE_DATA, f.stream)); /* waits there */
        lose_stream(&f);
        EXPECT_OK(tn_tensor_destroy(second, f.base.other));
        reuse_all(&f);
        expect_not_asked();
    }
}

static void blocks_of_a_stream_that_is_gone_are_reused(void **state) {
    foreign_streams f;
    (void)state;
    for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
        FOR_BOTH(&f) {
            void *block = NULL;
            size_t bytes = (size_t)(800 * MIB);
            EXPECT_OK(tn_alloc(f.base.pool, bytes, f.stream, NULL, &block));
            touch(&f, block, bytes, 1, f.stream);
            EXPECT_OK(tn_free(block, elsewhere ? f.base.stream : f.stream));
            lose_stream(&f);
            reuse_all(&f);
            expect_not_asked();
        }
    }
}

static void the_events_of_many_streams_are_reused(void **state) {
    foreign_streams f;
    (void)state;
    open_all(&f, 0);
    tn_tensor tensor = block_tensor(&f, "tensor");
    for (int i = 0; i < 300; i++) {
        tn_stream stream = make_stream(&f);
        use_row(&f, tensor, TN_WRITE, stream);
        assert_int_equal(destroy(stream), 0);
        if (i % 10 == 9) EXPECT_OK(tn_device_synchronize(f.base.device));
    }
    assert_in_range(test_sim_get()->call_count("cuEventCreate"), 1, 150);
    expect_not_asked();
    close_all(&f);
}

/* ---- other libraries' memory ----------------------------------------------------------------- */

typedef struct owner {
    foreign_streams *f;
    void *data;
    int released;
} owner;

static void release(void *context) {
    owner *self = context;
    self->released++;
}

static tn_tensor adopt(owner *self) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    tn_tensor tensor = {0};
    config.rank = 1;
    config.shape[0] = BYTES / 4;
    memory.data = self->data;
    memory.data_bytes = BYTES;
    memory.stream = self->f->stream;
    memory.release = release;
    memory.context = self;
    EXPECT_OK(tn_tensor_adopt(self->f->base.scope, &config, &memory, &tensor));
    return tensor;
}

static void owner_open(owner *self, foreign_streams *f) {
    *self = (owner){.f = f};
    EXPECT_OK(tn__device_driver(f->base.device)
                  ->mem_alloc(tn__device_state(f->base.device), BYTES, &self->data));
    touch(f, self->data, BYTES, 1, f->stream);
}

static void owner_close(const owner *self) {
    tn_device *device = self->f->base.device;
    EXPECT_OK(tn_stream_synchronize(device, self->f->base.stream));
    EXPECT_OK(tn_stream_synchronize(device, self->f->base.other));
    EXPECT_OK(tn__device_driver(device)->mem_free(tn__device_state(device), self->data));
}

static void an_import_is_ready_though_its_stream_is_gone(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        owner self;
        owner_open(&self, &f);
        tn_tensor tensor = adopt(&self);
        lose_stream(&f);
        use_plane(&f, tensor, TN_PLANE_DATA, TN_READ, f.base.stream);
        use_plane(&f, tensor, TN_PLANE_DATA, TN_UPDATE, f.base.other);
        expect_not_asked();
        if (f.new_one) assert_int_equal(test_sim_get()->stall(f.new_one, 0), 0);
        /* The owner is wrong here: he said that his stream would be there. */
        EXPECT_OK(tn_scope_close(f.base.scope));
        assert_int_equal(self.released, 1);
        assert_int_equal(test_sim_get()->race_count(), 0);
        owner_close(&self);
        if (f.new_one) assert_int_equal(test_sim_get()->stall(f.new_one, 1), 0);
    }
}

static void memory_that_was_not_used_is_given_back_without_its_stream(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        owner self;
        owner_open(&self, &f);
        tn_tensor tensor = adopt(&self);
        use_plane(&f, tensor, TN_PLANE_DATA, TN_READ, f.stream);
        lose_stream(&f);
        EXPECT_OK(tn_tensor_destroy(tensor, f.base.stream));
        assert_int_equal(self.released, 1);
        expect_not_asked();
        if (f.new_one) assert_int_equal(test_sim_get()->stall(f.new_one, 0), 0);
        EXPECT_OK(tn_device_synchronize(f.base.device));
        owner_close(&self);
        if (f.new_one) assert_int_equal(test_sim_get()->stall(f.new_one, 1), 0);
    }
}

/* He adopts it for us later: it is the same stream, and there. */
static void an_owners_stream_may_be_adopted_later(void **state) {
    foreign_streams f;
    owner self;
    (void)state;
    open_all(&f, 0);
    owner_open(&self, &f);
    tn_tensor tensor = adopt(&self);
    EXPECT_OK(tn_stream_adopt(f.base.device, f.stream));
    use_plane(&f, tensor, TN_PLANE_DATA, TN_READ, f.base.stream);
    EXPECT_OK(tn_no_wait_begin());
    EXPECT_OK(tn_tensor_destroy(tensor, f.base.stream));
    EXPECT_OK(tn_no_wait_end());
    assert_int_equal(self.released, 1);
    touch(&f, self.data, BYTES, 1, f.stream);
    EXPECT_OK(tn_stream_forget(f.base.device, f.stream));
    expect_not_asked();
    owner_close(&self);
    close_all(&f);
}

static void foreign_memory_is_used_while_the_pool_is_paused(void **state) {
    foreign_streams f;
    owner self;
    tn_plane_view view;
    tn_lease lease;
    (void)state;
    open_all(&f, 0);
    owner_open(&self, &f);
    tn_tensor tensor = adopt(&self);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_READ, f.stream, &lease, &view));
    EXPECT_OK(tn_pool_pause(f.base.pool, 0));
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_pool_resume(f.base.pool));
    EXPECT_OK(tn_tensor_destroy(tensor, f.base.stream));
    expect_not_asked();
    owner_close(&self);
    close_all(&f);
}

static tn__dl_versioned *export_to(const foreign_streams *f, tn_tensor tensor, tn_access access) {
    tn_dlpack_export_config config = TN_DLPACK_EXPORT_CONFIG_INIT;
    struct DLManagedTensorVersioned *managed = NULL;
    config.plane = TN_PLANE_ROW;
    config.access = access;
    config.stream = f->stream;
    EXPECT_OK(tn_dlpack_export_versioned(tensor, &config, &managed));
    return (tn__dl_versioned *)managed;
}

static void a_consumer_is_waited_for_though_its_stream_is_gone(void **state) {
    foreign_streams f;
    (void)state;
    for (int is_update = 0; is_update < 2; is_update++) {
        FOR_BOTH(&f) {
            tn_tensor tensor = block_tensor(&f, "tensor");
            use_row(&f, tensor, TN_WRITE, f.base.stream);
            tn__dl_versioned *managed = export_to(&f, tensor, is_update ? TN_UPDATE : TN_READ);
            touch(&f, managed->tensor.data, BYTES, is_update, f.stream);
            managed->deleter(managed);
            lose_stream(&f);
            use_row(&f, tensor, TN_WRITE, f.base.other);
            expect_not_asked();
        }
    }
}

/* The consumer is wrong: his stream should be there. Nothing is known of his work. */
static void a_deleter_after_its_stream_waits_for_the_device(void **state) {
    foreign_streams f;
    (void)state;
    for (int reissues = 0; reissues < 2; reissues++) {
        open_all(&f, reissues);
        tn_tensor tensor = block_tensor(&f, "tensor");
        use_row(&f, tensor, TN_WRITE, f.base.stream);
        tn__dl_versioned *managed = export_to(&f, tensor, TN_READ);
        touch(&f, managed->tensor.data, BYTES, 0, f.stream);
        lose_stream(&f);
        if (f.new_one) assert_int_equal(test_sim_get()->stall(f.new_one, 0), 0);
        managed->deleter(managed);
        use_row(&f, tensor, TN_WRITE, f.base.other);
        assert_int_equal(test_sim_get()->race_count(), 0);
        close_all(&f);
    }
}

/* ---- sets, slots, host memory, budgets ------------------------------------------------------- */

static tn_tensor set_tensor;

static tn_status rebuild(void *context, tn_scope scope, tn_stream stream) {
    foreign_streams *f = context;
    tn_stream own = make_stream(f);
    (void)scope;
    use_row(f, set_tensor, TN_WRITE, own);
    assert_int_equal(destroy(own), 0);
    return stream ? TN_OK : TN_FAIL(TN_DRIVER_ERROR, "rebuild: told to fail");
}

static void a_saved_set_is_dropped_and_rebuilt(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        tn_scope_config config = TN_SCOPE_CONFIG_INIT;
        tn_tensor_config tensor_config = TN_TENSOR_CONFIG_INIT;
        tn_scope set;
        int is_dropped = 0;
        config.parent = f.base.scope;
        config.kind = TN_SCOPE_SAVED;
        EXPECT_OK(tn_scope_create(&config, &set));
        tensor_config.format = TN_FORMAT_FP8_BLOCK_2D;
        tensor_config.dtype = TN_E4M3;
        tensor_config.rank = 2;
        tensor_config.shape[0] = tensor_config.shape[1] = SIDE;
        EXPECT_OK(tn_tensor_create(set, &tensor_config, &set_tensor));
        EXPECT_OK(tn_saved_recompute_set(set, rebuild, &f));
        use_row(&f, set_tensor, TN_WRITE, f.stream);
        lose_stream(&f);
        EXPECT_OK(tn_saved_drop(set, f.base.stream));
        EXPECT_STATUS(tn_saved_rebuild(set, NULL), TN_DRIVER_ERROR);
        EXPECT_OK(tn_saved_is_dropped(set, &is_dropped));
        assert_int_equal(is_dropped, 1);
        EXPECT_OK(tn_saved_rebuild(set, f.base.other));
        use_row(&f, set_tensor, TN_READ, f.base.other);
        expect_not_asked();
    }
}

/* The driver can not look up the stream of the drop for one of the frees. */
static void a_drop_that_fails_half_way_can_be_repeated(void **state) {
    foreign_streams f;
    int half_way = 0;
    (void)state;
    for (int nth = 1; nth <= 16; nth++) { /* one is the second free of a tensor: tried again */
        tn_scope_config config = TN_SCOPE_CONFIG_INIT;
        tn_scope set;
        tn_tensor tensors[3];
        int left = 0, is_dropped = 0;
        open_all(&f, 0);
        config.parent = f.base.scope;
        config.kind = TN_SCOPE_SAVED;
        EXPECT_OK(tn_scope_create(&config, &set));
        for (int i = 0; i < 3; i++) {
            tensors[i] = block_tensor(&f, "tensor");
            EXPECT_OK(tn_tensor_move(tensors[i], set));
            use_row(&f, tensors[i], TN_WRITE, f.base.stream);
        }
        set_tensor = tensors[0];
        EXPECT_OK(tn_saved_recompute_set(set, rebuild, &f));
        assert_int_equal(test_sim_get()->fault("cuStreamGetId", nth, 0, 999), 0);
        int has_failed = tn_saved_drop(set, f.stream) != TN_OK;
        assert_int_equal(test_sim_get()->fault("cuStreamGetId", 0, 0, 0), 0);
        for (int i = 0; i < 3; i++)
            left += fixture_state(tensors[i], TN_PLANE_ROW) == TN_PLANE_VALID;
        EXPECT_OK(tn_saved_is_dropped(set, &is_dropped));
        assert_int_equal(is_dropped, left < 3);
        assert_int_equal(has_failed, left > 0);
        half_way += left == 1 || left == 2;
        if (left == 2) /* what was dropped does not count as rebuilt */
            EXPECT_STATUS(tn_saved_rebuild(set, NULL), TN_DRIVER_ERROR);
        EXPECT_OK(tn_saved_drop(set, f.stream));
        assert_int_equal(fixture_owned_bytes(&f.base), 0);
        EXPECT_STATUS(tn_saved_rebuild(set, f.base.other), TN_INVALID_STATE); /* of one only */
        close_all(&f);
    }
    assert_int_equal(half_way, 2);
}

static void a_scratch_slot_passes_from_a_stream_that_is_gone(void **state) {
    foreign_streams f;
    (void)state;
    for (int made_there = 0; made_there < 2; made_there++) {
        FOR_BOTH(&f) {
            tn_tensor a = block_tensor(&f, "a"), b = block_tensor(&f, "b");
            EXPECT_OK(tn_scope_policy_set(f.base.scope, TN_POLICY_SCRATCH));
            use_row(&f, a, TN_WRITE, f.base.stream);
            use_row(&f, b, TN_WRITE, f.base.stream);
            EXPECT_OK(
                tn_scope_scratch_reserve(f.base.scope, made_there ? f.stream : f.base.stream));
            use_plane(&f, a, TN_PLANE_COL, TN_READ, f.stream);
            lose_stream(&f);
            use_plane(&f, b, TN_PLANE_COL, TN_READ, f.base.other);
            use_plane(&f, a, TN_PLANE_COL, TN_READ, f.base.stream);
            EXPECT_OK(tn_scope_scratch_release(f.base.scope, f.base.stream));
            reuse_all(&f);
            expect_not_asked();
        }
    }
}

static void a_plane_goes_to_the_host_and_comes_back(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        tn_tensor tensor = block_tensor(&f, "tensor");
        use_row(&f, tensor, TN_WRITE, f.stream);
        lose_stream(&f);
        EXPECT_OK(tn_plane_offload(tensor, TN_PLANE_ROW, f.base.stream));
        EXPECT_OK(tn_plane_prefetch(tensor, TN_PLANE_ROW, f.base.stream));
        use_row(&f, tensor, TN_UPDATE, f.base.other);
        expect_not_asked();
    }
}

static void a_budget_shrinks(void **state) {
    foreign_streams f;
    (void)state;
    FOR_BOTH(&f) {
        tn_tensor tensor = block_tensor(&f, "tensor");
        EXPECT_OK(tn_scope_policy_set(f.base.scope, TN_POLICY_BUDGET));
        EXPECT_OK(tn_scope_budget_set(f.base.scope, MIB));
        use_row(&f, tensor, TN_WRITE, f.base.stream);
        use_plane(&f, tensor, TN_PLANE_COL, TN_READ, f.stream);
        EXPECT_OK(tn_plane_release(tensor, TN_PLANE_COL, f.stream));
        lose_stream(&f);
        EXPECT_OK(tn_scope_budget_set(f.base.scope, 0));
        assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_ABSENT);
        reuse_all(&f);
        expect_not_asked();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lease_waits_for_a_use_whose_stream_is_gone),
        cmocka_unit_test(the_rest_of_the_stream_is_not_waited_for),
        cmocka_unit_test(a_plane_that_was_only_made_there_is_waited_for),
        cmocka_unit_test(readers_that_are_gone_make_room),
        cmocka_unit_test(a_lease_whose_fence_fails_stays_open),
        cmocka_unit_test(a_use_without_a_fence_is_waited_for_with_the_device),
        cmocka_unit_test(a_lease_whose_stream_is_gone_can_be_abandoned),
        cmocka_unit_test(the_end_of_an_adopted_stream_is_heard_of),
        cmocka_unit_test(both_kinds_of_streams_are_ordered_in_a_capture),
        cmocka_unit_test(an_owners_stream_may_be_adopted_later),
        cmocka_unit_test(foreign_memory_is_used_while_the_pool_is_paused),
        cmocka_unit_test(a_use_from_before_a_capture_is_waited_for_in_it),
        cmocka_unit_test(a_stream_whose_capture_has_ended_is_not_asked),
        cmocka_unit_test(planes_used_last_on_a_stream_that_is_gone_are_freed),
        cmocka_unit_test(memory_made_on_a_stream_that_is_gone_keeps_its_order),
        cmocka_unit_test(blocks_of_a_stream_that_is_gone_are_reused),
        cmocka_unit_test(the_events_of_many_streams_are_reused),
        cmocka_unit_test(an_import_is_ready_though_its_stream_is_gone),
        cmocka_unit_test(memory_that_was_not_used_is_given_back_without_its_stream),
        cmocka_unit_test(a_consumer_is_waited_for_though_its_stream_is_gone),
        cmocka_unit_test(a_deleter_after_its_stream_waits_for_the_device),
        cmocka_unit_test(a_saved_set_is_dropped_and_rebuilt),
        cmocka_unit_test(a_drop_that_fails_half_way_can_be_repeated),
        cmocka_unit_test(a_scratch_slot_passes_from_a_stream_that_is_gone),
        cmocka_unit_test(a_plane_goes_to_the_host_and_comes_back),
        cmocka_unit_test(a_budget_shrinks),
    };
    return cmocka_run_group_tests_name("sim/lost_streams", tests, NULL, NULL);
}
