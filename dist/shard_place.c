/* Where everything of a plan is: in shards, gathered buffers and buckets. See shard_plan.h. */
#include "shard_plan.h"

#include "host_alloc.h"

/* ---- ranges --------------------------------------------------------------------------------- */

static const tn_plane_layout *layout_of(const tn__shard_member *member, tn_plane plane) {
    return plane == member->plane ? &member->layout : &member->col;
}

static size_t item_bytes(const tn_shard_plan *plan, const tn__shard_item *item) {
    const tn_plane_layout *layout = layout_of(&plan->members[item->tensor], item->plane);
    return item->is_scale ? layout->scale_bytes : layout->data_bytes;
}

static tn__shard_range range_of_data(const tn_plane_layout *whole, const tn_plane_layout *rows,
                                     const tn__slice *slice) {
    tn__shard_range range = {.offset = slice->data_offset, .stride = whole->row_bytes};
    range.lines = slice->is_contiguous ? 1 : rows->rows;
    range.line_bytes = rows->data_bytes / (size_t)range.lines;
    return range;
}

static tn__shard_range range_of_scales(const tn_plane_layout *whole, const tn_plane_layout *rows,
                                       const tn__slice *slice, int is_last) {
    tn__shard_range range = {.lines = 1, .line_bytes = rows->scale_bytes};
    if (tn__shard_has_one_scale(whole)) {
        range.lines = is_last;
        range.kept_bytes = is_last ? 0 : rows->scale_bytes;
        return range;
    }
    range.offset = slice->scale_offset;
    if (!slice->is_scale_interleaved) return range;
    size_t scale_bytes = tn_dtype_bytes(whole->scale_dtype);
    range.lines = rows->scale_rows;
    range.line_bytes = (size_t)rows->scale_stride * scale_bytes;
    range.stride = (size_t)whole->scale_stride * scale_bytes;
    return range;
}

tn__shard_range tn__shard_range_of(const tn__shard_member *member, tn_plane plane, int is_scale,
                                   int64_t first, int64_t rows) {
    const tn_shard_tensor *spec = &member->spec;
    const tn_plane_layout *whole = layout_of(member, plane);
    int is_last = first + rows == spec->rows;
    tn_plane_layout alone;
    tn__slice slice;
    const char *why;
    if (rows == 0) return (tn__shard_range){.lines = 0};
    TN_CHECK(tn__format_slice(spec->format, spec->dtype, spec->rows, spec->cols, plane, first, rows,
                              &slice, &why));
    TN_CHECK(tn__format_layout(spec->format, spec->dtype, rows, spec->cols, plane, &alone) ==
             TN_OK);
    tn__shard_range range = is_scale ? range_of_scales(whole, &alone, &slice, is_last)
                                     : range_of_data(whole, &alone, &slice);
    size_t bytes = (size_t)range.lines * range.line_bytes;
    range.pad_bytes = tn__shard_round_up(bytes, TN__SHARD_ALIGNMENT) - bytes;
    TN_ASSERT(range.pad_bytes == 0 || is_last);
    return range;
}

static tn__shard_range range_of_item(const tn_shard_plan *plan, const tn__shard_cut *cut,
                                     const tn__shard_item *item, int rank) {
    int64_t first, rows;
    tn__shard_rows(plan, cut, item->tensor, rank, &first, &rows);
    return tn__shard_range_of(&plan->members[item->tensor], item->plane, item->is_scale, first,
                              rows);
}

/* ---- ranks ---------------------------------------------------------------------------------- */

static size_t flat_scale_bytes(const tn_shard_plan *plan) {
    size_t bytes = 0;
    for (int i = 0; i < plan->tensor_count; i++)
        bytes += tn__shard_round_up(plan->members[i].layout.scale_bytes, TN__SHARD_ALIGNMENT);
    return bytes;
}

int64_t tn__shard_packed_count(const tn_shard_tensor *spec, int64_t first, int64_t count) {
    int64_t whole = spec->rows * spec->cols;
    if (count == 0 || first + count < whole) return count;
    return (int64_t)tn__shard_round_up((size_t)whole, TN__SHARD_BUCKET_ALIGNMENT) - first;
}

static int64_t packed_elements(const tn_shard_plan *plan, const tn__shard_cut *cut, int rank) {
    int64_t sum = 0;
    for (int i = 0; i < plan->tensor_count; i++) {
        int64_t first, count;
        if (plan->members[i].bucket_offset < 0) continue;
        tn__shard_elements(plan, cut, i, rank, &first, &count);
        sum += tn__shard_packed_count(&plan->members[i].spec, first, count);
    }
    return sum;
}

static tn__shard_rank measure_flat(const tn_shard_plan *plan, const tn__shard_cut *cut) {
    tn__shard_rank out = {.sent_bytes = {cut->flat_part, cut->flat_part}};
    out.kept_offset = cut->flat_part;
    out.shard_bytes = cut->flat_part + flat_scale_bytes(plan);
    return out;
}

static tn__shard_rank measure_rows(const tn_shard_plan *plan, const tn__shard_cut *cut, int rank) {
    tn__shard_rank out = {.shard_bytes = 0};
    size_t forward_only = 0, kept = 0;
    for (int i = 0; i < plan->item_count; i++) {
        const tn__shard_item *item = &plan->items[i];
        tn__shard_range range = range_of_item(plan, cut, item, rank);
        size_t sent = tn__shard_range_bytes(&range) - range.kept_bytes;
        for (int phase = 0; phase < TN_SHARD_PHASE_COUNT; phase++)
            out.sent_bytes[phase] += item->is_in[phase] ? sent : 0;
        if (!item->is_in[TN_SHARD_BACKWARD]) forward_only += sent;
        kept += range.kept_bytes;
    }
    out.sent_offset[TN_SHARD_BACKWARD] = forward_only;
    out.kept_offset = forward_only + out.sent_bytes[TN_SHARD_BACKWARD];
    out.shard_bytes = out.kept_offset + kept;
    return out;
}

tn__shard_rank tn__shard_measure(const tn_shard_plan *plan, const tn__shard_cut *cut, int rank) {
    tn__shard_rank out =
        cut->layout == TN_SHARD_FLAT ? measure_flat(plan, cut) : measure_rows(plan, cut, rank);
    out.packed_elements = packed_elements(plan, cut, rank);
    return out;
}

/* ---- items ---------------------------------------------------------------------------------- */

static void add_item(tn_shard_plan *plan, int tensor, tn_plane plane, int is_scale, int in_forward,
                     int in_backward) {
    tn__shard_item item = {
        .tensor = tensor, .plane = plane, .is_scale = is_scale, .is_in = {in_forward, in_backward}};
    if (item_bytes(plan, &item) == 0) return;
    plan->items[plan->item_count++] = item;
}

/* Elements, then scales, of the tensors of one section of a shard. */
static void add_section(tn_shard_plan *plan, const int *order, int in_forward, int in_backward) {
    for (int is_scale = 0; is_scale < 2; is_scale++) {
        for (int i = 0; i < plan->tensor_count; i++) {
            const tn__shard_member *member = &plan->members[order[i]];
            tn_plane plane = in_forward ? member->plane : TN_PLANE_COL;
            int is_both = in_forward && in_backward;
            if (is_both != !member->has_col) continue;
            add_item(plan, order[i], plane, is_scale, in_forward, in_backward);
        }
    }
}

tn_status tn__shard_items_make(tn_shard_plan *plan, const int *order) {
    size_t room = 4 * (size_t)plan->tensor_count + 1;
    if (!plan->items) plan->items = tn__host_alloc(room, sizeof *plan->items);
    if (!plan->items) return TN_OUT_OF_HOST_MEMORY;
    plan->item_count = 0;
    add_section(plan, order, 1, 0);
    add_section(plan, order, 1, 1);
    add_section(plan, order, 0, 1);
    return TN_OK;
}

static size_t place_kind(tn_shard_plan *plan, int phase, int is_scale, size_t end) {
    size_t alignment = is_scale ? TN__SHARD_ALIGNMENT : TN__SHARD_ELEMENTS_ALIGNMENT;
    for (int i = 0; i < plan->item_count; i++) {
        tn__shard_item *item = &plan->items[i];
        if (item->is_scale != is_scale || !item->is_in[phase]) continue;
        end = tn__shard_round_up(end, alignment);
        item->gathered[phase] = end;
        end += tn__shard_round_up(item_bytes(plan, item), TN__SHARD_ALIGNMENT);
    }
    return end;
}

static void place_gathered(tn_shard_plan *plan) {
    for (int phase = 0; phase < TN_SHARD_PHASE_COUNT; phase++) {
        size_t end = place_kind(plan, phase, 1, place_kind(plan, phase, 0, 0));
        plan->info.gathered_bytes[phase] = tn__shard_round_up(end, TN__SHARD_ELEMENTS_ALIGNMENT);
    }
}

/* Elements are where members say; scales in every shard, behind its part. */
static void place_flat(tn_shard_plan *plan) {
    size_t end = plan->cut.flat_part;
    for (int i = 0; i < plan->tensor_count; i++) {
        tn__shard_member *member = &plan->members[i];
        member->flat_scale_offset = end;
        end += tn__shard_round_up(member->layout.scale_bytes, TN__SHARD_ALIGNMENT);
    }
    for (int phase = 0; phase < TN_SHARD_PHASE_COUNT; phase++) {
        for (int i = 0; i < plan->item_count; i++)
            plan->items[i].gathered[phase] = plan->members[plan->items[i].tensor].flat_offset;
        plan->info.gathered_bytes[phase] = (size_t)plan->rank_count * plan->cut.flat_part;
    }
}

/* ---- segments ------------------------------------------------------------------------------- */

/* One that goes on where the rank's last one ends is one with it. */
static tn_status add_segment(tn__segment_list *list, int rank, size_t offset, size_t count) {
    tn_segment *last = list->count ? &list->items[list->count - 1] : NULL;
    if (count == 0) return TN_OK;
    if (last && last->rank == rank && last->offset + last->count == offset) {
        last->count += count;
        return TN_OK;
    }
    if (!list->items || list->count == list->room) {
        size_t room = list->room ? 2 * list->room : 16;
        tn_segment *items = tn__host_realloc(list->items, list->room, room, sizeof *items);
        if (!items) return TN_OUT_OF_HOST_MEMORY;
        list->items = items;
        list->room = room;
    }
    list->items[list->count++] = (tn_segment){rank, offset, count};
    return TN_OK;
}

static tn_status add_range(tn_shard_plan *plan, const tn__shard_item *item, int phase, int rank) {
    tn__segment_list *list = &plan->segments[phase];
    tn__shard_range range = range_of_item(plan, &plan->cut, item, rank);
    size_t begin = item->gathered[phase];
    for (int64_t line = 0; line < range.lines; line++) {
        size_t offset = begin + range.offset + (size_t)line * range.stride;
        TN_TRY(add_segment(list, rank, offset, range.line_bytes));
    }
    return add_segment(list, rank, begin + item_bytes(plan, item), range.pad_bytes);
}

static tn_status add_phase(tn_shard_plan *plan, int phase, int rank) {
    if (plan->cut.layout == TN_SHARD_FLAT) {
        size_t part = plan->cut.flat_part;
        return add_segment(&plan->segments[phase], rank, (size_t)rank * part, part);
    }
    for (int i = 0; i < plan->item_count; i++) {
        if (plan->items[i].is_in[phase]) TN_TRY(add_range(plan, &plan->items[i], phase, rank));
    }
    return TN_OK;
}

static tn_status add_to_bucket(tn_shard_plan *plan, int rank) {
    for (int i = 0; i < plan->tensor_count; i++) {
        int tensor = plan->cut.order[i];
        const tn__shard_member *member = &plan->members[tensor];
        int64_t first, count;
        if (member->bucket_offset < 0) continue;
        tn__shard_elements(plan, &plan->cut, tensor, rank, &first, &count);
        count = tn__shard_packed_count(&member->spec, first, count);
        TN_TRY(add_segment(&plan->bucket, rank, (size_t)(member->bucket_offset + first),
                           (size_t)count));
    }
    return TN_OK;
}

static void place_bucket(tn_shard_plan *plan) {
    size_t end = 0;
    for (int i = 0; i < plan->tensor_count; i++) {
        tn__shard_member *member = &plan->members[plan->cut.order[i]];
        int64_t elements = member->spec.rows * member->spec.cols;
        if (member->spec.frozen) continue;
        member->bucket_offset = (int64_t)end;
        end += tn__shard_round_up((size_t)elements, TN__SHARD_BUCKET_ALIGNMENT);
    }
    plan->info.bucket_elements = (int64_t)end;
}

static void note_rank(tn_shard_plan *plan, int rank) {
    const tn__shard_rank *of_rank = &plan->ranks[rank];
    if (of_rank->shard_bytes > plan->info.shard_bytes_max)
        plan->info.shard_bytes_max = of_rank->shard_bytes;
    if (of_rank->packed_elements > plan->info.packed_elements_max)
        plan->info.packed_elements_max = of_rank->packed_elements;
}

tn_status tn__shard_place(tn_shard_plan *plan) {
    TN_TRY(tn__shard_items_make(plan, plan->cut.order));
    plan->ranks = tn__host_alloc((size_t)plan->rank_count, sizeof *plan->ranks);
    if (!plan->ranks) return TN_OUT_OF_HOST_MEMORY;
    if (plan->cut.layout == TN_SHARD_FLAT)
        place_flat(plan);
    else
        place_gathered(plan);
    place_bucket(plan);
    for (int rank = 0; rank < plan->rank_count; rank++) {
        plan->ranks[rank] = tn__shard_measure(plan, &plan->cut, rank);
        note_rank(plan, rank);
        for (int phase = 0; phase < TN_SHARD_PHASE_COUNT; phase++)
            TN_TRY(add_phase(plan, phase, rank));
        TN_TRY(add_to_bucket(plan, rank));
    }
    return TN_OK;
}

/* ---- offsets in a shard --------------------------------------------------------------------- */

static int64_t flat_item_offset(const tn_shard_plan *plan, int rank, int tensor, tn_plane plane,
                                int is_scale) {
    const tn__shard_member *member = &plan->members[tensor];
    size_t first, bytes;
    if (plane != member->plane) return -1;
    if (is_scale) return member->layout.scale_bytes ? (int64_t)member->flat_scale_offset : -1;
    tn__shard_flat_bytes(plan, &plan->cut, tensor, rank, &first, &bytes);
    if (bytes == 0) return -1;
    return (int64_t)(member->flat_offset + first - (size_t)rank * plan->cut.flat_part);
}

int64_t tn__shard_item_offset(const tn_shard_plan *plan, int rank, int tensor, tn_plane plane,
                              int is_scale) {
    size_t sent = 0, kept = plan->ranks[rank].kept_offset;
    if (plan->cut.layout == TN_SHARD_FLAT)
        return flat_item_offset(plan, rank, tensor, plane, is_scale);
    for (int i = 0; i < plan->item_count; i++) {
        const tn__shard_item *item = &plan->items[i];
        tn__shard_range range = range_of_item(plan, &plan->cut, item, rank);
        if (item->tensor == tensor && item->plane == plane && item->is_scale == is_scale) {
            if (range.lines > 0) return (int64_t)sent;
            return range.kept_bytes > 0 ? (int64_t)kept : -1;
        }
        sent += tn__shard_range_bytes(&range) - range.kept_bytes;
        kept += range.kept_bytes;
    }
    return -1;
}
