/* In the place of cuda_gemm*.c where there is no cublasLt.h: the emulated device has no GEMM. */
#include "cuda_module.h"
#include "scripted_cublaslt.h"

static tn_status no_gemm(void) {
    return TN_FAIL(TN_UNSUPPORTED, "the emulated device was built without cublasLt.h");
}

tn_status tn__cuda_gemm_scratch_bytes(tn_device *device, const tn__gemm_work *work, size_t *out) {
    (void)device, (void)work, (void)out;
    return no_gemm();
}

int tn__cuda_gemm_spares(tn_device *device, const tn__gemm_work *work, size_t plane_bytes) {
    (void)device, (void)work, (void)plane_bytes;
    return 0;
}

tn_status tn__cuda_gemm_run(tn_device *device, const tn__gemm_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return no_gemm();
}

tn_status tn__cuda_gemm_tune(tn_device *device, const tn__gemm_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return no_gemm();
}

tn_status tn__cuda_gemm_prefer(tn_device *device, const tn__gemm_work *work,
                               tn_gemm_engine engine) {
    (void)device, (void)work, (void)engine;
    return no_gemm();
}

tn_status tn__cuda_gemm_choice(tn_device *device, const tn__gemm_work *work, tn_gemm_choice *out) {
    (void)device, (void)work, (void)out;
    return no_gemm();
}

tn_status tn__cuda_gemm_table_text(tn_device *device, char **text, size_t *bytes) {
    (void)device, (void)text, (void)bytes;
    return no_gemm();
}

tn_status tn__cuda_gemm_table_take(tn_device *device, const char *text, size_t bytes) {
    (void)device, (void)text, (void)bytes;
    return no_gemm();
}

void scripted_cublaslt_begin(void) {}

void tn__cuda_gemm_end(tn__cuda_context *context) { (void)context; }
