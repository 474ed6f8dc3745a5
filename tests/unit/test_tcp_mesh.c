/* Ranks that find each other anew where they have met before: connections of an attempt that was
 * given up wait there first, with the right word, and are nobody's any more; and strangers. */
#include "test_support.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "host_alloc.h"
#include "tcp_mesh.h"

enum { RANKS = 2, LONG_US = 60 * 1000 * 1000, CARD_BYTES_MAX = 256, DEAD_ATTEMPTS = 3 };

static const int both[RANKS] = {0, 1};

static tn__tcp_mesh *begin(void) {
    tn__tcp_mesh *mesh = NULL;
    EXPECT_OK(tn__tcp_mesh_begin(RANKS, &mesh));
    return mesh;
}

/* ---- the first meeting ----------------------------------------------------------------------- */

static struct {
    pthread_barrier_t barrier;
    unsigned char cards[RANKS][CARD_BYTES_MAX];
    tn__tcp_mesh *meshes[RANKS];
    tn_status status[RANKS];
} meeting;

static tn_status gather(void *context, const void *mine, size_t bytes, void *all) {
    const int rank = *(const int *)context;
    TN_CHECK(bytes <= CARD_BYTES_MAX);
    memcpy(meeting.cards[rank], mine, bytes);
    pthread_barrier_wait(&meeting.barrier);
    for (int i = 0; i < RANKS; i++)
        memcpy((unsigned char *)all + (size_t)i * bytes, meeting.cards[i], bytes);
    return TN_OK;
}

static void *connect_rank(void *argument) {
    int rank = *(const int *)argument;
    const tn__tcp_gather by = {gather, &rank, -1, NULL};
    meeting.status[rank] = tn__tcp_mesh_connect(meeting.meshes[rank], rank, RANKS, &by, LONG_US);
    return NULL;
}

static int meet(void **state) {
    pthread_t other;
    (void)state;
    assert_int_equal(pthread_barrier_init(&meeting.barrier, NULL, RANKS), 0);
    for (int rank = 0; rank < RANKS; rank++)
        meeting.meshes[rank] = begin();
    assert_int_equal(pthread_create(&other, NULL, connect_rank, (void *)(uintptr_t)&both[1]), 0);
    connect_rank((void *)(uintptr_t)&both[0]);
    assert_int_equal(pthread_join(other, NULL), 0);
    EXPECT_OK(meeting.status[0]);
    EXPECT_OK(meeting.status[1]);
    return 0;
}

static int part(void **state) {
    (void)state;
    for (int rank = 0; rank < RANKS; rank++)
        tn__tcp_mesh_free(meeting.meshes[rank]);
    assert_int_equal(pthread_barrier_destroy(&meeting.barrier), 0);
    assert_int_equal(tn__host_live_blocks(), 0);
    return 0;
}

/* ---- anew ------------------------------------------------------------------------------------ */

/* Rank 1 waits for nobody: its connections are there before rank 0 looks. */
static tn__tcp_mesh *come(int rank) {
    tn__tcp_mesh *mesh = begin();
    EXPECT_OK(tn__tcp_mesh_connect_anew(mesh, meeting.meshes[rank], both, rank, RANKS, LONG_US));
    return mesh;
}

static void leave(tn__tcp_mesh *mesh, int rank) {
    tn__tcp_mesh_give_back(mesh, meeting.meshes[rank]);
    tn__tcp_mesh_free(mesh);
}

static void pass(int from, int to, char word) {
    char heard = 0;
    assert_int_equal(tn__tcp_send(from, &word, 1, tn__tcp_deadline_ns(LONG_US)), TN__TCP_DONE);
    assert_int_equal(tn__tcp_receive(to, &heard, 1, tn__tcp_deadline_ns(LONG_US)), TN__TCP_DONE);
    assert_int_equal(heard, word);
}

static void expect_connected(const tn__tcp_mesh *zero, const tn__tcp_mesh *one) {
    pass(zero->peers[1].data, one->peers[0].data, 'a');
    pass(one->peers[0].data, zero->peers[1].data, 'b');
    pass(zero->peers[1].notice, one->peers[0].notice, 'c');
    pass(one->peers[0].notice, zero->peers[1].notice, 'd');
}

static void a_dead_connection_is_nobodys(void **state) {
    (void)state;
    for (int i = 0; i < DEAD_ATTEMPTS; i++)
        leave(come(1), 1);
    tn__tcp_mesh *one = come(1), *zero = come(0);
    expect_connected(zero, one);
    leave(one, 1), leave(zero, 0);
}

/* Who says nothing, half a word and goes, or that he is rank 1, by the wrong word. */
static void strangers_are_shown_out(void **state) {
    static const struct {
        uint64_t word;
        int32_t rank, channel;
    } words = {0x736579656B636162u, 1, 0};
    static const size_t said[] = {0, 5, sizeof words};
    enum { STRANGERS = sizeof said / sizeof *said };
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof bound;
    int files[STRANGERS];
    (void)state;
    assert_int_equal(getsockname(meeting.meshes[0]->listener, (struct sockaddr *)&bound, &bytes),
                     0);
    address.sin_port = ((const struct sockaddr_in *)&bound)->sin_port; /* as of IPv6 */
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < STRANGERS; i++) {
        files[i] = socket(AF_INET, SOCK_STREAM, 0);
        assert_true(files[i] >= 0);
        assert_int_equal(connect(files[i], (const struct sockaddr *)&address, sizeof address), 0);
        assert_int_equal(send(files[i], &words, said[i], 0), said[i]);
    }
    assert_int_equal(close(files[1]), 0);
    tn__tcp_mesh *one = come(1), *zero = come(0);
    expect_connected(zero, one);
    leave(one, 1), leave(zero, 0);
    assert_int_equal(close(files[0]), 0);
    assert_int_equal(close(files[2]), 0);
}

#define MET(test) cmocka_unit_test_setup_teardown(test, meet, part)

int main(void) {
    const struct CMUnitTest tests[] = {
        MET(a_dead_connection_is_nobodys),
        MET(strangers_are_shown_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
