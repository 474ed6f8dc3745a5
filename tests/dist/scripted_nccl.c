/* A library with NCCL's names, without any GPU: see scripted_nccl.h. Every call that NCCL may leave
 * in progress is, and is over as the script says. */
#include "scripted_nccl.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "nccl_abi.h"

scripted_nccl scripted_nccl_state;

#define STATE scripted_nccl_state
enum { ANY_VERSION = 21400, UNHANDLED_CUDA_ERROR = 1, INVALID_USAGE = 5 };

/* Declared as the engine calls them: the same table gives the prototypes. */
#define AS_PROTOTYPE(field, name, result, parameters) result field##_call parameters __asm__(name);
TN__NCCL_CALLS(AS_PROTOTYPE)
TN__NCCL_LATER_CALLS(AS_PROTOTYPE)

/* Each communicator has a watch, which asks from its own thread. */
static atomic_int polls;
static const void *_Atomic busy; /* one that takes no call before it was seen to be through */

static int begin(void) {
    polls = 0;
    return TN__NCCL_IN_PROGRESS;
}

/* Likewise, with the communicator busy meanwhile. */
static int occupy(const void *comm) {
    const int code = begin();
    busy = comm;
    return STATE.is_early ? TN__NCCL_SUCCESS : code;
}

static void write_down(const char *format, ...) {
    size_t used = strlen(STATE.log);
    va_list list;
    va_start(list, format);
    vsnprintf(STATE.log + used, sizeof STATE.log - used, format, list);
    va_end(list);
}

static int is_grouping;
static void *group_stream; /* of its last call; NULL: it has none */

static int launch(const char *name, void *stream) {
    if (!STATE.launch || STATE.launch(name, STATE.src, STATE.dst, stream) == 0) return begin();
    return UNHANDLED_CUDA_ERROR;
}

static int begin_collective(const char *name, const void *src, void *dst, size_t count,
                            void *stream) {
    STATE.collectives++;
    STATE.src = src, STATE.dst = dst;
    write_down("%s %zu ", name, count);
    if (STATE.refused && --STATE.refused == 0) return TN__NCCL_INVALID_ARGUMENT;
    if (!is_grouping) return launch(name, stream);
    group_stream = stream;
    return TN__NCCL_SUCCESS;
}

int version_call(int *version) { return *version = ANY_VERSION, TN__NCCL_SUCCESS; }

const char *error_string_call(int code) { return code ? "a scripted failure" : "no error"; }

const char *last_error_call(void *comm) { return comm ? "its last words" : ""; }

int id_call(tn__nccl_id *id) { return memset(id, 1, sizeof *id), TN__NCCL_SUCCESS; }

int join_call(void **comm, int rank_count, tn__nccl_id id, int rank, tn__nccl_config *config) {
    (void)id, (void)rank, (void)rank_count;
    if (config->magic != TN__NCCL_CONFIG_MAGIC || config->blocking)
        return TN__NCCL_INVALID_ARGUMENT;
    *comm = &STATE;
    busy = NULL;
    return begin();
}

int finalize_call(void *comm) { return (void)comm, STATE.finalized++, begin(); }

/* As NCCL does: memory of the communicator is in the graphs, and it waits for them without end. */
static int end_with_graphs(int *count) {
    while (atomic_load(&STATE.graphs))
        sched_yield();
    return ++*count, TN__NCCL_SUCCESS;
}

int destroy_call(void *comm) { return (void)comm, end_with_graphs(&STATE.destroyed); }

int abort_call(void *comm) {
    (void)comm;
    atomic_fetch_add(&STATE.ending, 1);
    return end_with_graphs(&STATE.aborted);
}

int async_error_call(void *comm, int *code) {
    int is_over = STATE.polls_in_progress >= 0 && polls++ >= STATE.polls_in_progress;
    if (is_over && comm == busy) busy = NULL;
    *code = is_over ? STATE.result : TN__NCCL_IN_PROGRESS;
    return TN__NCCL_SUCCESS;
}

int count_call(void *comm, int *count) {
    return (void)comm, *count = STATE.rank_count, TN__NCCL_SUCCESS;
}

int device_call(void *comm, int *device) { return (void)comm, *device = 0, TN__NCCL_SUCCESS; }

int rank_call(void *comm, int *rank) { return (void)comm, *rank = STATE.rank, TN__NCCL_SUCCESS; }

int all_gather_call(const void *src, void *dst, size_t count, int type, void *comm, void *stream) {
    (void)type, (void)comm;
    return begin_collective("all_gather", src, dst, count, stream);
}

int reduce_scatter_call(const void *src, void *dst, size_t count, int type, int reduce, void *comm,
                        void *stream) {
    (void)type, (void)reduce, (void)comm;
    return begin_collective("reduce_scatter", src, dst, count, stream);
}

int all_reduce_call(const void *src, void *dst, size_t count, int type, int reduce, void *comm,
                    void *stream) {
    (void)type, (void)reduce, (void)comm;
    return begin_collective("all_reduce", src, dst, count, stream);
}

int broadcast_call(const void *src, void *dst, size_t count, int type, int root, void *comm,
                   void *stream) {
    (void)type, (void)comm;
    int code = begin_collective("broadcast", src, dst, count, stream);
    write_down("root %d ", root);
    return code;
}

int reduce_call(const void *src, void *dst, size_t count, int type, int reduce, int root,
                void *comm, void *stream) {
    (void)type, (void)reduce, (void)comm;
    int code = begin_collective("reduce", src, dst, count, stream);
    write_down("root %d ", root);
    return code;
}

int send_call(const void *src, size_t count, int type, int peer, void *comm, void *stream) {
    (void)type, (void)comm;
    int code = begin_collective("send", src, NULL, count, stream);
    write_down("to %d ", peer);
    return code;
}

int receive_call(void *dst, size_t count, int type, int peer, void *comm, void *stream) {
    (void)type, (void)comm;
    int code = begin_collective("receive", NULL, dst, count, stream);
    write_down("from %d ", peer);
    return code;
}

int group_start_call(void) {
    is_grouping = 1, group_stream = NULL;
    return write_down("group( "), TN__NCCL_SUCCESS;
}

int group_end_call(void) {
    is_grouping = 0;
    write_down(") ");
    return group_stream ? launch("group", group_stream) : begin();
}

int split_call(void *comm, int color, int key, void **out, tn__nccl_config *config) {
    if (config->magic != TN__NCCL_CONFIG_MAGIC || config->blocking || comm == busy)
        return TN__NCCL_INVALID_ARGUMENT;
    if (STATE.is_captured) return INVALID_USAGE;
    write_down("split color %d key %d ", color, key);
    if (color != TN__NCCL_NO_COLOR) STATE.split++, *out = &STATE.split;
    return occupy(comm);
}

int shrink_call(void *comm, int *excluded, int excluded_count, void **out, tn__nccl_config *config,
                int flags) {
    if (config->magic != TN__NCCL_CONFIG_MAGIC || config->blocking)
        return TN__NCCL_INVALID_ARGUMENT;
    if (STATE.is_captured) return INVALID_USAGE;
    write_down("shrink");
    for (int i = 0; i < excluded_count; i++)
        write_down(" %d", excluded[i]);
    write_down(" flags %d ", flags);
    if (STATE.refused_shrink) return STATE.refused_shrink;
    (void)comm, STATE.split++, *out = &STATE.split;
    return begin();
}

/* ---- memory --------------------------------------------------------------------------------- */

static char segment[1];

int mem_alloc_call(void **out, size_t bytes) {
    write_down("mem_alloc %zu ", bytes);
    if (STATE.refused && --STATE.refused == 0) return TN__NCCL_INVALID_ARGUMENT;
    STATE.allocated++;
    return *out = segment, TN__NCCL_SUCCESS;
}

int mem_free_call(void *address) {
    if (address != segment) return TN__NCCL_INVALID_ARGUMENT;
    return STATE.allocated--, TN__NCCL_SUCCESS;
}

static int begin_register(void *comm, const char *name, size_t bytes, void **handle) {
    if (STATE.is_captured) return INVALID_USAGE;
    write_down("%s %zu ", name, bytes);
    if (STATE.refused && --STATE.refused == 0) return TN__NCCL_INVALID_ARGUMENT;
    if (comm == busy) return TN__NCCL_INVALID_ARGUMENT;
    STATE.registered++;
    return *handle = &STATE.registered, occupy(comm);
}

static int begin_deregister(void *comm, const char *name) {
    if (STATE.is_captured) return INVALID_USAGE;
    write_down("%s ", name);
    if (comm == busy) return TN__NCCL_INVALID_ARGUMENT;
    return STATE.registered--, occupy(comm);
}

int buffer_register_call(void *comm, void *address, size_t bytes, void **handle) {
    return (void)address, begin_register(comm, "buffer", bytes, handle);
}

int buffer_deregister_call(void *comm, void *handle) {
    return (void)handle, begin_deregister(comm, "end_buffer");
}

int window_register_call(void *comm, void *address, size_t bytes, void **window, int flags) {
    if (flags != TN__NCCL_WINDOW_SYMMETRIC) return TN__NCCL_INVALID_ARGUMENT;
    return (void)address, begin_register(comm, "window", bytes, window);
}

int window_deregister_call(void *comm, void *window) {
    return (void)window, begin_deregister(comm, "end_window");
}
