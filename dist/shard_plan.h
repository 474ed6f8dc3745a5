/* A plan of shards, as its files share it.
 *
 *     shard_plan.c      made of a checked configuration, and asked
 *     shard_cut.c       who has which rows or bytes: the three layouts
 *     shard_place.c     items, ranges, and where they are in shards, buffers and buckets
 *     shard_cost.c      what each layout costs, and which is chosen
 *     shard_text.c      the plan in words, and its hash
 *
 * An *item* is the elements or the scales of one plane of one tensor that is gathered. A rank's
 * shard is its ranges of all items, in their order, each at a multiple of 16 bytes:
 *
 *     | items of FORWARD only | items of both | items of BACKWARD only | kept |
 *     |<-------- sent in forward ------------>|
 *                             |<------- sent in backward ------------->|
 *
 * so that what a phase sends is one run of bytes. *Kept* are scales that others send, too: the one
 * scale of a tensor that several ranks hold parts of. In FLAT a shard is the rank's part of all
 * elements as they lie in the gathered buffer, and behind it all scales.
 *
 * Invariant: once made, nothing of a plan changes.
 */
#ifndef TENURE_SHARD_PLAN_H
#define TENURE_SHARD_PLAN_H

#include "error.h"
#include "format_table.h"
#include "tenure_shard.h"

enum { TN__SHARD_TILE = 128, TN__SHARD_ALIGNMENT = 16, TN__SHARD_ELEMENTS_ALIGNMENT = 256 };
enum { TN__SHARD_FLAT_GRANULE = 64, TN__SHARD_BUCKET_ALIGNMENT = 64, TN__SHARD_AMAX_ALIGNMENT = 4 };

static inline size_t tn__shard_round_up(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}
static inline int64_t tn__shard_ceil_div(int64_t count, int64_t by) {
    return count / by + (count % by != 0);
}

/* A tensor of the unit, and what follows from its shape alone. */
typedef struct tn__shard_member {
    tn_shard_tensor spec; /* its name is the plan's */
    char *name;
    tn_plane plane;         /* DATA or ROW: gathered in forward */
    int has_col;            /* COL is gathered in backward */
    tn_plane_layout layout; /* of plane; of no bytes without elements */
    tn_plane_layout col;    /* if has_col */
    int64_t tile_height;    /* rows of a tile row */
    int64_t tile_rows;      /* 0 without elements */
    size_t tile_bytes;      /* that a forward and a backward gather bring of a tile row */
    size_t last_tile_bytes; /* likewise */
    int64_t bucket_offset;  /* -1: frozen */
    int64_t amax_first;     /* of the numbers that a cast reduces */
    int64_t amax_count;
    size_t flat_offset;       /* FLAT: of its elements in the gathered buffer */
    size_t flat_scale_offset; /* FLAT: of its scales in every shard */
} tn__shard_member;

/* Who has what. */
typedef struct tn__shard_cut {
    tn_shard_layout layout;
    int *order;       /* of tensors in the unit */
    int *position;    /* of a tensor in that order */
    int64_t *before;  /* RAGGED: tile rows before the tensor at a position, and in all */
    int64_t *bounds;  /* RAGGED: rank_count + 1 numbers of tile rows in that order */
    size_t flat_part; /* FLAT: bytes of each rank */
} tn__shard_cut;

typedef struct tn__shard_item {
    int tensor;
    tn_plane plane;
    int is_scale;
    int is_in[TN_SHARD_PHASE_COUNT];
    size_t gathered[TN_SHARD_PHASE_COUNT]; /* where the plane's elements or scales begin */
} tn__shard_item;

/* What some rows of a tensor are of an item: lines of bytes, `stride` apart. */
typedef struct tn__shard_range {
    size_t offset; /* of the first line in the item */
    int64_t lines;
    size_t line_bytes;
    size_t stride;
    size_t pad_bytes;  /* sent behind the item, to the next multiple of 16 */
    size_t kept_bytes; /* in the shard and not sent */
} tn__shard_range;

typedef struct tn__shard_rank {
    size_t sent_offset[TN_SHARD_PHASE_COUNT];
    size_t sent_bytes[TN_SHARD_PHASE_COUNT];
    size_t kept_offset;
    size_t shard_bytes;
    int64_t packed_elements;
} tn__shard_rank;

typedef struct tn__segment_list {
    tn_segment *items;
    size_t count, room;
} tn__segment_list;

struct tn_shard_plan {
    char *name;
    int rank_count;
    int tensor_count;
    tn__shard_member *members;
    tn_shard_costs prices;
    tn_shard_layout asked;
    int flat_obstacle; /* the first tensor that FLAT can not cut; -1: none */
    tn_shard_cost costs[TN_SHARD_LAYOUT_COUNT];
    tn__shard_cut cut;
    tn__shard_item *items;
    int item_count;
    tn__shard_rank *ranks;
    tn__segment_list segments[TN_SHARD_PHASE_COUNT];
    tn__segment_list bucket;
    tn_shard_plan_info info;
};

/* All elements have the one scale: whoever has a part of them keeps it, the last one sends it. */
static inline int tn__shard_has_one_scale(const tn_plane_layout *layout) {
    return layout->global_scale_offset == 0 && layout->scale_bytes > 0;
}

/* ---- shard_cut.c ---------------------------------------------------------------------------- */

/* *out is to be ended also after a failure. */
tn_status tn__shard_cut_make(const tn_shard_plan *plan, tn_shard_layout layout, tn__shard_cut *out);
void tn__shard_cut_end(tn__shard_cut *cut);

/* TILES and RAGGED: the rank's rows of a tensor. */
void tn__shard_rows(const tn_shard_plan *plan, const tn__shard_cut *cut, int tensor, int rank,
                    int64_t *first, int64_t *rows);

/* FLAT: the rank's bytes of a tensor's elements, counted from their first. */
void tn__shard_flat_bytes(const tn_shard_plan *plan, const tn__shard_cut *cut, int tensor, int rank,
                          size_t *first, size_t *bytes);

/* Any layout: its elements. */
void tn__shard_elements(const tn_shard_plan *plan, const tn__shard_cut *cut, int tensor, int rank,
                        int64_t *first, int64_t *count);

/* 1: TILES gives every rank the same of every tensor. */
int tn__shard_is_even(const tn_shard_plan *plan);

/* ---- shard_place.c -------------------------------------------------------------------------- */

/* Of TILES and RAGGED. */
tn__shard_range tn__shard_range_of(const tn__shard_member *member, tn_plane plane, int is_scale,
                                   int64_t first, int64_t rows);
static inline size_t tn__shard_range_bytes(const tn__shard_range *range) {
    return (size_t)range->lines * range->line_bytes + range->pad_bytes + range->kept_bytes;
}

/* Packed elements that a piece takes. The last piece of a tensor goes on to where the next one may
 * begin in the bucket, so that what follows it in the rank's packed elements is aligned. */
int64_t tn__shard_packed_count(const tn_shard_tensor *spec, int64_t first, int64_t count);

/* The bytes of a rank's shard under a cut: sums only, the offsets in them are right too. */
tn__shard_rank tn__shard_measure(const tn_shard_plan *plan, const tn__shard_cut *cut, int rank);

/* The unit's items in an order of tensors, without offsets. */
tn_status tn__shard_items_make(tn_shard_plan *plan, const int *order);

/* With the chosen cut: offsets, segments, ranks. */
tn_status tn__shard_place(tn_shard_plan *plan);

/* Offset of the rank's range of an item in its shard; -1: it has none. FLAT too. */
int64_t tn__shard_item_offset(const tn_shard_plan *plan, int rank, int tensor, tn_plane plane,
                              int is_scale);

/* ---- shard_cost.c --------------------------------------------------------------------------- */

static inline int tn__shard_has_prices(const tn_shard_plan *plan) {
    return plan->prices.wire_bytes_per_us || plan->prices.memory_bytes_per_us ||
           plan->prices.latency_ns || plan->prices.memory_ns_per_mib;
}

/* Fills in plan->costs and has plan->cut be the layout that was asked for or chosen. */
tn_status tn__shard_choose(tn_shard_plan *plan);

/* Numbers that a cast reduces of a tensor in a layout. */
int64_t tn__shard_amax_count(const tn__shard_member *member, tn_shard_layout layout);

/* ---- shard_text.c --------------------------------------------------------------------------- */

uint64_t tn__shard_hash(const tn_shard_plan *plan);

#endif
