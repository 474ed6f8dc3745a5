/* The kernels of a device: loading the embedded images, names, launches.
 *
 * The images are built from cuda_cast.cu and cuda_small.cu and lie in this library as data
 * (cmake/cuda_kernels.cmake): machine code for sm_90a, and PTX that the driver compiles for any
 * other GPU from sm_80 on. There is no CUDA runtime in between, so a context that another library
 * made current is used as it is.
 */
#include "cuda_module.h"
#include "host_alloc.h"

#include <pthread.h>
#include <stdio.h>

extern const unsigned char tn__cuda_cast_image[];
extern const unsigned char tn__cuda_small_image[];

static const unsigned char *const images[] = {tn__cuda_cast_image, tn__cuda_small_image};
enum { IMAGE_COUNT = sizeof images / sizeof *images };

/* ---- kernels by name ---------------------------------------------------------------------- */

static const char *const float_names[] = {"fp32", "bf16", "fp16"};
static const char *const fp8_names[] = {"e4m3", "e5m2"};
static const char *const plane_names[] = {"row", "col", "both"};

static int float_index(tn_dtype dtype) {
    TN_CHECK((int)dtype >= TN_FP32 && (int)dtype <= TN_FP16);
    return (int)dtype - TN_FP32;
}

static int fp8_index(tn_dtype dtype) {
    TN_CHECK(dtype == TN_E4M3 || dtype == TN_E5M2);
    return dtype == TN_E5M2;
}

int tn__kernel_of_quantize(int is_1d, int has_row, int has_col, tn_dtype src, tn_dtype format) {
    TN_CHECK(has_row || has_col);
    int planes = has_row && has_col ? 2 : has_col ? 1 : 0;
    int index = ((!is_1d * 3 + planes) * 3 + float_index(src)) * 2 + fp8_index(format);
    return TN__KERNEL_QUANTIZE + index;
}

int tn__kernel_of_dequantize(int is_col, tn_dtype format, tn_dtype dst) {
    return TN__KERNEL_DEQUANTIZE + (!!is_col * 2 + fp8_index(format)) * 3 + float_index(dst);
}

int tn__kernel_of_pair(int family, tn_dtype from, tn_dtype to) {
    return family + float_index(from) * 3 + float_index(to);
}

static void pair_name(const char *family, int index, char name[TN__KERNEL_NAME_BYTES]) {
    snprintf(name, TN__KERNEL_NAME_BYTES, "%s_%s_%s", family, float_names[index / 3],
             float_names[index % 3]);
}

void tn__kernel_name(int kernel, char name[TN__KERNEL_NAME_BYTES]) {
    int at = kernel;
    if (kernel >= TN__KERNEL_TRANSPOSE) {
        static const char *const single[] = {"transpose_plane", "pad_bytes", "embed_rows"};
        snprintf(name, TN__KERNEL_NAME_BYTES, "%s", single[kernel - TN__KERNEL_TRANSPOSE]);
    } else if (kernel >= TN__KERNEL_CROSS_ENTROPY) {
        pair_name("cross_entropy", kernel - TN__KERNEL_CROSS_ENTROPY, name);
    } else if (kernel >= TN__KERNEL_AXPY) {
        pair_name("axpy", kernel - TN__KERNEL_AXPY, name);
    } else if (kernel >= TN__KERNEL_CONVERT) {
        pair_name("convert", kernel - TN__KERNEL_CONVERT, name);
    } else if (kernel >= TN__KERNEL_FINISH) {
        pair_name("finish", kernel - TN__KERNEL_FINISH, name);
    } else if (kernel >= TN__KERNEL_DEQUANTIZE) {
        at -= TN__KERNEL_DEQUANTIZE;
        snprintf(name, TN__KERNEL_NAME_BYTES, "dequantize_%s_%s_%s", plane_names[at / 6],
                 fp8_names[at / 3 % 2], float_names[at % 3]);
    } else {
        snprintf(name, TN__KERNEL_NAME_BYTES, "quantize_%s_%s_%s_%s", at / 18 ? "2d" : "1d",
                 plane_names[at / 6 % 3], float_names[at / 2 % 3], fp8_names[at % 2]);
    }
}

/* ---- a device's context ------------------------------------------------------------------- */

static const char context_key; /* its address tells our attachment from another layer's */

/* Ends what there is, also of a context that is half made. */
static void context_end(tn__attachment *attachment) {
    tn__cuda_context *context = (tn__cuda_context *)attachment;
    tn__cuda_gemm_end(context);
    for (int i = IMAGE_COUNT; i-- > 0;)
        if (context->modules[i] && !tn__driver_is_gone())
            (void)context->driver->module_unload(context->state, context->modules[i]);
    tn__host_free(context);
}

static tn_status load_images(tn__cuda_context *context) {
    for (int i = 0; i < IMAGE_COUNT; i++)
        TN_TRY(context->driver->module_load(context->state, images[i], &context->modules[i]));
    return TN_OK;
}

/* A kernel is in the image of the casts or in the other one. */
static tn_status find_kernels(tn__cuda_context *context) {
    for (int kernel = 0; kernel < TN__KERNEL_COUNT; kernel++) {
        int is_cast = kernel < TN__KERNEL_FINISH || kernel == TN__KERNEL_TRANSPOSE;
        char name[TN__KERNEL_NAME_BYTES];
        tn__kernel_name(kernel, name);
        TN_TRY(context->driver->module_function(context->state, context->modules[is_cast ? 0 : 1],
                                                name, &context->kernels[kernel]));
    }
    return TN_OK;
}

static tn_status context_make(tn_device *device, tn__cuda_context **out) {
    const tn__driver *driver = tn__device_driver(device);
    if (!driver->module_load || !driver->launch)
        return TN_FAIL(TN_UNSUPPORTED, "the driver %s of this device can not load CUDA kernels",
                       driver->name);
    tn__cuda_context *context = tn__host_alloc(1, sizeof *context);
    if (!context) return TN_OUT_OF_HOST_MEMORY;
    context->attachment.key = &context_key;
    context->attachment.end = context_end;
    context->device = device;
    context->driver = driver;
    context->state = tn__device_state(device);
    context->info.size = sizeof context->info;
    tn_status status = tn_device_info_get(device, &context->info);
    if (status == TN_OK) status = load_images(context);
    if (status == TN_OK) status = find_kernels(context);
    if (status != TN_OK) {
        context_end(&context->attachment);
        return status;
    }
    *out = context;
    return TN_OK;
}

tn_status tn__cuda_context_of(tn_device *device, tn__cuda_context **out) {
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    tn__attachment *attachment = tn__device_attachment(device, &context_key);
    tn_status status = TN_OK;
    if (!attachment) {
        pthread_mutex_lock(&making);
        attachment = tn__device_attachment(device, &context_key);
        if (!attachment) {
            tn__cuda_context *context = NULL;
            status = context_make(device, &context);
            if (status == TN_OK) {
                attachment = &context->attachment;
                tn__device_attach(device, attachment);
            }
        }
        pthread_mutex_unlock(&making);
    }
    if (status == TN_OK) *out = (tn__cuda_context *)attachment;
    return status;
}

tn_status tn__kernel_launch(tn__cuda_context *context, int kernel, int64_t blocks, unsigned threads,
                            void *argument, tn_stream stream) {
    if (blocks <= 0 || blocks > INT32_MAX) {
        char name[TN__KERNEL_NAME_BYTES];
        tn__kernel_name(kernel, name);
        return TN_FAIL(TN_UNSUPPORTED, "%s would need %lld blocks: a launch has 1 to %d", name,
                       (long long)blocks, INT32_MAX);
    }
    void *parameters[1] = {argument};
    /* Compiled for Hopper it waits for the kernel ahead; from PTX it does not (cuda_cast.cu). */
    int waits = kernel == TN__KERNEL_TRANSPOSE && context->info.compute_major == 9 &&
                context->info.compute_minor == 0;
    tn__launch launch = {.grid = {(unsigned)blocks, 1, 1},
                         .block = {threads, 1, 1},
                         .shared_bytes = 0,
                         .parameters = parameters,
                         .starts_early = waits};
    return context->driver->launch(context->state, context->kernels[kernel], &launch, stream);
}
