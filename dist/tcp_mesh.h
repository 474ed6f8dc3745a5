/* Two connections between every two ranks: one for data, one for what must be heard besides.
 *
 *     rank 0  <== data, notices ==>  rank 1 ...     each rank connects to those below it
 *
 * Every rank listens on a port of its own, learns the others' addresses by a gather and connects.
 * Connections say whose they are by a word that only this mesh's ranks know; others are closed.
 *
 * A rank that gives up, or leaves, first tells everybody why by a notice, then ends its
 * connections. So whoever finds a connection ended looks for the notice; there is none from a
 * process that has died.
 */
#ifndef TENURE_TCP_MESH_H
#define TENURE_TCP_MESH_H

#include "tcp_socket.h"

enum { TN__TCP_NOTICE_TEXT_BYTES = 480 };

/* A rank's last word. */
typedef struct tn__tcp_notice {
    int32_t status; /* TN_OK: it has left in good order */
    char text[TN__TCP_NOTICE_TEXT_BYTES];
} tn__tcp_notice;

typedef struct tn__tcp_link {
    int data;   /* -1: this rank itself */
    int notice; /* the connection for notices */
} tn__tcp_link;

typedef struct tn__tcp_mesh {
    int rank;
    int rank_count; /* 0: not connected */
    int capacity;
    int listener;
    struct tn__tcp_card *cards; /* by rank: what it has said of itself, its address above all */
    struct tn__tcp_visitor *visitors; /* connections that have not said whose they are */
    tn__tcp_link *peers;              /* by rank */
} tn__tcp_mesh;

/* How the ranks of a mesh to be made exchange `bytes` each. */
typedef struct tn__tcp_gather {
    tn_status (*gather)(void *context, const void *mine, size_t bytes, void *all);
    void *context;
    int connection; /* how others reach this machine: as the other end of this one does; -1: as
                       itself only */
    /* Why a rank that has not connected yet never will; NULL: that is not known. */
    tn_status (*look)(void *context);
} tn__tcp_gather;

/* A mesh of at most `capacity` ranks that is connected to nobody: all of its memory, and its
 * listening socket. */
tn_status tn__tcp_mesh_begin(int capacity, tn__tcp_mesh **out);

/* Connects it; every rank calls. Allocates nothing itself. TN_COMM_TIMEOUT and TN_COMM_ERROR name
 * the ranks that are missing. */
tn_status tn__tcp_mesh_connect(tn__tcp_mesh *mesh, int rank, int rank_count,
                               const tn__tcp_gather *by, uint64_t timeout_us);

/* Connects it among some ranks of another mesh, whose connections may have ended: they are
 * reached where that mesh has listened, which this one does from then on. rank_of: their ranks
 * there, in the order of the new ones. */
tn_status tn__tcp_mesh_connect_anew(tn__tcp_mesh *mesh, tn__tcp_mesh *from, const int *rank_of,
                                    int rank, int rank_count, uint64_t timeout_us);

/* After that, also if it has failed: the other mesh listens again, and can be connected from anew.
 */
void tn__tcp_mesh_give_back(tn__tcp_mesh *mesh, tn__tcp_mesh *from);

/* Ends what is left of the connections. NULL is a no-op. */
void tn__tcp_mesh_free(tn__tcp_mesh *mesh);

/* Tells everybody, then ends the connections for both sides; their files stay open. Whoever waits
 * on one of them wakes up. */
void tn__tcp_mesh_say(const tn__tcp_mesh *mesh, tn_status status, const char *text);

/* What the rank's last word was, which may be on its way: 1, or 0 if there is none. */
int tn__tcp_mesh_hear(const tn__tcp_mesh *mesh, int rank, tn__tcp_notice *out);

#endif
