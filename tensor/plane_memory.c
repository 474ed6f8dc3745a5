/* The memory of planes, allocated from and freed to the pool of the tensor's scope.
 *
 * Invariant: the ledger has every byte that a plane has, at every return from here.
 */
#include "plane_memory.h"

#include "adopt.h"
#include "format_table.h"
#include "ledger.h"
#include "offload.h"
#include "plane_order.h"
#include "pool_owned.h"
#include "scratch_slot.h"

static tn_lifetime lifetime_in(tn_scope_kind kind) {
    switch (kind) {
    case TN_SCOPE_PROCESS:
    case TN_SCOPE_MODEL: return TN_LIFETIME_PERSISTENT;
    case TN_SCOPE_STEP:
    case TN_SCOPE_SAVED: return TN_LIFETIME_STEP;
    case TN_SCOPE_LAYER: return TN_LIFETIME_LAYER;
    case TN_SCOPE_OP: return TN_LIFETIME_OP;
    }
    return TN_LIFETIME_AUTO;
}

/* Both blocks or none; if the pool would not even take the first one back, that one. */
static tn_status allocate(const tn__tensor_object *tensor, tn_pool *pool,
                          const size_t bytes[TN__PART_COUNT], tn_stream stream,
                          void *blocks[TN__PART_COUNT]) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    options.lifetime = lifetime_in(tensor->scope->kind);
    options.owner = tensor->name;
    /* In host memory a plane lies only for a while. */
    if (pool == tensor->scope->books->pool) options.flags = tensor->block_flags;
    for (int part = 0; part < TN__PART_COUNT; part++) {
        tn_status status = tn__alloc_owned(pool, bytes[part], stream, &options, &blocks[part]);
        if (status == TN_OK) continue;
        tn__saved_error error;
        tn__error_save(&error);
        if (part > 0 && tn_free(blocks[0], stream) == TN_OK) blocks[0] = NULL;
        tn__error_restore(&error);
        return status;
    }
    return TN_OK;
}

/* What the ledger has of a plane. */
typedef struct booked {
    size_t owned[TN__PART_COUNT];
    tn__elsewhere elsewhere;
} booked;

static booked booked_of(const tn__plane_object *plane) {
    booked bytes;
    tn__plane_owned_bytes(plane, bytes.owned);
    bytes.elsewhere.foreign = tn__plane_bytes_in(plane, TN__MEMORY_FOREIGN);
    bytes.elsewhere.offloaded = tn__plane_bytes_in(plane, TN__MEMORY_HOST);
    return bytes;
}

static void book_change(const tn__tensor_object *tensor, tn_plane plane, const booked *before,
                        const booked *after) {
    tn__ledger_change_plane(tensor, plane, before->owned, after->owned);
    tn__ledger_change_elsewhere(tensor->scope, &before->elsewhere, &after->elsewhere);
}

static void book(const tn__tensor_object *tensor, tn_plane plane, const booked *before) {
    booked after = booked_of(&tensor->planes[plane]);
    book_change(tensor, plane, before, &after);
}

/* ---- taking -------------------------------------------------------------------------------- */

/* The first block or none; a later one that is refused stays. */
static tn_status free_blocks(tn__plane_object *plane, tn_stream stream) {
    int freed = 0;
    for (int part = 0; part < TN__PART_COUNT; part++) {
        void *block = plane->blocks[part];
        if (!block) continue;
        tn_status status = stream == TN__NO_STREAM ? tn__free_told(block) : tn_free(block, stream);
        if (status != TN_OK && freed == 0) return status;
        if (status != TN_OK) break;
        plane->blocks[part] = NULL;
        plane->bytes[part] = 0;
        freed++;
    }
    return TN_OK;
}

/* What the pool does not take back now remains. */
static void undo_take(tn__plane_object *at, tn_stream stream) {
    tn__saved_error error;
    tn__error_save(&error);
    (void)free_blocks(at, stream);
    tn__error_restore(&error);
}

static tn_status take_from(tn_pool *pool, tn__tensor_object *tensor, tn_plane plane,
                           tn__plane_object *at, const tn__plane_use *on) {
    const tn_plane_layout *layout = &tensor->layouts[plane];
    const size_t bytes[TN__PART_COUNT] = {layout->data_bytes, layout->scale_bytes};
    booked before = booked_of(&tensor->planes[plane]);
    const tn__books *books = tensor->scope->books;
    tn_status status = allocate(tensor, pool, bytes, on->stream, at->blocks);
    at->kind = pool == books->pool ? TN__MEMORY_OWNED : TN__MEMORY_HOST;
    for (int part = 0; part < TN__PART_COUNT; part++)
        at->bytes[part] = at->blocks[part] ? bytes[part] : 0;
    if (status == TN_OK) {
        status = tn__plane_order_set_home(books, at, pool, on->stream, on->stream_id);
        if (status != TN_OK) undo_take(at, on->stream);
    }
    book(tensor, plane, &before);
    return status;
}

tn_status tn__plane_memory_take(tn__tensor_object *tensor, tn_plane plane, tn__plane_object *at,
                                tn_stream stream, uint64_t stream_id) {
    tn__plane_use on = tn__plane_use_on(stream, stream_id);
    return take_from(tensor->scope->books->pool, tensor, plane, at, &on);
}

tn_status tn__plane_memory_take_host(tn__tensor_object *tensor, tn_plane plane,
                                     tn__plane_object *at) {
    const tn__offload *offload = tensor->scope->books->offload;
    return take_from(offload->pool, tensor, plane, at, &offload->copy);
}

tn_status tn__plane_memory_borrow(tn__tensor_object *tensor, tn_plane plane, tn__memory_kind kind,
                                  void *const blocks[TN__PART_COUNT]) {
    tn__plane_object *object = &tensor->planes[plane];
    tn_plane_layout layout;
    TN_ASSERT(kind != TN__MEMORY_OWNED);
    TN_ASSERT(!object->blocks[TN__PART_DATA] && !object->blocks[TN__PART_SCALE]);
    TN_TRY(tn__format_layout(tensor->format, tensor->dtype, tensor->rows, tensor->cols, plane,
                             &layout));
    size_t bytes[TN__PART_COUNT] = {layout.data_bytes, layout.scale_bytes};
    object->kind = kind;
    for (int part = 0; part < TN__PART_COUNT; part++) {
        TN_ASSERT(blocks[part] || bytes[part] == 0);
        object->blocks[part] = bytes[part] > 0 ? blocks[part] : NULL;
        object->bytes[part] = bytes[part];
    }
    return TN_OK;
}

tn_status tn__plane_memory_adopt(tn__tensor_object *tensor, tn_plane plane, tn__foreign *foreign,
                                 void *const blocks[TN__PART_COUNT]) {
    tn__plane_object *object = &tensor->planes[plane];
    booked before = booked_of(object);
    TN_TRY(tn__plane_order_set_home(foreign->books, object, NULL, foreign->stream,
                                    foreign->stream_id));
    TN_TRY(tn__plane_memory_borrow(tensor, plane, TN__MEMORY_FOREIGN, blocks));
    object->foreign = foreign;
    book(tensor, plane, &before);
    return TN_OK;
}

/* ---- giving back --------------------------------------------------------------------------- */

/* Host memory is used on its own stream only, and freed there: of that there is nothing to tell. */
tn_status tn__plane_memory_announce(const tn__books *books, tn__plane_object *at, tn_stream stream,
                                    uint64_t stream_id) {
    if (at->kind == TN__MEMORY_FOREIGN) return tn__foreign_await(at);
    TN_TRY(tn__plane_order_record_rest(books, at, stream_id));
    return stream == TN__NO_STREAM ? TN_OK : tn__plane_order_tell_pool(at, stream);
}

/* Memory that is not ours is only forgotten. */
static void forget_blocks(tn__plane_object *plane) {
    if (plane->buffer) tn__scratch_leave(plane);
    for (int part = 0; part < TN__PART_COUNT; part++) {
        plane->blocks[part] = NULL;
        plane->bytes[part] = 0;
    }
    plane->kind = TN__MEMORY_OWNED;
    plane->foreign = NULL;
}

static void give_to_owner(tn__plane_object *plane) {
    tn__foreign *foreign = plane->foreign;
    forget_blocks(plane);
    tn__foreign_release(foreign);
}

static tn_status free_host_blocks(const tn__books *books, tn__plane_object *plane) {
    TN_TRY(free_blocks(plane, books->offload->copy.stream));
    if (!plane->blocks[TN__PART_DATA] && !plane->blocks[TN__PART_SCALE]) {
        plane->kind = TN__MEMORY_OWNED;
    }
    return TN_OK;
}

static tn_status give_memory_back(const tn__books *books, tn__plane_object *at, tn_stream stream) {
    switch (at->kind) {
    case TN__MEMORY_OWNED: return free_blocks(at, stream);
    case TN__MEMORY_HOST: return free_host_blocks(books, at);
    case TN__MEMORY_FOREIGN: give_to_owner(at); return TN_OK;
    case TN__MEMORY_SLOT: forget_blocks(at);
    }
    return TN_OK;
}

tn_status tn__plane_memory_give_back(tn__tensor_object *tensor, tn_plane plane,
                                     tn__plane_object *at, tn_stream stream) {
    booked before = booked_of(&tensor->planes[plane]);
    TN_TRY(give_memory_back(tensor->scope->books, at, stream));
    book(tensor, plane, &before);
    return TN_OK;
}

void tn__plane_memory_move(tn__tensor_object *from, tn_plane plane, tn__tensor_object *to) {
    const booked none = {0};
    booked bytes = booked_of(&from->planes[plane]);
    book_change(from, plane, &bytes, &none);
    tn__plane_order_swap(&from->planes[plane], &to->planes[plane]);
    book_change(to, plane, &none, &bytes);
}
