/* The functions that PyTorch calls, with its exceptions: see tenure_torch.h.
 *
 * torch's exception classes are made without its headers, from symbols that every torch exports:
 *
 *     c10::Error(SourceLocation, std::string)     libc10.so
 *     typeinfo and vtable of OutOfMemoryError     libc10_cuda.so (no members of its own)
 *
 * An OutOfMemoryError is thus an Error with the other class's vtable, thrown as what the other
 * typeinfo says. Nothing here knows the size of the class: room enough is taken for any. Where a
 * symbol is missing, an exception of the standard library is thrown instead.
 */
#include "tenure_torch.h"

#include <cstring>
#include <cxxabi.h>
#include <dlfcn.h>
#include <exception>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>

extern "C" {
#include "framework_calls.h"
}

struct CUstream_st; /* what cudaStream_t points to */

namespace {

/* ---- torch's exceptions --------------------------------------------------------------------- */

struct source_location {
    const char *function;
    const char *file;
    uint32_t line;
};

using error_constructor = void (*)(void *self, source_location where, std::string message);

const size_t EXCEPTION_BYTES = 1024; /* c10::Error has some 160 */

struct torch_exceptions {
    error_constructor construct;
    std::type_info *error;
    std::type_info *out_of_memory;
    void *out_of_memory_vtable;
};

/* A symbol of a library that is loaded already: Python loads torch's where a global search does not
 * look. */
void *find_symbol(const char *library, const char *name) {
    void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    void *symbol = handle ? dlsym(handle, name) : nullptr;
    if (handle) dlclose(handle);
    return symbol;
}

torch_exceptions find_exceptions() {
    torch_exceptions found = {};
    found.construct = reinterpret_cast<error_constructor>(
        find_symbol("libc10.so", "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_"
                                 "stringIcSt11char_traitsIcESaIcEEE"));
    found.error = static_cast<std::type_info *>(find_symbol("libc10.so", "_ZTIN3c105ErrorE"));
    found.out_of_memory = static_cast<std::type_info *>(
        find_symbol("libc10_cuda.so", "_ZTIN3c1016OutOfMemoryErrorE"));
    found.out_of_memory_vtable = find_symbol("libc10_cuda.so", "_ZTVN3c1016OutOfMemoryErrorE");
    return found;
}

void destroy_exception(void *exception) {
    static_cast<std::exception *>(exception)->~exception(); /* virtual: the class's own */
}

/* Objects begin at the third entry of a vtable. */
void set_vtable(void *object, void *vtable) {
    void *first = static_cast<void **>(vtable) + 2;
    std::memcpy(object, &first, sizeof first);
}

[[noreturn]] void throw_torch(const torch_exceptions &torch, std::type_info *type,
                              const std::string &message) {
    void *exception = abi::__cxa_allocate_exception(EXCEPTION_BYTES);
    torch.construct(exception, {"tn_torch", "tenure", 0}, message);
    if (type == torch.out_of_memory) set_vtable(exception, torch.out_of_memory_vtable);
    abi::__cxa_throw(exception, type, destroy_exception);
}

class out_of_memory : public std::bad_alloc {
  public:
    explicit out_of_memory(const std::string &message) : message_(message) {}
    const char *what() const noexcept override { return message_.what(); }

  private:
    std::runtime_error message_; /* whose copy can not throw */
};

/* "CUDA out of memory." is what training code looks for in the message. */
[[noreturn]] void throw_failure(tn_status status, size_t bytes) {
    torch_exceptions torch = find_exceptions();
    bool is_memory = status == TN_OUT_OF_DEVICE_MEMORY || status == TN_OUT_OF_ADDRESS_SPACE ||
                     status == TN_OUT_OF_HOST_MEMORY;
    std::string message;
    if (is_memory) {
        message = "CUDA out of memory. Tried to allocate " + std::to_string(bytes) + " bytes. ";
    }
    message += "Tenure: ";
    message += tn_error_last();
    if (torch.construct && is_memory && torch.out_of_memory && torch.out_of_memory_vtable) {
        throw_torch(torch, torch.out_of_memory, message);
    }
    if (torch.construct && torch.error) throw_torch(torch, torch.error, message);
    if (is_memory) throw out_of_memory(message);
    throw std::runtime_error(message);
}

/* ---- filters -------------------------------------------------------------------------------- */

using stream_filter = std::function<bool(CUstream_st *)>;

int ask_filter(void *context, tn_stream stream) {
    try {
        return (*static_cast<stream_filter *>(context))(static_cast<CUstream_st *>(stream));
    } catch (const std::exception &) {
        return 0; /* it could not ask the stream: then that is in none of its captures */
    }
}

void end_filter(void *context) { delete static_cast<stream_filter *>(context); }

tn_status begin(int device, tn_torch_pool_id id, void *filter) {
    const uint64_t key[2] = {id.first, id.second};
    auto *copy = new stream_filter(*static_cast<stream_filter *>(filter));
    tn__stream_filter given = {ask_filter, end_filter, copy};
    tn_status status = tn__framework_begin(device, key, &given);
    if (status != TN_OK) delete copy;
    return status;
}

} // namespace

/* ---- torch's names -------------------------------------------------------------------------- */

void *tn_torch_malloc(size_t size, int device, tn_stream stream) {
    void *block = nullptr;
    tn_status status = tn__framework_alloc(device, size, stream, "torch", &block);
    if (status != TN_OK) throw_failure(status, size);
    return block;
}

void tn_torch_free(void *block, size_t, int device, tn_stream stream) {
    if (tn__framework_free(device, block, stream) != TN_OK) tn__framework_warn("tn_torch_free");
}

void *tn_torch_segment_malloc(size_t size, int device, tn_stream stream) {
    void *block = nullptr;
    tn_status status = tn__framework_segment(device, size, stream, "torch.MemPool", &block);
    if (status == TN_OUT_OF_DEVICE_MEMORY) return nullptr;
    if (status != TN_OK) throw_failure(status, size);
    return block;
}

void tn_torch_segment_free(void *block, size_t, int device, tn_stream) {
    tn__framework_free_unordered(device, block);
}

void tn_torch_record_stream(void *block, tn_stream stream) {
    tn_status status = tn__framework_use(block, stream);
    if (status != TN_OK) throw_failure(status, 0);
}

void tn_torch_empty_cache(void) {
    tn_status status = tn_adapters_trim();
    if (status != TN_OK) throw_failure(status, 0);
}

void tn_torch_memory_fraction(double fraction, int device) {
    tn_status status = tn__framework_fraction_set(device, fraction);
    if (status != TN_OK) throw_failure(status, 0);
}

void *tn_torch_base_allocation(void *block, size_t *size) {
    size_t bytes = 0;
    if (tn_block_info(block, &bytes, nullptr) != TN_OK) bytes = 0;
    if (size) *size = bytes;
    return block;
}

void tn_torch_begin_allocate_to_pool(int device, tn_torch_pool_id id, void *filter) {
    tn_status status = begin(device, id, filter);
    if (status != TN_OK) throw_failure(status, 0);
}

void tn_torch_end_allocate_to_pool(int device, tn_torch_pool_id id) {
    const uint64_t key[2] = {id.first, id.second};
    tn_status status = tn__framework_end(device, key);
    if (status != TN_OK) throw_failure(status, 0);
}

void tn_torch_release_pool(int device, tn_torch_pool_id id) {
    const uint64_t key[2] = {id.first, id.second};
    if (tn__framework_release(device, key) != TN_OK) tn__framework_warn("tn_torch_release_pool");
}
