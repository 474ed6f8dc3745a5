/* Our declarations of NCCL's interface against the real nccl.h, where there is one.
 *
 * Numbers, sizes, layouts and parameters are compared by the compiler; names when it runs.
 */
#include <stdio.h>
#include <string.h>

#include "nccl_abi.h"

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>

#define SAME(ours, theirs)      _Static_assert((long long)(ours) == (long long)(theirs), #theirs)
#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define SAME_PLACE(ours, theirs, field)                                                            \
    _Static_assert(offsetof(ours, field) == offsetof(theirs, field), #field);                      \
    _Static_assert(sizeof(((ours *)0)->field) == sizeof(((theirs *)0)->field), #field)

SAME(TN__NCCL_SUCCESS, ncclSuccess);
SAME(TN__NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME(TN__NCCL_IN_PROGRESS, ncclInProgress);
SAME(TN__NCCL_SUM, ncclSum);
SAME(TN__NCCL_MAX, ncclMax);
SAME(TN__NCCL_UINT8, ncclUint8);
SAME(TN__NCCL_FLOAT32, ncclFloat32);
SAME(TN__NCCL_BFLOAT16, ncclBfloat16);
SAME(TN__NCCL_ID_BYTES, NCCL_UNIQUE_ID_BYTES);
SAME(TN__NCCL_CONFIG_VERSION, NCCL_VERSION(2, 14, 0));
SAME_SIZE(tn__nccl_result, ncclResult_t);
SAME_SIZE(tn__nccl_id, ncclUniqueId);
SAME_SIZE(int, ncclDataType_t);
SAME_SIZE(int, ncclRedOp_t);
SAME_SIZE(void *, ncclComm_t);
SAME_PLACE(tn__nccl_config, ncclConfig_t, size);
SAME_PLACE(tn__nccl_config, ncclConfig_t, magic);
SAME_PLACE(tn__nccl_config, ncclConfig_t, version);
SAME_PLACE(tn__nccl_config, ncclConfig_t, blocking);

/* Each real call takes our arguments; the operand of sizeof is compiled and never run. */
#define TAKES(call) _Static_assert(sizeof(call) == sizeof(tn__nccl_result), #call)
#define ANY         ((void *)0)
#define COUNT       ((size_t)0)
#define OUT_INT     ((int *)0)
#define TYPE        ((ncclDataType_t)0)
#define OPERATION   ((ncclRedOp_t)0)
#define STREAM      ((cudaStream_t)0)
#define COMM        ((ncclComm_t)0)
TAKES(ncclGetVersion(OUT_INT));
TAKES(ncclGetUniqueId((ncclUniqueId *)0));
TAKES(ncclCommInitRankConfig((ncclComm_t *)0, 0, *(ncclUniqueId *)0, 0, (ncclConfig_t *)0));
TAKES(ncclCommFinalize(COMM));
TAKES(ncclCommDestroy(COMM));
TAKES(ncclCommAbort(COMM));
TAKES(ncclCommGetAsyncError(COMM, (ncclResult_t *)0));
TAKES(ncclCommCount(COMM, OUT_INT));
TAKES(ncclCommCuDevice(COMM, OUT_INT));
TAKES(ncclCommUserRank(COMM, OUT_INT));
TAKES(ncclAllGather(ANY, ANY, COUNT, TYPE, COMM, STREAM));
TAKES(ncclReduceScatter(ANY, ANY, COUNT, TYPE, OPERATION, COMM, STREAM));
TAKES(ncclAllReduce(ANY, ANY, COUNT, TYPE, OPERATION, COMM, STREAM));
TAKES(ncclBroadcast(ANY, ANY, COUNT, TYPE, 0, COMM, STREAM));
TAKES(ncclReduce(ANY, ANY, COUNT, TYPE, OPERATION, 0, COMM, STREAM));
TAKES(ncclSend(ANY, COUNT, TYPE, 0, COMM, STREAM));
TAKES(ncclRecv(ANY, COUNT, TYPE, 0, COMM, STREAM));
TAKES(ncclGroupStart());
TAKES(ncclGroupEnd());
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0)
SAME(TN__NCCL_NO_COLOR, NCCL_SPLIT_NOCOLOR);
TAKES(ncclCommSplit(COMM, 0, 0, (ncclComm_t *)0, (ncclConfig_t *)0));
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)
TAKES(ncclMemAlloc((void **)0, COUNT));
TAKES(ncclMemFree(ANY));
TAKES(ncclCommRegister(COMM, ANY, COUNT, (void **)0));
TAKES(ncclCommDeregister(COMM, ANY));
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
SAME(TN__NCCL_WINDOW_SYMMETRIC, NCCL_WIN_COLL_SYMMETRIC);
SAME_SIZE(void *, ncclWindow_t);
TAKES(ncclCommWindowRegister(COMM, ANY, COUNT, (ncclWindow_t *)0, 0));
TAKES(ncclCommWindowDeregister(COMM, (ncclWindow_t)0));
SAME(TN__NCCL_SHRINK_ABORT, NCCL_SHRINK_ABORT);
TAKES(ncclCommShrink(COMM, OUT_INT, 0, (ncclComm_t *)0, (ncclConfig_t *)0, 0));
#endif
_Static_assert(sizeof(*ncclGetErrorString((ncclResult_t)0)) == 1, "a text");
_Static_assert(sizeof(*ncclGetLastError(COMM)) == 1, "a text");

static int check_magic(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    return config.magic == TN__NCCL_CONFIG_MAGIC;
}
#else
static int check_magic(void) {
    puts("no nccl.h: only the names are checked");
    return 1;
}
#endif

#define AS_NAME(field, name, result, parameters) name,
static const char *const names[] = {TN__NCCL_CALLS(AS_NAME) TN__NCCL_LATER_CALLS(AS_NAME)};

int main(void) {
    static const char *const results[] = {TN__NCCL_RESULT_NAMES};
    int failures = !check_magic();
    if (sizeof results / sizeof *results != TN__NCCL_IN_PROGRESS + 1) failures++;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strncmp(names[i], "nccl", 4) == 0) continue;
        printf("%s is no name of NCCL\n", names[i]);
        failures++;
    }
    return failures != 0;
}
