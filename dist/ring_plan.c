/* Units of a ring that are gathered as a plan says, by its communicator.
 *
 * Invariant: a unit's tensors and its shard fit its plan, and the plan is of as many ranks as the
 * communicator has; so all that differs between ranks is which bytes they send.
 */
#include "host_alloc.h"
#include "ring_slots.h"

typedef struct planned {
    const tn_shard_plan *plan;
    tn_shard_phase phase;
    tn_comm *comm;
    tn_tensor shard;    /* that is made for each gather, also of other units */
    tn__ring_make make; /* NULL: the shard is the unit's, and is there */
    void *make_context;
} planned;

/* ---- as the ring asks for it ----------------------------------------------------------------- */

static tn_status gather_made(const planned *self, void *buffer, tn_stream stream) {
    tn_plane_view view = {0};
    tn_lease lease = {0};
    TN_TRY(self->make(self->make_context, stream));
    if (self->shard.value)
        TN_TRY(tn_lease_begin(self->shard, TN_PLANE_DATA, TN_READ, stream, &lease, &view));
    const tn_status status =
        tn_shard_gather(self->plan, self->phase, self->comm, view.data, buffer, stream);
    if (lease.value) tn__ring_lease_end(lease);
    return status;
}

static tn_status gather(void *context, const void *shard, void *buffer, tn_stream stream) {
    const planned *self = context;
    if (self->make) return gather_made(self, buffer, stream);
    return tn_shard_gather(self->plan, self->phase, self->comm, shard, buffer, stream);
}

/* The planes are adopted to be read only, those that lie in the shard, too. */
static tn_status locate(void *context, int tensor, const void *shard, void *buffer,
                        tn_foreign_memory *out) {
    const planned *self = context;
    return tn_shard_plane_memory(self->plan, self->phase, tensor, (void *)(uintptr_t)shard, buffer,
                                 out);
}

static void end(void *context) { tn__host_free(context); }

/* ---- checks ---------------------------------------------------------------------------------- */

static tn_status check_config(const tn_ring *ring, const tn_ring_unit_config *config) {
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_ring_unit_add: config is not TN_RING_UNIT_CONFIG_INIT");
    TN_REQUIRE(config->plan, "tn_ring_unit_add: ring %s: config->plan is NULL", ring->name);
    TN_REQUIRE(config->phase == TN_SHARD_FORWARD || config->phase == TN_SHARD_BACKWARD,
               "tn_ring_unit_add: ring %s: there is no phase %d", ring->name, (int)config->phase);
    TN_REQUIRE(config->tensors || config->tensor_count == 0,
               "tn_ring_unit_add: ring %s: %d tensors at NULL", ring->name, config->tensor_count);
    return TN_OK;
}

static tn_status check_plan(const tn_ring *ring, const tn_ring_unit_config *config,
                            tn_shard_plan_info *info) {
    TN_TRY(tn_shard_plan_info_get(config->plan, info));
    TN_REQUIRE(info->rank_count == tn_comm_size(ring->comm),
               "ring %s: the plan of unit %s is for %d ranks, and communicator %s has %d",
               ring->name, info->name, info->rank_count, tn_comm_name(ring->comm),
               tn_comm_size(ring->comm));
    TN_REQUIRE(info->tensor_count == config->tensor_count,
               "ring %s: the plan of unit %s has %d tensors, and %d were given", ring->name,
               info->name, info->tensor_count, config->tensor_count);
    return TN_OK;
}

static tn_status check_tensor(const tn_ring_unit_config *config, const char *unit, int index) {
    tn_shard_tensor planned_as;
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    TN_TRY(tn_shard_tensor_get(config->plan, index, &planned_as));
    TN_TRY(tn_tensor_info_get(config->tensors[index], &info));
    int is_same_kind = info.format == planned_as.format && info.dtype == planned_as.dtype;
    int is_same_size = info.rows == planned_as.rows && info.cols == planned_as.cols;
    TN_REQUIRE(is_same_kind && is_same_size,
               "unit %s, tensor %d (%s): it is %s %s of %lld x %lld, and the plan has %s %s of "
               "%lld x %lld",
               unit, index, info.name, tn_format_name(info.format), tn_dtype_name(info.dtype),
               (long long)info.rows, (long long)info.cols, tn_format_name(planned_as.format),
               tn_dtype_name(planned_as.dtype), (long long)planned_as.rows,
               (long long)planned_as.cols);
    return TN_OK;
}

static tn_status check_shard(const tn_ring *ring, const tn_ring_unit_config *config,
                             const char *unit) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    size_t needed = 0;
    TN_TRY(tn_shard_bytes(config->plan, tn_comm_rank(ring->comm), &needed));
    if (!config->shard.value) {
        TN_REQUIRE(needed == 0, "unit %s: this rank has a shard of %zu bytes, and none was given",
                   unit, needed);
        return TN_OK;
    }
    TN_TRY(tn_tensor_info_get(config->shard, &info));
    TN_REQUIRE(info.format == TN_FORMAT_PLAIN && info.dtype == TN_BYTE,
               "unit %s: the shard %s is %s %s, and not bytes", unit, info.name,
               tn_format_name(info.format), tn_dtype_name(info.dtype));
    TN_REQUIRE((uint64_t)(info.rows * info.cols) >= needed,
               "unit %s: the shard %s has %lld bytes, and this rank needs %zu", unit, info.name,
               (long long)(info.rows * info.cols), needed);
    return TN_OK;
}

static tn_status add(tn_ring *ring, const tn_ring_unit_config *config, tn_tensor contents,
                     tn__ring_make make, void *make_context, int *out) {
    tn_shard_plan_info info = TN_SHARD_PLAN_INFO_INIT;
    TN_REQUIRE(ring && ring->comm, "tn_ring_unit_add: there is no ring");
    TN_REQUIRE(out, "tn_ring_unit_add: out is NULL");
    TN_TRY(check_config(ring, config));
    TN_TRY(check_plan(ring, config, &info));
    for (int i = 0; i < config->tensor_count; i++)
        TN_TRY(check_tensor(config, info.name, i));
    TN_TRY(check_shard(ring, config, info.name));
    planned *context = tn__host_alloc(1, sizeof *context);
    if (!context) return TN_OUT_OF_HOST_MEMORY;
    *context =
        (planned){config->plan, config->phase, ring->comm, config->shard, make, make_context};
    tn__ring_source source = {info.gathered_bytes[config->phase],
                              info.hash + (uint64_t)config->phase,
                              gather,
                              locate,
                              end,
                              context};
    tn_status status = tn__ring_unit_add(ring, config->name ? config->name : info.name, &source,
                                         contents, config->tensors, config->tensor_count, out);
    if (status != TN_OK) tn__host_free(context);
    return status;
}

tn_status tn_ring_unit_add(tn_ring *ring, const tn_ring_unit_config *config, int *out) {
    return add(ring, config, config ? config->shard : (tn_tensor){0}, NULL, NULL, out);
}

tn_status tn__ring_made_unit_add(tn_ring *ring, const tn_ring_unit_config *config,
                                 tn_tensor version, tn__ring_make make, void *context, int *out) {
    return add(ring, config, version, make, context, out);
}
