/* TCP sockets that never hold a thread longer than a deadline.
 *
 * All sockets are non-blocking, closed by exec, and without delay of small messages. A deadline is
 * a moment of tn__tcp_now_ns. What goes wrong is a status with the system's words; the ends of a
 * connection that a program meets in good order (closed, late) are told apart for it.
 */
#ifndef TENURE_TCP_SOCKET_H
#define TENURE_TCP_SOCKET_H

#include "error.h"

typedef struct tn__tcp_address {
    unsigned char bytes[16]; /* IPv6, or IPv4 as IPv6 maps it */
    uint16_t port;
} tn__tcp_address;

typedef enum tn__tcp_end { TN__TCP_DONE, TN__TCP_CLOSED, TN__TCP_LATE } tn__tcp_end;

uint64_t tn__tcp_now_ns(void);
uint64_t tn__tcp_deadline_ns(uint64_t timeout_us);

/* Time from now to the deadline as poll takes it: rounded up, 0 once it has passed. */
int tn__tcp_poll_ms(uint64_t deadline_ns);

/* Listens on all addresses of this machine; port 0: any. TN_COMM_ERROR, also where the port is
 * another program's. */
tn_status tn__tcp_listen(unsigned port, int *out);

/* Makes the caller's listening socket such a socket. */
tn_status tn__tcp_listen_on(int file);

/* Where others reach the listening socket, if they reach this machine as the other end of
 * `connection` does. */
tn_status tn__tcp_reachable(int listener, int connection, tn__tcp_address *out);

/* The other end of a connection. */
tn_status tn__tcp_peer(int connection, tn__tcp_address *out);

/* 1: an address that means this machine on every machine. */
int tn__tcp_is_loopback(const tn__tcp_address *address);

/* A connection that has come, or -1: none now. */
int tn__tcp_accept(int listener);

/* Raises the process's limit of open files for `count` more, if it has to be. TN_UNSUPPORTED, with
 * both numbers and what takes them, where it can not be. */
tn_status tn__tcp_reserve_files(size_t count, const char *what);

/* 1: what accept or connect failed with passes when somebody closes files. */
int tn__tcp_is_short_of_files(int code);

/* Tries every address of the host in turns until one answers or the deadline: TN_COMM_TIMEOUT. A
 * name that is not there is asked for again until then: TN_COMM_ERROR. */
tn_status tn__tcp_connect_host(const char *host, unsigned port, uint64_t deadline_ns, int *out);

/* One try. CLOSED: nobody listens there. */
tn__tcp_end tn__tcp_connect(const tn__tcp_address *address, uint64_t deadline_ns, int *out);

/* All of the bytes, or why not. */
tn__tcp_end tn__tcp_send(int file, const void *bytes, size_t count, uint64_t deadline_ns);
tn__tcp_end tn__tcp_receive(int file, void *bytes, size_t count, uint64_t deadline_ns);

/* As much as goes now: its bytes, 0 for none, or -1 for a connection that is gone. */
ptrdiff_t tn__tcp_send_some(int file, const void *bytes, size_t count);
ptrdiff_t tn__tcp_receive_some(int file, void *bytes, size_t count);

/* 1: the other side sends nothing more, though what it has sent may be there still. */
int tn__tcp_has_ended(int file);

/* -1 is no file. */
void tn__tcp_close(int *file);

#endif
