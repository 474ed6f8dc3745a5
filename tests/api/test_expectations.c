/* The expectations that users' own tests are written with: those that hold, and the text of those
 * that do not.
 */
#include "tensor_fixture.h"

#include <stdio.h>
#include <string.h>

#include "tenure_lifetime.h"

enum { TEXT_BYTES = 4096 };

/* ---- a handler that notes ------------------------------------------------------------------- */

typedef struct notes {
    int count;
    char text[TEXT_BYTES];
} notes;

static void note(void *context, const char *text) {
    notes *noted = context;
    noted->count++;
    assert_true(strlen(text) < TEXT_BYTES);
    memcpy(noted->text, text, strlen(text) + 1);
}

/* The text of the last one that failed: its first line, and that the report comes after it. */
static void expect_noted(const notes *noted, int count, int line, const char *words) {
    char expected[512];
    const char *end = strchr(noted->text, '\n');
    assert_int_equal(noted->count, count);
    assert_non_null(end);
    snprintf(expected, sizeof expected, "%s:%d: %s\nscope model (model): ", __FILE__, line, words);
    assert_true(strlen(noted->text) > strlen(expected));
    if (strncmp(noted->text, expected, strlen(expected)) != 0) {
        fail_msg("\n%s\nis not the beginning of\n%s", expected, noted->text);
    }
}

/* ---- what holds and what does not ----------------------------------------------------------- */

static void bytes_of_scopes_and_planes(void **state) {
    tensor_fixture f;
    notes noted = {0};
    (void)state;
    tensor_fixture_open(&f);
    tn_expect_handler_set(note, &noted);
    assert_int_equal(TN_EXPECT_LIVE_BYTES(f.scope, 0), 1);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, 128, 128, "w");
    fixture_write(tensor, TN_PLANE_ROW, f.stream);
    assert_int_equal(TN_EXPECT_LIVE_BYTES(f.scope, 16400), 1);
    assert_int_equal(TN_EXPECT_PLANE_BYTES(f.scope, TN_PLANE_ROW, 16400), 1);
    assert_int_equal(TN_EXPECT_PLANE_BYTES(f.scope, TN_PLANE_COL, 0), 1);
    assert_int_equal(noted.count, 0);
    assert_int_equal(TN_EXPECT_LIVE_BYTES(f.scope, 0), 0);
    expect_noted(&noted, 1, __LINE__ - 1, "TN_EXPECT_LIVE_BYTES: expected 0 bytes, found 16400");
    assert_non_null(strstr(noted.text, "tensor w: fp8_block_2d, e4m3, 128 x 128"));
    assert_int_equal(TN_EXPECT_PLANE_BYTES(f.scope, TN_PLANE_COL, 16400), 0);
    expect_noted(&noted, 2, __LINE__ - 1,
                 "TN_EXPECT_PLANE_BYTES: expected 16400 bytes of plane COL, found 0");
    tn_expect_handler_set(NULL, NULL);
    tensor_fixture_close(&f);
}

static void states_of_planes(void **state) {
    tensor_fixture f;
    notes noted = {0};
    (void)state;
    tensor_fixture_open(&f);
    tn_expect_handler_set(note, &noted);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_FP8_BLOCK_2D, 128, 128, "w");
    assert_int_equal(TN_EXPECT_PLANE_STATE(tensor, TN_PLANE_ROW, TN_PLANE_ABSENT), 1);
    fixture_write(tensor, TN_PLANE_ROW, f.stream);
    assert_int_equal(TN_EXPECT_PLANE_STATE(tensor, TN_PLANE_ROW, TN_PLANE_VALID), 1);
    assert_int_equal(TN_EXPECT_PLANE_STATE(tensor, TN_PLANE_ROW, TN_PLANE_STALE), 0);
    expect_noted(&noted, 1, __LINE__ - 1,
                 "TN_EXPECT_PLANE_STATE: expected tensor w, plane ROW to be STALE, found VALID");
    tn_expect_handler_set(NULL, NULL);
    tensor_fixture_close(&f);
}

static void growth_and_leases(void **state) {
    tensor_fixture f;
    notes noted = {0};
    tn_plane_view view;
    tn_lease lease;
    (void)state;
    tensor_fixture_open(&f);
    tn_expect_handler_set(note, &noted);
    tn_ledger before = fixture_ledger(f.scope);
    assert_int_equal(TN_EXPECT_NO_GROWTH(f.scope, &before), 1);
    tn_tensor tensor = fixture_tensor(&f, TN_FORMAT_PLAIN, 1, 25, "x");
    assert_int_equal(TN_EXPECT_NO_GROWTH(f.scope, &before), 0); /* a tensor without bytes */
    expect_noted(&noted, 1, __LINE__ - 1, "TN_EXPECT_GROWTH: expected +0 bytes, found +1 tensor");
    fixture_write(tensor, TN_PLANE_DATA, f.stream);
    assert_int_equal(TN_EXPECT_GROWTH(f.scope, &before, 100), 1);
    assert_int_equal(TN_EXPECT_NO_GROWTH(f.scope, &before), 0);
    expect_noted(&noted, 2, __LINE__ - 1,
                 "TN_EXPECT_GROWTH: expected +0 bytes, found +100 bytes (DATA +100 data), "
                 "+1 tensor, +1 plane");
    assert_int_equal(TN_EXPECT_NO_LEASES(f.scope), 1);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_DATA, TN_READ, f.stream, &lease, &view));
    assert_int_equal(TN_EXPECT_NO_LEASES(f.scope), 0);
    expect_noted(&noted, 3, __LINE__ - 1, "TN_EXPECT_NO_LEASES: expected no open lease, found 1");
    assert_non_null(strstr(noted.text, "READ lease on stream"));
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
    assert_int_equal(TN_EXPECT_NO_GROWTH(f.scope, &before), 1);
    tn_expect_handler_set(NULL, NULL);
    tensor_fixture_close(&f);
}

/* What can not be read does not hold, and the text says why. */
static void what_is_not_alive(void **state) {
    notes noted = {0};
    tn_ledger before = TN_LEDGER_INIT;
    (void)state;
    tn_expect_handler_set(note, &noted);
    assert_int_equal(TN_EXPECT_LIVE_BYTES((tn_scope){0}, 0), 0);
    assert_non_null(strstr(noted.text, "TN_EXPECT_LIVE_BYTES: no scope was given"));
    assert_int_equal(TN_EXPECT_PLANE_BYTES((tn_scope){0}, TN_PLANE_ROW, 0), 0);
    assert_int_equal(TN_EXPECT_PLANE_STATE((tn_tensor){0}, TN_PLANE_ROW, TN_PLANE_VALID), 0);
    assert_non_null(strstr(noted.text, "no tensor was given"));
    assert_int_equal(TN_EXPECT_NO_LEASES((tn_scope){0}), 0);
    assert_int_equal(TN_EXPECT_NO_GROWTH((tn_scope){0}, &before), 0);
    assert_int_equal(noted.count, 5);
    tn_expect_handler_set(NULL, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_of_scopes_and_planes),
        cmocka_unit_test(states_of_planes),
        cmocka_unit_test(growth_and_leases),
        cmocka_unit_test(what_is_not_alive),
    };
    return cmocka_run_group_tests_name("api/expectations", tests, NULL, NULL);
}
