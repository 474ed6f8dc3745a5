/* A stand-in for NCCL between processes of one machine, on host devices, so that the NCCL engine
 * runs where no GPU is: TENURE_NCCL_LIBRARY names it.
 *
 *     call  ->  bytes to and from each rank  ->  task on the stream  ->  pipes in shared memory
 *
 * It is as strict as NCCL is: a communicator is there once all ranks have joined it; what a rank
 * waits for and nobody sends hangs until the communicator is aborted, also if that rank has died,
 * and then it is not shrunk any more;
 * the ranks' sums have an order of NCCL's own (each part begins behind the rank that it is of, and
 * bf16 is rounded at each step), so that of more than two ranks they are not those of the ranks'
 * order.
 */
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "nccl_abi.h"

enum {
    RANKS_MAX = 8,
    ROUNDS_MAX = 1024,
    PIPE_BYTES = 1 << 16,
    NAME_BYTES = 64,
    PATH_BYTES = 128,
    VERSION = 22800,
    UNHANDLED = 1,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    NEWS_MS = 50 /* until a death is known */
};

#define AS_PROTOTYPE(field, name, result, parameters) result field##_call parameters __asm__(name);
TN__NCCL_CALLS(AS_PROTOTYPE)
TN__NCCL_LATER_CALLS(AS_PROTOTYPE)
void host_tasks_call(tn__nccl_put_task *put, void *device) __asm__(TN__NCCL_HOST_TASKS);

/* ---- what ranks share ----------------------------------------------------------------------- */

typedef struct byte_pipe {
    _Atomic size_t written;
    _Atomic size_t read;
    char bytes[PIPE_BYTES];
} byte_pipe;

typedef struct split_word {
    atomic_int is_said;
    int color, key;
} split_word;

typedef struct shared_room {
    atomic_int joined;
    atomic_int has_left[RANKS_MAX];
    split_word words[ROUNDS_MAX][RANKS_MAX];
    byte_pipe pipes[RANKS_MAX][RANKS_MAX]; /* from, to */
} shared_room;

typedef struct communicator {
    atomic_int references; /* the caller's and each task's */
    atomic_int is_aborted;
    shared_room *room;
    int file; /* of the room: a rank has its own byte locked while it lives */
    char name[NAME_BYTES];
    int rank, rank_count;
    tn__nccl_put_task *put;
    void *device;
    int children;     /* splits and shrinks so far: the same on all ranks */
    int is_splitting; /* and this is where the new one goes */
    void **child;
} communicator;

static tn__nccl_put_task *put_task;
static void *device_of_tasks;

void host_tasks_call(tn__nccl_put_task *put, void *device) {
    put_task = put;
    device_of_tasks = device;
}

static void path_of(const communicator *comm, char path[PATH_BYTES]) {
    snprintf(path, PATH_BYTES, "/dev/shm/tenure-nccl-%s", comm->name);
}

/* With it the rank's byte of the file is locked, until the rank has left or is gone. */
static int map_room(communicator *comm) {
    char path[PATH_BYTES];
    struct flock own = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = comm->rank, .l_len = 1};
    path_of(comm, path);
    comm->file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (comm->file < 0) return 0;
    void *room = MAP_FAILED;
    if (ftruncate(comm->file, sizeof(shared_room)) == 0 &&
        fcntl(comm->file, F_OFD_SETLK, &own) == 0)
        room = mmap(NULL, sizeof(shared_room), PROT_READ | PROT_WRITE, MAP_SHARED, comm->file, 0);
    if (room == MAP_FAILED) return close(comm->file), 0;
    comm->room = room;
    return 1;
}

static void forget_name(const communicator *comm) {
    char path[PATH_BYTES];
    path_of(comm, path);
    (void)unlink(path);
}

static void drop(communicator *comm) {
    if (atomic_fetch_sub(&comm->references, 1) > 1) return;
    munmap(comm->room, sizeof *comm->room);
    close(comm->file);
    free(comm);
}

static communicator *enter(const char *name, int rank, int rank_count) {
    communicator *comm = calloc(1, sizeof *comm);
    if (!comm || rank_count > RANKS_MAX) return free(comm), NULL;
    snprintf(comm->name, sizeof comm->name, "%s", name);
    comm->rank = rank, comm->rank_count = rank_count;
    comm->put = put_task, comm->device = device_of_tasks;
    comm->references = 1;
    if (!map_room(comm)) return free(comm), NULL;
    atomic_fetch_add(&comm->room->joined, 1);
    return comm;
}

static int has_all(const communicator *comm) {
    if (atomic_load(&comm->room->joined) < comm->rank_count) return 0;
    forget_name(comm);
    return 1;
}

/* ---- what a task does ----------------------------------------------------------------------- */

typedef struct transfer {
    int peer, is_send;
    char *at;
    size_t left;
} transfer;

typedef struct reduction {
    int type, reduce, first_rank; /* of which the first part is */
    size_t count, part;           /* elements; of one part */
    char *rows;                   /* every rank's, one after the other */
    void *dst;
} reduction;

typedef struct work {
    communicator *comm;
    void *stream;
    transfer *transfers;
    size_t transfer_count;
    reduction *reductions;
    size_t reduction_count;
} work;

static _Thread_local work *open_work; /* of the group, or of the call under way */
static _Thread_local int group_depth;

static size_t width_of(int type) {
    return type == TN__NCCL_FLOAT32 ? 4 : type == TN__NCCL_BFLOAT16 ? 2 : 1;
}

static float number_at(const char *row, size_t i, int type) {
    uint32_t bits = 0;
    float number;
    if (type == TN__NCCL_FLOAT32)
        memcpy(&bits, row + 4 * i, 4);
    else
        bits = (uint32_t)((const uint16_t *)(const void *)row)[i] << 16;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static float rounded(float number, int type) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (type == TN__NCCL_FLOAT32 || number != number) return number;
    bits += 0x7FFF + (bits >> 16 & 1);
    bits &= 0xFFFF0000u;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static void store(void *dst, size_t i, float number, int type) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (type == TN__NCCL_FLOAT32)
        ((uint32_t *)dst)[i] = bits;
    else
        ((uint16_t *)dst)[i] = (uint16_t)(bits >> 16);
}

static void reduce_rows(const reduction *of, int rank_count) {
    size_t row_bytes = of->count * width_of(of->type);
    for (size_t i = 0; i < of->count; i++) {
        int first = of->first_rank + (int)(i / of->part) + 1;
        float sum = number_at(of->rows + (size_t)(first % rank_count) * row_bytes, i, of->type);
        for (int k = 1; k < rank_count; k++) {
            const char *row = of->rows + (size_t)((first + k) % rank_count) * row_bytes;
            float next = number_at(row, i, of->type);
            sum = of->reduce == TN__NCCL_MAX ? fmaxf(sum, next) : sum + next;
            sum = rounded(sum, of->type);
        }
        store(of->dst, i, sum, of->type);
    }
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* As much as goes now. */
static size_t move(communicator *comm, transfer *one) {
    int from = one->is_send ? comm->rank : one->peer, to = one->is_send ? one->peer : comm->rank;
    byte_pipe *through = &comm->room->pipes[from][to];
    size_t written = atomic_load(&through->written), read = atomic_load(&through->read);
    size_t at = (one->is_send ? written : read) % PIPE_BYTES;
    size_t room = one->is_send ? PIPE_BYTES - (written - read) : written - read;
    size_t bytes = smaller(smaller(room, one->left), PIPE_BYTES - at);
    if (!bytes) return 0;
    if (one->is_send)
        memcpy(through->bytes + at, one->at, bytes);
    else
        memcpy(one->at, through->bytes + at, bytes);
    atomic_fetch_add(one->is_send ? &through->written : &through->read, bytes);
    one->at += bytes;
    one->left -= bytes;
    return bytes;
}

/* What goes between two ranks goes in order. Returns how many transfers are left. */
static size_t move_all(const work *of, size_t *moved) {
    unsigned busy[2] = {0, 0};
    size_t left = 0;
    for (size_t i = 0; i < of->transfer_count; i++) {
        transfer *one = &of->transfers[i];
        if (!one->left) continue;
        if (!(busy[one->is_send] >> one->peer & 1u)) *moved += move(of->comm, one);
        if (one->left) busy[one->is_send] |= 1u << one->peer, left++;
    }
    return left;
}

static void free_work(work *of) {
    for (size_t i = 0; i < of->reduction_count; i++)
        free(of->reductions[i].rows);
    free(of->reductions);
    free(of->transfers);
    free(of);
}

static void pause_for(size_t idle) {
    if (idle < 200)
        sched_yield();
    else
        (void)poll(NULL, 0, 1);
}

static void run(void *argument) {
    work *of = argument;
    communicator *comm = of->comm;
    size_t left = 1, idle = 0;
    while (left && !atomic_load(&comm->is_aborted)) {
        size_t moved = 0;
        left = move_all(of, &moved);
        idle = moved ? 0 : idle + 1;
        if (left && idle) pause_for(idle);
    }
    for (size_t i = 0; i < of->reduction_count && !left; i++)
        reduce_rows(&of->reductions[i], comm->rank_count);
    free_work(of);
    drop(comm);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static int start(work *of) {
    communicator *comm = of->comm;
    if (!comm) return free_work(of), TN__NCCL_SUCCESS;
    atomic_fetch_add(&comm->references, 1);
    if (comm->put(comm->device, run, of, of->stream) == 0) return TN__NCCL_SUCCESS;
    atomic_fetch_sub(&comm->references, 1);
    free_work(of);
    return UNHANDLED;
}

int group_start_call(void) {
    if (group_depth++ == 0) open_work = calloc(1, sizeof *open_work);
    return open_work ? TN__NCCL_SUCCESS : UNHANDLED;
}

int group_end_call(void) {
    work *of = open_work;
    if (--group_depth > 0) return TN__NCCL_SUCCESS;
    open_work = NULL;
    return of ? start(of) : UNHANDLED;
}

static void *grown(void *list, size_t count, size_t item_bytes) {
    void *more = count & (count - 1) ? list : realloc(list, (count ? 2 * count : 1) * item_bytes);
    if (!more) abort();
    return more;
}

static void add(communicator *comm, int peer, int is_send, const void *at, size_t bytes) {
    work *of = open_work;
    of->transfers = grown(of->transfers, of->transfer_count, sizeof *of->transfers);
    of->transfers[of->transfer_count++] = (transfer){peer, is_send, (char *)(uintptr_t)at, bytes};
    of->comm = comm;
}

static char *add_reduction(const reduction *one, int rank_count) {
    work *of = open_work;
    char *rows = malloc((size_t)rank_count * one->count * width_of(one->type) + 1);
    of->reductions = grown(of->reductions, of->reduction_count, sizeof *of->reductions);
    of->reductions[of->reduction_count] = *one;
    if (!rows) abort();
    return of->reductions[of->reduction_count++].rows = rows;
}

/* Every call is a group, of itself at least. */
static communicator *begin_call(void *handle, void *stream) {
    (void)group_start_call();
    open_work->stream = stream;
    return handle;
}

int all_gather_call(const void *src, void *dst, size_t count, int type, void *handle,
                    void *stream) {
    communicator *comm = begin_call(handle, stream);
    size_t bytes = count * width_of(type);
    for (int peer = 0; peer < comm->rank_count; peer++) {
        char *place = (char *)dst + (size_t)peer * bytes;
        if (peer == comm->rank && place == src) continue;
        add(comm, peer, 1, src, bytes);
        add(comm, peer, 0, place, bytes);
    }
    return group_end_call();
}

/* Everybody sends `count` elements, from src on for rank 0 and `stride` further for each next; who
 * receives reduces what comes. */
static int exchange_and_reduce(const void *src, size_t stride, const reduction *one, int receivers,
                               void *handle, void *stream) {
    communicator *comm = begin_call(handle, stream);
    size_t bytes = one->count * width_of(one->type);
    int receives = receivers < 0 || receivers == comm->rank;
    char *rows = receives ? add_reduction(one, comm->rank_count) : NULL;
    for (int peer = 0; peer < comm->rank_count; peer++) {
        if (receivers < 0 || receivers == peer)
            add(comm, peer, 1, (const char *)src + (size_t)peer * stride, bytes);
        if (receives) add(comm, peer, 0, rows + (size_t)peer * bytes, bytes);
    }
    return group_end_call();
}

int reduce_scatter_call(const void *src, void *dst, size_t count, int type, int reduce,
                        void *handle, void *stream) {
    const communicator *comm = handle;
    reduction one = {type, reduce, comm->rank, count, count, NULL, dst};
    return exchange_and_reduce(src, count * width_of(type), &one, -1, handle, stream);
}

int all_reduce_call(const void *src, void *dst, size_t count, int type, int reduce, void *handle,
                    void *stream) {
    const communicator *comm = handle;
    size_t ranks = (size_t)comm->rank_count;
    reduction one = {type, reduce, 0, count, (count + ranks - 1) / ranks, NULL, dst};
    return exchange_and_reduce(src, 0, &one, -1, handle, stream);
}

int reduce_call(const void *src, void *dst, size_t count, int type, int reduce, int root,
                void *handle, void *stream) {
    reduction one = {type, reduce, root, count, count, NULL, dst};
    return exchange_and_reduce(src, 0, &one, root, handle, stream);
}

int broadcast_call(const void *src, void *dst, size_t count, int type, int root, void *handle,
                   void *stream) {
    communicator *comm = begin_call(handle, stream);
    size_t bytes = count * width_of(type);
    for (int peer = 0; comm->rank == root && peer < comm->rank_count; peer++)
        if (peer != root || src != dst) add(comm, peer, 1, src, bytes);
    if (comm->rank != root || src != dst) add(comm, root, 0, dst, bytes);
    open_work->comm = comm;
    return group_end_call();
}

int send_call(const void *src, size_t count, int type, int peer, void *handle, void *stream) {
    add(begin_call(handle, stream), peer, 1, src, count * width_of(type));
    return group_end_call();
}

int receive_call(void *dst, size_t count, int type, int peer, void *handle, void *stream) {
    add(begin_call(handle, stream), peer, 0, dst, count * width_of(type));
    return group_end_call();
}

/* ---- communicators -------------------------------------------------------------------------- */

int version_call(int *version) { return *version = VERSION, TN__NCCL_SUCCESS; }

const char *error_string_call(int code) { return code ? "a failure" : "no error"; }

const char *last_error_call(void *comm) { return (void)comm, ""; }

int id_call(tn__nccl_id *id) {
    uint64_t number;
    memset(id, 0, sizeof *id);
    if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number) return UNHANDLED;
    snprintf(id->bytes, sizeof id->bytes, "%016llx", (unsigned long long)number);
    return TN__NCCL_SUCCESS;
}

int join_call(void **comm, int rank_count, tn__nccl_id id, int rank, tn__nccl_config *config) {
    if (config->magic != TN__NCCL_CONFIG_MAGIC || config->blocking || !put_task)
        return TN__NCCL_INVALID_ARGUMENT;
    id.bytes[NAME_BYTES / 2] = 0;
    *comm = enter(id.bytes, rank, rank_count);
    return *comm ? TN__NCCL_IN_PROGRESS : UNHANDLED;
}

static communicator *enter_child(communicator *parent, int number, int rank, int rank_count) {
    char name[NAME_BYTES + 32];
    snprintf(name, sizeof name, "%s.%d.%d", parent->name, parent->children, number);
    communicator *made = strlen(name) < NAME_BYTES ? enter(name, rank, rank_count) : NULL;
    return made;
}

/* Once all ranks have said their color. */
static int finish_split(communicator *comm) {
    const split_word *words = comm->room->words[comm->children], *mine = &words[comm->rank];
    int rank = 0, count = 0, first = -1;
    for (int other = 0; other < comm->rank_count; other++)
        if (!atomic_load(&words[other].is_said)) return TN__NCCL_IN_PROGRESS;
    for (int other = 0; other < comm->rank_count; other++) {
        if (words[other].color != mine->color) continue;
        if (first < 0) first = other;
        count++;
        rank +=
            words[other].key < mine->key || (words[other].key == mine->key && other < comm->rank);
    }
    if (mine->color != TN__NCCL_NO_COLOR) *comm->child = enter_child(comm, first, rank, count);
    int is_made = mine->color == TN__NCCL_NO_COLOR || *comm->child;
    comm->is_splitting = 0;
    comm->children++;
    return is_made ? TN__NCCL_SUCCESS : UNHANDLED;
}

int async_error_call(void *handle, int *code) {
    communicator *comm = handle;
    *code = has_all(comm) ? TN__NCCL_SUCCESS : TN__NCCL_IN_PROGRESS;
    if (comm->is_splitting) *code = finish_split(comm);
    return TN__NCCL_SUCCESS;
}

int split_call(void *handle, int color, int key, void **out, tn__nccl_config *config) {
    communicator *comm = handle;
    if (config->magic != TN__NCCL_CONFIG_MAGIC || comm->is_splitting) return INVALID_USAGE;
    if (comm->children == ROUNDS_MAX) return UNHANDLED;
    split_word *mine = &comm->room->words[comm->children][comm->rank];
    mine->color = color, mine->key = key;
    comm->child = out;
    comm->is_splitting = 1;
    atomic_store(&mine->is_said, 1);
    return TN__NCCL_IN_PROGRESS;
}

static int has_died(const communicator *comm, int rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    if (rank == comm->rank || fcntl(comm->file, F_OFD_GETLK, &lock) != 0) return 0;
    return lock.l_type == F_UNLCK && !atomic_load(&comm->room->has_left[rank]);
}

/* After a failure, the flag says: one of a death is NCCL's own error, too. */
static int await_death(const communicator *comm, int flags) {
    int is_known = 0;
    for (int i = 0; i < NEWS_MS && !is_known && flags & TN__NCCL_SHRINK_ABORT; i++) {
        for (int rank = 0; rank < comm->rank_count; rank++)
            is_known |= has_died(comm, rank);
        if (!is_known) (void)poll(NULL, 0, 1);
    }
    return is_known;
}

int shrink_call(void *handle, int *excluded, int excluded_count, void **out,
                tn__nccl_config *config, int flags) {
    communicator *comm = handle;
    int rank = 0, mask = 0;
    if (config->magic != TN__NCCL_CONFIG_MAGIC || comm->is_splitting) return INVALID_USAGE;
    if (await_death(comm, flags)) return REMOTE_ERROR;
    if (flags & TN__NCCL_SHRINK_ABORT) atomic_store(&comm->is_aborted, 1);
    for (int i = 0; i < excluded_count; i++) {
        mask |= 1 << excluded[i];
        rank -= excluded[i] < comm->rank;
    }
    *out = enter_child(comm, mask, comm->rank + rank, comm->rank_count - excluded_count);
    comm->children++;
    return *out ? TN__NCCL_SUCCESS : UNHANDLED;
}

int finalize_call(void *comm) { return (void)comm, TN__NCCL_SUCCESS; }

static void leave(communicator *comm) {
    atomic_store(&comm->room->has_left[comm->rank], 1);
    drop(comm);
}

int destroy_call(void *comm) { return leave(comm), TN__NCCL_SUCCESS; }

int abort_call(void *handle) {
    communicator *comm = handle;
    atomic_store(&comm->is_aborted, 1);
    if (!has_all(comm)) forget_name(comm);
    leave(comm);
    return TN__NCCL_SUCCESS;
}

int count_call(void *handle, int *count) {
    return *count = ((communicator *)handle)->rank_count, TN__NCCL_SUCCESS;
}

int device_call(void *comm, int *device) { return (void)comm, *device = 0, TN__NCCL_SUCCESS; }

int rank_call(void *handle, int *rank) {
    return *rank = ((communicator *)handle)->rank, TN__NCCL_SUCCESS;
}

/* ---- memory --------------------------------------------------------------------------------- */

int mem_alloc_call(void **out, size_t bytes) {
    *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *out ? TN__NCCL_SUCCESS : UNHANDLED;
}

int mem_free_call(void *address) { return free(address), TN__NCCL_SUCCESS; }

int buffer_register_call(void *comm, void *address, size_t bytes, void **handle) {
    return (void)comm, (void)bytes, *handle = address, TN__NCCL_SUCCESS;
}

int buffer_deregister_call(void *comm, void *handle) {
    return (void)comm, (void)handle, TN__NCCL_SUCCESS;
}

int window_register_call(void *comm, void *address, size_t bytes, void **window, int flags) {
    return (void)comm, (void)bytes, (void)flags, *window = address, TN__NCCL_SUCCESS;
}

int window_deregister_call(void *comm, void *window) {
    return (void)comm, (void)window, TN__NCCL_SUCCESS;
}
