/* The cast of a rank's elements into its shard: tn_shard_cast.
 *
 *     TILES, RAGGED   a piece is whole rows, and the bytes of its planes are those of a tensor of
 *                     these rows alone: it is adopted as one, in the shard, and cast as one
 *     FLAT            a piece is a range of elements: tn_shard_quantize, with the amaxes of whole
 *                     tiles
 *
 * Adopted pieces live in a scope of the call's own. The shard is under one lease for the length of
 * the call, so that its state and order are those of any tensor that is written.
 *
 * Invariant: a tensor that is not cast, and a byte between pieces, is not written; where the shard
 * had no contents, they are 0.
 */
#include "shard_plan.h"

#include "comm.h"
#include "lease.h"
#include "tenure_grouped.h"
#include "tensor_internal.h"

#include <math.h>

/* One call. */
typedef struct cast {
    const char *name;
    const tn_shard_cast_args *args;
    const tn_shard_plan *plan;
    tn_stream stream;
    tn_device *device;
    int rank;
    tn_scope scope;
    char *shard;
    float *amax;
    tn_lease shard_lease, amax_lease;
    int is_new;        /* the shard had no contents */
    tn_tensor nothing; /* a master of no elements */
} cast;

static int is_none(tn_tensor tensor) { return tensor.value == 0; }

/* ---- checks --------------------------------------------------------------------------------- */

static int is_cast(const cast *c, int tensor) {
    return c->args->with_frozen || !c->plan->members[tensor].spec.frozen;
}

static int64_t count_of(const cast *c, int tensor) {
    int64_t first, count;
    tn__shard_elements(c->plan, &c->plan->cut, tensor, c->rank, &first, &count);
    return count;
}

static tn_status check_ranks(cast *c) {
    const tn_shard_cast_args *args = c->args;
    int ranks = c->plan->rank_count;
    if (args->comm) {
        TN_REQUIRE(tn_comm_size(args->comm) == ranks,
                   "%s: unit %s is cut for %d ranks, communicator %s has %d", c->name,
                   c->plan->name, ranks, tn_comm_name(args->comm), tn_comm_size(args->comm));
        c->rank = tn_comm_rank(args->comm);
        return TN_OK;
    }
    TN_REQUIRE(args->rank >= 0 && args->rank < ranks, "%s: rank %d of unit %s, which has %d ranks",
               c->name, args->rank, c->plan->name, ranks);
    c->rank = args->rank;
    return TN_OK;
}

static tn_status check_master(const cast *c, int tensor) {
    const tn__shard_member *member = &c->plan->members[tensor];
    tn_tensor master = c->args->masters[tensor];
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    int64_t count = count_of(c, tensor);
    if (is_none(master) && count == 0) return TN_OK;
    TN_REQUIRE(!is_none(master),
               "%s: unit %s, tensor %s: masters[%d] is {0}, and rank %d has %lld "
               "elements of it",
               c->name, c->plan->name, member->name, tensor, c->rank, (long long)count);
    TN_TRY(tn_tensor_info_get(master, &info));
    TN_REQUIRE(
        info.rows * info.cols == count,
        "%s: unit %s, tensor %s: masters[%d] (tensor %s) has %lld elements, rank %d has %lld",
        c->name, c->plan->name, member->name, tensor, info.name, (long long)(info.rows * info.cols),
        c->rank, (long long)count);
    int is_bytes = member->spec.dtype == TN_BYTE;
    TN_REQUIRE(info.format == TN_FORMAT_PLAIN && (info.dtype == TN_BYTE) == is_bytes,
               "%s: unit %s, tensor %s: masters[%d] (tensor %s) is %s %s, expected plain %s",
               c->name, c->plan->name, member->name, tensor, info.name, tn_format_name(info.format),
               tn_dtype_name(info.dtype), is_bytes ? "bytes" : "fp32, bf16 or fp16");
    return TN_OK;
}

static tn_status check_shard(const cast *c) {
    tn_tensor shard = c->args->shard;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    size_t bytes = c->plan->ranks[c->rank].shard_bytes;
    if (is_none(shard) && bytes == 0) return TN_OK;
    TN_REQUIRE(!is_none(shard), "%s: shard is {0}, and rank %d has %zu bytes of unit %s", c->name,
               c->rank, bytes, c->plan->name);
    TN_TRY(tn_tensor_info_get(shard, &info));
    TN_REQUIRE(info.format == TN_FORMAT_PLAIN && info.dtype == TN_BYTE,
               "%s: shard (tensor %s) is %s %s, expected plain bytes", c->name, info.name,
               tn_format_name(info.format), tn_dtype_name(info.dtype));
    TN_REQUIRE((size_t)(info.rows * info.cols) >= bytes,
               "%s: shard (tensor %s) has %lld bytes, rank %d has %zu of unit %s", c->name,
               info.name, (long long)(info.rows * info.cols), c->rank, bytes, c->plan->name);
    return TN_OK;
}

static tn_status check_amax(const cast *c, int is_needed) {
    const tn_shard_plan_info *plan = &c->plan->info;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    if (is_none(c->args->amax)) {
        TN_REQUIRE(!is_needed,
                   "%s: unit %s reduces %lld amaxes: without a communicator, amax is to be given, "
                   "reduced over the ranks",
                   c->name, c->plan->name, (long long)plan->amax_count);
        return TN_OK;
    }
    TN_TRY(tn_tensor_info_get(c->args->amax, &info));
    TN_REQUIRE(info.format == TN_FORMAT_PLAIN && info.dtype == TN_FP32 &&
                   info.rows * info.cols >= plan->amax_count,
               "%s: amax (tensor %s) is %s %s of %lld elements, expected plain fp32 of %lld",
               c->name, info.name, tn_format_name(info.format), tn_dtype_name(info.dtype),
               (long long)(info.rows * info.cols), (long long)plan->amax_count);
    return TN_OK;
}

static tn_status begin(cast *c, const char *name, const tn_shard_cast_args *args,
                       tn_stream stream) {
    *c = (cast){.name = name, .args = args, .stream = stream};
    TN_REQUIRE(args && args->size == sizeof *args, "%s: args is not TN_SHARD_CAST_ARGS_INIT", name);
    TN_REQUIRE(args->plan, "%s: plan is NULL", name);
    c->plan = args->plan;
    TN_REQUIRE(args->masters || c->plan->tensor_count == 0, "%s: masters is NULL", name);
    TN_REQUIRE(args->with_frozen == 0 || args->with_frozen == 1,
               "%s: with_frozen is %d, expected 0 or 1", name, args->with_frozen);
    TN_REQUIRE(isfinite(args->amax_epsilon) && args->amax_epsilon >= 0.0f,
               "%s: amax_epsilon is %g, expected a finite number of at least 0", name,
               (double)args->amax_epsilon);
    TN_TRY(check_ranks(c));
    for (int i = 0; i < c->plan->tensor_count; i++) {
        if (is_cast(c, i)) TN_TRY(check_master(c, i));
    }
    return tn__scope_device(args->scope, &c->device);
}

static int is_flat(const cast *c) { return c->plan->cut.layout == TN_SHARD_FLAT; }

/* ---- parts of blocks, as tensors ------------------------------------------------------------ */

static tn_status open_scope(cast *c) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_tensor_config nothing = TN_TENSOR_CONFIG_INIT;
    config.parent = c->args->scope, config.kind = TN_SCOPE_OP, config.name = c->name;
    nothing.rank = 1, nothing.name = "no elements";
    TN_TRY(tn_scope_create(&config, &c->scope));
    TN_TRY(tn_tensor_create(c->scope, &nothing, &c->nothing));
    return tn_plane_fill(c->nothing, TN_PLANE_DATA, 0, c->stream);
}

static tn_status adopt(const cast *c, const tn_tensor_config *config, tn_plane plane, void *data,
                       void *scale, tn_tensor *out) {
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    memory.plane = plane;
    memory.data = data, memory.data_bytes = SIZE_MAX;
    memory.scale = scale, memory.scale_bytes = SIZE_MAX;
    memory.stream = c->stream;
    return tn_tensor_adopt(c->scope, config, &memory, out);
}

static tn_status adopt_run(const cast *c, tn_dtype dtype, int64_t count, void *data,
                           tn_tensor *out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.dtype = dtype;
    config.rank = 1, config.shape[0] = count;
    return adopt(c, &config, TN_PLANE_DATA, data, NULL, out);
}

/* Rows of a tensor, as one of its format; in FLAT elements of a tensor with one scale. */
static tn_status adopt_piece(const cast *c, int tensor, tn_plane plane, tn_tensor *out) {
    const tn_shard_tensor *spec = &c->plan->members[tensor].spec;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    int64_t data = tn__shard_item_offset(c->plan, c->rank, tensor, plane, 0);
    int64_t scale = tn__shard_item_offset(c->plan, c->rank, tensor, plane, 1);
    config.format = spec->format;
    config.dtype = spec->dtype;
    config.scale_mode = spec->scale_mode;
    config.rank = 2;
    config.shape[0] = is_flat(c) ? 1 : count_of(c, tensor) / spec->cols;
    config.shape[1] = is_flat(c) ? count_of(c, tensor) : spec->cols;
    return adopt(c, &config, plane, c->shard + data, scale < 0 ? NULL : c->shard + scale, out);
}

/* ---- amaxes --------------------------------------------------------------------------------- */

static int64_t reduced_count(const cast *c) {
    const tn_shard_plan_info *info = &c->plan->info;
    return c->args->with_frozen ? info->amax_count : info->amax_count_trained;
}

static tn_status adopt_amax(const cast *c, int tensor, tn_tensor *out) {
    const tn__shard_member *member = &c->plan->members[tensor];
    return adopt_run(c, TN_FP32, member->amax_count, c->amax + member->amax_first, out);
}

static tn_status amax_of_piece(const cast *c, int tensor) {
    const tn__shard_member *member = &c->plan->members[tensor];
    tn_shard_amax_args args = TN_SHARD_AMAX_ARGS_INIT;
    int64_t count;
    args.src = c->args->masters[tensor];
    args.rows = member->spec.rows, args.cols = member->spec.cols;
    tn__shard_elements(c->plan, &c->plan->cut, tensor, c->rank, &args.first, &count);
    if (count == 0 || member->amax_count == 0) return TN_OK;
    args.whole = tn__shard_has_one_scale(&member->layout);
    TN_TRY(adopt_amax(c, tensor, &args.amax));
    return tn_shard_amax(&args, c->stream);
}

/* Of tiles that the rank has nothing of, 0. */
static tn_status own_amaxes(const cast *c) {
    size_t bytes = (size_t)c->plan->info.amax_count * sizeof(float);
    if (bytes == 0) return TN_OK;
    TN_TRY(tn_fill(c->device, c->amax, 0, bytes, c->stream));
    for (int i = 0; i < c->plan->tensor_count; i++) {
        if (is_cast(c, i)) TN_TRY(amax_of_piece(c, i));
    }
    return TN_OK;
}

static tn_status lease_amax(cast *c, tn_tensor tensor, tn_access access) {
    tn_plane_view view;
    TN_TRY(tn_lease_begin(tensor, TN_PLANE_DATA, access, c->stream, &c->amax_lease, &view));
    c->amax = view.data;
    return TN_OK;
}

/* Of all ranks: given, or made here. */
static tn_status reduced_amaxes(cast *c) {
    int64_t count = reduced_count(c);
    tn_tensor scratch = c->args->amax;
    if (count == 0) return TN_OK;
    if (!c->args->comm && !is_none(scratch)) return lease_amax(c, scratch, TN_READ);
    if (is_none(scratch)) {
        tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
        config.rank = 1, config.shape[0] = c->plan->info.amax_count, config.name = "amaxes";
        TN_TRY(tn_tensor_create(c->scope, &config, &scratch));
    }
    TN_TRY(lease_amax(c, scratch, TN_WRITE));
    TN_TRY(own_amaxes(c));
    if (c->plan->rank_count == 1) return TN_OK;
    return tn_all_reduce(c->args->comm, c->amax, c->amax, (size_t)count, TN_FP32, TN_REDUCE_MAX,
                         c->stream);
}

/* ---- pieces --------------------------------------------------------------------------------- */

static tn_status copy_bytes(const cast *c, tn_tensor master, char *to, int64_t count) {
    tn_plane_view view;
    tn_lease lease;
    TN_TRY(tn_lease_begin(master, TN_PLANE_DATA, TN_READ, c->stream, &lease, &view));
    tn_status status = tn_copy(c->device, to, view.data, (size_t)count, c->stream);
    if (status == TN_OK) return tn_lease_end(lease);
    TN_CHECK(tn_lease_abandon(lease) == TN_OK);
    return status;
}

/* Without blocks: any layout. */
static tn_status write_plain(const cast *c, int tensor) {
    const tn__shard_member *member = &c->plan->members[tensor];
    tn_convert_args args = TN_CONVERT_ARGS_INIT;
    int64_t count = count_of(c, tensor);
    int64_t data = tn__shard_item_offset(c->plan, c->rank, tensor, member->plane, 0);
    if (count == 0) return TN_OK;
    args.x = c->args->masters[tensor];
    if (member->spec.dtype == TN_BYTE) return copy_bytes(c, args.x, c->shard + data, count);
    TN_TRY(adopt_run(c, member->spec.dtype, count, c->shard + data, &args.y));
    return tn_convert(&args, c->stream);
}

static tn_status write_plane(const cast *c, int tensor, tn_plane plane) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.planes = plane == TN_PLANE_COL ? TN_QUANTIZE_COL : TN_QUANTIZE_ROW;
    args.amax_epsilon = c->args->amax_epsilon;
    args.skip = c->args->skip;
    if (c->plan->members[tensor].amax_count) TN_TRY(adopt_amax(c, tensor, &args.whole_amax));
    TN_TRY(adopt_piece(c, tensor, plane, &args.dst));
    tn_tensor master = c->args->masters[tensor];
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    TN_TRY(tn_tensor_info_get(args.dst, &info));
    TN_TRY(tn_tensor_view_shape(master, info.rank, info.shape, c->scope, &args.src));
    return tn_quantize(&args, c->stream);
}

static tn_status write_rows(const cast *c, int tensor) {
    const tn__shard_member *member = &c->plan->members[tensor];
    TN_TRY(write_plane(c, tensor, member->plane));
    return member->has_col ? write_plane(c, tensor, TN_PLANE_COL) : TN_OK;
}

/* FLAT: all scales of the tensor, also where the rank has none of its elements. There a tensor with
 * one scale is as good as one of one tile. */
static tn_status write_tiles(const cast *c, int tensor) {
    const tn__shard_member *member = &c->plan->members[tensor];
    int has_one = tn__shard_has_one_scale(&member->layout);
    const tn_plane_layout *layout = &member->layout;
    tn_shard_quantize_args args = TN_SHARD_QUANTIZE_ARGS_INIT;
    int64_t count, data = tn__shard_item_offset(c->plan, c->rank, tensor, member->plane, 0);
    args.rows = has_one ? 1 : member->spec.rows;
    args.cols = has_one ? 1 : member->spec.cols;
    args.dtype = member->spec.dtype;
    args.scale_mode = member->spec.scale_mode;
    args.amax_epsilon = c->args->amax_epsilon;
    args.skip = c->args->skip;
    tn__shard_elements(c->plan, &c->plan->cut, tensor, c->rank, &args.first, &count);
    args.src = c->args->masters[tensor];
    if (is_none(args.src) || has_one) args.src = c->nothing;
    TN_TRY(adopt_amax(c, tensor, &args.amax));
    TN_TRY(adopt_run(c, TN_BYTE, count, count ? c->shard + data : NULL, &args.data));
    TN_TRY(adopt_run(c, TN_FP32, (int64_t)(layout->scale_bytes / sizeof(float)),
                     c->shard + member->flat_scale_offset, &args.scale));
    return tn_shard_quantize(&args, c->stream);
}

static tn_status write_tensor(const cast *c, int tensor) {
    const tn__shard_member *member = &c->plan->members[tensor];
    if (member->tile_rows == 0) return TN_OK;
    if (member->layout.scale_bytes == 0) return write_plain(c, tensor);
    int is_piece = !is_flat(c) || tn__shard_has_one_scale(&member->layout);
    if (is_piece && count_of(c, tensor) > 0) return write_rows(c, tensor);
    return is_flat(c) ? write_tiles(c, tensor) : TN_OK;
}

/* ---- the calls ------------------------------------------------------------------------------ */

/* One of no bytes, too: that it has been written is seen by whoever has gathered it. */
static tn_status lease_shard(cast *c) {
    tn_plane_state state;
    tn_plane_view view;
    if (is_none(c->args->shard)) return TN_OK;
    TN_TRY(tn_plane_state_get(c->args->shard, TN_PLANE_DATA, &state));
    c->is_new = state != TN_PLANE_VALID && state != TN_PLANE_OFFLOADED;
    TN_TRY(tn_lease_begin(c->args->shard, TN_PLANE_DATA, c->is_new ? TN_WRITE : TN_UPDATE,
                          c->stream, &c->shard_lease, &view));
    c->shard = view.data;
    return c->is_new ? tn_fill(c->device, view.data, 0, view.layout.data_bytes, c->stream) : TN_OK;
}

/* A lease whose work was not all put on the stream is abandoned. */
static tn_status end_lease(tn_lease lease, tn_status status) {
    if (lease.value == 0) return status;
    if (status == TN_OK) status = tn_lease_end(lease);
    if (status != TN_OK) TN_CHECK(tn_lease_abandon(lease) == TN_OK);
    return status;
}

/* A shard that had contents has them after a failure, too, also of its own lease: of the pieces
 * that were not to be cast there is no other copy. */
static tn_status end_shard(const cast *c, tn_status status) {
    tn__saved_error saved;
    if (c->is_new || c->shard_lease.value == 0) return end_lease(c->shard_lease, status);
    tn__error_save(&saved);
    const tn_status ended = tn_lease_end(c->shard_lease);
    if (status == TN_OK) tn__error_save(&saved);
    if (ended != TN_OK) tn__lease_end_surely(c->shard_lease);
    if (status == TN_OK) status = ended;
    if (status != TN_OK) tn__error_restore(&saved);
    return status;
}

/* The amaxes may be a tensor of the scope, and the adopted pieces lie in the shard. */
static tn_status finish(cast *c, tn_status status) {
    tn__saved_error saved;
    status = end_lease(c->amax_lease, status);
    tn__error_save(&saved);
    tn_status closing = tn_scope_close(c->scope);
    if (status == TN_OK)
        status = closing;
    else
        tn__error_restore(&saved);
    return end_shard(c, status);
}

static tn_status put_amaxes(cast *c) {
    TN_TRY(open_scope(c));
    if (c->plan->info.amax_count == 0) return TN_OK;
    TN_TRY(lease_amax(c, c->args->amax, TN_WRITE));
    return own_amaxes(c);
}

tn_status tn_shard_cast_amax(const tn_shard_cast_args *args, tn_stream stream) {
    cast c;
    TN_TRY(begin(&c, "tn_shard_cast_amax", args, stream));
    TN_TRY(check_amax(&c, c.plan->info.amax_count > 0));
    return finish(&c, put_amaxes(&c));
}

static tn_status put_cast(cast *c) {
    TN_TRY(open_scope(c));
    TN_TRY(lease_shard(c));
    TN_TRY(reduced_amaxes(c));
    for (int i = 0; i < c->plan->tensor_count; i++) {
        if (is_cast(c, i)) TN_TRY(write_tensor(c, i));
    }
    return TN_OK;
}

tn_status tn_shard_cast(const tn_shard_cast_args *args, tn_stream stream) {
    cast c;
    TN_TRY(begin(&c, "tn_shard_cast", args, stream));
    int needs_amax = !args->comm && c.plan->rank_count > 1 && reduced_count(&c) > 0;
    TN_TRY(check_amax(&c, needs_amax));
    TN_TRY(check_shard(&c));
    if (!args->comm) return finish(&c, put_cast(&c));
    const uint64_t puts = tn__comm_puts(args->comm);
    return tn__comm_end_call(args->comm, c.name, puts, finish(&c, put_cast(&c)));
}
