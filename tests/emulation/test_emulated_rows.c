/* The kernels that pad groups and move rows against the host's definition, bit for bit, on the
 * emulated device. */
#include <stdio.h>
#include <string.h>

#include "emulation_support.h"
#include "host_grouped.h"
#include "tenure_grouped.h"

static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};

static twin input(const void *bytes, size_t count) {
    twin made = twin_make(count, 0);
    memcpy(made.host, bytes, count);
    memcpy(made.emulated, bytes, count);
    return made;
}

static twin no_error(void) {
    const uint32_t word = 0;
    return input(&word, sizeof word);
}

/* ---- pad ------------------------------------------------------------------------------------ */

enum { GROUPS_MAX = 300, ROWS_MAX = 3000 };

typedef struct pad_case {
    int64_t offsets[GROUPS_MAX + 1];
    int64_t groups, rows, multiple, room;
    int has_permutation, has_inverse;
} pad_case;

typedef struct pad_operands {
    twin offsets, permutation, padded, map, inverse, error, scratch;
} pad_operands;

static tn__pad_groups_work pad_work(const pad_case *c, const pad_operands *of, int is_emulated) {
#define SIDE(of) ((void *)(is_emulated ? (of).emulated : (of).host))
    tn__pad_groups_work work = {.groups = {SIDE(of->offsets), c->groups, SIDE(of->error)},
                                .rows = c->rows,
                                .multiple = c->multiple,
                                .padded_offsets = SIDE(of->padded),
                                .map = SIDE(of->map),
                                .padded_rows = c->room,
                                .scratch = of->scratch.emulated};
    if (c->has_permutation) work.permutation = SIDE(of->permutation);
    if (c->has_inverse) work.inverse = SIDE(of->inverse);
    return work;
}

static void check_pad(const pad_case *c, const char *name) {
    const size_t each = sizeof(int64_t);
    static int64_t permutation[ROWS_MAX];
    char what[120];
    for (int64_t r = 0; r < c->rows; r++)
        permutation[r] = (r * 17 + 3) % 1009;
    pad_operands of = {.offsets = input(c->offsets, (size_t)(c->groups + 1) * each),
                       .permutation = input(permutation, (size_t)c->rows * each),
                       .padded = twin_make((size_t)(c->groups + 1) * each, 0),
                       .map = twin_make((size_t)c->room * each, 0),
                       .inverse = twin_make((size_t)c->rows * each, 0),
                       .error = no_error(),
                       .scratch = twin_make(tn__op_table_cuda.list_scratch_bytes(0), 0)};
    tn__pad_groups_work on_host = pad_work(c, &of, 0), emulated = pad_work(c, &of, 1);
    snprintf(what, sizeof what, "%lld groups, %lld rows to %lld, multiple %lld",
             (long long)c->groups, (long long)c->rows, (long long)c->room, (long long)c->multiple);
    tn__host_pad_groups(&on_host);
    EXPECT_OK(tn__op_table_cuda.pad_groups(emulation.device, &emulated, emulation.stream));
    emulation_wait(what);
    twin_compare(&of.padded, name, what);
    twin_compare(&of.map, name, what);
    twin_compare(&of.inverse, name, what);
    twin_compare(&of.error, name, what);
    twin_end(&of.offsets), twin_end(&of.permutation), twin_end(&of.padded);
    twin_end(&of.map), twin_end(&of.inverse), twin_end(&of.error), twin_end(&of.scratch);
}

static void padding_equals_the_host(void **state) {
    static const int64_t multiples[] = {1, 16, 128, 100};
    static pad_case c;
    (void)state;
    for (int i = 0; i < 24; i++) {
        c.groups = i % 3 == 0 ? GROUPS_MAX : i % 3 == 1 ? 6 : i / 12;
        for (int64_t g = 0; g < c.groups; g++)
            c.offsets[g + 1] = c.offsets[g] + (g * 7 + i) % 5 * (c.groups > 10 ? 1 : 33);
        c.rows = c.offsets[c.groups] + i % 4;
        c.multiple = multiples[i / 3 % 4];
        c.has_permutation = i % 2;
        c.has_inverse = i % 5 != 0;
        c.room = c.rows + (c.multiple - 1) * tn__least(c.groups, c.rows);
        check_pad(&c, "pad groups");
        c.room = c.rows / 2;
        check_pad(&c, "pad groups, little room");
        if (c.groups > 2) {
            c.offsets[2] = -1;
            check_pad(&c, "pad groups, wrong offsets");
        }
    }
    gpu_count_report("pad groups");
}

/* ---- gather --------------------------------------------------------------------------------- */

enum { SOURCE = 40, RESULT_MAX = 300 };

static void fill_map(int64_t *map, int64_t count, int is_bad) {
    for (int64_t i = 0; i < count; i++)
        map[i] = i % 11 == 4 ? -1 - i : (i * 13 + 5) % SOURCE;
    if (is_bad && count > 1) map[count / 2] = SOURCE, map[count - 1] = INT64_MAX;
}

typedef struct gather_case {
    int64_t rows, row_bytes, scale_rows, src_stride;
    int is_bad;
    unsigned char nothing;
} gather_case;

static void check_gather(const gather_case *c, const char *name) {
    static unsigned char bytes[SOURCE * 8192];
    static float scales[64 * (SOURCE + 4)];
    int64_t map[RESULT_MAX], stride = (c->rows + 3) / 4 * 4;
    char what[100];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 31 + i / 997);
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++)
        scales[i] = (float)i + 0.5f;
    fill_map(map, c->rows, c->is_bad);
    twin src = input(bytes, (size_t)(SOURCE * c->row_bytes));
    twin src_scale = input(scales, (size_t)(c->scale_rows * c->src_stride) * sizeof(float));
    twin on_map = input(map, (size_t)c->rows * sizeof *map), error = no_error();
    twin dst = twin_make((size_t)(c->rows * c->row_bytes), 0);
    twin dst_scale = twin_make((size_t)(c->scale_rows * stride) * sizeof(float), 0);
    for (int is_emulated = 0; is_emulated < 2; is_emulated++) {
        tn__gather_rows_work work = {.src = SIDE(src),
                                     .dst = SIDE(dst),
                                     .src_rows = SOURCE,
                                     .dst_rows = c->rows,
                                     .row_bytes = c->row_bytes,
                                     .map = SIDE(on_map),
                                     .error = SIDE(error),
                                     .nothing = c->nothing,
                                     .src_scale = c->scale_rows ? SIDE(src_scale) : NULL,
                                     .dst_scale = c->scale_rows ? SIDE(dst_scale) : NULL,
                                     .scale_rows = c->scale_rows,
                                     .src_scale_stride = c->src_stride,
                                     .dst_scale_stride = stride};
        if (!is_emulated) tn__host_gather_rows(&work);
        if (is_emulated)
            EXPECT_OK(tn__op_table_cuda.gather_rows(emulation.device, &work, emulation.stream));
    }
    snprintf(what, sizeof what, "%lld rows of %lld bytes, %lld scale rows", (long long)c->rows,
             (long long)c->row_bytes, (long long)c->scale_rows);
    emulation_wait(what);
    twin_compare(&dst, name, what);
    twin_compare(&dst_scale, name, what);
    twin_compare(&error, name, what);
    twin_end(&src), twin_end(&src_scale), twin_end(&on_map), twin_end(&error);
    twin_end(&dst), twin_end(&dst_scale);
}

static void gathering_equals_the_host(void **state) {
    static const int64_t bytes[] = {1, 3, 4, 8, 16, 48, 100, 130, 4096, 4112, 8192};
    static const int64_t rows[] = {1, 7, 128, 129, RESULT_MAX};
    (void)state;
    for (size_t b = 0; b < sizeof bytes / sizeof *bytes; b++) {
        for (size_t r = 0; r < 5; r++) {
            gather_case c = {.rows = rows[r], .row_bytes = bytes[b], .src_stride = SOURCE + 4};
            c.nothing = r % 2 ? 0 : 255;
            check_gather(&c, "gather plain rows");
            c.is_bad = 1;
            check_gather(&c, "gather plain rows, bad map");
            c.scale_rows = (bytes[b] + 127) / 128;
            c.nothing = 0;
            check_gather(&c, "gather 1D rows");
        }
    }
    gpu_count_report("gather rows");
}

/* ---- combine -------------------------------------------------------------------------------- */

static void check_combine(unsigned way, int64_t rows, int64_t cols, int64_t each) {
    int64_t map[RESULT_MAX * 8];
    float weight[RESULT_MAX * 8];
    char what[100];
    fill_map(map, rows * each, way % 7 == 3);
    for (int64_t i = 0; i < rows * each; i++)
        weight[i] = i % 19 == 3 ? -0.0f : 1.0f / (float)(3 + i % 17);
    twin_matrix src =
        twin_matrix_fill(floats[way % 3], SOURCE, cols, (gpu_fill)(way % GPU_FILL_COUNT), way);
    twin_matrix dst = twin_matrix_make(floats[way / 3 % 3], rows, cols);
    twin on_map = input(map, (size_t)(rows * each) * sizeof *map), error = no_error();
    twin weights = input(weight, (size_t)(rows * each) * sizeof *weight);
    for (int is_emulated = 0; is_emulated < 2; is_emulated++) {
        tn__combine_rows_work work = {.src = is_emulated ? src.emulated : src.host,
                                      .dst = is_emulated ? dst.emulated : dst.host,
                                      .map = SIDE(on_map),
                                      .weights = way % 4 ? SIDE(weights) : NULL,
                                      .each = each,
                                      .error = SIDE(error)};
        if (!is_emulated) tn__host_combine_rows(&work);
        if (is_emulated)
            EXPECT_OK(tn__op_table_cuda.combine_rows(emulation.device, &work, emulation.stream));
    }
    snprintf(what, sizeof what, "way %u, %lld x %lld, %lld each", way, (long long)rows,
             (long long)cols, (long long)each);
    emulation_wait(what);
    twin_matrix_compare(&dst, "combine rows", what);
    twin_compare(&error, "combine rows", what);
    twin_matrix_end(&src), twin_matrix_end(&dst);
    twin_end(&on_map), twin_end(&error), twin_end(&weights);
}

static void combining_equals_the_host(void **state) {
    static const int64_t cols[] = {1, 8, 24, 129, 2056};
    static const int64_t each[] = {1, 2, 8, 0};
    (void)state;
    for (unsigned way = 0; way < 90; way++)
        check_combine(way, 1 + way % 9 * 3, cols[way / 9 % 5], each[way % 4]);
    gpu_count_report("combine rows");
}

static int run_all(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(padding_equals_the_host),
        cmocka_unit_test(gathering_equals_the_host),
        cmocka_unit_test(combining_equals_the_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void) { return emulation_run_in_orders(run_all); }
