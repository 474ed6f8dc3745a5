/* Exports and imports inside one process: ids, counts, order, bad input, faults. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "host_alloc.h"
#include "share_support.h"

#define MIB   MIB_BYTES
#define BYTES (5 * MIB + 100)

enum { NTH_MAX = 60, CUDA_UNKNOWN = 999 };

/* A sharer, a second pool of its device that imports, and one exported block. */
typedef struct fixture {
    sharer s;
    tn_pool *importer;
    tn_stream other;
    void *block;
    tn_share share;
    int file;
} fixture;

static int open_fixture(void **state) {
    static fixture f;
    memset(&f, 0, sizeof f);
    sharer_open(&f.s);
    f.importer = test_open_pool(f.s.device, TN_BACKING_VMM, 0);
    f.other = test_open_stream(f.s.device);
    f.block = sharer_block(&f.s, BYTES, 0x5A);
    EXPECT_OK(tn_share_export(f.block, &f.share, &f.file));
    *state = &f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    close(f->file);
    if (f->block) test_give(f->s.pool, f->block, f->s.stream);
    EXPECT_OK(tn_pool_destroy(f->importer));
    EXPECT_OK(tn_stream_destroy(f->s.device, f->other));
    sharer_close(&f->s);
    assert_int_equal(tn__host_live_blocks(), 0);
    return 0;
}

static void *import(fixture *f) {
    void *address = NULL;
    EXPECT_OK(tn_share_import(f->importer, &f->share, f->file, &address));
    (void)test_pool_stats(f->importer);
    return address;
}

/* ---- what an import is ----------------------------------------------------------------------- */

static void an_import_is_the_same_memory_on_nobodys_books(void **state) {
    fixture *f = *state;
    tn_pool *pool = NULL;
    size_t bytes = 0;
    size_t physical = test_sim_get()->physical_bytes(0);
    void *address = import(f);
    tn_pool_stats stats = test_pool_stats(f->importer);
    assert_ptr_not_equal(address, f->block);
    sharer_expect(&f->s, address, BYTES, 0x5A);
    assert_int_equal(stats.imported_bytes, BYTES);
    assert_int_equal(stats.reserved_bytes, 0);
    assert_int_equal(stats.live_bytes, 0);
    assert_int_equal(test_sim_get()->physical_bytes(0), physical);
    EXPECT_OK(tn_block_info(address, &bytes, &pool));
    assert_int_equal(bytes, BYTES);
    assert_ptr_equal(pool, f->importer);
    EXPECT_STATUS(tn_free(address, f->s.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tn_share_close");
    EXPECT_OK(tn_share_close(address, f->s.stream));
    EXPECT_OK(tn_stream_synchronize(f->s.device, f->s.stream));
    EXPECT_OK(tn_pool_trim(f->importer, 0, NULL));
    assert_int_equal(test_pool_stats(f->importer).imported_bytes, 0);
    EXPECT_STATUS(tn_record_use(address, f->s.stream), TN_INVALID_ARGUMENT);
}

/* pytorch#198305, #161885: another handle for the same memory each time. */
static void the_same_block_has_the_same_id_for_good(void **state) {
    fixture *f = *state;
    tn_share again, next;
    int file = -1;
    EXPECT_OK(tn_share_export(f->block, &again, &file));
    assert_memory_equal(&again, &f->share, sizeof again);
    close(file);
    test_give(f->s.pool, f->block, f->s.stream);
    f->block = sharer_block(&f->s, BYTES, 0x11);
    EXPECT_OK(tn_share_export(f->block, &next, &file));
    close(file);
    assert_memory_not_equal(next.id, f->share.id, sizeof next.id);
}

static void importing_again_is_counted(void **state) {
    fixture *f = *state;
    void *address = import(f);
    assert_ptr_equal(import(f), address);
    assert_int_equal(test_pool_stats(f->importer).imported_bytes, BYTES);
    EXPECT_OK(tn_share_close(address, f->s.stream));
    sharer_expect(&f->s, address, BYTES, 0x5A);
    EXPECT_STATUS(tn_pool_destroy(f->importer), TN_LEAK);
    EXPECT_ERROR_HAS("imported");
    EXPECT_OK(tn_share_close(address, f->s.stream));
    EXPECT_STATUS(tn_share_close(address, f->s.stream), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_share_close(NULL, f->s.stream));
    EXPECT_STATUS(tn_share_close(f->block, f->s.stream), TN_INVALID_ARGUMENT);
}

/* Memory that was imported goes when the import is closed and the block is freed, in any order. */
static void memory_lives_till_its_last_user_is_gone(void **state) {
    fixture *f = *state;
    void *address = import(f);
    test_give(f->s.pool, f->block, f->s.stream);
    f->block = NULL;
    EXPECT_OK(tn_stream_synchronize(f->s.device, f->s.stream));
    EXPECT_OK(tn_pool_trim(f->s.pool, SIZE_MAX, NULL));
    assert_int_equal(test_pool_stats(f->s.pool).reserved_bytes, 0);
    sharer_expect(&f->s, address, BYTES, 0x5A);
    assert_int_equal(test_sim_get()->physical_bytes(0), 6 * MIB);
    EXPECT_OK(tn_share_close(address, f->s.stream));
    EXPECT_OK(tn_stream_synchronize(f->s.device, f->s.stream));
    EXPECT_OK(tn_pool_trim(f->importer, 0, NULL));
    assert_int_equal(test_sim_get()->physical_bytes(0), 0);
}

/* ---- order ----------------------------------------------------------------------------------- */

/* The simulated device counts a race if it is unmapped while work may use it. */
static void closing_waits_for_recorded_uses(void **state) {
    fixture *f = *state;
    void *address = import(f);
    test_sim_write(f->s.device, f->other, address, BYTES, 1e4);
    EXPECT_OK(tn_record_use(address, f->other));
    EXPECT_OK(tn_share_close(address, f->s.stream));
    assert_int_equal(test_pool_stats(f->importer).imported_bytes, BYTES);
    EXPECT_OK(tn_stream_synchronize(f->s.device, f->s.stream));
    EXPECT_OK(tn_pool_trim(f->importer, 0, NULL));
    assert_int_equal(test_pool_stats(f->importer).imported_bytes, BYTES);
    EXPECT_OK(tn_stream_synchronize(f->s.device, f->other));
    EXPECT_OK(tn_pool_trim(f->importer, 0, NULL));
    assert_int_equal(test_pool_stats(f->importer).imported_bytes, 0);
}

static void a_closed_import_that_is_still_there_is_taken_again(void **state) {
    fixture *f = *state;
    void *address = import(f);
    test_sim_write(f->s.device, f->other, address, BYTES, 1e4);
    EXPECT_OK(tn_record_use(address, f->other));
    EXPECT_OK(tn_share_close(address, f->s.stream));
    assert_ptr_equal(import(f), address);
    EXPECT_OK(tn_share_close(address, f->s.stream));
    EXPECT_OK(tn_pool_destroy(f->importer)); /* waits for what was closed */
    f->importer = test_open_pool(f->s.device, TN_BACKING_VMM, 0);
}

static void a_stream_that_ends_is_forgotten(void **state) {
    fixture *f = *state;
    void *address = import(f);
    tn_stream brief = test_open_stream(f->s.device);
    test_sim_write(f->s.device, brief, address, BYTES, 1e4);
    EXPECT_OK(tn_record_use(address, brief));
    EXPECT_OK(tn_stream_destroy(f->s.device, brief));
    EXPECT_OK(tn_share_close(address, f->s.stream));
}

static void peers_reach_what_is_imported(void **state) {
    fixture *f = *state;
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *peer = NULL;
    tn_stream stream;
    void *address = import(f);
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    config.ordinal = 1;
    EXPECT_OK(tn_device_create(&config, &peer));
    stream = test_open_stream(peer);
    EXPECT_OK(tn_pool_peer_enable(f->importer, peer));
    test_sim_write(peer, stream, address, BYTES, 10);
    EXPECT_OK(tn_record_use(address, stream));
    EXPECT_OK(tn_share_close(address, stream));
    EXPECT_OK(tn_stream_destroy(peer, stream));
    EXPECT_OK(tn_pool_destroy(f->importer));
    EXPECT_OK(tn_device_destroy(peer));
    f->importer = test_open_pool(f->s.device, TN_BACKING_VMM, 0);
}

/* ---- bad input ------------------------------------------------------------------------------- */

static void a_changed_description_is_corrupt(void **state) {
    fixture *f = *state;
    uint64_t calls = test_sim_get()->call_count("cuMemImportFromShareableHandle");
    void *address = NULL;
    for (size_t i = 0; i < sizeof f->share; i++) {
        tn_share changed = f->share;
        ((unsigned char *)&changed)[i] ^= 1u << (i % 8);
        EXPECT_STATUS(tn_share_import(f->importer, &changed, f->file, &address), TN_CORRUPT_INPUT);
    }
    assert_null(address);
    assert_int_equal(test_sim_get()->call_count("cuMemImportFromShareableHandle"), calls);
}

static void a_file_that_is_something_else_is_corrupt(void **state) {
    fixture *f = *state;
    void *large = sharer_block(&f->s, 9 * MIB, 0);
    void *address = NULL;
    tn_share share;
    int file = -1, null = open("/dev/null", O_RDWR), ends[2];
    EXPECT_OK(tn_share_export(large, &share, &file));
    assert_int_equal(pipe(ends), 0);
    EXPECT_STATUS(tn_share_import(f->importer, &f->share, file, &address), TN_CORRUPT_INPUT);
    EXPECT_STATUS(tn_share_import(f->importer, &share, f->file, &address), TN_CORRUPT_INPUT);
    EXPECT_STATUS(tn_share_import(f->importer, &share, null, &address), TN_CORRUPT_INPUT);
    EXPECT_STATUS(tn_share_import(f->importer, &share, ends[0], &address), TN_CORRUPT_INPUT);
    close(file);
    close(null);
    close(ends[0]);
    close(ends[1]);
    EXPECT_STATUS(tn_share_import(f->importer, &share, file, &address), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_share_import(f->importer, &share, -1, &address), TN_INVALID_ARGUMENT);
    assert_null(address);
    assert_int_equal(test_pool_stats(f->importer).imported_bytes, 0);
    test_give(f->s.pool, large, f->s.stream);
}

static void the_wrong_device_pool_or_block_is_refused(void **state) {
    fixture *f = *state;
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *second = NULL;
    tn_pool *elsewhere, *plain = test_open_pool(f->s.device, TN_BACKING_PLAIN, 0);
    void *ordinary = test_take(f->s.pool, 3 * MIB, f->s.stream);
    void *address = NULL;
    tn_share share;
    int file = -2;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    config.ordinal = 1;
    EXPECT_OK(tn_device_create(&config, &second));
    elsewhere = test_open_pool(second, TN_BACKING_VMM, 0);
    EXPECT_STATUS(tn_share_import(elsewhere, &f->share, f->file, &address), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_share_import(plain, &f->share, f->file, &address), TN_UNSUPPORTED);
    EXPECT_STATUS(tn_share_export(ordinary, &share, &file), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_share_export((char *)f->block + 512, &share, &file), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_share_export(&share, &share, &file), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_share_export(NULL, &share, &file), TN_INVALID_ARGUMENT);
    assert_int_equal(file, -2);
    test_give(f->s.pool, ordinary, f->s.stream);
    EXPECT_OK(tn_pool_destroy(plain));
    EXPECT_OK(tn_pool_destroy(elsewhere));
    EXPECT_OK(tn_device_destroy(second));
}

static void the_host_driver_says_that_it_can_not(void **state) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    tn_device *host = test_open_host();
    tn_pool *pool = test_open_pool(host, TN_BACKING_AUTO, 0);
    void *block = NULL;
    (void)state;
    options.flags = TN_ALLOC_SHAREABLE;
    EXPECT_STATUS(tn_alloc(pool, MIB, NULL, &options, &block), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("VMM");
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(host));
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* Export, import and close under one fault: 1 if any failed. In the end all is as without. */
static int run_with_fault(fixture *f, long nth, int and_after, int is_host_fault) {
    tn_share share;
    void *address = NULL;
    int file = -1;
    int failed = 0;
    tn_status status;
    if (is_host_fault) tn__host_alloc_fault(nth, and_after);
    if (!is_host_fault) test_sim_get()->fault(NULL, nth, and_after, CUDA_UNKNOWN);
    status = tn_share_export(f->block, &share, &file);
    failed |= status != TN_OK;
    if (status == TN_OK) close(file);
    status = tn_share_import(f->importer, &f->share, f->file, &address);
    failed |= status != TN_OK;
    if (status != TN_OK) assert_null(address);
    if (status == TN_OK) {
        status = tn_share_close(address, f->other);
        failed |= status != TN_OK;
    }
    tn__host_alloc_fault(0, 0);
    test_sim_get()->fault(NULL, 0, 0, 0);
    if (address && status != TN_OK) EXPECT_OK(tn_share_close(address, f->other));
    (void)test_pool_stats(f->importer);
    EXPECT_OK(tn_stream_synchronize(f->s.device, f->other));
    EXPECT_OK(tn_pool_trim(f->importer, 0, NULL));
    assert_int_equal(test_pool_stats(f->importer).imported_bytes, 0);
    assert_int_equal(test_pool_stats(f->importer).reserved_bytes, 0);
    return failed;
}

static void any_fault_is_undone(void **state) {
    fixture *f = *state;
    for (int and_after = 0; and_after < 2; and_after++) {
        int failed = 0;
        for (long nth = 1; nth <= NTH_MAX; nth++)
            failed += run_with_fault(f, nth, and_after, 0);
        assert_true(failed >= 10);
        failed = 0;
        for (long nth = 1; nth <= 10; nth++)
            failed += run_with_fault(f, nth, and_after, 1);
        assert_true(failed >= 1);
    }
}

#define IN_FIXTURE(test) cmocka_unit_test_setup_teardown(test, open_fixture, close_fixture)

int main(void) {
    const struct CMUnitTest tests[] = {
        IN_FIXTURE(an_import_is_the_same_memory_on_nobodys_books),
        IN_FIXTURE(the_same_block_has_the_same_id_for_good),
        IN_FIXTURE(importing_again_is_counted),
        IN_FIXTURE(memory_lives_till_its_last_user_is_gone),
        IN_FIXTURE(closing_waits_for_recorded_uses),
        IN_FIXTURE(a_closed_import_that_is_still_there_is_taken_again),
        IN_FIXTURE(a_stream_that_ends_is_forgotten),
        IN_FIXTURE(peers_reach_what_is_imported),
        IN_FIXTURE(a_changed_description_is_corrupt),
        IN_FIXTURE(a_file_that_is_something_else_is_corrupt),
        IN_FIXTURE(the_wrong_device_pool_or_block_is_refused),
        cmocka_unit_test(the_host_driver_says_that_it_can_not),
        IN_FIXTURE(any_fault_is_undone),
    };
    return cmocka_run_group_tests_name("sim/share_import", tests, NULL, NULL);
}
