/* Freed memory until nothing can use it any more: what cuMemFree means, without its wait.
 *
 *     frees:  x x x [fence] x x [fence] x x x
 *             oldest         newest     open       batches of a device
 *
 * cuMemFree waits until all work is over that any stream had been given. Here a freed block joins
 * the open batch of its device. A fence closes the batch: an event behind all work of the device at
 * that moment, that of streams that nobody can name too (cuCtxRecordEvent), on each device that the
 * program uses, since a peer may use the memory. When the events have come the blocks are idle
 * and go back to their pool. So a free costs no driver call, and a fence is one event for many
 * frees.
 *
 * What an allocation waits for here is work that the program had put on its streams before it
 * called cuMemFree, which would have waited for the same: no wait of ours can be one too many.
 *
 * Where the driver has no such event the device is waited for, once a batch. While a stream
 * captures neither is legal: batches stay open.
 *
 * One mutex for all devices, never held in a wait. Invariants under it: a device's waiting_bytes is
 * the sum over its batches, those that a thread waits for included; a batch has events only of
 * devices that are in the table.
 */
#include "dropin.h"
#include "host_alloc.h"

enum { BATCH_BLOCKS_MAX = 256 };
#define BATCH_BYTES_MAX ((size_t)32 << 20)

/* With more than this behind fences the next allocation waits. */
#define WAITING_BYTES_MIN       ((size_t)256 << 20)
#define WAITING_SHARE_OF_DEVICE 16

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wait_ended = PTHREAD_COND_INITIALIZER;

/* ---- events ---------------------------------------------------------------------------------- */

static tn_status take_event(tn__dropin_device *device, tn__event *out) {
    if (device->spare_count == 0) return device->driver->event_create(device->state, out);
    *out = device->spare_events[--device->spare_count];
    return TN_OK;
}

static void spare_event(tn__dropin_device *device, tn__event event) {
    if (device->spare_count == device->spare_capacity) {
        size_t capacity = device->spare_capacity ? 2 * device->spare_capacity : 16;
        tn__event *grown = tn__host_realloc(device->spare_events, device->spare_capacity, capacity,
                                            sizeof(tn__event));
        if (!grown) {
            (void)device->driver->event_destroy(device->state, event);
            return;
        }
        device->spare_events = grown;
        device->spare_capacity = capacity;
    }
    device->spare_events[device->spare_count++] = event;
}

/* A device is there as long as a batch has an event of it. */
static void spare_events(tn__dropin_batch *batch) {
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        if (batch->events[i]) spare_event(tn__dropin.devices[i], batch->events[i]);
        batch->events[i] = NULL;
    }
}

/* ---- batches --------------------------------------------------------------------------------- */

/* All of it is idle: to the pools. */
static void release(tn__dropin_device *device, tn__dropin_batch *batch) {
    while (batch->first) {
        tn__dropin_block *block = batch->first;
        batch->first = block->next;
        tn__dropin_give(block);
    }
    device->waiting_bytes -= batch->bytes;
    spare_events(batch);
    tn__host_free(batch);
}

static tn_status record(tn__dropin_batch *batch) {
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        tn__dropin_device *device = tn__dropin.devices[i];
        if (!device) continue;
        TN_TRY(take_event(device, &batch->events[i]));
        TN_TRY(device->driver->event_record_all(device->state, batch->events[i]));
    }
    tn__dropin_count(&tn__dropin.counts.fences);
    return TN_OK;
}

/* Not under the mutex. */
static tn_status wait_for_devices(void) {
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        tn__dropin_device *device = tn__dropin_device_pin(i);
        tn_status status;
        if (!device) continue;
        status = device->driver->synchronize(device->state);
        tn__dropin_device_unpin(device);
        TN_TRY(status);
    }
    tn__dropin_count(&tn__dropin.counts.device_waits);
    return TN_OK;
}

static void append(tn__dropin_device *device, tn__dropin_batch *batch) {
    batch->next = NULL;
    *(device->oldest ? &device->newest->next : &device->oldest) = batch;
    device->newest = batch;
}

static tn__dropin_batch *take_oldest(tn__dropin_device *device) {
    tn__dropin_batch *batch = device->oldest;
    if (batch) device->oldest = batch->next;
    return batch;
}

/* Puts back what could not be closed. */
static void reopen(tn__dropin_device *device, tn__dropin_batch *batch) {
    if (!device->open) {
        device->open = batch;
        return;
    }
    tn__dropin_block **last = &device->open->first;
    while (*last)
        last = &(*last)->next;
    *last = batch->first;
    device->open->count += batch->count;
    device->open->bytes += batch->bytes;
    tn__host_free(batch);
}

/* The mutex is let go where the device has to be waited for. With captures locked. */
static void close_batch(tn__dropin_device *device) {
    tn__dropin_batch *batch = device->open;
    tn_status status;
    device->open = NULL;
    if (record(batch) == TN_OK) {
        append(device, batch);
        return;
    }
    spare_events(batch);
    pthread_mutex_unlock(&mutex);
    status = wait_for_devices();
    pthread_mutex_lock(&mutex);
    if (status == TN_OK) {
        release(device, batch);
    } else {
        reopen(device, batch);
    }
}

/* Both locks are taken in their order. */
static void close_if_legal(tn__dropin_device *device, int is_forced) {
    tn__dropin_devices_open_active();
    int is_legal = tn__dropin_captures_lock();
    pthread_mutex_lock(&mutex);
    const tn__dropin_batch *open = device->open;
    int is_due =
        open && (is_forced || open->count >= BATCH_BLOCKS_MAX || open->bytes >= BATCH_BYTES_MAX);
    if (is_legal && is_due) close_batch(device);
    pthread_mutex_unlock(&mutex);
    tn__dropin_captures_unlock();
}

/* ---- freed ----------------------------------------------------------------------------------- */

/* As the driver does it, wait and all. A block that something may still use is kept for good. */
static void free_at_once(tn__dropin_block *block) {
    tn__dropin_devices_open_active();
    if (wait_for_devices() == TN_OK) {
        tn__dropin_give(block);
    } else {
        tn__dropin_count(&tn__dropin.counts.lost);
        tn__host_free(block);
    }
}

void tn__dropin_fence_add(tn__dropin_block *block) {
    tn__dropin_device *device = block->device;
    int is_due;
    if (tn__dropin.free_waits) {
        free_at_once(block);
        return;
    }
    pthread_mutex_lock(&mutex);
    if (!device->open) device->open = tn__host_alloc(1, sizeof *device->open);
    tn__dropin_batch *open = device->open;
    if (!open) {
        pthread_mutex_unlock(&mutex);
        free_at_once(block);
        return;
    }
    block->next = open->first;
    open->first = block;
    open->count++;
    open->bytes += block->bytes;
    device->waiting_bytes += block->bytes;
    is_due = open->count >= BATCH_BLOCKS_MAX || open->bytes >= BATCH_BYTES_MAX;
    pthread_mutex_unlock(&mutex);
    if (is_due) close_if_legal(device, 0);
}

/* ---- idle again ------------------------------------------------------------------------------ */

static int is_done(const tn__dropin_batch *batch) {
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        const tn__dropin_device *device = tn__dropin.devices[i];
        int is_there = 1;
        if (!batch->events[i]) continue;
        if (device->driver->event_is_done(device->state, batch->events[i], &is_there) != TN_OK) {
            return 0;
        }
        if (!is_there) return 0;
    }
    return 1;
}

/* The event is this thread's alone meanwhile. Its device may leave the table, but does not end. */
static tn_status wait_for_event(tn__dropin_batch *batch, int ordinal) {
    tn__dropin_device *device = NULL;
    tn__event event;
    tn_status status;
    pthread_mutex_lock(&mutex);
    event = batch->events[ordinal];
    if (event) device = tn__dropin_device_pin(ordinal);
    batch->events[ordinal] = NULL;
    pthread_mutex_unlock(&mutex);
    if (!device) return TN_OK;
    status = device->driver->event_synchronize(device->state, event);
    pthread_mutex_lock(&mutex);
    if (tn__dropin.devices[ordinal] != device) {
        (void)device->driver->event_destroy(device->state, event);
    } else if (status == TN_OK) {
        spare_event(device, event);
    } else {
        batch->events[ordinal] = event;
    }
    pthread_mutex_unlock(&mutex);
    tn__dropin_device_unpin(device);
    return status;
}

static tn_status wait_for_batch(tn__dropin_batch *batch) {
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++)
        TN_TRY(wait_for_event(batch, i));
    tn__dropin_count(&tn__dropin.counts.fence_waits);
    return TN_OK;
}

/* Into the hands of this thread, where others find it still; and out of them. */
static tn__dropin_batch *begin_wait(tn__dropin_device *device) {
    tn__dropin_batch *batch;
    pthread_mutex_lock(&mutex);
    batch = take_oldest(device);
    if (batch) {
        batch->next = device->waited;
        device->waited = batch;
    }
    pthread_mutex_unlock(&mutex);
    return batch;
}

static void end_wait(tn__dropin_device *device, const tn__dropin_batch *batch) {
    tn__dropin_batch **at = &device->waited;
    while (*at != batch)
        at = &(*at)->next;
    *at = batch->next;
    pthread_cond_broadcast(&wait_ended);
}

/* 0: there is no batch behind a fence, or it can not be waited for. */
static int wait_for_oldest(tn__dropin_device *device) {
    tn__dropin_batch *batch = begin_wait(device);
    tn_status status;
    if (!batch) return 0;
    status = wait_for_batch(batch);
    pthread_mutex_lock(&mutex);
    end_wait(device, batch);
    if (status == TN_OK) {
        release(device, batch);
    } else {
        append(device, batch);
    }
    pthread_mutex_unlock(&mutex);
    return status == TN_OK;
}

static size_t waiting_max(const tn__dropin_device *device) {
    size_t share = device->memory_bytes / WAITING_SHARE_OF_DEVICE;
    return share > WAITING_BYTES_MIN ? share : WAITING_BYTES_MIN;
}

void tn__dropin_fence_poll(tn__dropin_device *device) {
    int is_too_much;
    pthread_mutex_lock(&mutex);
    while (device->oldest && is_done(device->oldest))
        release(device, take_oldest(device));
    is_too_much = device->waiting_bytes > waiting_max(device);
    pthread_mutex_unlock(&mutex);
    while (is_too_much && wait_for_oldest(device))
        is_too_much = tn__dropin_fence_bytes(device) > waiting_max(device);
}

/* What other threads wait for is on its way back. */
static void await_others(const tn__dropin_device *device) {
    pthread_mutex_lock(&mutex);
    while (device->waited)
        pthread_cond_wait(&wait_ended, &mutex);
    pthread_mutex_unlock(&mutex);
}

void tn__dropin_fence_drain(tn__dropin_device *device) {
    close_if_legal(device, 1);
    while (wait_for_oldest(device)) {
    }
    await_others(device);
}

size_t tn__dropin_fence_bytes(tn__dropin_device *device) {
    size_t bytes;
    pthread_mutex_lock(&mutex);
    bytes = device->waiting_bytes;
    pthread_mutex_unlock(&mutex);
    return bytes;
}

static void forget_in(const tn__dropin_device *gone, tn__dropin_batch *batch) {
    for (; batch; batch = batch->next) {
        tn__event *event = &batch->events[gone->ordinal];
        if (*event) (void)gone->driver->event_destroy(gone->state, *event);
        *event = NULL;
    }
}

void tn__dropin_fence_forget(const tn__dropin_device *gone) {
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < TN__DROPIN_DEVICES_MAX; i++) {
        const tn__dropin_device *device = tn__dropin.devices[i];
        if (!device) continue;
        forget_in(gone, device->oldest);
        forget_in(gone, device->waited);
    }
    tn__dropin_device_remove(gone);
    pthread_mutex_unlock(&mutex);
}

void tn__dropin_fence_close(tn__dropin_device *device) {
    pthread_mutex_lock(&mutex);
    while (device->oldest)
        release(device, take_oldest(device));
    if (device->open) release(device, device->open);
    device->open = NULL;
    while (device->spare_count > 0)
        (void)device->driver->event_destroy(device->state,
                                            device->spare_events[--device->spare_count]);
    tn__host_free(device->spare_events);
    device->spare_events = NULL;
    device->spare_capacity = 0;
    pthread_mutex_unlock(&mutex);
}
