/* Blocks that two processes use: the other one is this program again, started with a part to play
 * and one end of a socket. Whoever ends first, the bytes are there as long as somebody has them
 * (nixl#1066, ompi#12849). */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "share_support.h"

#define BYTES ((size_t)5 << 20)

static const char *own_path;

static void require(int holds) {
    if (!holds) _exit(3);
}

static void put_word(int socket, char word) { require(write(socket, &word, 1) == 1); }

static char get_word(int socket) {
    char word = 0;
    return read(socket, &word, 1) == 1 ? word : 0;
}

/* ---- parts ----------------------------------------------------------------------------------- */

/* Imports what it is sent, twice; finds 0x5A in it once it is told to look; leaves 0xC3. */
static void play_importer(int socket) {
    sharer s;
    tn_share share;
    void *address = NULL, *again = NULL;
    int file = -1;
    sharer_open(&s);
    require(share_receive(socket, &share, &file));
    require(tn_share_import(s.pool, &share, file, &address) == TN_OK);
    require(tn_share_import(s.pool, &share, file, &again) == TN_OK);
    require(again == address);
    close(file);
    put_word(socket, 'i');
    require(get_word(socket) == 'l');
    sharer_expect(&s, address, BYTES, 0x5A);
    require(tn_fill(s.device, address, 0xC3, BYTES, s.stream) == TN_OK);
    require(tn_stream_synchronize(s.device, s.stream) == TN_OK);
    require(tn_share_close(address, s.stream) == TN_OK);
    sharer_expect(&s, address, BYTES, 0xC3);
    require(tn_share_close(address, s.stream) == TN_OK);
    require(test_sim_get()->physical_bytes(0) == 0);
    sharer_close(&s);
    put_word(socket, 'd');
}

/* Exports a block of 0x5A and ends at once, without a word to the driver. */
static void play_exporter(int socket) {
    sharer s;
    tn_share share;
    int file = -1;
    void *block;
    sharer_open(&s);
    block = sharer_block(&s, BYTES, 0x5A);
    require(tn_share_export(block, &share, &file) == TN_OK);
    require(share_send(socket, &share, file));
    _exit(0);
}

typedef struct other {
    pid_t process;
    int socket;
} other;

static other start(const char *part) {
    other o = {-1, -1};
    int ends[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    o.process = fork();
    if (o.process == 0) {
        char number[16];
        snprintf(number, sizeof number, "%d", ends[1]);
        close(ends[0]);
        execl(own_path, own_path, part, number, (char *)NULL);
        _exit(4);
    }
    close(ends[1]);
    o.socket = ends[0];
    return o;
}

static void expect_end(const other *o) {
    int status = -1;
    assert_int_equal(waitpid(o->process, &status, 0), o->process);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    close(o->socket);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void send_block(const void *block, const other *o) {
    tn_share share;
    int file = -1;
    EXPECT_OK(tn_share_export(block, &share, &file));
    assert_true(share_send(o->socket, &share, file));
    close(file);
    assert_int_equal(get_word(o->socket), 'i');
}

static void two_processes_see_the_same_bytes(void **state) {
    other o = start("importer");
    sharer s;
    void *block;
    (void)state;
    sharer_open(&s);
    block = sharer_block(&s, BYTES, 0x11);
    send_block(block, &o);
    EXPECT_OK(tn_fill(s.device, block, 0x5A, BYTES, s.stream)); /* after the other has mapped it */
    EXPECT_OK(tn_stream_synchronize(s.device, s.stream));
    put_word(o.socket, 'l');
    assert_int_equal(get_word(o.socket), 'd');
    sharer_expect(&s, block, BYTES, 0xC3);
    expect_end(&o);
    test_give(s.pool, block, s.stream);
    sharer_close(&s);
}

static void the_exporter_may_free_first(void **state) {
    other o = start("importer");
    sharer s;
    void *block;
    (void)state;
    sharer_open(&s);
    block = sharer_block(&s, BYTES, 0x5A);
    send_block(block, &o);
    test_give(s.pool, block, s.stream);
    EXPECT_OK(tn_stream_synchronize(s.device, s.stream));
    EXPECT_OK(tn_pool_trim(s.pool, SIZE_MAX, NULL)); /* not kept for reuse */
    assert_int_equal(test_pool_stats(s.pool).reserved_bytes, 0);
    assert_int_equal(test_sim_get()->physical_bytes(0), 0);
    put_word(o.socket, 'l');
    assert_int_equal(get_word(o.socket), 'd');
    expect_end(&o);
    sharer_close(&s);
}

static void the_exporter_may_end_first(void **state) {
    other o = start("exporter");
    sharer s;
    tn_share share;
    void *address = NULL;
    int file = -1;
    (void)state;
    sharer_open(&s);
    assert_true(share_receive(o.socket, &share, &file));
    expect_end(&o);
    EXPECT_OK(tn_share_import(s.pool, &share, file, &address));
    close(file);
    sharer_expect(&s, address, BYTES, 0x5A);
    EXPECT_OK(tn_share_close(address, s.stream));
    sharer_close(&s);
}

static void the_importer_may_end_without_a_close(void **state) {
    other o = start("importer");
    sharer s;
    void *block;
    (void)state;
    sharer_open(&s);
    block = sharer_block(&s, BYTES, 0x77);
    send_block(block, &o);
    assert_int_equal(kill(o.process, SIGKILL), 0);
    assert_int_equal(waitpid(o.process, NULL, 0), o.process);
    close(o.socket);
    sharer_expect(&s, block, BYTES, 0x77);
    test_give(s.pool, block, s.stream);
    sharer_close(&s);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_processes_see_the_same_bytes),
        cmocka_unit_test(the_exporter_may_free_first),
        cmocka_unit_test(the_exporter_may_end_first),
        cmocka_unit_test(the_importer_may_end_without_a_close),
    };
    own_path = argv[0];
    if (argc == 3 && strcmp(argv[1], "importer") == 0) return play_importer(atoi(argv[2])), 0;
    if (argc == 3 && strcmp(argv[1], "exporter") == 0) return play_exporter(atoi(argv[2])), 0;
    return cmocka_run_group_tests_name("sim/share_processes", tests, NULL, NULL);
}
