/* Tenure: how the tensors of a unit are cut over the ranks.
 *
 *     tn_shard_plan *plan;
 *     tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
 *     config.name = "layer", config.tensors = weights, config.tensor_count = 7;
 *     config.rank_count = tn_comm_size(comm);
 *     tn_shard_plan_create(&config, &plan);
 *     tn_shard_plan_verify(plan, comm, scope, stream);       (all ranks have the same one)
 *     tn_shard_bytes(plan, rank, &bytes);                    (of its shard, a TN_BYTE tensor)
 *     ... the rank's elements of each tensor (tn_shard_piece_get) are its master copies ...
 *     tn_shard_cast(&cast, stream);                          (masters to the shard)
 *     tn_shard_gather(plan, TN_SHARD_FORWARD, comm, shard, gathered, stream);
 *     tn_shard_plane_memory(plan, TN_SHARD_FORWARD, i, shard, gathered, &memory);
 *
 * A *unit* is the tensors that are gathered together, most often a layer. Its plan is made on the
 * host, of nothing but shapes and the count of ranks, never changes, and is the same on all ranks.
 * It says who holds which elements and where every byte is
 *
 *     in a rank's *shard*            one block of bytes that the rank keeps: its pieces of the
 *                                    planes that are gathered, one behind the other
 *     in the *gathered buffer*       planes as tn_plane_layout has them, whole, each tensor's
 *                                    elements at a multiple of 256 bytes, its scales at one of 16
 *     in the *bucket*                elements of the tensors that are not frozen, row-major, each
 *                                    tensor at a multiple of 64: whole gradients
 *     in a rank's *packed elements*  the rank's elements of the bucket, one piece behind the other:
 *                                    master copies, gradients and moments of its own
 *
 * and gathers go straight from shards to their places in the gathered buffer, in one collective.
 * Unused bytes in shards are 0, and in gathered buffers where they come from a shard.
 *
 * Layouts. A *tile row* is 128 rows of a tensor (the last may be fewer), and the smallest piece
 * that TILES and RAGGED cut, so that no block of scales is ever cut; of NVFP4, whose blocks depend
 * on the amax of the whole tensor, it is all rows.
 *
 *     TILES   each tensor in equal shares of whole tile rows, the last ranks' shorter or empty
 *     RAGGED  runs of tile rows over the unit, in an order of tensors and with a largest piece that
 *             a search has found; a rank may have parts of several tensors
 *     FLAT    equal ranges of the bytes of all elements, cut anywhere at 64 bytes, so across tiles
 *             and tensors. All scales are on every rank: 1/4096 of the bytes. A cast needs an
 *             all-reduce of the tiles' amaxes. Of PLAIN, FP8_BLOCK_2D and FP8_TENSOR only: blocks
 *             of 1D, MXFP8 and NVFP4 are too many for that
 *
 * Threads: a plan is read by any number; it is destroyed when nobody uses it any more.
 */
#ifndef TENURE_SHARD_H
#define TENURE_SHARD_H

#include "tenure_dist.h"
#include "tenure_lifetime.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- plans ---------------------------------------------------------------------------------- */

typedef struct tn_shard_plan tn_shard_plan;

typedef enum tn_shard_layout {
    TN_SHARD_AUTO = 0,
    TN_SHARD_TILES,
    TN_SHARD_RAGGED,
    TN_SHARD_FLAT,
    TN_SHARD_LAYOUT_COUNT
} tn_shard_layout;

TN_API const char *tn_shard_layout_name(tn_shard_layout layout); /* "tiles" */

/* What a gather brings of each tensor. FORWARD: DATA (PLAIN) or ROW. BACKWARD: the same, but COL
 * of formats whose COL can not be derived from it: FP8_BLOCK_1D, MXFP8, NVFP4. */
typedef enum tn_shard_phase {
    TN_SHARD_FORWARD = 0,
    TN_SHARD_BACKWARD,
    TN_SHARD_PHASE_COUNT
} tn_shard_phase;

typedef struct tn_shard_tensor {
    const char *name; /* copied; NULL: "tensor" and its number */
    tn_format format;
    tn_dtype dtype;
    tn_scale_mode scale_mode;
    int64_t rows, cols;
    int frozen; /* 1: no gradient, no master copy: it is not in the bucket */
} tn_shard_tensor;

/* Of this machine, as measured; 0: not. With any, AUTO is the layout that costs least; without, it
 * is TILES if its padding is 0, else FLAT, or RAGGED where FLAT is not possible. */
typedef struct tn_shard_costs {
    uint64_t wire_bytes_per_us;
    uint64_t memory_bytes_per_us; /* of copies on the device, read and written */
    uint64_t latency_ns;          /* of a collective */
    uint64_t memory_ns_per_mib;   /* what a MiB of the largest shard is worth in a step */
} tn_shard_costs;

enum { TN_SHARD_TENSORS_MAX = 4096, TN_SHARD_RANKS_MAX = 1024 };

typedef struct tn_shard_plan_config {
    size_t size;
    const char *name;               /* in texts; copied; NULL: "unit" */
    const tn_shard_tensor *tensors; /* read during the call */
    int tensor_count;               /* 0 ... TN_SHARD_TENSORS_MAX */
    int rank_count;                 /* 1 ... TN_SHARD_RANKS_MAX */
    tn_shard_layout layout;
    tn_shard_costs costs;
} tn_shard_plan_config;
#define TN_SHARD_PLAN_CONFIG_INIT                                                                  \
    {                                                                                              \
        sizeof(tn_shard_plan_config), NULL, NULL, 0, 0, TN_SHARD_AUTO, { 0, 0, 0, 0 }              \
    }

/* TN_INVALID_ARGUMENT names a tensor or number that can not be; TN_UNSUPPORTED: FLAT where it is
 * not possible; out of host memory. */
TN_API TN_MUST_USE tn_status tn_shard_plan_create(const tn_shard_plan_config *config,
                                                  tn_shard_plan **out);
TN_API void tn_shard_plan_destroy(tn_shard_plan *plan); /* NULL is a no-op */

typedef struct tn_shard_plan_info {
    size_t size;
    const char *name;       /* as long as the plan lives */
    tn_shard_layout layout; /* chosen, never AUTO */
    int tensor_count;
    int rank_count;
    uint64_t hash; /* of all that ranks must agree in: names, tensors, cuts, offsets */
    size_t gathered_bytes[TN_SHARD_PHASE_COUNT];
    int is_same_in_backward; /* 1: no COL is gathered, so that BACKWARD is FORWARD */
    size_t shard_bytes_max;  /* of the largest rank */
    int64_t bucket_elements;
    int64_t packed_elements_max; /* of the largest rank */
    int64_t amax_count;          /* fp32 numbers that a cast of all tensors all-reduces */
    int64_t amax_count_trained;  /* the first ones: those of tensors that are not frozen */
} tn_shard_plan_info;
#define TN_SHARD_PLAN_INFO_INIT                                                                    \
    { sizeof(tn_shard_plan_info), NULL, TN_SHARD_AUTO, 0, 0, 0, {0, 0}, 0, 0, 0, 0, 0, 0 }
TN_API TN_MUST_USE tn_status tn_shard_plan_info_get(const tn_shard_plan *plan,
                                                    tn_shard_plan_info *out);

/* As it was given, names as long as the plan lives. */
TN_API TN_MUST_USE tn_status tn_shard_tensor_get(const tn_shard_plan *plan, int tensor,
                                                 tn_shard_tensor *out);

/* What a layout costs this unit in a step of one forward, one backward and one cast; each layout's
 * is there, whichever was chosen.
 *
 *     cost_ns = wire_bytes / wire_bytes_per_us + latency of its collectives
 *             + copy_bytes / memory_bytes_per_us + shard_bytes_max * memory_ns_per_mib
 *
 * where a number that was not measured leaves its term out. */
typedef struct tn_shard_cost {
    size_t size;
    int is_possible;
    uint64_t unit_bytes;    /* that a forward and a backward gather bring, without padding */
    uint64_t largest_bytes; /* of the rank with most of them */
    uint64_t padding_ppm;   /* rank_count * largest / unit bytes - 1, in millionths, rounded down */
    uint64_t wire_bytes;    /* (rank_count - 1) * largest, and what a ring all-reduces of amaxes */
    uint64_t copy_bytes;    /* read and written beside the collectives: the amaxes of FLAT */
    uint64_t shard_bytes_max; /* of the largest rank */
    uint64_t collectives;     /* 2 gathers; FLAT and FP8_TENSOR: the all-reduce */
    uint64_t cost_ns;
} tn_shard_cost;
#define TN_SHARD_COST_INIT                                                                         \
    { sizeof(tn_shard_cost), 0, 0, 0, 0, 0, 0, 0, 0, 0 }
TN_API TN_MUST_USE tn_status tn_shard_cost_get(const tn_shard_plan *plan, tn_shard_layout layout,
                                               tn_shard_cost *out);

/* The plan in words: each layout's costs, which was chosen and why, tensors, each rank's bytes.
 * Returns and cuts as tn_pool_report does; 0 for NULL. */
TN_API size_t tn_shard_plan_text(const tn_shard_plan *plan, char *text, size_t text_bytes);

/* ---- what is where -------------------------------------------------------------------------- */

/* What a rank holds of a tensor: elements first ... first + count - 1 of rows x cols, row-major.
 * In TILES and RAGGED these are rows, and the piece in the shard is, byte for byte, the planes of a
 * tensor of these rows alone. */
typedef struct tn_shard_piece {
    size_t size;
    int64_t first;
    int64_t count;        /* 0: nothing */
    int64_t first_row;    /* TILES, RAGGED; in FLAT -1 */
    int64_t row_count;    /* likewise */
    int64_t packed_first; /* in the packed elements; -1: frozen */
    int64_t data_offset;  /* bytes into the shard, of DATA or ROW; -1: none; likewise below */
    int64_t scale_offset; /* FLAT: of all scales of the plane */
    int64_t col_data_offset;
    int64_t col_scale_offset;
} tn_shard_piece;
#define TN_SHARD_PIECE_INIT                                                                        \
    { sizeof(tn_shard_piece), 0, 0, 0, 0, 0, 0, 0, 0, 0 }
TN_API TN_MUST_USE tn_status tn_shard_piece_get(const tn_shard_plan *plan, int rank, int tensor,
                                                tn_shard_piece *out);

/* Of a rank: bytes of its shard (a multiple of 16, 0 if it has nothing), and packed elements. */
TN_API TN_MUST_USE tn_status tn_shard_bytes(const tn_shard_plan *plan, int rank, size_t *out);
TN_API TN_MUST_USE tn_status tn_shard_packed_elements(const tn_shard_plan *plan, int rank,
                                                      int64_t *out);

/* Where the tensor begins in the bucket; -1: it is frozen. */
TN_API TN_MUST_USE tn_status tn_shard_bucket_offset(const tn_shard_plan *plan, int tensor,
                                                    int64_t *out);

/* The bucket's segments, in elements, as tn_reduce_scatter_uneven takes them: what it brings are
 * the rank's packed elements. As long as the plan lives. */
TN_API TN_MUST_USE tn_status tn_shard_bucket_segments(const tn_shard_plan *plan,
                                                      const tn_segment **segments, size_t *count);

/* The gathered buffer's segments, in bytes, as tn_all_gather_uneven takes them; and where in a
 * rank's shard the bytes are that it sends, one segment behind the other. As long as the plan
 * lives. */
TN_API TN_MUST_USE tn_status tn_shard_segments(const tn_shard_plan *plan, tn_shard_phase phase,
                                               const tn_segment **segments, size_t *count);
TN_API TN_MUST_USE tn_status tn_shard_sent_bytes(const tn_shard_plan *plan, tn_shard_phase phase,
                                                 int rank, size_t *shard_offset, size_t *bytes);

/* Where a tensor's plane is once it is gathered, as tn_tensor_adopt and tn_plane_adopt take it:
 * fills in plane, data, scale and their bytes, and leaves the rest. In FLAT the scales are in the
 * rank's own shard, else in the gathered buffer. */
TN_API TN_MUST_USE tn_status tn_shard_plane_memory(const tn_shard_plan *plan, tn_shard_phase phase,
                                                   int tensor, void *shard, void *gathered,
                                                   tn_foreign_memory *out);

/* ---- gathers -------------------------------------------------------------------------------- */

/* Every rank calls it with its plan, once, before the first collective that depends on it: waits on
 * the host. TN_INVALID_STATE on all ranks if they have not all the same one: the text names the
 * first rank whose plan differs from rank 0's. The scope is for 8 bytes of scratch a rank. */
TN_API TN_MUST_USE tn_status tn_shard_plan_verify(const tn_shard_plan *plan, tn_comm *comm,
                                                  tn_scope scope, tn_stream stream);

/* The unit's planes of that phase, whole, in `gathered`, from the ranks' shards: one collective and
 * no scratch. This rank sends (rank_count - 1) times what tn_shard_sent_bytes says. An address of
 * no bytes may be NULL. */
TN_API TN_MUST_USE tn_status tn_shard_gather(const tn_shard_plan *plan, tn_shard_phase phase,
                                             tn_comm *comm, const void *shard, void *gathered,
                                             tn_stream stream);

/* ---- casts ---------------------------------------------------------------------------------- */

/* The cast of a rank's elements into its shard: each tensor is, to the bit, what tn_quantize (of
 * PLAIN tn_convert) makes of the whole one. No byte outside of the rank's pieces is written, but
 * that a shard without contents is 0 first. Where scales depend on elements of other ranks (all of
 * FLAT, and FP8_TENSOR), the amaxes of all tensors are reduced in one all-reduce, of 4 bytes each;
 * frozen tensors take part in that, and are written, only if with_frozen says so: once, at first.
 * Masters, shard, amaxes and scope are of one pool; the call makes tensors in a scope of its own
 * below `scope`, of which only the amaxes take memory. */
typedef struct tn_shard_cast_args {
    size_t size;
    const tn_shard_plan *plan;
    tn_comm *comm; /* of the plan's ranks; NULL: `rank` says which, and amax is reduced already */
    int rank;
    /* One for each tensor of the plan: PLAIN fp32, bf16 or fp16 (TN_BYTE: TN_BYTE) of as many
     * elements as the piece has; {0} where those are none, which in FLAT counts as fp32, or where
     * the tensor is not cast. */
    const tn_tensor *masters;
    tn_tensor shard; /* TN_BYTE, of tn_shard_bytes elements or more: it counts as written, if it has
                      * none, too; {0}: the rank has none */
    int with_frozen; /* 0 or 1 */
    float amax_epsilon;
    tn_tensor amax; /* PLAIN fp32 of amax_count elements; {0}: with comm, scratch in the scope */
    tn_tensor skip; /* as that of tn_quantize: quantized pieces stay as they are; {0}: never */
    tn_scope scope;
} tn_shard_cast_args;
#define TN_SHARD_CAST_ARGS_INIT                                                                    \
    {                                                                                              \
        sizeof(tn_shard_cast_args), NULL, NULL, 0, NULL, {0}, 0, 0.0f, {0}, {0}, { 0 }             \
    }

/* The amaxes of what the rank holds, into args->amax: those of all ranks, reduced by maximum, are
 * what tn_shard_cast takes without a communicator. */
TN_API TN_MUST_USE tn_status tn_shard_cast_amax(const tn_shard_cast_args *args, tn_stream stream);

/* With a communicator every rank calls. After a failure the pieces that were to be cast are
 * undefined, unless it is one of the arguments; the others of a shard with contents are as they
 * were, and the call can be made again. */
TN_API TN_MUST_USE tn_status tn_shard_cast(const tn_shard_cast_args *args, tn_stream stream);

/* ---- another count of ranks ----------------------------------------------------------------- */

/* What has to move where when the ranks of one plan become those of another: bytes as they are, and
 * nothing is cast again. Shards of `to` are 0 where no move goes. */
typedef struct tn_shard_moves tn_shard_moves;

typedef enum tn_shard_part {
    TN_SHARD_PART_SHARD = 0, /* bytes of shards */
    TN_SHARD_PART_PACKED,    /* packed elements: masters, moments */
    TN_SHARD_PART_COUNT
} tn_shard_part;

/* `lines` runs of `count` bytes (or elements), strides apart, from one rank's to another's. */
typedef struct tn_shard_move {
    int from_rank, to_rank; /* the same: what the rank has already */
    int tensor;
    size_t from_offset, to_offset;
    size_t count;
    int64_t lines;
    size_t from_stride, to_stride;
} tn_shard_move;

/* Of two plans of the same tensors (names apart), any counts of ranks, any layouts. The moves are
 * good without the plans. TN_INVALID_ARGUMENT names a tensor that differs. */
TN_API TN_MUST_USE tn_status tn_shard_moves_create(const tn_shard_plan *from,
                                                   const tn_shard_plan *to, tn_shard_moves **out);
TN_API void tn_shard_moves_destroy(tn_shard_moves *moves); /* NULL is a no-op */

/* As long as the moves live; the same list, in the same order, on every rank. */
TN_API TN_MUST_USE tn_status tn_shard_moves_get(const tn_shard_moves *moves, tn_shard_part part,
                                                const tn_shard_move **out, size_t *count);

/* Does it: every rank of a communicator of at least as many ranks as either plan has calls, with
 * its own block of `from` and of `to` (NULL where it has none), which are apart. element_bytes is 1
 * of shards, and the size of a number of packed elements. One group of messages between two ranks
 * each, and copies of what stays; this rank sends the bytes of its moves to others. */
TN_API TN_MUST_USE tn_status tn_shard_reshard(const tn_shard_moves *moves, tn_shard_part part,
                                              tn_comm *comm, const void *from, void *to,
                                              size_t element_bytes, tn_stream stream);

#ifdef __cplusplus
}
#endif
#endif
