/* The connections between ranks: see tcp_mesh.h. */
#include "tcp_mesh.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "host_alloc.h"
#include "rendezvous.h"
#include "text_sink.h"

enum {
    DATA,
    NOTICE,
    CHANNELS,
    VISITORS_MAX = 32,
    HEAR_US = 2 * 1000 * 1000,
    SHORTAGE_MS = 20,
    LOOK_MS = 100,
    TEXT_BYTES = 256
};

/* What ranks tell each other before they connect. */
typedef struct tn__tcp_card {
    tn__tcp_address address;
    uint64_t word; /* rank 0's is that of the mesh */
} tn__tcp_card;

/* What a connection begins with. Its layout is that of one machine: ranks of another byte order
 * do not find the word. */
typedef struct mesh_hello {
    uint64_t word;
    int32_t rank;
    int32_t channel;
} mesh_hello;

typedef struct mesh_maker {
    tn__tcp_mesh *mesh;
    uint64_t word;
    size_t next_visitor; /* the place that is given away next: the oldest one */
    uint64_t deadline_ns;
    int shortage; /* why the last visitor could not be taken in; 0 */
    int is_anew;  /* there may be visitors of an attempt before, which has been given up */
} mesh_maker;

/* ---- making --------------------------------------------------------------------------------- */

static int *file_of(const tn__tcp_mesh *mesh, int rank, int channel) {
    tn__tcp_link *peer = &mesh->peers[rank];
    return channel == DATA ? &peer->data : &peer->notice;
}

static tn_status fill_card(const tn__tcp_mesh *mesh, const tn__tcp_gather *by, tn__tcp_card *out) {
    int connection = by->connection < 0 ? mesh->listener : by->connection;
    TN_TRY(tn__tcp_reachable(mesh->listener, connection, &out->address));
    if (by->connection < 0) {
        memset(out->address.bytes, 0, sizeof out->address.bytes);
        out->address.bytes[10] = out->address.bytes[11] = 0xFF;
        out->address.bytes[12] = 127, out->address.bytes[15] = 1;
    }
    if (getrandom(&out->word, sizeof out->word, 0) != (ssize_t)sizeof out->word)
        return TN_FAIL(TN_COMM_ERROR, "the system has no random numbers");
    return TN_OK;
}

/* Rank 0 may know itself by a name that only its own machine understands: whoever has reached it
 * knows better. */
static void correct_rank_0(mesh_maker *make, const tn__tcp_gather *by) {
    tn__tcp_address *address = &make->mesh->cards[0].address, seen;
    if (make->mesh->rank == 0 || by->connection < 0 || !tn__tcp_is_loopback(address)) return;
    if (tn__tcp_peer(by->connection, &seen) != TN_OK) return;
    memcpy(address->bytes, seen.bytes, sizeof seen.bytes);
}

static tn_status cannot_reach(const mesh_maker *make, int rank, tn__tcp_end end) {
    return end == TN__TCP_LATE
               ? TN_FAIL(TN_COMM_TIMEOUT, "rank %d could not connect to rank %d in time",
                         make->mesh->rank, rank)
               : TN_FAIL(TN_COMM_ERROR, "rank %d could not connect to rank %d, port %u: it is gone",
                         make->mesh->rank, rank, make->mesh->cards[rank].address.port);
}

static tn_status connect_to(mesh_maker *make, int rank) {
    for (int channel = DATA; channel < CHANNELS; channel++) {
        mesh_hello hello = {.word = make->word, .rank = make->mesh->rank, .channel = channel};
        int *file = file_of(make->mesh, rank, channel);
        tn__tcp_end end =
            tn__tcp_connect(&make->mesh->cards[rank].address, make->deadline_ns, file);
        if (end == TN__TCP_DONE) end = tn__tcp_send(*file, &hello, sizeof hello, make->deadline_ns);
        if (end != TN__TCP_DONE) return cannot_reach(make, rank, end);
    }
    return TN_OK;
}

/* ---- taking in ------------------------------------------------------------------------------ */

/* A connection that has not said yet whose it is. */
typedef struct tn__tcp_visitor {
    int file; /* -1: none */
    size_t have;
    mesh_hello hello;
} tn__tcp_visitor;

static int awaited(const tn__tcp_mesh *mesh) {
    int count = 0;
    for (int rank = mesh->rank + 1; rank < mesh->rank_count; rank++)
        for (int channel = DATA; channel < CHANNELS; channel++)
            count += *file_of(mesh, rank, channel) < 0;
    return count;
}

static void receive_visitor(mesh_maker *make) {
    tn__tcp_visitor *place = &make->mesh->visitors[make->next_visitor];
    int file = tn__tcp_accept(make->mesh->listener);
    make->shortage = file < 0 && tn__tcp_is_short_of_files(errno) ? errno : 0;
    if (file < 0) return;
    tn__tcp_close(&place->file);
    *place = (tn__tcp_visitor){.file = file};
    make->next_visitor = (make->next_visitor + 1) % VISITORS_MAX;
}

/* A visitor who has said all of his hello is a rank, or is shown out. */
static void listen_to(const mesh_maker *make, tn__tcp_visitor *from) {
    const mesh_hello *hello = &from->hello;
    unsigned char *into = (unsigned char *)&from->hello + from->have;
    ptrdiff_t got = tn__tcp_receive_some(from->file, into, sizeof *hello - from->have);
    if (got < 0) {
        tn__tcp_close(&from->file);
        return;
    }
    from->have += (size_t)got;
    if (from->have < sizeof *hello) return;
    int is_ours = hello->word == make->word && hello->rank > make->mesh->rank &&
                  hello->rank < make->mesh->rank_count && hello->channel >= DATA &&
                  hello->channel < CHANNELS;
    if (make->is_anew && tn__tcp_has_ended(from->file)) is_ours = 0;
    int *file = is_ours ? file_of(make->mesh, hello->rank, hello->channel) : NULL;
    if (file && *file < 0) {
        *file = from->file;
        from->file = -1;
    }
    tn__tcp_close(&from->file);
}

/* Whoever comes within a while; 0: nobody did. */
static int look_around(mesh_maker *make) {
    tn__tcp_visitor *visitors = make->mesh->visitors;
    struct pollfd polls[VISITORS_MAX + 1];
    int left_ms = tn__tcp_poll_ms(make->deadline_ns);
    for (int i = 0; i < VISITORS_MAX; i++)
        polls[i] = (struct pollfd){.fd = visitors[i].file, .events = POLLIN};
    polls[VISITORS_MAX] = (struct pollfd){.fd = make->mesh->listener, .events = POLLIN};
    /* Who can not be taken in now waits a little, and is there still. */
    if (make->shortage) (void)poll(NULL, 0, SHORTAGE_MS);
    if (poll(polls, VISITORS_MAX + 1, left_ms < LOOK_MS ? left_ms : LOOK_MS) <= 0) return 0;
    for (int i = 0; i < VISITORS_MAX; i++)
        if (polls[i].revents) listen_to(make, &visitors[i]);
    if (polls[VISITORS_MAX].revents) receive_visitor(make);
    return 1;
}

static tn_status not_all_came(const mesh_maker *make) {
    char text[TEXT_BYTES];
    const tn__tcp_mesh *mesh = make->mesh;
    tn__text out = tn__text_begin(text, sizeof text);
    for (int rank = mesh->rank + 1; rank < mesh->rank_count; rank++)
        if (mesh->peers[rank].data < 0 || mesh->peers[rank].notice < 0)
            tn__text_add(&out, "%srank %d", out.used ? ", " : "", rank);
    return TN_FAIL_NATIVE(
        TN_COMM_TIMEOUT, make->shortage, "rank %d waited for connections of %s%s%s", mesh->rank,
        text, make->shortage ? ": " : "", make->shortage ? strerror(make->shortage) : "");
}

static tn_status take_in_others(mesh_maker *make, const tn__tcp_gather *by) {
    tn_status status = TN_OK;
    while (status == TN_OK && awaited(make->mesh) && tn__tcp_now_ns() < make->deadline_ns)
        if (!look_around(make) && by && by->look) status = by->look(by->context);
    for (int i = 0; i < VISITORS_MAX; i++)
        tn__tcp_close(&make->mesh->visitors[i].file);
    if (status != TN_OK) return status;
    return awaited(make->mesh) ? not_all_came(make) : TN_OK;
}

/* ---- the mesh ------------------------------------------------------------------------------- */

void tn__tcp_mesh_free(tn__tcp_mesh *mesh) {
    if (!mesh) return;
    for (int rank = 0; mesh->peers && rank < mesh->capacity; rank++)
        for (int channel = DATA; channel < CHANNELS; channel++)
            tn__tcp_close(file_of(mesh, rank, channel));
    tn__tcp_close(&mesh->listener);
    tn__host_free(mesh->peers);
    tn__host_free(mesh->cards);
    tn__host_free(mesh->visitors);
    tn__host_free(mesh);
}

tn_status tn__tcp_mesh_begin(int capacity, tn__tcp_mesh **out) {
    tn__tcp_mesh *mesh = tn__host_alloc(1, sizeof *mesh);
    if (!mesh) return TN_OUT_OF_HOST_MEMORY;
    mesh->capacity = capacity;
    mesh->listener = -1;
    mesh->peers = tn__host_alloc((size_t)capacity, sizeof *mesh->peers);
    mesh->cards = tn__host_alloc((size_t)capacity, sizeof *mesh->cards);
    mesh->visitors = tn__host_alloc(VISITORS_MAX, sizeof *mesh->visitors);
    for (int i = 0; mesh->peers && i < capacity; i++)
        mesh->peers[i] = (tn__tcp_link){.data = -1, .notice = -1};
    for (int i = 0; mesh->visitors && i < VISITORS_MAX; i++)
        mesh->visitors[i].file = -1;
    int is_complete = mesh->peers && mesh->cards && mesh->visitors;
    tn_status status = is_complete ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK)
        status =
            tn__tcp_reserve_files((size_t)capacity * CHANNELS + VISITORS_MAX, "a TCP communicator");
    if (status == TN_OK) status = tn__tcp_listen(0, &mesh->listener);
    if (status != TN_OK) {
        tn__tcp_mesh_free(mesh);
        return status;
    }
    *out = mesh;
    return TN_OK;
}

static tn_status connect_all(mesh_maker *make, const tn__tcp_gather *by) {
    tn__tcp_mesh *mesh = make->mesh;
    correct_rank_0(make, by);
    make->word = make->mesh->cards[0].word;
    for (int rank = 0; rank < mesh->rank; rank++)
        TN_TRY(connect_to(make, rank));
    return take_in_others(make, by);
}

tn_status tn__tcp_mesh_connect(tn__tcp_mesh *mesh, int rank, int rank_count,
                               const tn__tcp_gather *by, uint64_t timeout_us) {
    mesh_maker make = {.mesh = mesh, .deadline_ns = tn__tcp_deadline_ns(timeout_us)};
    tn__tcp_card card;
    _Static_assert(sizeof card <= TN__ROOM_BYTES, "the cards' meeting takes no memory");
    TN_ASSERT(rank_count <= mesh->capacity);
    memset(&card, 0, sizeof card);
    mesh->rank = rank;
    mesh->rank_count = rank_count;
    TN_TRY(fill_card(mesh, by, &card));
    TN_TRY(by->gather(by->context, &card, sizeof card, mesh->cards));
    return connect_all(&make, by);
}

static void swap_listeners(tn__tcp_mesh *a, tn__tcp_mesh *b) {
    int listener = a->listener;
    a->listener = b->listener;
    b->listener = listener;
}

/* The word is that of just these ranks: whoever comes with another list is shown out. */
static uint64_t word_of(const tn__tcp_mesh *from, const int *rank_of, int rank_count) {
    uint64_t word = from->cards[0].word;
    return tn__hash_bytes(word, rank_of, (size_t)rank_count * sizeof *rank_of);
}

tn_status tn__tcp_mesh_connect_anew(tn__tcp_mesh *mesh, tn__tcp_mesh *from, const int *rank_of,
                                    int rank, int rank_count, uint64_t timeout_us) {
    mesh_maker make = {.mesh = mesh, .deadline_ns = tn__tcp_deadline_ns(timeout_us), .is_anew = 1};
    TN_ASSERT(rank_count <= mesh->capacity);
    mesh->rank = rank;
    mesh->rank_count = rank_count;
    for (int i = 0; i < rank_count; i++)
        mesh->cards[i] = from->cards[rank_of[i]];
    make.word = mesh->cards[0].word = word_of(from, rank_of, rank_count);
    swap_listeners(mesh, from);
    tn_status status = TN_OK;
    for (int lower = 0; lower < rank && status == TN_OK; lower++)
        status = connect_to(&make, lower);
    return status == TN_OK ? take_in_others(&make, NULL) : status;
}

void tn__tcp_mesh_give_back(tn__tcp_mesh *mesh, tn__tcp_mesh *from) { swap_listeners(mesh, from); }

/* ---- notices -------------------------------------------------------------------------------- */

void tn__tcp_mesh_say(const tn__tcp_mesh *mesh, tn_status status, const char *text) {
    tn__tcp_notice notice = {.status = (int32_t)status};
    snprintf(notice.text, sizeof notice.text, "%s", text);
    /* All are told before the first connection ends: an end that is seen has its reason. */
    for (int rank = 0; rank < mesh->rank_count; rank++)
        if (mesh->peers[rank].notice >= 0)
            (void)tn__tcp_send(mesh->peers[rank].notice, &notice, sizeof notice, 0);
    for (int rank = 0; rank < mesh->rank_count; rank++) {
        if (rank == mesh->rank) continue;
        (void)shutdown(mesh->peers[rank].data, SHUT_RDWR);
        (void)shutdown(mesh->peers[rank].notice, SHUT_WR);
    }
}

int tn__tcp_mesh_hear(const tn__tcp_mesh *mesh, int rank, tn__tcp_notice *out) {
    tn__tcp_end end =
        tn__tcp_receive(mesh->peers[rank].notice, out, sizeof *out, tn__tcp_deadline_ns(HEAR_US));
    out->text[sizeof out->text - 1] = 0;
    return end == TN__TCP_DONE;
}
