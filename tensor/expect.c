/* Expectations of the tests of those who use the library: see tenure_lifetime.h.
 *
 * Each reads through the public functions, so that no lock is held when the handler runs: it may
 * leave by longjmp.
 */
#include "tenure_lifetime.h"

#include "tensor_state.h"
#include "text_sink.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static struct {
    tn_expect_handler handler; /* NULL: print and abort */
    void *context;
} chosen;

void tn_expect_handler_set(tn_expect_handler handler, void *context) {
    chosen.handler = handler;
    chosen.context = context;
}

/* ---- what does not hold --------------------------------------------------------------------- */

enum { WORDS_BYTES = 512, TEXT_BYTES = 16384 };

/* Kept for each thread, since a handler may not come back. */
static _Thread_local char full_text[TEXT_BYTES];

static int fail(tn_scope scope, const char *site, const char *format, ...) TN_PRINTF(3, 4);

static int fail(tn_scope scope, const char *site, const char *format, ...) {
    char words[WORDS_BYTES];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(words, sizeof words, format, args);
    va_end(args);
    tn__text out = tn__text_begin(full_text, sizeof full_text);
    tn__text_add(&out, "%s: %s\n", site ? site : "an expectation", words);
    size_t room = out.used < sizeof full_text ? sizeof full_text - out.used : 0;
    if (room > 0) (void)tn_scope_report(scope, TN_REPORT_TEXT, full_text + out.used, room);
    if (!chosen.handler) {
        fputs(full_text, stderr);
        abort();
    }
    chosen.handler(chosen.context, full_text);
    return 0;
}

static int fail_call(const char *site, const char *expectation) {
    return fail((tn_scope){0}, site, "%s: %s", expectation, tn_error_last());
}

/* ---- expectations --------------------------------------------------------------------------- */

int tn_expect_live_bytes(tn_scope scope, size_t bytes, const char *site) {
    tn_ledger ledger = TN_LEDGER_INIT;
    if (tn_scope_ledger(scope, &ledger) != TN_OK) return fail_call(site, "TN_EXPECT_LIVE_BYTES");
    if (ledger.total_bytes == bytes) return 1;
    return fail(scope, site, "TN_EXPECT_LIVE_BYTES: expected %zu bytes, found %zu", bytes,
                ledger.total_bytes);
}

int tn_expect_plane_bytes(tn_scope scope, tn_plane plane, size_t bytes, const char *site) {
    tn_ledger ledger = TN_LEDGER_INIT;
    if (tn_scope_ledger(scope, &ledger) != TN_OK) return fail_call(site, "TN_EXPECT_PLANE_BYTES");
    int is_known = (int)plane >= 0 && plane < TN_PLANE_COUNT;
    size_t found = is_known ? ledger.data_bytes[plane] + ledger.scale_bytes[plane] : 0;
    if (is_known && found == bytes) return 1;
    return fail(scope, site, "TN_EXPECT_PLANE_BYTES: expected %zu bytes of plane %s, found %zu",
                bytes, tn_plane_name(plane), found);
}

int tn_expect_plane_state(tn_tensor tensor, tn_plane plane, tn_plane_state state,
                          const char *site) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_plane_state found = TN_PLANE_ABSENT;
    if (tn_tensor_info_get(tensor, &info) != TN_OK ||
        tn_plane_state_get(tensor, plane, &found) != TN_OK) {
        return fail_call(site, "TN_EXPECT_PLANE_STATE");
    }
    if (found == state) return 1;
    return fail(info.scope, site,
                "TN_EXPECT_PLANE_STATE: expected tensor %s, plane %s to be %s, found %s", info.name,
                tn_plane_name(plane), tn__plane_state_name(state), tn__plane_state_name(found));
}

int tn_expect_no_leases(tn_scope scope, const char *site) {
    tn_ledger ledger = TN_LEDGER_INIT;
    if (tn_scope_ledger(scope, &ledger) != TN_OK) return fail_call(site, "TN_EXPECT_NO_LEASES");
    if (ledger.leases == 0) return 1;
    return fail(scope, site, "TN_EXPECT_NO_LEASES: expected no open lease, found %" PRIu64,
                ledger.leases);
}

int tn_expect_growth(tn_scope scope, const tn_ledger *before, int64_t growth, const char *site) {
    tn_ledger after = TN_LEDGER_INIT;
    tn_ledger_change change = TN_LEDGER_CHANGE_INIT;
    char found[WORDS_BYTES / 2];
    if (tn_scope_ledger(scope, &after) != TN_OK ||
        tn_ledger_diff(before, &after, &change) != TN_OK) {
        return fail_call(site, "TN_EXPECT_GROWTH");
    }
    int holds = change.total_bytes == growth;
    if (growth == 0) holds = holds && change.tensors == 0 && change.leases == 0;
    if (holds) return 1;
    (void)tn_ledger_change_text(&change, found, sizeof found);
    return fail(scope, site, "TN_EXPECT_GROWTH: expected %+" PRId64 " bytes, found %s", growth,
                found);
}
