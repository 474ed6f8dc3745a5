/* Tensors and their planes: shapes, states, what is refused and in which words. */
#include "tensor_fixture.h"

#include <stdio.h>
#include <string.h>

static tn_tensor_config config_2d(int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = rows;
    config.shape[1] = cols;
    return config;
}

/* ---- shapes -------------------------------------------------------------------------------- */

static void a_tensor_is_flattened_to_rows_and_columns(void **state) {
    const tensor_fixture *f = *state;
    static const struct {
        int rank;
        int64_t shape[8];
        int64_t rows, cols;
    } cases[] = {{0, {0}, 1, 1},
                 {1, {1024}, 1, 1024},
                 {2, {129, 257}, 129, 257},
                 {3, {2, 64, 256}, 128, 256},
                 {4, {16, 8, 4, 512}, 512, 512},
                 {8, {2, 1, 3, 1, 5, 1, 7, 11}, 210, 11},
                 {3, {0, 5, 7}, 0, 7},
                 {3, {5, 0, 7}, 0, 7},
                 {2, {7, 0}, 7, 0},
                 {1, {0}, 1, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
        tn_tensor_info info = TN_TENSOR_INFO_INIT;
        tn_tensor tensor;
        config.rank = cases[i].rank;
        memcpy(config.shape, cases[i].shape, sizeof config.shape);
        EXPECT_OK(tn_tensor_create(f->scope, &config, &tensor));
        EXPECT_OK(tn_tensor_info_get(tensor, &info));
        assert_int_equal(info.rows, cases[i].rows);
        assert_int_equal(info.cols, cases[i].cols);
        assert_int_equal(info.rank, cases[i].rank);
        assert_memory_equal(info.shape, cases[i].shape,
                            (size_t)cases[i].rank * sizeof info.shape[0]);
    }
}

static void a_3d_tensor_has_a_col_plane_of_k_by_m(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_plane_layout layout;
    tn_tensor tensor;
    config.format = TN_FORMAT_FP8_BLOCK_1D;
    config.dtype = TN_E5M2;
    config.rank = 3;
    config.shape[0] = 2, config.shape[1] = 64, config.shape[2] = 256;
    EXPECT_OK(tn_tensor_create(f->scope, &config, &tensor));
    EXPECT_OK(tn_plane_layout_get(tensor, TN_PLANE_COL, &layout));
    assert_int_equal(layout.rows, 256);
    assert_int_equal(layout.cols, 128);
    assert_int_equal(layout.scale_rows, 1);
    assert_int_equal(layout.scale_cols, 256);
    assert_int_equal(layout.scale_bytes, 1024);
    EXPECT_STATUS(tn_plane_layout_get(tensor, TN_PLANE_DATA, &layout), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("fp8_block_1d");
    EXPECT_ERROR_HAS("DATA");
}

static void expect_refused(const tensor_fixture *f, const tn_tensor_config *config,
                           const char *words) {
    tn_tensor tensor = {77};
    tn_ledger before = fixture_ledger(f->scope);
    EXPECT_STATUS(tn_tensor_create(f->scope, config, &tensor), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS(words);
    tn_ledger after = fixture_ledger(f->scope);
    assert_int_equal(tensor.value, 77);
    assert_memory_equal(&before, &after, sizeof before);
}

static void configs_that_do_not_fit_are_refused_by_name(void **state) {
    const tensor_fixture *f = *state;
    char long_name[400];
    tn_tensor_config config = config_2d(4, 4);
    config.dtype = TN_BF16;
    expect_refused(f, &config, "format fp8_block_2d does not take dtype bf16");
    config = config_2d(4, 4), config.format = TN_FORMAT_PLAIN;
    expect_refused(f, &config, "format plain does not take dtype e4m3");
    config = config_2d(4, 4), config.format = (tn_format)9;
    expect_refused(f, &config, "unknown format 9");
    config = config_2d(4, 4), config.dtype = TN_DTYPE_COUNT;
    expect_refused(f, &config, "unknown dtype 8");
    config = config_2d(4, -1);
    expect_refused(f, &config, "dimension 1 is -1");
    config = config_2d(4, 4), config.rank = 9;
    expect_refused(f, &config, "rank 9 is not 0 to 8");
    config = config_2d(4, 4), config.rank = -1;
    expect_refused(f, &config, "rank -1");
    config = config_2d(INT64_C(1) << 32, INT64_C(1) << 31);
    expect_refused(f, &config, "more than 2^62 elements");
    config = config_2d(INT64_MAX, 0);
    expect_refused(f, &config, "more than 2^62 elements");
    config = config_2d(4, 4), config.policy = TN_POLICY_COUNT;
    expect_refused(f, &config, "unknown policy");
    config = config_2d(4, 4), config.scale_mode = (tn_scale_mode)2;
    expect_refused(f, &config, "unknown scale mode 2");
    config = config_2d(4, 4), config.size = 8;
    expect_refused(f, &config, "TN_TENSOR_CONFIG_INIT");
    memset(long_name, 'x', sizeof long_name), long_name[256] = 0;
    config = config_2d(4, 4), config.name = long_name;
    expect_refused(f, &config, "longer than 255 bytes");
    expect_refused(f, NULL, "TN_TENSOR_CONFIG_INIT");
    EXPECT_STATUS(tn_tensor_create(f->scope, &config, NULL), TN_INVALID_ARGUMENT);
}

static void the_largest_shapes_are_accepted_without_memory(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    tn_plane_layout layout;
    config.dtype = TN_BYTE;
    config.rank = 3;
    config.shape[0] = INT64_C(1) << 20;
    config.shape[1] = INT64_C(1) << 21;
    config.shape[2] = INT64_C(1) << 21;
    EXPECT_OK(tn_tensor_create(f->scope, &config, &tensor));
    EXPECT_OK(tn_plane_layout_get(tensor, TN_PLANE_DATA, &layout));
    assert_int_equal(layout.data_bytes, INT64_C(1) << 62);
    config.rank = 5; /* no element, whatever the rest */
    for (int zero = 0; zero < 4; zero++) {
        for (int i = 0; i < 5; i++)
            config.shape[i] = i == zero ? 0 : INT64_C(1) << 40;
        EXPECT_OK(tn_tensor_create(f->scope, &config, &tensor));
    }
}

static void a_tensor_without_elements_owns_no_byte_and_has_every_state(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 0, 640, "empty");
    int derived = fixture_derive_calls();
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, f->stream));
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_ALLOCATED);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f->stream, &lease, &view));
    assert_null(view.data);
    assert_null(view.scale);
    assert_int_equal(view.layout.scale_rows, 0);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_VALID);
    assert_int_equal(fixture_derive_calls(), derived); /* nothing to put on the stream */
    assert_int_equal(fixture_ledger(f->scope).total_bytes, 0);
    assert_int_equal(fixture_ledger(f->scope).planes, 0);
    assert_int_equal(fixture_owned_bytes(f), 0);
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_ROW, NULL, 0, NULL, 0, f->stream));
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_COL, NULL, 0, NULL, 0, f->stream));
}

/* ---- states -------------------------------------------------------------------------------- */

static void making_a_plane_owns_exactly_its_bytes(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 129, 257, "w");
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_ABSENT);
    assert_int_equal(fixture_owned_bytes(f), 0);
    EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, f->stream));
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_ALLOCATED);
    assert_int_equal(fixture_owned_bytes(f), 33153 + 32);
    EXPECT_OK(tn_plane_make(tensor, TN_PLANE_ROW, f->stream)); /* it has memory already */
    assert_int_equal(fixture_owned_bytes(f), 33153 + 32);
    EXPECT_OK(tn_plane_make(tensor, TN_PLANE_COL, f->other));
    assert_int_equal(fixture_owned_bytes(f), 2 * 33153 + 32 + 48);
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream)); /* nothing is lost: not valid */
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f->stream)); /* absent is success */
    assert_int_equal(fixture_owned_bytes(f), 0);
}

/* The data takes the pool's whole limit, so that there is none left for the scales. */
static void a_plane_is_made_whole_or_not_at_all(void **state) {
    const tensor_fixture *f = *state;
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config config = config_2d(2048, 1024);
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn_tensor tensor;
    tn_plane_view view;
    tn_lease lease;
    pool_config.limit_bytes = (size_t)2048 * 1024;
    EXPECT_OK(tn_pool_create(f->device, &pool_config, &scope_config.pool));
    tn_scope scope;
    EXPECT_OK(tn_scope_create(&scope_config, &scope));
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    EXPECT_STATUS(tn_plane_make(tensor, TN_PLANE_ROW, f->stream), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f->stream, &lease, &view),
                  TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_OK(tn_pool_stats_get(scope_config.pool, &stats));
    assert_int_equal(stats.owned_bytes, 0);
    assert_int_equal(stats.peak_live_bytes, 2048 * 1024); /* the data was there for a moment */
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_ABSENT);
    assert_int_equal(fixture_ledger(scope).peak_total_bytes, 0);
    assert_int_equal(fixture_ledger(scope).leases, 0);
    EXPECT_OK(tn_ledger_check(scope_config.pool));
    EXPECT_OK(tn_scope_close(scope));
    EXPECT_OK(tn_pool_destroy(scope_config.pool));
}

static void planes_that_the_format_lacks_are_refused_everywhere(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor plain = fixture_tensor(f, TN_FORMAT_PLAIN, 2, 2, "plain");
    tn_plane_state got;
    tn_plane_view view;
    tn_lease lease;
    EXPECT_STATUS(tn_plane_make(plain, TN_PLANE_ROW, f->stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tensor plain of format plain has no plane ROW");
    EXPECT_STATUS(tn_plane_require(plain, TN_PLANE_COL, f->stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_plane_drop(plain, TN_PLANE_COL, f->stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_plane_release(plain, TN_PLANE_COL, f->stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_plane_state_get(plain, (tn_plane)3, &got), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_lease_begin(plain, TN_PLANE_ROW, TN_WRITE, f->stream, &lease, &view),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_lease_begin(plain, TN_PLANE_DATA, (tn_access)4, f->stream, &lease, &view),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("unknown access 4");
    EXPECT_STATUS(tn_lease_begin(plain, TN_PLANE_DATA, TN_WRITE, f->stream, NULL, &view),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_lease_begin(plain, TN_PLANE_DATA, TN_WRITE, f->stream, &lease, NULL),
                  TN_INVALID_ARGUMENT);
    assert_int_equal(fixture_ledger(f->scope).leases, 0);
}

static void the_last_valid_plane_is_not_dropped(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tensor w, plane ROW is VALID and the last copy");
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream));
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_COL, f->stream), TN_INVALID_STATE);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_ROW, f->stream)); /* 2D: transposed back */
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_STALE);
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream), TN_INVALID_STATE);
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f->stream)); /* a stale one may go */
    assert_int_equal(fixture_owned_bytes(f), 64 + 16);
}

static void a_leased_plane_is_not_dropped_and_its_tensor_not_destroyed(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "held");
    tn_plane_view view;
    tn_lease lease;
    char stream[32];
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_READ, f->other, &lease, &view));
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_COL, f->stream), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor held, plane COL is under a READ lease on stream");
    snprintf(stream, sizeof stream, "%p", f->other);
    EXPECT_ERROR_HAS(stream);
    EXPECT_STATUS(tn_tensor_destroy(tensor, f->stream), TN_IN_USE);
    EXPECT_ERROR_HAS("plane COL");
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_VALID);
    assert_int_equal(fixture_ledger(f->scope).planes, 2);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_tensor_destroy(tensor, f->stream));
}

/* ---- derivation ---------------------------------------------------------------------------- */

static void derivation_of_2d_transposes_data_and_scales_both_ways(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 130, 3, "w");
    unsigned char row[390], col[390], back[390];
    float scales[8] = {2, 0, 0, 0, 4, 0, 0, 0}, col_scales[4], back_scales[8];
    for (int i = 0; i < 390; i++)
        row[i] = (unsigned char)(i * 7);
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_ROW, row, 390, scales, 32, f->stream));
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_COL, col, 390, col_scales, 16, f->other));
    EXPECT_OK(tn_stream_synchronize(f->device, f->other));
    for (int i = 0; i < 390; i++)
        assert_int_equal(col[i % 3 * 130 + i / 3], row[i]);
    assert_memory_equal(col_scales, ((float[]){2, 4, 0, 0}), 16);
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_VALID); /* not staled */
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream));
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_ROW, back, 390, back_scales, 32, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    assert_memory_equal(back, row, 390);
    assert_memory_equal(back_scales, scales, 32);
}

static void a_1d_plane_is_never_derived(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_1D, 130, 3, "x");
    tn_plane_view view;
    tn_lease lease;
    EXPECT_STATUS(tn_plane_require(tensor, TN_PLANE_COL, f->stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("no plane of it is valid: write one first");
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_STATUS(tn_plane_require(tensor, TN_PLANE_COL, f->stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("tensor x, plane COL is ABSENT and can not be derived: with 1D scaling");
    EXPECT_ERROR_HAS("quantize it from the high-precision source");
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_COL, TN_READ, f->stream, &lease, &view),
                  TN_UNSUPPORTED);
    fixture_write(tensor, TN_PLANE_COL, f->stream);
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream));
    EXPECT_STATUS(tn_plane_require(tensor, TN_PLANE_ROW, f->stream), TN_UNSUPPORTED);
    assert_int_equal(fixture_ledger(f->scope).planes, 1);
    assert_int_equal(fixture_ledger(f->scope).leases, 0);
}

static void without_a_derive_function_the_text_names_libtenure_ops(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_format_set_derive(TN_FORMAT_FP8_BLOCK_2D, NULL));
    EXPECT_STATUS(tn_plane_require(tensor, TN_PLANE_COL, f->stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("libtenure-ops");
    EXPECT_OK(tn_format_set_derive(TN_FORMAT_FP8_BLOCK_2D, fixture_derive));
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_ABSENT);
}

static void a_derivation_that_fails_leaves_all_as_it_was(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    fixture_derive_fault(1);
    EXPECT_STATUS(tn_plane_require(tensor, TN_PLANE_COL, f->stream), TN_DRIVER_ERROR);
    EXPECT_ERROR_HAS("told to fail");
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_VALID);
    assert_int_equal(fixture_owned_bytes(f), 64 + 16);
    assert_int_equal(fixture_ledger(f->scope).leases, 0);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    fixture_derive_fault(1);
    EXPECT_STATUS(tn_plane_require(tensor, TN_PLANE_COL, f->stream), TN_DRIVER_ERROR);
    assert_int_equal(fixture_state(tensor, TN_PLANE_COL), TN_PLANE_STALE);
}

/* A plane is data and scales in one; "only the scales are missing" has no state. TransformerEngine
 * asks for the columnwise plane when only its scales are gone: here both always come together. */
static void a_plane_always_has_both_its_data_and_its_scales(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
    tn_plane_view view;
    tn_lease lease;
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    for (int round = 0; round < 3; round++) {
        int derived = fixture_derive_calls();
        EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_READ, f->stream, &lease, &view));
        assert_non_null(view.data);
        assert_non_null(view.scale);
        EXPECT_OK(tn_lease_end(lease));
        assert_int_equal(fixture_derive_calls(), derived + 1);
        assert_int_equal(fixture_ledger(f->scope).data_bytes[TN_PLANE_COL], 64);
        assert_int_equal(fixture_ledger(f->scope).scale_bytes[TN_PLANE_COL], 16);
        EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f->stream));
        assert_int_equal(fixture_ledger(f->scope).data_bytes[TN_PLANE_COL], 0);
        assert_int_equal(fixture_ledger(f->scope).scale_bytes[TN_PLANE_COL], 0);
    }
}

/* ---- handles ------------------------------------------------------------------------------- */

static void a_destroyed_tensor_is_stale_also_when_its_slot_is_used_again(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor first = fixture_tensor(f, TN_FORMAT_PLAIN, 2, 2, "first");
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_plane_layout layout;
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_tensor_destroy(first, f->stream));
    EXPECT_STATUS(tn_tensor_destroy(first, f->stream), TN_STALE_HANDLE); /* twice */
    tn_tensor second = fixture_tensor(f, TN_FORMAT_PLAIN, 2, 2, "second");
    assert_int_equal((uint32_t)first.value, (uint32_t)second.value); /* the slot of the first */
    EXPECT_STATUS(tn_tensor_info_get(first, &info), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_plane_layout_get(first, TN_PLANE_DATA, &layout), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_plane_make(first, TN_PLANE_DATA, f->stream), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_plane_require(first, TN_PLANE_DATA, f->stream), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_plane_drop(first, TN_PLANE_DATA, f->stream), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_lease_begin(first, TN_PLANE_DATA, TN_WRITE, f->stream, &lease, &view),
                  TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_set_frozen(first, 1), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_set_policy(first, TN_POLICY_KEEP), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_move(first, f->scope), TN_STALE_HANDLE);
    EXPECT_ERROR_HAS("is not alive");
    EXPECT_OK(tn_tensor_info_get(second, &info));
    assert_string_equal(info.name, "second");
    EXPECT_OK(tn_tensor_destroy((tn_tensor){0}, f->stream)); /* none: a no-op */
    EXPECT_STATUS(tn_tensor_info_get((tn_tensor){0}, &info), TN_STALE_HANDLE);
}

/* ---- copies -------------------------------------------------------------------------------- */

static void copies_want_the_exact_sizes(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 8, 8, "w");
    unsigned char data[64] = {0};
    float scales[4] = {0};
    EXPECT_STATUS(tn_plane_write(tensor, TN_PLANE_ROW, data, 63, scales, 16, f->stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("plane ROW has 64 bytes of data: 63 were given");
    EXPECT_STATUS(tn_plane_write(tensor, TN_PLANE_ROW, data, 64, NULL, 0, f->stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("plane ROW has 16 bytes of scales: 0 were given");
    EXPECT_STATUS(tn_plane_write(tensor, TN_PLANE_ROW, data, 64, NULL, 16, f->stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_plane_write(tensor, TN_PLANE_ROW, NULL, 64, scales, 16, f->stream),
                  TN_INVALID_ARGUMENT);
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_ABSENT);
    EXPECT_STATUS(tn_plane_read(tensor, TN_PLANE_ROW, data, 64, scales, 16, f->stream),
                  TN_INVALID_STATE); /* nothing has been written */
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_ROW, data, 64, scales, 16, f->stream));
    EXPECT_STATUS(tn_plane_read(tensor, TN_PLANE_ROW, data, 65, scales, 16, f->stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_ROW, data, 64, scales, 16, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(a_tensor_is_flattened_to_rows_and_columns),
        WITH_FIXTURE(a_3d_tensor_has_a_col_plane_of_k_by_m),
        WITH_FIXTURE(configs_that_do_not_fit_are_refused_by_name),
        WITH_FIXTURE(the_largest_shapes_are_accepted_without_memory),
        WITH_FIXTURE(a_tensor_without_elements_owns_no_byte_and_has_every_state),
        WITH_FIXTURE(making_a_plane_owns_exactly_its_bytes),
        WITH_FIXTURE(a_plane_is_made_whole_or_not_at_all),
        WITH_FIXTURE(planes_that_the_format_lacks_are_refused_everywhere),
        WITH_FIXTURE(the_last_valid_plane_is_not_dropped),
        WITH_FIXTURE(a_leased_plane_is_not_dropped_and_its_tensor_not_destroyed),
        WITH_FIXTURE(derivation_of_2d_transposes_data_and_scales_both_ways),
        WITH_FIXTURE(a_1d_plane_is_never_derived),
        WITH_FIXTURE(without_a_derive_function_the_text_names_libtenure_ops),
        WITH_FIXTURE(a_derivation_that_fails_leaves_all_as_it_was),
        WITH_FIXTURE(a_plane_always_has_both_its_data_and_its_scales),
        WITH_FIXTURE(a_destroyed_tensor_is_stale_also_when_its_slot_is_used_again),
        WITH_FIXTURE(copies_want_the_exact_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
