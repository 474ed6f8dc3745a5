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

static void add_item(tn__late_frees *late, tn__late_free *item) {
    pthread_mutex_lock(&late->mutex);
    push(&late->list, item);
    late->bytes += item->bytes;
    pthread_mutex_unlock(&late->mutex);
}

tn_status tn__late_frees_add(tn__late_frees *late, void *block, tn_stream stream, size_t bytes,
                             int is_promised) {
    tn__late_free *item = NULL;
    if (is_promised) {
        pthread_mutex_lock(&late->mutex);
        item = pop(&late->spare);
        pthread_mutex_unlock(&late->mutex);
    }
    if (!item) item = tn__host_alloc(1, sizeof *item);
    if (!item) return TN_OUT_OF_HOST_MEMORY;
    *item = (tn__late_free){NULL, block, stream, bytes};
    add_item(late, item);
    return TN_OK;
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

static void free_list(tn__adapter *adapter, tn__late_free *list, int is_idle) {
    while (list) {
        tn__late_free *item = pop(&list);
        tn_status status = free_item(adapter, item, is_idle);
        if (status != TN_OK && status != TN_INVALID_ARGUMENT) {
            add_item(&adapter->late, item);
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
