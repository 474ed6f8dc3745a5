/* What each layout costs a unit, and which one it gets: see tn_shard_cost. */
#include "shard_plan.h"

enum { MILLION = 1000000, NS_PER_US = 1000, MIB = 1 << 20 };

/* Products of bytes and prices do not fit 64 bits; what does not fit at last is the most. */
static uint64_t scaled(uint64_t amount, uint64_t by, uint64_t per) {
    unsigned __int128 result = (unsigned __int128)amount * by / per;
    return result > UINT64_MAX ? UINT64_MAX : (uint64_t)result;
}

static uint64_t sum_of(uint64_t a, uint64_t b) {
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

int64_t tn__shard_amax_count(const tn__shard_member *member, tn_shard_layout layout) {
    const tn_plane_layout *plane = &member->layout;
    if (tn__shard_has_one_scale(plane)) return 1;
    if (plane->scale_bytes == 0 || layout != TN_SHARD_FLAT) return 0;
    return plane->scale_rows * plane->scale_cols;
}

static uint64_t unit_bytes(const tn_shard_plan *plan) {
    uint64_t sum = 0;
    for (int i = 0; i < plan->tensor_count; i++) {
        const tn__shard_member *member = &plan->members[i];
        uint64_t row = member->layout.data_bytes + member->layout.scale_bytes;
        uint64_t col = member->col.data_bytes + member->col.scale_bytes;
        sum += member->has_col ? row + col : 2 * row;
    }
    return sum;
}

/* Scales that are on every rank are not gathered. */
static uint64_t flat_unit_bytes(const tn_shard_plan *plan) {
    uint64_t sum = 0;
    for (int i = 0; i < plan->tensor_count; i++)
        sum += 2 * plan->members[i].layout.data_bytes;
    return sum;
}

static void add_amaxes(const tn_shard_plan *plan, tn_shard_cost *cost, tn_shard_layout layout) {
    uint64_t ranks = (uint64_t)plan->rank_count, count = 0;
    for (int i = 0; i < plan->tensor_count; i++) {
        if (!plan->members[i].spec.frozen)
            count += tn__shard_round_up((size_t)tn__shard_amax_count(&plan->members[i], layout),
                                        TN__SHARD_AMAX_ALIGNMENT);
    }
    if (count == 0) return;
    cost->wire_bytes += 2 * (ranks - 1) * ((count + ranks - 1) / ranks) * sizeof(float);
    cost->copy_bytes += 2 * count * sizeof(float);
    cost->collectives++;
}

static void price(const tn_shard_costs *prices, tn_shard_cost *cost) {
    uint64_t sum = scaled(cost->collectives, prices->latency_ns, 1);
    if (prices->wire_bytes_per_us)
        sum = sum_of(sum, scaled(cost->wire_bytes, NS_PER_US, prices->wire_bytes_per_us));
    if (prices->memory_bytes_per_us)
        sum = sum_of(sum, scaled(cost->copy_bytes, NS_PER_US, prices->memory_bytes_per_us));
    sum = sum_of(sum, scaled(cost->shard_bytes_max, prices->memory_ns_per_mib, MIB));
    cost->cost_ns = sum;
}

static void measure(tn_shard_plan *plan, const tn__shard_cut *cut) {
    tn_shard_cost *cost = &plan->costs[cut->layout];
    uint64_t ranks = (uint64_t)plan->rank_count;
    cost->is_possible = 1;
    cost->unit_bytes = cut->layout == TN_SHARD_FLAT ? flat_unit_bytes(plan) : unit_bytes(plan);
    for (int rank = 0; rank < plan->rank_count; rank++) {
        tn__shard_rank of_rank = tn__shard_measure(plan, cut, rank);
        uint64_t sent =
            of_rank.sent_bytes[TN_SHARD_FORWARD] + of_rank.sent_bytes[TN_SHARD_BACKWARD];
        if (sent > cost->largest_bytes) cost->largest_bytes = sent;
        if (of_rank.shard_bytes > cost->shard_bytes_max)
            cost->shard_bytes_max = of_rank.shard_bytes;
    }
    if (cost->unit_bytes) {
        uint64_t padding = ranks * cost->largest_bytes - cost->unit_bytes;
        cost->padding_ppm = scaled(padding, MILLION, cost->unit_bytes);
        cost->collectives = TN_SHARD_PHASE_COUNT;
    }
    cost->wire_bytes = (ranks - 1) * cost->largest_bytes;
    add_amaxes(plan, cost, cut->layout);
    price(&plan->prices, cost);
}

/* ---- the choice ----------------------------------------------------------------------------- */

static tn_shard_layout choice_of(const tn_shard_plan *plan) {
    int has_flat = plan->costs[TN_SHARD_FLAT].is_possible;
    tn_shard_layout best = TN_SHARD_TILES;
    if (plan->asked != TN_SHARD_AUTO) return plan->asked;
    if (!tn__shard_has_prices(plan)) {
        if (tn__shard_is_even(plan)) return TN_SHARD_TILES;
        return has_flat ? TN_SHARD_FLAT : TN_SHARD_RAGGED;
    }
    for (int i = TN_SHARD_RAGGED; i < TN_SHARD_LAYOUT_COUNT; i++) {
        if (plan->costs[i].is_possible && plan->costs[i].cost_ns < plan->costs[best].cost_ns)
            best = (tn_shard_layout)i;
    }
    return best;
}

static tn_status measure_layout(tn_shard_plan *plan, tn_shard_layout layout) {
    tn__shard_cut cut;
    if (layout == TN_SHARD_FLAT && plan->flat_obstacle >= 0) return TN_OK;
    tn_status status = tn__shard_cut_make(plan, layout, &cut);
    if (status == TN_OK) status = tn__shard_items_make(plan, cut.order);
    if (status == TN_OK) measure(plan, &cut);
    tn__shard_cut_end(&cut);
    return status;
}

tn_status tn__shard_choose(tn_shard_plan *plan) {
    for (int i = 0; i < TN_SHARD_LAYOUT_COUNT; i++)
        plan->costs[i] = (tn_shard_cost)TN_SHARD_COST_INIT;
    for (int i = TN_SHARD_TILES; i < TN_SHARD_LAYOUT_COUNT; i++)
        TN_TRY(measure_layout(plan, (tn_shard_layout)i));
    return tn__shard_cut_make(plan, choice_of(plan), &plan->cut);
}
