/* See share_support.h. */
#include "share_support.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define MEMORY_BYTES ((size_t)256 << 20)

void sharer_open(sharer *s) {
    tnsim_config config = {
        .size = sizeof config, .memory_bytes = MEMORY_BYTES, .device_count = 2, .backed = 1};
    s->device = test_open_sim_as(&config);
    s->pool = test_open_pool(s->device, TN_BACKING_VMM, 0);
    s->stream = test_open_stream(s->device);
}

void sharer_close(sharer *s) {
    EXPECT_OK(tn_pool_destroy(s->pool));
    EXPECT_OK(tn_stream_destroy(s->device, s->stream));
    test_close_sim(s->device);
}

void *sharer_block(sharer *s, size_t bytes, unsigned char byte) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *block = NULL;
    options.flags = TN_ALLOC_SHAREABLE;
    EXPECT_OK(tn_alloc(s->pool, bytes, s->stream, &options, &block));
    EXPECT_OK(tn_fill(s->device, block, byte, bytes, s->stream));
    EXPECT_OK(tn_stream_synchronize(s->device, s->stream));
    return block;
}

void sharer_expect(sharer *s, const void *address, size_t bytes, unsigned char byte) {
    unsigned char *copy = malloc(bytes);
    size_t wrong = 0;
    EXPECT_OK(tn_copy(s->device, copy, address, bytes, s->stream));
    EXPECT_OK(tn_stream_synchronize(s->device, s->stream));
    for (size_t i = 0; i < bytes; i++)
        wrong += copy[i] != byte;
    free(copy);
    assert_int_equal(wrong, 0);
}

/* Room for one descriptor beside the data, aligned as the system wants it. */
typedef union control {
    char room[CMSG_SPACE(sizeof(int))];
    struct cmsghdr aligned;
} control;

static struct msghdr message_of(struct iovec *data, control *side) {
    return (struct msghdr){.msg_iov = data,
                           .msg_iovlen = 1,
                           .msg_control = side->room,
                           .msg_controllen = sizeof side->room};
}

int share_send(int socket, const tn_share *share, int file) {
    tn_share copy = *share;
    struct iovec data = {&copy, sizeof copy};
    control side;
    struct msghdr message = message_of(&data, &side);
    struct cmsghdr *header;
    memset(&side, 0, sizeof side);
    header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(header), &file, sizeof file);
    return sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof copy;
}

int share_receive(int socket, tn_share *share, int *file) {
    struct iovec data = {share, sizeof *share};
    control side;
    struct msghdr message = message_of(&data, &side);
    const struct cmsghdr *header;
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *share) return 0;
    header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_type != SCM_RIGHTS) return 0;
    memcpy(file, CMSG_DATA(header), sizeof *file);
    return 1;
}
