/* Tests of the simulated driver call the library that they load, never code that they link. */
#ifndef TENURE_SIMCUDA_SUPPORT_H
#define TENURE_SIMCUDA_SUPPORT_H

#include "test_support.h"

#include "sim_core.h"

#define SIMCUDA_CONTROLS(X)                                                                        \
    X(tnsim_configure)                                                                             \
    X(tnsim_take)                                                                                  \
    X(tnsim_write_stamp)                                                                           \
    X(tnsim_fault)                                                                                 \
    X(tnsim_call_count)                                                                            \
    X(tnsim_set_memory)                                                                            \
    X(tnsim_refusal)                                                                               \
    X(tnsim_stall)                                                                                 \
    X(tnsim_watch)                                                                                 \
    X(tnsim_lost_stream_uses)                                                                      \
    X(tnsim_race_count)                                                                            \
    X(tnsim_race_text)                                                                             \
    X(tnsim_now_us)                                                                                \
    X(tnsim_memory_call_us)                                                                        \
    X(tnsim_physical_bytes)                                                                        \
    X(tnsim_physical_peak_bytes)                                                                   \
    X(tnsim_leftovers)

/* Pointers of the loaded library, named as its functions. */
typedef struct simcuda_calls {
    void *library;
#define SIMCUDA_MEMBER(name, ...) __typeof__(name) *name;
    SIM_CALL_TABLE(SIMCUDA_MEMBER)
    SIMCUDA_CONTROLS(SIMCUDA_MEMBER)
#undef SIMCUDA_MEMBER
} simcuda_calls;

#define MIB ((size_t)1 << 20)

/* Loads the library once. */
const simcuda_calls *simcuda_load(void);

/* Configures anew, initialises, makes device 0's context current. */
const simcuda_calls *simcuda_start(size_t memory_bytes, int backed);
/* Fails if anything is left. */
void simcuda_end(void);

/* Virtual memory with access for device 0: `count` handles of `bytes` each, one after another. */
typedef struct simcuda_block {
    CUdeviceptr address;
    size_t bytes; /* of each handle */
    size_t count;
    CUmemGenericAllocationHandle handles[64];
} simcuda_block;

CUmemGenericAllocationHandle simcuda_create(size_t bytes);
CUdeviceptr simcuda_reserve(size_t bytes);
/* Maps the handle at the address and sets access. */
void simcuda_map(CUdeviceptr address, size_t bytes, CUmemGenericAllocationHandle handle);
simcuda_block simcuda_block_create(size_t bytes, size_t count);
void simcuda_block_destroy(const simcuda_block *block);

/* A non-blocking stream. */
CUstream simcuda_stream(void);

/* A kernel of 10 us that reads or writes the bytes. */
int simcuda_read(CUstream stream, CUdeviceptr address, size_t bytes);
int simcuda_write(CUstream stream, CUdeviceptr address, size_t bytes);

#define EXPECT_CUDA(call, expected) assert_int_equal((call), (expected))
#define EXPECT_CUDA_OK(call)        assert_int_equal((call), CUDA_SUCCESS)

#endif
