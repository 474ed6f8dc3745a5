/* Sets of uses: see pool_order.h. */
#include <string.h>

#include "host_alloc.h"
#include "pool_order.h"

tn_status tn__uses_reserve(tn__uses *uses, uint32_t capacity) {
    tn__use *many;
    uint32_t room = uses->many ? uses->capacity : TN__USES_LOCAL;
    if (capacity <= room) return TN_OK;
    while (room < capacity)
        room *= 2;
    many = tn__host_alloc(room, sizeof *many);
    if (!many) return TN_OUT_OF_HOST_MEMORY;
    memcpy(many, tn__uses_items(uses), uses->count * sizeof *many);
    tn__host_free(uses->many);
    uses->many = many;
    uses->capacity = room;
    return TN_OK;
}

void tn__uses_add(tn__uses *uses, tn__pool_stream *stream, uint64_t epoch) {
    tn__use *items = tn__uses_items(uses);
    for (uint32_t i = 0; i < uses->count; i++) {
        if (items[i].stream != stream) continue;
        if (items[i].epoch < epoch) items[i].epoch = epoch;
        return;
    }
    TN_ASSERT(uses->count < (uses->many ? uses->capacity : TN__USES_LOCAL));
    items[uses->count++] = (tn__use){stream, epoch};
}

void tn__uses_clear(tn__uses *uses) {
    tn__host_free(uses->many);
    uses->many = NULL;
    uses->count = 0;
}

static void remove_at(tn__uses *uses, uint32_t i) {
    tn__use *items = tn__uses_items(uses);
    items[i] = items[--uses->count];
}

void tn__uses_settle(tn__uses *uses) {
    for (uint32_t i = 0; i < uses->count;) {
        tn__use use = tn__uses_items(uses)[i];
        if (use.epoch <= use.stream->complete) {
            remove_at(uses, i);
        } else {
            i++;
        }
    }
    if (uses->count == 0) tn__uses_clear(uses);
}

int tn__uses_are_complete(tn__uses *uses) {
    const tn__use *items = tn__uses_items(uses);
    for (uint32_t i = 0; i < uses->count; i++) {
        if (items[i].epoch > items[i].stream->complete) return 0;
    }
    return 1;
}

int tn__uses_has(tn__uses *uses, const tn__pool_stream *stream) {
    const tn__use *items = tn__uses_items(uses);
    for (uint32_t i = 0; i < uses->count; i++) {
        if (items[i].stream == stream) return 1;
    }
    return 0;
}

void tn__uses_forget(tn__uses *uses, const tn__pool_stream *stream) {
    for (uint32_t i = 0; i < uses->count; i++) {
        if (tn__uses_items(uses)[i].stream != stream) continue;
        remove_at(uses, i);
        break;
    }
}

static int has_use(tn__uses *uses, tn__use wanted) {
    for (uint32_t i = 0; i < uses->count; i++) {
        tn__use use = tn__uses_items(uses)[i];
        if (use.stream == wanted.stream && use.epoch == wanted.epoch) return 1;
    }
    return 0;
}

int tn__uses_equal(tn__uses *a, tn__uses *b) {
    if (a->count != b->count) return 0;
    for (uint32_t i = 0; i < a->count; i++) {
        if (!has_use(b, tn__uses_items(a)[i])) return 0;
    }
    return 1;
}

tn_status tn__uses_copy(tn__uses *to, tn__uses *from) {
    TN_ASSERT(to->count == 0);
    TN_TRY(tn__uses_reserve(to, from->count));
    memcpy(tn__uses_items(to), tn__uses_items(from), from->count * sizeof(tn__use));
    to->count = from->count;
    return TN_OK;
}
