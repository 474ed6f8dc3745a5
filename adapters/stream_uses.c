/* Which streams use a block beside its own: see stream_uses.h. */
#include "stream_uses.h"

#include "host_alloc.h"

void tn__stream_uses_init(tn__stream_uses *uses) { pthread_mutex_init(&uses->mutex, NULL); }

void tn__stream_uses_deinit(tn__stream_uses *uses) {
    for (size_t i = 0; i < TN__STREAM_USE_BUCKETS; i++) {
        while (uses->buckets[i]) {
            tn__stream_use *use = uses->buckets[i];
            uses->buckets[i] = use->next;
            tn__host_free(use);
        }
    }
    pthread_mutex_destroy(&uses->mutex);
}

/* Blocks begin at multiples of 512 bytes. */
static tn__stream_use **bucket_of(tn__stream_uses *uses, const void *block) {
    return &uses->buckets[((uintptr_t)block / 512 * 0x9E3779B97F4A7C15u >> 40) %
                          TN__STREAM_USE_BUCKETS];
}

static int is_known(const tn__stream_use *use, const void *block, tn_stream stream) {
    while (use && (use->block != block || use->stream != stream))
        use = use->next;
    return use != NULL;
}

tn_status tn__stream_uses_add(tn__stream_uses *uses, const void *block, tn_stream stream) {
    tn__stream_use **bucket = bucket_of(uses, block);
    tn__stream_use *use = NULL;
    tn_status status = TN_OK;
    pthread_mutex_lock(&uses->mutex);
    if (!is_known(*bucket, block, stream)) {
        use = tn__host_alloc(1, sizeof *use);
        if (use) {
            *use = (tn__stream_use){*bucket, block, stream};
            *bucket = use;
            atomic_fetch_add(&uses->count, 1);
        } else {
            status = TN_OUT_OF_HOST_MEMORY;
        }
    }
    pthread_mutex_unlock(&uses->mutex);
    return status;
}

void tn__stream_uses_put(tn__stream_uses *uses, tn__stream_use *taken) {
    if (!taken) return;
    pthread_mutex_lock(&uses->mutex);
    while (taken) {
        tn__stream_use *use = taken;
        tn__stream_use **bucket = bucket_of(uses, use->block);
        taken = use->next;
        use->next = *bucket;
        *bucket = use;
        atomic_fetch_add(&uses->count, 1);
    }
    pthread_mutex_unlock(&uses->mutex);
}

void tn__stream_uses_drop(tn__stream_use *taken) {
    while (taken) {
        tn__stream_use *next = taken->next;
        tn__host_free(taken);
        taken = next;
    }
}

tn__stream_use *tn__stream_uses_take(tn__stream_uses *uses, const void *block) {
    tn__stream_use *taken = NULL;
    tn__stream_use **at = bucket_of(uses, block);
    if (atomic_load(&uses->count) == 0) return NULL;
    pthread_mutex_lock(&uses->mutex);
    while (*at) {
        tn__stream_use *use = *at;
        if (use->block != block) {
            at = &use->next;
            continue;
        }
        *at = use->next;
        use->next = taken;
        taken = use;
        atomic_fetch_sub(&uses->count, 1);
    }
    pthread_mutex_unlock(&uses->mutex);
    return taken;
}
