/* Frees that can not be done at once: see late_frees.h. */
#include "adapter_device.h"
#include "host_alloc.h"

/* A wait is worth it for this part of the device's memory, and never for less than the least. */
enum { PART_OF_DEVICE = 64, LEAST_BYTES = 64 << 20 };

void tn__late_frees_init(tn__late_frees *late, size_t device_bytes) {
    size_t part = device_bytes / PART_OF_DEVICE;
    pthread_mutex_init(&late->mutex, NULL);
    pthread_cond_init(&late->flushed, NULL);
    late->bytes_max = part > LEAST_BYTES ? part : LEAST_BYTES;
}

static tn__late_free *pop(tn__late_free **list) {
    tn__late_free *item = *list;
    if (item) *list = item->next;
    return item;
}

static void push(tn__late_free **list, tn__late_free *item) {
    item->next = *list;
    *list = item;
}

void tn__late_frees_deinit(tn__late_frees *late) {
    pthread_cond_destroy(&late->flushed);
    pthread_mutex_destroy(&late->mutex);
    while (late->spare)
        tn__host_free(pop(&late->spare));
    while (late->list)
        tn__host_free(pop(&late->list));
}

/* ---- add ------------------------------------------------------------------------------------- */

tn_status tn__late_frees_promise(tn__late_frees *late) {
    tn__late_free *item = tn__host_alloc(1, sizeof *item);
    if (!item) return TN_OUT_OF_HOST_MEMORY;
    pthread_mutex_lock(&late->mutex);
    push(&late->spare, item);
    pthread_mutex_unlock(&late->mutex);
    return TN_OK;
}

void tn__late_frees_unpromise(tn__late_frees *late) {
    tn__late_free *item;
    pthread_mutex_lock(&late->mutex);
    item = pop(&late->spare);
    pthread_mutex_unlock(&late->mutex);
    tn__host_free(item);
}

/* Blocks begin at multiples of 512 bytes. */
static tn__late_free **bucket_of(tn__late_frees *late, const void *block) {
    size_t at = ((uintptr_t)block / 512 * 0x9E3779B97F4A7C15u >> 40) % TN__LATE_FREE_BUCKETS;
    return &late->buckets[at];
}

/* Where the block's entry is, or would go. */
static tn__late_free **place_of(tn__late_frees *late, const void *block) {
    tn__late_free **place = bucket_of(late, block);
    while (*place && (*place)->block != block)
        place = &(*place)->next_in_bucket;
    return place;
}

static tn_status refuse_locked(tn__late_frees *late, const void *block) {
    TN_REQUIRE(!*place_of(late, block), "the block at %p was freed before: it waits to go back",
               block);
    return TN_OK;
}

tn_status tn__late_frees_refuse(tn__late_frees *late, const void *block) {
    tn_status status;
    if (atomic_load(&late->count) == 0) return TN_OK;
    pthread_mutex_lock(&late->mutex);
    status = refuse_locked(late, block);
    pthread_mutex_unlock(&late->mutex);
    return status;
}

static void add_item(tn__late_frees *late, tn__late_free *item) {
    push(&late->list, item);
    late->bytes += item->bytes;
}

static tn_status add_locked(tn__late_frees *late, const tn__late_free *added, int is_promised) {
    tn__late_free *item = NULL;
    TN_TRY(refuse_locked(late, added->block));
    if (is_promised) item = pop(&late->spare);
    if (!item) item = tn__host_alloc(1, sizeof *item);
    if (!item) return TN_OUT_OF_HOST_MEMORY;
    *item = *added;
    *place_of(late, item->block) = item;
    atomic_fetch_add(&late->count, 1);
    add_item(late, item);
    return TN_OK;
}

tn_status tn__late_frees_add(tn__late_frees *late, void *block, tn_stream stream, size_t bytes,
                             int is_promised) {
    const tn__late_free added = {.block = block, .stream = stream, .bytes = bytes};
    tn_status status;
    pthread_mutex_lock(&late->mutex);
    status = add_locked(late, &added, is_promised);
    pthread_mutex_unlock(&late->mutex);
    return status;
}

int tn__late_frees_are_many(tn__late_frees *late) {
    int are_many;
    pthread_mutex_lock(&late->mutex);
    are_many = late->bytes >= late->bytes_max;
    pthread_mutex_unlock(&late->mutex);
    return are_many;
}

/* ---- flush ----------------------------------------------------------------------------------- */

/* Takes the whole list: what is added meanwhile was not there when the devices were waited for. If
 * there is one, it is given back by end_flush. */
static tn__late_free *take_list(tn__late_frees *late, int may_wait, size_t *bytes) {
    tn__late_free *list;
    pthread_mutex_lock(&late->mutex);
    while (may_wait && late->flushes > 0)
        pthread_cond_wait(&late->flushed, &late->mutex);
    list = late->list;
    *bytes = late->bytes;
    late->list = NULL;
    late->bytes = 0;
    if (list) late->flushes++;
    pthread_mutex_unlock(&late->mutex);
    return list;
}

static void end_flush(tn__late_frees *late) {
    pthread_mutex_lock(&late->mutex);
    late->flushes--;
    pthread_cond_broadcast(&late->flushed);
    pthread_mutex_unlock(&late->mutex);
}

/* TN_INVALID_STATE: not yet. A stream that has been ended orders nothing any more. */
static tn_status free_item(tn__adapter *adapter, tn__late_free *item, int is_idle) {
    tn_status status;
    if (item->bytes > 0) {
        return is_idle ? tn__graph_memory_free(adapter, item->block, NULL) : TN_INVALID_STATE;
    }
    status = tn__graph_memory_free(adapter, item->block, item->stream);
    if (status != TN_INVALID_ARGUMENT) return status;
    return tn_block_info(item->block, &item->bytes, NULL) == TN_OK ? TN_INVALID_STATE : status;
}

static void set_waiting(tn__late_frees *late, tn__late_free *item, int is_waiting) {
    tn__late_free **place;
    pthread_mutex_lock(&late->mutex);
    place = bucket_of(late, item->block);
    while (!is_waiting && *place != item)
        place = &(*place)->next_in_bucket;
    if (is_waiting) { /* beside the entry of a second free, if one has come meanwhile */
        item->next_in_bucket = *place;
        *place = item;
        atomic_fetch_add(&late->count, 1);
        add_item(late, item);
    } else {
        *place = item->next_in_bucket;
        atomic_fetch_sub(&late->count, 1);
    }
    pthread_mutex_unlock(&late->mutex);
}

/* Out of its bucket before it is freed, since its address may then be another block's at once. */
static void free_list(tn__adapter *adapter, tn__late_free *list, int is_idle) {
    while (list) {
        tn__late_free *item = pop(&list);
        tn_status status;
        set_waiting(&adapter->late, item, 0);
        status = free_item(adapter, item, is_idle);
        if (status != TN_OK && status != TN_INVALID_ARGUMENT) {
            set_waiting(&adapter->late, item, 1);
            continue;
        }
        if (status == TN_OK) {
            atomic_fetch_add(&adapter->late.freed, 1);
        } else {
            tn__framework_warn("a block was freed twice");
        }
        tn__host_free(item);
    }
}

void tn__late_frees_flush(tn__adapter *adapter, int may_wait) {
    size_t bytes;
    tn__late_free *list = take_list(&adapter->late, may_wait, &bytes);
    int is_idle = 0;
    if (!list) return;
    tn__error_scope_begin();
    if (may_wait && bytes > 0) is_idle = tn__adapters_settle();
    free_list(adapter, list, is_idle);
    (void)tn__error_scope_end(TN_OK);
    end_flush(&adapter->late);
}
