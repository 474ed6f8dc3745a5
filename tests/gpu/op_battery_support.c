/* The operands of the battery's cases and their results: see op_battery_support.h. */
#include "op_battery_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const tn_dtype battery_floats[3] = {TN_FP32, TN_BF16, TN_FP16};
const tn_dtype battery_codes[2] = {TN_E4M3, TN_E5M2};
const tn_plane battery_row_and_col[2] = {TN_PLANE_ROW, TN_PLANE_COL};

/* ---- operands ------------------------------------------------------------------------------- */

void battery_keep(battery_operands *operands, tn_tensor tensor) {
    assert_true(operands->in_count < BATTERY_INPUTS_MAX);
    operands->in[operands->in_count++] = tensor;
}

int64_t battery_band_tile(const battery_case *c, int band) {
    return c->rows == c->bands->rows ? c->bands->tile[band] : c->bands->compact[band];
}

int battery_band_at(const battery_case *c, int64_t tile) {
    for (int band = 0; band < BATTERY_BANDS; band++)
        if (battery_band_tile(c, band) == tile) return band;
    return -1;
}

/* 0, but for the bands, each with a largest value of its own, the same in all, so that the
 * tensor's is the same however few bands there are. */
static void upload_bands(gpu_side *side, const battery_case *c, tn_tensor tensor, tn_dtype dtype,
                         int64_t cols, uint64_t seed) {
    const size_t row_bytes = (size_t)cols * tn_dtype_bytes(dtype);
    unsigned char *data = malloc(128 * row_bytes + 1);
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_WRITE, side->stream, &lease, &view));
    EXPECT_OK(tn_fill(side->device, view.data, 0, view.layout.data_bytes, side->stream));
    for (int b = 0; b < BATTERY_BANDS; b++) {
        const int64_t first = battery_band_tile(c, b) * 128;
        const int64_t rows = c->rows - first < 128 ? c->rows - first : 128;
        uint64_t state = seed + (uint64_t)b;
        if (dtype == TN_BYTE) {
            for (size_t i = 0; i < (size_t)rows * row_bytes; i++)
                data[i] = (unsigned char)gpu_random(&state);
        } else {
            gpu_fill_values(c->fill, dtype, state, data, (size_t)(rows * cols));
            gpu_put(dtype, data, 0, 1024.0f);
        }
        EXPECT_OK(tn_copy(side->device, (char *)view.data + (size_t)first * row_bytes, data,
                          (size_t)rows * row_bytes, side->stream));
        EXPECT_OK(tn_stream_synchronize(side->device, side->stream));
    }
    EXPECT_OK(tn_lease_end(lease));
    free(data);
}

static void upload_values(gpu_side *side, const battery_case *c, tn_tensor tensor, tn_dtype dtype,
                          size_t count, uint64_t seed) {
    uint64_t state = seed;
    unsigned char *data = malloc(count * tn_dtype_bytes(dtype) + 1);
    if (dtype == TN_BYTE) {
        for (size_t i = 0; i < count; i++)
            data[i] = (unsigned char)gpu_random(&state);
    } else {
        gpu_fill_values(c->fill, dtype, seed, data, count);
    }
    gpu_upload(side, tensor, data);
    free(data);
}

tn_tensor battery_input(gpu_side *side, const battery_case *c, battery_operands *operands,
                        tn_dtype dtype, int64_t rows, int64_t cols, uint64_t salt) {
    tn_tensor tensor = gpu_plain(side, dtype, rows, cols);
    if (c->bands && rows == c->rows)
        upload_bands(side, c, tensor, dtype, cols, c->seed * 64 + salt * 4);
    else
        upload_values(side, c, tensor, dtype, (size_t)(rows * cols), c->seed * 64 + salt);
    battery_keep(operands, tensor);
    return tensor;
}

tn_tensor battery_skip(gpu_side *side, battery_operands *operands) {
    operands->skip = gpu_plain(side, TN_FP32, 1, 1);
    battery_flag(side, operands, 0.0f);
    battery_keep(operands, operands->skip);
    return operands->skip;
}

void battery_flag(gpu_side *side, const battery_operands *operands, float value) {
    gpu_upload(side, operands->skip, &value);
}

static void add(battery_operands *operands, battery_output output) {
    assert_true(operands->out_count < BATTERY_OUTPUTS_MAX);
    operands->out[operands->out_count++] = output;
}

void battery_output_add(battery_operands *operands, const char *name, tn_tensor tensor,
                        tn_plane plane) {
    add(operands, (battery_output){.name = name, .tensor = tensor, .plane = plane});
}

void battery_derived_add(battery_operands *operands, const char *name, tn_tensor tensor,
                         tn_plane plane) {
    add(operands,
        (battery_output){.name = name, .tensor = tensor, .plane = plane, .is_derived = 1});
}

void battery_updated_add(battery_operands *operands, const char *name, tn_tensor tensor,
                         tn_tensor initial) {
    add(operands, (battery_output){.name = name, .tensor = tensor, .initial = initial});
}

void battery_output_like(battery_operands *operands, tn_tensor like, tn_plane plane,
                         battery_likeness likeness) {
    battery_output *out = &operands->out[operands->out_count - 1];
    out->like = like, out->like_plane = plane, out->likeness = likeness;
}

void battery_planes_add(battery_operands *operands, tn_tensor tensor, unsigned planes) {
    if (planes != TN_QUANTIZE_COL) battery_output_add(operands, "row plane", tensor, TN_PLANE_ROW);
    if (planes & TN_QUANTIZE_COL)
        battery_output_add(operands, "column plane", tensor, TN_PLANE_COL);
}

unsigned battery_pick(const battery_case *c, unsigned salt, unsigned count) {
    uint64_t state = c->seed * 4096 + (uint64_t)c->way * 64 + salt;
    return (unsigned)(gpu_random(&state) >> 33) % count;
}

static int is_before(const battery_operands *operands, int output) {
    for (int i = 0; i < output; i++)
        if (operands->out[i].tensor.value == operands->out[output].tensor.value) return 1;
    return 0;
}

static void fill_plane(gpu_side *side, const tn_plane_view *view) {
    if (view->layout.data_bytes > 0)
        EXPECT_OK(tn_fill(side->device, view->data, 0xFF, view->layout.data_bytes, side->stream));
    if (view->layout.scale_bytes > 0)
        EXPECT_OK(tn_fill(side->device, view->scale, 0xFF, view->layout.scale_bytes, side->stream));
}

static void copy_initial(gpu_side *side, tn_tensor initial, const tn_plane_view *view) {
    tn_lease lease;
    tn_plane_view from;
    EXPECT_OK(tn_lease_begin(initial, TN_PLANE_DATA, TN_READ, side->stream, &lease, &from));
    if (from.layout.data_bytes > 0)
        EXPECT_OK(
            tn_copy(side->device, view->data, from.data, from.layout.data_bytes, side->stream));
    EXPECT_OK(tn_lease_end(lease));
}

/* Planes of one tensor are leased at once, so that none makes another one stale. */
static void poison_tensor(gpu_side *side, const battery_operands *operands, tn_tensor tensor) {
    tn_lease leases[BATTERY_OUTPUTS_MAX];
    int count = 0;
    for (int i = 0; i < operands->out_count; i++) {
        const battery_output *out = &operands->out[i];
        tn_plane_view view;
        if (out->tensor.value != tensor.value || out->is_derived) continue;
        EXPECT_OK(
            tn_lease_begin(tensor, out->plane, TN_WRITE, side->stream, &leases[count++], &view));
        if (out->initial.value)
            copy_initial(side, out->initial, &view);
        else
            fill_plane(side, &view);
    }
    while (count > 0)
        EXPECT_OK(tn_lease_end(leases[--count]));
}

void battery_poison(gpu_side *side, const battery_operands *operands) {
    for (int i = 0; i < operands->out_count; i++)
        if (!is_before(operands, i)) poison_tensor(side, operands, operands->out[i].tensor);
}

void battery_poison_derived(gpu_side *side, const battery_operands *operands) {
    for (int i = 0; i < operands->out_count; i++) {
        const battery_output *out = &operands->out[i];
        tn_lease lease;
        tn_plane_view view;
        if (!out->is_derived) continue;
        EXPECT_OK(tn_lease_begin(out->tensor, out->plane, TN_READ, side->stream, &lease, &view));
        fill_plane(side, &view);
        EXPECT_OK(tn_lease_end(lease));
    }
}

battery_operands battery_prepare(gpu_side *side, const battery_op *op, const battery_case *c) {
    battery_operands operands = {.in_count = 0};
    op->prepare(side, c, &operands);
    battery_poison(side, &operands);
    return operands;
}

void battery_end(gpu_side *side, battery_operands *operands) {
    for (int i = 0; i < operands->out_count; i++)
        if (!is_before(operands, i)) gpu_destroy(side, operands->out[i].tensor);
    for (int i = 0; i < operands->in_count; i++)
        gpu_destroy(side, operands->in[i]);
}

/* ---- results -------------------------------------------------------------------------------- */

battery_results battery_fetch(gpu_side *side, const battery_operands *operands) {
    battery_results results = {.copies = {{.data = NULL}}};
    for (int i = 0; i < operands->out_count; i++)
        results.copies[i] = gpu_download(side, operands->out[i].tensor, operands->out[i].plane);
    return results;
}

int battery_results_equal(const battery_operands *operands, const battery_results *actual,
                          const battery_results *expected, const char *what) {
    int equal = 1;
    for (int i = 0; i < operands->out_count; i++) {
        char part[224];
        snprintf(part, sizeof part, "%s, %s", what, operands->out[i].name);
        equal = gpu_copies_equal(&actual->copies[i], &expected->copies[i], part) && equal;
    }
    return equal;
}

void battery_results_end(const battery_operands *operands, battery_results *results) {
    for (int i = 0; i < operands->out_count; i++)
        gpu_copy_end(&results->copies[i]);
}
