/* What an address is, and memory shared with other processes: see dropin.h.
 *
 * To the driver a block of a pool is a part of a larger allocation. A program asks about its own:
 * so range, size and buffer id are the block's, and addresses of a pool's free memory are no
 * memory. All else (type, device, context, access) is the driver's answer.
 *
 * A handle for other processes (cuIpcGetMemHandle) is the driver's for the whole allocation, with
 * the block's offset in its last 8 bytes, which the driver leaves 0 (580.159 does; where one does
 * not, the call is not supported). cuIpcOpenMemHandle of another process under the drop-in takes it
 * out again. A block at offset 0 has the driver's own handle.
 */
#include <string.h>

#include "dropin.h"
#include "host_alloc.h"

enum { BUFFER_ID = 7, RANGE_START = 11, RANGE_BYTES = 12 };

/* ---- attributes ------------------------------------------------------------------------------ */

/* An address that is no memory of the driver's. */
static tn__cu_address nowhere(void) {
    static const char byte;
    return (tn__cu_address)(uintptr_t)&byte;
}

/* The block of a pool that holds the address. -1: free memory of a pool; 0: none of ours. */
static int find_block(tn__cu_address address, tn__dropin_block *out) {
    int is_block = tn__dropin_blocks_find((uintptr_t)address, out);
    if (is_block && out->kind != TN__DROPIN_DRIVER) return 1;
    return !is_block && tn__dropin_owns(address) ? -1 : 0;
}

/* Ids of the driver's own are small numbers. */
static unsigned long long buffer_id(const tn__dropin_block *block) {
    return 1ull << 62 | block->serial;
}

static void put_own(int attribute, void *value, const tn__dropin_block *block) {
    const tn__cu_address start = block->address;
    const unsigned long long id = buffer_id(block);
    if (attribute == RANGE_START) memcpy(value, &start, sizeof start);
    if (attribute == RANGE_BYTES) memcpy(value, &block->bytes, sizeof block->bytes);
    if (attribute == BUFFER_ID) memcpy(value, &id, sizeof id);
}

static tn__cu_result hook_attribute(void *value, int attribute, tn__cu_address address) {
    tn__dropin_block block;
    int found = find_block(address, &block);
    tn__cu_result result =
        TN__REAL(cuPointerGetAttribute)(value, attribute, found < 0 ? nowhere() : address);
    if (found == 1 && result == TN__CU_SUCCESS && value) put_own(attribute, value, &block);
    return result;
}

static tn__cu_result hook_attributes(unsigned count, int *attributes, void **values,
                                     tn__cu_address address) {
    tn__dropin_block block;
    int found = find_block(address, &block);
    tn__cu_result result = TN__REAL(cuPointerGetAttributes)(count, attributes, values,
                                                            found < 0 ? nowhere() : address);
    if (found != 1 || result != TN__CU_SUCCESS) return result;
    for (unsigned i = 0; i < count; i++) {
        if (values[i]) put_own(attributes[i], values[i], &block);
    }
    return result;
}

static tn__cu_result hook_range(tn__cu_address *base, size_t *bytes, tn__cu_address address) {
    tn__dropin_block block;
    int found = find_block(address, &block);
    if (found != 1) {
        return TN__REAL(cuMemGetAddressRange_v2)(base, bytes, found < 0 ? nowhere() : address);
    }
    if (base) *base = block.address;
    if (bytes) *bytes = block.bytes;
    return TN__CU_SUCCESS;
}

/* ---- handles for other processes ------------------------------------------------------------- */

typedef struct handle_tail {
    uint32_t magic;
    uint32_t units; /* of the offset */
} handle_tail;

#define TAIL_MAGIC 0x54656e75u
#define UNIT_BYTES ((uint64_t)512) /* what every block is aligned to */
#define TAIL_AT    (sizeof(tn__cu_ipc_handle) - sizeof(handle_tail))

/* The driver's call is asked for by name: the program may never have. */
static tn__cu_result driver_range(tn__cu_address *base, size_t *bytes, tn__cu_address address) {
    static tn__cu_result (*_Atomic get)(tn__cu_address *, size_t *, tn__cu_address);
    if (!get) {
        get = (tn__cu_result(*)(tn__cu_address *, size_t *, tn__cu_address))tn__dropin.driver->find(
            "cuMemGetAddressRange_v2");
    }
    return get ? get(base, bytes, address) : TN__CU_ERROR_NOT_SUPPORTED;
}

/* NOT_SUPPORTED if the driver's handle has no room. */
static tn__cu_result add_offset(tn__cu_ipc_handle *handle, uint64_t offset) {
    static const handle_tail none;
    const handle_tail tail = {TAIL_MAGIC, (uint32_t)(offset / UNIT_BYTES)};
    if (offset == 0) return TN__CU_SUCCESS;
    if (offset % UNIT_BYTES || offset / UNIT_BYTES > UINT32_MAX ||
        memcmp(handle->bytes + TAIL_AT, &none, sizeof none) != 0) {
        return TN__CU_ERROR_NOT_SUPPORTED;
    }
    memcpy(handle->bytes + TAIL_AT, &tail, sizeof tail);
    return TN__CU_SUCCESS;
}

static tn__cu_result hook_ipc_get(tn__cu_ipc_handle *handle, tn__cu_address address) {
    tn__dropin_block block;
    int found = find_block(address, &block);
    tn__cu_ipc_handle made;
    tn__cu_address base = 0;
    size_t bytes = 0;
    tn__cu_result result;
    if (found == 0 || !handle) return TN__REAL(cuIpcGetMemHandle)(handle, address);
    if (found < 0) return TN__CU_ERROR_INVALID_VALUE;
    result = TN__REAL(cuIpcGetMemHandle)(&made, address);
    if (result == TN__CU_SUCCESS) result = driver_range(&base, &bytes, address);
    if (result == TN__CU_SUCCESS) result = add_offset(&made, address - base);
    if (result == TN__CU_SUCCESS) *handle = made;
    return result;
}

/* What was opened at an offset, so that closing finds what the driver opened. */
typedef struct opened {
    struct opened *next;
    tn__cu_address address;
    tn__cu_address base;
    size_t count;
} opened;

static pthread_mutex_t opened_mutex = PTHREAD_MUTEX_INITIALIZER;
static opened *all_opened;

static opened **opened_at(tn__cu_address address) {
    opened **at = &all_opened;
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    return at;
}

/* 0: there is no memory to remember it by. */
static int note_opened(tn__cu_address address, tn__cu_address base) {
    pthread_mutex_lock(&opened_mutex);
    opened **at = opened_at(address);
    if (!*at) *at = tn__host_alloc(1, sizeof **at);
    opened *one = *at;
    if (one) {
        one->address = address;
        one->base = base;
        one->count++;
    }
    pthread_mutex_unlock(&opened_mutex);
    return one != NULL;
}

static tn__cu_result hook_ipc_open(tn__cu_address *out, tn__cu_ipc_handle handle, unsigned flags) {
    handle_tail tail;
    tn__cu_address base = 0, address;
    tn__cu_result result;
    memcpy(&tail, handle.bytes + TAIL_AT, sizeof tail);
    if (!out || tail.magic != TAIL_MAGIC || tn__dropin.is_over) {
        return TN__REAL(cuIpcOpenMemHandle_v2)(out, handle, flags);
    }
    memset(handle.bytes + TAIL_AT, 0, sizeof tail);
    result = TN__REAL(cuIpcOpenMemHandle_v2)(&base, handle, flags);
    if (result != TN__CU_SUCCESS) return result;
    address = base + tail.units * UNIT_BYTES;
    if (!note_opened(address, base)) {
        tn__cu_result (*close)(tn__cu_address) =
            (tn__cu_result(*)(tn__cu_address))tn__dropin.driver->find("cuIpcCloseMemHandle");
        if (close) (void)close(base);
        return TN__CU_ERROR_OUT_OF_MEMORY;
    }
    *out = address;
    return TN__CU_SUCCESS;
}

static tn__cu_address base_of(tn__cu_address address) {
    pthread_mutex_lock(&opened_mutex);
    const opened *one = *opened_at(address);
    tn__cu_address base = one ? one->base : address;
    pthread_mutex_unlock(&opened_mutex);
    return base;
}

static void note_closed(tn__cu_address address) {
    pthread_mutex_lock(&opened_mutex);
    opened **at = opened_at(address);
    opened *one = *at;
    if (one && --one->count == 0) {
        *at = one->next;
        tn__host_free(one);
    }
    pthread_mutex_unlock(&opened_mutex);
}

/* What the driver does not close stays known, so that it can be closed again. */
static tn__cu_result hook_ipc_close(tn__cu_address address) {
    tn__cu_result result;
    if (tn__dropin.is_over) return TN__REAL(cuIpcCloseMemHandle)(address);
    result = TN__REAL(cuIpcCloseMemHandle)(base_of(address));
    if (result == TN__CU_SUCCESS) note_closed(address);
    return result;
}

void tn__dropin_pointer_hooks(tn__dropin_calls *hooks) {
    hooks->cuPointerGetAttribute = hook_attribute;
    hooks->cuPointerGetAttributes = hook_attributes;
    hooks->cuMemGetAddressRange_v2 = hook_range;
    hooks->cuIpcGetMemHandle = hook_ipc_get;
    hooks->cuIpcOpenMemHandle_v2 = hook_ipc_open;
    hooks->cuIpcCloseMemHandle = hook_ipc_close;
}
