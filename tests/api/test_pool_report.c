/* The reports of a pool in words: complete, measured as snprintf measures, and bounded where they
 * become the text of a failure. The JSON form: tests/cli/test_report_json.c. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tenure_pool.h"
#include "test_pools.h"

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
} fixture;

static int open_fixture(void **state) {
    static fixture f;
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    config.name = "reported";
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

static void a_report_is_measured_and_cut_as_snprintf_does(void **state) {
    fixture *f = *state;
    void *block = test_take_for(f->pool, 5 * MIB_BYTES, "weights", "model.c:7");
    for (int format = TN_REPORT_TEXT; format <= TN_REPORT_JSON; format++) {
        size_t needed = tn_pool_report(f->pool, (tn_report_format)format, NULL, 0);
        char *whole = malloc(needed + 1);
        char cut[200];
        assert_int_equal(tn_pool_report(f->pool, (tn_report_format)format, whole, needed + 1),
                         needed);
        assert_int_equal(strlen(whole), needed);
        for (size_t room = 1; room <= sizeof cut; room++) {
            memset(cut, '#', sizeof cut);
            assert_int_equal(tn_pool_report(f->pool, (tn_report_format)format, cut, room), needed);
            assert_int_equal(strlen(cut), room - 1);
            assert_memory_equal(cut, whole, room - 1);
            if (room < sizeof cut) assert_int_equal(cut[room], '#');
        }
        free(whole);
    }
    test_give(f->pool, block, NULL);
}

static void what_is_no_report_is_nothing(void **state) {
    fixture *f = *state;
    char text[8] = "as was";
    assert_int_equal(tn_pool_report(NULL, TN_REPORT_TEXT, NULL, 0), 0);
    assert_int_equal(tn_pool_report(f->pool, (tn_report_format)7, NULL, 0), 0);
    assert_int_equal(tn_pool_report(f->pool, (tn_report_format)7, text, 0), 0);
    assert_string_equal(text, "as was");
}

/* The line of a statistic begins with its name and value. */
static void expect_line(const char *report, const char *name, uint64_t value) {
    char line[80];
    snprintf(line, sizeof line, "\n  %-20s%16" PRIu64 " ", name, value);
    if (!strstr(report, line)) fail_msg("no line \"%s\" in:\n%s", line + 1, report);
}

static void every_statistic_has_a_line(void **state) {
    fixture *f = *state;
    void *blocks[2] = {test_take_for(f->pool, 3 * MIB_BYTES + 1, "a", NULL),
                       test_take_for(f->pool, 77, NULL, NULL)};
    tn_pool_stats stats = test_pool_stats(f->pool);
    char text[16384];
    assert_true(tn_pool_report(f->pool, TN_REPORT_TEXT, text, sizeof text) < sizeof text);
#define EXPECT_LINE(unit, role, name, meaning) expect_line(text, #name, stats.name);
    TN_POOL_STATS_TABLE(EXPECT_LINE)
    assert_non_null(strstr(text, "pool reported: vmm backing on "));
    assert_non_null(strstr(text, "in        1 block,  oldest 1 operations ago  a\n"));
    assert_non_null(strstr(text, "in        1 block,  oldest 0 operations ago  unnamed\n"));
    assert_null(strstr(text, "last shortage"));
    for (int i = 0; i < 2; i++)
        test_give(f->pool, blocks[i], NULL);
}

static void a_shortage_stays_in_the_report(void **state) {
    fixture *f = *state;
    void *none = NULL;
    char text[16384];
    EXPECT_STATUS(tn_alloc(f->pool, 300 * MIB_BYTES, NULL, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("pool reported has no 314572800 bytes");
    assert_true(tn_pool_report(f->pool, TN_REPORT_TEXT, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, "last shortage\n  pool reported has no 314572800 bytes: live 0"));
    assert_non_null(strstr(text, "hint: the request is larger than the device's memory\n"));
}

static void a_leak_is_told_by_owner_and_site_largest_first(void **state) {
    fixture *f = *state;
    void *blocks[4] = {test_take_for(f->pool, 100, "small", "s.c:1"),
                       test_take_for(f->pool, 3 * MIB_BYTES, "large", NULL),
                       test_take_for(f->pool, 2 * MIB_BYTES, "small", "s.c:2"),
                       test_take_for(f->pool, 200, "small", "s.c:1")};
    EXPECT_STATUS(tn_pool_destroy(f->pool), TN_LEAK);
    EXPECT_ERROR_HAS("pool reported still has 4 live blocks of 5243180 bytes: "
                     "large: 3145728 bytes in 1 block (oldest 2 operations ago), "
                     "small (s.c:2): 2097152 bytes in 1 block (oldest 1 operations ago), "
                     "small (s.c:1): 300 bytes in 2 blocks (oldest 3 operations ago) [TN_LEAK");
    for (int i = 0; i < 4; i++)
        test_give(f->pool, blocks[i], NULL);
}

enum { MANY = 600 };

/* What the text of a failure names and what it adds up must be all there is. */
static void a_leak_of_many_owners_says_how_many_more(void **state) {
    fixture *f = *state;
    static char owners[MANY][64];
    void *blocks[MANY];
    size_t bytes = 0;
    size_t more[3] = {0};
    const char *at;
    size_t named = 0;
    size_t named_bytes = 0;
    for (int i = 0; i < MANY; i++) {
        snprintf(owners[i], sizeof owners[i], "owner-with-a-rather-long-name-%d", i);
        blocks[i] = test_take_for(f->pool, (size_t)(1000 + i), owners[i], NULL);
        bytes += (size_t)(1000 + i);
    }
    EXPECT_STATUS(tn_pool_destroy(f->pool), TN_LEAK);
    assert_true(strlen(tn_error_last()) < 2000);
    assert_non_null(strstr(tn_error_last(), "[TN_LEAK"));
    for (at = tn_error_last(); (at = strstr(at, "name-")); at++, named++) {
        size_t value = 0;
        assert_int_equal(sscanf(at, "name-%*d: %zu bytes in 1 block", &value), 1);
        named_bytes += value;
    }
    at = strstr(tn_error_last(), "and ");
    assert_non_null(at);
    assert_int_equal(sscanf(at, "and %zu more owners with %zu bytes in %zu blocks", &more[0],
                            &more[1], &more[2]),
                     3);
    assert_true(named > 10);
    /* 511 are told apart, the rest is one sum, "others", which is the largest. */
    assert_non_null(strstr(tn_error_last(), ": others: "));
    assert_int_equal(named + 1 + more[0], 512);
    assert_int_equal(named + (MANY - 511) + more[2], MANY);
    for (int i = 511; i < MANY; i++)
        named_bytes += (size_t)(1000 + i);
    assert_int_equal(named_bytes + more[1], bytes);
    for (int i = 0; i < MANY; i++)
        EXPECT_OK(tn_free(blocks[i], NULL));
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
        TEST(a_report_is_measured_and_cut_as_snprintf_does),
        TEST(what_is_no_report_is_nothing),
        TEST(every_statistic_has_a_line),
        TEST(a_shortage_stays_in_the_report),
        TEST(a_leak_is_told_by_owner_and_site_largest_first),
        TEST(a_leak_of_many_owners_says_how_many_more),
    };
    return cmocka_run_group_tests_name("api/pool_report", tests, NULL, NULL);
}
