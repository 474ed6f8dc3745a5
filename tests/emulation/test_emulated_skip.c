/* Kernels under a skip flag that is set: not a byte of any output changes. Outputs are compared
 * with twins that nothing has written. */
#include <stdio.h>
#include <string.h>

#include "emulation_support.h"

enum { ROWS = 140, COLS = 150 };

static float flag = 0x1p-149f;

static const tn_plane planes[] = {TN_PLANE_ROW, TN_PLANE_COL};
static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};

static const struct kind {
    tn_format format;
    tn_dtype dtype;
} kinds[] = {{TN_FORMAT_FP8_BLOCK_1D, TN_E4M3},
             {TN_FORMAT_FP8_BLOCK_2D, TN_E5M2},
             {TN_FORMAT_FP8_TENSOR, TN_E4M3},
             {TN_FORMAT_MXFP8, TN_E5M2},
             {TN_FORMAT_NVFP4, TN_E2M1}};
enum { KINDS = sizeof kinds / sizeof *kinds };

static twin_plane plane_of(const struct kind *kind, tn_plane plane) {
    return twin_plane_make(kind->format, plane, kind->dtype, ROWS, COLS);
}

static void quantizing_writes_nothing(void **state) {
    (void)state;
    for (unsigned i = 0; i < KINDS * 6; i++) {
        const struct kind *kind = &kinds[i % KINDS];
        twin_matrix src = twin_matrix_fill(floats[i % 3], ROWS, COLS, GPU_FILL_NORMAL, i);
        twin_plane row = plane_of(kind, TN_PLANE_ROW), col = plane_of(kind, TN_PLANE_COL);
        tn__quantize_work work = {.src = src.emulated,
                                  .format = kind->format,
                                  .dtype = kind->dtype,
                                  .has_row = i / KINDS % 3 != 0,
                                  .has_col = i / KINDS % 3 != 1,
                                  .row = row.emulated,
                                  .col = col.emulated,
                                  .skip = &flag};
        EXPECT_OK(tn__op_table_cuda.quantize(emulation.device, &work, emulation.stream));
        emulation_wait("quantize");
        twin_plane_compare(&row, "quantize", tn_format_name(kind->format));
        twin_plane_compare(&col, "quantize", tn_format_name(kind->format));
        twin_plane_end(&row), twin_plane_end(&col), twin_matrix_end(&src);
    }
    gpu_count_report("skipped casts");
}

static void dequantizing_writes_nothing(void **state) {
    (void)state;
    for (unsigned i = 0; i < KINDS * 6; i++) {
        const struct kind *kind = &kinds[i % KINDS];
        twin_plane src = plane_of(kind, planes[i / KINDS % 2]);
        twin_matrix dst = twin_matrix_make(floats[i / KINDS / 2], ROWS, COLS);
        tn__dequantize_work work = {
            .format = kind->format, .src = src.emulated, .dst = dst.emulated, .skip = &flag};
        EXPECT_OK(tn__op_table_cuda.dequantize(emulation.device, &work, emulation.stream));
        emulation_wait("dequantize");
        twin_matrix_compare(&dst, "dequantize", tn_format_name(kind->format));
        twin_matrix_end(&dst), twin_plane_end(&src);
    }
    gpu_count_report("skipped, back from planes");
}

/* With new scales from each plane to both kinds, and shifted. */
static void requantizing_writes_nothing(void **state) {
    (void)state;
    for (unsigned i = 0; i < 6; i++) {
        const int shifts = i >= 4;
        const struct kind *from = &kinds[0], *to = &kinds[shifts ? 0 : i % 2];
        twin_plane src = plane_of(from, planes[i / 2 % 2]);
        twin_plane row = plane_of(to, TN_PLANE_ROW), col = plane_of(to, TN_PLANE_COL);
        tn__requantize_work work = {.format = from->format, .from = src.emulated, .shifts = shifts};
        work.to = (tn__quantize_work){.src = {TN_FP32, NULL, ROWS, COLS},
                                      .format = to->format,
                                      .dtype = to->dtype,
                                      .has_row = !shifts || src.emulated.plane == TN_PLANE_COL,
                                      .has_col = !shifts || src.emulated.plane == TN_PLANE_ROW,
                                      .row = row.emulated,
                                      .col = col.emulated,
                                      .skip = &flag};
        EXPECT_OK(tn__op_table_cuda.requantize(emulation.device, &work, emulation.stream));
        emulation_wait("requantize");
        twin_plane_compare(&row, "requantize", shifts ? "shifted" : "with new scales");
        twin_plane_compare(&col, "requantize", shifts ? "shifted" : "with new scales");
        twin_plane_end(&row), twin_plane_end(&col), twin_plane_end(&src);
    }
    gpu_count_report("skipped, planes to planes");
}

static void updating_scales_writes_nothing(void **state) {
    (void)state;
    twin_matrix history = twin_matrix_fill(TN_FP32, 300, 5, GPU_FILL_NORMAL, 1);
    twin_matrix scale = twin_matrix_fill(TN_FP32, 1, 5, GPU_FILL_NORMAL, 2);
    tn__scale_update_work work = {.history = history.emulated.data,
                                  .scale = scale.emulated.data,
                                  .length = 300,
                                  .count = 5,
                                  .target = 448.0f,
                                  .skip = &flag};
    EXPECT_OK(tn__op_table_cuda.scale_update(emulation.device, &work, emulation.stream));
    emulation_wait("scale_update");
    twin_matrix_compare(&history, "scale_update", "history");
    twin_matrix_compare(&scale, "scale_update", "scale");
    twin_matrix_end(&history), twin_matrix_end(&scale);
    gpu_count_report("skipped, delayed scaling");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantizing_writes_nothing),
        cmocka_unit_test(dequantizing_writes_nothing),
        cmocka_unit_test(requantizing_writes_nothing),
        cmocka_unit_test(updating_scales_writes_nothing),
    };
    emulation_begin();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    emulation_end();
    return failures;
}
