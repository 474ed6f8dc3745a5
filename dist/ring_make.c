/* How a ring is made and ended: units, lanes, the buffer.
 *
 * Invariant: once sealed, the buffer (ring_register.c) is leased until the ring ends, so that its
 * address stays; then it is freed behind the communication stream, which has waited for every lane.
 */
#include <stdio.h>

#include "comm.h"
#include "host_alloc.h"
#include "ring_slots.h"
#include "tensor_internal.h"

/* ---- create -------------------------------------------------------------------------------- */

static tn_status check_config(const tn_ring_config *config) {
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_ring_create: config is not TN_RING_CONFIG_INIT");
    TN_REQUIRE(config->slots >= 0 && config->slots <= TN_RING_SLOTS_MAX,
               "tn_ring_create: %d slots: 0 to %d are possible", config->slots, TN_RING_SLOTS_MAX);
    TN_REQUIRE(config->full == TN_RING_FULL_WAIT || config->full == TN_RING_FULL_FAIL,
               "tn_ring_create: %d says nothing about a full ring", (int)config->full);
    TN_REQUIRE((unsigned)config->registration <= TN_RING_REGISTER_NONE,
               "tn_ring_create: %d says nothing about registration", (int)config->registration);
    return TN_OK;
}

void tn__ring_drop(tn_ring *ring) {
    if (atomic_fetch_sub(&ring->references, 1) > 1) return;
    pthread_mutex_destroy(&ring->lock);
    tn__host_free(ring);
}

static void ring_free(tn_ring *ring) {
    for (int i = 0; i < ring->unit_count; i++) {
        tn__host_free(ring->units[i].name);
        tn__host_free(ring->units[i].planes);
        if (ring->units[i].source.release) {
            ring->units[i].source.release(ring->units[i].source.context);
        }
    }
    tn__ring_schedule_deinit(&ring->schedule);
    tn__host_free(ring->units);
    tn__host_free(ring->slots);
    tn__host_free(ring->name);
    tn__host_free(ring->register_text);
    tn__ring_drop(ring);
}

tn_status tn__ring_create(const tn_ring_config *config, tn_ring **out) {
    tn_device *device = NULL;
    TN_REQUIRE(out, "tn_ring_create: out is NULL");
    TN_TRY(check_config(config));
    TN_TRY(tn__scope_device(config->scope, &device));
    TN_REQUIRE(!config->comm || config->comm->device == device,
               "tn_ring_create: the communicator %s and the scope are of different devices",
               tn_comm_name(config->comm));
    tn_ring *ring = tn__host_alloc(1, sizeof *ring);
    if (!ring) return TN_OUT_OF_HOST_MEMORY;
    atomic_init(&ring->references, 1);
    pthread_mutex_init(&ring->lock, NULL);
    ring->scope = config->scope;
    ring->device = device;
    ring->comm = config->comm;
    ring->stream = config->stream;
    ring->full = config->full;
    ring->registration_wanted = config->registration;
    ring->slots_wanted = config->slots;
    ring->budget_bytes = config->budget_bytes;
    ring->stats.size = sizeof ring->stats;
    ring->name = tn__host_strdup(config->name ? config->name : "ring");
    tn_status status = ring->name ? TN_OK : TN_OUT_OF_HOST_MEMORY;
    if (status == TN_OK && !ring->stream) {
        status = tn_stream_create(device, &ring->stream);
        ring->owns_stream = status == TN_OK;
    }
    if (status != TN_OK) {
        ring_free(ring);
        return status;
    }
    *out = ring;
    return TN_OK;
}

tn_status tn_ring_create(const tn_ring_config *config, tn_ring **out) {
    TN_REQUIRE(!config || config->comm, "tn_ring_create: config->comm is NULL");
    return tn__ring_create(config, out);
}

/* ---- units --------------------------------------------------------------------------------- */

static tn_status check_tensor(const tn_ring *ring, const char *unit, tn_tensor tensor, int index) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_device *device = NULL;
    TN_TRY(tn_tensor_info_get(tensor, &info));
    TN_TRY(tn__tensor_device(tensor, &device));
    TN_REQUIRE(device == ring->device,
               "ring %s: tensor %s of unit %s is on another device than the ring", ring->name,
               info.name, unit);
    TN_REQUIRE(!info.base.value,
               "ring %s: tensor %d of unit %s (%s) is a view, which has no planes of its own",
               ring->name, index, unit, info.name);
    return TN_OK;
}

/* The planes that the format has, none of which may be there. */
static tn_status find_planes(const tn_ring *ring, const char *unit, tn__ring_plane *plane) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        tn_plane_state state = TN_PLANE_ABSENT;
        tn__error_scope_begin();
        tn_status status = tn_plane_state_get(plane->tensor, (tn_plane)i, &state);
        (void)tn__error_scope_end(TN_OK);
        if (status == TN_INVALID_ARGUMENT) continue; /* no such plane */
        if (status != TN_OK) return status;
        if (state != TN_PLANE_ABSENT) {
            return TN_FAIL(TN_INVALID_STATE,
                           "ring %s: a tensor of unit %s has its plane %s: drop it, since it is "
                           "the ring that gives it planes",
                           ring->name, unit, tn_plane_name((tn_plane)i));
        }
        plane->planes |= TN_PLANE_BIT(i);
    }
    return TN_OK;
}

static tn_status take_tensors(const tn_ring *ring, tn__ring_unit *unit, const tn_tensor *tensors) {
    for (int i = 0; i < unit->plane_count; i++) {
        tn__ring_plane *plane = &unit->planes[i];
        TN_TRY(check_tensor(ring, unit->name, tensors[i], i));
        plane->tensor = tensors[i];
        atomic_init(&plane->is_out, 0);
        TN_TRY(find_planes(ring, unit->name, plane));
    }
    if (unit->shard.value) TN_TRY(check_tensor(ring, unit->name, unit->shard, -1));
    for (int i = 0; i < unit->plane_count; i++)
        TN_TRY(tn_tensor_set_regatherable(tensors[i], 1));
    return TN_OK;
}

static tn_status unit_name(const tn_ring *ring, const char *name, tn__ring_unit *unit) {
    char text[32];
    (void)snprintf(text, sizeof text, "%d", ring->unit_count);
    unit->name = tn__host_strdup(name ? name : text);
    return unit->name ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

static tn_status make_unit(const tn_ring *ring, const char *name, const tn__ring_source *source,
                           tn_tensor shard, const tn_tensor *tensors, int tensor_count,
                           tn__ring_unit *unit) {
    unit->source = *source;
    unit->bytes = tn__ring_round_up(source->bytes);
    unit->shard = shard;
    unit->plane_count = tensor_count;
    unit->own_slot = unit->slot = -1;
    TN_TRY(unit_name(ring, name, unit));
    unit->planes = tn__host_alloc((size_t)tensor_count + 1, sizeof *unit->planes);
    if (!unit->planes) return TN_OUT_OF_HOST_MEMORY;
    return take_tensors(ring, unit, tensors);
}

static tn_status make_room(tn_ring *ring) {
    int room = ring->unit_room ? 2 * ring->unit_room : 8;
    if (ring->unit_count < ring->unit_room) return TN_OK;
    tn__ring_unit *units =
        tn__host_realloc(ring->units, (size_t)ring->unit_room, (size_t)room, sizeof *units);
    if (!units) return TN_OUT_OF_HOST_MEMORY;
    ring->units = units;
    ring->unit_room = room;
    return TN_OK;
}

static tn_status check_unit_config(const tn_ring *ring, const tn__ring_source *source,
                                   const tn_tensor *tensors, int tensor_count) {
    TN_REQUIRE(tensor_count >= 0 && (tensors || tensor_count == 0),
               "ring %s: a unit of %d tensors at %p", ring->name, tensor_count,
               (const void *)tensors);
    TN_REQUIRE(source->bytes < SIZE_MAX / 4, "ring %s: a unit of %zu bytes is too large",
               ring->name, source->bytes);
    if (ring->is_sealed) {
        return TN_FAIL(TN_INVALID_STATE, "ring %s is sealed: no unit is added any more",
                       ring->name);
    }
    return TN_OK;
}

tn_status tn__ring_unit_add(tn_ring *ring, const char *name, const tn__ring_source *source,
                            tn_tensor shard, const tn_tensor *tensors, int tensor_count, int *out) {
    tn__ring_unit unit = {0};
    pthread_mutex_lock(&ring->lock);
    tn_status status = check_unit_config(ring, source, tensors, tensor_count);
    if (status == TN_OK) status = make_room(ring);
    if (status == TN_OK) {
        status = make_unit(ring, name, source, shard, tensors, tensor_count, &unit);
    }
    if (status == TN_OK) {
        *out = ring->unit_count;
        ring->units[ring->unit_count++] = unit;
    } else {
        tn__host_free(unit.name);
        tn__host_free(unit.planes);
    }
    pthread_mutex_unlock(&ring->lock);
    return status;
}

/* ---- schedules ----------------------------------------------------------------------------- */

tn_status tn_ring_schedule_set(tn_ring *ring, const tn_ring_op *ops, int count) {
    TN_REQUIRE(ring, "tn_ring_schedule_set: ring is NULL");
    pthread_mutex_lock(&ring->lock);
    tn_status status = tn__ring_schedule_set(ring, ops, count);
    pthread_mutex_unlock(&ring->lock);
    return status;
}

tn_status tn_ring_schedule_check(tn_ring *ring, const tn_ring_op *ops, int count,
                                 tn_ring_demand *out) {
    TN_REQUIRE(ring, "tn_ring_schedule_check: ring is NULL");
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_ring_schedule_check: out is not TN_RING_DEMAND_INIT");
    pthread_mutex_lock(&ring->lock);
    tn_status status = tn__ring_schedule_trace(ring, ops, count, out, NULL);
    pthread_mutex_unlock(&ring->lock);
    return status;
}

/* ---- seal ---------------------------------------------------------------------------------- */

typedef struct size_found {
    size_t largest, stride, bytes;
    int slots, empty_units, largest_unit;
} size_found;

static void look_at_units(const tn_ring *ring, size_found *out) {
    for (int i = 0; i < ring->unit_count; i++) {
        const tn__ring_unit *unit = &ring->units[i];
        if (unit->bytes == 0) out->empty_units++;
        if (unit->bytes > out->largest) out->largest_unit = i;
        if (unit->bytes > out->largest) out->largest = unit->bytes;
    }
}

/* As many slots as are asked for, or as the budget holds; no more than there are units. */
static void size_slots(const tn_ring *ring, size_found *out) {
    int full_units = ring->unit_count - out->empty_units;
    size_t slots = ring->slots_wanted ? (size_t)ring->slots_wanted : 2;
    if (!ring->slots_wanted && ring->budget_bytes && out->largest) {
        slots = ring->budget_bytes / out->largest;
    }
    if (slots > (size_t)full_units) slots = (size_t)full_units;
    if (slots > TN_RING_SLOTS_MAX) slots = TN_RING_SLOTS_MAX;
    if (slots < 1) slots = 1;
    out->slots = (int)slots;
    out->stride = out->largest;
    if (__builtin_mul_overflow(slots, out->largest, &out->bytes)) out->bytes = SIZE_MAX;
}

/* One slot more than are gathered at one time, for the one that drains. */
static void size_schedule(const tn_ring *ring, size_found *out) {
    out->slots = ring->needed_slots + 1;
    out->stride = 0;
    out->bytes = ring->needed_bytes > out->largest ? ring->needed_bytes : out->largest;
}

static tn_status size_up(const tn_ring *ring, size_found *out) {
    size_t allowed = ring->budget_bytes && ring->budget_bytes < INT64_MAX ? ring->budget_bytes
                                                                          : (size_t)INT64_MAX;
    look_at_units(ring, out);
    if (ring->schedule.count)
        size_schedule(ring, out);
    else
        size_slots(ring, out);
    if (out->bytes <= allowed) return TN_OK;
    return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY,
                   "ring %s: %zu bytes are needed and %zu are allowed: %d slots, the largest of %d "
                   "units is unit %s with %zu bytes",
                   ring->name, out->bytes, allowed, out->slots, ring->unit_count,
                   ring->units[out->largest_unit].name, out->largest);
}

static tn_status make_slots(tn_ring *ring, const size_found *size) {
    int records = size->slots + size->empty_units, next = size->slots;
    ring->slots = tn__host_alloc((size_t)records, sizeof *ring->slots);
    if (!ring->slots) return TN_OUT_OF_HOST_MEMORY;
    for (int i = 0; i < records; i++) {
        ring->slots[i].unit = -1;
        ring->slots[i].lane = ring->stream;
    }
    for (; ring->slot_count < size->slots; ring->slot_count++)
        TN_TRY(tn_stream_create(ring->device, &ring->slots[ring->slot_count].lane));
    ring->record_count = records;
    for (int i = 0; i < ring->unit_count; i++) {
        if (ring->units[i].bytes == 0) ring->units[i].own_slot = next++;
    }
    return TN_OK;
}

/* ---- end ----------------------------------------------------------------------------------- */

/* All of it, or as much as the driver takes back now; the rest when it is called again. */
static tn_status free_slots(tn_ring *ring) {
    ring->record_count = 0;
    for (; ring->slot_count > 0; ring->slot_count--)
        TN_TRY(tn_stream_destroy(ring->device, ring->slots[ring->slot_count - 1].lane));
    tn__host_free(ring->slots);
    ring->slots = NULL;
    return TN_OK;
}

static void unseal(tn_ring *ring) {
    tn__saved_error error;
    tn__error_save(&error);
    ring->is_sealed = 0;
    if (tn__ring_buffer_free(ring) == TN_OK) (void)free_slots(ring);
    tn__error_restore(&error);
}

static tn_status make_all(tn_ring *ring, const size_found *size) {
    TN_TRY(tn__ring_buffer_free(ring)); /* what a seal that failed could not give back */
    TN_TRY(free_slots(ring));
    TN_TRY(make_slots(ring, size));
    TN_TRY(tn__ring_buffer_take(ring, size->bytes));
    ring->stride = size->stride;
    return tn__ring_prepare_registration(ring);
}

static tn_status seal(tn_ring *ring) {
    size_found size = {0};
    if (ring->is_sealed)
        return TN_FAIL(TN_INVALID_STATE, "tn_ring_seal: ring %s is sealed", ring->name);
    tn_status status = size_up(ring, &size);
    if (status == TN_OK) status = make_all(ring, &size);
    ring->is_sealed = status == TN_OK;
    if (status == TN_OK)
        tn__ring_register(ring);
    else
        unseal(ring);
    return status;
}

tn_status tn_ring_seal(tn_ring *ring) {
    TN_REQUIRE(ring, "tn_ring_seal: ring is NULL");
    pthread_mutex_lock(&ring->lock);
    tn_status status = seal(ring);
    pthread_mutex_unlock(&ring->lock);
    return status;
}

static tn_status end(tn_ring *ring) {
    TN_TRY(tn__ring_check_end(ring));
    TN_TRY(tn__ring_drain_all(ring));
    ring->is_sealed = 0;
    TN_TRY(tn__ring_buffer_free(ring));
    TN_TRY(free_slots(ring));
    return ring->owns_stream ? tn_stream_destroy(ring->device, ring->stream) : TN_OK;
}

tn_status tn_ring_destroy(tn_ring *ring) {
    if (!ring) return TN_OK;
    pthread_mutex_lock(&ring->lock);
    tn_status status = end(ring);
    pthread_mutex_unlock(&ring->lock);
    if (status == TN_OK) ring_free(ring);
    return status;
}
