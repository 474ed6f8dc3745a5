/* Sides, fills, tensors and the table of comparisons of the GPU tests. */
#include "gpu_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- sides --------------------------------------------------------------------------------- */

static void open_side(gpu_side *side, const char *name) {
    tn_pool_config pool_config = TN_POOL_CONFIG_INIT;
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    pool_config.name = name;
    EXPECT_OK(tn_pool_create(side->device, &pool_config, &side->pool));
    EXPECT_OK(tn_stream_create(side->device, &side->stream));
    scope_config.pool = side->pool;
    scope_config.name = name;
    EXPECT_OK(tn_scope_create(&scope_config, &side->scope));
}

void gpu_open(gpu_side *side) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device_info info = TN_DEVICE_INFO_INIT;
    config.driver = TN_DRIVER_CUDA;
    if (tn_device_create(&config, &side->device) != TN_OK) {
        printf("skipped: %s\n", tn_error_last());
        exit(77);
    }
    EXPECT_OK(tn_device_info_get(side->device, &info));
    if (info.simulated) {
        printf("skipped: the CUDA driver is the simulated one\n");
        exit(77);
    }
    printf("device: %s, compute capability %d.%d\n", info.name, info.compute_major,
           info.compute_minor);
    open_side(side, "gpu");
}

void gpu_open_host(gpu_side *side, size_t memory_bytes) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = TN_DRIVER_HOST;
    config.memory_limit_bytes = memory_bytes;
    EXPECT_OK(tn_device_create(&config, &side->device));
    open_side(side, "host");
}

void gpu_close(gpu_side *side) {
    EXPECT_OK(tn_scope_close(side->scope));
    EXPECT_OK(tn_stream_destroy(side->device, side->stream));
    EXPECT_OK(tn_pool_check(side->pool));
    EXPECT_OK(tn_pool_destroy(side->pool));
    EXPECT_OK(tn_device_destroy(side->device));
}

/* ---- numbers ------------------------------------------------------------------------------- */

uint64_t gpu_random(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

float gpu_normal(uint64_t *state) {
    double u = ((double)(gpu_random(state) >> 11) + 0.5) * 0x1p-53;
    double v = (double)(gpu_random(state) >> 11) * 0x1p-53;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

double gpu_fp8_value(tn_dtype dtype, unsigned char bits) {
    int mantissa_bits = dtype == TN_E4M3 ? 3 : 2;
    int bias = dtype == TN_E4M3 ? 7 : 15;
    int exponent = (bits & 0x7F) >> mantissa_bits;
    int mantissa = bits & ((1 << mantissa_bits) - 1);
    double sign = bits & 0x80 ? -1.0 : 1.0;
    if (dtype == TN_E4M3 && (bits & 0x7F) == 0x7F) return NAN;
    if (dtype == TN_E5M2 && exponent == 31) return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

static double fp16_value(uint16_t bits) {
    int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, -24);
    return sign * ldexp(1024 + mantissa, exponent - 25);
}

double gpu_value(tn_dtype dtype, const void *data, size_t index) {
    uint16_t half;
    float value;
    if (dtype == TN_FP32) return ((const float *)data)[index];
    memcpy(&half, (const char *)data + 2 * index, 2);
    if (dtype == TN_FP16) return fp16_value(half);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (isnan(value)) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static uint16_t to_fp16(float value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double magnitude = fabs((double)value);
    if (isnan(value)) return (uint16_t)(sign | 0x7E00);
    if (magnitude >= 65520.0) return (uint16_t)(sign | 0x7C00);
    if (magnitude < 0x1p-14) return (uint16_t)(sign | (uint16_t)rint(magnitude * 0x1p24));
    int exponent;
    double fraction = frexp(magnitude, &exponent); /* in [0.5, 1) */
    int mantissa = (int)rint(fraction * 2048.0) - 1024;
    return (uint16_t)(sign | (((exponent + 14) << 10) + mantissa));
}

void gpu_put(tn_dtype dtype, void *data, size_t index, float value) {
    if (dtype == TN_FP32) {
        ((float *)data)[index] = value;
        return;
    }
    ((uint16_t *)data)[index] = dtype == TN_BF16 ? to_bf16(value) : to_fp16(value);
}

const char *gpu_fill_name(gpu_fill fill) {
    static const char *const names[] = {"normal",   "zero",    "special",
                                        "denormal", "maximum", "range"};
    return names[fill];
}

/* An infinity or NaN of either sign, a zero of either sign, the largest number. */
static float special_value(tn_dtype dtype, uint64_t draw) {
    static const float largest[] = {3.4028234663852886e38f, 3.3895313892515355e38f, 65504.0f};
    float sign = draw & 1 ? -1.0f : 1.0f;
    switch (draw / 2 % 4) {
    case 0: return copysignf(NAN, sign);
    case 1: return sign * INFINITY;
    case 2: return sign * 0.0f;
    default: return sign * largest[dtype];
    }
}

static float denormal_value(tn_dtype dtype, uint64_t draw) {
    float sign = draw & 1 ? -1.0f : 1.0f;
    if (dtype == TN_FP16) return sign * (float)(draw / 2 % 1024) * 0x1p-24f;
    if (dtype == TN_BF16) return sign * (float)(draw / 2 % 128) * 0x1p-133f;
    return sign * (float)(draw / 2 % (1 << 23)) * 0x1p-149f;
}

static float fill_value(gpu_fill fill, tn_dtype dtype, uint64_t *state) {
    uint64_t draw = gpu_random(state);
    switch (fill) {
    case GPU_FILL_ZERO: return draw & 1 ? -0.0f : 0.0f;
    case GPU_FILL_SPECIAL: return draw % 97 ? gpu_normal(state) : special_value(dtype, draw / 97);
    case GPU_FILL_DENORMAL: return denormal_value(dtype, draw);
    case GPU_FILL_MAXIMUM: return special_value(dtype, (draw & 1) | 6);
    case GPU_FILL_RANGE: {
        int span = dtype == TN_FP16 ? 40 : 270, low = dtype == TN_FP16 ? -25 : -145;
        return ldexpf(gpu_normal(state), low + (int)(draw % (uint64_t)span));
    }
    default: return gpu_normal(state);
    }
}

void gpu_fill_values(gpu_fill fill, tn_dtype dtype, uint64_t seed, void *data, size_t count) {
    uint64_t state = seed;
    for (size_t i = 0; i < count; i++)
        gpu_put(dtype, data, i, fill_value(fill, dtype, &state));
}

/* ---- tensors ------------------------------------------------------------------------------- */

static tn_tensor make_tensor(gpu_side *side, tn_tensor_config *config, int64_t rows, int64_t cols) {
    tn_tensor tensor;
    config->rank = 2;
    config->shape[0] = rows;
    config->shape[1] = cols;
    EXPECT_OK(tn_tensor_create(side->scope, config, &tensor));
    return tensor;
}

tn_tensor gpu_plain(gpu_side *side, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    return make_tensor(side, &config, rows, cols);
}

tn_tensor gpu_fp8(gpu_side *side, tn_format format, tn_dtype dtype, tn_scale_mode mode,
                  int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = format;
    config.dtype = dtype;
    config.scale_mode = mode;
    return make_tensor(side, &config, rows, cols);
}

void gpu_destroy(gpu_side *side, tn_tensor tensor) {
    EXPECT_OK(tn_tensor_destroy(tensor, side->stream));
}

static tn_plane_layout layout_of(tn_tensor tensor, tn_plane plane) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &layout));
    return layout;
}

void gpu_upload(gpu_side *side, tn_tensor tensor, const void *data) {
    tn_plane_layout layout = layout_of(tensor, TN_PLANE_DATA);
    EXPECT_OK(
        tn_plane_write(tensor, TN_PLANE_DATA, data, layout.data_bytes, NULL, 0, side->stream));
    EXPECT_OK(tn_stream_synchronize(side->device, side->stream));
}

void gpu_poison(gpu_side *side, tn_tensor tensor, tn_plane plane) {
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_lease_begin(tensor, plane, TN_WRITE, side->stream, &lease, &view));
    if (view.layout.data_bytes > 0)
        EXPECT_OK(tn_fill(side->device, view.data, 0xFF, view.layout.data_bytes, side->stream));
    if (view.layout.scale_bytes > 0)
        EXPECT_OK(tn_fill(side->device, view.scale, 0xFF, view.layout.scale_bytes, side->stream));
    EXPECT_OK(tn_lease_end(lease));
}

gpu_copy gpu_download(gpu_side *side, tn_tensor tensor, tn_plane plane) {
    gpu_copy copy = {layout_of(tensor, plane), NULL, NULL};
    size_t scale_bytes = copy.layout.scale_bytes;
    copy.data = malloc(copy.layout.data_bytes + 1);
    if (scale_bytes > 0) copy.scale = malloc(scale_bytes);
    EXPECT_OK(tn_plane_read(tensor, plane, copy.data, copy.layout.data_bytes, copy.scale,
                            scale_bytes, side->stream));
    EXPECT_OK(tn_stream_synchronize(side->device, side->stream));
    return copy;
}

void gpu_copy_end(gpu_copy *copy) {
    free(copy->data);
    free(copy->scale);
}

/* Says the first difference; at most a few lines a run, so that a broken kernel stays readable. */
static int bytes_equal(const void *actual, const void *expected, size_t bytes, const char *what,
                       const char *part) {
    static int told;
    const unsigned char *x = actual, *y = expected;
    size_t at = 0;
    if (bytes == 0 || memcmp(x, y, bytes) == 0) return 1;
    while (x[at] == y[at])
        at++;
    if (told++ < 40)
        printf("  %s: %s differs at byte %zu of %zu: 0x%02X, expected 0x%02X\n", what, part, at,
               bytes, x[at], y[at]);
    return 0;
}

int gpu_copies_equal(const gpu_copy *actual, const gpu_copy *expected, const char *what) {
    const tn_plane_layout *layout = &expected->layout;
    int equal = actual->layout.data_bytes == layout->data_bytes &&
                actual->layout.scale_bytes == layout->scale_bytes;
    equal =
        equal && bytes_equal(actual->scale, expected->scale, layout->scale_bytes, what, "scale");
    return equal && bytes_equal(actual->data, expected->data, layout->data_bytes, what, "data");
}

/* ---- the table of what was compared ---------------------------------------------------------- */

enum { NAMES_MAX = 64 };
typedef struct tally {
    char name[64];
    long cases;
    long failures;
} tally;
static tally tallies[NAMES_MAX];
static int tally_count;

void gpu_count(const char *name, int passed) {
    int at = 0;
    while (at < tally_count && strcmp(tallies[at].name, name) != 0)
        at++;
    assert_true(at < NAMES_MAX);
    if (at == tally_count) {
        tally_count++;
        snprintf(tallies[at].name, sizeof tallies[at].name, "%s", name);
    }
    tallies[at].cases++;
    tallies[at].failures += !passed;
}

void gpu_count_report(const char *title) {
    long failures = 0;
    printf("\n%-40s %10s %10s\n", title, "cases", "failures");
    for (int i = 0; i < tally_count; i++) {
        printf("%-40s %10ld %10ld\n", tallies[i].name, tallies[i].cases, tallies[i].failures);
        failures += tallies[i].failures;
    }
    tally_count = 0;
    memset(tallies, 0, sizeof tallies);
    assert_int_equal(failures, 0);
}
