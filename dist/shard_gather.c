/* Plans on communicators: all ranks have the same one, and their shards become whole planes. */
#include "shard_plan.h"

#include "comm.h"
#include "host_alloc.h"
#include "tensor_internal.h"

static tn_status check_ranks(const char *call, const tn_shard_plan *plan, const tn_comm *comm) {
    TN_REQUIRE(tn_comm_size(comm) == plan->rank_count,
               "%s: unit %s is cut for %d ranks, communicator %s has %d", call, plan->name,
               plan->rank_count, tn_comm_name(comm), tn_comm_size(comm));
    return TN_OK;
}

/* ---- one plan on all ranks ------------------------------------------------------------------ */

static tn_status compare_hashes(const tn_shard_plan *plan, tn_comm *comm, const uint64_t *hashes) {
    for (int rank = 1; rank < tn_comm_size(comm); rank++) {
        if (hashes[rank] == hashes[0]) continue;
        return TN_FAIL(
            TN_INVALID_STATE,
            "tn_shard_plan_verify: unit %s: rank %d of communicator %s is the first that "
            "has another plan than rank 0 (hash %016llx, not %016llx; here, on rank %d, "
            "it is %016llx): compare tn_shard_plan_text",
            plan->name, rank, tn_comm_name(comm), (unsigned long long)hashes[rank],
            (unsigned long long)hashes[0], tn_comm_rank(comm), (unsigned long long)plan->info.hash);
    }
    return check_ranks("tn_shard_plan_verify", plan, comm);
}

/* Every rank's hash, in a tensor of the size of all. */
static tn_status exchange(tn_tensor all, tn_comm *comm, uint64_t own, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    tn_device *device;
    TN_TRY(tn__tensor_device(all, &device));
    TN_TRY(tn_lease_begin(all, TN_PLANE_DATA, TN_WRITE, stream, &lease, &view));
    char *mine = (char *)view.data + (size_t)tn_comm_rank(comm) * sizeof own;
    tn_status status = tn_copy(device, mine, &own, sizeof own, stream);
    if (status == TN_OK) status = tn_all_gather(comm, mine, view.data, sizeof own, stream);
    tn_status waited = tn_stream_synchronize(device, stream);
    if (status == TN_OK) status = waited;
    if (status == TN_OK) return tn_lease_end(lease);
    TN_CHECK(tn_lease_abandon(lease) == TN_OK);
    return status;
}

static tn_status read_all(tn_tensor all, tn_comm *comm, uint64_t *hashes, tn_stream stream) {
    size_t bytes = (size_t)tn_comm_size(comm) * sizeof *hashes;
    tn_device *device;
    TN_TRY(tn_comm_wait(comm));
    TN_TRY(tn__tensor_device(all, &device));
    TN_TRY(tn_plane_read(all, TN_PLANE_DATA, hashes, bytes, NULL, 0, stream));
    return tn_stream_synchronize(device, stream);
}

static tn_status verify(const tn_shard_plan *plan, tn_comm *comm, tn_tensor all, uint64_t *hashes,
                        tn_stream stream) {
    const uint64_t puts = tn__comm_puts(comm);
    tn_status status = exchange(all, comm, plan->info.hash, stream);
    if (status == TN_OK) status = read_all(all, comm, hashes, stream);
    TN_TRY(tn__comm_end_call(comm, "tn_shard_plan_verify", puts, status));
    return compare_hashes(plan, comm, hashes);
}

tn_status tn_shard_plan_verify(const tn_shard_plan *plan, tn_comm *comm, tn_scope scope,
                               tn_stream stream) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor all;
    TN_REQUIRE(plan, "tn_shard_plan_verify: plan is NULL");
    TN_REQUIRE(comm, "tn_shard_plan_verify: comm is NULL");
    TN_TRY(tn__refuse_capture(comm->device, stream, "tn_shard_plan_verify"));
    config.dtype = TN_BYTE, config.name = "plan hashes";
    config.rank = 1, config.shape[0] = (int64_t)tn_comm_size(comm) * (int64_t)sizeof(uint64_t);
    TN_TRY(tn_tensor_create(scope, &config, &all));
    uint64_t *hashes = tn__host_alloc((size_t)tn_comm_size(comm), sizeof *hashes);
    tn_status status = hashes ? verify(plan, comm, all, hashes, stream) : TN_OUT_OF_HOST_MEMORY;
    tn__host_free(hashes);
    tn__saved_error saved;
    tn__error_save(&saved);
    tn_status ending = tn_tensor_destroy(all, stream);
    if (status == TN_OK) return ending;
    tn__error_restore(&saved);
    return status;
}

/* ---- gathers -------------------------------------------------------------------------------- */

/* In FLAT parts are equal, and lie as tn_all_gather puts them. */
static tn_status gather(const tn_shard_plan *plan, tn_shard_phase phase, tn_comm *comm,
                        const char *sent, void *gathered, tn_stream stream) {
    const tn__segment_list *list = &plan->segments[phase];
    if (plan->cut.layout == TN_SHARD_FLAT)
        return tn_all_gather(comm, sent, gathered, plan->cut.flat_part, stream);
    return tn_all_gather_uneven(comm, sent, gathered, list->items, list->count, stream);
}

tn_status tn_shard_gather(const tn_shard_plan *plan, tn_shard_phase phase, tn_comm *comm,
                          const void *shard, void *gathered, tn_stream stream) {
    TN_REQUIRE(plan, "tn_shard_gather: plan is NULL");
    TN_REQUIRE(comm, "tn_shard_gather: comm is NULL");
    TN_REQUIRE((unsigned)phase < TN_SHARD_PHASE_COUNT,
               "tn_shard_gather: phase is %d, which there is not", (int)phase);
    TN_TRY(check_ranks("tn_shard_gather", plan, comm));
    const tn__shard_rank *rank = &plan->ranks[tn_comm_rank(comm)];
    TN_REQUIRE(shard || rank->sent_bytes[phase] == 0,
               "tn_shard_gather: shard is NULL, and rank %d sends %zu bytes of unit %s",
               tn_comm_rank(comm), rank->sent_bytes[phase], plan->name);
    TN_REQUIRE(gathered || plan->info.gathered_bytes[phase] == 0,
               "tn_shard_gather: gathered is NULL, and unit %s takes %zu bytes", plan->name,
               plan->info.gathered_bytes[phase]);
    const char *sent = shard ? (const char *)shard + rank->sent_offset[phase] : NULL;
    return gather(plan, phase, comm, sent, gathered, stream);
}
