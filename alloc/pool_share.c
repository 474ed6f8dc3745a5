/* Blocks between processes: exported as a file descriptor and a plain description, imported as
 * guests of a pool.
 *
 * An id is 128 bits: 64 that this process drew at random, 64 that count its exports. A block keeps
 * its id, and memory that was exported is never given to another block, so an id means one block
 * for good. The description carries a checksum: what does not fit it is refused before any call.
 */
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "event_ring.h"
#include "host_alloc.h"
#include "pool_internal.h"
#include "tenure_pool.h"

#define SHARE_FORMAT 0x31534e54u /* "TNS1" */

/* ---- descriptions ---------------------------------------------------------------------------- */

_Static_assert(sizeof(tn_share) == 64, "a description has no holes, and the same layout for all");

/* FNV-1a of all that follows the checksum. */
static uint32_t checksum_of(const tn_share *share) {
    const unsigned char *bytes = (const unsigned char *)share;
    uint32_t sum = 2166136261u;
    for (size_t i = offsetof(tn_share, id); i < sizeof *share; i++)
        sum = (sum ^ bytes[i]) * 16777619u;
    return sum;
}

static tn_status check_share(const tn_pool *pool, const tn_share *share) {
    uint64_t granularity = pool->info.granularity_bytes;
    if (share->format != SHARE_FORMAT || share->checksum != checksum_of(share)) {
        return TN_FAIL(TN_CORRUPT_INPUT, "tn_share_import: this is no tn_share, or one of another "
                                         "version, or it was changed on its way");
    }
    if (share->bytes == 0 || share->bytes > share->mapped_bytes ||
        share->mapped_bytes % granularity != 0 || share->mapped_bytes > SIZE_MAX / 2) {
        return TN_FAIL(TN_CORRUPT_INPUT,
                       "tn_share_import: %llu bytes in a handle of %llu do not fit granules of %zu",
                       (unsigned long long)share->bytes, (unsigned long long)share->mapped_bytes,
                       pool->info.granularity_bytes);
    }
    return TN_OK;
}

static tn_status check_device(const tn_pool *pool, const tn_share *share) {
    static const unsigned char unknown[16];
    unsigned char uuid[16];
    TN_TRY(pool->driver->uuid(pool->state, uuid));
    if (memcmp(uuid, unknown, 16) == 0 || memcmp(share->device_uuid, unknown, 16) == 0) {
        return TN_OK; /* the driver says which device the handle is of */
    }
    TN_REQUIRE(memcmp(uuid, share->device_uuid, 16) == 0,
               "tn_share_import: the block lies on another GPU (there device %d) than pool %s",
               share->device_ordinal, pool->name);
    return TN_OK;
}

/* ---- ids ------------------------------------------------------------------------------------- */

static pthread_mutex_t id_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t process_id; /* 0: not drawn yet */
static uint64_t last_export;

static tn_status draw_id(uint64_t id[2]) {
    tn_status status = TN_OK;
    pthread_mutex_lock(&id_mutex);
    if (process_id == 0 &&
        getrandom(&process_id, sizeof process_id, 0) != (ssize_t)sizeof process_id) {
        process_id = 0;
        status = TN_FAIL(TN_IO, "tn_share_export: the system gives no random number");
    }
    if (process_id == 0 && status == TN_OK) process_id = 1;
    if (status == TN_OK) {
        id[0] = process_id;
        id[1] = ++last_export;
    }
    pthread_mutex_unlock(&id_mutex);
    return status;
}

/* ---- export ---------------------------------------------------------------------------------- */

static tn_status export_locked(tn_pool *pool, const void *address, tn_share *out, int *file) {
    tn__piece *piece = tn__heap_find_block(&pool->heap, (uintptr_t)address);
    tn_share share = {.format = SHARE_FORMAT};
    tn__dedicated *block;
    uint64_t id[2];
    TN_REQUIRE(piece, "tn_share_export: no live block of pool %s begins at %p", pool->name,
               address);
    block = piece->region->dedicated;
    TN_REQUIRE(block && block->is_shareable,
               "tn_share_export: the block at %p was not allocated with TN_ALLOC_SHAREABLE",
               address);
    TN_TRY(pool->driver->uuid(pool->state, share.device_uuid));
    memcpy(id, block->id, sizeof id);
    if (id[0] == 0) TN_TRY(draw_id(id));
    TN_TRY(pool->driver->share_export(pool->state, block->mapping.handle, file));
    block->is_exported = 1;
    memcpy(block->id, id, sizeof id);
    memcpy(share.id, id, sizeof id);
    share.bytes = piece->asked_bytes;
    share.mapped_bytes = block->mapping.bytes;
    share.device_ordinal = pool->info.ordinal;
    share.checksum = checksum_of(&share);
    *out = share;
    tn__pool_event(pool, TN_EVENT_EXPORT, piece->address, piece->asked_bytes, NULL, piece->owner);
    return TN_OK;
}

static tn_status require_driver(const char *call) {
    if (!tn__driver_is_gone()) return TN_OK;
    return TN_FAIL(TN_INVALID_STATE, "%s after the driver is gone", call);
}

tn_status tn_share_export(const void *block, tn_share *share, int *file) {
    tn_pool *pool;
    tn_status status;
    TN_REQUIRE(block && share && file, "tn_share_export: block, share or file is NULL");
    TN_TRY(require_driver("tn_share_export"));
    pool = tn__page_map_find(block);
    TN_REQUIRE(pool, "tn_share_export: no pool gave out %p", block);
    pthread_mutex_lock(&pool->mutex);
    status = export_locked(pool, block, share, file);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* ---- import ---------------------------------------------------------------------------------- */

tn__piece *tn__guest_find(tn_pool *pool, uintptr_t address) {
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        if (!region->guest || region->map.begin != address) continue;
        return region->guest->references > 0 ? region->first : NULL;
    }
    return NULL;
}

/* One that was closed and still waits for its uses is as good as new. */
static tn__region *find_id(tn_pool *pool, const uint64_t id[2]) {
    for (tn__region *region = pool->heap.regions; region; region = region->next) {
        const tn__guest *guest = region->guest;
        if (guest && guest->mapping.is_mapped && memcmp(guest->id, id, sizeof guest->id) == 0) {
            return region;
        }
    }
    return NULL;
}

static tn_status corrupt(int native) {
    return TN_FAIL_NATIVE(TN_CORRUPT_INPUT, native,
                          "tn_share_import: the file is not the block that the tn_share describes "
                          "(driver code %d)",
                          native);
}

/* Drivers differ in what they call a file that is no block, CUDA_ERROR_UNKNOWN among it. */
static tn_status import_file(tn_pool *pool, int file, tn__handle *out) {
    tn_status status = pool->driver->share_import(pool->state, file, out);
    int native = tn_error_last_native();
    int is_of_file = status == TN_DRIVER_ERROR || status == TN_INVALID_ARGUMENT ||
                     (status == TN_UNSUPPORTED && native != 0);
    return is_of_file && !tn__driver_is_gone() ? corrupt(native) : status;
}

/* A handle of another size than was promised is not mapped. */
static tn_status place_handle(tn_pool *pool, tn__own_mapping *mapping) {
    tn_status status = tn__own_mapping_place(pool, mapping);
    int native = tn_error_last_native();
    int is_of_size = native == TN__CU_ERROR_INVALID_VALUE || native == TN__CU_ERROR_NOT_SUPPORTED;
    return status != TN_OK && is_of_size ? corrupt(native) : status;
}

static tn_status take_handle(tn_pool *pool, int file, tn__own_mapping *mapping) {
    int ordinal = pool->info.ordinal;
    TN_TRY(import_file(pool, file, &mapping->handle));
    mapping->has_handle = 1;
    TN_TRY(pool->driver->share_ordinal(pool->state, mapping->handle, &ordinal));
    TN_REQUIRE(ordinal == pool->info.ordinal,
               "tn_share_import: the block lies on device %d, and pool %s on device %d", ordinal,
               pool->name, pool->info.ordinal);
    return place_handle(pool, mapping);
}

static tn_status make_guest(tn_pool *pool, const tn_share *share, int file, tn__region **out) {
    tn__guest *guest = tn__host_alloc(1, sizeof *guest);
    tn_status status;
    if (!guest) return TN_OUT_OF_HOST_MEMORY;
    guest->mapping.bytes = (size_t)share->mapped_bytes;
    memcpy(guest->id, share->id, sizeof guest->id);
    status = take_handle(pool, file, &guest->mapping);
    if (status == TN_OK) {
        status = tn__heap_add_guest(&pool->heap, pool, guest->mapping.address, guest->mapping.bytes,
                                    (size_t)share->bytes, out);
    }
    if (status != TN_OK) {
        tn__own_mapping_undo(pool, &guest->mapping);
        return status;
    }
    (*out)->guest = guest;
    return TN_OK;
}

static tn_status import_locked(tn_pool *pool, const tn_share *share, int file, void **address) {
    tn__region *region = find_id(pool, share->id);
    if (!region) TN_TRY(make_guest(pool, share, file, &region));
    region->guest->references++;
    *address = (void *)region->map.begin;
    tn__pool_event(pool, TN_EVENT_IMPORT, region->map.begin, region->first->asked_bytes, NULL,
                   NULL);
    return TN_OK;
}

tn_status tn_share_import(tn_pool *pool, const tn_share *share, int file, void **address) {
    tn_status status;
    TN_REQUIRE(pool && share && address, "tn_share_import: pool, share or address is NULL");
    TN_TRY(require_driver("tn_share_import"));
    if (!pool->backing->maps_handles) {
        return TN_FAIL(TN_UNSUPPORTED, "pool %s has no VMM pages: it can not import", pool->name);
    }
    TN_TRY(check_share(pool, share));
    TN_REQUIRE(fcntl(file, F_GETFD) >= 0, "tn_share_import: %d is no open file", file);
    TN_TRY(check_device(pool, share));
    pthread_mutex_lock(&pool->mutex);
    status = import_locked(pool, share, file, address);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* ---- close ----------------------------------------------------------------------------------- */

static tn_status close_locked(tn_pool *pool, tn__piece *piece, tn_stream stream) {
    tn__pool_stream *state = NULL;
    tn__use use;
    TN_TRY(tn__pool_find_stream(pool, stream, &state));
    TN_TRY(tn__uses_reserve(&piece->uses, piece->uses.count + 1));
    use = tn__order_use_now(state);
    tn__uses_add(&piece->uses, use.stream, use.epoch);
    piece->region->guest->references--;
    return TN_OK;
}

/* Closed is closed: what can not be learned or given back now is tried again later. */
static void collect_quietly(tn_pool *pool) {
    tn__saved_error saved;
    tn__error_save(&saved);
    (void)tn__pool_collect(pool);
    tn__error_restore(&saved);
}

tn_status tn_share_close(void *address, tn_stream stream) {
    tn_pool *pool;
    tn__piece *piece;
    tn_status status;
    if (!address || tn__driver_is_gone()) return TN_OK;
    pool = tn__page_map_find(address);
    TN_REQUIRE(pool, "tn_share_close: no pool has imported %p", address);
    pthread_mutex_lock(&pool->mutex);
    piece = tn__guest_find(pool, (uintptr_t)address);
    if (piece) {
        status = close_locked(pool, piece, stream);
        if (status == TN_OK && piece->region->guest->references == 0) collect_quietly(pool);
    } else {
        status = TN_FAIL(TN_INVALID_ARGUMENT, "tn_share_close: %p is not imported in pool %s",
                         address, pool->name);
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}
