/* Stochastic rounding on the host device: the generator against its published vectors, the mean of
 * a rounding against the value, casts against a reference of its own, and the generator's state. */
#include "ops_formats_support.h"

#include <math.h>
#include <string.h>

#include "host_number.h"

enum { DRAWS = 1 << 16, ROWS = 37, COLS = 141 };

static const struct casting {
    tn_format format;
    tn_dtype dtype;
} castings[] = {
    {TN_FORMAT_NVFP4, TN_E2M1},        {TN_FORMAT_MXFP8, TN_E4M3},
    {TN_FORMAT_MXFP8, TN_E5M2},        {TN_FORMAT_FP8_TENSOR, TN_E4M3},
    {TN_FORMAT_FP8_TENSOR, TN_E5M2},   {TN_FORMAT_FP8_BLOCK_1D, TN_E4M3},
    {TN_FORMAT_FP8_BLOCK_1D, TN_E5M2}, {TN_FORMAT_FP8_BLOCK_2D, TN_E4M3},
    {TN_FORMAT_FP8_BLOCK_2D, TN_E5M2},
};
enum { CASTINGS = sizeof castings / sizeof *castings };

/* ---- the generator -------------------------------------------------------------------------- */

/* Known answers of Random123's philox4x32 with 10 rounds (its file kat_vectors). */
static void the_generator_gives_its_published_vectors(void **state) {
    static const struct {
        uint32_t counter[4];
        uint64_t key;
        uint32_t expected[4];
    } vectors[] = {
        {{0, 0, 0, 0}, 0, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
        {{0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF},
         0xFFFFFFFFFFFFFFFF,
         {0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
        {{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344},
         0x299F31D0A4093822,
         {0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        uint32_t words[4];
        memcpy(words, vectors[i].counter, sizeof words);
        tn__philox(words, vectors[i].key);
        assert_memory_equal(words, vectors[i].expected, sizeof words);
        const uint32_t *c = vectors[i].counter;
        tn__random random = {vectors[i].key, (uint64_t)c[3] << 32 | c[2]};
        tn__random_words(random, (uint64_t)c[1] << 32 | c[0], words);
        assert_memory_equal(words, vectors[i].expected, sizeof words);
        assert_int_equal(tn__random_number(words, 0), vectors[i].expected[0] & 0xFFFF);
        assert_int_equal(tn__random_number(words, 7), vectors[i].expected[3] >> 16);
    }
}

/* ---- one rounding --------------------------------------------------------------------------- */

static const struct {
    tn_dtype dtype;
    unsigned most; /* the largest code */
} types[] = {{TN_E2M1, 7}, {TN_E4M3, 0x7E}, {TN_E5M2, 0x7B}};

static tn__small_float type_at(int t) {
    return t == 0 ? tn__type_e2m1() : t == 1 ? tn__type_e4m3() : tn__type_e5m2();
}

/* How many of all numbers round a value up, away from `low`; the others give low. */
static int ups_of(int t, float value, unsigned low) {
    const tn__small_float type = type_at(t);
    int ups = 0;
    for (uint32_t random = 0; random < DRAWS; random++) {
        uint32_t code = tn__round_stochastically(type, value, random);
        if (code == low) continue;
        if (code != low + 1) fail_msg("%a gives 0x%X, between 0x%X and the next", value, code, low);
        ups++;
    }
    return ups;
}

/* The sum over all numbers is 2^16 times the value, exactly: low + j / 2^16 of the gap goes up j
 * times. */
static void the_mean_of_all_draws_is_the_value_in_every_gap(void **state) {
    static const int parts[] = {0, 1, 21845, 32768, 65535};
    (void)state;
    for (int t = 0; t < 3; t++) {
        for (unsigned low = 0; low < types[t].most; low++) {
            double from = format_code_value(types[t].dtype, low);
            double gap = format_code_value(types[t].dtype, low + 1) - from;
            for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
                float value = (float)(from + gap * parts[i] / DRAWS);
                assert_int_equal(ups_of(t, value, low), parts[i]);
            }
        }
    }
}

/* Between two multiples of 2^-16 of the gap it is the nearer one that counts. */
static void what_draws_can_not_tell_apart_goes_to_the_nearer(void **state) {
    (void)state;
    for (int t = 0; t < 3; t++) {
        for (unsigned low = 0; low < types[t].most; low += types[t].most - 1) {
            double from = format_code_value(types[t].dtype, low);
            double gap = format_code_value(types[t].dtype, low + 1) - from;
            float middle = (float)(from + gap * (2 * 1234 + 1) / (2 * DRAWS));
            assert_int_equal(ups_of(t, nextafterf(middle, 0.0f), low), 1234);
            assert_int_equal(ups_of(t, middle, low), 1235);
        }
        assert_int_equal(ups_of(t, 0x1p-149f, 0), 0);
    }
}

static void expect_code(int t, float value, unsigned expected) {
    for (uint32_t random = 0; random < DRAWS; random += 4369)
        assert_int_equal(tn__round_stochastically(type_at(t), value, random), expected);
}

static void what_needs_no_rounding_is_the_same_for_every_draw(void **state) {
    (void)state;
    for (int t = 0; t < 3; t++) {
        const unsigned sign = t == 0 ? 0x8 : 0x80, most = types[t].most;
        const float largest = (float)format_code_value(types[t].dtype, most);
        for (unsigned code = 0; code <= most; code++) {
            expect_code(t, (float)format_code_value(types[t].dtype, code), code);
            expect_code(t, -(float)format_code_value(types[t].dtype, code), code | sign);
        }
        expect_code(t, nextafterf(largest, INFINITY), most);
        expect_code(t, -INFINITY, most | sign);
        expect_code(t, NAN, t == 0 ? 7 : 0x7F);
        expect_code(t, -NAN, t == 0 ? 7 : 0x7F);
    }
}

/* ---- casts ---------------------------------------------------------------------------------- */

/* Philox once more, in numbers of 64 bits, as tenure_ops.h says an element's number comes about. */
static unsigned number_of(const uint64_t seed_and_offset[2], int64_t m, int64_t k, int64_t cols) {
    uint64_t group = (uint64_t)(m * ((cols + 7) / 8) + k / 8), offset = seed_and_offset[1];
    uint64_t a = group % 0x100000000, b = group >> 32, c = offset % 0x100000000, d = offset >> 32;
    uint64_t low = seed_and_offset[0] % 0x100000000, high = seed_and_offset[0] >> 32;
    for (int round = 0; round < 10; round++) {
        uint64_t p = 0xD2511F53 * a, q = 0xCD9E8D57 * c;
        a = (q >> 32) ^ b ^ low, b = q % 0x100000000;
        c = (p >> 32) ^ d ^ high, d = p % 0x100000000;
        low = (low + 0x9E3779B9) % 0x100000000, high = (high + 0xBB67AE85) % 0x100000000;
    }
    const uint64_t words[4] = {a, b, c, d};
    return (unsigned)(words[k % 8 / 2] >> (k % 2 * 16)) & 0xFFFF;
}

/* The neighbour that the number chooses, by comparing with all values of the type. */
static unsigned reference_code(tn_dtype dtype, double value, unsigned number) {
    const unsigned most = dtype == TN_E2M1 ? 7 : dtype == TN_E4M3 ? 0x7E : 0x7B;
    const unsigned sign = signbit(value) ? (most == 7 ? 0x8 : 0x80) : 0;
    const double magnitude = fabs(value);
    unsigned low = most;
    if (magnitude >= format_code_value(dtype, most)) return most | sign;
    while (format_code_value(dtype, low) > magnitude)
        low--;
    double from = format_code_value(dtype, low), gap = format_code_value(dtype, low + 1) - from;
    double x = (magnitude - from) / gap;
    return (low + (x * DRAWS + number + 0.5 >= DRAWS)) | sign;
}

/* What elements are multiplied with, from the scales that are stored, which are powers of two but
 * for those of NVFP4. */
static float factor_at(const test_plane *plane, int64_t m, int64_t k) {
    float scale = (float)format_plane_scale(plane, m, k);
    if (plane->format == TN_FORMAT_NVFP4) scale *= *plane->view.global_scale;
    return scale == 0.0f ? 0x1.FFFFFEp127f : 1.0f / scale;
}

static void expect_stochastic(const test_plane *plane, const tn__matrix *src,
                              const uint64_t random[2]) {
    for (int64_t m = 0; m < src->rows; m++) {
        for (int64_t k = 0; k < src->cols; k++) {
            float scaled = test_matrix_get(src, m, k) * factor_at(plane, m, k);
            unsigned number = number_of(random, m, k, src->cols);
            unsigned expected = reference_code(plane->view.dtype, (double)scaled, number);
            if (format_plane_code(plane, m, k) != expected)
                fail_msg("%s %s (%ld, %ld): code 0x%X of %a, number %u, expected 0x%X",
                         tn_format_name(plane->format), tn_plane_name(plane->view.plane), (long)m,
                         (long)k, format_plane_code(plane, m, k), (double)scaled, number, expected);
        }
    }
    format_plane_expect_zero_padding(plane);
}

/* ---- the op --------------------------------------------------------------------------------- */

typedef struct stochastic {
    test_ops ops;
    tn__matrix values;
    tn_quantize_args args;
} stochastic;

static const uint64_t begin[2] = {0xFEDCBA9876543210, 0xFFFFFFFF};

static stochastic open_stochastic(const struct casting *to) {
    stochastic s = {.ops = test_ops_open_host(), .args = TN_QUANTIZE_ARGS_INIT};
    s.values = test_matrix_make(TN_BF16, ROWS, COLS, 7);
    s.args.src = test_tensor_of(&s.ops, s.ops.scope, &s.values);
    s.args.dst = test_fp8(s.ops.scope, to->format, to->dtype, ROWS, COLS);
    s.args.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
    s.args.random = test_plain(s.ops.scope, TN_BYTE, 1, sizeof begin);
    test_write(&s.ops, s.args.random, begin);
    return s;
}

static void close_stochastic(stochastic *s) {
    test_matrix_free(&s->values);
    test_ops_close_host(&s->ops);
}

static test_plane fetch(const stochastic *s, tn_plane plane) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(s->args.dst, &info));
    test_plane made = format_plane_make(info.format, plane, info.dtype, info.rows, info.cols);
    EXPECT_OK(tn_plane_read(s->args.dst, plane, made.view.data, made.view.layout.data_bytes,
                            made.view.scale, made.view.layout.scale_bytes, s->ops.stream));
    test_ops_wait(&s->ops);
    return made;
}

static void expect_planes(const stochastic *s, const uint64_t random[2]) {
    for (int p = 0; p < 2; p++) {
        test_plane plane = fetch(s, p ? TN_PLANE_COL : TN_PLANE_ROW);
        expect_stochastic(&plane, &s->values, random);
        format_plane_free(&plane);
    }
}

static void expect_state(const stochastic *s, uint64_t seed, uint64_t offset) {
    uint64_t random[2];
    test_read(&s->ops, s->args.random, random);
    assert_true(random[0] == seed);
    assert_true(random[1] == offset);
}

/* Each call draws what belongs to the offset that it finds, which it adds 1 to; both planes draw
 * the same. */
static void casts_draw_by_element_seed_and_offset(void **state) {
    (void)state;
    for (int c = 0; c < CASTINGS; c++) {
        stochastic s = open_stochastic(&castings[c]);
        for (uint64_t call = 0; call < 3; call++) {
            const uint64_t random[2] = {begin[0], begin[1] + call};
            EXPECT_OK(tn_quantize(&s.args, s.ops.stream));
            expect_planes(&s, random);
            expect_state(&s, random[0], random[1] + 1);
        }
        close_stochastic(&s);
    }
}

static void a_plane_alone_has_the_same_bits(void **state) {
    (void)state;
    for (int c = 0; c < CASTINGS; c++) {
        for (int p = 0; p < 2; p++) {
            stochastic s = open_stochastic(&castings[c]);
            s.args.planes = p ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW;
            EXPECT_OK(tn_quantize(&s.args, s.ops.stream));
            test_plane plane = fetch(&s, p ? TN_PLANE_COL : TN_PLANE_ROW);
            expect_stochastic(&plane, &s.values, begin);
            format_plane_free(&plane);
            close_stochastic(&s);
        }
    }
}

static void a_skipped_or_an_empty_cast_draws_nothing(void **state) {
    static const float flag = 1.0f;
    (void)state;
    stochastic s = open_stochastic(&castings[0]);
    EXPECT_OK(tn_quantize(&s.args, s.ops.stream));
    s.args.skip = test_plain(s.ops.scope, TN_FP32, 1, 1);
    test_write(&s.ops, s.args.skip, &flag);
    EXPECT_OK(tn_quantize(&s.args, s.ops.stream));
    expect_planes(&s, begin);
    expect_state(&s, begin[0], begin[1] + 1);
    s.args.skip.value = 0;
    s.args.src = test_plain(s.ops.scope, TN_FP32, 0, COLS);
    test_declare_valid(&s.ops, s.args.src, TN_PLANE_DATA);
    s.args.dst = test_fp8(s.ops.scope, TN_FORMAT_NVFP4, TN_E2M1, 0, COLS);
    EXPECT_OK(tn_quantize(&s.args, s.ops.stream));
    expect_state(&s, begin[0], begin[1] + 1);
    close_stochastic(&s);
}

/* ---- bad input ------------------------------------------------------------------------------ */

static void expect_refused(stochastic *s, tn_tensor random, tn_status status, const char *words) {
    s->args.random = random;
    EXPECT_STATUS(tn_quantize(&s->args, s->ops.stream), status);
    EXPECT_ERROR_HAS(words);
    expect_planes(s, begin);
}

static void a_state_of_another_kind_is_refused_by_name(void **state) {
    (void)state;
    stochastic s = open_stochastic(&castings[0]);
    test_ops other = test_ops_open_host();
    EXPECT_OK(tn_quantize(&s.args, s.ops.stream));
    expect_refused(&s, test_plain(s.ops.scope, TN_BYTE, 1, 16), TN_INVALID_STATE,
                   "plane DATA is ABSENT: UPDATE needs a valid plane");
    expect_refused(&s, test_plain(s.ops.scope, TN_BYTE, 1, 8), TN_INVALID_ARGUMENT,
                   "has 8 bytes, expected 16: seed and offset");
    expect_refused(&s, test_plain(s.ops.scope, TN_FP32, 1, 4), TN_INVALID_ARGUMENT,
                   "random (tensor ");
    expect_refused(&s, s.args.dst, TN_INVALID_ARGUMENT, "expected plain");
    expect_refused(&s, test_plain(other.scope, TN_BYTE, 1, 16), TN_INVALID_ARGUMENT,
                   "another device");
    test_ops_close_host(&other);
    close_stochastic(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_generator_gives_its_published_vectors),
        cmocka_unit_test(the_mean_of_all_draws_is_the_value_in_every_gap),
        cmocka_unit_test(what_draws_can_not_tell_apart_goes_to_the_nearer),
        cmocka_unit_test(what_needs_no_rounding_is_the_same_for_every_draw),
        cmocka_unit_test(casts_draw_by_element_seed_and_offset),
        cmocka_unit_test(a_plane_alone_has_the_same_bits),
        cmocka_unit_test(a_skipped_or_an_empty_cast_draws_nothing),
        cmocka_unit_test(a_state_of_another_kind_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
