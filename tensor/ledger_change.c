/* The difference between two readings of ledgers, and its line of text. */
#include "tenure_lifetime.h"

#include "text_sink.h"

#include <inttypes.h>

static int64_t difference(size_t before, size_t after) { return (int64_t)(after - before); }

static int64_t count_difference(uint64_t before, uint64_t after) {
    return (int64_t)(after - before);
}

tn_status tn_ledger_diff(const tn_ledger *before, const tn_ledger *after, tn_ledger_change *out) {
    TN_REQUIRE(before && before->size == sizeof *before,
               "tn_ledger_diff: before is not a ledger (TN_LEDGER_INIT)");
    TN_REQUIRE(after && after->size == sizeof *after,
               "tn_ledger_diff: after is not a ledger (TN_LEDGER_INIT)");
    TN_REQUIRE(out && out->size == sizeof *out, "tn_ledger_diff: out is not TN_LEDGER_CHANGE_INIT");
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        out->data_bytes[i] = difference(before->data_bytes[i], after->data_bytes[i]);
        out->scale_bytes[i] = difference(before->scale_bytes[i], after->scale_bytes[i]);
    }
    for (int i = 0; i < TN_FORMAT_COUNT; i++)
        out->format_bytes[i] = difference(before->format_bytes[i], after->format_bytes[i]);
    out->total_bytes = difference(before->total_bytes, after->total_bytes);
    out->foreign_bytes = difference(before->foreign_bytes, after->foreign_bytes);
    out->tensors = count_difference(before->tensors, after->tensors);
    out->planes = count_difference(before->planes, after->planes);
    out->leases = count_difference(before->leases, after->leases);
    return TN_OK;
}

/* ---- text ---------------------------------------------------------------------------------- */

static void add_separator(tn__text *out) {
    if (out->used > 0) tn__text_add(out, ", ");
}

static void add_count(tn__text *out, int64_t count, const char *noun) {
    if (count == 0) return;
    add_separator(out);
    tn__text_add(out, "%+" PRId64 " %s%s", count, noun, count == 1 || count == -1 ? "" : "s");
}

static void add_plane(tn__text *out, const tn_ledger_change *change, int plane, int *is_first) {
    int64_t data = change->data_bytes[plane], scales = change->scale_bytes[plane];
    if (data == 0 && scales == 0) return;
    tn__text_add(out, "%s%s", *is_first ? " (" : "; ", tn_plane_name((tn_plane)plane));
    if (data != 0) tn__text_add(out, " %+" PRId64 " data", data);
    if (scales != 0) tn__text_add(out, "%s %+" PRId64 " scales", data != 0 ? "," : "", scales);
    *is_first = 0;
}

static void add_bytes(tn__text *out, const tn_ledger_change *change) {
    int is_first = 1, has_any = change->total_bytes != 0;
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++)
        has_any |= change->data_bytes[plane] != 0 || change->scale_bytes[plane] != 0;
    if (!has_any) return;
    tn__text_add(out, "%+" PRId64 " bytes", change->total_bytes);
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++)
        add_plane(out, change, plane, &is_first);
    if (!is_first) tn__text_add(out, ")");
}

size_t tn_ledger_change_text(const tn_ledger_change *change, char *text, size_t text_bytes) {
    tn__text out = tn__text_begin(text, text_bytes);
    if (!change || change->size != sizeof *change) return 0;
    add_bytes(&out, change);
    add_count(&out, change->foreign_bytes, "foreign byte");
    add_count(&out, change->tensors, "tensor");
    add_count(&out, change->planes, "plane");
    add_count(&out, change->leases, "lease");
    if (out.used == 0) tn__text_add(&out, "no change");
    return out.used;
}
