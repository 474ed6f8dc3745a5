/* DLPack in, on the host driver: what is adopted, what is refused, and who owns what. */
#include "dlpack_support.h"

#include <string.h>

#include "host_alloc.h"

/* ---- imports ------------------------------------------------------------------------------- */

/* Somebody else's tensor of 6 x 8 floats, in both versions of the struct. */
typedef struct theirs {
    tn__dl_managed plain;
    tn__dl_versioned versioned;
    int64_t shape[2], strides[2];
    float data[48];
    int deleted;
} theirs;

static void delete_plain(tn__dl_managed *managed) { ((theirs *)managed->context)->deleted++; }

static void delete_versioned(tn__dl_versioned *managed) { ((theirs *)managed->context)->deleted++; }

static void theirs_init(theirs *self) {
    memset(self, 0, sizeof *self);
    self->shape[0] = 6, self->shape[1] = 8;
    self->strides[0] = 8, self->strides[1] = 1;
    for (int i = 0; i < 48; i++)
        self->data[i] = (float)i;
    self->plain.tensor = (tn__dl_tensor){self->data,  {TN__DL_CPU, 0}, 2, {TN__DL_FLOAT, 32, 1},
                                         self->shape, self->strides,   0};
    self->plain.context = self->versioned.context = self;
    self->plain.deleter = delete_plain;
    self->versioned.major = 1;
    self->versioned.minor = 3;
    self->versioned.deleter = delete_versioned;
    self->versioned.tensor = self->plain.tensor;
}

static any_managed version_of(theirs *self, int is_versioned) {
    if (is_versioned) return (any_managed){NULL, &self->versioned};
    return (any_managed){&self->plain, NULL};
}

static void an_import_is_their_memory_until_its_end(void **state) {
    (void)state;
    for (int is_versioned = 0; is_versioned < 2; is_versioned++) {
        tensor_fixture f;
        theirs their;
        tn_tensor tensor;
        tn_tensor_info info = TN_TENSOR_INFO_INIT;
        tn_plane_view view;
        tn_lease lease;
        float read[48];
        tensor_fixture_open(&f);
        theirs_init(&their);
        any_managed managed = version_of(&their, is_versioned);
        EXPECT_OK(import_any(f.scope, &managed, NULL, f.other, &tensor));
        EXPECT_OK(tn_tensor_info_get(tensor, &info));
        assert_int_equal(info.format, TN_FORMAT_PLAIN);
        assert_int_equal(info.dtype, TN_FP32);
        assert_int_equal(info.rank, 2);
        assert_int_equal(info.rows, 6);
        assert_int_equal(info.cols, 8);
        assert_int_equal(fixture_ledger(f.scope).foreign_bytes, sizeof their.data);
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_UPDATE, f.stream, &lease, &view));
        assert_ptr_equal(view.data, their.data);
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_plane_read(tensor, TN_PLANE_DATA, read, sizeof read, NULL, 0, f.stream));
        EXPECT_OK(tn_stream_synchronize(f.device, f.stream));
        assert_memory_equal(read, their.data, sizeof read);
        assert_int_equal(their.deleted, 0);
        EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
        assert_int_equal(their.deleted, 1);
        tensor_fixture_close(&f);
        assert_int_equal(their.deleted, 1);
    }
}

static void our_own_export_comes_back_as_the_same_memory(void **state) {
    static const struct {
        tn_format format;
        tn_dtype dtype;
        tn_plane plane;
    } cases[] = {
        {TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_PLANE_ROW},
        {TN_FORMAT_FP8_BLOCK_2D, TN_E5M2, TN_PLANE_COL},
        {TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_PLANE_COL},
        {TN_FORMAT_FP8_TENSOR, TN_E4M3, TN_PLANE_COL},
        {TN_FORMAT_MXFP8, TN_E4M3, TN_PLANE_COL},
        {TN_FORMAT_NVFP4, TN_E2M1, TN_PLANE_ROW},
        {TN_FORMAT_NVFP4, TN_E2M1, TN_PLANE_COL},
    };
    (void)state;
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        tensor_fixture f;
        any_managed data, scale;
        tn_tensor imported;
        tn_plane_view ours, back;
        tn_lease lease;
        tn_plane plane = cases[i / 2].plane;
        tn_dlpack_import_config as = TN_DLPACK_IMPORT_CONFIG_INIT;
        tensor_fixture_open(&f);
        tn_tensor tensor =
            tensor_of_format(&f, cases[i / 2].format, cases[i / 2].dtype, 2, (int64_t[]){96, 160});
        fixture_write(tensor, plane, f.stream);
        tn_dlpack_export_config config = export_of(plane, TN_DLPACK_DATA, f.other);
        config.pairs = cases[i / 2].dtype == TN_E2M1 && plane == TN_PLANE_ROW;
        EXPECT_OK(export_any(i % 2, tensor, &config, &data));
        config = export_of(plane, TN_DLPACK_SCALE_BLOCK, f.other);
        EXPECT_OK(export_any(i % 2, tensor, &config, &scale));
        as.format = cases[i / 2].format;
        as.plane = plane;
        as.name = "theirs";
        as.scale = (struct DLManagedTensor *)scale.plain;
        as.scale_versioned = (struct DLManagedTensorVersioned *)scale.versioned;
        EXPECT_OK(import_any(f.scope, &data, &as, f.other, &imported));
        EXPECT_OK(tn_lease_begin(tensor, plane, TN_READ, f.stream, &lease, &ours));
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_lease_begin(imported, plane, TN_READ, f.stream, &lease, &back));
        EXPECT_OK(tn_lease_end(lease));
        assert_ptr_equal(back.data, ours.data);
        assert_ptr_equal(back.scale, ours.scale);
        assert_memory_equal(&back.layout, &ours.layout, sizeof ours.layout);
        EXPECT_STATUS(tn_tensor_destroy(tensor, f.stream), TN_IN_USE);
        if (i % 2) { /* only the export was read-only, and of the older version nobody can tell */
            EXPECT_STATUS(tn_lease_begin(imported, plane, TN_UPDATE, f.stream, &lease, &back),
                          TN_INVALID_STATE);
        }
        EXPECT_OK(tn_tensor_destroy(imported, f.stream)); /* of one pool: under one lock */
        EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
        tensor_fixture_close(&f);
    }
}

/* ---- imports that are refused -------------------------------------------------------------- */

static void expect_refused(tensor_fixture *f, theirs *their, tn_status status, const char *words) {
    for (int is_versioned = 0; is_versioned < 2; is_versioned++) {
        tn_tensor tensor = {77};
        any_managed managed = version_of(their, is_versioned);
        their->versioned.tensor = their->plain.tensor;
        EXPECT_STATUS(import_any(f->scope, &managed, NULL, f->other, &tensor), status);
        EXPECT_ERROR_HAS(words);
        assert_int_equal(tensor.value, 77);
        assert_int_equal(their->deleted, 0);
        assert_int_equal(fixture_ledger(f->scope).tensors, 0);
    }
}

static void what_can_not_be_represented_stays_the_callers(void **state) {
    tensor_fixture f;
    theirs their;
    int64_t many[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    (void)state;
    tensor_fixture_open(&f);
#define REFUSED(status, words, ...)                                                                \
    do {                                                                                           \
        theirs_init(&their);                                                                       \
        __VA_ARGS__;                                                                               \
        expect_refused(&f, &their, status, words);                                                 \
    } while (0)
    REFUSED(TN_UNSUPPORTED, "stride of 9 elements where 8", their.strides[0] = 9);
    REFUSED(TN_UNSUPPORTED, "stride of 6 elements where 1", their.strides[1] = 6);
    REFUSED(TN_UNSUPPORTED, "stride of -1", their.strides[1] = -1);
    REFUSED(TN_UNSUPPORTED, "code 2, 64 bits and 1 lanes", their.plain.tensor.dtype.bits = 64);
    REFUSED(TN_UNSUPPORTED, "32 bits and 2 lanes", their.plain.tensor.dtype.lanes = 2);
    REFUSED(TN_UNSUPPORTED, "32 bits and 0 lanes", their.plain.tensor.dtype.lanes = 0);
    REFUSED(TN_UNSUPPORTED, "code 0", their.plain.tensor.dtype.code = 0);
    REFUSED(TN_UNSUPPORTED, "format plain does not take dtype e4m3",
            their.plain.tensor.dtype = (tn__dl_dtype){TN__DL_FLOAT8_E4M3FN, 8, 1});
    REFUSED(TN_UNSUPPORTED, "9 dimensions", their.plain.tensor.shape = many,
            their.plain.tensor.strides = NULL, their.plain.tensor.rank = 9);
    REFUSED(TN_INVALID_ARGUMENT, "kind 2", their.plain.tensor.device.type = TN__DL_CUDA);
    REFUSED(TN_INVALID_ARGUMENT, "-1 dimensions", their.plain.tensor.rank = -1);
    REFUSED(TN_INVALID_ARGUMENT, "the shape is NULL", their.plain.tensor.shape = NULL);
    REFUSED(TN_INVALID_ARGUMENT, "dimension 1 is -8", their.shape[1] = -8);
    REFUSED(TN_INVALID_ARGUMENT, "2^62", their.shape[0] = INT64_MAX / 8,
            their.plain.tensor.strides = NULL);
    REFUSED(TN_INVALID_ARGUMENT, "data is NULL", their.plain.tensor.data = NULL);
    REFUSED(TN_INVALID_ARGUMENT, "not aligned to 4 bytes", their.plain.tensor.byte_offset = 2);
    REFUSED(TN_INVALID_ARGUMENT, "a byte offset of", their.plain.tensor.byte_offset = UINT64_MAX);
#undef REFUSED
    EXPECT_STATUS(tn_dlpack_import(f.scope, NULL, NULL, f.other, &(tn_tensor){0}),
                  TN_INVALID_ARGUMENT);
    tensor_fixture_close(&f);
}

static void another_major_version_is_not_looked_into(void **state) {
    tensor_fixture f;
    theirs their;
    tn_tensor tensor;
    (void)state;
    tensor_fixture_open(&f);
    theirs_init(&their);
    any_managed managed = version_of(&their, 1);
    their.versioned.major = 2;
    memset(&their.versioned.tensor, 0xEE, sizeof their.versioned.tensor);
    EXPECT_STATUS(import_any(f.scope, &managed, NULL, f.other, &tensor), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("DLPack 2.3: only 1.x is known");
    assert_int_equal(their.deleted, 0);
    tensor_fixture_close(&f);
}

static void what_is_read_only_stays_so(void **state) {
    tensor_fixture f;
    theirs their;
    tn_tensor tensor;
    tn_lease lease;
    tn_plane_view view;
    (void)state;
    tensor_fixture_open(&f);
    theirs_init(&their);
    any_managed managed = version_of(&their, 1);
    their.versioned.flags = TN__DL_READ_ONLY | TN__DL_IS_COPIED;
    EXPECT_OK(import_any(f.scope, &managed, NULL, f.other, &tensor));
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, f.stream, &lease, &view),
                  TN_INVALID_STATE);
    EXPECT_ERROR_HAS("adopted to be read only");
    tensor_fixture_close(&f);
    assert_int_equal(their.deleted, 1);
}

/* Scales must be given, in one stretch, of the right type and size. */
static void scales_that_do_not_fit_are_refused(void **state) {
    tensor_fixture f;
    theirs data, scale;
    tn_tensor tensor;
    tn_dlpack_import_config config = TN_DLPACK_IMPORT_CONFIG_INIT;
    (void)state;
    tensor_fixture_open(&f);
    theirs_init(&data); /* 6 x 8 FP8, which have one scale and 12 bytes of padding */
    theirs_init(&scale);
    any_managed managed = version_of(&data, 0);
    data.plain.tensor.dtype = (tn__dl_dtype){TN__DL_FLOAT8_E4M3FN, 8, 1};
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.plane = TN_PLANE_ROW;
#define REFUSED(status, words)                                                                     \
    do {                                                                                           \
        EXPECT_STATUS(import_any(f.scope, &managed, &config, f.other, &tensor), status);           \
        EXPECT_ERROR_HAS(words);                                                                   \
    } while (0)
    REFUSED(TN_INVALID_ARGUMENT, "has 16 bytes of scales, and none were given");
    config.scale = (struct DLManagedTensor *)&scale.plain;
    REFUSED(TN_INVALID_ARGUMENT, "192 bytes of scales were given");
    scale.shape[0] = 1;
    scale.shape[1] = 4;
    scale.plain.tensor.dtype = (tn__dl_dtype){TN__DL_UINT, 8, 1};
    REFUSED(TN_INVALID_ARGUMENT, "4 bytes of scales were given");
    scale.plain.tensor.dtype = (tn__dl_dtype){TN__DL_BFLOAT, 16, 1};
    REFUSED(TN_INVALID_ARGUMENT, "the scales are bf16");
    scale.plain.tensor.dtype = (tn__dl_dtype){TN__DL_FLOAT, 32, 1};
    config.scale_versioned = (struct DLManagedTensorVersioned *)&scale.versioned;
    REFUSED(TN_INVALID_ARGUMENT, "of the other version");
    config.scale_versioned = NULL;
    config.scale = (struct DLManagedTensor *)&data.plain;
    REFUSED(TN_INVALID_ARGUMENT, "the same tensor");
    config.scale = (struct DLManagedTensor *)&scale.plain;
    config.format = (tn_format)99;
    REFUSED(TN_INVALID_ARGUMENT, "unknown format 99");
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.plane = TN_PLANE_DATA;
    REFUSED(TN_INVALID_ARGUMENT, "no plane DATA");
#undef REFUSED
    assert_int_equal(data.deleted + scale.deleted, 0);
    config.plane = TN_PLANE_COL; /* 6 x 8 as stored is 8 x 6 */
    EXPECT_OK(import_any(f.scope, &managed, &config, f.other, &tensor));
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    assert_int_equal(info.rows, 8);
    assert_int_equal(info.cols, 6);
    tensor_fixture_close(&f);
    assert_int_equal(data.deleted, 1);
    assert_int_equal(scale.deleted, 1);
}

static void host_memory_failures_change_nothing(void **state) {
    tensor_fixture f;
    theirs their;
    tn_tensor imported = {0};
    any_managed managed, exported;
    int failures[2] = {0, 0};
    (void)state;
    tensor_fixture_open(&f);
    theirs_init(&their);
    managed = version_of(&their, 1);
    tn_tensor tensor = tensor_of_format(&f, TN_FORMAT_PLAIN, TN_FP32, 1, (int64_t[]){100});
    fixture_write(tensor, TN_PLANE_DATA, f.stream);
    tn_dlpack_export_config config = export_of(TN_PLANE_DATA, TN_DLPACK_DATA, f.other);
    size_t blocks = tn__host_live_blocks();
    for (int is_import = 0; is_import < 2; is_import++) {
        for (;;) {
            tn__host_alloc_fault(failures[is_import] + 1, 0);
            tn_status status = is_import ? import_any(f.scope, &managed, NULL, f.other, &imported)
                                         : export_any(1, tensor, &config, &exported);
            tn__host_alloc_fault(0, 0);
            if (status == TN_OK) break;
            assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
            assert_int_equal(tn__host_live_blocks(), blocks);
            assert_int_equal(fixture_ledger(f.scope).leases, 0);
            failures[is_import]++;
        }
        if (!is_import) delete_any(&exported);
        blocks = tn__host_live_blocks();
    }
    assert_true(failures[0] >= 1);
    assert_int_equal(failures[1], 4); /* as an adoption, and the import's own */
    assert_int_equal(their.deleted, 0);
    tensor_fixture_close(&f);
    assert_int_equal(their.deleted, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_import_is_their_memory_until_its_end),
        cmocka_unit_test(our_own_export_comes_back_as_the_same_memory),
        cmocka_unit_test(what_can_not_be_represented_stays_the_callers),
        cmocka_unit_test(another_major_version_is_not_looked_into),
        cmocka_unit_test(what_is_read_only_stays_so),
        cmocka_unit_test(scales_that_do_not_fit_are_refused),
        cmocka_unit_test(host_memory_failures_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
