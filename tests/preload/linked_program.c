/* A program that is linked with the driver, as some are: the dynamic linker binds its calls. */
#include "program_checks.h"

int main(void) {
    CUcontext context = NULL;
    CUdeviceptr address = 0;
    EXPECT_OK(cuInit(0));
    EXPECT_OK(cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT_OK(cuCtxSetCurrent(context));
    for (int i = 0; i < 100; i++) {
        EXPECT_OK(cuMemAlloc_v2(&address, 4096));
        EXPECT_OK(cuMemFree_v2(address));
    }
    printf("driver allocs %llu\n", (unsigned long long)tnsim_call_count("cuMemAlloc_v2"));
    return 0;
}
