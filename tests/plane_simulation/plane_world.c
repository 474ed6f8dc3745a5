/* The device, the scopes, the memory of others, and what is compared with the model; see
 * plane_world.h.
 */
#include "plane_world.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"

const tn_plane world_planes[MODEL_PLANES] = {TN_PLANE_ROW, TN_PLANE_COL};

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
    pool.name = "memory of others";
    EXPECT_OK(w, tn_pool_create(w->device, &pool, &w->others));
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
    EXPECT_OK(w, tn_pool_destroy(w->others));
    EXPECT_OK(w, tn_pool_destroy(w->pool));
    EXPECT_OK(w, tn_device_destroy(w->device));
    if (w->driver.leftovers(left, sizeof left)) plane_world_fail(w, "left behind: %s", left);
    if (tn__host_live_blocks()) plane_world_fail(w, "host memory is left");
}

/* ---- begin and end of a sequence ----------------------------------------------------------- */

static size_t owned_bytes(const plane_world *w, tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    EXPECT_OK(w, tn_pool_stats_get(pool, &stats));
    return stats.owned_bytes;
}

static tn_ledger ledger_of(const plane_world *w, tn_scope scope) {
    tn_ledger ledger = TN_LEDGER_INIT;
    EXPECT_OK(w, tn_scope_ledger(scope, &ledger));
    return ledger;
}

tn_tensor_config plane_world_tensor_config(const plane_world *w, int tensor) {
    static const char *const names[] = {"A", "B"};
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = (tn_format)w->m.format;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = MODEL_ROWS;
    config.shape[1] = MODEL_COLS;
    config.policy = (tn_plane_policy)w->m.policy;
    config.name = names[tensor];
    return config;
}

void plane_world_begin(plane_world *w, tn_format format, tn_plane_policy policy) {
    model_init(&w->m, format, policy);
    w->path_length = 0;
    w->remains = 0;
    EXPECT_OK(w, tn_scope_budget_set(w->root, model_budget_of(&w->m, w->m.budget)));
    for (int i = 0; i < MODEL_SAVED; i++) {
        tn_tensor_config config = plane_world_tensor_config(w, i);
        EXPECT_OK(w, tn_tensor_create(w->scopes[0], &config, &w->tensors[i]));
    }
    w->tensors[MODEL_SAVED] = w->tensors[MODEL_VIEW] = (tn_tensor){0};
}

void plane_world_end(plane_world *w) {
    for (int i = 0; i < w->m.lease_count; i++)
        EXPECT_OK(w, tn_lease_abandon(w->leases[i]));
    if (w->m.view.is_alive) EXPECT_OK(w, tn_tensor_destroy(w->tensors[MODEL_VIEW], NULL));
    for (int i = 0; i < MODEL_TENSORS; i++) {
        if (!w->m.tensors[i].is_alive) continue;
        EXPECT_OK(w, tn_tensor_destroy(w->tensors[i], w->streams[i % MODEL_STREAMS]));
    }
    EXPECT_OK(w, tn_scope_scratch_release(w->root, w->streams[0]));
    tn_ledger ledger = ledger_of(w, w->root);
    if (ledger.total_bytes != 0 || owned_bytes(w, w->pool) != 0) {
        plane_world_fail(w, "bytes are left at the end");
    }
    if (ledger.offloaded_bytes || ledger.foreign_bytes || w->lent) {
        plane_world_fail(w, "memory of others is left at the end");
    }
}

void plane_world_synchronize(const plane_world *w) {
    EXPECT_OK(w, tn_device_synchronize(w->device));
}

/* ---- memory of others ------------------------------------------------------------------------ */

static void use_by_owner(const world_loan *loan, tn_stream stream) {
    const plane_world *w = loan->w;
    tn__range range = {loan->block, loan->bytes, 1};
    EXPECT_OK(w, tn__device_driver(w->device)->ghost_launch(tn__device_state(w->device), "owner",
                                                            &range, 1, 20.0, stream));
}

/* The order of an owner's stream that has ended is that of any. */
static void end_loan(void *context) {
    world_loan *loan = context;
    plane_world *w = loan->w;
    plane_world_disarm(w);
    if (!loan->block) plane_world_fail(w, "memory is given back twice");
    int is_same = loan->generation == w->generations[loan->stream];
    tn_stream stream = is_same ? w->streams[loan->stream] : NULL;
    use_by_owner(loan, stream);
    EXPECT_OK(w, tn_free(loan->block, stream));
    loan->block = NULL;
    w->lent--;
}

world_loan *plane_world_lend(plane_world *w, int plane, int stream) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    world_loan *loan = w->loans;
    while (loan->block)
        loan++;
    if (loan == w->loans + WORLD_LOANS) plane_world_fail(w, "more is lent than there are planes");
    loan->w = w;
    loan->stream = stream;
    loan->generation = w->generations[stream];
    loan->data_bytes = (size_t)MODEL_ROWS * MODEL_COLS;
    loan->scale_bytes = model_plane_bytes(&w->m, plane) - loan->data_bytes;
    loan->scale_offset = (loan->data_bytes + 255) & ~(size_t)255;
    loan->bytes = loan->scale_offset + loan->scale_bytes;
    EXPECT_OK(w, tn_alloc(w->others, loan->bytes, w->streams[stream], &options, &loan->block));
    use_by_owner(loan, w->streams[stream]);
    w->lent++;
    return loan;
}

tn_foreign_memory plane_world_memory_of(const plane_world *w, world_loan *loan, int plane) {
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    memory.plane = world_planes[plane];
    memory.data = loan->block;
    memory.data_bytes = loan->data_bytes;
    memory.scale = (char *)loan->block + loan->scale_offset;
    memory.scale_bytes = loan->scale_bytes;
    memory.stream = w->streams[loan->stream];
    memory.release = end_loan;
    memory.context = loan;
    return memory;
}

void plane_world_take_back(world_loan *loan) { end_loan(loan); }

/* ---- comparisons --------------------------------------------------------------------------- */

static void add_slot(void *argument, tn_tensor tensor, const tn_tensor_info *info,
                     const size_t data[TN_PLANE_COUNT], const size_t scales[TN_PLANE_COUNT]) {
    world_sight *sight = argument;
    (void)tensor;
    (void)scales;
    if (strcmp(info->name, "scratch") == 0) sight->slot_bytes += data[TN_PLANE_DATA];
}

static void see_tensor(const plane_world *w, int t, int is_alive, world_sight *sight) {
    tn_plane_state state = TN_PLANE_ABSENT;
    for (int p = 0; p < MODEL_PLANES; p++) {
        if (is_alive) {
            EXPECT_OK(w, tn_plane_state_get(w->tensors[t], world_planes[p], &state));
        } else if (w->tensors[t].value &&
                   tn_plane_state_get(w->tensors[t], world_planes[p], &state) != TN_STALE_HANDLE) {
            plane_world_fail(w, "tensor %c is alive after its end", "ABSV"[t]);
        }
        sight->states[t][p] = (unsigned char)state;
    }
}

void plane_world_see(const plane_world *w, const model *m, world_sight *sight) {
    tn_plane_budget budget = TN_PLANE_BUDGET_INIT;
    memset(sight, 0, sizeof *sight);
    for (int t = 0; t < MODEL_TENSORS; t++)
        see_tensor(w, t, m->tensors[t].is_alive, sight);
    see_tensor(w, MODEL_VIEW, m->view.is_alive, sight);
    EXPECT_OK(w, tn_scope_visit(w->root, add_slot, sight));
    EXPECT_OK(w, tn_scope_budget_get(w->root, &budget));
    sight->kept_bytes = budget.kept_bytes;
    sight->budget_bytes = budget.limit_bytes;
    sight->ledger = ledger_of(w, w->root);
}

static int are_states_equal(const world_sight *sight, const model *m, char *text) {
    for (int t = 0; t <= MODEL_TENSORS; t++) {
        int of = t == MODEL_VIEW ? m->view.base : t;
        for (int p = 0; p < MODEL_PLANES && (t < MODEL_VIEW || m->view.is_alive); p++) {
            int expected = m->tensors[of].planes[p].now.state, seen = sight->states[t][p];
            if (seen == expected) continue;
            (void)snprintf(text, WORLD_TEXT, "%c.%s is in state %d, not %d", "ABSV"[t],
                           p ? "COL" : "ROW", seen, expected);
            return 0;
        }
    }
    return 1;
}

static int are_bytes_equal(const char *what, size_t seen, size_t expected, char *text) {
    if (seen == expected) return 1;
    (void)snprintf(text, WORLD_TEXT, "%s: %zu bytes, not %zu", what, seen, expected);
    return 0;
}

int plane_world_agrees(const world_sight *sight, const model *m, size_t remains, char *text) {
    const tn_ledger *ledger = &sight->ledger;
    size_t bytes = model_bytes(m), total = ledger->total_bytes;
    if (total > bytes && total - bytes <= remains) total = bytes;
    return are_states_equal(sight, m, text) &&
           are_bytes_equal("in host memory", ledger->offloaded_bytes, model_offloaded_bytes(m),
                           text) &&
           are_bytes_equal("of others", ledger->foreign_bytes, model_foreign_bytes(m), text) &&
           are_bytes_equal("in the slot", sight->slot_bytes, model_slot_bytes(m), text) &&
           are_bytes_equal("kept", sight->kept_bytes, model_kept_bytes(m), text) &&
           are_bytes_equal("budget", sight->budget_bytes, model_budget_of(m, m->budget), text) &&
           are_bytes_equal("in all", total, bytes, text);
}

void plane_world_check(const plane_world *w, const world_sight *sight) {
    size_t owned = owned_bytes(w, w->pool);
    if (sight->ledger.total_bytes != owned) {
        plane_world_fail(w, "the ledger has %zu bytes, the pool %zu", sight->ledger.total_bytes,
                         owned);
    }
    if (sight->ledger.leases != w->m.lease_count) plane_world_fail(w, "leases are counted wrong");
    if (w->lent != model_foreign_planes(&w->m)) {
        plane_world_fail(w, "%d planes of others' memory are there, %d are lent",
                         model_foreign_planes(&w->m), w->lent);
    }
    EXPECT_OK(w, tn_ledger_check(w->pool));
    if (w->driver.race_count() != w->races) {
        plane_world_fail(w, "a race: %s", w->driver.race_text(w->races));
    }
}
