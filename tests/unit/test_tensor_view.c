/* Views: rows and shapes of a base tensor without memory of their own. What they can be used for,
 * what is refused and in which words, and that no view outlives its base.
 */
#include "tensor_fixture.h"

#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"
#include "tenure_lifetime.h"

enum { NTH_MAX = 12 };

static tn_tensor tensor_of(const tensor_fixture *f, tn_format format, tn_dtype dtype, int64_t rows,
                           int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = format;
    config.dtype = dtype;
    config.rank = 2;
    config.shape[0] = rows;
    config.shape[1] = cols;
    config.name = "base";
    EXPECT_OK(tn_tensor_create(f->scope, &config, &tensor));
    return tensor;
}

static tn_scope scope_in(const tensor_fixture *f) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = f->scope;
    config.name = "inner";
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_tensor rows_of(const tensor_fixture *f, tn_tensor base, int64_t first, int64_t rows) {
    tn_tensor view = {0};
    EXPECT_OK(tn_tensor_view_rows(base, first, rows, f->scope, &view));
    return view;
}

/* The addresses of a plane of a tensor. */
static tn_plane_view look(tn_tensor tensor, tn_plane plane, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, plane, TN_READ, stream, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
    return view;
}

static int64_t distance(const void *from, const void *to) {
    return (const char *)to - (const char *)from;
}

/* ---- what a view is ------------------------------------------------------------------------ */

static void a_view_reads_and_writes_the_base_and_owns_nothing(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor base = tensor_of(f, TN_FORMAT_PLAIN, TN_FP32, 8, 4);
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    float in[32], out[32], rows[12];
    for (int i = 0; i < 32; i++)
        in[i] = (float)i;
    tn_tensor view = rows_of(f, base, 3, 3);
    EXPECT_STATUS(tn_plane_write(view, TN_PLANE_DATA, in, 48, NULL, 0, f->stream),
                  TN_INVALID_STATE); /* the other rows would be undefined */
    EXPECT_ERROR_HAS("tensor base, plane DATA is ABSENT: UPDATE needs a valid plane");
    EXPECT_OK(tn_plane_write(base, TN_PLANE_DATA, in, 128, NULL, 0, f->stream));
    assert_int_equal(fixture_state(view, TN_PLANE_DATA), TN_PLANE_VALID);
    EXPECT_OK(tn_plane_read(view, TN_PLANE_DATA, rows, 48, NULL, 0, f->other));
    EXPECT_OK(tn_stream_synchronize(f->device, f->other));
    assert_memory_equal(rows, in + 12, 48);
    EXPECT_OK(tn_plane_write(view, TN_PLANE_DATA, in, 48, NULL, 0, f->other));
    EXPECT_OK(tn_plane_read(base, TN_PLANE_DATA, out, 128, NULL, 0, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    memcpy(in + 12, (float[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, 48);
    assert_memory_equal(out, in, 128);
    EXPECT_OK(tn_tensor_info_get(view, &info));
    assert_int_equal(info.base.value, base.value);
    assert_int_equal(info.rows, 3);
    assert_int_equal(info.rank, 2);
    EXPECT_OK(tn_tensor_info_get(base, &info));
    assert_int_equal(info.base.value, 0);
    assert_int_equal(fixture_ledger(f->scope).total_bytes, 128);
    assert_int_equal(fixture_ledger(f->scope).tensors, 2);
    assert_int_equal(fixture_owned_bytes(f), 128);
}

static void a_view_of_a_view_is_one_of_the_same_base(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor base = tensor_of(f, TN_FORMAT_PLAIN, TN_BF16, 100, 6), shaped;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    fixture_write(base, TN_PLANE_DATA, f->stream);
    void *data = look(base, TN_PLANE_DATA, f->stream).data;
    tn_tensor outer = rows_of(f, base, 10, 50), inner = rows_of(f, outer, 5, 10);
    assert_int_equal(distance(data, look(inner, TN_PLANE_DATA, f->stream).data), 15 * 6 * 2);
    EXPECT_OK(tn_tensor_view_shape(inner, 3, (int64_t[]){5, 3, 4}, f->scope, &shaped));
    tn_tensor last = rows_of(f, shaped, 13, 2); /* rows of 4 elements */
    assert_int_equal(distance(data, look(last, TN_PLANE_DATA, f->stream).data),
                     15 * 6 * 2 + 13 * 4 * 2);
    EXPECT_OK(tn_tensor_destroy(outer, f->stream)); /* what was made of it stays */
    EXPECT_OK(tn_tensor_info_get(last, &info));
    assert_int_equal(info.base.value, base.value);
    EXPECT_STATUS(tn_tensor_view_shape(base, 0, NULL, f->scope, &shaped), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("the shape has 1 x 1 elements, and tensor base 100 x 6");
}

static void all_of_the_base_in_another_shape_may_be_written_whole(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor base = tensor_of(f, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 128, 256), shaped;
    tn_plane_view view, old;
    tn_lease lease;
    EXPECT_OK(tn_tensor_view_shape(base, 3, (int64_t[]){2, 64, 256}, f->scope, &shaped));
    fixture_write(shaped, TN_PLANE_ROW, f->stream); /* makes it */
    EXPECT_OK(tn_plane_require(shaped, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_state(base, TN_PLANE_COL), TN_PLANE_VALID);
    EXPECT_OK(tn_lease_begin(shaped, TN_PLANE_ROW, TN_REPLACE, f->stream, &lease, &view));
    EXPECT_OK(tn_lease_old_view(lease, &old));
    assert_ptr_not_equal(old.data, view.data);
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_state(base, TN_PLANE_COL), TN_PLANE_STALE);
    EXPECT_STATUS(tn_tensor_view_shape(base, 2, (int64_t[]){256, 128}, f->scope, &shaped),
                  TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("its scales are those of blocks of the matrix");
}

/* ---- where the parts are ------------------------------------------------------------------- */

/* Rows 128 to 255 of 300 x 256, by the layouts of tenure_tensor.h; -1: the plane is refused. */
static void data_and_scales_of_each_format_are_where_its_layout_says(void **state) {
    const tensor_fixture *f = *state;
    static const struct {
        tn_format format;
        tn_dtype dtype;
        tn_plane plane;
        int64_t data_offset, scale_offset, stride, scale_bytes, global_offset;
    } cases[] = {
        {TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_PLANE_ROW, 32768, 512, 300, 1712, -1},
        {TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, TN_PLANE_COL, -1, 0, 0, 0, 0},
        {TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_PLANE_ROW, 32768, 16, 4, 16, -1},
        {TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, TN_PLANE_COL, -1, 0, 0, 0, 0},
        {TN_FORMAT_FP8_TENSOR, TN_E5M2, TN_PLANE_ROW, 32768, 0, 4, 16, 0},
        {TN_FORMAT_MXFP8, TN_E4M3, TN_PLANE_ROW, 32768, 1024, 8, 1024, -1},
        {TN_FORMAT_MXFP8, TN_E4M3, TN_PLANE_COL, 32768, 1024, 256, 1024, -1},
        {TN_FORMAT_NVFP4, TN_E2M1, TN_PLANE_ROW, 16384, 2048, 16, 2048, 4096},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tn_tensor base = tensor_of(f, cases[i].format, cases[i].dtype, 300, 256);
        tn_plane_layout layout;
        tn_tensor rows = rows_of(f, base, 128, 128);
        fixture_write(base, cases[i].plane, f->stream);
        if (cases[i].data_offset < 0) {
            EXPECT_STATUS(tn_plane_layout_get(rows, cases[i].plane, &layout), TN_UNSUPPORTED);
            EXPECT_ERROR_HAS("tn_tensor_copy_rows");
            continue;
        }
        tn_plane_view whole = look(base, cases[i].plane, f->stream);
        tn_plane_view view = look(rows, cases[i].plane, f->stream);
        EXPECT_OK(tn_plane_layout_get(rows, cases[i].plane, &layout));
        assert_memory_equal(&layout, &view.layout, sizeof layout);
        assert_int_equal(distance(whole.data, view.data), cases[i].data_offset);
        assert_int_equal(distance(whole.scale, view.scale), cases[i].scale_offset);
        assert_int_equal(layout.scale_stride, cases[i].stride);
        assert_int_equal(layout.scale_bytes, cases[i].scale_bytes);
        assert_int_equal(layout.global_scale_offset, cases[i].global_offset);
        assert_ptr_equal(view.global_scale, whole.global_scale);
        assert_int_equal(layout.rows, 128);
        assert_int_equal(layout.data_bytes, cases[i].format == TN_FORMAT_NVFP4 ? 16384 : 32768);
    }
}

/* ---- copies of rows ------------------------------------------------------------------------ */

typedef struct image {
    tn_plane_layout layout;
    unsigned char *data, *scale;
} image;

static image read_image(const tensor_fixture *f, tn_tensor tensor, tn_plane plane) {
    image read = {0};
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &read.layout));
    read.data = malloc(read.layout.data_bytes + 1);
    read.scale = malloc(read.layout.scale_bytes + 1);
    EXPECT_OK(tn_plane_read(tensor, plane, read.data, read.layout.data_bytes, read.scale,
                            read.layout.scale_bytes, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    return read;
}

static void free_image(image *read) {
    free(read->data);
    free(read->scale);
}

static void write_random(const tensor_fixture *f, tn_tensor tensor, tn_plane plane) {
    tn_plane_layout layout;
    uint64_t seed = 77;
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &layout));
    size_t bytes = layout.data_bytes + layout.scale_bytes;
    unsigned char *memory = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) {
        seed = seed * UINT64_C(6364136223846793005) + 1;
        memory[i] = (unsigned char)(seed >> 56);
    }
    EXPECT_OK(tn_plane_write(tensor, plane, memory, layout.data_bytes, memory + layout.data_bytes,
                             layout.scale_bytes, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    free(memory);
}

/* Where the scale of element (m, k) is, by the drawings in tenure_tensor.h. */
static int64_t scale_at(tn_format format, tn_plane plane, int64_t stride, int64_t m, int64_t k) {
    int is_col = plane == TN_PLANE_COL;
    switch (format) {
    case TN_FORMAT_FP8_BLOCK_1D: return is_col ? m / 128 * stride + k : k / 128 * stride + m;
    case TN_FORMAT_FP8_BLOCK_2D:
        return is_col ? k / 128 * stride + m / 128 : m / 128 * stride + k / 128;
    case TN_FORMAT_MXFP8: return is_col ? m / 32 * stride + k : m * stride + k / 32;
    case TN_FORMAT_NVFP4: return is_col ? k * stride + m / 16 : m * stride + k / 16;
    default: return 0;
    }
}

static unsigned element_at(const image *read, tn_format format, tn_plane plane, int64_t m,
                           int64_t k) {
    int is_transposed = plane == TN_PLANE_COL && format != TN_FORMAT_MXFP8;
    int64_t row = is_transposed ? k : m, col = is_transposed ? m : k;
    const unsigned char *at = read->data + (size_t)row * read->layout.row_bytes;
    if (format == TN_FORMAT_NVFP4) return at[col / 2] >> (col % 2 ? 4 : 0) & 15u;
    return at[col];
}

static void expect_rows(const image *copy, const image *base, tn_format format, tn_plane plane,
                        int64_t first, int64_t rows, int64_t cols) {
    size_t item = copy->layout.scale_dtype == TN_FP32 ? 4 : 1;
    for (int64_t m = 0; m < rows; m++) {
        for (int64_t k = 0; k < cols; k++) {
            assert_int_equal(element_at(copy, format, plane, m, k),
                             element_at(base, format, plane, m + first, k));
            int64_t to = scale_at(format, plane, copy->layout.scale_stride, m, k);
            int64_t from = scale_at(format, plane, base->layout.scale_stride, m + first, k);
            assert_memory_equal(copy->scale + (size_t)to * item, base->scale + (size_t)from * item,
                                item);
        }
    }
    if (base->layout.global_scale_offset >= 0) {
        assert_memory_equal(copy->scale + copy->layout.global_scale_offset,
                            base->scale + base->layout.global_scale_offset, 4);
    }
}

static void a_copy_of_rows_has_their_elements_and_scales_in_every_format(void **state) {
    const tensor_fixture *f = *state;
    static const struct {
        tn_format format;
        tn_dtype dtype;
    } formats[] = {{TN_FORMAT_FP8_BLOCK_1D, TN_E4M3},
                   {TN_FORMAT_FP8_BLOCK_2D, TN_E4M3},
                   {TN_FORMAT_FP8_TENSOR, TN_E4M3},
                   {TN_FORMAT_MXFP8, TN_E4M3},
                   {TN_FORMAT_NVFP4, TN_E2M1}};
    static const int64_t parts[][2] = {{0, 128}, {128, 128}, {256, 44}, {128, 172}, {0, 300}};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        for (int plane = TN_PLANE_ROW; plane <= TN_PLANE_COL; plane++) {
            tn_tensor base = tensor_of(f, formats[i].format, formats[i].dtype, 300, 140);
            write_random(f, base, (tn_plane)plane);
            image whole = read_image(f, base, (tn_plane)plane);
            for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) {
                tn_tensor copy;
                EXPECT_OK(
                    tn_tensor_copy_rows(base, parts[p][0], parts[p][1], f->scope, f->other, &copy));
                image part = read_image(f, copy, (tn_plane)plane);
                expect_rows(&part, &whole, formats[i].format, (tn_plane)plane, parts[p][0],
                            parts[p][1], 140);
                free_image(&part);
                EXPECT_OK(tn_tensor_destroy(copy, f->stream));
            }
            free_image(&whole);
            EXPECT_OK(tn_tensor_destroy(base, f->stream));
        }
    }
}

static void a_derivable_col_is_left_out_of_a_copy_and_one_that_is_not_is_refused(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor base = tensor_of(f, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 256, 128), copy;
    write_random(f, base, TN_PLANE_ROW);
    EXPECT_OK(tn_plane_require(base, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_tensor_copy_rows(base, 128, 128, f->scope, f->stream, &copy));
    assert_int_equal(fixture_state(copy, TN_PLANE_ROW), TN_PLANE_VALID);
    assert_int_equal(fixture_state(copy, TN_PLANE_COL), TN_PLANE_ABSENT);
    EXPECT_OK(tn_plane_require(copy, TN_PLANE_COL, f->stream));
    EXPECT_STATUS(tn_tensor_copy_rows(base, 64, 128, f->scope, f->stream, &copy), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("because 128 rows share scales");
    tn_tensor plain = tensor_of(f, TN_FORMAT_PLAIN, TN_FP32, 8, 4);
    fixture_write(plain, TN_PLANE_DATA, f->stream);
    EXPECT_OK(tn_tensor_copy_rows(plain, 3, 2, f->scope, f->stream, &copy)); /* any rows */
    EXPECT_STATUS(tn_tensor_copy_rows(plain, 7, 2, f->scope, f->stream, &copy),
                  TN_INVALID_ARGUMENT);
    tn_tensor view = rows_of(f, base, 128, 128), cloned;
    EXPECT_OK(tn_tensor_clone(view, f->scope, f->stream, &cloned));
    image whole = read_image(f, base, TN_PLANE_ROW), part = read_image(f, cloned, TN_PLANE_ROW);
    expect_rows(&part, &whole, TN_FORMAT_FP8_BLOCK_2D, TN_PLANE_ROW, 128, 128, 128);
    free_image(&whole);
    free_image(&part);
}

/* ---- what is refused ----------------------------------------------------------------------- */

static void rows_that_share_scales_with_others_have_no_view(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor view = {7}, base = tensor_of(f, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 300, 128);
    static const int64_t refused[][2] = {{64, 128}, {0, 100}, {128, 171}, {1, 299}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        EXPECT_STATUS(tn_tensor_view_rows(base, refused[i][0], refused[i][1], f->scope, &view),
                      TN_UNSUPPORTED);
        EXPECT_ERROR_HAS("because 128 rows share scales");
        EXPECT_ERROR_HAS("tn_tensor_copy_rows");
    }
    EXPECT_STATUS(tn_tensor_view_rows(base, 256, 45, f->scope, &view), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_tensor_view_rows(base, -1, 2, f->scope, &view), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_tensor_view_rows(base, INT64_MAX, 1, f->scope, &view), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_tensor_view_rows(base, 0, 128, f->scope, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_tensor_view_rows(base, 0, 128, (tn_scope){0}, &view), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_tensor_view_shape(base, 9, refused[0], f->scope, &view), TN_INVALID_ARGUMENT);
    assert_int_equal(view.value, 7);
    EXPECT_OK(tn_tensor_view_rows(base, 256, 44, f->scope, &view)); /* the last rows */
    assert_int_equal(fixture_ledger(f->scope).tensors, 2);
}

static void a_part_is_not_replaced_dropped_or_saved(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor saved, base = tensor_of(f, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 300, 128);
    tn_tensor plain = tensor_of(f, TN_FORMAT_PLAIN, TN_FP32, 8, 4);
    tn_plane_view view;
    tn_lease lease;
    fixture_write(base, TN_PLANE_ROW, f->stream);
    fixture_write(plain, TN_PLANE_DATA, f->stream);
    tn_tensor rows = rows_of(f, base, 5, 3), some = rows_of(f, plain, 1, 2);
    EXPECT_STATUS(tn_lease_begin(some, TN_PLANE_DATA, TN_REPLACE, f->stream, &lease, &view),
                  TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("only the whole is replaced");
    EXPECT_STATUS(tn_lease_begin(rows, TN_PLANE_ROW, TN_WRITE, f->stream, &lease, &view),
                  TN_UNSUPPORTED); /* a quantizer would pad over the next rows' scales */
    EXPECT_ERROR_HAS("can only be read, because the scales of its rows lie between");
    EXPECT_STATUS(tn_lease_begin(rows, TN_PLANE_COL, TN_READ, f->stream, &lease, &view),
                  TN_UNSUPPORTED);
    EXPECT_STATUS(tn_plane_drop(some, TN_PLANE_DATA, f->stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("is a view of tensor base and has no plane to drop");
    EXPECT_STATUS(tn_tensor_save(rows, TN_PLANE_BIT(TN_PLANE_ROW), f->scope, f->stream, &saved),
                  TN_INVALID_STATE);
    assert_int_equal(fixture_ledger(f->scope).leases, 0);
}

/* ---- lifetimes ----------------------------------------------------------------------------- */

static void a_view_never_outlives_its_base(void **state) {
    const tensor_fixture *f = *state;
    tn_scope inner = scope_in(f);
    tn_tensor base = tensor_of(f, TN_FORMAT_PLAIN, TN_FP32, 8, 4), view, outer;
    tn_plane_view seen;
    tn_lease lease;
    fixture_write(base, TN_PLANE_DATA, f->stream);
    EXPECT_OK(tn_tensor_view_rows(base, 0, 2, inner, &view));
    EXPECT_STATUS(tn_tensor_destroy(base, f->stream), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor base has a view, base in scope inner");
    EXPECT_OK(tn_lease_begin(view, TN_PLANE_DATA, TN_READ, f->stream, &lease, &seen));
    EXPECT_STATUS(tn_plane_drop(base, TN_PLANE_DATA, f->stream), TN_IN_USE);
    EXPECT_STATUS(tn_tensor_destroy(view, f->stream), TN_IN_USE);
    EXPECT_STATUS(tn_scope_close(inner), TN_IN_USE); /* the lease is the view's too */
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_lease_begin(base, TN_PLANE_DATA, TN_READ, f->stream, &lease, &seen));
    EXPECT_OK(tn_scope_close(inner)); /* the view ends, its base is leased on */
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_STATUS(tn_plane_make(view, TN_PLANE_DATA, f->stream), TN_STALE_HANDLE);
    inner = scope_in(f);
    EXPECT_OK(tn_tensor_move(base, inner));
    EXPECT_OK(tn_tensor_view_rows(base, 0, 2, inner, &view));
    EXPECT_OK(tn_tensor_view_rows(base, 4, 2, f->scope, &outer));
    EXPECT_STATUS(tn_scope_close(inner), TN_IN_USE);
    EXPECT_ERROR_HAS("has a view, base in scope model: closing its scope");
    EXPECT_OK(tn_tensor_destroy(outer, f->stream));
    EXPECT_OK(tn_scope_close(inner)); /* both are in it */
    assert_int_equal(fixture_owned_bytes(f), 0);
}

static void leases_through_views_exclude_each_other_as_the_base_does(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor base = tensor_of(f, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 256, 128);
    tn_plane_view view;
    tn_lease write, read;
    fixture_write(base, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(base, TN_PLANE_COL, f->stream));
    tn_tensor low = rows_of(f, base, 0, 128), high = rows_of(f, base, 128, 128);
    EXPECT_OK(tn_lease_begin(low, TN_PLANE_ROW, TN_WRITE, f->stream, &write, &view));
    EXPECT_STATUS(tn_lease_begin(high, TN_PLANE_ROW, TN_READ, f->stream, &read, &view), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor base, plane ROW is under a UPDATE lease");
    assert_int_equal(fixture_state(base, TN_PLANE_COL), TN_PLANE_STALE);
    EXPECT_OK(tn_lease_end(write));
    assert_int_equal(fixture_state(high, TN_PLANE_ROW), TN_PLANE_VALID);
    EXPECT_OK(tn_lease_begin(low, TN_PLANE_ROW, TN_READ, f->stream, &read, &view));
    EXPECT_OK(tn_lease_begin(high, TN_PLANE_ROW, TN_READ, f->stream, &write, &view));
    assert_int_equal(fixture_ledger(f->scope).leases, 2);
    EXPECT_OK(tn_lease_end(read));
    EXPECT_OK(tn_lease_abandon(write));
}

static void uses_through_views_are_in_order_with_those_of_the_base(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor base = tensor_of(f, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 256, 128), copy;
    tn_tensor views[2] = {rows_of(f, base, 0, 128), rows_of(f, base, 128, 128)};
    tn_plane_view view;
    tn_lease lease;
    fixture_write(base, TN_PLANE_ROW, f->stream);
    for (int i = 0; i < 12; i++) {
        tn_stream stream = i & 1 ? f->other : f->stream;
        int is_write = i % 3 == 0;
        EXPECT_OK(tn_lease_begin(i % 4 == 3 ? base : views[i >> 1 & 1], TN_PLANE_ROW,
                                 is_write ? TN_UPDATE : TN_READ, stream, &lease, &view));
        fixture_touch(f, &view, is_write, stream);
        EXPECT_OK(tn_lease_end(lease));
        EXPECT_OK(tn_tensor_copy_rows(views[i & 1], 0, 128, f->scope, f->stream, &copy));
        EXPECT_OK(tn_tensor_destroy(copy, f->other));
    }
    assert_int_equal(test_sim_get()->race_count(), 0);
}

static void a_view_or_copy_that_fails_leaves_nothing(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor base = tensor_of(f, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, 256, 128);
    int failed = 0;
    fixture_write(base, TN_PLANE_ROW, f->stream);
    for (int kind = 0; kind < 4; kind++) {
        for (long nth = 1; nth <= NTH_MAX; nth++) {
            tn_tensor out = {0};
            tn__host_alloc_fault(nth, kind & 1);
            tn_status status = kind & 2
                                   ? tn_tensor_copy_rows(base, 0, 128, f->scope, f->other, &out)
                                   : tn_tensor_view_rows(base, 0, 128, f->scope, &out);
            tn__host_alloc_fault(0, 0);
            failed += status != TN_OK;
            assert_int_equal(out.value != 0, status == TN_OK);
            assert_int_equal(fixture_ledger(f->scope).tensors, status == TN_OK ? 2 : 1);
            EXPECT_OK(tn_ledger_check(f->pool));
            EXPECT_OK(tn_tensor_destroy(out, f->stream));
        }
    }
    assert_in_range(failed, 8, 4 * NTH_MAX);
}

int main(void) {
#define WITH_FIXTURE(test)                                                                         \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up, tensor_fixture_tear_down)
#define SIMULATED(test)                                                                            \
    cmocka_unit_test_setup_teardown(test, tensor_fixture_set_up_sim, tensor_fixture_tear_down)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(a_view_reads_and_writes_the_base_and_owns_nothing),
        WITH_FIXTURE(a_view_of_a_view_is_one_of_the_same_base),
        WITH_FIXTURE(all_of_the_base_in_another_shape_may_be_written_whole),
        WITH_FIXTURE(data_and_scales_of_each_format_are_where_its_layout_says),
        WITH_FIXTURE(a_copy_of_rows_has_their_elements_and_scales_in_every_format),
        WITH_FIXTURE(a_derivable_col_is_left_out_of_a_copy_and_one_that_is_not_is_refused),
        WITH_FIXTURE(rows_that_share_scales_with_others_have_no_view),
        WITH_FIXTURE(a_part_is_not_replaced_dropped_or_saved),
        WITH_FIXTURE(a_view_never_outlives_its_base),
        WITH_FIXTURE(leases_through_views_exclude_each_other_as_the_base_does),
        SIMULATED(uses_through_views_are_in_order_with_those_of_the_base),
        SIMULATED(a_view_or_copy_that_fails_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
