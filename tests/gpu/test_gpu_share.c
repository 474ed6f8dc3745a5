/* Sharing on real GPUs: blocks with a handle of their own, a second process that imports one and
 * sees its bytes, and, where there are two GPUs, access by a peer and the order of its work.
 *
 * The second process is this program again. Device work of both is checked byte by byte, through
 * copies to the host.
 */
#include "gpu_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tenure_pool.h"

#define MIB   ((size_t)1 << 20)
#define BYTES (24 * MIB + 4096)

static gpu_side gpu;
static const char *own_path;

static void require(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "second process: %s: %s\n", what, tn_error_last());
    _exit(3);
}
#define REQUIRE(condition) require((condition), #condition)

/* ---- what both processes do ------------------------------------------------------------------ */

static size_t wrong_bytes(tn_device *device, tn_stream stream, const void *address, size_t bytes,
                          unsigned char byte) {
    unsigned char *copy = malloc(bytes);
    size_t wrong = 0;
    if (!copy || tn_copy(device, copy, address, bytes, stream) != TN_OK ||
        tn_stream_synchronize(device, stream) != TN_OK) {
        wrong = bytes;
    }
    for (size_t i = 0; i < bytes && copy && wrong < bytes; i++)
        wrong += copy[i] != byte;
    free(copy);
    return wrong;
}

static void fill(void *block, unsigned char byte) {
    EXPECT_OK(tn_fill(gpu.device, block, byte, BYTES, gpu.stream));
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
}

static int send_block(int socket, const tn_share *share, int file) {
    tn_share copy = *share;
    struct iovec data = {&copy, sizeof copy};
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } side;
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    struct cmsghdr *header;
    memset(&side, 0, sizeof side);
    message.msg_control = side.room;
    message.msg_controllen = sizeof side.room;
    header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(header), &file, sizeof file);
    return sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof copy;
}

static int receive_block(int socket, tn_share *share, int *file) {
    struct iovec data = {share, sizeof *share};
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } side;
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    message.msg_control = side.room;
    message.msg_controllen = sizeof side.room;
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *share) return 0;
    if (!CMSG_FIRSTHDR(&message)) return 0;
    memcpy(file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof *file);
    return 1;
}

/* ---- the second process ---------------------------------------------------------------------- */

static int run_importer(int socket) {
    tn_share share;
    void *address = NULL, *again = NULL;
    int file = -1;
    char word = 0;
    gpu_open(&gpu);
    REQUIRE(receive_block(socket, &share, &file));
    REQUIRE(tn_share_import(gpu.pool, &share, file, &address) == TN_OK);
    REQUIRE(tn_share_import(gpu.pool, &share, file, &again) == TN_OK && again == address);
    close(file);
    REQUIRE(write(socket, "i", 1) == 1);
    REQUIRE(read(socket, &word, 1) == 1 && word == 'l');
    REQUIRE(wrong_bytes(gpu.device, gpu.stream, address, BYTES, 0x5A) == 0);
    REQUIRE(tn_fill(gpu.device, address, 0xC3, BYTES, gpu.stream) == TN_OK);
    REQUIRE(tn_stream_synchronize(gpu.device, gpu.stream) == TN_OK);
    REQUIRE(tn_share_close(address, gpu.stream) == TN_OK);
    REQUIRE(tn_share_close(address, gpu.stream) == TN_OK);
    gpu_close(&gpu);
    REQUIRE(write(socket, "d", 1) == 1);
    return 0;
}

static pid_t start_importer(int *socket) {
    int ends[2];
    pid_t process;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    process = fork();
    if (process == 0) {
        char number[16];
        snprintf(number, sizeof number, "%d", ends[1]);
        close(ends[0]);
        execl(own_path, own_path, "importer", number, (char *)NULL);
        _exit(4);
    }
    close(ends[1]);
    *socket = ends[0];
    return process;
}

static void expect_word(int socket, char expected) {
    char word = 0;
    assert_int_equal(read(socket, &word, 1), 1);
    assert_int_equal(word, expected);
}

/* Blocks that a test has: one that fails half-way leaves them to give_all. */
static void *taken[4];

static void *take(unsigned flags) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    void *block = NULL;
    options.flags = flags;
    EXPECT_OK(tn_alloc(gpu.pool, BYTES, gpu.stream, &options, &block));
    for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++) {
        if (taken[i]) continue;
        taken[i] = block;
        break;
    }
    return block;
}

static void give(void *block) {
    for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++) {
        if (taken[i] == block) taken[i] = NULL;
    }
    EXPECT_OK(tn_free(block, gpu.stream));
}

static int give_all(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++) {
        if (taken[i]) give(taken[i]);
    }
    return 0;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void a_single_handle_serves_again(void **state) {
    tn_driver_stats before = TN_DRIVER_STATS_INIT, after = TN_DRIVER_STATS_INIT;
    void *block, *again;
    (void)state;
    EXPECT_OK(tn_device_driver_stats(gpu.device, &before));
    block = take(TN_ALLOC_SINGLE_HANDLE);
    EXPECT_OK(tn_device_driver_stats(gpu.device, &after));
    assert_int_equal(after.calls[TN_CALL_MEM_CREATE] - before.calls[TN_CALL_MEM_CREATE], 1);
    assert_int_equal(after.calls[TN_CALL_MEM_MAP] - before.calls[TN_CALL_MEM_MAP], 1);
    fill(block, 0x33);
    assert_int_equal(wrong_bytes(gpu.device, gpu.stream, block, BYTES, 0x33), 0);
    give(block);
    again = take(TN_ALLOC_SINGLE_HANDLE);
    assert_ptr_equal(again, block);
    give(again);
    EXPECT_OK(tn_pool_check(gpu.pool));
}

static void exchange(int is_freed_first) {
    tn_share share;
    void *block = take(TN_ALLOC_SHAREABLE);
    int socket, file = -1, status = -1;
    pid_t process = start_importer(&socket);
    fill(block, 0x5A);
    EXPECT_OK(tn_share_export(block, &share, &file));
    assert_true(send_block(socket, &share, file));
    close(file);
    expect_word(socket, 'i');
    if (is_freed_first) {
        give(block);
        EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
        EXPECT_OK(tn_pool_trim(gpu.pool, SIZE_MAX, NULL));
    }
    assert_int_equal(write(socket, "l", 1), 1);
    expect_word(socket, 'd');
    if (!is_freed_first) {
        assert_int_equal(wrong_bytes(gpu.device, gpu.stream, block, BYTES, 0xC3), 0);
        give(block);
    }
    assert_int_equal(waitpid(process, &status, 0), process);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    close(socket);
}

static void two_processes_see_the_same_bytes(void **state) {
    (void)state;
    exchange(0);
}

static void memory_outlives_the_block_that_was_exported(void **state) {
    (void)state;
    exchange(1);
}

static void a_wrong_file_or_description_is_corrupt(void **state) {
    tn_share share, changed;
    void *block = take(TN_ALLOC_SHAREABLE);
    void *address = NULL;
    int file = -1, ends[2];
    (void)state;
    EXPECT_OK(tn_share_export(block, &share, &file));
    changed = share;
    changed.bytes ^= 1;
    EXPECT_STATUS(tn_share_import(gpu.pool, &changed, file, &address), TN_CORRUPT_INPUT);
    assert_int_equal(pipe(ends), 0);
    EXPECT_STATUS(tn_share_import(gpu.pool, &share, ends[0], &address), TN_CORRUPT_INPUT);
    close(ends[0]);
    close(ends[1]);
    EXPECT_OK(tn_share_import(gpu.pool, &share, file, &address));
    EXPECT_OK(tn_share_close(address, gpu.stream));
    close(file);
    give(block);
}

/* ---- two GPUs -------------------------------------------------------------------------------- */

static tn_device *open_second(void) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *second = NULL;
    config.driver = TN_DRIVER_CUDA;
    config.ordinal = 1;
    return tn_device_create(&config, &second) == TN_OK ? second : NULL;
}

/* The peer writes blocks that were there before it came and after; what it still writes is not
 * given to the owner's stream before it has ended. */
static void use_by_peer(tn_device *second) {
    tn_stream peer = NULL;
    void *before = take(0), *after, *again;
    EXPECT_OK(tn_stream_create(second, &peer));
    fill(before, 0x01);
    EXPECT_OK(tn_pool_peer_enable(gpu.pool, second));
    after = take(0);
    fill(after, 0x02);
    EXPECT_OK(tn_fill(second, before, 0x5A, BYTES, peer));
    EXPECT_OK(tn_fill(second, after, 0x5B, BYTES, peer));
    EXPECT_OK(tn_record_use(before, peer));
    EXPECT_OK(tn_record_use(after, peer));
    EXPECT_OK(tn_stream_synchronize(second, peer));
    assert_int_equal(wrong_bytes(gpu.device, gpu.stream, before, BYTES, 0x5A), 0);
    assert_int_equal(wrong_bytes(gpu.device, gpu.stream, after, BYTES, 0x5B), 0);
    for (int i = 0; i < 200; i++)
        EXPECT_OK(tn_fill(second, before, (unsigned char)i, BYTES, peer));
    EXPECT_OK(tn_record_use(before, peer));
    give(before);
    again = take(0);
    EXPECT_OK(tn_fill(gpu.device, again, 0x77, BYTES, gpu.stream));
    EXPECT_OK(tn_stream_synchronize(second, peer));
    assert_int_equal(wrong_bytes(gpu.device, gpu.stream, again, BYTES, 0x77), 0);
    give(again);
    give(after);
    EXPECT_OK(tn_stream_synchronize(gpu.device, gpu.stream));
    EXPECT_OK(tn_pool_trim(gpu.pool, 0, NULL));
    EXPECT_OK(tn_pool_peer_disable(gpu.pool, second));
    EXPECT_OK(tn_stream_destroy(second, peer));
}

static void a_peer_writes_and_is_waited_for(void **state) {
    tn_device *second = open_second();
    (void)state;
    if (!second) {
        printf("one GPU: access by a peer was not tried\n");
        return;
    }
    use_by_peer(second);
    EXPECT_OK(tn_device_destroy(second));
}

static int open_gpu(void **state) {
    (void)state;
    gpu_open(&gpu);
    return 0;
}

static int close_gpu(void **state) {
    (void)state;
    gpu_close(&gpu);
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_single_handle_serves_again, give_all),
        cmocka_unit_test_teardown(two_processes_see_the_same_bytes, give_all),
        cmocka_unit_test_teardown(memory_outlives_the_block_that_was_exported, give_all),
        cmocka_unit_test_teardown(a_wrong_file_or_description_is_corrupt, give_all),
        cmocka_unit_test_teardown(a_peer_writes_and_is_waited_for, give_all),
    };
    own_path = argv[0];
    if (argc == 3 && strcmp(argv[1], "importer") == 0) return run_importer(atoi(argv[2]));
    return TEST_RUN_GROUP(tests, open_gpu, close_gpu);
}
