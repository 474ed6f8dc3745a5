/* DLPack's allocator callback, as a consumer of dlpack.h 1.2 calls it. */
#include "adapters_support.h"

#include <stdio.h>
#include <string.h>

#include "dlpack_abi.h"

typedef struct told {
    int count;
    char kind[32];
    char message[512];
} told;

static void tell(void *context, const char *kind, const char *message) {
    told *t = context;
    t->count++;
    snprintf(t->kind, sizeof t->kind, "%s", kind);
    snprintf(t->message, sizeof t->message, "%s", message);
}

static tn__dl_tensor prototype_of(int type, int id, int32_t rank, int64_t *shape, uint8_t bits,
                                  uint16_t lanes) {
    return (tn__dl_tensor){NULL, {type, id}, rank, {TN__DL_FLOAT, bits, lanes}, shape, NULL, 4711};
}

static tn__dl_versioned *make(tn__dl_tensor *prototype, told *t) {
    struct DLManagedTensorVersioned *out = NULL;
    int status = tn_dlpack_allocate((struct DLTensor *)prototype, &out, t, tell);
    assert_int_equal(status, out ? 0 : -1);
    return (tn__dl_versioned *)out;
}

static void a_tensor_is_row_major_and_its_memory_comes_back(void **state) {
    tn_device *device = adapters_open(1, 0);
    told t = {0, "", ""};
    int64_t shape[3] = {2, 3, 5};
    tn__dl_tensor prototype = prototype_of(TN__DL_CUDA, 0, 3, shape, 16, 1);
    tn__dl_versioned *made = make(&prototype, &t);
    (void)state;
    assert_non_null(made);
    shape[0] = 99; /* the prototype is the caller's */
    assert_int_equal(made->major, 1);
    assert_int_equal(made->flags, 0);
    assert_int_equal(made->tensor.device.type, TN__DL_CUDA);
    assert_int_equal(made->tensor.rank, 3);
    assert_int_equal(made->tensor.dtype.bits, 16);
    assert_int_equal(made->tensor.byte_offset, 0);
    assert_int_equal((uintptr_t)made->tensor.data % 256, 0);
    assert_int_equal(made->tensor.shape[0], 2);
    assert_int_equal(made->tensor.shape[2], 5);
    assert_int_equal(made->tensor.strides[0], 15);
    assert_int_equal(made->tensor.strides[1], 5);
    assert_int_equal(made->tensor.strides[2], 1);
    assert_int_equal(adapters_number("live_bytes"), 60);
    made->deleter(made);
    EXPECT_OK(tn_adapters_trim());
    assert_int_equal(adapters_number("live_bytes"), 0);
    assert_int_equal(t.count, 0);
    adapters_close(device);
}

/* Work of the consumer that nobody orders is over before the memory is anybody else's. */
static void the_memory_is_reused_after_all_work_of_the_consumer(void **state) {
    tn_device *device = adapters_open(1, 0);
    tn_stream work = test_open_foreign_stream(device);
    tn_stream elsewhere = test_open_foreign_stream(device);
    int64_t extent = 4 * (int64_t)MIB;
    tn__dl_tensor prototype = prototype_of(TN__DL_CUDA, 0, 1, &extent, 8, 1);
    tn__dl_versioned *made;
    void *stream = device;
    void *block;
    (void)state;
    assert_int_equal(tn_dlpack_current_work_stream(TN__DL_CUDA, 0, &stream), 0);
    assert_null(stream);
    EXPECT_OK(tn_dlpack_work_stream_set(0, work));
    assert_int_equal(tn_dlpack_current_work_stream(TN__DL_CUDA, 0, &stream), 0);
    assert_ptr_equal(stream, work);
    made = make(&prototype, NULL);
    test_sim_write(device, work, made->tensor.data, 4 * MIB, 100);
    EXPECT_OK(tn_stream_wait(device, elsewhere, work));
    test_sim_read(device, elsewhere, made->tensor.data, 4 * MIB, 1000);
    made->deleter(made);
    block = adapters_take(4 * MIB, work);
    test_sim_write(device, work, block, 4 * MIB, 10);
    adapters_give(block, work);
    EXPECT_OK(tn_dlpack_work_stream_set(0, NULL));
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, work);
    test_close_foreign_stream(device, elsewhere);
    adapters_close(device);
}

static void no_elements_scalars_and_host_memory(void **state) {
    tn_device *device = adapters_open(1, 0);
    int64_t shape[2] = {7, 0};
    tn__dl_tensor prototype = prototype_of(TN__DL_CUDA, 0, 2, shape, 32, 1);
    tn__dl_versioned *made = make(&prototype, NULL); /* no elements */
    (void)state;
    assert_null(made->tensor.data);
    made->deleter(made);
    prototype = prototype_of(TN__DL_CPU, 0, 0, NULL, 64, 2); /* a scalar of 16 bytes */
    made = make(&prototype, NULL);
    memset(made->tensor.data, 1, 16);
    assert_int_equal((uintptr_t)made->tensor.data % 256, 0);
    made->deleter(made);
    shape[1] = 3; /* 21 elements of 4 bits */
    prototype = prototype_of(TN__DL_CPU, 0, 2, shape, 4, 1);
    made = make(&prototype, NULL);
    memset(made->tensor.data, 1, 11);
    made->deleter(made);
    adapters_close(device);
}

static void expect_refused(tn__dl_tensor prototype, const char *kind) {
    told t = {0, "", ""};
    assert_null(make(&prototype, &t));
    assert_int_equal(t.count, 1);
    assert_string_equal(t.kind, kind);
    assert_true(t.message[0] != 0);
}

static void a_refusal_has_a_kind_and_words(void **state) {
    tn_device *device = adapters_open(1, 64 * MIB);
    int64_t shape[3] = {1 << 20, 1 << 20, 1 << 20};
    int64_t huge[3] = {INT64_MAX, 2, 2};
    int64_t negative = -1;
    void *stream = NULL;
    (void)state;
    expect_refused(prototype_of(TN__DL_CUDA, 0, 2, shape, 32, 1), "MemoryError");
    expect_refused(prototype_of(TN__DL_CUDA, 0, 3, shape, 32, 1), "MemoryError");
    expect_refused(prototype_of(TN__DL_CUDA, 0, 3, huge, 32, 1), "ValueError");
    expect_refused(prototype_of(TN__DL_CUDA, 0, 1, huge, 255, 65535), "ValueError");
    expect_refused(prototype_of(TN__DL_CUDA, 0, 1, &negative, 32, 1), "ValueError");
    expect_refused(prototype_of(TN__DL_CUDA, 0, -1, shape, 32, 1), "ValueError");
    expect_refused(prototype_of(TN__DL_CUDA, 0, 1, NULL, 32, 1), "ValueError");
    expect_refused(prototype_of(TN__DL_CUDA, 0, 1, shape, 0, 1), "ValueError");
    expect_refused(prototype_of(TN__DL_CUDA, 0, 1, shape, 8, 0), "ValueError");
    expect_refused(prototype_of(TN__DL_CUDA, -1, 1, shape, 8, 1), "ValueError");
    expect_refused(prototype_of(TN__DL_CUDA, 1, 1, shape, 8, 1), "ValueError");
    expect_refused(prototype_of(TN__DL_CUDA_HOST, 0, 1, shape, 8, 1), "BufferError");
    assert_int_equal(tn_dlpack_allocate(NULL, NULL, NULL, NULL), -1);
    assert_int_equal(tn_dlpack_current_work_stream(TN__DL_CPU, 0, &stream), 0);
    assert_int_equal(tn_dlpack_current_work_stream(TN__DL_CUDA_HOST, 0, &stream), -1);
    assert_int_equal(tn_dlpack_current_work_stream(TN__DL_CUDA, 64, &stream), -1);
    assert_int_equal(tn_dlpack_current_work_stream(TN__DL_CUDA, 0, NULL), -1);
    EXPECT_STATUS(tn_dlpack_work_stream_set(64, NULL), TN_INVALID_ARGUMENT);
    assert_int_equal(adapters_number("live_blocks"), 0);
    adapters_close(device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_tensor_is_row_major_and_its_memory_comes_back),
        cmocka_unit_test(the_memory_is_reused_after_all_work_of_the_consumer),
        cmocka_unit_test(no_elements_scalars_and_host_memory),
        cmocka_unit_test(a_refusal_has_a_kind_and_words),
    };
    return cmocka_run_group_tests_name("adapters/dlpack_allocator", tests, NULL, NULL);
}
