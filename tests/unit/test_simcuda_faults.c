/* The simulated driver's faults, call counts, names, and what it refuses. */
#include <string.h>

#include "simcuda_support.h"

static const simcuda_calls *cu;

static const CUmemAllocationProp on_device = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                              .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};

static CUresult create(CUmemGenericAllocationHandle *handle) {
    return cu->cuMemCreate(handle, 2 * MIB, &on_device, 0);
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void the_nth_call_fails_once_and_has_no_effect(void **state) {
    CUmemGenericAllocationHandle handles[3] = {0, 0, 0};
    double before;
    (void)state;
    cu = simcuda_start(0, 0);
    EXPECT_CUDA_OK(cu->tnsim_fault("cuMemCreate", 2, 0, CUDA_ERROR_UNKNOWN));
    EXPECT_CUDA_OK(create(&handles[0]));
    before = cu->tnsim_now_us();
    EXPECT_CUDA(create(&handles[1]), CUDA_ERROR_UNKNOWN);
    assert_int_equal(handles[1], 0);
    assert_true(cu->tnsim_now_us() == before);
    assert_int_equal(cu->tnsim_physical_bytes(0), 2 * MIB);
    EXPECT_CUDA_OK(create(&handles[2]));
    EXPECT_CUDA_OK(cu->cuMemRelease(handles[0]));
    EXPECT_CUDA_OK(cu->cuMemRelease(handles[2]));
    assert_int_equal(cu->tnsim_call_count("cuMemCreate"), 3);
    simcuda_end();
}

static void and_after_fails_from_then_on(void **state) {
    CUmemGenericAllocationHandle handle;
    (void)state;
    cu = simcuda_start(0, 0);
    EXPECT_CUDA_OK(cu->tnsim_fault("cuMemCreate", 2, 1, CUDA_ERROR_OUT_OF_MEMORY));
    EXPECT_CUDA_OK(create(&handle));
    for (int i = 0; i < 3; i++) {
        CUmemGenericAllocationHandle none;
        EXPECT_CUDA(create(&none), CUDA_ERROR_OUT_OF_MEMORY);
    }
    EXPECT_CUDA_OK(cu->cuMemRelease(handle)); /* other calls work */
    EXPECT_CUDA_OK(cu->tnsim_fault("cuMemCreate", 0, 0, 0));
    EXPECT_CUDA_OK(create(&handle));
    EXPECT_CUDA_OK(cu->cuMemRelease(handle));
    simcuda_end();
}

static void any_call_can_be_the_one(void **state) {
    CUmemGenericAllocationHandle handle;
    const char *name;
    (void)state;
    cu = simcuda_start(0, 0);
    EXPECT_CUDA_OK(cu->tnsim_fault(NULL, 3, 0, CUDA_ERROR_INVALID_HANDLE));
    EXPECT_CUDA_OK(create(&handle));
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    EXPECT_CUDA_OK(cu->cuGetErrorName(CUDA_SUCCESS, &name)); /* spared */
    EXPECT_CUDA(cu->tnsim_launch(NULL, "kernel", NULL, 0, 1), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_CUDA_OK(cu->cuMemRelease(handle));
    simcuda_end();
}

static void ending_all_faults(void **state) {
    (void)state;
    cu = simcuda_start(0, 0);
    EXPECT_CUDA_OK(cu->tnsim_fault(NULL, 1, 1, CUDA_ERROR_UNKNOWN));
    EXPECT_CUDA_OK(cu->tnsim_fault("cuCtxSynchronize", 1, 1, CUDA_ERROR_LAUNCH_TIMEOUT));
    EXPECT_CUDA(cu->cuCtxSynchronize(), CUDA_ERROR_LAUNCH_TIMEOUT);
    EXPECT_CUDA_OK(cu->tnsim_fault(NULL, 0, 0, 0));
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    EXPECT_CUDA(cu->tnsim_fault("cuNoSuchCall", 1, 0, 1), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->tnsim_fault("cuMemMap", 1, 0, CUDA_SUCCESS), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA(cu->tnsim_fault("cuMemMap", -1, 0, 1), CUDA_ERROR_INVALID_VALUE);
    simcuda_end();
}

/* A whole life of some memory, with each of its calls failing in turn. */
static CUresult map_use_unmap(void) {
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    CUresult result = cu->cuMemAddressReserve(&address, 2 * MIB, 0, 0, 0);
    if (result) return result;
    result = create(&handle);
    if (result == CUDA_SUCCESS) {
        result = cu->cuMemMap(address, 2 * MIB, 0, handle, 0);
        if (result == CUDA_SUCCESS) {
            result = cu->cuMemSetAccess(address, 2 * MIB, &access, 1);
            EXPECT_CUDA_OK(cu->cuMemUnmap(address, 2 * MIB));
        }
        EXPECT_CUDA_OK(cu->cuMemRelease(handle));
    }
    EXPECT_CUDA_OK(cu->cuMemAddressFree(address, 2 * MIB));
    return result;
}

static void a_fault_in_each_call_of_a_sequence(void **state) {
    static const char *const names[] = {"cuMemAddressReserve", "cuMemCreate", "cuMemMap",
                                        "cuMemSetAccess"};
    (void)state;
    cu = simcuda_start(0, 0);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        EXPECT_CUDA_OK(cu->tnsim_fault(names[i], 1, 0, CUDA_ERROR_UNKNOWN));
        EXPECT_CUDA(map_use_unmap(), CUDA_ERROR_UNKNOWN);
        simcuda_end();
    }
    EXPECT_CUDA_OK(map_use_unmap());
    simcuda_end();
}

/* ---- counts, names --------------------------------------------------------------------------- */

static void calls_are_counted(void **state) {
    uint64_t before;
    (void)state;
    cu = simcuda_start(0, 0);
    before = cu->tnsim_call_count(NULL);
    assert_int_equal(before, 3); /* cuInit, retain, set current */
    EXPECT_CUDA_OK(map_use_unmap());
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    assert_int_equal(cu->tnsim_call_count(NULL), before + 8);
    assert_int_equal(cu->tnsim_call_count("cuMemMap"), 1);
    assert_int_equal(cu->tnsim_call_count("cuMemAlloc_v2"), 0);
    assert_int_equal(cu->tnsim_call_count("cuNoSuchCall"), 0);
    simcuda_end();
}

static void functions_are_found_by_name(void **state) {
    void *function = NULL;
    int found = -1;
    (void)state;
    cu = simcuda_start(0, 0);
    EXPECT_CUDA_OK(cu->cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &found));
    assert_ptr_equal(function, (void *)cu->cuMemAlloc_v2);
    assert_int_equal(found, CU_GET_PROC_ADDRESS_SUCCESS);
    EXPECT_CUDA_OK(cu->cuGetProcAddress_v2("cuMemMap", &function, 12000, 0, NULL));
    assert_ptr_equal(function, (void *)cu->cuMemMap);
    EXPECT_CUDA(cu->cuGetProcAddress_v2("cuGraphClone", &function, 12000, 0, &found),
                CUDA_ERROR_NOT_FOUND);
    assert_null(function);
    assert_int_equal(found, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    assert_string_equal(cu->tnsim_refusal(), "cuGraphClone is not simulated");
    EXPECT_CUDA(cu->cuGetProcAddress_v2("tnsim_launch", &function, 12000, 0, &found),
                CUDA_ERROR_NOT_FOUND);
    EXPECT_CUDA(cu->cuGetProcAddress_v2("cuMemMap", &function, 12000, 2, &found),
                CUDA_ERROR_NOT_SUPPORTED);
    simcuda_end();
}

static void errors_have_names_and_words(void **state) {
    const char *text = NULL;
    (void)state;
    cu = simcuda_start(0, 0);
    EXPECT_CUDA_OK(cu->cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
    assert_string_equal(text, "CUDA_ERROR_OUT_OF_MEMORY");
    EXPECT_CUDA_OK(cu->cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
    assert_string_equal(text, "out of memory");
    EXPECT_CUDA(cu->cuGetErrorName((CUresult)12345, &text), CUDA_ERROR_INVALID_VALUE);
    assert_null(text);
    simcuda_end();
}

/* ---- devices and contexts -------------------------------------------------------------------- */

static int attribute(int which) {
    int value = -1;
    EXPECT_CUDA_OK(cu->cuDeviceGetAttribute(&value, which, 0));
    return value;
}

static void a_device_describes_itself(void **state) {
    char name[64];
    size_t bytes = 0;
    int count = 0, value = 7;
    (void)state;
    cu = simcuda_start(64 * MIB, 0);
    EXPECT_CUDA_OK(cu->cuDeviceGetCount(&count));
    assert_int_equal(count, 1);
    EXPECT_CUDA(cu->cuDeviceGet(&value, 1), CUDA_ERROR_INVALID_DEVICE);
    EXPECT_CUDA_OK(cu->cuDeviceGetName(name, sizeof name, 0));
    assert_string_equal(name, "Tenure simulated CUDA device");
    EXPECT_CUDA_OK(cu->cuDeviceTotalMem_v2(&bytes, 0));
    assert_int_equal(bytes, 64 * MIB);
    assert_int_equal(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), 9);
    assert_int_equal(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR), 0);
    assert_int_equal(attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1);
    EXPECT_CUDA(cu->cuDeviceGetAttribute(&value, 999, 0), CUDA_ERROR_NOT_SUPPORTED);
    assert_string_equal(cu->tnsim_refusal(),
                        "cuDeviceGetAttribute: attribute 999 is not simulated");
    assert_int_equal(value, 7);
    EXPECT_CUDA_OK(cu->cuDriverGetVersion(&value));
    assert_int_equal(value, 13000);
    simcuda_end();
}

static void calls_need_init_and_a_context(void **state) {
    CUcontext context, current;
    unsigned flags = 1;
    int count, device, is_active = 7;
    (void)state;
    cu = simcuda_load();
    EXPECT_CUDA_OK(cu->tnsim_configure(&(tnsim_config){.size = sizeof(tnsim_config)}));
    EXPECT_CUDA(cu->cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
    EXPECT_CUDA(cu->cuCtxSynchronize(), CUDA_ERROR_NOT_INITIALIZED);
    EXPECT_CUDA_OK(cu->cuInit(0));
    EXPECT_CUDA(cu->cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_CUDA(cu->cuCtxGetDevice(&device), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_CUDA_OK(cu->cuCtxGetCurrent(&current));
    assert_null(current);
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxGetState(0, &flags, &is_active));
    assert_int_equal(is_active, 0);
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxGetState(0, &flags, &is_active));
    assert_int_equal(is_active, 1);
    EXPECT_CUDA_OK(cu->cuCtxPushCurrent_v2(context));
    EXPECT_CUDA_OK(cu->cuCtxGetDevice(&device));
    assert_int_equal(device, 0);
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxRelease_v2(0));
    EXPECT_CUDA(cu->cuCtxSynchronize(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    EXPECT_CUDA(cu->cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_CUDA_OK(cu->cuCtxPopCurrent_v2(&current));
    assert_ptr_equal(current, context);
    EXPECT_CUDA(cu->cuCtxPopCurrent_v2(&current), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_CUDA(cu->cuCtxSetCurrent(context), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    simcuda_end();
}

static void devices_are_apart(void **state) {
    tnsim_config config = {.size = sizeof config, .device_count = 2, .memory_bytes = 8 * MIB};
    CUmemAllocationProp second = on_device;
    CUmemGenericAllocationHandle handle, other;
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUcontext contexts[2];
    CUdeviceptr address;
    (void)state;
    cu = simcuda_load();
    EXPECT_CUDA_OK(cu->tnsim_configure(&config));
    EXPECT_CUDA_OK(cu->cuInit(0));
    for (int i = 0; i < 2; i++)
        EXPECT_CUDA_OK(cu->cuDevicePrimaryCtxRetain(&contexts[i], i));
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(contexts[0]));
    second.location.id = 1;
    EXPECT_CUDA_OK(cu->cuMemCreate(&handle, 8 * MIB, &second, 0));
    EXPECT_CUDA_OK(cu->cuMemCreate(&other, 8 * MIB, &on_device, 0));
    assert_int_equal(cu->tnsim_physical_bytes(0), 8 * MIB);
    assert_int_equal(cu->tnsim_physical_bytes(1), 8 * MIB);
    address = simcuda_reserve(8 * MIB);
    EXPECT_CUDA_OK(cu->cuMemMap(address, 8 * MIB, 0, handle, 0));
    EXPECT_CUDA_OK(cu->cuMemSetAccess(address, 8 * MIB, &access, 1));
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(contexts[1]));
    EXPECT_CUDA_OK(simcuda_write(NULL, address, 64));
    EXPECT_CUDA_OK(cu->cuCtxSynchronize());
    EXPECT_CUDA_OK(cu->cuMemUnmap(address, 8 * MIB));
    EXPECT_CUDA_OK(cu->cuMemMap(address, 8 * MIB, 0, handle, 0));
    EXPECT_CUDA_OK(cu->cuMemSetAccess(address, 8 * MIB, &access, 1));
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(contexts[0]));
    EXPECT_CUDA(simcuda_write(NULL, address, 64), CUDA_ERROR_ILLEGAL_ADDRESS); /* not its own */
    EXPECT_CUDA_OK(cu->cuCtxSetCurrent(contexts[1]));
    EXPECT_CUDA_OK(cu->cuMemUnmap(address, 8 * MIB));
    EXPECT_CUDA_OK(cu->cuMemAddressFree(address, 8 * MIB));
    EXPECT_CUDA_OK(cu->cuMemRelease(handle));
    EXPECT_CUDA_OK(cu->cuMemRelease(other));
    simcuda_end();
}

static void bad_configurations_are_refused(void **state) {
    tnsim_config config = {.size = sizeof config, .device_count = 33};
    (void)state;
    cu = simcuda_load();
    EXPECT_CUDA(cu->tnsim_configure(&config), CUDA_ERROR_INVALID_VALUE);
    config.device_count = 1;
    config.granularity_bytes = 3 * 4096;
    EXPECT_CUDA(cu->tnsim_configure(&config), CUDA_ERROR_INVALID_VALUE);
    config.granularity_bytes = 0;
    config.size = 8;
    EXPECT_CUDA(cu->tnsim_configure(&config), CUDA_ERROR_INVALID_VALUE);
    EXPECT_CUDA_OK(cu->tnsim_configure(NULL));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_nth_call_fails_once_and_has_no_effect),
        cmocka_unit_test(and_after_fails_from_then_on),
        cmocka_unit_test(any_call_can_be_the_one),
        cmocka_unit_test(ending_all_faults),
        cmocka_unit_test(a_fault_in_each_call_of_a_sequence),
        cmocka_unit_test(calls_are_counted),
        cmocka_unit_test(functions_are_found_by_name),
        cmocka_unit_test(errors_have_names_and_words),
        cmocka_unit_test(a_device_describes_itself),
        cmocka_unit_test(calls_need_init_and_a_context),
        cmocka_unit_test(devices_are_apart),
        cmocka_unit_test(bad_configurations_are_refused),
    };
    return cmocka_run_group_tests_name("simcuda_faults", tests, NULL, NULL);
}
