/* Programs that misuse tensors and leases: each ends with an exact message, and nothing worse.
 *
 * A part does what it should not, prints this thread's last error, and ends with status 3; the test
 * compares all of what it says, but for what differs from run to run: addresses, lines of files.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "misuse_support.h"
#include "tenure_lifetime.h"

#define s misuse_scene

enum { TEXT_BYTES = 4096, REFUSED = 3 };

/* ---- the scene ------------------------------------------------------------------------------ */

static tn_scope layer;
static tn_tensor weight;

static void open_weight(void) {
    tn_scope_config scope_config = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    const float values[64] = {1.0f, 2.0f};
    misuse_open();
    scope_config.pool = s.pool;
    scope_config.kind = TN_SCOPE_LAYER;
    scope_config.name = "layer0";
    config.rank = 1;
    config.shape[0] = 64;
    config.name = "weight";
    REQUIRE(tn_scope_create(&scope_config, &layer) == TN_OK);
    REQUIRE(tn_tensor_create(layer, &config, &weight) == TN_OK);
    REQUIRE(tn_plane_write(weight, TN_PLANE_DATA, values, sizeof values, NULL, 0, NULL) == TN_OK);
    REQUIRE(tn_device_synchronize(s.device) == TN_OK);
}

static tn_lease begin(tn_access access, tn_plane_view *view) {
    tn_lease lease;
    REQUIRE(tn_lease_begin(weight, TN_PLANE_DATA, access, NULL, &lease, view) == TN_OK);
    return lease;
}

/* The program hears of it and gives up. */
static void give_up_on(tn_status status) {
    fprintf(stderr, "%s: %s\n", tn_status_text(status), tn_error_last());
    _exit(status == TN_OK ? 0 : REFUSED);
}

/* ---- parts ---------------------------------------------------------------------------------- */

static void use_after_destroy(void) {
    tn_lease lease;
    tn_plane_view view;
    open_weight();
    REQUIRE(tn_tensor_destroy(weight, NULL) == TN_OK);
    give_up_on(tn_lease_begin(weight, TN_PLANE_DATA, TN_READ, NULL, &lease, &view));
}

static void use_of_another_kind_of_handle(void) {
    tn_lease lease;
    tn_plane_view view;
    open_weight();
    give_up_on(
        tn_lease_begin((tn_tensor){layer.value}, TN_PLANE_DATA, TN_READ, NULL, &lease, &view));
}

static void lease_after_drop(void) {
    tn_lease lease;
    tn_plane_view view;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    open_weight();
    config.name = "gathered";
    config.rank = 1;
    config.shape[0] = 64;
    config.regatherable = 1;
    REQUIRE(tn_tensor_create(layer, &config, &weight) == TN_OK);
    REQUIRE(tn_lease_end(begin(TN_WRITE, &view)) == TN_OK);
    REQUIRE(tn_plane_drop(weight, TN_PLANE_DATA, NULL) == TN_OK);
    give_up_on(tn_lease_begin(weight, TN_PLANE_DATA, TN_READ, NULL, &lease, &view));
}

static void drop_under_a_lease(void) {
    tn_plane_view view;
    open_weight();
    (void)begin(TN_READ, &view);
    give_up_on(tn_plane_drop(weight, TN_PLANE_DATA, NULL));
}

static void end_twice(void) {
    tn_plane_view view;
    open_weight();
    tn_lease lease = begin(TN_READ, &view);
    REQUIRE(tn_lease_end(lease) == TN_OK);
    give_up_on(tn_lease_end(lease));
}

/* The lease's slot has been given to another one: the old handle does not end that. */
static void end_twice_with_another_begun_between(void) {
    tn_plane_view view;
    open_weight();
    tn_lease lease = begin(TN_READ, &view);
    REQUIRE(tn_lease_end(lease) == TN_OK);
    tn_lease other = begin(TN_READ, &view);
    tn_status status = tn_lease_end(lease);
    REQUIRE(status == TN_STALE_HANDLE);
    REQUIRE(tn_lease_end(other) == TN_OK);
    REQUIRE(tn_lease_end(lease) == TN_STALE_HANDLE);
    give_up_on(status);
}

static void close_under_a_lease(void) {
    tn_plane_view view;
    open_weight();
    (void)begin(TN_WRITE, &view);
    give_up_on(tn_scope_close(layer));
}

static void write_under_a_read_lease(void) {
    tn_plane_view view;
    float value = 3.0f;
    REQUIRE(setenv("TENURE_CHECK_LEASES", "1", 1) == 0);
    open_weight();
    tn_lease lease = begin(TN_READ, &view);
    REQUIRE(tn_copy(s.device, view.data, &value, sizeof value, NULL) == TN_OK);
    tn_status status = tn_lease_end(lease);
    REQUIRE(status == TN_INVALID_STATE);
    char text[TEXT_BYTES];
    snprintf(text, sizeof text, "%s", tn_error_last());
    REQUIRE(tn_lease_end(lease) == TN_INVALID_STATE); /* it is still open */
    REQUIRE(tn_lease_abandon(lease) == TN_OK);
    REQUIRE(tn_scope_close(layer) == TN_OK);
    fprintf(stderr, "%s: %s\n", tn_status_text(status), text);
    _exit(REFUSED);
}

/* Reads, and writes under the leases for that, are nothing to complain of. */
static void read_and_write_as_it_should_be(void) {
    tn_plane_view view;
    float values[64] = {3.0f};
    REQUIRE(setenv("TENURE_CHECK_LEASES", "1", 1) == 0);
    open_weight();
    REQUIRE(tn_lease_end(begin(TN_READ, &view)) == TN_OK);
    for (int access = TN_WRITE; access <= TN_UPDATE; access++) {
        tn_lease lease = begin((tn_access)access, &view);
        REQUIRE(tn_copy(s.device, view.data, values, sizeof values, NULL) == TN_OK);
        REQUIRE(tn_lease_end(lease) == TN_OK);
    }
    tn_lease first = begin(TN_READ, &view);
    tn_lease second = begin(TN_READ, &view);
    REQUIRE(tn_copy(s.device, values, view.data, sizeof values, NULL) == TN_OK);
    REQUIRE(tn_lease_end(first) == TN_OK);
    REQUIRE(tn_lease_end(second) == TN_OK);
    REQUIRE(tn_scope_close(layer) == TN_OK);
    _exit(0);
}

static void wrong_expectation(void) {
    open_weight();
    (void)TN_EXPECT_LIVE_BYTES(layer, 0);
    _exit(0);
}

static const part parts[] = {
    {"use_after_destroy", use_after_destroy},
    {"use_of_another_kind_of_handle", use_of_another_kind_of_handle},
    {"lease_after_drop", lease_after_drop},
    {"drop_under_a_lease", drop_under_a_lease},
    {"end_twice", end_twice},
    {"end_twice_with_another_begun_between", end_twice_with_another_begun_between},
    {"close_under_a_lease", close_under_a_lease},
    {"write_under_a_read_lease", write_under_a_read_lease},
    {"read_and_write_as_it_should_be", read_and_write_as_it_should_be},
    {"wrong_expectation", wrong_expectation},
};

/* ---- what they must say --------------------------------------------------------------------- */

/* Lines of files become LINE, offsets and addresses 0x; (nil) is an address, too. */
static void normalize(const char *from, char *to) {
    static const struct {
        const char *before, *instead, *skipped;
    } rules[] = {{".c:", ".c:LINE", "0123456789"},
                 {"+0x", "+0x", "0123456789abcdef"},
                 {"at 0x", "at 0x", "0123456789abcdef"},
                 {"(nil)", "0x", ""}};
    enum { RULES = sizeof rules / sizeof *rules };
    while (*from) {
        size_t rule = 0;
        while (rule < RULES && strncmp(from, rules[rule].before, strlen(rules[rule].before)) != 0)
            rule++;
        if (rule == RULES) {
            *to++ = *from++;
            continue;
        }
        from += strlen(rules[rule].before);
        from += strspn(from, rules[rule].skipped);
        to = stpcpy(to, rules[rule].instead);
    }
    *to = 0;
}

static void expect_on(const char *name, const char *driver, int status, const char *expected) {
    static char normal[2 * TEXT_BYTES];
    ending end = misuse_run(name, driver);
    normalize(end.text, normal);
    /* An expectation begins with the whole path of its file, as the compiler was given it. */
    const char *said = end.status == 128 + SIGABRT ? strstr(normal, "test_lease") : normal;
    assert_non_null(said);
    assert_string_equal(said, expected);
    assert_int_equal(end.status, status);
}

static void expect(const char *name, const char *expected) {
    expect_on(name, "host", REFUSED, expected);
    expect_on(name, "sim", REFUSED, expected);
}

#define ENDED                                                                                      \
    " is not alive: it has ended, or was never made [TN_STALE_HANDLE, handle_table.c:LINE]\n"

static void handles_that_have_ended_are_refused(void **state) {
    (void)state;
    expect("use_after_destroy", "stale handle: tensor 0x0000000120000410" ENDED);
    expect("use_of_another_kind_of_handle", "stale handle: tensor 0x0000000110000400" ENDED);
    expect("end_twice", "stale handle: lease 0x0000000230000420" ENDED);
    expect("end_twice_with_another_begun_between", "stale handle: lease 0x0000000230000420" ENDED);
}

static void planes_that_are_not_there_are_refused(void **state) {
    (void)state;
    expect(
        "lease_after_drop",
        "invalid state: tensor gathered, plane DATA is ABSENT and no plane of it is valid: write "
        "one first [TN_INVALID_STATE, plane_derive.c:LINE]\n");
}

static void what_is_leased_stays(void **state) {
    (void)state;
    expect(
        "drop_under_a_lease",
        "in use: tensor weight, plane DATA is under a READ lease on stream 0x: drop must wait "
        "until that lease ends; the tensor was made at test_lease_misuse.c:LINE, the lease by the "
        "call at 0x [TN_IN_USE, tensor_state.c:LINE]\n");
    expect(
        "close_under_a_lease",
        "in use: tensor weight, plane DATA is under a WRITE lease on stream 0x: closing its "
        "scope must wait until that lease ends; the tensor was made at test_lease_misuse.c:LINE, "
        "the lease by the call at 0x [TN_IN_USE, tensor_state.c:LINE]\n");
}

static void a_write_under_a_read_lease_is_found(void **state) {
    (void)state;
    expect("write_under_a_read_lease",
           "invalid state: tensor weight (made at test_lease_misuse.c:LINE), plane DATA was "
           "written under the READ lease on stream 0x that was begun by "
           "part(+0x): what writes it needs a WRITE or UPDATE lease; "
           "abandon this one [TN_INVALID_STATE, lease_check.c:LINE]\n");
    expect_on("read_and_write_as_it_should_be", "host", 0, "");
    expect_on("read_and_write_as_it_should_be", "sim", 0, "");
}

static void a_wrong_expectation_aborts_with_the_report(void **state) {
    (void)state;
    expect_on("wrong_expectation", "host", 128 + SIGABRT,
              "test_lease_misuse.c:LINE: TN_EXPECT_LIVE_BYTES: expected 0 bytes, found 256\n"
              "scope layer0 (layer): 256 bytes, 1 tensor, 0 leases, phase none, made at "
              "test_lease_misuse.c:LINE\n"
              "  tensor weight: plain, fp32, 64, policy keep, made at test_lease_misuse.c:LINE\n"
              "    plane DATA: VALID, 256 + 0 bytes\n");
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(handles_that_have_ended_are_refused),
        cmocka_unit_test(planes_that_are_not_there_are_refused),
        cmocka_unit_test(what_is_leased_stays),
        cmocka_unit_test(a_write_under_a_read_lease_is_found),
        cmocka_unit_test(a_wrong_expectation_aborts_with_the_report),
    };
    misuse_play(argc, argv, parts, sizeof parts / sizeof *parts);
    return cmocka_run_group_tests_name("misuse/lease_misuse", tests, NULL, NULL);
}
