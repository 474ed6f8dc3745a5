/* The buffers that are compared: see dist_wire.h.
 *
 * With NCCL each kind has a communicator of its own, made by an id, so that one that fails (a
 * registration that NCCL does not survive, say) spoils no other's figures.
 */
#include <stdlib.h>
#include <string.h>

#include "dist_wire.h"

#define TRY(call)                                                                                  \
    do {                                                                                           \
        tn_status try_status = (call);                                                             \
        if (try_status != TN_OK) return try_status;                                                \
    } while (0)

enum { UNREGISTERED = -1 };

typedef struct buffer_kind {
    const char *name;
    tn_pool_backing backing;
    unsigned flags;   /* of its block */
    int registration; /* a tn_registration_kind, or UNREGISTERED */
} buffer_kind;

static const buffer_kind kinds[DIST_WIRE_VARIANTS] = {
    {"plain", TN_BACKING_PLAIN, 0, UNREGISTERED}, /* what cudaMalloc gives */
    {"pool", TN_BACKING_AUTO, 0, UNREGISTERED},
    {"pool-registered", TN_BACKING_AUTO, 0, TN_REGISTER_BUFFER},
    {"handle-registered", TN_BACKING_AUTO, TN_ALLOC_SHAREABLE, TN_REGISTER_BUFFER},
    {"handle-window", TN_BACKING_AUTO, TN_ALLOC_SHAREABLE, TN_REGISTER_WINDOW},
    {"nccl", TN_BACKING_CALLER, 0, UNREGISTERED}, /* ncclMemAlloc */
    {"nccl-registered", TN_BACKING_CALLER, 0, TN_REGISTER_BUFFER},
    {"nccl-window", TN_BACKING_CALLER, 0, TN_REGISTER_WINDOW},
};

const char *dist_wire_buffer_name(int variant) { return kinds[variant].name; }

/* ---- names ----------------------------------------------------------------------------------- */

int dist_wire_is_wanted(const char *only, const char *name) {
    const size_t length = strlen(name);
    for (const char *at = only; at && *at; at += *at == ',') {
        const size_t item = strcspn(at, ",");
        if (item == length && strncmp(at, name, length) == 0) return 1;
        at += item;
    }
    return only == NULL;
}

static int is_known(const char *name, size_t length) {
    for (int i = 0; i < DIST_WIRE_VARIANTS; i++)
        if (strlen(kinds[i].name) == length && strncmp(kinds[i].name, name, length) == 0) return 1;
    return 0;
}

int dist_wire_names_are_known(const char *only) {
    for (const char *at = only; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!is_known(at, strcspn(at, ","))) return 0;
    return 1;
}

/* ---- making one ------------------------------------------------------------------------------ */

/* All ranks take part in all of it, whatever some of them have failed with. */
static tn_status make_comm(dist_bench *bench, dist_wire_buffer *buffer) {
    const int count = tn_comm_size(bench->comm);
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    tn_comm_id id;
    memset(&id, 0, sizeof id);
    buffer->comm = bench->comm;
    if (!bench->ranks || strcmp(tn_comm_engine_name(bench->comm), "NCCL") != 0) return TN_OK;
    tn_comm_id *ids = malloc((size_t)count * sizeof *ids);
    tn_status status = ids ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK && tn_comm_rank(bench->comm) == 0) status = tn_comm_id_create(&id);
    status = dist_bench_worst(bench, status);
    if (status == TN_OK) status = tn_rendezvous_gather(bench->ranks, &id, sizeof id, ids);
    if (status == TN_OK) {
        config.device = bench->device;
        config.engine = TN_COMM_NCCL;
        config.name = buffer->name;
        config.id = &ids[0];
        config.rank = tn_comm_rank(bench->comm);
        config.rank_count = count;
        config.timeout_us = DIST_BENCH_TIMEOUT_US;
        status = tn_comm_create(&config, &buffer->comm);
        buffer->owns_comm = status == TN_OK;
    }
    free(ids);
    return status;
}

static tn_status make_block(dist_bench *bench, const buffer_kind *kind, dist_wire_buffer *buffer) {
    tn_pool_config config = TN_POOL_CONFIG_INIT;
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *block = NULL;
    config.name = kind->name;
    config.backing = kind->backing;
    options.flags = kind->flags;
    if (kind->backing == TN_BACKING_CALLER)
        TRY(tn_comm_memory_functions(buffer->comm, &config.functions));
    TRY(tn_pool_create(bench->device, &config, &buffer->pool));
    TRY(tn_alloc(buffer->pool, 2 * buffer->half_bytes, bench->stream, &options, &block));
    buffer->whole = block;
    buffer->part = buffer->whole + buffer->half_bytes;
    return TN_OK;
}

static tn_status enroll(const buffer_kind *kind, dist_wire_buffer *buffer) {
    tn_registration_info info = TN_REGISTRATION_INFO_INIT;
    if (kind->registration == UNREGISTERED) return TN_OK;
    TRY(tn_comm_register(buffer->comm, buffer->whole, 2 * buffer->half_bytes,
                         (tn_registration_kind)kind->registration, &buffer->registration));
    TRY(tn_registration_info_get(buffer->registration, &info));
    buffer->register_us = info.register_us ? info.register_us : 1;
    return TN_OK;
}

/* Keeps this rank's words for a status of its own; all ranks have the same status after it. */
static void agree(dist_bench *bench, dist_wire_buffer *buffer, tn_status mine) {
    const char *words = mine == TN_OK ? "another rank has failed" : tn_error_last();
    snprintf(buffer->words, sizeof buffer->words, "%s", words);
    buffer->status = dist_bench_worst(bench, mine);
    if (buffer->status == TN_OK) buffer->words[0] = 0;
}

void dist_wire_buffer_open(dist_bench *bench, int variant, size_t half_bytes,
                           dist_wire_buffer *out) {
    const buffer_kind *kind = &kinds[variant];
    *out = (dist_wire_buffer){.name = kind->name, .half_bytes = half_bytes};
    agree(bench, out, make_comm(bench, out));
    if (out->status == TN_OK) agree(bench, out, make_block(bench, kind, out));
    if (out->status == TN_OK) agree(bench, out, enroll(kind, out));
}

/* What comes first in failing is returned; all is tried. */
static void note(tn_status *status, tn_status of_call) {
    if (*status == TN_OK) *status = of_call;
}

tn_status dist_wire_buffer_close(dist_bench *bench, dist_wire_buffer *buffer) {
    tn_status status = TN_OK, ended;
    note(&status, tn_comm_deregister(buffer->registration));
    if (buffer->whole) note(&status, tn_free(buffer->whole, bench->stream));
    note(&status, tn_stream_synchronize(bench->device, bench->stream));
    note(&status, tn_pool_destroy(buffer->pool));
    ended = buffer->owns_comm ? tn_comm_destroy(buffer->comm) : TN_OK;
    /* Of a kind that has failed that is known already. */
    if (buffer->status == TN_OK) note(&status, ended);
    return buffer->status == TN_OK ? status : TN_OK;
}
