/* The functions that CuPy and ONNX Runtime call: see tenure_adapters.h. */
#include "adapter_device.h"
#include "driver.h"

/* ---- CuPy ------------------------------------------------------------------------------------ */

void *tn_cupy_malloc(void *stream, size_t bytes, int device) {
    void *block = NULL;
    return tn__framework_alloc(device, bytes, stream, "cupy", &block) == TN_OK ? block : NULL;
}

void tn_cupy_free(void *stream, void *block, int device) {
    if (tn__framework_free(device, block, stream) != TN_OK) {
        tn__framework_warn("tn_cupy_free");
    }
}

/* ---- ONNX Runtime ---------------------------------------------------------------------------- */

static struct {
    pthread_mutex_t mutex;
    int device;
    tn_stream stream;
    int is_ordered;
    size_t live_blocks;
} ort = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static int is_configured(int device, tn_stream stream, int is_ordered) {
    return ort.device == device && ort.stream == stream && ort.is_ordered == (is_ordered != 0);
}

tn_status tn_ort_configure(int device, tn_stream stream, int is_ordered) {
    tn__adapter *adapter = NULL;
    tn_status status = TN_OK;
    TN_TRY(tn__adapter_find(device, &adapter));
    pthread_mutex_lock(&ort.mutex);
    if (ort.live_blocks > 0 && !is_configured(device, stream, is_ordered)) {
        status = TN_FAIL(TN_INVALID_STATE,
                         "tn_ort_configure: %zu blocks of ONNX Runtime are live, on another device "
                         "or stream: call it before the first session",
                         ort.live_blocks);
    } else {
        ort.device = device;
        ort.stream = stream;
        ort.is_ordered = is_ordered != 0;
    }
    pthread_mutex_unlock(&ort.mutex);
    return status;
}

/* While blocks are live what was configured stays, so it can be read without the mutex. */
static void count_block(int change) {
    pthread_mutex_lock(&ort.mutex);
    ort.live_blocks = change > 0 ? ort.live_blocks + 1 : ort.live_blocks - 1;
    pthread_mutex_unlock(&ort.mutex);
}

void *tn_ort_alloc(size_t bytes) {
    void *block = NULL;
    tn_status status;
    count_block(1);
    status = ort.is_ordered
                 ? tn__framework_alloc(ort.device, bytes, ort.stream, "onnxruntime", &block)
                 : tn__framework_segment(ort.device, bytes, ort.stream, "onnxruntime", &block);
    if (status != TN_OK) block = NULL;
    if (!block) count_block(-1);
    return block;
}

static tn_status free_block(void *block) {
    tn__adapter *adapter = tn__adapter_peek(ort.device);
    TN_REQUIRE(adapter, "ONNX Runtime was given no memory: %p is not its block", block);
    if (ort.is_ordered) return tn__framework_free(ort.device, block, ort.stream);
    return tn__adapter_free_unordered(adapter, block, 1);
}

void tn_ort_free(void *block) {
    if (!block || tn__driver_is_gone()) return;
    if (free_block(block) == TN_OK) {
        count_block(-1);
    } else {
        tn__framework_warn("tn_ort_free");
    }
}

void tn_ort_empty_cache(void) {
    if (tn_adapters_trim() != TN_OK) tn__framework_warn("tn_ort_empty_cache");
}
