/* Scratch slots: found, sized, filled in turn, displaced, reserved.
 *
 * Invariants:
 * - A plane of kind SLOT is the resident of just the buffer that it names, and the other way round.
 *   Its uses and the buffer's are one list, which is the plane's while it is resident.
 * - A resident is displaced only if it is neither leased nor the last copy of its contents.
 * - The addresses of a slot that is pinned or captured change in tn_scope_scratch_reserve and
 *   tn_scope_scratch_release only.
 */
#include "scratch_slot.h"

#include "books.h"
#include "canary.h"
#include "format_table.h"
#include "host_alloc.h"
#include "plane_memory.h"
#include "plane_order.h"
#include "plane_policy.h"
#include "plane_transition.h"
#include "scope.h"

/* ---- which slot, and its size --------------------------------------------------------------- */

/* The scope whose slot a tensor in `scope` uses: the nearest that has one, else the root. */
static tn__scope_object *slot_scope_of(tn__scope_object *scope) {
    while (!scope->slot && scope->parent)
        scope = scope->parent;
    return scope;
}

static size_t offset_of_scales(size_t data_bytes) {
    size_t mask = TN__SCRATCH_PART_ALIGNMENT - 1;
    return (data_bytes + mask) & ~mask;
}

/* The most that a plane of the tensor takes in a buffer. */
static size_t bytes_for(const tn__tensor_object *tensor) {
    size_t most = 0;
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        tn_plane_layout layout;
        if (!tn__format_has_plane(tensor->format, (tn_plane)plane)) continue;
        TN_CHECK(tn__format_layout(tensor->format, tensor->dtype, tensor->rows, tensor->cols,
                                   (tn_plane)plane, &layout) == TN_OK);
        size_t bytes = offset_of_scales(layout.data_bytes) + layout.scale_bytes;
        if (bytes > most) most = bytes;
    }
    return most;
}

/* The largest of all tensors that would use a slot of `root`. */
static size_t largest_for(tn__scope_object *root) {
    size_t most = 0;
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        if (scope != root && slot_scope_of(scope) != slot_scope_of(root)) continue;
        for (tn__tensor_object *tensor = scope->first_tensor; tensor; tensor = tensor->next) {
            if (tn__tensor_policy(tensor) != TN_POLICY_SCRATCH) continue;
            size_t bytes = bytes_for(tensor);
            if (bytes > most) most = bytes;
        }
    }
    return most;
}

static size_t capacity_of(const tn__scratch_buffer *buffer) {
    return buffer->memory ? buffer->memory->planes[TN_PLANE_DATA].bytes[TN__PART_DATA] : 0;
}

int tn__scratch_takes(const tn__tensor_object *tensor, tn_plane plane) {
    tn_plane source;
    const char *why;
    if (tensor->rows == 0 || tensor->cols == 0) return 0;
    if (!tn__format_source(tensor->format, plane, &source, &why)) return 0;
    return tn__tensor_policy(tensor) == TN_POLICY_SCRATCH;
}

/* ---- slots come and go ----------------------------------------------------------------------- */

/* The scope's slot; made if it has none, then without memory. */
static tn_status open_slot(tn__scope_object *scope, tn__scratch_slot **out) {
    if (!scope->slot) {
        tn__scratch_slot *slot = tn__host_alloc(1, sizeof *slot);
        if (!slot) return TN_OUT_OF_HOST_MEMORY;
        slot->scope = scope;
        slot->buffer_count = 1;
        for (int i = 0; i < TN__SCRATCH_BUFFERS_MAX; i++)
            slot->buffers[i].slot = slot;
        scope->slot = slot;
    }
    *out = scope->slot;
    return TN_OK;
}

void tn__scratch_delete(tn__scope_object *scope) {
    tn__host_free(scope->slot);
    scope->slot = NULL;
}

static int has_memory(const tn__scratch_slot *slot) {
    for (int i = 0; i < slot->buffer_count; i++) {
        if (slot->buffers[i].memory) return 1;
    }
    return 0;
}

/* A slot that a failing call made goes again. */
static void close_if_new(tn__scope_object *scope, int is_new) {
    if (is_new && scope->slot && !has_memory(scope->slot)) tn__scratch_delete(scope);
}

/* ---- residents ------------------------------------------------------------------------------ */

static tn__plane_object *memory_of(const tn__scratch_buffer *buffer) {
    return &buffer->memory->planes[TN_PLANE_DATA];
}

static tn__plane_object *resident_of(const tn__scratch_buffer *buffer) {
    return &buffer->resident->planes[buffer->plane];
}

static tn_status check_displace(const tn__scratch_buffer *buffer) {
    if (!buffer->resident) return TN_OK;
    return tn__transition_check_drop(buffer->resident, buffer->plane,
                                     "deriving another plane into its scratch slot");
}

/* Its memory is not the pool's to be told of, so nothing can fail. */
static void displace(const tn__scratch_buffer *buffer) {
    if (!buffer->resident) return;
    TN_CHECK(tn__transition_drop_announced(buffer->resident, buffer->plane, NULL) == TN_OK);
    TN_ASSERT(!buffer->resident);
}

void tn__scratch_leave(tn__plane_object *at) {
    tn__scratch_buffer *buffer = at->buffer;
    tn__plane_order_move(at, memory_of(buffer));
    buffer->resident = NULL;
    at->buffer = NULL;
}

void tn__scratch_vacate(tn__scope_object *root) {
    for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
        for (int i = 0; scope->slot && i < scope->slot->buffer_count; i++)
            displace(&scope->slot->buffers[i]);
    }
}

tn_status tn__scratch_leave_for(tn__tensor_object *tensor, const tn__scope_object *scope) {
    const tn__scope_object *to = slot_scope_of((tn__scope_object *)scope);
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < TN_PLANE_COUNT; i++) {
            const tn__scratch_buffer *buffer = tensor->planes[i].buffer;
            if (!buffer || buffer->slot->scope == to) continue;
            if (pass == 0)
                TN_TRY(tn__transition_check_drop(tensor, (tn_plane)i, "moving its tensor"));
            else
                displace(buffer);
        }
    }
    return TN_OK;
}

/* ---- memory --------------------------------------------------------------------------------- */

static tn_status make_memory(tn__scope_object *scope, size_t bytes, tn_stream stream,
                             uint64_t stream_id, tn__tensor_object **out) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn__tensor_object *tensor = NULL;
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.shape[0] = (int64_t)bytes;
    config.name = "scratch";
    if (bytes > (size_t)TN__ELEMENTS_MAX) {
        return TN_FAIL(TN_OUT_OF_DEVICE_MEMORY,
                       "the scratch slot of scope %s would have %zu bytes a buffer: no device has "
                       "as many",
                       scope->name, bytes);
    }
    TN_TRY(tn__scope_add_tensor(scope, &config, &tensor));
    tensor->is_of_library = 1;
    tn_status status = tn__transition_make(tensor, TN_PLANE_DATA, stream, stream_id);
    if (status != TN_OK) {
        tn__scope_delete_tensor(tensor);
        return status;
    }
    *out = tensor;
    return TN_OK;
}

/* Buffers first to last - 1, or those of them that are smaller than `bytes`. */
typedef struct growth {
    tn__scratch_slot *slot;
    int first, last;
    size_t bytes;
    tn__tensor_object *made[TN__SCRATCH_BUFFERS_MAX];
} growth;

static int must_grow(const growth *g, int i) {
    return capacity_of(&g->slot->buffers[i]) < g->bytes;
}

static tn_status make_larger(growth *g, const tn__plane_use *on) {
    for (int i = g->first; i < g->last; i++) {
        if (!must_grow(g, i)) continue;
        TN_TRY(make_memory(g->slot->scope, g->bytes, on->stream, on->stream_id, &g->made[i]));
    }
    return TN_OK;
}

/* The uses of a buffer are its resident's to tell. */
static tn_status announce_end(const tn__scratch_buffer *buffer, const tn__plane_use *on) {
    if (!buffer->memory) return TN_OK;
    if (buffer->resident) {
        TN_TRY(tn__plane_memory_announce(buffer->slot->scope->books, resident_of(buffer),
                                         on->stream, on->stream_id));
    }
    return tn__transition_announce_empty(buffer->memory, on);
}

/* What was announced is freed; if the driver refuses even so, with its scope. */
static tn_status end_memory(tn__tensor_object *memory, const tn__plane_use *on) {
    if (!memory) return TN_OK;
    TN_TRY(tn__transition_empty(memory, on));
    tn__scope_delete_tensor(memory);
    return TN_OK;
}

static void give_up_growth(growth *g, const tn__plane_use *on) {
    tn__saved_error error;
    tn__error_save(&error);
    for (int i = g->first; i < g->last; i++) {
        if (!g->made[i] || tn__transition_announce_empty(g->made[i], on) != TN_OK) continue;
        (void)end_memory(g->made[i], on);
    }
    tn__error_restore(&error);
}

/* New memory first, so that nothing has changed if there is none; what was there is freed in the
 * order of the stream. All residents are displaceable. */
static tn_status grow(tn__scratch_slot *slot, int first, int last, size_t bytes,
                      const tn__plane_use *on) {
    growth g = {.slot = slot, .first = first, .last = last, .bytes = bytes};
    tn_status status = make_larger(&g, on);
    for (int i = first; i < last && status == TN_OK; i++) {
        if (g.made[i]) status = announce_end(&slot->buffers[i], on);
    }
    if (status != TN_OK) {
        give_up_growth(&g, on);
        return status;
    }
    for (int i = first; i < last; i++) {
        tn__tensor_object *old = slot->buffers[i].memory;
        if (!g.made[i]) continue;
        displace(&slot->buffers[i]);
        slot->buffers[i].memory = g.made[i];
        tn_status ended = end_memory(old, on);
        if (status == TN_OK) status = ended;
    }
    return status;
}

static tn_status refuse_growth(const tn__scratch_slot *slot, size_t bytes) {
    return TN_FAIL(
        TN_INVALID_STATE,
        "the scratch slot of scope %s has %zu bytes a buffer and %zu are needed, but %s: "
        "call tn_scope_scratch_reserve again when nothing relies on its addresses",
        slot->scope->name, capacity_of(&slot->buffers[0]), bytes,
        slot->is_captured ? "a graph may hold its addresses"
                          : "tn_scope_scratch_reserve has pinned it");
}

/* ---- taking --------------------------------------------------------------------------------- */

static tn__scratch_buffer *in_turn(tn__scratch_slot *slot, int turn) {
    return &slot->buffers[(slot->next + turn) % slot->buffer_count];
}

/* The next one that nobody is in, else the next whose resident may go; the caller hears why the one
 * whose turn it is may not. */
static tn_status choose_buffer(tn__scratch_slot *slot, tn__scratch_buffer **out) {
    tn__saved_error before;
    for (int turn = 0; turn < slot->buffer_count; turn++) {
        *out = in_turn(slot, turn);
        if (!(*out)->resident) return TN_OK;
    }
    tn__error_save(&before);
    for (int turn = 0; turn < slot->buffer_count; turn++) {
        *out = in_turn(slot, turn);
        if (check_displace(*out) != TN_OK) continue;
        tn__error_restore(&before);
        return TN_OK;
    }
    *out = in_turn(slot, 0);
    return check_displace(*out);
}

static tn_status prepare_buffer(tn__scratch_buffer *buffer, size_t needed, tn__tensor_object *of,
                                const tn__plane_use *on) {
    tn__scratch_slot *slot = buffer->slot;
    if (capacity_of(buffer) < needed) {
        if (buffer->memory && (slot->is_pinned || slot->is_captured)) {
            return refuse_growth(slot, needed);
        }
        size_t largest = largest_for(slot->scope);
        TN_ASSERT(largest >= bytes_for(of));
        int index = (int)(buffer - slot->buffers);
        return grow(slot, index, index + 1, largest > needed ? largest : needed, on);
    }
    if (TN__CANARY(TN__CANARY_PLANE_SLOT)) return TN_OK;
    tn__plane_object *holder = buffer->resident ? resident_of(buffer) : memory_of(buffer);
    return tn__plane_order_before(slot->scope->books, holder, TN_WRITE, on->stream, on->stream_id);
}

void tn__scratch_enter(tn__scratch_buffer *buffer, tn__tensor_object *tensor, tn_plane plane) {
    tn__plane_object *object = &tensor->planes[plane], *memory = memory_of(buffer);
    tn_plane_layout layout;
    TN_ASSERT(!buffer->resident);
    TN_CHECK(tn__format_layout(tensor->format, tensor->dtype, tensor->rows, tensor->cols, plane,
                               &layout) == TN_OK);
    char *start = memory->blocks[TN__PART_DATA];
    void *const blocks[] = {start, start + offset_of_scales(layout.data_bytes)};
    TN_CHECK(tn__plane_memory_borrow(tensor, plane, TN__MEMORY_SLOT, blocks) == TN_OK);
    tn__plane_order_move(memory, object);
    object->buffer = buffer;
    buffer->resident = tensor;
    buffer->plane = plane;
}

static void set_capture(tn__scratch_buffer *buffer, uint64_t capture) {
    buffer->capture = capture;
    if (capture) buffer->slot->is_captured = 1;
}

tn_status tn__scratch_derive_again(tn__scratch_buffer *buffer, tn_stream stream) {
    uint64_t capture = 0;
    TN_TRY(tn__plane_order_capture(buffer->slot->scope->books->device, stream, &capture));
    set_capture(buffer, capture);
    return TN_OK;
}

static tn_status take_in(tn__scratch_slot *slot, tn__tensor_object *tensor, tn_plane plane,
                         const tn__plane_use *on) {
    tn__scratch_buffer *buffer = NULL;
    uint64_t capture = 0;
    TN_TRY(tn__plane_order_capture(slot->scope->books->device, on->stream, &capture));
    TN_TRY(choose_buffer(slot, &buffer));
    TN_CHECK(buffer != NULL);
    TN_TRY(prepare_buffer(buffer, bytes_for(tensor), tensor, on));
    displace(buffer);
    tn__scratch_enter(buffer, tensor, plane);
    set_capture(buffer, capture);
    slot->next = (int)(buffer - slot->buffers + 1) % slot->buffer_count;
    return TN_OK;
}

tn_status tn__scratch_take(tn__tensor_object *tensor, tn_plane plane, tn_stream stream,
                           uint64_t stream_id) {
    tn__scope_object *scope = slot_scope_of(tensor->scope);
    tn__plane_use on = tn__plane_use_on(stream, stream_id);
    tn__scratch_slot *slot = NULL;
    int is_new = !scope->slot;
    TN_ASSERT(tn__scratch_takes(tensor, plane));
    TN_TRY(open_slot(scope, &slot));
    tn_status status = take_in(slot, tensor, plane, &on);
    if (status != TN_OK) close_if_new(scope, is_new);
    return status;
}

tn_status tn__scratch_is_current(const tn__plane_object *plane, tn_stream stream, int *out) {
    const tn__scratch_buffer *buffer = plane->buffer;
    uint64_t capture = 0;
    *out = 1;
    if (!buffer) return TN_OK;
    tn_device *device = buffer->slot->scope->books->device;
    TN_TRY(tn__plane_order_capture(device, stream, &capture));
    *out = capture == buffer->capture;
    if (!capture && buffer->slot->is_captured && !plane->first_lease) *out = 0;
    return TN_OK;
}

/* ---- the public part ------------------------------------------------------------------------- */

tn_status tn_scope_scratch_config_set(tn_scope scope, const tn_scratch_config *config) {
    tn__scope_object *object;
    tn__scratch_slot *slot = NULL;
    TN_REQUIRE(config && config->size == sizeof *config,
               "tn_scope_scratch_config_set: config is not TN_SCRATCH_CONFIG_INIT");
    TN_REQUIRE(config->buffers >= 1 && config->buffers <= TN__SCRATCH_BUFFERS_MAX,
               "tn_scope_scratch_config_set: %d buffers are not 1 to %d", config->buffers,
               (int)TN__SCRATCH_BUFFERS_MAX);
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_status status = TN_OK;
    if (object->slot && has_memory(object->slot)) {
        status = TN_FAIL(TN_INVALID_STATE,
                         "the scratch slot of scope %s has memory: call tn_scope_scratch_release "
                         "before it is configured anew",
                         object->name);
    }
    if (status == TN_OK) status = open_slot(object, &slot);
    if (status == TN_OK) {
        slot->buffer_count = config->buffers;
        slot->next = 0;
    }
    tn__scope_unlock(object);
    return status;
}

/* All buffers of the size, or none has changed. */
static tn_status reserve(tn__scratch_slot *slot, const tn__plane_use *on) {
    size_t bytes = largest_for(slot->scope);
    int grows = 0;
    if (bytes == 0) return TN_OK;
    for (int i = 0; i < slot->buffer_count; i++) {
        if (capacity_of(&slot->buffers[i]) >= bytes) continue;
        TN_TRY(check_displace(&slot->buffers[i]));
        grows = 1;
    }
    if (grows) {
        TN_TRY(grow(slot, 0, slot->buffer_count, bytes, on));
        slot->is_captured = 0;
    }
    slot->is_pinned = 1;
    return TN_OK;
}

static tn_status use_on(const tn__scope_object *scope, tn_stream stream, tn__plane_use *out) {
    *out = tn__plane_use_on(stream, 0);
    return tn__books_stream_id(scope->books, stream, &out->stream_id);
}

tn_status tn_scope_scratch_reserve(tn_scope scope, tn_stream stream) {
    tn__scope_object *object;
    tn__plane_use on;
    tn__scratch_slot *slot = NULL;
    TN_TRY(tn__scope_acquire(scope, &object));
    int is_new = !object->slot;
    tn_status status = use_on(object, stream, &on);
    if (status == TN_OK) status = open_slot(object, &slot);
    if (status == TN_OK) status = reserve(slot, &on);
    if (status != TN_OK) close_if_new(object, is_new);
    tn__scope_unlock(object);
    return status;
}

static tn_status release(tn__scope_object *scope, const tn__plane_use *on) {
    tn__scratch_slot *slot = scope->slot;
    for (int i = 0; i < slot->buffer_count; i++)
        TN_TRY(check_displace(&slot->buffers[i]));
    for (int i = 0; i < slot->buffer_count; i++)
        TN_TRY(announce_end(&slot->buffers[i], on));
    for (int i = 0; i < slot->buffer_count; i++) {
        displace(&slot->buffers[i]);
        TN_TRY(end_memory(slot->buffers[i].memory, on));
        slot->buffers[i].memory = NULL;
    }
    tn__scratch_delete(scope);
    return TN_OK;
}

tn_status tn_scope_scratch_release(tn_scope scope, tn_stream stream) {
    tn__scope_object *object;
    tn__plane_use on;
    TN_TRY(tn__scope_acquire(scope, &object));
    tn_status status = object->slot ? use_on(object, stream, &on) : TN_OK;
    if (status == TN_OK && object->slot) status = release(object, &on);
    tn__scope_unlock(object);
    return status;
}
