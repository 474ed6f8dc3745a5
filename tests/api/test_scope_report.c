/* Reports of scopes, to the letter; ledgers by format and phase; and what lies between two. */
#include "tensor_fixture.h"

#include <stdlib.h>
#include <string.h>

#include "tenure_lifetime.h"

enum { TEXT_BYTES = 8192 };

/* What differs from run to run: "0x7f..." becomes "0x", the line of this file that a site names
 * LINE, and the number of a stream ID. */
static void normalize(const char *from, char *to) {
    static const struct {
        const char *before, *instead, *skipped;
    } rules[] = {{"0x", "0x", "0123456789abcdef"},
                 {".c:", ".c:LINE", "0123456789"},
                 {"\"stream_id\": ", "\"stream_id\": ID", "0123456789"}};
    while (*from) {
        size_t rule = 0;
        while (rule < 3 && strncmp(from, rules[rule].before, strlen(rules[rule].before)) != 0)
            rule++;
        if (rule == 3) {
            *to++ = *from++;
            continue;
        }
        from += strlen(rules[rule].before);
        from += strspn(from, rules[rule].skipped);
        to = stpcpy(to, rules[rule].instead);
    }
    *to = 0;
}

static void expect_report(tn_scope scope, tn_report_format format, const char *expected) {
    char text[TEXT_BYTES], normal[TEXT_BYTES];
    size_t needed = tn_scope_report(scope, format, NULL, 0);
    assert_int_equal(tn_scope_report(scope, format, text, sizeof text), needed);
    assert_int_equal(strlen(text), needed);
    normalize(text, normal);
    assert_string_equal(normal, expected);
}

typedef struct scene {
    tensor_fixture f;
    tn_scope layer;
    tn_tensor weight, bias;
    tn_lease lease;
} scene;

static void open_scene(scene *s) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config weight = TN_TENSOR_CONFIG_INIT;
    tn_plane_view view;
    tensor_fixture_open(&s->f);
    config.parent = s->f.scope;
    config.kind = TN_SCOPE_LAYER;
    config.name = "layer \"0\"";
    EXPECT_OK(tn_scope_create(&config, &s->layer));
    weight.format = TN_FORMAT_FP8_BLOCK_2D;
    weight.dtype = TN_E4M3;
    weight.rank = 2;
    weight.shape[0] = weight.shape[1] = 128;
    weight.frozen = 1;
    weight.name = "weight";
    EXPECT_OK(tn_tensor_create(s->layer, &weight, &s->weight));
    s->bias = fixture_tensor(&s->f, TN_FORMAT_PLAIN, 1, 25, "bias");
    fixture_write(s->bias, TN_PLANE_DATA, s->f.stream);
    fixture_write(s->weight, TN_PLANE_ROW, s->f.stream);
    EXPECT_OK(tn_plane_require(s->weight, TN_PLANE_COL, s->f.stream));
    EXPECT_OK(tn_lease_begin(s->weight, TN_PLANE_ROW, TN_READ, s->f.stream, &s->lease, &view));
}

static void close_scene(scene *s) {
    EXPECT_OK(tn_lease_end(s->lease));
    tensor_fixture_close(&s->f);
}

static void a_report_names_tensors_planes_and_holders(void **state) {
    scene s;
    (void)state;
    open_scene(&s);
    expect_report(
        s.f.scope, TN_REPORT_TEXT,
        "scope model (model): 32900 bytes, 2 tensors, 1 lease, phase none, made at "
        "tensor_fixture.c:LINE\n"
        "  tensor bias: plain, fp32, 1 x 25, policy keep, made at tensor_fixture.c:LINE\n"
        "    plane DATA: VALID, 100 + 0 bytes\n"
        "  scope layer \"0\" (layer): 32800 bytes, 1 tensor, 1 lease, phase none, made at "
        "test_scope_report.c:LINE\n"
        "    tensor weight: fp8_block_2d, e4m3, 128 x 128, policy keep, frozen, made at "
        "test_scope_report.c:LINE\n"
        "      plane ROW: VALID, 16384 + 16 bytes\n"
        "        READ lease on stream 0x, begun by the call at 0x\n"
        "      plane COL: VALID, 16384 + 16 bytes, derived\n");
    close_scene(&s);
}

static void a_report_in_json_says_the_same(void **state) {
    scene s;
    (void)state;
    open_scene(&s);
    expect_report(
        s.layer, TN_REPORT_JSON,
        "{\"format\": \"tenure scope report 1\", \"scopes\": [\n    {\"scope\": \"layer "
        "\\\"0\\\"\", \"kind\": \"layer\", \"phase\": "
        "\"none\", \"site\": \"test_scope_report.c:LINE\", \"depth\": 0, \"bytes\": 32800, "
        "\"peak_bytes\": 32800, \"foreign_bytes\": 0, \"offloaded_bytes\": 0, \"tensor_count\": 1, "
        "\"lease_count\": 1, "
        "\"tensors\": [\n      {\"tensor\": \"weight\", \"format\": \"fp8_block_2d\", \"dtype\": "
        "\"e4m3\", \"shape\": [128, 128], \"policy\": \"keep\", \"site\": "
        "\"test_scope_report.c:LINE\", \"frozen\": true, \"saved\": false, \"planes\": [\n"
        "        {\"plane\": \"ROW\", \"state\": \"VALID\", \"data_bytes\": 16384, "
        "\"scale_bytes\": 16, \"memory\": \"owned\", \"derived\": false, \"replaced\": false, "
        "\"leases\": [\n          {\"access\": \"READ\", \"stream\": \"0x\", \"stream_id\": ID, "
        "\"caller\": \"0x\", \"exported\": false}]},\n"
        "        {\"plane\": \"COL\", \"state\": \"VALID\", \"data_bytes\": 16384, "
        "\"scale_bytes\": 16, \"memory\": \"owned\", \"derived\": true, \"replaced\": false, "
        "\"leases\": []}]}]}]}\n");
    close_scene(&s);
}

static void a_report_is_cut_where_the_room_ends(void **state) {
    scene s;
    char text[16];
    (void)state;
    open_scene(&s);
    memset(text, 'x', sizeof text);
    size_t needed = tn_scope_report(s.f.scope, TN_REPORT_TEXT, NULL, 0);
    assert_true(needed > sizeof text);
    assert_int_equal(tn_scope_report(s.f.scope, TN_REPORT_TEXT, text, 12), needed);
    assert_string_equal(text, "scope model");
    assert_int_equal(text[12], 'x');
    assert_int_equal(tn_scope_report(s.f.scope, (tn_report_format)7, text, 12), 0);
    assert_int_equal(tn_scope_report((tn_scope){0}, TN_REPORT_TEXT, text, 12), 0);
    close_scene(&s);
}

/* ---- ledgers ------------------------------------------------------------------------------- */

static void ledgers_count_by_format(void **state) {
    scene s;
    (void)state;
    open_scene(&s);
    tn_ledger ledger = fixture_ledger(s.f.scope);
    assert_int_equal(ledger.format_bytes[TN_FORMAT_PLAIN], 100);
    assert_int_equal(ledger.format_bytes[TN_FORMAT_FP8_BLOCK_2D], 32800);
    assert_int_equal(ledger.format_bytes[TN_FORMAT_FP8_BLOCK_1D], 0);
    ledger = fixture_ledger(s.layer);
    assert_int_equal(ledger.format_bytes[TN_FORMAT_PLAIN], 0);
    assert_int_equal(ledger.format_bytes[TN_FORMAT_FP8_BLOCK_2D], 32800);
    EXPECT_OK(tn_tensor_move(s.bias, s.layer));
    assert_int_equal(fixture_ledger(s.layer).format_bytes[TN_FORMAT_PLAIN], 100);
    EXPECT_OK(tn_plane_drop(s.weight, TN_PLANE_COL, s.f.stream));
    assert_int_equal(fixture_ledger(s.f.scope).format_bytes[TN_FORMAT_FP8_BLOCK_2D], 16400);
    close_scene(&s);
}

static void expect_phase_peaks(tn_scope scope, size_t none, size_t forward, size_t backward) {
    tn_ledger ledger = fixture_ledger(scope);
    assert_int_equal(ledger.peak_phase_bytes[TN_PHASE_NONE], none);
    assert_int_equal(ledger.peak_phase_bytes[TN_PHASE_FORWARD], forward);
    assert_int_equal(ledger.peak_phase_bytes[TN_PHASE_BACKWARD], backward);
}

/* A scope without a phase of its own is in that of the scope above it. */
static void peaks_are_kept_by_phase(void **state) {
    scene s;
    (void)state;
    open_scene(&s);
    expect_phase_peaks(s.f.scope, 32900, 0, 0);
    EXPECT_OK(tn_scope_phase_set(s.f.scope, TN_PHASE_FORWARD, s.f.stream));
    expect_phase_peaks(s.f.scope, 32900, 32900, 0); /* what was there is there */
    expect_phase_peaks(s.layer, 32800, 32800, 0);
    EXPECT_OK(tn_plane_drop(s.weight, TN_PLANE_COL, s.f.stream));
    EXPECT_OK(tn_scope_phase_set(s.layer, TN_PHASE_BACKWARD, s.f.stream));
    expect_phase_peaks(s.layer, 32800, 32800, 16400);
    expect_phase_peaks(s.f.scope, 32900, 32900, 0);
    tn_tensor more = fixture_tensor(&s.f, TN_FORMAT_PLAIN, 1, 10000, "more");
    EXPECT_OK(tn_tensor_move(more, s.layer));
    fixture_write(more, TN_PLANE_DATA, s.f.stream);
    expect_phase_peaks(s.layer, 32800, 32800, 56400);
    expect_phase_peaks(s.f.scope, 32900, 56500, 0);
    EXPECT_OK(tn_tensor_destroy(more, s.f.stream));
    EXPECT_OK(tn_scope_ledger_reset_peaks(s.layer));
    expect_phase_peaks(s.layer, 0, 0, 16400);
    EXPECT_OK(tn_scope_phase_set(s.layer, TN_PHASE_NONE, s.f.stream));
    expect_phase_peaks(s.layer, 0, 16400, 16400);
    close_scene(&s);
}

static void expect_change(const tn_ledger *before, const tn_ledger *after, const char *expected) {
    tn_ledger_change change = TN_LEDGER_CHANGE_INIT;
    char text[256];
    EXPECT_OK(tn_ledger_diff(before, after, &change));
    assert_int_equal(change.total_bytes, (int64_t)(after->total_bytes - before->total_bytes));
    assert_int_equal(tn_ledger_change_text(&change, text, sizeof text), strlen(expected));
    assert_string_equal(text, expected);
}

static void a_difference_says_what_has_changed(void **state) {
    scene s;
    (void)state;
    open_scene(&s);
    tn_ledger first = fixture_ledger(s.f.scope);
    expect_change(&first, &first, "no change");
    EXPECT_OK(tn_plane_drop(s.weight, TN_PLANE_COL, s.f.stream));
    tn_ledger second = fixture_ledger(s.f.scope);
    expect_change(&first, &second, "-16400 bytes (COL -16384 data, -16 scales), -1 plane");
    EXPECT_OK(tn_tensor_destroy(s.bias, s.f.stream));
    tn_ledger third = fixture_ledger(s.f.scope);
    expect_change(&third, &first,
                  "+16500 bytes (DATA +100 data; COL +16384 data, +16 scales), +1 tensor, "
                  "+2 planes");
    tn_ledger_change change = TN_LEDGER_CHANGE_INIT;
    EXPECT_OK(tn_ledger_diff(&first, &third, &change));
    assert_int_equal(change.format_bytes[TN_FORMAT_PLAIN], -100);
    assert_int_equal(change.format_bytes[TN_FORMAT_FP8_BLOCK_2D], -16400);
    EXPECT_STATUS(tn_ledger_diff(NULL, &first, &change), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_ledger_diff(&first, NULL, &change), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_ledger_diff(&first, &third, NULL), TN_INVALID_ARGUMENT);
    close_scene(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_report_names_tensors_planes_and_holders),
        cmocka_unit_test(a_report_in_json_says_the_same),
        cmocka_unit_test(a_report_is_cut_where_the_room_ends),
        cmocka_unit_test(ledgers_count_by_format),
        cmocka_unit_test(peaks_are_kept_by_phase),
        cmocka_unit_test(a_difference_says_what_has_changed),
    };
    return cmocka_run_group_tests_name("api/scope_report", tests, NULL, NULL);
}
