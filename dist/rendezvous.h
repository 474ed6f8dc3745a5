/* Ranks that have found each other: what communicators use of them.
 *
 * Invariants: every rank makes the same meetings in the same order; `meetings` counts them, and is
 * their name in the store. The first meeting that fails has failed for all later ones; one that
 * this rank had no memory to begin was none, and can be tried again. Statuses need no memory.
 */
#ifndef TENURE_RENDEZVOUS_PRIVATE_H
#define TENURE_RENDEZVOUS_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "error.h"
#include "tcp_store.h"
#include "tcp_store_server.h"
#include "tenure_rendezvous.h"

/* What the environment, or the caller instead of it, says of this rank. */
typedef struct tn__place {
    int rank;
    int rank_count;
    int local_rank;   /* -1: unknown */
    const char *host; /* NULL: not said */
    int port;         /* MASTER_PORT; 0: not said */
    const char *job;  /* "" for none */
} tn__place;

/* Reads the environment. rank_count 0: it says nothing of ranks, or they are not asked for, and
 * then what it says of them may be wrong. */
tn_status tn__place_read(int asks_for_ranks, tn__place *out);

struct tn_rendezvous {
    tn__place place; /* its texts are copies */
    unsigned port;
    uint64_t job;
    uint64_t timeout_us;
    tn_rendezvous_all_gather all_gather; /* NULL: the store */
    void *context;
    tn__store_server *server; /* rank 0's */
    tn__store *store;         /* NULL for one rank, and with all_gather */
    atomic_int references;

    pthread_mutex_t lock;
    unsigned char *room; /* of a purpose and TN__ROOM_BYTES of each rank, and of a word of each */
    tn__store *channel;  /* a second connection, which no meeting holds up; or NULL */
    uint64_t meetings;
    tn_status failure;
    tn__saved_error failure_text;
};

/* What a meeting of up to so many bytes a rank takes is there from the beginning: the second of two
 * fails on no rank alone for want of memory, when the others have come to it. */
enum { TN__ROOM_BYTES = 160 };

/* tn_rendezvous_gather of what `what` names, within a timeout of its own. */
tn_status tn__rendezvous_gather(tn_rendezvous *ranks, const char *what, const void *mine,
                                size_t bytes, void *all, uint64_t timeout_us);

/* TN_OK if all ranks come with TN_OK. A rank that has failed already (so_far, recorded) tells the
 * others so, who get TN_COMM_ERROR with its number, and gets so_far back. */
tn_status tn__rendezvous_share_status(tn_rendezvous *ranks, tn_status so_far, uint64_t timeout_us);

/* A new id of NCCL's for all ranks, each of which has a GPU of its own: TN_INVALID_ARGUMENT names
 * two that have not. */
tn_status tn__rendezvous_make_id(tn_rendezvous *ranks, tn_device *device, uint64_t timeout_us,
                                 tn_comm_id *out);

/* Opens `channel` unless it is open. */
tn_status tn__rendezvous_open_channel(tn_rendezvous *ranks);

/* The rendezvous ends with its last reference; the program has one. */
void tn__rendezvous_retain(tn_rendezvous *ranks);
void tn__rendezvous_release(tn_rendezvous *ranks);

/* FNV-1a, continued from `hash`. */
#define TN__HASH_BEGIN 0xCBF29CE484222325u
uint64_t tn__hash_bytes(uint64_t hash, const void *bytes, size_t count);

#endif
