/* Which implementation a device's ops have, and how the formats whose planes are each other's
 * transpose learn to derive them. */
#include <pthread.h>

#include "op_call.h"

const tn__op_table *tn__op_table_of(tn_device *device) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    TN_CHECK(tn_device_info_get(device, &info) == TN_OK);
    if (info.driver == TN_DRIVER_HOST) return &tn__op_table_host;
    return info.simulated ? &tn__op_table_ghost : &tn__op_table_cuda;
}

/* ---- derivation ----------------------------------------------------------------------------- */

/* Of derivations that this thread begins: see tn__op_derive_ahead. */
static _Thread_local int spared_processors;

void tn__op_derive_on(int processors) { spared_processors = processors; }

static tn_status derive_transpose(tn_device *device, const tn_plane_view *from,
                                  const tn_plane_view *to, tn_stream stream) {
    tn__transpose_work work = {*from, *to, spared_processors};
    if (from->layout.data_bytes == 0) return TN_OK;
    return tn__op_table_of(device)->transpose(device, &work, stream);
}

static pthread_once_t init_once = PTHREAD_ONCE_INIT;
static tn_status init_status;

static void init(void) {
    init_status = tn_format_set_derive(TN_FORMAT_FP8_BLOCK_2D, derive_transpose);
    if (init_status == TN_OK)
        init_status = tn_format_set_derive(TN_FORMAT_FP8_TENSOR, derive_transpose);
}

tn_status tn__op_init(void) {
    pthread_once(&init_once, init);
    return init_status;
}

/* So that tn_plane_require works in a program that has called no op yet. A failure here is told
 * by the first op that is called. */
static __attribute__((constructor)) void init_at_load(void) { (void)tn__op_init(); }
