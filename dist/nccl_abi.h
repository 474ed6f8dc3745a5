/* The part of NCCL's binary interface that we call, declared by ourselves.
 *
 * Facts only: names, numbers and layouts of NCCL 2.14 and later. ncclComm_t and cudaStream_t are
 * void *, enums are int. Where nccl.h is present, tests/unit/test_nccl_abi.c compares all of this
 * with it; the names here differ from its names so that both can be included.
 */
#ifndef TENURE_NCCL_ABI_H
#define TENURE_NCCL_ABI_H

#include <stddef.h>

typedef int tn__nccl_result;

enum {
    TN__NCCL_SUCCESS = 0,
    TN__NCCL_INVALID_ARGUMENT = 4,
    TN__NCCL_IN_PROGRESS = 7,
    TN__NCCL_SUM = 0,
    TN__NCCL_MAX = 2,
    TN__NCCL_UINT8 = 1,
    TN__NCCL_FLOAT32 = 7,
    TN__NCCL_BFLOAT16 = 9,
    TN__NCCL_NO_COLOR = -1,
    TN__NCCL_WINDOW_SYMMETRIC = 1,
    TN__NCCL_SHRINK_ABORT = 1,
    TN__NCCL_ID_BYTES = 128
};

#define TN__NCCL_RESULT_NAMES                                                                      \
    "ncclSuccess", "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError",               \
        "ncclInvalidArgument", "ncclInvalidUsage", "ncclRemoteError", "ncclInProgress"

typedef struct tn__nccl_id {
    char bytes[TN__NCCL_ID_BYTES];
} tn__nccl_id;

/* ncclConfig_t as it was in 2.14, which later libraries take by its version. */
typedef struct tn__nccl_config {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
} tn__nccl_config;
enum { TN__NCCL_CONFIG_VERSION = 21400 };
#define TN__NCCL_CONFIG_MAGIC 0xcafebeefu

/* X(field, "name", result type, (parameters)) */
#define TN__NCCL_CALLS(X)                                                                          \
    X(version, "ncclGetVersion", tn__nccl_result, (int *version))                                  \
    X(error_string, "ncclGetErrorString", const char *, (tn__nccl_result code))                    \
    X(last_error, "ncclGetLastError", const char *, (void *comm))                                  \
    X(id, "ncclGetUniqueId", tn__nccl_result, (tn__nccl_id * id))                                  \
    X(join, "ncclCommInitRankConfig", tn__nccl_result,                                             \
      (void **comm, int rank_count, tn__nccl_id id, int rank, tn__nccl_config *config))            \
    X(finalize, "ncclCommFinalize", tn__nccl_result, (void *comm))                                 \
    X(destroy, "ncclCommDestroy", tn__nccl_result, (void *comm))                                   \
    X(abort, "ncclCommAbort", tn__nccl_result, (void *comm))                                       \
    X(async_error, "ncclCommGetAsyncError", tn__nccl_result, (void *comm, tn__nccl_result *code))  \
    X(count, "ncclCommCount", tn__nccl_result, (void *comm, int *count))                           \
    X(device, "ncclCommCuDevice", tn__nccl_result, (void *comm, int *device))                      \
    X(rank, "ncclCommUserRank", tn__nccl_result, (void *comm, int *rank))                          \
    X(all_gather, "ncclAllGather", tn__nccl_result,                                                \
      (const void *src, void *dst, size_t count, int type, void *comm, void *stream))              \
    X(reduce_scatter, "ncclReduceScatter", tn__nccl_result,                                        \
      (const void *src, void *dst, size_t count, int type, int reduce, void *comm, void *stream))  \
    X(all_reduce, "ncclAllReduce", tn__nccl_result,                                                \
      (const void *src, void *dst, size_t count, int type, int reduce, void *comm, void *stream))  \
    X(broadcast, "ncclBroadcast", tn__nccl_result,                                                 \
      (const void *src, void *dst, size_t count, int type, int root, void *comm, void *stream))    \
    X(reduce, "ncclReduce", tn__nccl_result,                                                       \
      (const void *src, void *dst, size_t count, int type, int reduce, int root, void *comm,       \
       void *stream))                                                                              \
    X(send, "ncclSend", tn__nccl_result,                                                           \
      (const void *src, size_t count, int type, int peer, void *comm, void *stream))               \
    X(receive, "ncclRecv", tn__nccl_result,                                                        \
      (void *dst, size_t count, int type, int peer, void *comm, void *stream))                     \
    X(group_start, "ncclGroupStart", tn__nccl_result, (void))                                      \
    X(group_end, "ncclGroupEnd", tn__nccl_result, (void))

/* What later versions have: NULL where the loaded one has not. */
#define TN__NCCL_LATER_CALLS(X)                                                                    \
    X(split, "ncclCommSplit", tn__nccl_result,                                                     \
      (void *comm, int color, int key, void **out, tn__nccl_config *config))                       \
    X(shrink, "ncclCommShrink", tn__nccl_result,                                                   \
      (void *comm, int *excluded, int excluded_count, void **out, tn__nccl_config *config,         \
       int flags))                                                                                 \
    X(mem_alloc, "ncclMemAlloc", tn__nccl_result, (void **out, size_t bytes))                      \
    X(mem_free, "ncclMemFree", tn__nccl_result, (void *address))                                   \
    X(buffer_register, "ncclCommRegister", tn__nccl_result,                                        \
      (void *comm, void *address, size_t bytes, void **handle))                                    \
    X(buffer_deregister, "ncclCommDeregister", tn__nccl_result, (void *comm, void *handle))        \
    X(window_register, "ncclCommWindowRegister", tn__nccl_result,                                  \
      (void *comm, void *address, size_t bytes, void **window, int flags))                         \
    X(window_deregister, "ncclCommWindowDeregister", tn__nccl_result, (void *comm, void *window))

/* What a stand-in for NCCL has besides, which works on host devices: it is told how to put tasks on
 * their streams. Returns 0, or what it failed with. */
#define TN__NCCL_HOST_TASKS "tnsim_nccl_host_tasks"
typedef int tn__nccl_put_task(void *device, void (*task)(void *argument), void *argument,
                              void *stream);

#define TN__NCCL_AS_MEMBER(field, name, result, parameters) result(*field) parameters;
typedef struct tn__nccl_calls {
    TN__NCCL_CALLS(TN__NCCL_AS_MEMBER)
    TN__NCCL_LATER_CALLS(TN__NCCL_AS_MEMBER)
    void (*host_tasks)(tn__nccl_put_task *put, void *device); /* NULL: it is NCCL */
} tn__nccl_calls;

#endif
