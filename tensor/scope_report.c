/* tn_scope_report: a scope and all below it, as text or JSON.
 *
 * Written under the books' lock straight into the caller's memory, so that it is of one moment and
 * allocates nothing; the same walk serves both forms. Parents come before what is in them, older
 * before newer. The call that began a lease is an address: looking up its name would take the
 * dynamic linker's lock, which may be held by who waits for ours.
 */
#include "tenure_lifetime.h"

#include "books.h"
#include "text_sink.h"

#include <inttypes.h>

typedef struct report {
    tn__text out;
    int is_json;
    const tn__scope_object *root;
    int is_first_scope;
} report;

/* ---- order --------------------------------------------------------------------------------- */

/* Lists have the newest first. */
static const tn__scope_object *oldest_child(const tn__scope_object *scope) {
    const tn__scope_object *child = scope->first_child;
    while (child && child->next)
        child = child->next;
    return child;
}

static const tn__scope_object *next_scope(const tn__scope_object *scope,
                                          const tn__scope_object *root) {
    const tn__scope_object *child = oldest_child(scope);
    if (child) return child;
    for (; scope != root; scope = scope->parent) {
        if (scope->previous) return scope->previous;
    }
    return NULL;
}

static const tn__tensor_object *oldest_tensor(const tn__scope_object *scope) {
    const tn__tensor_object *tensor = scope->first_tensor;
    while (tensor && tensor->next)
        tensor = tensor->next;
    return tensor;
}

static int depth_of(const tn__scope_object *scope, const tn__scope_object *root) {
    int depth = 0;
    for (; scope != root; scope = scope->parent)
        depth++;
    return depth;
}

/* ---- words --------------------------------------------------------------------------------- */

static const char *kind_name(const tn__plane_object *plane) {
    static const char *const names[] = {"owned", "slot", "foreign", "host"};
    size_t kind = (size_t)plane->kind;
    return kind < sizeof names / sizeof *names ? names[kind] : "other";
}

static const char *scope_kind_name(tn_scope_kind kind) {
    static const char *const names[] = {"process", "model", "step", "layer", "op", "saved"};
    return names[kind];
}

static size_t bytes_of(const tn__scope_object *scope) {
    size_t bytes = 0;
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++)
        bytes += scope->sums.data_bytes[plane] + scope->sums.scale_bytes[plane];
    return bytes;
}

static void add_site(tn__text *out, const char *site) {
    if (site[0]) tn__text_add(out, ", made at %s", site);
}

/* ---- text ---------------------------------------------------------------------------------- */

static void lease_text(tn__text *out, int indent, const tn__lease_object *lease) {
    tn__text_add(out, "%*s%s lease on stream %p, begun by the call at %p%s\n", indent, "",
                 tn__access_name(lease->access), lease->stream, lease->caller,
                 lease->is_export ? ", exported through DLPack" : "");
}

static void plane_text(tn__text *out, int indent, const tn__tensor_object *tensor, int plane) {
    const tn__plane_object *object = &tensor->planes[plane];
    tn__text_add(out, "%*splane %s: %s, %zu + %zu bytes", indent, "",
                 tn_plane_name((tn_plane)plane), tn__plane_state_name(object->state),
                 object->bytes[TN__PART_DATA], object->bytes[TN__PART_SCALE]);
    if (object->kind != TN__MEMORY_OWNED) tn__text_add(out, ", %s memory", kind_name(object));
    if (object->is_derived) tn__text_add(out, ", derived");
    if (object->replaced) tn__text_add(out, ", being replaced");
    tn__text_add(out, "\n");
    for (const tn__lease_object *lease = object->first_lease; lease; lease = lease->next)
        lease_text(out, indent + 2, lease);
}

static void tensor_text(tn__text *out, int indent, const tn__tensor_object *tensor) {
    tn__text_add(out, "%*stensor %s: %s, %s", indent, "", tensor->name,
                 tn_format_name(tensor->format), tn_dtype_name(tensor->dtype));
    for (int i = 0; i < tensor->rank; i++)
        tn__text_add(out, "%s%" PRId64, i ? " x " : ", ", tensor->shape[i]);
    tn__text_add(out, ", policy %s", tn_policy_name(tn__tensor_policy(tensor)));
    if (tensor->is_frozen) tn__text_add(out, ", frozen");
    if (tensor->is_saved) tn__text_add(out, ", saved");
    add_site(out, tensor->site);
    tn__text_add(out, "\n");
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        if (tensor->planes[plane].state != TN_PLANE_ABSENT)
            plane_text(out, indent + 2, tensor, plane);
    }
}

static void scope_text(report *self, const tn__scope_object *scope) {
    tn__text *out = &self->out;
    int indent = 2 * depth_of(scope, self->root);
    tn__text_add(out,
                 "%*sscope %s (%s): %zu bytes, %" PRIu64 " tensor%s, %" PRIu64 " lease%s, phase %s",
                 indent, "", scope->name, scope_kind_name(scope->kind), bytes_of(scope),
                 scope->sums.tensors, scope->sums.tensors == 1 ? "" : "s", scope->sums.leases,
                 scope->sums.leases == 1 ? "" : "s", tn_phase_name(tn__scope_phase(scope)));
    if (scope->sums.foreign_bytes > 0)
        tn__text_add(out, ", %zu foreign bytes", scope->sums.foreign_bytes);
    if (scope->sums.offloaded_bytes > 0)
        tn__text_add(out, ", %zu bytes offloaded", scope->sums.offloaded_bytes);
    add_site(out, scope->site);
    tn__text_add(out, "\n");
    for (const tn__tensor_object *tensor = oldest_tensor(scope); tensor; tensor = tensor->previous)
        tensor_text(out, indent + 2, tensor);
}

/* ---- JSON ---------------------------------------------------------------------------------- */

static void add_member(tn__text *out, const char *name, const char *text) {
    tn__text_add(out, ", \"%s\": ", name);
    tn__text_add_json(out, text);
}

static void lease_json(tn__text *out, const tn__lease_object *lease) {
    tn__text_add(out, "{\"access\": \"%s\", \"stream\": \"%p\", \"stream_id\": %" PRIu64,
                 tn__access_name(lease->access), lease->stream,
                 lease->stream_id & ~TN__STREAM_ID_MAY_GO);
    tn__text_add(out, ", \"caller\": \"%p\", \"exported\": %s}", lease->caller,
                 lease->is_export ? "true" : "false");
}

static void plane_json(tn__text *out, const tn__tensor_object *tensor, int plane) {
    const tn__plane_object *object = &tensor->planes[plane];
    int is_first = 1;
    tn__text_add(out, "{\"plane\": \"%s\", \"state\": \"%s\", \"data_bytes\": %zu",
                 tn_plane_name((tn_plane)plane), tn__plane_state_name(object->state),
                 object->bytes[TN__PART_DATA]);
    tn__text_add(out,
                 ", \"scale_bytes\": %zu, \"memory\": \"%s\", \"derived\": %s, "
                 "\"replaced\": %s, \"leases\": [",
                 object->bytes[TN__PART_SCALE], kind_name(object),
                 object->is_derived ? "true" : "false", object->replaced ? "true" : "false");
    for (const tn__lease_object *lease = object->first_lease; lease; lease = lease->next) {
        tn__text_next_item(out, &is_first, "          ");
        lease_json(out, lease);
    }
    tn__text_add(out, "]}");
}

static void tensor_json(tn__text *out, const tn__tensor_object *tensor) {
    int is_first = 1;
    tn__text_add(out, "{\"tensor\": ");
    tn__text_add_json(out, tensor->name);
    add_member(out, "format", tn_format_name(tensor->format));
    add_member(out, "dtype", tn_dtype_name(tensor->dtype));
    tn__text_add(out, ", \"shape\": [");
    for (int i = 0; i < tensor->rank; i++)
        tn__text_add(out, "%s%" PRId64, i ? ", " : "", tensor->shape[i]);
    tn__text_add(out, "]");
    add_member(out, "policy", tn_policy_name(tn__tensor_policy(tensor)));
    add_member(out, "site", tensor->site);
    tn__text_add(out, ", \"frozen\": %s, \"saved\": %s, \"planes\": [",
                 tensor->is_frozen ? "true" : "false", tensor->is_saved ? "true" : "false");
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        if (tensor->planes[plane].state == TN_PLANE_ABSENT) continue;
        tn__text_next_item(out, &is_first, "        ");
        plane_json(out, tensor, plane);
    }
    tn__text_add(out, "]}");
}

static void scope_json(report *self, const tn__scope_object *scope) {
    tn__text *out = &self->out;
    int is_first = 1;
    tn__text_next_item(out, &self->is_first_scope, "    ");
    tn__text_add(out, "{\"scope\": ");
    tn__text_add_json(out, scope->name);
    add_member(out, "kind", scope_kind_name(scope->kind));
    add_member(out, "phase", tn_phase_name(tn__scope_phase(scope)));
    add_member(out, "site", scope->site);
    tn__text_add(out,
                 ", \"depth\": %d, \"bytes\": %zu, \"peak_bytes\": %zu, \"foreign_bytes\": %zu"
                 ", \"offloaded_bytes\": %zu",
                 depth_of(scope, self->root), bytes_of(scope), scope->peak_total_bytes,
                 scope->sums.foreign_bytes, scope->sums.offloaded_bytes);
    tn__text_add(out, ", \"tensor_count\": %" PRIu64 ", \"lease_count\": %" PRIu64,
                 scope->sums.tensors, scope->sums.leases);
    tn__text_add(out, ", \"tensors\": [");
    const tn__tensor_object *tensor = oldest_tensor(scope);
    for (; tensor; tensor = tensor->previous) {
        tn__text_next_item(out, &is_first, "      ");
        tensor_json(out, tensor);
    }
    tn__text_add(out, "]}");
}

/* ---- the whole ----------------------------------------------------------------------------- */

size_t tn_scope_report(tn_scope scope, tn_report_format format, char *text, size_t text_bytes) {
    tn__scope_object *root = NULL;
    if (format != TN_REPORT_TEXT && format != TN_REPORT_JSON) return 0;
    report self = {.is_json = format == TN_REPORT_JSON, .is_first_scope = 1};
    self.out = tn__text_begin(text, text_bytes);
    if (tn__scope_acquire(scope, &root) != TN_OK) return 0;
    unsigned lock = root->books->lock;
    self.root = root;
    if (self.is_json)
        tn__text_add(&self.out, "{\"format\": \"tenure scope report 1\", \"scopes\": [");
    for (const tn__scope_object *at = root; at; at = next_scope(at, root)) {
        if (self.is_json)
            scope_json(&self, at);
        else
            scope_text(&self, at);
    }
    if (self.is_json) tn__text_add(&self.out, "]}\n");
    tn__unlock(lock);
    return self.out.used;
}
