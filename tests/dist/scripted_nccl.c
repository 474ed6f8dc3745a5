/* A library with NCCL's names, without any GPU: see scripted_nccl.h. Every call that NCCL may leave
 * in progress is, and is over as the script says. */
#include "scripted_nccl.h"

#include <string.h>

#include "nccl_abi.h"

scripted_nccl scripted_nccl_state;

#define STATE scripted_nccl_state
enum { ANY_VERSION = 21400 };

/* Declared as the engine calls them: the same table gives the prototypes. */
#define AS_PROTOTYPE(field, name, result, parameters) result field##_call parameters __asm__(name);
TN__NCCL_CALLS(AS_PROTOTYPE)

static int polls;

static int begin(void) {
    polls = 0;
    return TN__NCCL_IN_PROGRESS;
}

static int begin_collective(void) {
    STATE.collectives++;
    return begin();
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
    return begin();
}

int finalize_call(void *comm) { return (void)comm, STATE.finalized++, begin(); }

int destroy_call(void *comm) { return (void)comm, STATE.destroyed++, TN__NCCL_SUCCESS; }

int abort_call(void *comm) { return (void)comm, STATE.aborted++, TN__NCCL_SUCCESS; }

int async_error_call(void *comm, int *code) {
    (void)comm;
    int is_over = STATE.polls_in_progress >= 0 && polls++ >= STATE.polls_in_progress;
    *code = is_over ? STATE.result : TN__NCCL_IN_PROGRESS;
    return TN__NCCL_SUCCESS;
}

int count_call(void *comm, int *count) { return (void)comm, *count = 2, TN__NCCL_SUCCESS; }

int device_call(void *comm, int *device) { return (void)comm, *device = 0, TN__NCCL_SUCCESS; }

int rank_call(void *comm, int *rank) { return (void)comm, *rank = 1, TN__NCCL_SUCCESS; }

int all_gather_call(const void *src, void *dst, size_t count, int type, void *comm, void *stream) {
    (void)src, (void)dst, (void)count, (void)type, (void)comm, (void)stream;
    return begin_collective();
}

int reduce_scatter_call(const void *src, void *dst, size_t count, int type, int reduce, void *comm,
                        void *stream) {
    (void)src, (void)dst, (void)count, (void)type, (void)reduce, (void)comm, (void)stream;
    return begin_collective();
}

int all_reduce_call(const void *src, void *dst, size_t count, int type, int reduce, void *comm,
                    void *stream) {
    (void)src, (void)dst, (void)count, (void)type, (void)reduce, (void)comm, (void)stream;
    return begin_collective();
}

int broadcast_call(const void *src, void *dst, size_t count, int type, int root, void *comm,
                   void *stream) {
    (void)src, (void)dst, (void)count, (void)type, (void)root, (void)comm, (void)stream;
    return begin_collective();
}
