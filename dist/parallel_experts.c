/* Tokens that travel to the ranks of their experts, and back.
 *
 *     a rank's rows      | expert 0 | expert 1 | expert 2 | ...            "home"
 *     an expert's rank   | expert e: of rank 0, rank 1, ... | e + 1 ... |   "away"
 *
 * Each block (rank, expert) is sent from where it lies and received where it belongs: one
 * all-to-all for each expert of a rank, all of them one group. Scales of ROW lie strided over the
 * rows, so each block's are packed beside each other for the journey: as rows of their own, one
 * fp32 for each 128 columns, which then travel as the elements do.
 *
 * Invariant: a block's place in packed scales is its first row times the bytes of a row there.
 */
#include "comm.h"
#include "driver.h"
#include "host_alloc.h"
#include "parallel_call.h"
#include "tensor_internal.h"

typedef struct journey {
    const char *name;
    const tn_expert_route *route;
    int rank, ranks;
    int64_t own_experts;
    int is_back; /* from the experts home */
    tn_stream stream;
    tn_device *device;
    tn_tensor_info src, dst;
    tn_plane plane;
    tn_plane_view from, to;
    tn_tensor slots[2]; /* packed scales that leave, that come */
    tn_plane_view slot_views[2];
    size_t *lists; /* four of one entry a rank: bytes and offsets that leave, that come */
} journey;

static int64_t tokens_of(const journey *j, int rank, int64_t expert) {
    return j->route->tokens[(int64_t)rank * j->route->experts + expert];
}

/* Rows of this rank before those of an expert. */
static int64_t home_first(const journey *j, int64_t expert) {
    int64_t first = 0;
    for (int64_t e = 0; e < expert; e++)
        first += tokens_of(j, j->rank, e);
    return first;
}

static int64_t rows_of_expert(const journey *j, int64_t expert) {
    int64_t rows = 0;
    for (int r = 0; r < j->ranks; r++)
        rows += tokens_of(j, r, expert);
    return rows;
}

/* Rows of this rank's experts before those of one of them. */
static int64_t away_first(const journey *j, int64_t expert) {
    int64_t first = 0;
    for (int64_t e = j->rank * j->own_experts; e < expert; e++)
        first += rows_of_expert(j, e);
    return first;
}

/* ---- the journey ----------------------------------------------------------------------------- */

/* Of the i-th expert of each rank: what this rank has of it at home, to and from all ranks, and
 * what it has away, from and to all ranks. */
static tn_status put_expert(const journey *j, int64_t i, const void *src, void *dst,
                            size_t row_bytes) {
    const size_t ranks = (size_t)j->ranks;
    const int64_t own = j->rank * j->own_experts + i;
    size_t *home = j->lists + (j->is_back ? 2 * ranks : 0);
    size_t *away = j->lists + (j->is_back ? 0 : 2 * ranks);
    int64_t first = away_first(j, own);
    for (int r = 0; r < j->ranks; r++) {
        const int64_t expert = r * j->own_experts + i, came = tokens_of(j, r, own);
        home[r] = (size_t)tokens_of(j, j->rank, expert) * row_bytes;
        home[ranks + (size_t)r] = (size_t)home_first(j, expert) * row_bytes;
        away[r] = (size_t)came * row_bytes;
        away[ranks + (size_t)r] = (size_t)first * row_bytes;
        first += came;
    }
    return tn_all_to_all_uneven(j->route->comm, src, j->lists, j->lists + ranks, dst,
                                j->lists + 2 * ranks, j->lists + 3 * ranks, j->stream);
}

/* Not of the layouts: a plane without rows has none. */
static size_t row_bytes_of(const journey *j) {
    return (size_t)j->src.cols * tn_dtype_bytes(j->src.dtype);
}

static size_t scale_rows(const journey *j) {
    return (size_t)tn__up_to(j->src.cols, TN__TILE_ROWS) / TN__TILE_ROWS;
}

static size_t scale_row_bytes(const journey *j) { return scale_rows(j) * sizeof(float); }

static tn_status put_all(const journey *j) {
    for (int64_t i = 0; i < j->own_experts; i++) {
        TN_TRY(put_expert(j, i, j->from.data, j->to.data, row_bytes_of(j)));
        if (j->plane == TN_PLANE_ROW)
            TN_TRY(
                put_expert(j, i, j->slot_views[0].data, j->slot_views[1].data, scale_row_bytes(j)));
    }
    return TN_OK;
}

static tn_status put_group(const journey *j) {
    TN_TRY(tn_comm_group_begin(j->route->comm));
    tn_status status = put_all(j);
    if (status == TN_OK) status = tn_comm_group_end(j->route->comm, j->stream);
    if (status != TN_OK) tn_comm_group_cancel(j->route->comm);
    return status;
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* Between a block's strips in a plane and its packed rows. */
static tn_status move_scales(const journey *j, int comes, int64_t first, int64_t rows) {
    const tn__driver *driver = tn__device_driver(j->device);
    const tn_plane_view *plane = comes ? &j->to : &j->from;
    char *strips = (char *)plane->scale + (size_t)first * sizeof(float);
    char *packed = (char *)j->slot_views[comes].data + (size_t)first * scale_row_bytes(j);
    const size_t stride = (size_t)plane->layout.scale_stride * sizeof(float);
    const size_t bytes = (size_t)rows * sizeof(float);
    const tn__row_copy copy = {.dst = comes ? strips : packed,
                               .dst_stride = comes ? stride : bytes,
                               .src = comes ? packed : strips,
                               .src_stride = comes ? bytes : stride,
                               .row_bytes = bytes,
                               .rows = scale_rows(j)};
    return rows > 0 ? driver->copy_rows(tn__device_state(j->device), &copy, j->stream) : TN_OK;
}

static tn_status move_home_scales(const journey *j, int comes) {
    for (int64_t e = 0; e < j->route->experts; e++)
        TN_TRY(move_scales(j, comes, home_first(j, e), tokens_of(j, j->rank, e)));
    return TN_OK;
}

static tn_status move_away_scales(const journey *j, int comes) {
    for (int64_t i = 0; i < j->own_experts; i++) {
        const int64_t expert = j->rank * j->own_experts + i;
        int64_t first = away_first(j, expert);
        for (int r = 0; r < j->ranks; r++) {
            TN_TRY(move_scales(j, comes, first, tokens_of(j, r, expert)));
            first += tokens_of(j, r, expert);
        }
    }
    return TN_OK;
}

static tn_status move_all_scales(const journey *j, int comes) {
    if (j->plane != TN_PLANE_ROW) return TN_OK;
    if (comes && j->to.layout.scale_cols != j->to.layout.scale_stride && j->to.layout.scale_bytes)
        TN_TRY(tn_fill(j->device, j->to.scale, 0, j->to.layout.scale_bytes, j->stream));
    return comes == j->is_back ? move_home_scales(j, comes) : move_away_scales(j, comes);
}

/* ---- leases ---------------------------------------------------------------------------------- */

static tn_status travel(const journey *j) {
    if (j->dst.cols == 0) return TN_OK;
    TN_TRY(move_all_scales(j, 0));
    TN_TRY(put_group(j));
    return move_all_scales(j, 1);
}

/* Slots from the i-th on, and then the journey. */
static tn_status with_slots(journey *j, tn_scope scope, int i) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_lease lease;
    if (i == 2 || j->plane != TN_PLANE_ROW) return travel(j);
    config.dtype = TN_BYTE;
    config.rank = 2;
    config.shape[0] = i ? j->dst.rows : j->src.rows;
    config.shape[1] = (int64_t)scale_row_bytes(j);
    config.name = "scales on a journey";
    TN_TRY(tn_tensor_create(scope, &config, &j->slots[i]));
    tn_status status =
        tn_lease_begin(j->slots[i], TN_PLANE_DATA, TN_WRITE, j->stream, &lease, &j->slot_views[i]);
    if (status == TN_OK) status = tn__lease_close(lease, with_slots(j, scope, i + 1));
    return tn__tensor_close(j->slots[i], j->stream, status);
}

static tn_status with_leases(journey *j, const tn_expert_args *args) {
    tn_lease reading, writing;
    TN_TRY(tn_lease_begin(args->src, j->plane, TN_READ, j->stream, &reading, &j->from));
    tn_status status = tn_lease_begin(args->dst, j->plane, TN_WRITE, j->stream, &writing, &j->to);
    if (status == TN_OK) status = tn__lease_close(writing, with_slots(j, args->scope, 0));
    return tn__lease_close(reading, status);
}

/* ---- checks ---------------------------------------------------------------------------------- */

static tn_status check_route(journey *j, const tn_expert_route *route) {
    TN_REQUIRE(route->comm, "%s: route.comm is NULL", j->name);
    j->route = route;
    j->rank = tn_comm_rank(route->comm), j->ranks = tn_comm_size(route->comm);
    TN_REQUIRE(route->experts > 0 && route->experts <= INT32_MAX && route->experts % j->ranks == 0,
               "%s: route.experts is %lld, expected a multiple of the %d ranks", j->name,
               (long long)route->experts, j->ranks);
    TN_REQUIRE(route->tokens, "%s: route.tokens is NULL", j->name);
    j->own_experts = route->experts / j->ranks;
    for (int64_t i = 0; i < route->experts * j->ranks; i++)
        TN_REQUIRE(route->tokens[i] >= 0 && route->tokens[i] <= (int64_t)1 << 32,
                   "%s: route.tokens says %lld of rank %lld for expert %lld", j->name,
                   (long long)route->tokens[i], (long long)(i / route->experts),
                   (long long)(i % route->experts));
    return TN_OK;
}

static tn_status check_rows(const journey *j, const char *role, const tn_tensor_info *info,
                            int is_home) {
    const int64_t end = (j->rank + 1) * j->own_experts;
    const int64_t rows = is_home ? home_first(j, j->route->experts) : away_first(j, end);
    TN_REQUIRE(info->rows == rows, "%s: %s (tensor %s) has %lld rows, expected %lld: %s", j->name,
               role, info->name, (long long)info->rows, (long long)rows,
               is_home ? "this rank's tokens" : "those of its experts");
    return TN_OK;
}

static tn_status check_tensors(journey *j) {
    const int is_plain = j->src.format == TN_FORMAT_PLAIN;
    if (!is_plain && j->src.format != TN_FORMAT_FP8_BLOCK_1D)
        return TN_FAIL(TN_UNSUPPORTED, "%s: src (tensor %s) is %s, expected %s or %s", j->name,
                       j->src.name, tn_format_name(j->src.format), tn_format_name(TN_FORMAT_PLAIN),
                       tn_format_name(TN_FORMAT_FP8_BLOCK_1D));
    TN_REQUIRE(j->src.format == j->dst.format && j->src.dtype == j->dst.dtype &&
                   j->src.scale_mode == j->dst.scale_mode && j->src.cols == j->dst.cols,
               "%s: src (tensor %s) and dst (tensor %s) must have one format, type, scale mode and "
               "number of columns",
               j->name, j->src.name, j->dst.name);
    j->plane = is_plain ? TN_PLANE_DATA : TN_PLANE_ROW;
    TN_TRY(check_rows(j, "src", &j->src, !j->is_back));
    return check_rows(j, "dst", &j->dst, j->is_back);
}

static tn_status run(const char *name, const tn_expert_args *args, int is_back, tn_stream stream) {
    journey j = {.name = name,
                 .is_back = is_back,
                 .stream = stream,
                 .src = TN_TENSOR_INFO_INIT,
                 .dst = TN_TENSOR_INFO_INIT};
    TN_REQUIRE(args && args->size == sizeof *args,
               "%s: args is NULL, or not from the initializer macro", name);
    TN_TRY(check_route(&j, &args->route));
    TN_TRY(tn_tensor_info_get(args->src, &j.src));
    TN_TRY(tn_tensor_info_get(args->dst, &j.dst));
    TN_TRY(tn__tensor_device(args->dst, &j.device));
    TN_TRY(check_tensors(&j));
    j.lists = tn__host_alloc(4 * (size_t)j.ranks, sizeof *j.lists);
    if (!j.lists) return TN_OUT_OF_HOST_MEMORY;
    const uint64_t puts = tn__comm_puts(args->route.comm);
    tn_status status = with_leases(&j, args);
    tn__host_free(j.lists);
    return tn__comm_end_call(args->route.comm, name, puts, status);
}

tn_status tn_expert_dispatch(const tn_expert_args *args, tn_stream stream) {
    return run("tn_expert_dispatch", args, 0, stream);
}

tn_status tn_expert_combine(const tn_expert_args *args, tn_stream stream) {
    return run("tn_expert_combine", args, 1, stream);
}

tn_status tn_expert_offsets(const tn_expert_route *route, int64_t *offsets) {
    journey j = {.name = "tn_expert_offsets"};
    TN_REQUIRE(route && offsets, "%s: route or offsets is NULL", j.name);
    TN_TRY(check_route(&j, route));
    for (int64_t i = 0; i <= j.own_experts; i++)
        offsets[i] = away_first(&j, j.rank * j.own_experts + i);
    return TN_OK;
}
