/* DLPack out, on the host driver: what both versions of the struct say, and the lease behind. */
#include "dlpack_support.h"

#include <pthread.h>

/* ---- what an export says ------------------------------------------------------------------- */

typedef struct expected_export {
    tn_format format;
    tn_dtype dtype;
    int64_t rank;
    int64_t shape[3];
    tn_plane plane;
    tn_dlpack_part part;
    int pairs;
    tn__dl_dtype type;
    int64_t exported_rank;
    int64_t exported_shape[3];
    int64_t strides[3];
} expected_export;

static const expected_export expected[] = {
    {TN_FORMAT_PLAIN,
     TN_FP32,
     3,
     {2, 3, 5},
     TN_PLANE_DATA,
     TN_DLPACK_DATA,
     0,
     {2, 32, 1},
     3,
     {2, 3, 5},
     {15, 5, 1}},
    {TN_FORMAT_PLAIN, TN_BF16, 1, {7}, TN_PLANE_DATA, TN_DLPACK_DATA, 0, {4, 16, 1}, 1, {7}, {1}},
    {TN_FORMAT_PLAIN, TN_FP16, 0, {0}, TN_PLANE_DATA, TN_DLPACK_DATA, 0, {2, 16, 1}, 0, {0}, {0}},
    {TN_FORMAT_PLAIN,
     TN_BYTE,
     2,
     {4, 0},
     TN_PLANE_DATA,
     TN_DLPACK_DATA,
     0,
     {1, 8, 1},
     2,
     {4, 0},
     {0, 1}},
    {TN_FORMAT_FP8_BLOCK_2D,
     TN_E4M3,
     3,
     {2, 100, 300},
     TN_PLANE_ROW,
     TN_DLPACK_DATA,
     0,
     {10, 8, 1},
     3,
     {2, 100, 300},
     {30000, 300, 1}},
    {TN_FORMAT_FP8_BLOCK_2D,
     TN_E5M2,
     3,
     {2, 100, 300},
     TN_PLANE_COL,
     TN_DLPACK_DATA,
     0,
     {12, 8, 1},
     2,
     {300, 200},
     {200, 1}},
    {TN_FORMAT_FP8_BLOCK_2D,
     TN_E4M3,
     2,
     {200, 300},
     TN_PLANE_ROW,
     TN_DLPACK_SCALE,
     0,
     {2, 32, 1},
     2,
     {2, 3},
     {4, 1}},
    {TN_FORMAT_FP8_BLOCK_2D,
     TN_E4M3,
     2,
     {200, 300},
     TN_PLANE_ROW,
     TN_DLPACK_SCALE_BLOCK,
     0,
     {1, 8, 1},
     1,
     {32},
     {1}},
    {TN_FORMAT_FP8_BLOCK_1D,
     TN_E4M3,
     2,
     {200, 300},
     TN_PLANE_COL,
     TN_DLPACK_SCALE,
     0,
     {2, 32, 1},
     2,
     {2, 300},
     {300, 1}},
    {TN_FORMAT_MXFP8,
     TN_E4M3,
     2,
     {64, 96},
     TN_PLANE_COL,
     TN_DLPACK_DATA,
     0,
     {10, 8, 1},
     2,
     {64, 96},
     {96, 1}},
    {TN_FORMAT_MXFP8,
     TN_E4M3,
     2,
     {64, 96},
     TN_PLANE_ROW,
     TN_DLPACK_SCALE,
     0,
     {14, 8, 1},
     2,
     {64, 3},
     {4, 1}},
    {TN_FORMAT_NVFP4,
     TN_E2M1,
     2,
     {32, 48},
     TN_PLANE_ROW,
     TN_DLPACK_DATA,
     0,
     {17, 4, 1},
     2,
     {32, 48},
     {48, 1}},
    {TN_FORMAT_NVFP4,
     TN_E2M1,
     2,
     {32, 48},
     TN_PLANE_ROW,
     TN_DLPACK_DATA,
     1,
     {17, 4, 2},
     2,
     {32, 24},
     {24, 1}},
    {TN_FORMAT_NVFP4,
     TN_E2M1,
     2,
     {32, 47},
     TN_PLANE_ROW,
     TN_DLPACK_DATA,
     0, /* a row is 24 bytes */
     {17, 4, 1},
     2,
     {32, 47},
     {48, 1}},
    {TN_FORMAT_NVFP4,
     TN_E2M1,
     2,
     {32, 48},
     TN_PLANE_ROW,
     TN_DLPACK_SCALE,
     0,
     {10, 8, 1},
     2,
     {32, 3},
     {4, 1}},
};

static void expect_export(const tensor_fixture *f, const expected_export *row, int is_versioned) {
    any_managed managed;
    tn_plane_view view;
    tn_lease lease;
    tn_tensor tensor = tensor_of_format(f, row->format, row->dtype, (int)row->rank, row->shape);
    fixture_write(tensor, row->plane, f->stream);
    tn_dlpack_export_config config = export_of(row->plane, row->part, f->other);
    config.pairs = row->pairs;
    EXPECT_OK(export_any(is_versioned, tensor, &config, &managed));
    const tn__dl_tensor *exported = tensor_of(&managed);
    EXPECT_OK(tn_lease_begin(tensor, row->plane, TN_READ, f->stream, &lease, &view));
    assert_ptr_equal(exported->data, row->part == TN_DLPACK_DATA ? view.data : view.scale);
    EXPECT_OK(tn_lease_end(lease));
    assert_memory_equal(&exported->dtype, &row->type, sizeof row->type);
    assert_int_equal(exported->device.type, TN__DL_CPU);
    assert_int_equal(exported->device.id, 0);
    assert_int_equal(exported->byte_offset, 0);
    assert_int_equal(exported->rank, row->exported_rank);
    for (int i = 0; i < row->exported_rank; i++) {
        assert_int_equal(exported->shape[i], row->exported_shape[i]);
        assert_int_equal(exported->strides[i], row->strides[i]);
    }
    if (is_versioned) {
        assert_int_equal(managed.versioned->major, 1);
        assert_int_equal(managed.versioned->minor, 1);
        assert_int_equal(managed.versioned->flags, TN__DL_READ_ONLY);
    }
    delete_any(&managed);
    EXPECT_OK(tn_tensor_destroy(tensor, f->stream));
}

static void exports_say_what_the_plane_is(void **state) {
    tensor_fixture f;
    (void)state;
    tensor_fixture_open(&f);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        expect_export(&f, &expected[i], 0);
        expect_export(&f, &expected[i], 1);
    }
    tensor_fixture_close(&f);
}

/* ---- an export holds a lease --------------------------------------------------------------- */

static void an_export_holds_a_lease_until_its_deleter(void **state) {
    (void)state;
    for (int is_versioned = 0; is_versioned < 2; is_versioned++) {
        tensor_fixture f;
        any_managed first, second;
        tn_plane_view view;
        tn_lease lease;
        tensor_fixture_open(&f);
        tn_tensor tensor = tensor_of_format(&f, TN_FORMAT_PLAIN, TN_FP32, 1, (int64_t[]){100});
        fixture_write(tensor, TN_PLANE_DATA, f.stream);
        tn_dlpack_export_config config = export_of(TN_PLANE_DATA, TN_DLPACK_DATA, f.other);
        EXPECT_OK(export_any(is_versioned, tensor, &config, &first));
        EXPECT_OK(export_any(is_versioned, tensor, &config, &second)); /* readers share */
        assert_int_equal(fixture_ledger(f.scope).leases, 2);
        EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, f.stream, &lease, &view),
                      TN_IN_USE);
        EXPECT_ERROR_HAS("tensor ours, plane DATA is exported through DLPack (READ, on stream");
        EXPECT_STATUS(tn_scope_close(f.scope), TN_IN_USE);
        EXPECT_ERROR_HAS("is exported through DLPack");
        EXPECT_ERROR_HAS("must wait until the consumer calls the deleter");
        delete_any(&first);
        EXPECT_STATUS(tn_scope_close(f.scope), TN_IN_USE);
        delete_any(&second);
        assert_int_equal(fixture_ledger(f.scope).leases, 0);
        config.access = TN_UPDATE;
        EXPECT_OK(export_any(is_versioned, tensor, &config, &first));
        if (is_versioned) assert_int_equal(first.versioned->flags, 0);
        EXPECT_STATUS(export_any(is_versioned, tensor, &config, &second), TN_IN_USE);
        delete_any(&first);
        assert_int_equal(fixture_state(tensor, TN_PLANE_DATA), TN_PLANE_VALID);
        tensor_fixture_close(&f);
    }
}

static void *delete_elsewhere(void *argument) {
    delete_any(argument);
    return NULL;
}

static void a_deleter_runs_on_any_thread(void **state) {
    tensor_fixture f;
    any_managed managed;
    pthread_t thread;
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor tensor = tensor_of_format(&f, TN_FORMAT_PLAIN, TN_FP32, 1, (int64_t[]){100});
    fixture_write(tensor, TN_PLANE_DATA, f.stream);
    tn_dlpack_export_config config = export_of(TN_PLANE_DATA, TN_DLPACK_DATA, f.other);
    EXPECT_OK(export_any(1, tensor, &config, &managed));
    assert_int_equal(pthread_create(&thread, NULL, delete_elsewhere, &managed), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    tensor_fixture_close(&f);
}

/* An export that reads a plane which is absent has it derived, as a lease does. */
static void an_export_derives_its_plane(void **state) {
    tensor_fixture f;
    any_managed managed;
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, 128, 256, "w");
    EXPECT_OK(tn_plane_fill(tensor, TN_PLANE_ROW, 0x38, f.stream));
    tn_dlpack_export_config config = export_of(TN_PLANE_COL, TN_DLPACK_DATA, f.other);
    EXPECT_OK(export_any(1, tensor, &config, &managed));
    const unsigned char *data = tensor_of(&managed)->data; /* the host need not wait for it */
    for (int i = 0; i < 128 * 256; i++)
        assert_int_equal(data[i], 0x38);
    delete_any(&managed);
    tensor_fixture_close(&f);
}

static void what_can_not_be_exported_is_refused(void **state) {
    tensor_fixture f;
    any_managed managed;
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor tensor = tensor_of_format(&f, TN_FORMAT_NVFP4, TN_E2M1, 2, (int64_t[]){32, 47});
    tn_tensor plain = tensor_of_format(&f, TN_FORMAT_PLAIN, TN_FP32, 1, (int64_t[]){4});
    tn_dlpack_export_config config = export_of(TN_PLANE_ROW, TN_DLPACK_DATA, f.other);
    EXPECT_STATUS(export_any(1, tensor, &config, &managed), TN_INVALID_STATE); /* no contents */
    fixture_write(tensor, TN_PLANE_ROW, f.stream);
    fixture_write(plain, TN_PLANE_DATA, f.stream);
    for (int access = TN_READ; access <= TN_UPDATE; access += TN_UPDATE - TN_READ) {
        config.access = (tn_access)access;
        config.pairs = 1;
        EXPECT_STATUS(export_any(0, tensor, &config, &managed), TN_UNSUPPORTED);
        EXPECT_ERROR_HAS("rows of 47 elements are not pairs");
        config.pairs = 0;
        assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_VALID);
    }
    config.access = TN_WRITE;
    EXPECT_STATUS(export_any(0, tensor, &config, &managed), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("neither READ nor UPDATE");
    config.access = TN_READ;
    config.part = (tn_dlpack_part)7;
    EXPECT_STATUS(export_any(0, tensor, &config, &managed), TN_INVALID_ARGUMENT);
    config = export_of(TN_PLANE_DATA, TN_DLPACK_SCALE, f.other);
    EXPECT_STATUS(export_any(0, tensor, &config, &managed), TN_INVALID_ARGUMENT); /* the plane */
    EXPECT_STATUS(export_any(1, plain, &config, &managed), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("plane DATA has no scales");
    config.part = TN_DLPACK_DATA;
    config.pairs = 1;
    EXPECT_STATUS(export_any(1, plain, &config, &managed), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("pairs are for e2m1 data");
    EXPECT_STATUS(export_any(1, plain, NULL, &managed), TN_INVALID_ARGUMENT);
    config.pairs = 0;
    EXPECT_STATUS(tn_dlpack_export(plain, &config, NULL), TN_INVALID_ARGUMENT);
    config.stream = (tn_stream)&f;
    EXPECT_STATUS(export_any(1, plain, &config, &managed), TN_INVALID_ARGUMENT);
    config.stream = f.stream;
    EXPECT_STATUS(export_any(1, (tn_tensor){0}, &config, &managed), TN_STALE_HANDLE);
    assert_int_equal(fixture_ledger(f.scope).leases, 0);
    tensor_fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exports_say_what_the_plane_is),
        cmocka_unit_test(an_export_holds_a_lease_until_its_deleter),
        cmocka_unit_test(a_deleter_runs_on_any_thread),
        cmocka_unit_test(an_export_derives_its_plane),
        cmocka_unit_test(what_can_not_be_exported_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
