/* The store of the ranks: one thread of rank 0 that keeps values and lets ranks meet.
 *
 *     strangers -> [ hello? ] -> a rank's connections -> { SET, GET, GATHER } -> entries by key
 *
 * A connection does one request at a time: it is read, waits (GET, GATHER) or not, is answered.
 * Anybody may connect. Who has not said HELLO as a rank of this job within a few seconds, or says
 * anything that tcp_store_wire.h does not know, is closed; strangers take the places of strangers
 * only. All memory is bounded: a request's by the wire, the entries' by a count and a sum.
 *
 * A rank whose connection ends without BYE is gone, and no meeting waits for it any more: those
 * that are there get TN_COMM_ERROR with its number.
 */
#ifndef TENURE_TCP_STORE_SERVER_H
#define TENURE_TCP_STORE_SERVER_H

#include "tcp_socket.h"

typedef struct tn__store_server tn__store_server;

/* Serves on the listening socket, which it owns if this succeeds. */
tn_status tn__store_server_begin(int listener, int rank_count, uint64_t job,
                                 tn__store_server **out);

/* Serves until all ranks have left or the deadline, then ends the thread. NULL is a no-op. */
void tn__store_server_end(tn__store_server *server, uint64_t deadline_ns);

#endif
