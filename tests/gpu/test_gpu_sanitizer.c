/* What compute-sanitizer sees of blocks inside a pool's memory (alloc/nvtx_memory.h).
 *
 *     gpu_test_gpu_sanitizer                   touches blocks only, and checks what was written
 *     gpu_test_gpu_sanitizer --plant overrun   writes one byte behind a block, in its rounding
 *     gpu_test_gpu_sanitizer --plant freed     writes to a block that was freed and is idle
 *
 * With --runtime the CUDA runtime is loaded and initialised first, as in programs that use it.
 * The planted writes stay in memory that the driver gave to the pool: without the annotations no
 * tool can report them. bench/gpu/sanitizer_plant.sh runs all of them under compute-sanitizer.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "gpu_support.h"

enum { BLOCK_BYTES = 1000, BLOCKS = 3 };

static const char *plant = "";
static int with_runtime;

/* fill_bytes(address, count): one thread stores 0x5A to each byte in turn. */
static const char kernel_ptx[] = ".version 7.0\n"
                                 ".target sm_80\n"
                                 ".address_size 64\n"
                                 ".visible .entry fill_bytes(.param .u64 address,\n"
                                 "                           .param .u64 count)\n"
                                 "{\n"
                                 "    .reg .u64 %at, %left;\n"
                                 "    .reg .u32 %value;\n"
                                 "    .reg .pred %done;\n"
                                 "    ld.param.u64 %at, [address];\n"
                                 "    ld.param.u64 %left, [count];\n"
                                 "    cvta.to.global.u64 %at, %at;\n"
                                 "    mov.u32 %value, 90;\n"
                                 "NEXT:\n"
                                 "    setp.eq.u64 %done, %left, 0;\n"
                                 "    @%done bra END;\n"
                                 "    st.global.u8 [%at], %value;\n"
                                 "    add.u64 %at, %at, 1;\n"
                                 "    sub.u64 %left, %left, 1;\n"
                                 "    bra NEXT;\n"
                                 "END:\n"
                                 "    ret;\n"
                                 "}\n";

static void launch_fill(gpu_side *side, tn__function kernel, void *address, uint64_t count) {
    void *parameters[2] = {&address, &count};
    const tn__launch launch = {.grid = {1, 1, 1}, .block = {1, 1, 1}, .parameters = parameters};
    EXPECT_OK(tn__device_driver(side->device)
                  ->launch(tn__device_state(side->device), kernel, &launch, side->stream));
}

static void plant_write(gpu_side *side, tn__function kernel, void **blocks) {
    if (strcmp(plant, "overrun") == 0) launch_fill(side, kernel, blocks[0], BLOCK_BYTES + 1);
    if (strcmp(plant, "freed") == 0) {
        EXPECT_OK(tn_stream_synchronize(side->device, side->stream));
        EXPECT_OK(tn_free(blocks[BLOCKS - 1], side->stream));
        launch_fill(side, kernel, blocks[BLOCKS - 1], BLOCK_BYTES);
        blocks[BLOCKS - 1] = NULL;
    }
    EXPECT_OK(tn_stream_synchronize(side->device, side->stream));
}

static void initialise_runtime(void) {
    static const char *const names[] = {"libcudart.so", "libcudart.so.13", "libcudart.so.12"};
    int (*cuda_free)(void *) = NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && !cuda_free; i++) {
        void *library = dlopen(names[i], RTLD_NOW);
        if (library) *(void **)&cuda_free = dlsym(library, "cudaFree");
    }
    printf("runtime: %s\n", !cuda_free ? "not found" : cuda_free(NULL) ? "fails" : "initialised");
}

static void kernels_write_to_blocks(void **state) {
    gpu_side side;
    const tn__driver *driver;
    tn__function kernel = NULL;
    void *module = NULL;
    void *blocks[BLOCKS] = {NULL};
    unsigned char bytes[BLOCK_BYTES];
    unsigned char expected[BLOCK_BYTES];
    (void)state;
    if (with_runtime) initialise_runtime();
    gpu_open(&side);
    driver = tn__device_driver(side.device);
    EXPECT_OK(driver->module_load(tn__device_state(side.device), kernel_ptx, &module));
    EXPECT_OK(
        driver->module_function(tn__device_state(side.device), module, "fill_bytes", &kernel));
    memset(expected, 0x5A, sizeof expected);
    for (int i = 0; i < BLOCKS; i++) {
        EXPECT_OK(tn_alloc(side.pool, BLOCK_BYTES, side.stream, NULL, &blocks[i]));
        launch_fill(&side, kernel, blocks[i], BLOCK_BYTES);
    }
    plant_write(&side, kernel, blocks);
    for (int i = 0; i < BLOCKS; i++) {
        if (!blocks[i]) continue;
        EXPECT_OK(tn_copy(side.device, bytes, blocks[i], BLOCK_BYTES, side.stream));
        EXPECT_OK(tn_stream_synchronize(side.device, side.stream));
        assert_memory_equal(bytes, expected, BLOCK_BYTES);
        EXPECT_OK(tn_free(blocks[i], side.stream));
    }
    EXPECT_OK(tn_stream_synchronize(side.device, side.stream));
    EXPECT_OK(driver->module_unload(tn__device_state(side.device), module));
    gpu_close(&side);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(kernels_write_to_blocks)};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--runtime") == 0) with_runtime = 1;
        if (strcmp(argv[i], "--plant") == 0 && i + 1 < argc) plant = argv[++i];
    }
    setvbuf(stdout, NULL, _IOLBF, 0); /* in order with what the tool prints */
    return cmocka_run_group_tests_name("gpu/gpu_sanitizer", tests, NULL, NULL);
}
