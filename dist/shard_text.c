/* A plan in words, and the hash that ranks compare. */
#include "shard_plan.h"

#include <string.h>

#include "text_sink.h"

/* ---- hash ----------------------------------------------------------------------------------- */

/* FNV-1a over bytes, in an order of bytes that is not the machine's, then mixed so that every bit
 * of what went in last reaches all bits of the result. */
typedef struct hash {
    uint64_t value;
} hash;

static void add_bytes(hash *h, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        h->value = (h->value ^ ((const unsigned char *)bytes)[i]) * UINT64_C(0x100000001b3);
}

static void add_number(hash *h, uint64_t number) {
    unsigned char bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(number >> (8 * i));
    add_bytes(h, bytes, sizeof bytes);
}

static void add_name(hash *h, const char *name) {
    add_number(h, strlen(name));
    add_bytes(h, name, strlen(name));
}

static void add_segments(hash *h, const tn__segment_list *list) {
    add_number(h, list->count);
    for (size_t i = 0; i < list->count; i++) {
        add_number(h, (uint64_t)list->items[i].rank);
        add_number(h, list->items[i].offset);
        add_number(h, list->items[i].count);
    }
}

static void add_member(hash *h, const tn__shard_member *member) {
    const tn_shard_tensor *spec = &member->spec;
    add_name(h, member->name);
    add_number(h, (uint64_t)spec->format);
    add_number(h, (uint64_t)spec->dtype);
    add_number(h, (uint64_t)spec->scale_mode);
    add_number(h, (uint64_t)spec->rows);
    add_number(h, (uint64_t)spec->cols);
    add_number(h, (uint64_t)spec->frozen);
}

static uint64_t finished(hash h) {
    uint64_t value = h.value;
    value = (value ^ (value >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ (value >> 27)) * UINT64_C(0x94d049bb133111eb);
    return value ^ (value >> 31);
}

uint64_t tn__shard_hash(const tn_shard_plan *plan) {
    hash h = {UINT64_C(0xcbf29ce484222325)};
    add_name(&h, plan->name);
    add_number(&h, (uint64_t)plan->rank_count);
    add_number(&h, (uint64_t)plan->cut.layout);
    add_number(&h, (uint64_t)plan->tensor_count);
    for (int i = 0; i < plan->tensor_count; i++)
        add_member(&h, &plan->members[i]);
    for (int phase = 0; phase < TN_SHARD_PHASE_COUNT; phase++)
        add_segments(&h, &plan->segments[phase]);
    add_segments(&h, &plan->bucket);
    add_number(&h, (uint64_t)plan->info.amax_count);
    return finished(h);
}

/* ---- words ---------------------------------------------------------------------------------- */

static const char *reason_of(const tn_shard_plan *plan) {
    if (plan->asked != TN_SHARD_AUTO) return "asked for";
    if (tn__shard_has_prices(plan)) return "it costs least";
    switch (plan->cut.layout) {
    case TN_SHARD_TILES: return "every tensor comes out even";
    case TN_SHARD_FLAT: return "tile rows do not come out even";
    default: return "tile rows do not come out even, and flat is not possible";
    }
}

static void add_costs(tn__text *out, const tn_shard_plan *plan) {
    for (int i = TN_SHARD_TILES; i < TN_SHARD_LAYOUT_COUNT; i++) {
        const tn_shard_cost *cost = &plan->costs[i];
        const char *name = tn_shard_layout_name((tn_shard_layout)i);
        if (!cost->is_possible) {
            const tn__shard_member *member = &plan->members[plan->flat_obstacle];
            tn__text_add(out,
                         "  %-6s  not possible: tensor %s is %s, whose blocks can not be cut\n",
                         name, member->name, tn_format_name(member->spec.format));
            continue;
        }
        tn__text_add(
            out,
            "  %-6s  padding %llu.%04llu %%, %llu bytes sent, %llu copied, shards of up to "
            "%llu bytes, %llu ns\n",
            name, (unsigned long long)(cost->padding_ppm / 10000),
            (unsigned long long)(cost->padding_ppm % 10000), (unsigned long long)cost->wire_bytes,
            (unsigned long long)cost->copy_bytes, (unsigned long long)cost->shard_bytes_max,
            (unsigned long long)cost->cost_ns);
    }
}

static void add_tensors(tn__text *out, const tn_shard_plan *plan) {
    for (int i = 0; i < plan->tensor_count; i++) {
        const tn__shard_member *member = &plan->members[plan->cut.order[i]];
        const tn_shard_tensor *spec = &member->spec;
        tn__text_add(out, "  tensor %s: %s %s %lld x %lld%s, gathered: %s%s\n", member->name,
                     tn_format_name(spec->format), tn_dtype_name(spec->dtype),
                     (long long)spec->rows, (long long)spec->cols, spec->frozen ? ", frozen" : "",
                     tn_plane_name(member->plane), member->has_col ? ", in backward COL" : "");
    }
}

/* Ranks that have alike are one line. */
static void add_ranks(tn__text *out, const tn_shard_plan *plan) {
    for (int first = 0, next; first < plan->rank_count; first = next) {
        const tn__shard_rank *rank = &plan->ranks[first];
        for (next = first + 1; next < plan->rank_count; next++) {
            if (plan->ranks[next].shard_bytes != rank->shard_bytes ||
                plan->ranks[next].packed_elements != rank->packed_elements)
                break;
        }
        tn__text_add(out, "  rank %d", first);
        if (next > first + 1) tn__text_add(out, " to %d", next - 1);
        tn__text_add(out, ": %zu bytes, %lld elements that are trained\n", rank->shard_bytes,
                     (long long)rank->packed_elements);
    }
}

size_t tn_shard_plan_text(const tn_shard_plan *plan, char *text, size_t text_bytes) {
    tn__text out = tn__text_begin(text, text_bytes);
    if (!plan) return 0;
    const tn_shard_plan_info *info = &plan->info;
    tn__text_add(&out, "unit %s on %d ranks: %s (%s), hash %016llx\n", plan->name, plan->rank_count,
                 tn_shard_layout_name(info->layout), reason_of(plan),
                 (unsigned long long)info->hash);
    tn__text_add(&out, "  gathered: %zu bytes in forward, %zu in backward; %lld amaxes reduced\n",
                 info->gathered_bytes[TN_SHARD_FORWARD], info->gathered_bytes[TN_SHARD_BACKWARD],
                 (long long)info->amax_count_trained);
    add_costs(&out, plan);
    add_tensors(&out, plan);
    add_ranks(&out, plan);
    return out.used;
}
