/* Blocks that travel between processes: what the tests of sharing have in common. */
#ifndef TENURE_SHARE_SUPPORT_H
#define TENURE_SHARE_SUPPORT_H

#include "tenure_pool.h"
#include "test_pools.h"

typedef struct sharer {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
} sharer;

/* The first simulated device, with memory that holds bytes, a pool and a stream. */
void sharer_open(sharer *s);
void sharer_close(sharer *s);

/* A shareable block that is filled with the byte, and the work done. */
void *sharer_block(sharer *s, size_t bytes, unsigned char byte);

/* Fails unless each byte of the memory is that. */
void sharer_expect(sharer *s, const void *address, size_t bytes, unsigned char byte);

/* One message over a Unix socket: the description with the file descriptor. 1 if it went well. */
int share_send(int socket, const tn_share *share, int file);
int share_receive(int socket, tn_share *share, int *file);

#endif
