/* NCCL's memory calls: registration of buffers and windows, and ncclMemAlloc for pools. */
#include "nccl_state.h"

static tn_status lacks(const char *call, const char *version) {
    return TN_FAIL(TN_UNSUPPORTED, "the loaded NCCL has no %s: it is of %s and later", call,
                   version);
}

/* ---- registration --------------------------------------------------------------------------- */

/* The pool's memory may come from anywhere: NCCL says what it can not take. */
tn_status tn__nccl_enroll(tn__comm_state *state, void *address, size_t bytes, int is_window,
                          void **handle) {
    const tn__nccl_calls *calls = state->calls;
    TN_TRY(state->driver->make_current(state->on));
    if (is_window) {
        if (!calls->window_register || !calls->window_deregister)
            return lacks("ncclCommWindowRegister", "2.27");
        int code =
            calls->window_register(state->comm, address, bytes, handle, TN__NCCL_WINDOW_SYMMETRIC);
        TN_TRY(tn__nccl_finish(state, code, "ncclCommWindowRegister"));
    } else {
        if (!calls->buffer_register || !calls->buffer_deregister)
            return lacks("ncclCommRegister", "2.19");
        int code = calls->buffer_register(state->comm, address, bytes, handle);
        TN_TRY(tn__nccl_finish(state, code, "ncclCommRegister"));
    }
    return TN_OK;
}

tn_status tn__nccl_withdraw(tn__comm_state *state, void *handle, int is_window) {
    const tn__nccl_calls *calls = state->calls;
    /* NCCL gives no handle where it registers nothing, as a window on one rank. */
    if (!handle || !state->comm) return TN_OK;
    TN_TRY(state->driver->make_current(state->on));
    if (is_window) {
        int code = calls->window_deregister(state->comm, handle);
        return tn__nccl_finish(state, code, "ncclCommWindowDeregister");
    }
    return tn__nccl_finish(state, calls->buffer_deregister(state->comm, handle),
                           "ncclCommDeregister");
}

/* ---- memory for pools ----------------------------------------------------------------------- */

static tn_status take(void *context, size_t bytes, void **out) {
    tn_device *device = context;
    const tn__nccl_calls *calls;
    TN_TRY(tn__nccl_load(&calls));
    TN_TRY(tn__device_driver(device)->make_current(tn__device_state(device)));
    int code = calls->mem_alloc(out, bytes);
    if (code == TN__NCCL_SUCCESS) return TN_OK;
    /* NCCL does not tell a full device from one that fails: a pool that is short goes on. */
    return TN_FAIL_NATIVE(TN_OUT_OF_DEVICE_MEMORY, code, "ncclMemAlloc of %zu bytes failed: %s",
                          bytes, calls->error_string(code));
}

static tn_status give(void *context, void *address, size_t bytes) {
    tn_device *device = context;
    const tn__nccl_calls *calls;
    (void)bytes;
    TN_TRY(tn__nccl_load(&calls));
    TN_TRY(tn__device_driver(device)->make_current(tn__device_state(device)));
    int code = calls->mem_free(address);
    return code == TN__NCCL_SUCCESS ? TN_OK : tn__nccl_fail(calls, NULL, code, "ncclMemFree");
}

tn_status tn__nccl_memory_functions(tn_device *device, tn_memory_functions *out) {
    const tn__nccl_calls *calls;
    TN_TRY(tn__nccl_load(&calls));
    if (!calls->mem_alloc || !calls->mem_free) return lacks("ncclMemAlloc", "2.19");
    *out = (tn_memory_functions){take, give, device};
    return TN_OK;
}
