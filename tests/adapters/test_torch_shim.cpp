/* The functions that torch calls, with their exceptions: without any torch in the process, and with
 * libraries that stand in for its libc10. Filters are std::function, as torch's are. */
#include "tenure_torch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>

#include "c10/c10_classes.h"

extern "C" {
#include "simcuda.h"
#include "tenure_pool.h"
}

struct CUstream_st;

namespace {

const size_t MIB = 1 << 20;
int failures = 0;

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                   \
            failures++;                                                                            \
        }                                                                                          \
    } while (0)

template <typename function> function *find(void *library, const char *name) {
    void *symbol = dlsym(library, name);
    if (!symbol) {
        std::fprintf(stderr, "%s\n", dlerror());
        std::exit(1);
    }
    function *result;
    std::memcpy(&result, &symbol, sizeof result);
    return result;
}

enum kind { NOTHING, MEMORY, OTHER, TORCH_MEMORY, TORCH_OTHER };

/* What the call throws, and its words. */
template <typename call> kind thrown_by(call &&work, std::string *words) {
    try {
        work();
        return NOTHING;
    } catch (const c10::OutOfMemoryError &error) {
        *words = error.what();
        return TORCH_MEMORY;
    } catch (const c10::Error &error) {
        *words = error.what();
        return TORCH_OTHER;
    } catch (const std::bad_alloc &error) {
        *words = error.what();
        return MEMORY;
    } catch (const std::runtime_error &error) {
        *words = error.what();
        return OTHER;
    }
}

bool has(const std::string &words, const char *part) {
    return words.find(part) != std::string::npos;
}

void test_exceptions(kind memory, kind other) {
    std::string words;
    auto too_large = [] { tn_torch_malloc(1000 * MIB, 0, nullptr); };
    EXPECT(thrown_by(too_large, &words) == memory);
    EXPECT(has(words, "CUDA out of memory. Tried to allocate 1048576000 bytes. Tenure: "));
    EXPECT(has(words, "hint: "));
    EXPECT(thrown_by([] { tn_torch_malloc(16, 5, nullptr); }, &words) == other);
    EXPECT(has(words, "TN_INVALID_ARGUMENT") && !has(words, "out of memory"));
    EXPECT(thrown_by([] { tn_torch_memory_fraction(2, 0); }, &words) == other);
    EXPECT(thrown_by([] { tn_torch_end_allocate_to_pool(0, {0, 9}); }, &words) == other);
    EXPECT(thrown_by([] { tn_torch_release_pool(0, {0, 9}); }, &words) == NOTHING);
    EXPECT(thrown_by([] { tn_torch_free(&failures, 4, 0, nullptr); }, &words) == NOTHING);
}

/* As an engine's thread keeps one and another throws it again. */
void test_rethrown() {
    std::exception_ptr kept;
    std::string words;
    try {
        tn_torch_malloc(1000 * MIB, 0, nullptr);
    } catch (...) {
        kept = std::current_exception();
    }
    EXPECT(thrown_by([&] { std::rethrow_exception(kept); }, &words) == TORCH_MEMORY);
    EXPECT(thrown_by([&] { std::rethrow_exception(kept); }, &words) == TORCH_MEMORY);
}

void test_blocks() {
    size_t size = 1;
    void *block = tn_torch_malloc(3 * MIB, 0, nullptr);
    EXPECT(block != nullptr && tn_torch_malloc(0, 0, nullptr) == nullptr);
    EXPECT(tn_torch_base_allocation(block, &size) == block && size == 3 * MIB);
    EXPECT(tn_torch_base_allocation(&size, &size) == &size && size == 0);
    EXPECT(tn_torch_base_allocation(block, nullptr) == block);
    tn_torch_record_stream(block, nullptr);
    tn_torch_record_stream(&size, nullptr);
    tn_torch_record_stream(nullptr, nullptr);
    tn_torch_free(block, 3 * MIB, 0, nullptr);
    tn_torch_free(nullptr, 0, 0, nullptr);
    tn_torch_memory_fraction(0.5, 0);
    tn_torch_memory_fraction(1, 0);
    tn_torch_empty_cache();
}

/* The pair for memory pools gives NULL, which their allocator expects. */
void test_segments() {
    void *segment = tn_torch_segment_malloc(20 * MIB, 0, nullptr);
    EXPECT(segment != nullptr);
    EXPECT(tn_torch_segment_malloc(1000 * MIB, 0, nullptr) == nullptr);
    EXPECT(tn_torch_segment_malloc(0, 0, nullptr) == nullptr);
    tn_torch_segment_free(segment, 20 * MIB, 0, nullptr);
    tn_torch_segment_free(nullptr, 0, 0, nullptr);
    segment = tn_torch_segment_malloc(60 * MIB, 0, nullptr); /* needs what was freed */
    EXPECT(segment != nullptr);
    tn_torch_segment_free(segment, 60 * MIB, 0, nullptr);
}

struct capture_calls {
    int (*create)(void **stream, unsigned flags);
    int (*destroy)(void *stream);
    int (*begin)(void *stream, int mode);
    int (*end)(void *stream, void **graph);
    int (*graph_destroy)(void *graph);
};

void test_graph_pool(const capture_calls &calls) {
    tn_torch_pool_id id = {0, 3};
    std::string text(100, 'x'); /* the filter has state of its own, which is copied */
    int asked = 0;
    void *stream = nullptr;
    void *graph = nullptr;
    uint64_t live = 0;
    EXPECT(calls.create(&stream, 1) == 0);
    {
        std::function<bool(CUstream_st *)> filter = [&asked, text, stream](CUstream_st *which) {
            asked++;
            return text.size() == 100 && which == stream;
        };
        tn_torch_begin_allocate_to_pool(0, id, &filter);
    }
    EXPECT(calls.begin(stream, 1) == 0);
    void *block = tn_torch_malloc(MIB, 0, stream);
    EXPECT(asked == 1);
    tn_torch_free(block, MIB, 0, stream);
    EXPECT(calls.end(stream, &graph) == 0);
    tn_torch_end_allocate_to_pool(0, id);
    EXPECT(calls.graph_destroy(graph) == 0);
    tn_torch_release_pool(0, id);
    std::function<bool(CUstream_st *)> fails = [](CUstream_st *) -> bool {
        throw std::runtime_error("the stream can not be asked");
    };
    tn_torch_begin_allocate_to_pool(0, id, &fails);
    EXPECT(calls.begin(stream, 1) == 0);
    block = tn_torch_malloc(MIB, 0, stream); /* ordinary memory */
    tn_torch_free(block, MIB, 0, stream);
    EXPECT(calls.end(stream, &graph) == 0);
    EXPECT(calls.graph_destroy(graph) == 0);
    tn_torch_end_allocate_to_pool(0, id);
    tn_torch_release_pool(0, id);
    EXPECT(calls.destroy(stream) == 0);
    EXPECT(tn_adapter_stat(0, "live_blocks", &live) == TN_OK && live == 0);
}

} // namespace

int main() {
    setenv("TENURE_CUDA_LIBRARY", TENURE_SIM_LIBRARY, 1);
    setenv("TENURE_SIM_MEMORY", "64MiB", 1);
    void *sim = dlopen(TENURE_SIM_LIBRARY, RTLD_NOW);
    test_blocks();
    test_segments();
    test_exceptions(MEMORY, OTHER);
    std::string folder = TENURE_BUILD_DIR "/tests/c10/";
    void *c10 = dlopen((folder + "libc10.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    EXPECT(c10 != nullptr);
    test_exceptions(TORCH_OTHER, TORCH_OTHER); /* a torch without CUDA: no class for memory */
    void *context = nullptr;
    void *c10_cuda = dlopen((folder + "libc10_cuda.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    EXPECT(c10_cuda != nullptr);
    test_exceptions(TORCH_MEMORY, TORCH_OTHER);
    test_rethrown();
    EXPECT(find<int()>(c10, "c10_errors_alive")() == 0);
    EXPECT(find<int(void **, int)>(sim, "cuDevicePrimaryCtxRetain")(&context, 0) == 0);
    EXPECT(find<int(void *)>(sim, "cuCtxSetCurrent")(context) == 0);
    test_graph_pool({find<int(void **, unsigned)>(sim, "cuStreamCreate"),
                     find<int(void *)>(sim, "cuStreamDestroy_v2"),
                     find<int(void *, int)>(sim, "cuStreamBeginCapture_v2"),
                     find<int(void *, void **)>(sim, "cuStreamEndCapture"),
                     find<int(void *)>(sim, "cuGraphDestroy")});
    EXPECT(find<int(int)>(sim, "cuDevicePrimaryCtxRelease_v2")(0) == 0);
    EXPECT(tn_adapters_close() == TN_OK);
    if (failures == 0) std::printf("torch_shim: ok\n");
    return failures != 0;
}
