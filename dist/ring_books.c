/* What a ring tells: names, states, counts, and the hash that ranks compare. */
#include "comm.h"
#include "host_alloc.h"
#include "ring_slots.h"

static const char *const state_names[] = {"EMPTY", "RESERVED", "COMM",
                                          "READY", "IN_USE",   "DRAINING"};

const char *tn_ring_state_name(tn_ring_state state) {
    unsigned at = (unsigned)state;
    return at < sizeof state_names / sizeof *state_names ? state_names[at] : "unknown state";
}

/* ---- questions ----------------------------------------------------------------------------- */

tn_status tn_ring_unit_info_get(tn_ring *ring, int unit, tn_ring_unit_info *out) {
    TN_REQUIRE(ring, "tn_ring_unit_info_get: ring is NULL");
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_ring_unit_info_get: out is not TN_RING_UNIT_INFO_INIT");
    pthread_mutex_lock(&ring->lock);
    tn_status status = tn__ring_check_unit(ring, unit, "tn_ring_unit_info_get");
    if (status == TN_OK) {
        const tn__ring_unit *of = &ring->units[unit];
        const tn__ring_slot *slot = of->slot < 0 ? NULL : &ring->slots[of->slot];
        out->name = of->name;
        out->state = slot ? slot->state : TN_RING_EMPTY;
        out->holds = slot ? slot->holds : 0;
        out->bytes = of->bytes;
        out->offset = slot ? slot->offset : 0;
    }
    pthread_mutex_unlock(&ring->lock);
    return status;
}

tn_status tn_ring_stats_get(tn_ring *ring, tn_ring_stats *out) {
    TN_REQUIRE(ring, "tn_ring_stats_get: ring is NULL");
    TN_REQUIRE(out && out->size == sizeof *out, "tn_ring_stats_get: out is not TN_RING_STATS_INIT");
    pthread_mutex_lock(&ring->lock);
    *out = ring->stats;
    out->buffer_bytes = ring->buffer_bytes;
    out->units = ring->unit_count;
    out->slots = ring->slot_count;
    out->register_text = ring->register_text ? ring->register_text : "";
    pthread_mutex_unlock(&ring->lock);
    return TN_OK;
}

/* ---- the hash ------------------------------------------------------------------------------ */

/* A step of splitmix64: every bit of the past counts for every bit of the hash. */
static uint64_t mix(uint64_t hash, uint64_t word) {
    uint64_t z = hash + 0x9E3779B97F4A7C15u + word;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

void tn__ring_mix(tn_ring *ring, uint64_t what, int unit, size_t offset) {
    uint64_t hash = mix(ring->stats.hash, what);
    hash = mix(hash, (uint64_t)unit);
    hash = mix(hash, ring->units[unit].source.hash);
    ring->stats.hash = mix(hash, offset);
}

/* The hashes of all ranks, behind this rank's own, in memory of the device. */
static tn_status exchange(tn_ring *ring, tn_tensor scratch, uint64_t *hashes, size_t ranks) {
    tn_plane_view view;
    tn_lease lease;
    size_t bytes = sizeof *hashes;
    TN_TRY(tn_lease_begin(scratch, TN_PLANE_DATA, TN_WRITE, ring->stream, &lease, &view));
    char *mine = view.data, *all = mine + bytes;
    tn_status status = tn_copy(ring->device, mine, &ring->stats.hash, bytes, ring->stream);
    if (status == TN_OK) status = tn_all_gather(ring->comm, mine, all, bytes, ring->stream);
    if (status == TN_OK) {
        status = tn_copy(ring->device, hashes, all, ranks * bytes, ring->stream);
    }
    tn_status waited = tn_stream_synchronize(ring->device, ring->stream);
    if (status == TN_OK) status = waited;
    if (status == TN_OK) status = tn_comm_wait(ring->comm);
    if (status == TN_OK) return tn_lease_end(lease);
    tn__saved_error error;
    tn__error_save(&error);
    tn__ring_lease_end(lease);
    tn__error_restore(&error);
    return status;
}

static tn_status compare(const tn_ring *ring, const uint64_t *hashes, int ranks) {
    for (int i = 0; i < ranks; i++) {
        if (hashes[i] == ring->stats.hash) continue;
        return TN_FAIL(TN_COMM_ERROR,
                       "ring %s: rank %d has made other calls than this one: its hash is %016llx, "
                       "here it is %016llx after %llu gathers",
                       ring->name, i, (unsigned long long)hashes[i],
                       (unsigned long long)ring->stats.hash,
                       (unsigned long long)ring->stats.gathers);
    }
    return TN_OK;
}

static tn_status verify(tn_ring *ring) {
    int ranks = tn_comm_size(ring->comm);
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor scratch = {0};
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.shape[0] = (int64_t)((size_t)(ranks + 1) * sizeof(uint64_t));
    config.name = "hashes of a ring";
    TN_TRY(tn__refuse_capture(ring->device, ring->stream, "tn_ring_verify"));
    uint64_t *hashes = tn__host_alloc((size_t)ranks, sizeof *hashes);
    if (!hashes) return TN_OUT_OF_HOST_MEMORY;
    tn_status status = tn_tensor_create(ring->scope, &config, &scratch);
    if (status == TN_OK) {
        const uint64_t puts = tn__comm_puts(ring->comm);
        status = tn__comm_end_call(ring->comm, "tn_ring_verify", puts,
                                   exchange(ring, scratch, hashes, (size_t)ranks));
        if (status == TN_OK) status = compare(ring, hashes, ranks);
        tn__saved_error error;
        tn__error_save(&error);
        tn_status ended = tn_tensor_destroy(scratch, ring->stream);
        if (status == TN_OK)
            status = ended;
        else
            tn__error_restore(&error);
    }
    tn__host_free(hashes);
    return status;
}

tn_status tn_ring_verify(tn_ring *ring) {
    TN_REQUIRE(ring, "tn_ring_verify: ring is NULL");
    pthread_mutex_lock(&ring->lock);
    tn_status status = ring->comm ? verify(ring) : TN_OK;
    pthread_mutex_unlock(&ring->lock);
    return status;
}
