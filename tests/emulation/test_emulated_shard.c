/* The kernels that cast a part of a weight against the host's definition, bit for bit, on the
 * emulated device: every operand ends where its memory ends, or guard bytes follow. */
#include <stdio.h>
#include <string.h>

#include "emulation_support.h"
#include "host_grouped.h"

static const tn_dtype floats[] = {TN_FP32, TN_BF16, TN_FP16};

typedef struct shard_case {
    int64_t rows, cols, first, count;
    int64_t data_offset; /* of the first byte from an address of 512 */
    unsigned way;
} shard_case;

static void describe(const shard_case *c, char *text, size_t bytes) {
    snprintf(text, bytes, "way %u, %lld x %lld, %lld from %lld on", c->way, (long long)c->rows,
             (long long)c->cols, (long long)c->count, (long long)c->first);
}

static tn__shard shard_of(const shard_case *c, const tn__matrix *src) {
    tn__shard shard = {*src, c->rows, c->cols, c->first, c->first + c->count};
    return shard;
}

static void check(const shard_case *c) {
    const unsigned way = c->way;
    const int64_t across = tn__units_of(c->cols, 128), tiles = tn__units_of(c->rows, 128) * across;
    const int64_t scales = tn__units_of(c->rows, 128) * 4 * tn__units_of(across, 4);
    const float skip = way % 17 == 9 ? 1.0f : 0.0f;
    char what[100];
    twin_matrix src =
        twin_matrix_fill(floats[way % 3], 1, c->count, (gpu_fill)(way % GPU_FILL_COUNT), way);
    twin amax = twin_make((size_t)tiles * sizeof(float), 0);
    twin data = twin_make((size_t)c->count, (size_t)c->data_offset);
    twin scale = twin_make((size_t)scales * sizeof(float), 0);
    twin flag = twin_make(sizeof skip, 0);
    memcpy(flag.host, &skip, sizeof skip), memcpy(flag.emulated, &skip, sizeof skip);
    describe(c, what, sizeof what);
    for (int is_emulated = 0; is_emulated < 2; is_emulated++) {
        tn__shard shard = shard_of(c, is_emulated ? &src.emulated : &src.host);
        tn__shard_amax_work take = {.shard = shard,
                                    .amax = (float *)(is_emulated ? amax.emulated : amax.host)};
        tn__shard_quantize_work cast = {
            .shard = shard,
            .amax = take.amax,
            .dtype = way / 3 % 2 ? TN_E5M2 : TN_E4M3,
            .scale_mode = way / 6 % 2 ? TN_SCALE_FP32 : TN_SCALE_POW2,
            .amax_epsilon = way % 5 == 2 ? 0.5f : 0.0f,
            .data = is_emulated ? data.emulated : data.host,
            .scale = way % 4 ? (float *)(is_emulated ? scale.emulated : scale.host) : NULL,
            .skip = way % 2 ? (const float *)(is_emulated ? flag.emulated : flag.host) : NULL};
        if (is_emulated) {
            EXPECT_OK(tn__op_table_cuda.shard_amax(emulation.device, &take, emulation.stream));
            EXPECT_OK(tn__op_table_cuda.shard_quantize(emulation.device, &cast, emulation.stream));
            continue;
        }
        tn__host_shard_amax(&take);
        tn__host_shard_quantize(&cast);
    }
    emulation_wait(what);
    twin_compare(&amax, "shard amax", what);
    twin_compare(&data, "shard quantize", what);
    twin_compare(&scale, "shard quantize, scales", what);
    twin_matrix_end(&src);
    twin_end(&amax), twin_end(&data), twin_end(&scale), twin_end(&flag);
}

/* Cuts at multiples of the pieces, and one element beside them. */
static void parts_equal_the_host(void **state) {
    static const int64_t shapes[][2] = {{130, 144}, {129, 129}, {5, 520}, {256, 128}, {300, 7}};
    (void)state;
    for (unsigned i = 0; i < 150; i++) {
        const int64_t *shape = shapes[i % 5], count = shape[0] * shape[1];
        shard_case c = {.rows = shape[0], .cols = shape[1], .way = i};
        c.first = count * (i / 5 % 4) / 4 / 16 * 16 + (i / 20 % 3 == 1);
        c.count = (count - c.first) / (1 + i / 3 % 3) - (i / 7 % 2);
        if (c.count < 0 || i % 31 == 30) c.count = 0;
        c.data_offset = i / 10 % 3 == 2 ? 3 : 0;
        check(&c);
    }
    gpu_count_report("casts of parts of a weight");
}

/* Every length from 0 on, from every place in a piece. */
static void every_short_part_equals_the_host(void **state) {
    (void)state;
    for (unsigned i = 0; i < 240; i++) {
        shard_case c = {.rows = 3, .cols = 40, .first = 30 + i % 16, .count = i / 8, .way = i % 3};
        check(&c);
    }
    gpu_count_report("short parts");
}

static int run_all(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_equal_the_host),
        cmocka_unit_test(every_short_part_equals_the_host),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void) { return emulation_run_in_orders(run_all); }
