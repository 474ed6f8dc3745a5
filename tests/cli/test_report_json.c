/* The JSON form of a pool's report: valid whatever names the caller uses, complete, and equal to
 * what the statistics say. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "tenure_pool.h"
#include "test_pools.h"

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
} fixture;

static int open_fixture(void **state) {
    static fixture f;
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.name = "a \"pool\"\\";
    f.device = test_open_sim(256 * MIB_BYTES, 0);
    EXPECT_OK(tn_pool_create(f.device, &config, &f.pool));
    *state = &f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    EXPECT_OK(tn_pool_destroy(f->pool));
    test_close_sim(f->device);
    return 0;
}

static cJSON *report_of(tn_pool *pool) {
    size_t needed = tn_pool_report(pool, TN_REPORT_JSON, NULL, 0);
    char *text = malloc(needed + 1);
    cJSON *report;
    assert_int_equal(tn_pool_report(pool, TN_REPORT_JSON, text, needed + 1), needed);
    report = cJSON_ParseWithOpts(text, NULL, 1);
    if (!report) fail_msg("no JSON: %s", text);
    free(text);
    return report;
}

static double number(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!cJSON_IsNumber(item)) fail_msg("%s is no number", name);
    return item->valuedouble;
}

static const cJSON *member(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!item) fail_msg("there is no %s", name);
    return item;
}

static const char *string(const cJSON *object, const char *name) {
    return cJSON_GetStringValue(member(object, name));
}

#define IS_PART(unit, role, name, meaning) +(IS_PART_##role ? number(statistics, #name) : 0.0)
#define IS_PART_PART                       1
#define IS_PART_WHOLE                      0
#define IS_PART_PEAK                       0
#define IS_PART_OTHER                      0
#define IS_PART_LEVEL                      0

static void expect_statistics(const cJSON *statistics, const tn_pool_stats *stats) {
    double parts = 0.0 TN_POOL_STATS_TABLE(IS_PART);
    int count = 0;
#define EXPECT_EQUAL(unit, role, name, meaning)                                                    \
    assert_true(number(statistics, #name) == (double)stats->name);                                 \
    count++;
    TN_POOL_STATS_TABLE(EXPECT_EQUAL)
    assert_int_equal(cJSON_GetArraySize(statistics), count);
    assert_true(parts == number(statistics, "reserved_bytes"));
}

/* Holes by size and pages by fill are the same memory as the statistics, cut up another way. */
static void expect_fragmentation(const cJSON *report, const tn_pool_stats *stats) {
    const cJSON *facts = member(report, "fragmentation");
    double free_bytes = number(facts, "free_bytes");
    double largest = number(facts, "largest_hole_bytes");
    double sums[3] = {0, 0, 0};
    const cJSON *item;
    cJSON_ArrayForEach(item, member(facts, "holes_by_size")) {
        double least = number(item, "least_bytes");
        double holes = number(item, "holes");
        assert_true(holes > 0);
        assert_true(number(item, "bytes") >= holes * least);
        assert_true(number(item, "bytes") < holes * 2 * least);
        sums[0] += holes;
        sums[1] += number(item, "bytes");
    }
    cJSON_ArrayForEach(item, member(facts, "pages_by_fill")) sums[2] += item->valuedouble;
    assert_true(sums[0] == number(facts, "holes"));
    assert_true(sums[1] == free_bytes);
    assert_true(sums[2] * number(report, "page_bytes") ==
                (double)(stats->reserved_bytes - stats->driver_held_bytes));
    assert_true(fabs(number(facts, "utilization") -
                     (double)stats->live_bytes / (double)stats->reserved_bytes) <= 1e-6);
    assert_true(fabs(number(facts, "external_fragmentation") - (1 - largest / free_bytes)) <= 1e-6);
}

static void the_report_equals_the_statistics(void **state) {
    fixture *f = *state;
    void *blocks[24];
    tn_pool_stats stats;
    cJSON *report;
    for (size_t i = 0; i < 24; i++)
        blocks[i] = test_take_for(f->pool, (i + 1) * 300007, i % 2 ? "odd" : "even", "here.c:1");
    for (size_t i = 0; i < 24; i += 3)
        test_give(f->pool, blocks[i], NULL);
    stats = test_pool_stats(f->pool);
    report = report_of(f->pool);
    assert_string_equal(string(report, "pool"), "a \"pool\"\\");
    assert_string_equal(string(report, "driver"), "cuda");
    assert_true(cJSON_IsTrue(member(report, "simulated")));
    assert_true(cJSON_IsNull(member(report, "limit_bytes")));
    assert_true(cJSON_IsNull(member(report, "last_shortage")));
    assert_int_equal(cJSON_GetArraySize(member(report, "streams")), 1);
    expect_statistics(member(report, "statistics"), &stats);
    expect_fragmentation(report, &stats);
    cJSON_Delete(report);
    for (size_t i = 0; i < 24; i++)
        if (i % 3) test_give(f->pool, blocks[i], NULL);
}

static void any_name_is_valid_json(void **state) {
    static const struct {
        const char *owner;
        const char *shown;
    } names[] = {{"quote \" back \\ tab \t line \n bell \a", NULL},
                 {"Gr\xc3\xb6\xc3\x9f"
                  "e \xe2\x82\xac \xf0\x9f\xa6\x8a",
                  NULL},
                 {"cut \xe2\x82", "cut \xef\xbf\xbd\xef\xbf\xbd"},
                 {"overlong \xc0\xaf surrogate \xed\xa0\x80",
                  "overlong \xef\xbf\xbd\xef\xbf\xbd surrogate "
                  "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
                 {"\xff\xfe", "\xef\xbf\xbd\xef\xbf\xbd"},
                 {"", NULL}};
    enum { NAMES = sizeof names / sizeof names[0] };
    fixture *f = *state;
    void *blocks[NAMES];
    cJSON *report;
    for (int i = 0; i < NAMES; i++)
        blocks[i] = test_take_for(f->pool, (size_t)(NAMES - i) * 4096, names[i].owner, NULL);
    report = report_of(f->pool);
    assert_int_equal(cJSON_GetArraySize(member(report, "owners")), NAMES);
    for (int i = 0; i < NAMES; i++) {
        const cJSON *owner = cJSON_GetArrayItem(member(report, "owners"), i);
        assert_string_equal(string(owner, "owner"),
                            names[i].shown ? names[i].shown : names[i].owner);
        assert_true(cJSON_IsNull(member(owner, "site")));
        assert_true(number(owner, "bytes") == (NAMES - i) * 4096.0);
        assert_true(number(owner, "oldest_age_operations") == NAMES - 1 - i);
        EXPECT_OK(tn_free(blocks[i], NULL));
    }
    cJSON_Delete(report);
}

static void owners_add_up_to_the_live_bytes(void **state) {
    enum { MANY = 700 };
    static char sites[MANY][16];
    fixture *f = *state;
    void *blocks[MANY];
    double sums[2] = {0, 0};
    double last = 1e18;
    const cJSON *item;
    cJSON *report;
    for (int i = 0; i < MANY; i++) {
        snprintf(sites[i], sizeof sites[i], "x.c:%d", i);
        blocks[i] = test_take_for(f->pool, (size_t)(1 + i * 7919 % 5000), "x", sites[i]);
    }
    report = report_of(f->pool);
    cJSON_ArrayForEach(item, member(report, "owners")) {
        sums[0] += number(item, "bytes");
        sums[1] += number(item, "blocks");
        assert_true(number(item, "bytes") <= last);
        last = number(item, "bytes");
    }
    assert_int_equal(cJSON_GetArraySize(member(report, "owners")), 512);
    assert_true(sums[0] == number(member(report, "statistics"), "live_bytes"));
    assert_true(sums[1] == MANY);
    cJSON_Delete(report);
    for (int i = 0; i < MANY; i++)
        EXPECT_OK(tn_free(blocks[i], NULL));
}

static void a_shortage_is_told_as_it_stood_then(void **state) {
    fixture *f = *state;
    void *block = test_take_for(f->pool, 200 * MIB_BYTES, "most", NULL);
    tn_pool_stats then;
    void *none = NULL;
    cJSON *report;
    const cJSON *shortage;
    EXPECT_STATUS(tn_alloc(f->pool, 100 * MIB_BYTES, NULL, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    then = test_pool_stats(f->pool);
    test_give(f->pool, block, NULL);
    report = report_of(f->pool);
    shortage = member(report, "last_shortage");
    assert_true(number(shortage, "asked_bytes") == 100.0 * MIB_BYTES);
    assert_true(number(shortage, "device_total_bytes") == 256.0 * MIB_BYTES);
    assert_true(number(shortage, "device_free_bytes") == 56.0 * MIB_BYTES);
    assert_non_null(strstr(string(shortage, "hint"), "free some of the largest owners"));
    expect_statistics(member(shortage, "statistics"), &then);
    assert_true(number(member(report, "statistics"), "live_bytes") == 0);
    cJSON_Delete(report);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
        TEST(the_report_equals_the_statistics),
        TEST(any_name_is_valid_json),
        TEST(owners_add_up_to_the_live_bytes),
        TEST(a_shortage_is_told_as_it_stood_then),
    };
    return cmocka_run_group_tests_name("cli/report_json", tests, NULL, NULL);
}
