/* Operations on the real tensors, compared with the model after each; see plane_world.h. */
#include "plane_world.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"

#define EXPECT_OK(w, call)                                                                         \
    do {                                                                                           \
        if ((call) != TN_OK) plane_world_fail((w), "%s: %s", #call, tn_error_last());              \
    } while (0)

static const tn_plane planes[MODEL_PLANES] = {TN_PLANE_ROW, TN_PLANE_COL};

/* ---- failures ------------------------------------------------------------------------------ */

_Noreturn void plane_world_fail(const plane_world *w, const char *format, ...) {
    va_list arguments;
    char text[80];
    int from = w->path_length > WORLD_PATH_MAX ? w->path_length - WORLD_PATH_MAX : 0;
    va_start(arguments, format);
    fprintf(stderr, "plane_simulation: ");
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n  format %s, policy %s; the last steps:\n",
            tn_format_name((tn_format)w->m.format), tn_policy_name((tn_plane_policy)w->m.policy));
    for (int i = from; i < w->path_length; i++) {
        model_describe(w->path[i % WORLD_PATH_MAX], text, sizeof text);
        fprintf(stderr, "    %s\n", text);
    }
    fprintf(stderr, "replay: plane_simulation %s\n", w->label);
    exit(1);
}

/* ---- the device ---------------------------------------------------------------------------- */

static void load_driver(plane_world *w, const char *library) {
    void *handle = dlopen(library, RTLD_NOW);
    if (!handle) plane_world_fail(w, "%s", dlerror());
    *(void **)&w->driver.configure = dlsym(handle, "tnsim_configure");
    *(void **)&w->driver.fault = dlsym(handle, "tnsim_fault");
    *(void **)&w->driver.call_count = dlsym(handle, "tnsim_call_count");
    *(void **)&w->driver.race_count = dlsym(handle, "tnsim_race_count");
    *(void **)&w->driver.race_text = dlsym(handle, "tnsim_race_text");
    *(void **)&w->driver.leftovers = dlsym(handle, "tnsim_leftovers");
    if (!w->driver.leftovers) plane_world_fail(w, "%s is not the simulated driver", library);
}

/* A kernel that reads one plane and writes the other. */
static tn_status derive(tn_device *device, const tn_plane_view *from, const tn_plane_view *to,
                        tn_stream stream) {
    tn__range ranges[4] = {{from->data, from->layout.data_bytes, 0},
                           {from->scale, from->layout.scale_bytes, 0},
                           {to->data, to->layout.data_bytes, 1},
                           {to->scale, to->layout.scale_bytes, 1}};
    return tn__device_driver(device)->ghost_launch(tn__device_state(device), "derive", ranges, 4,
                                                   20.0, stream);
}

static tn_scope make_scope(plane_world *w, tn_scope parent, tn_scope_kind kind, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.pool = parent.value ? NULL : w->pool;
    config.parent = parent;
    config.kind = kind;
    config.name = name;
    EXPECT_OK(w, tn_scope_create(&config, &scope));
    return scope;
}

void plane_world_open(plane_world *w, const char *library) {
    tnsim_config sim = {.size = sizeof sim, .memory_bytes = (size_t)1 << 30};
    tn_device_config device = TN_DEVICE_CONFIG_INIT;
    tn_pool_config pool = TN_POOL_CONFIG_INIT;
    if (!library) library = TENURE_SIM_LIBRARY;
    load_driver(w, library);
    if (w->driver.configure(&sim) != 0) plane_world_fail(w, "the device is refused");
    device.driver = TN_DRIVER_CUDA;
    device.cuda_library = library;
    pool.name = "planes";
    EXPECT_OK(w, tn_device_create(&device, &w->device));
    EXPECT_OK(w, tn_pool_create(w->device, &pool, &w->pool));
    for (int i = 0; i < MODEL_STREAMS; i++)
        EXPECT_OK(w, tn_stream_create(w->device, &w->streams[i]));
    EXPECT_OK(w, tn_format_set_derive(TN_FORMAT_FP8_BLOCK_2D, derive));
    EXPECT_OK(w, tn_format_set_derive(TN_FORMAT_FP8_TENSOR, derive));
    w->root = make_scope(w, (tn_scope){0}, TN_SCOPE_MODEL, "root");
    w->scopes[0] = make_scope(w, w->root, TN_SCOPE_LAYER, "layer");
    w->scopes[1] = make_scope(w, w->root, TN_SCOPE_SAVED, "saved");
}

void plane_world_close(plane_world *w) {
    char left[512] = "";
    EXPECT_OK(w, tn_scope_close(w->root));
    EXPECT_OK(w, tn_ledger_check(w->pool));
    for (int i = 0; i < MODEL_STREAMS; i++)
        EXPECT_OK(w, tn_stream_destroy(w->device, w->streams[i]));
    EXPECT_OK(w, tn_pool_destroy(w->pool));
    EXPECT_OK(w, tn_device_destroy(w->device));
    if (w->driver.leftovers(left, sizeof left)) plane_world_fail(w, "left behind: %s", left);
    if (tn__host_live_blocks()) plane_world_fail(w, "host memory is left");
}

/* ---- begin and end of a sequence ----------------------------------------------------------- */

static size_t owned_bytes(const plane_world *w) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(w, tn_pool_stats_get(w->pool, &stats));
    return stats.owned_bytes;
}

static tn_ledger ledger_of(const plane_world *w, tn_scope scope) {
    tn_ledger ledger = TN_LEDGER_INIT;
    EXPECT_OK(w, tn_scope_ledger(scope, &ledger));
    return ledger;
}

void plane_world_begin(plane_world *w, tn_format format, tn_plane_policy policy) {
    static const char *const names[] = {"A", "B"};
    model_init(&w->m, format, policy);
    w->path_length = 0;
    for (int i = 0; i < MODEL_SAVED; i++) {
        tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
        config.format = format;
        config.dtype = TN_E4M3;
        config.rank = 2;
        config.shape[0] = 130;
        config.shape[1] = 600;
        config.policy = policy;
        config.name = names[i];
        EXPECT_OK(w, tn_tensor_create(w->scopes[0], &config, &w->tensors[i]));
    }
    w->tensors[MODEL_SAVED] = (tn_tensor){0};
}

void plane_world_end(plane_world *w) {
    for (int i = 0; i < w->m.lease_count; i++)
        EXPECT_OK(w, tn_lease_abandon(w->leases[i]));
    for (int i = 0; i < MODEL_TENSORS; i++) {
        if (!w->m.tensors[i].is_alive) continue;
        EXPECT_OK(w, tn_tensor_destroy(w->tensors[i], w->streams[i % MODEL_STREAMS]));
    }
    if (ledger_of(w, w->root).total_bytes != 0 || owned_bytes(w) != 0) {
        plane_world_fail(w, "bytes are left at the end");
    }
}

void plane_world_synchronize(const plane_world *w) {
    EXPECT_OK(w, tn_device_synchronize(w->device));
}

/* ---- faults -------------------------------------------------------------------------------- */

static void set_fault(const plane_world *w, long nth) {
    if (w->fault.is_host)
        tn__host_alloc_fault(nth, w->fault.and_after);
    else
        (void)w->driver.fault(NULL, nth, w->fault.and_after, 999);
}

static void arm(plane_world *w, plane_fault fault) {
    w->fault = fault;
    w->is_armed = 1;
    w->calls = w->driver.call_count(NULL);
    set_fault(w, fault.nth);
}

/* When the call is over: before work is put under a lease, at the latest after the step. */
static void disarm(plane_world *w) {
    if (!w->is_armed) return;
    w->is_armed = 0;
    w->calls = w->driver.call_count(NULL) - w->calls;
    set_fault(w, 0);
}

/* ---- operations ---------------------------------------------------------------------------- */

static void touch(const plane_world *w, const tn_plane_view *view, const tn_plane_view *old,
                  int is_write, tn_stream stream) {
    const tn__driver *driver = tn__device_driver(w->device);
    tn__range ranges[4] = {{view->data, view->layout.data_bytes, is_write},
                           {view->scale, view->layout.scale_bytes, is_write}};
    size_t count = 2;
    if (old) {
        ranges[count++] = (tn__range){old->data, old->layout.data_bytes, 0};
        ranges[count++] = (tn__range){old->scale, old->layout.scale_bytes, 0};
    }
    EXPECT_OK(w, driver->ghost_launch(tn__device_state(w->device), is_write ? "write" : "read",
                                      ranges, count, 50.0, stream));
}

static tn_status begin_lease(plane_world *w, model_operation op, tn_access access) {
    tn_stream stream = w->streams[op.stream];
    tn_plane_view view, old;
    tn_lease lease;
    tn_status status =
        tn_lease_begin(w->tensors[op.tensor], planes[op.plane], access, stream, &lease, &view);
    if (status != TN_OK) return status;
    disarm(w);
    int has_old = access == TN_REPLACE && tn_lease_old_view(lease, &old) == TN_OK;
    touch(w, &view, has_old ? &old : NULL, access != TN_READ, stream);
    w->leases[w->m.lease_count] = lease; /* the model counts it after */
    return TN_OK;
}

static tn_status finish_lease(plane_world *w, int index, int is_end) {
    tn_lease lease = w->leases[index];
    tn_status status = is_end ? tn_lease_end(lease) : tn_lease_abandon(lease);
    if (status != TN_OK) return status;
    memmove(&w->leases[index], &w->leases[index + 1],
            (size_t)(MODEL_LEASES - index - 1) * sizeof lease);
    return TN_OK;
}

static tn_status end_backward(plane_world *w, tn_stream stream) {
    EXPECT_OK(w, tn_scope_phase_set(w->root, TN_PHASE_BACKWARD, stream));
    return tn_scope_phase_set(w->root, TN_PHASE_NONE, stream);
}

static tn_status real_step(plane_world *w, model_operation op) {
    tn_tensor tensor = w->tensors[op.tensor], *saved = &w->tensors[MODEL_SAVED];
    const model_tensor *t = &w->m.tensors[op.tensor];
    tn_plane plane = planes[op.plane];
    tn_stream stream = w->streams[op.stream];
    switch ((model_kind)op.kind) {
    case MODEL_MAKE: return tn_plane_make(tensor, plane, stream);
    case MODEL_REQUIRE: return tn_plane_require(tensor, plane, stream);
    case MODEL_DROP: return tn_plane_drop(tensor, plane, stream);
    case MODEL_RELEASE: return tn_plane_release(tensor, plane, stream);
    case MODEL_READ: return begin_lease(w, op, TN_READ);
    case MODEL_WRITE: return begin_lease(w, op, TN_WRITE);
    case MODEL_UPDATE: return begin_lease(w, op, TN_UPDATE);
    case MODEL_REPLACE: return begin_lease(w, op, TN_REPLACE);
    case MODEL_END: return finish_lease(w, op.lease, 1);
    case MODEL_ABANDON: return finish_lease(w, op.lease, 0);
    case MODEL_SAVE:
        return tn_tensor_save(tensor, TN_PLANE_BIT(plane), w->scopes[1], stream, saved);
    case MODEL_RESTORE: return tn_tensor_restore_into(*saved, tensor);
    case MODEL_CLONE: return tn_tensor_clone(tensor, w->scopes[1], stream, saved);
    case MODEL_MOVE: return tn_tensor_move(tensor, w->scopes[!t->is_moved]);
    case MODEL_FREEZE: return tn_tensor_set_frozen(tensor, !t->is_frozen);
    case MODEL_DESTROY: return tn_tensor_destroy(tensor, stream);
    case MODEL_END_BACKWARD: return end_backward(w, stream);
    default: return TN_INVALID_ARGUMENT;
    }
}

/* ---- comparisons --------------------------------------------------------------------------- */

static void compare_states(const plane_world *w, const model *m) {
    for (int t = 0; t < MODEL_TENSORS; t++) {
        tn_plane_state state;
        if (!m->tensors[t].is_alive) {
            if (!w->tensors[t].value) continue;
            if (tn_plane_state_get(w->tensors[t], TN_PLANE_ROW, &state) == TN_STALE_HANDLE)
                continue;
            plane_world_fail(w, "tensor %c is alive after its end", "ABS"[t]);
        }
        for (int p = 0; p < MODEL_PLANES; p++) {
            int expected = m->tensors[t].planes[p].state;
            EXPECT_OK(w, tn_plane_state_get(w->tensors[t], planes[p], &state));
            if ((int)state == expected) continue;
            plane_world_fail(w, "%c.%s is in state %d, not %d", "ABS"[t], p ? "COL" : "ROW",
                             (int)state, expected);
        }
    }
}

static void compare_books(plane_world *w, const model *m, int is_exact) {
    tn_ledger ledger = ledger_of(w, w->root);
    size_t bytes = model_bytes(m), owned = owned_bytes(w);
    if (ledger.total_bytes != owned || ledger.total_bytes < bytes ||
        (is_exact && ledger.total_bytes != bytes)) {
        plane_world_fail(w, "the ledger has %zu bytes, the pool %zu, the model %zu",
                         ledger.total_bytes, owned, bytes);
    }
    if (ledger.leases != m->lease_count) plane_world_fail(w, "leases are counted wrong");
    EXPECT_OK(w, tn_ledger_check(w->pool));
    if (w->driver.race_count() != w->races) {
        plane_world_fail(w, "a race: %s", w->driver.race_text(w->races));
    }
}

static void note_step(plane_world *w, model_operation op) {
    w->path[w->path_length++ % WORLD_PATH_MAX] = op;
    w->steps++;
}

void plane_world_step(plane_world *w, model_operation op) {
    model next = w->m;
    tn_status expected = model_step(&next, op);
    note_step(w, op);
    tn_status status = real_step(w, op);
    if (status != expected) {
        plane_world_fail(w, "the status is %s (%s), not %s", tn_status_name(status),
                         status == TN_OK ? "" : tn_error_last(), tn_status_name(expected));
    }
    w->m = next;
    compare_states(w, &w->m);
    compare_books(w, &w->m, 1);
}

/* ---- steps under a fault ------------------------------------------------------------------- */

/* What a call may have done before it failed: derived what it was to read, save or copy. */
static int may_have_derived(plane_world *w, model_operation op, model *m) {
    model_operation derivation = {MODEL_REQUIRE, op.tensor, op.plane, op.stream, 0};
    tn_plane_state state;
    if (op.kind != MODEL_READ && op.kind != MODEL_SAVE) return 0;
    EXPECT_OK(w, tn_plane_state_get(w->tensors[op.tensor], planes[op.plane], &state));
    if (state != TN_PLANE_VALID) return 0;
    return model_step(m, derivation) == TN_OK;
}

int plane_world_step_faulted(plane_world *w, model_operation op, plane_fault fault) {
    model next = w->m;
    tn_status expected = model_step(&next, op);
    note_step(w, op);
    (void)snprintf(w->label, sizeof w->label, "--faults, %s call %ld fails%s",
                   fault.is_host ? "host memory" : "driver", fault.nth,
                   fault.and_after ? ", and all after it" : "");
    arm(w, fault);
    tn_status status = real_step(w, op);
    disarm(w);
    if (status == expected) {
        w->m = next;
    } else if (status == TN_OK) {
        plane_world_fail(w, "success where %s was expected", tn_status_name(expected));
    } else {
        (void)may_have_derived(w, op, &w->m);
    }
    compare_states(w, &w->m);
    compare_books(w, &w->m, 0); /* what a failing driver leaves is in the ledger, too */
    return fault.is_host ? status != expected : (uint64_t)fault.nth <= w->calls;
}
