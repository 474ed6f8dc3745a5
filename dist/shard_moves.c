/* Shards of one count of ranks made those of another: tn_shard_moves.
 *
 * Both plans say which bytes of each item (shard_plan.h) a rank holds; what two ranks hold both of
 * is a move. Nothing is cast again. Where the rows of a piece lie strided in it (the transposed
 * plane of blocks of vectors, and its scales), a move has a line for each stored row.
 *
 * Invariant: each byte of every shard of `to`, but for padding, is the target of one move, and it
 * comes from the rank itself if that has it.
 */
#include "host_alloc.h"
#include "shard_moves.h"
#include "shard_plan.h"

/* ---- lists ---------------------------------------------------------------------------------- */

static tn_status add_move(tn__move_list *list, const tn_shard_move *move) {
    if (!list->items || list->count == list->room) {
        size_t room = list->room ? 2 * list->room : 64;
        tn_shard_move *items = tn__host_realloc(list->items, list->room, room, sizeof *items);
        if (!items) return TN_OUT_OF_HOST_MEMORY;
        list->items = items;
        list->room = room;
    }
    list->items[list->count++] = *move;
    return TN_OK;
}

/* ---- what ranks hold ------------------------------------------------------------------------ */

/* Bytes (or elements) begin ... end - 1 of something, at `offset` of the rank's. */
typedef struct holding {
    int64_t begin, end;
    int64_t offset;
} holding;

typedef struct item_of {
    int tensor;
    tn_plane plane;
    int is_scale;
} item_of;

static int is_flat(const tn_shard_plan *plan) { return plan->cut.layout == TN_SHARD_FLAT; }

static const tn_plane_layout *layout_of(const tn__shard_member *member, tn_plane plane) {
    return plane == member->plane ? &member->layout : &member->col;
}

static holding flat_holding(const tn_shard_plan *plan, const item_of *item, int rank) {
    const tn__shard_member *member = &plan->members[item->tensor];
    size_t first, bytes;
    if (item->is_scale) {
        return (holding){0, (int64_t)member->layout.scale_bytes,
                         (int64_t)member->flat_scale_offset};
    }
    tn__shard_flat_bytes(plan, &plan->cut, item->tensor, rank, &first, &bytes);
    return (holding){(int64_t)first, (int64_t)(first + bytes),
                     tn__shard_item_offset(plan, rank, item->tensor, item->plane, 0)};
}

/* Of an item whose rows lie one behind the other, or that is one scale for all. */
static holding holding_of(const tn_shard_plan *plan, const item_of *item, int rank) {
    const tn__shard_member *member = &plan->members[item->tensor];
    int64_t first, rows;
    if (is_flat(plan)) return flat_holding(plan, item, rank);
    tn__shard_rows(plan, &plan->cut, item->tensor, rank, &first, &rows);
    if (rows == 0) return (holding){0, 0, -1};
    int64_t offset = tn__shard_item_offset(plan, rank, item->tensor, item->plane, item->is_scale);
    tn__shard_range range = tn__shard_range_of(member, item->plane, item->is_scale, first, rows);
    if (range.kept_bytes > 0) return (holding){0, (int64_t)range.kept_bytes, offset};
    return (holding){(int64_t)range.offset, (int64_t)(range.offset + range.line_bytes), offset};
}

static holding packed_holding(const tn_shard_plan *plan, int tensor, int rank) {
    tn_shard_piece piece = TN_SHARD_PIECE_INIT;
    TN_CHECK(tn_shard_piece_get(plan, rank, tensor, &piece) == TN_OK);
    return (holding){piece.first, piece.first + piece.count, piece.packed_first};
}

/* ---- moves of one item ---------------------------------------------------------------------- */

/* Sources that all have the same: the rank itself, or another one in turn. */
static int is_source(const holding *from, int from_ranks, int from_rank, int to_rank,
                     int are_alike) {
    if (!are_alike) return 1;
    if (to_rank < from_ranks && from[to_rank].end > from[to_rank].begin)
        return from_rank == to_rank;
    int first = to_rank % from_ranks;
    for (int i = 0; i < from_ranks; i++) {
        int rank = (first + i) % from_ranks;
        if (from[rank].end > from[rank].begin) return from_rank == rank;
    }
    return 0;
}

/* All of a rank's that is held by others, or by itself, before. */
static tn_status add_targets(tn__move_list *list, int tensor, const holding *from, int from_ranks,
                             const holding *to, int to_rank, int are_alike) {
    for (int rank = 0; rank < from_ranks; rank++) {
        int64_t begin = from[rank].begin > to->begin ? from[rank].begin : to->begin;
        int64_t end = from[rank].end < to->end ? from[rank].end : to->end;
        if (begin >= end || !is_source(from, from_ranks, rank, to_rank, are_alike)) continue;
        tn_shard_move move = {.from_rank = rank, .to_rank = to_rank, .tensor = tensor};
        move.from_offset = (size_t)(from[rank].offset + begin - from[rank].begin);
        move.to_offset = (size_t)(to->offset + begin - to->begin);
        move.count = (size_t)(end - begin);
        move.lines = 1;
        TN_TRY(add_move(list, &move));
    }
    return TN_OK;
}

/* The scales of FLAT, and the one scale of a tensor, are with many ranks. */
static int are_alike(const tn_shard_plan *from, const item_of *item) {
    const tn__shard_member *member = &from->members[item->tensor];
    return item->is_scale && (is_flat(from) || tn__shard_has_one_scale(&member->layout));
}

static tn_status add_runs(tn__move_list *list, const tn_shard_plan *from, const tn_shard_plan *to,
                          const item_of *item) {
    holding *held = tn__host_alloc((size_t)from->rank_count, sizeof *held);
    tn_status status = held ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    for (int rank = 0; status == TN_OK && rank < from->rank_count; rank++)
        held[rank] = holding_of(from, item, rank);
    for (int rank = 0; status == TN_OK && rank < to->rank_count; rank++) {
        holding wanted = holding_of(to, item, rank);
        status = add_targets(list, item->tensor, held, from->rank_count, &wanted, rank,
                             are_alike(from, item));
    }
    tn__host_free(held);
    return status;
}

/* ---- rows that lie strided ------------------------------------------------------------------ */

/* Rows of a piece: the piece as a tensor of its own. */
static tn__shard_range range_in_piece(const tn__shard_member *member, const item_of *item,
                                      int64_t piece_rows, int64_t first, int64_t rows) {
    tn__shard_member piece = *member;
    const tn_shard_tensor *spec = &member->spec;
    tn_plane_layout *layout = item->plane == member->plane ? &piece.layout : &piece.col;
    piece.spec.rows = piece_rows;
    TN_CHECK(tn__format_layout(spec->format, spec->dtype, piece_rows, spec->cols, item->plane,
                               layout) == TN_OK);
    return tn__shard_range_of(&piece, item->plane, item->is_scale, first, rows);
}

/* What is whole in its piece is one line there, and as many as elsewhere. */
static void split_lines(tn__shard_range *range, int64_t lines) {
    if (range->lines == lines) return;
    TN_CHECK(range->lines == 1 && range->line_bytes % (size_t)lines == 0);
    range->line_bytes /= (size_t)lines;
    range->lines = lines;
    range->stride = range->line_bytes;
}

static int64_t lines_of(const tn__shard_member *member, const item_of *item) {
    const tn_plane_layout *layout = layout_of(member, item->plane);
    return item->is_scale ? layout->scale_rows : layout->rows;
}

static tn_status add_rows(tn__move_list *list, const tn_shard_plan *from, const tn_shard_plan *to,
                          const item_of *item, int from_rank, int to_rank) {
    const tn__shard_member *member = &from->members[item->tensor];
    int64_t from_first, from_rows, to_first, to_rows;
    tn__shard_rows(from, &from->cut, item->tensor, from_rank, &from_first, &from_rows);
    tn__shard_rows(to, &to->cut, item->tensor, to_rank, &to_first, &to_rows);
    int64_t first = from_first > to_first ? from_first : to_first;
    int64_t end = from_first + from_rows, to_end = to_first + to_rows;
    if (to_end < end) end = to_end;
    if (first >= end) return TN_OK;
    int64_t rows = end - first, lines = lines_of(member, item);
    tn__shard_range source = range_in_piece(member, item, from_rows, first - from_first, rows);
    tn__shard_range target = range_in_piece(member, item, to_rows, first - to_first, rows);
    split_lines(&source, lines);
    split_lines(&target, lines);
    TN_CHECK(source.line_bytes == target.line_bytes);
    int64_t from_base =
        tn__shard_item_offset(from, from_rank, item->tensor, item->plane, item->is_scale);
    int64_t to_base = tn__shard_item_offset(to, to_rank, item->tensor, item->plane, item->is_scale);
    tn_shard_move move = {.from_rank = from_rank, .to_rank = to_rank, .tensor = item->tensor};
    move.from_offset = (size_t)from_base + source.offset;
    move.to_offset = (size_t)to_base + target.offset;
    move.count = source.line_bytes;
    move.lines = lines;
    move.from_stride = source.stride, move.to_stride = target.stride;
    return add_move(list, &move);
}

static int is_strided(const tn__shard_member *member, const item_of *item) {
    if (member->tile_rows < 2) return 0;
    return tn__shard_range_of(member, item->plane, item->is_scale, 0, member->tile_height).lines >
           1;
}

static tn_status add_item(tn__move_list *list, const tn_shard_plan *from, const tn_shard_plan *to,
                          const item_of *item) {
    const tn__shard_member *member = &from->members[item->tensor];
    const tn_plane_layout *layout = layout_of(member, item->plane);
    if ((item->is_scale ? layout->scale_bytes : layout->data_bytes) == 0) return TN_OK;
    if (!is_strided(member, item)) return add_runs(list, from, to, item);
    for (int to_rank = 0; to_rank < to->rank_count; to_rank++) {
        for (int rank = 0; rank < from->rank_count; rank++)
            TN_TRY(add_rows(list, from, to, item, rank, to_rank));
    }
    return TN_OK;
}

/* ---- moves of a unit ------------------------------------------------------------------------ */

static tn_status add_packed(tn__move_list *list, const tn_shard_plan *from, const tn_shard_plan *to,
                            int tensor) {
    holding *held = tn__host_alloc((size_t)from->rank_count, sizeof *held);
    tn_status status = held ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    for (int rank = 0; status == TN_OK && rank < from->rank_count; rank++)
        held[rank] = packed_holding(from, tensor, rank);
    for (int rank = 0; status == TN_OK && rank < to->rank_count; rank++) {
        holding wanted = packed_holding(to, tensor, rank);
        status = add_targets(list, tensor, held, from->rank_count, &wanted, rank, 0);
    }
    tn__host_free(held);
    return status;
}

static tn_status add_tensor(tn_shard_moves *moves, const tn_shard_plan *from,
                            const tn_shard_plan *to, int tensor) {
    const tn__shard_member *member = &from->members[tensor];
    tn__move_list *bytes = &moves->list[TN_SHARD_PART_SHARD];
    for (int is_scale = 0; is_scale < 2; is_scale++) {
        item_of item = {tensor, member->plane, is_scale};
        TN_TRY(add_item(bytes, from, to, &item));
        item.plane = TN_PLANE_COL;
        if (member->has_col) TN_TRY(add_item(bytes, from, to, &item));
    }
    if (member->bucket_offset < 0) return TN_OK;
    return add_packed(&moves->list[TN_SHARD_PART_PACKED], from, to, tensor);
}

static int is_same_tensor(const tn_shard_tensor *a, const tn_shard_tensor *b) {
    return a->format == b->format && a->dtype == b->dtype && a->scale_mode == b->scale_mode &&
           a->rows == b->rows && a->cols == b->cols && a->frozen == b->frozen;
}

static tn_status check_same_unit(const tn_shard_plan *from, const tn_shard_plan *to) {
    TN_REQUIRE(from && to, "tn_shard_moves_create: from or to is NULL");
    TN_REQUIRE(from->tensor_count == to->tensor_count,
               "tn_shard_moves_create: unit %s has %d tensors, unit %s has %d", from->name,
               from->tensor_count, to->name, to->tensor_count);
    for (int i = 0; i < from->tensor_count; i++) {
        TN_REQUIRE(is_same_tensor(&from->members[i].spec, &to->members[i].spec),
                   "tn_shard_moves_create: tensor %d is %s in unit %s and another one, %s, in unit "
                   "%s: format, types, shape and frozen are to be the same",
                   i, from->members[i].name, from->name, to->members[i].name, to->name);
    }
    return TN_OK;
}

static tn_status make_moves(tn_shard_moves *moves, const tn_shard_plan *from,
                            const tn_shard_plan *to) {
    size_t ranks = (size_t)to->rank_count;
    moves->from_ranks = from->rank_count;
    moves->to_ranks = to->rank_count;
    moves->rank_count = from->rank_count > to->rank_count ? from->rank_count : to->rank_count;
    moves->to_count = tn__host_alloc(TN_SHARD_PART_COUNT * ranks, sizeof *moves->to_count);
    if (!moves->to_count) return TN_OUT_OF_HOST_MEMORY;
    for (size_t rank = 0; rank < ranks; rank++) {
        moves->to_count[TN_SHARD_PART_SHARD * ranks + rank] = to->ranks[rank].shard_bytes;
        moves->to_count[TN_SHARD_PART_PACKED * ranks + rank] =
            (size_t)to->ranks[rank].packed_elements;
    }
    for (int i = 0; i < from->tensor_count; i++)
        TN_TRY(add_tensor(moves, from, to, i));
    return TN_OK;
}

tn_status tn_shard_moves_create(const tn_shard_plan *from, const tn_shard_plan *to,
                                tn_shard_moves **out) {
    TN_REQUIRE(out, "tn_shard_moves_create: out is NULL");
    TN_TRY(check_same_unit(from, to));
    tn_shard_moves *moves = tn__host_alloc(1, sizeof *moves);
    if (!moves) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = make_moves(moves, from, to);
    if (status != TN_OK) {
        tn_shard_moves_destroy(moves);
        return status;
    }
    *out = moves;
    return TN_OK;
}

void tn_shard_moves_destroy(tn_shard_moves *moves) {
    if (!moves) return;
    for (int part = 0; part < TN_SHARD_PART_COUNT; part++)
        tn__host_free(moves->list[part].items);
    tn__host_free(moves->to_count);
    tn__host_free(moves);
}

tn_status tn_shard_moves_get(const tn_shard_moves *moves, tn_shard_part part,
                             const tn_shard_move **out, size_t *count) {
    TN_REQUIRE(moves, "tn_shard_moves_get: moves is NULL");
    TN_REQUIRE((unsigned)part < TN_SHARD_PART_COUNT,
               "tn_shard_moves_get: part is %d, which there is not", (int)part);
    TN_REQUIRE(out && count, "tn_shard_moves_get: out or count is NULL");
    *out = moves->list[part].items;
    *count = moves->list[part].count;
    return TN_OK;
}
