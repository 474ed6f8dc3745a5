/* A program that finds the driver's calls by itself, in every way there is: what it must get. Also
 * what an address is, and memory for other processes. */
#include <string.h>
#include <unistd.h>

#include "program_checks.h"

enum { INVALID_VALUE = 1 };
enum { BUFFER_ID = 7, RANGE_START = 11, RANGE_BYTES = 12, MEMORY_TYPE = 2 };

/* Programs that were built with an older C library ask for this version of the symbol. */
#if defined(__x86_64__)
__asm__(".symver older_dlsym, dlsym@GLIBC_2.2.5");
#else
__asm__(".symver older_dlsym, dlsym@GLIBC_2.17");
#endif
extern void *older_dlsym(void *handle, const char *name);

/* "preload", "driver" or the file's name: whose function it is. */
static const char *owner_of(const void *function) {
    Dl_info info;
    if (!function) return "none";
    EXPECT(dladdr(function, &info) && info.dli_fname);
    if (strstr(info.dli_fname, "libtenure-preload")) return "preload";
    if (strstr(info.dli_fname, "libcuda.so") || strstr(info.dli_fname, "simcuda")) return "driver";
    return info.dli_fname;
}

static void expect_owner(const void *function, const char *expected, int line) {
    const char *owner = owner_of(function);
    if (strcmp(owner, expected) == 0) return;
    fprintf(stderr, "line %d: it is %s's, not %s's\n", line, owner, expected);
    exit(1);
}

#define EXPECT_OWNER(function, expected)                                                           \
    expect_owner((const void *)(uintptr_t)(function), expected, __LINE__)

static void *driver(void) {
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    EXPECT(handle != NULL);
    return handle;
}

static void make_current(void) {
    CUcontext context = NULL;
    EXPECT_OK(DRIVER(cuInit)(0));
    EXPECT_OK(DRIVER(cuDevicePrimaryCtxRetain)(&context, 0));
    EXPECT_OK(DRIVER(cuCtxSetCurrent)(context));
}

/* ---- lookups --------------------------------------------------------------------------------- */

/* In a process without a driver there is nothing to find. */
static void no_driver(void) {
    EXPECT(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == NULL);
    EXPECT(dlsym(RTLD_DEFAULT, "cuGetProcAddress_v2") == NULL);
    EXPECT(dlsym(dlopen(NULL, RTLD_NOW), "cuMemFree_v2") == NULL);
}

static void by_dlsym(void) {
    void *handle = driver();
    void *lib_m = dlopen("libm.so.6", RTLD_NOW);
    EXPECT_OWNER(dlsym(handle, "cuMemAlloc_v2"), "preload");
    EXPECT_OWNER(older_dlsym(handle, "cuMemAlloc_v2"), "preload");
    EXPECT_OWNER(dlsym(handle, "cuGetProcAddress"), "preload");
    EXPECT_OWNER(dlsym(handle, "cuGetProcAddress_v2"), "preload");
    EXPECT_OWNER(dlsym(handle, "cuMemAllocAsync_ptsz"), "preload");
    /* Exact names: what is like them is not them. */
    EXPECT_OWNER(dlsym(handle, "cuMemAlloc"), "driver");
    EXPECT_OWNER(dlsym(handle, "cuInit"), "driver");
    EXPECT_OWNER(dlsym(handle, "cuEventRecord"), "driver");
    EXPECT(dlsym(handle, "cuMemAlloc_v3") == NULL && dlerror() != NULL);
    EXPECT(dlsym(handle, "cudnnCreate") == NULL);
    /* The handle's own answer counts. */
    EXPECT(dlsym(lib_m, "cuMemAlloc_v2") == NULL);
    EXPECT(dlsym(lib_m, "cos") != NULL && dlerror() == NULL);
    EXPECT(dlsym(handle, "cuMemAlloc_v2") != NULL && dlerror() == NULL);
}

/* Another library that exports one of the names keeps it. */
static void of_another_library(void) {
    void *other = dlopen(getenv("OTHER_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    int (*alloc)(CUdeviceptr *, size_t) = NULL;
    CUdeviceptr address = 0;
    EXPECT(other != NULL);
    EXPECT(driver() != NULL);
    *(void **)&alloc = dlsym(other, "cuMemAlloc_v2");
    EXPECT(alloc && alloc(&address, 1) == 4711);
}

static void *get(const char *symbol, int version, uint64_t flags, int *status) {
    void *function = NULL;
    EXPECT_OK(DRIVER(cuGetProcAddress_v2)(symbol, &function, version, flags, status));
    return function;
}

static void by_get_proc_address(void) {
    int status = -1;
    void *function = NULL;
    make_current();
    EXPECT_OWNER(get("cuMemAlloc", 13000, 0, &status), "preload");
    EXPECT(status == 0);
    EXPECT(get("cuMemAlloc", 13000, 0, &status) == dlsym(driver(), "cuMemAlloc_v2"));
    EXPECT_OWNER(get("cuMemAlloc", 3010, 0, &status), "driver"); /* the older function */
    EXPECT_OWNER(get("cuEventRecord", 13000, 0, &status), "driver");
    /* Of two functions that are both taken over, the one that the version has. */
    EXPECT(get("cuDevicePrimaryCtxReset", 10000, 0, &status) ==
           dlsym(driver(), "cuDevicePrimaryCtxReset"));
    EXPECT(get("cuDevicePrimaryCtxReset", 11000, 0, &status) ==
           dlsym(driver(), "cuDevicePrimaryCtxReset_v2"));
    EXPECT_OWNER(dlsym(driver(), "cuDevicePrimaryCtxReset"), "preload");
    /* The flag for per-thread streams gives another function where there are two. */
    EXPECT(get("cuMemAllocAsync", 13000, 2, &status) == dlsym(driver(), "cuMemAllocAsync_ptsz"));
    EXPECT(get("cuMemAllocAsync", 13000, 1, &status) == dlsym(driver(), "cuMemAllocAsync"));
    EXPECT(get("cuMemAlloc", 13000, 2, &status) == dlsym(driver(), "cuMemAlloc_v2"));
    /* The status is the driver's. */
    status = -1;
    EXPECT(get("cuMemAllocAsync", 11010, 2, &status) == NULL && status == 2);
    status = -1;
    EXPECT(get("cuNoSuchCall", 13000, 2, &status) == NULL && status == 1);
    EXPECT(DRIVER(cuGetProcAddress_v2)(NULL, &function, 13000, 0, &status) != CUDA_SUCCESS);
    /* And so on from there. */
    EXPECT(get("cuGetProcAddress", 13000, 0, &status) == dlsym(driver(), "cuGetProcAddress_v2"));
    EXPECT(get("cuGetProcAddress", 11030, 0, &status) == dlsym(driver(), "cuGetProcAddress"));
    EXPECT_OK(DRIVER(cuGetProcAddress)("cuMemFree", &function, 11030, 0));
    EXPECT(function == dlsym(driver(), "cuMemFree_v2"));
    EXPECT(DRIVER(lookalike_lookups_of_older)() == 1);
}

/* Nothing is taken over: TENURE_DISABLE=1, or no drop-in. */
static void untouched(void) {
    int status = -1;
    EXPECT_OWNER(dlsym(driver(), "cuMemAlloc_v2"), "driver");
    EXPECT_OWNER(dlsym(driver(), "cuGetProcAddress_v2"), "driver");
    EXPECT_OWNER(get("cuMemAlloc", 13000, 0, &status), "driver");
}

/* ---- calls ----------------------------------------------------------------------------------- */

static CUdeviceptr allocate(size_t bytes) {
    CUdeviceptr address = 0;
    EXPECT_OK(DRIVER(cuMemAlloc_v2)(&address, bytes));
    return address;
}

static void one_pair(void) {
    make_current();
    for (int i = 0; i < 100; i++)
        EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(4096)));
    printf("driver allocs %llu\n", (unsigned long long)DRIVER(tnsim_call_count)("cuMemAlloc_v2"));
}

static unsigned long long attribute(int which, CUdeviceptr address) {
    unsigned long long value = 0;
    EXPECT_OK(DRIVER(cuPointerGetAttribute)(&value, which, address));
    return value;
}

static void pointers(void) {
    int wanted[] = {MEMORY_TYPE, RANGE_START, RANGE_BYTES};
    unsigned type = 9;
    unsigned long long start = 9, bytes = 9, value = 9;
    void *values[] = {&type, &start, &bytes};
    CUdeviceptr small, other, large, base = 0;
    size_t size = 0;
    make_current();
    small = allocate(5000);
    other = allocate(5000);
    large = allocate(20 * MIB + 1);
    EXPECT(attribute(RANGE_START, small + 4999) == small);
    EXPECT(attribute(RANGE_BYTES, small + 1) == 5000);
    EXPECT(attribute(RANGE_BYTES, large + 20 * MIB) == 20 * MIB + 1);
    EXPECT(attribute(BUFFER_ID, small) != attribute(BUFFER_ID, other));
    EXPECT_OK(DRIVER(cuPointerGetAttributes)(3, wanted, values, other + 17));
    EXPECT(type == CU_MEMORYTYPE_DEVICE && start == other && bytes == 5000);
    EXPECT_OK(DRIVER(cuMemGetAddressRange_v2)(&base, &size, other + 4999));
    EXPECT(base == other && size == 5000);
    EXPECT_OK(DRIVER(cuMemGetAddressRange_v2)(NULL, NULL, other));
    /* One past the end is not inside, and what was freed is nobody's. */
    EXPECT_CODE(DRIVER(cuMemGetAddressRange_v2)(&base, &size, small + 5000), CUDA_ERROR_NOT_FOUND);
    EXPECT_OK(DRIVER(cuMemFree_v2)(small));
    EXPECT_CODE(DRIVER(cuMemGetAddressRange_v2)(&base, &size, small), CUDA_ERROR_NOT_FOUND);
    EXPECT_CODE(DRIVER(cuPointerGetAttribute)(&value, RANGE_START, small), INVALID_VALUE);
    EXPECT_OK(DRIVER(cuMemFree_v2)(large));
    EXPECT_CODE(DRIVER(cuMemGetAddressRange_v2)(&base, &size, large), CUDA_ERROR_NOT_FOUND);
    EXPECT_OK(DRIVER(cuPointerGetAttributes)(3, wanted, values, small));
    EXPECT(start == 0 && bytes == 0);
    /* What is not ours is asked of the driver. */
    EXPECT_CODE(DRIVER(cuPointerGetAttribute)(&value, RANGE_START, (uintptr_t)&value),
                INVALID_VALUE);
}

static void share(void) {
    CUipcMemHandle first, second;
    CUdeviceptr a, b, large, opened = 0, again = 0, base;
    make_current();
    a = allocate(4096);
    b = allocate(4096);
    large = allocate(20 * MIB);
    EXPECT_OK(DRIVER(cuIpcGetMemHandle)(&first, a < b ? a : b));
    EXPECT_OK(DRIVER(cuIpcGetMemHandle)(&second, a < b ? b : a));
    EXPECT(memcmp(&first, &second, sizeof first) != 0);
    EXPECT_OK(DRIVER(cuIpcOpenMemHandle_v2)(&opened, second, 1));
    base = DRIVER(lookalike_last_opened)();
    EXPECT(opened - base >= 4096 && opened - base < 32 * MIB);
    EXPECT_OK(DRIVER(cuIpcCloseMemHandle)(opened));
    EXPECT(DRIVER(lookalike_last_closed)() == base);
    /* A block with an allocation of its own has the driver's own handle. */
    EXPECT_OK(DRIVER(cuIpcGetMemHandle)(&first, large));
    EXPECT_OK(DRIVER(cuIpcOpenMemHandle_v2)(&again, first, 1));
    EXPECT(again == DRIVER(lookalike_last_opened)());
    EXPECT_OK(DRIVER(cuIpcCloseMemHandle)(again));
    /* What the driver refuses is refused in the same words. */
    memset(&second, 5, sizeof second);
    EXPECT_CODE(DRIVER(cuIpcOpenMemHandle_v2)(&again, second, 1), INVALID_VALUE);
    EXPECT_OK(DRIVER(cuMemFree_v2)(a));
    EXPECT_CODE(DRIVER(cuIpcGetMemHandle)(&first, a), INVALID_VALUE);
    /* No room in the handle for an offset. */
    EXPECT(setenv("LOOKALIKE_FULL_HANDLES", "1", 1) == 0);
    a = allocate(4096);
    b = allocate(4096);
    EXPECT_CODE(DRIVER(cuIpcGetMemHandle)(&first, a > b ? a : b), CUDA_ERROR_NOT_SUPPORTED);
}

/* The driver lacks, or fails, the event behind a whole device: then the device is waited for. */
static void no_context_event(void) {
    make_current();
    EXPECT_OK(DRIVER(tnsim_fault)("cuCtxRecordEvent", 1, 1, CUDA_ERROR_NOT_SUPPORTED));
    for (int i = 0; i < 1000; i++)
        EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(64 * KIB)));
    EXPECT(DRIVER(tnsim_call_count)("cuMemAlloc_v2") == 1);
    EXPECT(DRIVER(tnsim_call_count)("cuCtxSynchronize") < 10);
}

static void failing_driver(void) {
    CUdeviceptr address = 77;
    make_current();
    EXPECT_OK(DRIVER(tnsim_fault)("cuMemAlloc_v2", 1, 1, CUDA_ERROR_OUT_OF_MEMORY));
    EXPECT_CODE(DRIVER(cuMemAlloc_v2)(&address, 4096), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_CODE(DRIVER(cuMemAlloc_v2)(&address, 40 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT(address == 77);
    EXPECT_OK(DRIVER(tnsim_fault)("cuMemAlloc_v2", 0, 0, 0));
    EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(4096)));
    EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(40 * MIB)));
}

/* Any one driver call fails: the program gets an answer, and all goes on. */
static void each_failure(void) {
    static const int codes[] = {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN};
    CUstream stream = NULL;
    make_current();
    EXPECT_OK(DRIVER(cuStreamCreate)(&stream, 1));
    for (long nth = 1; nth < 400; nth++) {
        CUdeviceptr blocks[4] = {0};
        size_t free_bytes, total_bytes;
        EXPECT_OK(DRIVER(tnsim_fault)(NULL, nth % 80 + 1, 0, codes[nth % 2]));
        for (int i = 0; i < 4; i++) {
            (void)DRIVER(cuMemAlloc_v2)(&blocks[i], i == 3 ? 60 * MIB : 3 * MIB);
            tnsim_range range = {(void *)(uintptr_t)blocks[i], 3 * MIB, 1};
            if (blocks[i]) (void)DRIVER(tnsim_launch)(stream, "write", &range, 1, 50);
        }
        if (blocks[1]) EXPECT_OK(DRIVER(cuMemFree_v2)(blocks[1]));
        (void)DRIVER(cuMemGetInfo_v2)(&free_bytes, &total_bytes);
        (void)DRIVER(cuMemAllocAsync)(&blocks[1], MIB, stream);
        EXPECT_OK(DRIVER(tnsim_fault)(NULL, 0, 0, 0));
        if (blocks[1]) (void)DRIVER(cuMemFreeAsync)(blocks[1], stream);
        for (int i = 0; i < 4; i++) {
            if (blocks[i] && i != 1) EXPECT_OK(DRIVER(cuMemFree_v2)(blocks[i]));
        }
    }
    for (int i = 0; i < 300; i++)
        EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(MIB)));
    EXPECT_OK(DRIVER(cuCtxSynchronize)());
    EXPECT(DRIVER(tnsim_race_count)() == 0);
}

/* The host has no memory for the drop-in's own needs: then the driver serves. */
static void host_shortage(void) {
    void (*fault)(long, int) = NULL;
    make_current();
    EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(MIB)));
    void *library = dlopen(getenv("TENURE_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
    EXPECT(library != NULL);
    *(void **)&fault = dlsym(library, "tn__host_alloc_fault");
    EXPECT(fault != NULL);
    for (long nth = 1; nth < 60; nth++) {
        for (int and_after = 0; and_after < 2; and_after++) {
            CUdeviceptr small = 0, large = 0, ordered = 0;
            fault(nth % 12 + 1, and_after);
            EXPECT_OK(DRIVER(cuMemAlloc_v2)(&small, 4096 * (size_t)nth));
            EXPECT_OK(DRIVER(cuMemAlloc_v2)(&large, 20 * MIB));
            EXPECT_OK(DRIVER(cuMemAllocAsync)(&ordered, MIB, NULL));
            EXPECT_OK(DRIVER(cuMemFreeAsync)(ordered, NULL));
            EXPECT_OK(DRIVER(cuMemFree_v2)(large));
            EXPECT_OK(DRIVER(cuMemFree_v2)(small));
            fault(0, 0);
        }
    }
}

/* A reset after an error that stays: what was allocated is gone, and the driver serves from then
 * on, at whatever addresses. */
static void reset_after_an_error(void) {
    CUdeviceptr before;
    uint64_t allocs;
    make_current();
    before = allocate(20 * MIB);
    allocate(4096);
    EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(4096)));
    EXPECT_OK(DRIVER(tnsim_fault)("cuCtxSynchronize", 1, 0, CUDA_ERROR_ILLEGAL_ADDRESS));
    EXPECT_OK(DRIVER(cuDevicePrimaryCtxReset_v2)(0));
    allocs = DRIVER(tnsim_call_count)("cuMemAlloc_v2");
    for (int i = 0; i < 10; i++)
        EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(4096)));
    EXPECT(DRIVER(tnsim_call_count)("cuMemAlloc_v2") == allocs + 10);
    EXPECT_OK(DRIVER(cuMemFree_v2)(before)); /* the look-alike has it still: it was not freed */
}

static void use_device(int ordinal, CUcontext *context) {
    if (!*context) EXPECT_OK(DRIVER(cuDevicePrimaryCtxRetain)(context, ordinal));
    EXPECT_OK(DRIVER(cuCtxSetCurrent)(*context));
}

/* Each device has its own; what is freed is idle on both before it comes again. */
static void two_devices(void) {
    CUcontext contexts[2] = {NULL, NULL};
    CUstream streams[2];
    CUdeviceptr kept[8] = {0};
    EXPECT_OK(DRIVER(cuInit)(0));
    for (int i = 0; i < 2; i++) {
        use_device(i, &contexts[i]);
        EXPECT_OK(DRIVER(cuStreamCreate)(&streams[i], 1));
        EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(4096)));
    }
    for (int i = 0; i < 2000; i++) {
        int device = i / 3 % 2;
        size_t bytes = ((size_t)i * 7919 % 97 + 1) * 128 * KIB;
        CUdeviceptr *slot = &kept[i % 8];
        unsigned ordinal = 9;
        use_device(device, &contexts[device]);
        if (*slot) EXPECT_OK(DRIVER(cuMemFree_v2)(*slot));
        *slot = allocate(bytes);
        int which = 9; /* the attribute for the ordinal */
        void *value = &ordinal;
        EXPECT_OK(DRIVER(cuPointerGetAttributes)(1, &which, &value, *slot));
        EXPECT(ordinal == (unsigned)device);
        tnsim_range range = {(void *)(uintptr_t)*slot, bytes, 1};
        EXPECT_OK(DRIVER(tnsim_launch)(streams[device], "write", &range, 1, 100));
    }
    EXPECT(DRIVER(tnsim_race_count)() == 0);
    EXPECT_OK(DRIVER(cuDevicePrimaryCtxReset_v2)(0));
    use_device(1, &contexts[1]);
    for (int i = 0; i < 300; i++)
        EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(MIB)));
    use_device(0, &contexts[0]);
    EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(MIB)));
}

/* Mapped pages are reached by a peer from when the program says so, new ones and old ones, also of
 * a device that has had nothing so far; freed, they wait for the peer's work. */
static void mapped_peers(void) {
    CUcontext contexts[2] = {NULL, NULL};
    CUstream stream = NULL;
    CUdeviceptr blocks[3], ordered = 0;
    EXPECT_OK(DRIVER(cuInit)(0));
    use_device(1, &contexts[1]);
    EXPECT_OK(DRIVER(cuStreamCreate)(&stream, 1));
    use_device(0, &contexts[0]);
    blocks[0] = allocate(3 * MIB);
    use_device(1, &contexts[1]);
    EXPECT_OK(DRIVER(cuCtxEnablePeerAccess)(contexts[0], 0));
    use_device(0, &contexts[0]);
    blocks[1] = allocate(30 * MIB);
    EXPECT_OK(DRIVER(cuMemAllocAsync)(&ordered, MIB, NULL));
    blocks[2] = ordered;
    for (int i = 0; i < 3; i++) {
        tnsim_range range = {(void *)(uintptr_t)blocks[i], MIB, 1};
        use_device(1, &contexts[1]);
        EXPECT_OK(DRIVER(tnsim_launch)(stream, "write", &range, 1, 500));
        use_device(0, &contexts[0]);
        if (i < 2) EXPECT_OK(DRIVER(cuMemFree_v2)(blocks[i]));
    }
    for (int i = 0; i < 50; i++) {
        CUdeviceptr next = allocate(2 * MIB);
        tnsim_range range = {(void *)(uintptr_t)next, MIB, 1};
        EXPECT_OK(DRIVER(tnsim_launch)(NULL, "write", &range, 1, 10));
        EXPECT_OK(DRIVER(cuMemFree_v2)(next));
    }
    EXPECT(DRIVER(tnsim_race_count)() == 0);
    use_device(1, &contexts[1]);
    EXPECT_OK(DRIVER(cuCtxSynchronize)());
    EXPECT_OK(DRIVER(cuCtxDisablePeerAccess)(contexts[0]));
    EXPECT_OK(DRIVER(cuDevicePrimaryCtxReset_v2)(1));
    EXPECT_OK(DRIVER(cuMemFree_v2)(allocate(MIB)));
}

static const program_case cases[] = {
    {"no_driver", no_driver},
    {"by_dlsym", by_dlsym},
    {"of_another_library", of_another_library},
    {"by_get_proc_address", by_get_proc_address},
    {"untouched", untouched},
    {"one_pair", one_pair},
    {"pointers", pointers},
    {"share", share},
    {"no_context_event", no_context_event},
    {"failing_driver", failing_driver},
    {"each_failure", each_failure},
    {"host_shortage", host_shortage},
    {"reset_after_an_error", reset_after_an_error},
    {"two_devices", two_devices},
    {"mapped_peers", mapped_peers},
};

int main(int argc, char **argv) {
    return program_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
