/* Descriptions of models from random bytes: each is read and fits, or is refused with words; what
 * fits is within every bound that later code relies on.
 *
 * Each description is made by the seed and its own number alone, so a failure is replayed by
 * TENURE_FUZZ_SEED=S TENURE_FUZZ_FIRST=N, which it prints. Run under ASan and UBSan by the asan
 * preset.
 */
#include "fuzz_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulate_model.h"

enum { DESCRIPTIONS = 20000, TEXT_BYTES = 4096 };

static uint32_t random_below(uint64_t *state, uint32_t bound) {
    return (uint32_t)fuzz_below(state, bound);
}

static const struct {
    const char *name;
    long long least, most;
    int is_optional;
} fields[] = {
#define FIELD(field, least, most, otherwise, meaning) {#field, least, most, (otherwise) >= 0},
    SIMULATE_FIELDS(FIELD)
#undef FIELD
};
enum { FIELD_COUNT = sizeof fields / sizeof fields[0] };

/* A value: mostly small, at times at or beyond a bound, at times none. */
static void random_value(uint64_t *state, int field, char *text, size_t bytes) {
    static const char *const odd[] = {"null", "true", "\"1\"", "[]", "{}", "1.5", "-1", "1e400"};
    const long long span = fields[field].most - fields[field].least + 1;
    switch (random_below(state, 40)) {
    case 0: snprintf(text, bytes, "%s", odd[random_below(state, 8)]); break;
    case 1: snprintf(text, bytes, "%lld", fields[field].most + (random_below(state, 3) - 1)); break;
    case 2:
        snprintf(text, bytes, "%lld", fields[field].least + (long long)random_below(state, 2));
        break;
    default:
        snprintf(text, bytes, "%lld",
                 fields[field].least + (long long)(1u << random_below(state, 4)) % span);
    }
}

/* Most fields, in any order; then a few bytes of it changed, at times. */
static size_t random_text(uint64_t *state, char *text) {
    size_t at = (size_t)snprintf(text, TEXT_BYTES, "{\"name\":\"n\",\"source\":\"s\"");
    const int first = (int)random_below(state, FIELD_COUNT);
    const uint32_t omitted = random_below(state, 12);
    for (int i = 0; i < FIELD_COUNT; i++) {
        char value[48];
        const int field = (first + i) % FIELD_COUNT;
        if (random_below(state, 40) == 0 ||
            (fields[field].is_optional && random_below(state, 12) < omitted))
            continue;
        random_value(state, field, value, sizeof value);
        at += (size_t)snprintf(text + at, TEXT_BYTES - at, ",\"%s\":%s", fields[field].name, value);
    }
    at += (size_t)snprintf(text + at, TEXT_BYTES - at, "}");
    for (uint32_t n = random_below(state, 4) ? 0 : random_below(state, 4); n > 0; n--)
        text[random_below(state, (uint32_t)at)] = (char)random_below(state, 256);
    return random_below(state, 16) ? at : random_below(state, (uint32_t)at + 1);
}

/* Every bound that a rank relies on. */
static void expect_sane(const simulate_model *model) {
    assert_true(simulate_model_ranks(model) >= 1 && simulate_model_ranks(model) <= 1 << 16);
    assert_int_equal(simulate_model_tokens(model) % model->tp, 0);
    assert_int_equal(model->heads % model->heads_kv, 0);
    assert_int_equal(model->heads_kv % model->tp, 0);
    assert_true(model->pp * model->vpp <= model->layers);
    if (model->experts) {
        assert_int_equal(model->experts % model->ep, 0);
        assert_int_equal(model->tp * model->dp % model->ep, 0);
        assert_true(model->experts_per_token <= model->experts);
    }
}

static void descriptions_fit_or_are_refused_with_words(void **state) {
    const uint64_t seed = fuzz_setting("TENURE_FUZZ_SEED", 20261130);
    const uint64_t first = fuzz_setting("TENURE_FUZZ_FIRST", 0);
    int read = 0, fitting = 0;
    (void)state;
    for (uint64_t n = first; n < first + DESCRIPTIONS; n++) {
        char *text = malloc(TEXT_BYTES), error[SIMULATE_ERROR_BYTES] = "";
        uint64_t random = seed * 1000003 + n;
        simulate_model model;
        assert_non_null(text);
        const size_t bytes = random_text(&random, text);
        char *exact = realloc(text, bytes ? bytes : 1); /* so that ASan sees a byte too far */
        const int is_read = simulate_model_parse(exact, bytes, "fuzz", &model, error);
        const int fits = is_read && simulate_model_check(&model, error);
        free(exact);
        if (!fits && !error[0])
            fail_msg("refused without words: TENURE_FUZZ_SEED=%llu TENURE_FUZZ_FIRST=%llu",
                     (unsigned long long)seed, (unsigned long long)n);
        if (fits) expect_sane(&model);
        read += is_read;
        fitting += fits;
    }
    printf("%d descriptions, %d read, %d fit\n", DESCRIPTIONS, read, fitting);
    assert_true(read > DESCRIPTIONS / 100 && fitting > DESCRIPTIONS / 1000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(descriptions_fit_or_are_refused_with_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
