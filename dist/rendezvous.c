/* Rendezvous: made, met at and left. See tenure_rendezvous.h and rendezvous.h. */
#include "rendezvous.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "host_alloc.h"
#include "options.h"

enum {
    MICROSECONDS = 1000000,
    PORT_MAX = 65535,
    KEY_BYTES = 64,
    MEETING_MAX = 4096,
    ROOM_STEP = sizeof(uint64_t) + TN__ROOM_BYTES
};
static const uint64_t DEFAULT_TIMEOUT_US = (uint64_t)600 * MICROSECONDS;
/* For the others to hear what their last meeting came to. */
static const uint64_t FAREWELL_US = (uint64_t)5 * MICROSECONDS;

uint64_t tn__hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    const unsigned char *at = bytes;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ at[i]) * 0x100000001B3u;
    return hash;
}

static uint64_t hash_text(const char *text) {
    return tn__hash_bytes(TN__HASH_BEGIN, text, strlen(text));
}

/* ---- where and who -------------------------------------------------------------------------- */

/* Never MASTER_PORT itself: see tenure_rendezvous.h. */
static int port_beside(int master_port) {
    return master_port < PORT_MAX ? master_port + 1 : master_port - 1;
}

static tn_status find_port(const tn_rendezvous_config *config, const tn__place *place, int *out) {
    size_t option = tn__options_get()->rendezvous_port;
    TN_REQUIRE(config->port >= 0 && config->port <= PORT_MAX && option <= PORT_MAX,
               "the port of the ranks' store is %d, TENURE_RENDEZVOUS_PORT %zu: a port is at most "
               "%d",
               config->port, option, PORT_MAX);
    *out = config->port ? config->port : (int)option;
    if (!*out && place->port) *out = port_beside(place->port);
    return TN_OK;
}

static tn_status find_place(const tn_rendezvous_config *config, tn__place *out) {
    TN_TRY(tn__place_read(!config->rank_count, out));
    if (config->rank_count) {
        out->rank = config->rank;
        out->rank_count = config->rank_count;
    }
    TN_REQUIRE(out->rank_count > 0 && out->rank_count <= TN__STORE_RANKS_MAX && out->rank >= 0 &&
                   out->rank < out->rank_count,
               "tn_rendezvous_config: rank %d of %d: a rank is 0 to rank_count - 1, of at most %d; "
               "without a rank_count the environment says them (RANK and WORLD_SIZE)",
               out->rank, out->rank_count, TN__STORE_RANKS_MAX);
    if (config->host) out->host = config->host;
    if (config->job) out->job = config->job;
    return TN_OK;
}

static tn_status check_store(const tn__place *place, int port, const tn_rendezvous_config *config) {
    TN_REQUIRE(place->host, "no host to meet on: say it, or set MASTER_ADDR");
    TN_REQUIRE(port || (place->rank == 0 && config->listen_file >= 0),
               "no port to meet on: say it, or set MASTER_PORT or TENURE_RENDEZVOUS_PORT");
    TN_REQUIRE(config->listen_file < 0 || place->rank == 0,
               "tn_rendezvous_config.listen_file is for rank 0, and this is rank %d", place->rank);
    return TN_OK;
}

/* ---- the store ------------------------------------------------------------------------------ */

static tn__store_hello hello_of(const tn_rendezvous *ranks, uint32_t channel) {
    return (tn__store_hello){.version = TN__STORE_VERSION,
                             .rank = (uint32_t)ranks->place.rank,
                             .rank_count = (uint32_t)ranks->place.rank_count,
                             .channel = channel,
                             .job = ranks->job};
}

/* The caller's socket stays the caller's until all is well: a copy of it serves. */
static tn_status open_listener(tn_rendezvous *ranks, int given, int *out) {
    tn__tcp_address address;
    if (given < 0) return tn__tcp_listen(ranks->port, out);
    TN_TRY(tn__tcp_listen_on(given));
    TN_TRY(tn__tcp_reachable(given, given, &address));
    ranks->port = address.port;
    *out = dup(given);
    if (*out < 0) return TN_FAIL(TN_COMM_ERROR, "no file for the socket to listen on");
    return TN_OK;
}

static tn_status serve(tn_rendezvous *ranks, int given) {
    int listener = -1;
    TN_TRY(open_listener(ranks, given, &listener));
    tn_status status =
        tn__store_server_begin(listener, ranks->place.rank_count, ranks->job, &ranks->server);
    if (status != TN_OK) tn__tcp_close(&listener);
    return status;
}

static tn_status open_store(tn_rendezvous *ranks, const tn_rendezvous_config *config) {
    tn__store_hello hello = hello_of(ranks, 0);
    if (ranks->place.rank == 0) TN_TRY(serve(ranks, config->listen_file));
    return tn__store_open(ranks->place.host, ranks->port, &hello, ranks->timeout_us, &ranks->store);
}

tn_status tn__rendezvous_open_channel(tn_rendezvous *ranks) {
    tn__store_hello hello = hello_of(ranks, 1);
    tn_status status = TN_OK;
    pthread_mutex_lock(&ranks->lock);
    if (!ranks->channel)
        status = tn__store_open(ranks->place.host, ranks->port, &hello, ranks->timeout_us,
                                &ranks->channel);
    pthread_mutex_unlock(&ranks->lock);
    return status;
}

/* ---- meetings ------------------------------------------------------------------------------- */

/* Every value begins with what the meeting is for, so that ranks that are in different calls see
 * it at once. */
typedef struct meeting_value {
    uint64_t purpose;
    unsigned char bytes[MEETING_MAX];
} meeting_value;

static tn_status gather_anyhow(tn_rendezvous *ranks, const void *mine, size_t bytes, void *all,
                               uint64_t timeout_us) {
    char key[KEY_BYTES];
    if (ranks->all_gather) {
        int code = ranks->all_gather(ranks->context, mine, bytes, all);
        if (!code) return TN_OK;
        return TN_FAIL_NATIVE(TN_COMM_ERROR, code, "the program's all_gather failed");
    }
    if (!ranks->store) {
        memcpy(all, mine, bytes);
        return TN_OK;
    }
    snprintf(key, sizeof key, "meeting %llu", (unsigned long long)ranks->meetings);
    return tn__store_gather(ranks->store, key, mine, bytes, all, timeout_us);
}

static tn_status compare_purposes(const tn_rendezvous *ranks, const char *what,
                                  const unsigned char *values, size_t value_bytes) {
    uint64_t ours = hash_text(what), theirs;
    for (int rank = 0; rank < ranks->place.rank_count; rank++) {
        memcpy(&theirs, values + (size_t)rank * value_bytes, sizeof theirs);
        if (theirs != ours)
            return TN_FAIL(TN_COMM_ERROR,
                           "rank %d met for something else: all ranks make the same calls in the "
                           "same order",
                           rank);
    }
    return TN_OK;
}

/* values: room for a purpose and `bytes` of every rank. */
static tn_status meet(tn_rendezvous *ranks, const char *what, const void *mine, size_t bytes,
                      void *all, uint64_t timeout_us, unsigned char *values) {
    size_t value_bytes = sizeof(uint64_t) + bytes, count = (size_t)ranks->place.rank_count;
    meeting_value value = {.purpose = hash_text(what)};
    if (bytes) memcpy(value.bytes, mine, bytes);
    ranks->meetings++;
    TN_TRY(gather_anyhow(ranks, &value, value_bytes, values, timeout_us));
    TN_TRY(compare_purposes(ranks, what, values, value_bytes));
    for (size_t rank = 0; bytes && rank < count; rank++)
        memcpy((char *)all + rank * bytes, values + rank * value_bytes + sizeof(uint64_t), bytes);
    return TN_OK;
}

static tn_status say_where(const tn_rendezvous *ranks, const char *what, tn_status status) {
    tn__saved_error saved;
    tn__error_save(&saved);
    return TN_FAIL_NATIVE(status, saved.native, "rendezvous for %s, rank %d of %d: %s", what,
                          ranks->place.rank, ranks->place.rank_count, saved.text);
}

static tn_status meet_once(tn_rendezvous *ranks, const char *what, const void *mine, size_t bytes,
                           void *all, uint64_t timeout_us, unsigned char *values) {
    tn_status status = meet(ranks, what, mine, bytes, all, timeout_us, values);
    if (status == TN_OK) return TN_OK;
    status = say_where(ranks, what, status);
    /* Others may wait for this rank, or be one meeting ahead of it. */
    ranks->failure = status;
    tn__error_save(&ranks->failure_text);
    return status;
}

static tn_status gather_locked(tn_rendezvous *ranks, const char *what, const void *mine,
                               size_t bytes, void *all, uint64_t timeout_us) {
    if (ranks->failure != TN_OK) {
        tn__error_restore(&ranks->failure_text);
        return ranks->failure;
    }
    if (bytes <= TN__ROOM_BYTES)
        return meet_once(ranks, what, mine, bytes, all, timeout_us, ranks->room);
    unsigned char *values =
        tn__host_alloc((size_t)ranks->place.rank_count, sizeof(uint64_t) + bytes);
    if (!values) return say_where(ranks, what, TN_OUT_OF_HOST_MEMORY);
    const tn_status status = meet_once(ranks, what, mine, bytes, all, timeout_us, values);
    tn__host_free(values);
    return status;
}

tn_status tn__rendezvous_gather(tn_rendezvous *ranks, const char *what, const void *mine,
                                size_t bytes, void *all, uint64_t timeout_us) {
    pthread_mutex_lock(&ranks->lock);
    tn_status status = gather_locked(ranks, what, mine, bytes, all, timeout_us);
    pthread_mutex_unlock(&ranks->lock);
    return status;
}

/* The words of all ranks behind the room of their meeting. */
static uint64_t *words_of(const tn_rendezvous *ranks) {
    return (uint64_t *)(void *)(ranks->room + (size_t)ranks->place.rank_count * ROOM_STEP);
}

static tn_status share_locked(tn_rendezvous *ranks, tn_status so_far, uint64_t timeout_us) {
    const uint64_t mine = (uint64_t)so_far, *all = words_of(ranks);
    TN_TRY(gather_locked(ranks, "tn_comm_create", &mine, sizeof mine, words_of(ranks), timeout_us));
    for (int rank = 0; rank < ranks->place.rank_count; rank++) {
        if (all[rank] == TN_OK || so_far != TN_OK) continue;
        return TN_FAIL(TN_COMM_ERROR, "rank %d could not take part: %s", rank,
                       tn_status_text((tn_status)all[rank]));
    }
    return so_far;
}

tn_status tn__rendezvous_share_status(tn_rendezvous *ranks, tn_status so_far, uint64_t timeout_us) {
    tn__saved_error saved;
    tn__error_save(&saved);
    pthread_mutex_lock(&ranks->lock);
    const tn_status status = share_locked(ranks, so_far, timeout_us);
    pthread_mutex_unlock(&ranks->lock);
    if (status != TN_OK && status == so_far) tn__error_restore(&saved);
    return status;
}

tn_status tn_rendezvous_gather(tn_rendezvous *ranks, const void *mine, size_t bytes, void *all) {
    TN_REQUIRE(ranks, "tn_rendezvous_gather: ranks is NULL");
    TN_REQUIRE(bytes <= MEETING_MAX, "tn_rendezvous_gather of %zu bytes: at most %d", bytes,
               MEETING_MAX);
    TN_REQUIRE(!bytes || (mine && all), "tn_rendezvous_gather: mine or all is NULL");
    return tn__rendezvous_gather(ranks, "tn_rendezvous_gather", mine, bytes, all,
                                 ranks->timeout_us);
}

static tn_status agree_locked(tn_rendezvous *ranks, const char *what, uint64_t value) {
    uint64_t *values = words_of(ranks);
    TN_TRY(gather_locked(ranks, what, &value, sizeof value, values, ranks->timeout_us));
    for (int rank = 1; rank < ranks->place.rank_count; rank++) {
        if (values[rank] == values[0]) continue;
        return TN_FAIL(TN_COMM_ERROR, "%s of rank %d is %016llx, and of rank 0 %016llx", what, rank,
                       (unsigned long long)values[rank], (unsigned long long)values[0]);
    }
    return TN_OK;
}

tn_status tn_rendezvous_agree(tn_rendezvous *ranks, const char *what, uint64_t value) {
    TN_REQUIRE(ranks && what, "tn_rendezvous_agree: ranks and what are needed");
    pthread_mutex_lock(&ranks->lock);
    const tn_status status = agree_locked(ranks, what, value);
    pthread_mutex_unlock(&ranks->lock);
    return status;
}

/* ---- create and destroy --------------------------------------------------------------------- */

static void free_rendezvous(tn_rendezvous *ranks, uint64_t linger_us) {
    tn__store_close(ranks->store);
    tn__store_close(ranks->channel);
    tn__store_server_end(ranks->server, tn__tcp_deadline_ns(linger_us));
    pthread_mutex_destroy(&ranks->lock);
    tn__host_free((char *)ranks->place.host);
    tn__host_free((char *)ranks->place.job);
    tn__host_free(ranks->room);
    tn__host_free(ranks);
}

static tn_status make_rendezvous(const tn_rendezvous_config *config, const tn__place *place,
                                 int port, tn_rendezvous **out) {
    tn_rendezvous *ranks = tn__host_alloc(1, sizeof *ranks);
    if (!ranks) return TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_init(&ranks->lock, NULL);
    atomic_init(&ranks->references, 1);
    ranks->place = *place;
    ranks->port = (unsigned)port;
    ranks->job = hash_text(place->job);
    ranks->timeout_us = config->timeout_us ? config->timeout_us : DEFAULT_TIMEOUT_US;
    ranks->all_gather = config->all_gather;
    ranks->context = config->context;
    ranks->place.host = place->host ? tn__host_strdup(place->host) : NULL;
    ranks->place.job = tn__host_strdup(place->job);
    ranks->room = tn__host_alloc((size_t)place->rank_count, ROOM_STEP + sizeof(uint64_t));
    if (!ranks->place.job || !ranks->room || (place->host && !ranks->place.host)) {
        free_rendezvous(ranks, 0);
        return TN_OUT_OF_HOST_MEMORY;
    }
    *out = ranks;
    return TN_OK;
}

/* The first meeting: all are here, and of one version of the library. */
static tn_status first_meeting(tn_rendezvous *ranks) {
    char version[32] = "", *versions = tn__host_alloc((size_t)ranks->place.rank_count, 32);
    if (!versions) return TN_OUT_OF_HOST_MEMORY;
    snprintf(version, sizeof version, "%s", tn_version());
    tn_status status = tn__rendezvous_gather(ranks, "tn_rendezvous_create", version, sizeof version,
                                             versions, ranks->timeout_us);
    for (int rank = 0; status == TN_OK && rank < ranks->place.rank_count; rank++) {
        const char *theirs = versions + (size_t)rank * sizeof version;
        if (memcmp(theirs, version, sizeof version) == 0) continue;
        status = TN_FAIL(TN_COMM_ERROR, "rank %d has version %.31s of the library, rank %d has %s",
                         rank, theirs, ranks->place.rank, version);
    }
    tn__host_free(versions);
    return status;
}

tn_status tn_rendezvous_create(const tn_rendezvous_config *config, tn_rendezvous **out) {
    TN_REQUIRE(config && out, "tn_rendezvous_create: config and out are needed");
    TN_REQUIRE(config->size == sizeof *config,
               "tn_rendezvous_config.size is %zu, not %zu: begin with TN_RENDEZVOUS_CONFIG_INIT",
               config->size, sizeof *config);
    tn__place place;
    tn_rendezvous *ranks;
    int port = 0;
    TN_TRY(find_place(config, &place));
    TN_TRY(find_port(config, &place, &port));
    int has_store = !config->all_gather && place.rank_count > 1;
    if (has_store) TN_TRY(check_store(&place, port, config));
    TN_TRY(make_rendezvous(config, &place, port, &ranks));
    tn_status status = has_store ? open_store(ranks, config) : TN_OK;
    if (status == TN_OK) status = first_meeting(ranks);
    if (status != TN_OK) {
        tn__saved_error saved;
        tn__error_save(&saved);
        free_rendezvous(ranks, FAREWELL_US);
        tn__error_restore(&saved);
        return status;
    }
    int given = has_store ? config->listen_file : -1;
    tn__tcp_close(&given);
    *out = ranks;
    return TN_OK;
}

void tn__rendezvous_retain(tn_rendezvous *ranks) { atomic_fetch_add(&ranks->references, 1); }

void tn__rendezvous_release(tn_rendezvous *ranks) {
    if (atomic_fetch_sub(&ranks->references, 1) == 1) free_rendezvous(ranks, FAREWELL_US);
}

void tn_rendezvous_destroy(tn_rendezvous *ranks) {
    if (ranks) tn__rendezvous_release(ranks);
}

/* ---- what it is ----------------------------------------------------------------------------- */

int tn_rendezvous_rank(const tn_rendezvous *ranks) { return ranks ? ranks->place.rank : -1; }

int tn_rendezvous_size(const tn_rendezvous *ranks) { return ranks ? ranks->place.rank_count : 0; }

int tn_rendezvous_local_rank(const tn_rendezvous *ranks) {
    return ranks ? ranks->place.local_rank : -1;
}
