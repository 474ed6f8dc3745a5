/* Hashes of planes under READ leases: see lease_check.h.
 *
 * Invariant: what is hashed can not go away meanwhile, though no lock is held: the lease that is
 * being begun or ended is alive, and its owner is in this call.
 */
#include "lease_check.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"
#include "host_alloc.h"
#include "plane_transition.h"
#include "tensor_view.h"

enum { CHUNK_BYTES = 1 << 20, CALL_BYTES = 256 };

/* What there is to know of a lease, copied. */
typedef struct subject {
    tn_device *device;
    tn_stream stream;
    tn_plane_view view;
    const void *caller;
    uint64_t hash; /* when it began */
    char tensor[TN__NAME_BYTES_MAX + 1];
    char site[TN__SITE_BYTES];
} subject;

static tn_status look(tn_lease lease, subject *out) {
    tn__lease_object *object = NULL;
    TN_TRY(tn__lease_acquire(lease, &object));
    out->device = object->tensor->scope->books->device;
    out->stream = object->stream;
    out->caller = object->caller;
    out->hash = object->hash;
    tn__plane_view_fill(object->tensor, object->plane, object->at, &out->view);
    if (object->through) tn__view_cut(object->through, &out->view);
    snprintf(out->tensor, sizeof out->tensor, "%s", object->tensor->name);
    memcpy(out->site, object->tensor->site, sizeof out->site);
    tn__tensor_unlock(object->tensor);
    return TN_OK;
}

/* ---- hashing ------------------------------------------------------------------------------- */

/* Any change of a word changes it, whatever comes before and after. */
static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ hash >> 29;
}

static uint64_t hash_bytes(uint64_t hash, const unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, bytes + i, count - i < sizeof word ? count - i : sizeof word);
        hash = mix(hash, word);
    }
    return hash;
}

static tn_status hash_block(const subject *of, const void *block, size_t bytes,
                            unsigned char *chunk, uint64_t *hash) {
    const unsigned char *from = block;
    for (size_t done = 0; block && done < bytes; done += CHUNK_BYTES) {
        size_t count = bytes - done < CHUNK_BYTES ? bytes - done : CHUNK_BYTES;
        TN_TRY(tn_copy(of->device, chunk, from + done, count, of->stream));
        TN_TRY(tn_stream_synchronize(of->device, of->stream));
        *hash = hash_bytes(*hash, chunk, count);
    }
    return TN_OK;
}

static tn_status stamp_block(const subject *of, const void *block, size_t bytes, uint64_t *hash) {
    uint64_t stamp = 0;
    if (!block || bytes == 0) return TN_OK;
    TN_TRY(tn__device_driver(of->device)
               ->write_stamp(tn__device_state(of->device), block, bytes, &stamp));
    *hash = mix(*hash, stamp);
    return TN_OK;
}

/* Of work as it was given to streams: what a capture holds has not been given to any. */
static tn_status hash_writes(const subject *of, uint64_t *hash) {
    *hash = 0;
    TN_TRY(stamp_block(of, of->view.data, of->view.layout.data_bytes, hash));
    return stamp_block(of, of->view.scale, of->view.layout.scale_bytes, hash);
}

/* *is_done 0: the stream captures, and what is on it has not run. */
static tn_status hash_contents(const subject *of, uint64_t *hash, int *is_done) {
    int is_capturing = 0;
    const tn__driver *driver = tn__device_driver(of->device);
    TN_TRY(driver->stream_is_capturing(tn__device_state(of->device), of->stream, &is_capturing));
    *is_done = !is_capturing;
    if (is_capturing) return TN_OK;
    unsigned char *chunk = tn__host_alloc(1, CHUNK_BYTES);
    if (!chunk) return TN_OUT_OF_HOST_MEMORY;
    *hash = 0;
    tn_status status = hash_block(of, of->view.data, of->view.layout.data_bytes, chunk, hash);
    if (status == TN_OK) {
        status = hash_block(of, of->view.scale, of->view.layout.scale_bytes, chunk, hash);
    }
    tn__host_free(chunk);
    return status;
}

static tn_status hash_plane(const subject *of, uint64_t *hash, int *is_done) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    TN_TRY(tn_device_info_get(of->device, &info));
    if (!info.simulated) return hash_contents(of, hash, is_done);
    *is_done = 1;
    return hash_writes(of, hash);
}

/* ---- begin and end ------------------------------------------------------------------------- */

static tn_status note_hash(tn_lease lease) {
    tn__lease_object *object = NULL;
    subject of;
    uint64_t hash = 0;
    int is_done = 0;
    TN_TRY(look(lease, &of));
    TN_TRY(hash_plane(&of, &hash, &is_done));
    TN_TRY(tn__lease_acquire(lease, &object));
    object->hash = hash;
    object->is_checked = is_done;
    tn__tensor_unlock(object->tensor);
    return TN_OK;
}

tn_status tn__lease_check_begin(tn_lease lease) {
    tn_status status = note_hash(lease);
    if (status != TN_OK) TN_CHECK(tn_lease_abandon(lease) == TN_OK);
    return status;
}

/* "program(function+0x1c)", as backtrace_symbols has it. */
static void name_call(const void *caller, char text[CALL_BYTES]) {
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname) {
        snprintf(text, CALL_BYTES, "%p", caller);
        return;
    }
    const char *slash = strrchr(info.dli_fname, '/');
    const void *base = info.dli_sname ? info.dli_saddr : info.dli_fbase;
    snprintf(text, CALL_BYTES, "%s(%s+0x%" PRIxPTR ")", slash ? slash + 1 : info.dli_fname,
             info.dli_sname ? info.dli_sname : "", (uintptr_t)caller - (uintptr_t)base);
}

tn_status tn__lease_check_end(tn_lease lease) {
    subject of;
    char call[CALL_BYTES];
    uint64_t hash = 0;
    int is_done = 0;
    TN_TRY(look(lease, &of));
    TN_TRY(hash_plane(&of, &hash, &is_done));
    if (!is_done || hash == of.hash) return TN_OK;
    name_call(of.caller, call);
    return TN_FAIL(TN_INVALID_STATE,
                   "tensor %s (made at %s), plane %s was written under the READ lease on stream %p "
                   "that was begun by %s: what writes it needs a WRITE or UPDATE lease; abandon "
                   "this one",
                   of.tensor, of.site[0] ? of.site : "an unknown place",
                   tn_plane_name(of.view.plane), of.stream, call);
}
