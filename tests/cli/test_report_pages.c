/* The page of a pool: everything that the snapshot says is on it, escaped, and nothing that a
 * browser would fetch. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pool_history.h"
#include "report_pages.h"
#include "tenure_pool.h"
#include "test_pools.h"
#include "torch_history.h"

typedef struct page {
    char *text;
    size_t bytes;
    int is_made;
    int has_history; /* what a script draws */
    char error[REPORT_ERROR_BYTES];
} page;

static page make_page(const cJSON *root) {
    page made = {.error = ""};
    memory_history *history = NULL;
    char words[HISTORY_ERROR_BYTES];
    int is_out_of_memory = 0;
    FILE *stream = open_memstream(&made.text, &made.bytes);
    assert_non_null(stream);
    (void)pool_history_read("job", root, &history, words, &is_out_of_memory);
    assert_int_equal(is_out_of_memory, 0);
    made.has_history = history && history->event_count > 0;
    made.is_made = report_pool_page(stream, "job <1>.json", root, history, made.error);
    history_destroy(history);
    assert_int_equal(fclose(stream), 0);
    return made;
}

static size_t count_of(const char *text, const char *words) {
    size_t count = 0;
    for (; (text = strstr(text, words)); text++)
        count++;
    return count;
}

static void expect_has(const page *made, const char *words) {
    if (!strstr(made->text, words)) fail_msg("no \"%s\" in:\n%s", words, made->text);
}

static cJSON *parse_file(const char *path) {
    static char text[1 << 20];
    FILE *file = fopen(path, "r");
    cJSON *root;
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    root = cJSON_Parse(text);
    assert_non_null(root);
    return root;
}

static cJSON *snapshot_of(tn_pool *pool) {
    char path[64];
    cJSON *root;
    snprintf(path, sizeof path, "page-%d.json", (int)getpid());
    EXPECT_OK(tn_pool_snapshot_write(pool, path));
    root = parse_file(path);
    (void)remove(path);
    return root;
}

static cJSON *report_of(tn_pool *pool) {
    static char text[1 << 16];
    assert_true(tn_pool_report(pool, TN_REPORT_JSON, text, sizeof text) < sizeof text);
    return cJSON_Parse(text);
}

static void expect_whole(const page *made) {
    assert_true(made->is_made);
    assert_int_equal(strncmp(made->text, "<!DOCTYPE html>", 15), 0);
    assert_string_equal(made->text + made->bytes - strlen("</body>\n</html>\n"),
                        "</body>\n</html>\n");
    assert_int_equal(count_of(made->text, "<svg"), count_of(made->text, "</svg>"));
    assert_int_equal(count_of(made->text, "<table>"), count_of(made->text, "</table>"));
    assert_int_equal(count_of(made->text, "<rect"), count_of(made->text, "</rect>"));
    assert_null(strstr(made->text, "http"));
    assert_null(strstr(made->text, "src="));
    assert_int_equal(count_of(made->text, "<script"), made->has_history ? 2 : 0);
}

static size_t pieces_of(const cJSON *root) {
    size_t pieces = 0;
    const cJSON *region;
    cJSON_ArrayForEach(region, cJSON_GetObjectItem(root, "regions")) {
        pieces += (size_t)cJSON_GetArraySize(cJSON_GetObjectItem(region, "pieces"));
    }
    return pieces;
}

static void a_pool_is_on_its_page(void **state) {
    tn_device *device = test_open_sim(256 * MIB_BYTES, 0);
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *blocks[3] = {NULL};
    void *none = NULL;
    cJSON *roots[2];
    (void)state;
    options.owner = "<script>alert(\"1\")</script>";
    options.site = "a&b.c:3";
    EXPECT_OK(tn_pool_events_begin(pool, 16, 0));
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_alloc(pool, (size_t)(i + 1) * MIB_BYTES, NULL, &options, &blocks[i]));
    EXPECT_OK(tn_free(blocks[1], NULL));
    EXPECT_STATUS(tn_alloc(pool, 300 * MIB_BYTES, NULL, NULL, &none), TN_OUT_OF_DEVICE_MEMORY);
    roots[0] = snapshot_of(pool);
    roots[1] = report_of(pool);
    for (int i = 0; i < 2; i++) {
        page made = make_page(roots[i]);
        expect_whole(&made);
        expect_has(&made, "job &lt;1&gt;.json: vmm backing on ");
        expect_has(&made, "<td>live_bytes\n<td class=\"n\">4,194,304\n<td class=\"n\">4.0 MiB\n");
        expect_has(&made, "<td>&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;\n"
                          "<td>a&amp;b.c:3\n<td class=\"n\">2\n<td class=\"n\">4,194,304\n");
        assert_int_equal(made.has_history, i == 0);
        assert_int_equal(count_of(made.text, "<rect"), pieces_of(roots[i]));
        assert_int_equal(count_of(made.text, "<td>alloc\n"), i == 0 ? 3 : 0);
        assert_int_equal(count_of(made.text, "Hint: the request is larger than the device"),
                         i == 0 ? 0 : 1);
        assert_int_equal(count_of(made.text, "external fragmentation"), i == 0 ? 0 : 1);
        free(made.text);
        cJSON_Delete(roots[i]);
    }
    assert_true(tn_free(blocks[0], NULL) == TN_OK && tn_free(blocks[2], NULL) == TN_OK);
    EXPECT_OK(tn_pool_destroy(pool));
    test_close_sim(device);
}

/* Whatever is missing or of another kind than expected, a page is whole or not made. */
static void odd_files_are_refused_or_shown_as_far_as_they_go(void **state) {
    static const struct {
        const char *text;
        int is_made;
    } cases[] = {
        {"{}", 0},
        {"{\"format\": 7, \"statistics\": {}}", 0},
        {"{\"format\": \"tenure pool map 1\", \"statistics\": {}}", 0},
        {"{\"format\": \"tenure pool report 1\", \"statistics\": 3}", 0},
        {"{\"format\": \"tenure pool report 1\", \"statistics\": {}}", 1},
        {"{\"format\": \"tenure pool snapshot 2\", \"statistics\": {\"x\": \"y\"}, \"regions\": 1,"
         "\"events\": {\"a\": 1}, \"owners\": [1, null, {\"owner\": 5}], \"fragmentation\": {}}",
         1},
        {"{\"format\": \"tenure pool snapshot 1\", \"statistics\": {\"reserved_bytes\": -1e300},"
         "\"regions\": [7, {}, {\"pieces\": [null, {\"kind\": 3, \"bytes\": -5, \"offset\": 1e99},"
         "{\"kind\": \"live\", \"asked_bytes\": 1e19}]}]}",
         1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cJSON *root = cJSON_Parse(cases[i].text);
        page made;
        assert_non_null(root);
        made = make_page(root);
        assert_int_equal(made.is_made, cases[i].is_made);
        if (made.is_made) {
            expect_whole(&made);
        } else {
            assert_int_equal(made.bytes, 0);
            assert_true(made.error[0] != 0);
        }
        free(made.text);
        cJSON_Delete(root);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pool_is_on_its_page),
        cmocka_unit_test(odd_files_are_refused_or_shown_as_far_as_they_go),
    };
    return cmocka_run_group_tests_name("cli/report_pages", tests, NULL, NULL);
}
