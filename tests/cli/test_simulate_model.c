/* Descriptions of models: what is read, and by which words what is wrong is refused. */
#include "test_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulate_model.h"

static const char base[] =
    "\"name\": \"a\", \"source\": \"b\", \"hidden\": 64, \"layers\": 4, \"heads\": 4, "
    "\"heads_kv\": 2, \"head_dim\": 16, \"ffn\": 128, \"vocabulary\": 256, \"context\": 32";

static int parse(const char *text, simulate_model *model, char *error) {
    return simulate_model_parse(text, strlen(text), "test.json", model, error);
}

/* The base with more fields behind it. */
static int parse_with(const char *more, simulate_model *model, char *error) {
    char text[2048];
    snprintf(text, sizeof text, "{%s%s}", base, more);
    return parse(text, model, error);
}

static void fields_that_are_not_given_have_their_defaults(void **state) {
    char error[SIMULATE_ERROR_BYTES];
    simulate_model model;
    (void)state;
    assert_true(parse_with(", \"dp\": 3", &model, error));
    assert_true(simulate_model_check(&model, error));
    assert_int_equal(model.hidden, 64);
    assert_int_equal(model.dp, 3);
    assert_int_equal(model.tp, 1);
    assert_int_equal(model.fp8, 1);
    assert_int_equal(model.ranks_per_node, 8);
    assert_int_equal(simulate_model_ranks(&model), 3);
    assert_string_equal(model.name, "a");
}

static void expect_text_refused(const char *text, const char *words) {
    char error[SIMULATE_ERROR_BYTES] = "";
    simulate_model model;
    assert_false(parse(text, &model, error));
    if (!strstr(error, words)) fail_msg("%s gave \"%s\", not \"%s\"", text, error, words);
}

static void what_is_no_description_is_refused(void **state) {
    static const char *const texts[] = {"", "{", "[1]", "7", "null", "{}x", "{\"name\": \"a\"} {}"};
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        expect_text_refused(texts[i], i == 2 || i == 3 || i == 4 ? "it is no JSON object"
                                                                 : "it is no JSON object");
    expect_text_refused("{}", "name and source are needed");
    expect_text_refused("{\"name\": 3}", "name is no text of 1 to 63 bytes");
    expect_text_refused("{\"name\": \"\"}", "name is no text");
    expect_text_refused("{\"name\": \"a\\nb\"}", "name has a control character");
    expect_text_refused("{\"name\": \"a\", \"source\": \"b\"}", "hidden is missing");
}

typedef struct refusal {
    const char *more, *words;
} refusal;

static void wrong_fields_are_refused_by_name(void **state) {
    static const refusal cases[] = {
        {", \"size\": 3", "there is no field size"},
        {", \"tp\": \"2\"", "tp is no whole number from 1 to 1024"},
        {", \"tp\": 1.5", "tp is no whole number from 1 to 1024"},
        {", \"tp\": 0", "tp is no whole number from 1 to 1024"},
        {", \"tp\": 1e300", "tp is no whole number from 1 to 1024"},
        {", \"tp\": null", "tp is no whole number from 1 to 1024"},
        {", \"recompute\": true", "recompute is no whole number from 0 to 1"},
        {", \"hidden\": 64", "hidden is there twice"},
        {", \"remarks\": 7", "remarks is no text"},
    };
    char error[SIMULATE_ERROR_BYTES];
    simulate_model model;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_false(parse_with(cases[i].more, &model, error));
        if (!strstr(error, cases[i].words))
            fail_msg("%s gave \"%s\", not \"%s\"", cases[i].more, error, cases[i].words);
    }
}

static void combinations_that_do_not_fit_are_refused(void **state) {
    static const refusal cases[] = {
        {", \"tp\": 4", "heads_kv is 2, no multiple of tp, which is 4"},
        {", \"pp\": 5", "pp x vpp is 5, more than layers, which is 4"},
        {", \"vpp\": 2", "vpp is 2, and with one stage (pp 1) it is 1"},
        {", \"pp\": 2, \"vpp\": 2, \"microbatches\": 3",
         "microbatches is 3, no multiple of pp, which is 2"},
        {", \"ep\": 2", "experts is 0, and then"},
        {", \"dense_layers\": 1", "experts is 0, and then"},
        {", \"experts\": 4, \"expert_ffn\": 32", "experts_per_token is 0: it is 1 to experts"},
        {", \"experts\": 4, \"experts_per_token\": 2", "expert_ffn is 0, and there are experts"},
        {", \"experts\": 4, \"experts_per_token\": 2, \"expert_ffn\": 32, \"ep\": 3",
         "experts is 4, no multiple of ep, which is 3"},
        {", \"experts\": 4, \"experts_per_token\": 2, \"expert_ffn\": 32, \"ep\": 2",
         "tp x dp is 1, no multiple of ep, which is 2"},
        {", \"experts\": 4, \"experts_per_token\": 2, \"expert_ffn\": 32, \"dense_layers\": 5",
         "dense_layers is 5, more than layers"},
        {", \"query_rank\": 16", "query_rank and kv_rank are both 0 or both are not"},
        {", \"query_rank\": 16, \"kv_rank\": 16", "with a kv_rank it is heads"},
        {", \"frozen_layers\": 5", "frozen_layers is 5, more than layers"},
        {", \"microbatch\": 4096, \"dp\": 1024, \"pp\": 4, \"tp\": 2, \"ranks_per_node\": 1", ""},
        {", \"dp\": 1024, \"pp\": 4, \"tp\": 2, \"microbatch\": 2", ""},
    };
    char error[SIMULATE_ERROR_BYTES];
    simulate_model model;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_true(parse_with(cases[i].more, &model, error));
        const int fits = simulate_model_check(&model, error);
        if (fits != !cases[i].words[0]) fail_msg("%s: %s", cases[i].more, fits ? "fits" : error);
        if (!fits && !strstr(error, cases[i].words))
            fail_msg("%s gave \"%s\", not \"%s\"", cases[i].more, error, cases[i].words);
    }
}

static void limits_of_size_are_refused(void **state) {
    char error[SIMULATE_ERROR_BYTES];
    simulate_model model;
    (void)state;
    assert_true(parse_with("", &model, error));
    assert_true(simulate_model_set(&model, "context", 1 << 24, error));
    assert_true(simulate_model_set(&model, "microbatch", 8, error));
    assert_false(simulate_model_check(&model, error));
    assert_non_null(strstr(error, "context x microbatch is 134217728, more than 67108864"));
    assert_false(simulate_model_set(&model, "head_dim", 256, error));
    assert_non_null(strstr(error, "head_dim: expected a number from 8 to 128"));
    assert_false(simulate_model_set(&model, "name", 1, error));
    assert_true(simulate_model_set(&model, "head_dim", 12, error));
    assert_false(simulate_model_check(&model, error));
    assert_non_null(strstr(error, "head_dim is 12, no multiple of 8"));
}

/* What comes with the project is what its papers say. */
static void shipped_models_are_read_and_fit(void **state) {
    static const struct {
        const char *file;
        int64_t hidden, layers, ffn, vocabulary, ranks;
    } rows[] = {{"llama3-8b", 4096, 32, 14336, 128256, 64},
                {"llama3-70b", 8192, 80, 28672, 128256, 256},
                {"deepseek-v3", 7168, 61, 18432, 129280, 256},
                {"tiny", 128, 2, 256, 256, 1}};
    char error[SIMULATE_ERROR_BYTES], path[1024];
    simulate_model model;
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(path, sizeof path, "%s/bench/models/%s.json", TENURE_SOURCE_DIR, rows[i].file);
        if (!simulate_model_read(path, &model, error)) fail_msg("%s", error);
        if (!simulate_model_check(&model, error)) fail_msg("%s: %s", path, error);
        assert_int_equal(model.hidden, rows[i].hidden);
        assert_int_equal(model.layers, rows[i].layers);
        assert_int_equal(model.ffn, rows[i].ffn);
        assert_int_equal(model.vocabulary, rows[i].vocabulary);
        assert_int_equal(simulate_model_ranks(&model), rows[i].ranks);
    }
    assert_int_equal(model.tp, 1);
    snprintf(path, sizeof path, "%s/bench/models/deepseek-v3.json", TENURE_SOURCE_DIR);
    assert_true(simulate_model_read(path, &model, error));
    assert_int_equal(model.tp, 16);
    assert_int_equal(model.pp, 8);
    assert_int_equal(model.vpp, 4);
    assert_int_equal(model.ep, 32);
    assert_int_equal(model.context, 65536);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields_that_are_not_given_have_their_defaults),
        cmocka_unit_test(what_is_no_description_is_refused),
        cmocka_unit_test(wrong_fields_are_refused_by_name),
        cmocka_unit_test(combinations_that_do_not_fit_are_refused),
        cmocka_unit_test(limits_of_size_are_refused),
        cmocka_unit_test(shipped_models_are_read_and_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
