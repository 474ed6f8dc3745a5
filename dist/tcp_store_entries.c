/* Values and meetings of the store: see tcp_store_entries.h. */
#include "tcp_store_entries.h"

#include <string.h>

#include "host_alloc.h"
#include "text_sink.h"

enum { ENTRIES_MAX = 4096, BYTES_MAX = 64 << 20, COUNT_BYTES = 4 };

static size_t values_of(const tn__store_entries *entries, const tn__store_entry *entry) {
    return entry->is_meeting ? (size_t)entries->rank_count : 1;
}

static void free_entry(const tn__store_entries *entries, tn__store_entry *entry) {
    for (size_t i = 0; entry->values && i < values_of(entries, entry); i++)
        tn__host_free(entry->values[i].bytes);
    tn__host_free(entry->values);
    tn__host_free(entry);
}

void tn__store_entries_free(tn__store_entries *entries) {
    while (entries->first) {
        tn__store_entry *entry = entries->first;
        entries->first = entry->next;
        free_entry(entries, entry);
    }
    entries->count = entries->bytes = 0;
}

tn__store_entry *tn__store_entries_find(const tn__store_entries *entries, const void *key,
                                        size_t key_bytes) {
    for (tn__store_entry *at = entries->first; at; at = at->next)
        if (at->key_bytes == key_bytes && memcmp(at->key, key, key_bytes) == 0) return at;
    return NULL;
}

static size_t held_bytes(const tn__store_entries *entries, const tn__store_entry *entry) {
    size_t bytes = sizeof *entry + values_of(entries, entry) * sizeof *entry->values;
    for (size_t i = 0; i < values_of(entries, entry); i++)
        bytes += entry->values[i].count;
    return bytes;
}

static tn_status out_of_bounds(void) {
    return TN_FAIL(TN_OUT_OF_HOST_MEMORY,
                   "the store of the ranks is full: it holds %d keys and %d bytes at most",
                   ENTRIES_MAX, BYTES_MAX);
}

static tn_status add_entry(tn__store_entries *entries, const void *key, size_t key_bytes,
                           int is_meeting, tn__store_entry **out) {
    size_t values = is_meeting ? (size_t)entries->rank_count : 1;
    size_t bytes = sizeof(tn__store_entry) + values * sizeof(tn__store_value);
    if (entries->count >= ENTRIES_MAX || bytes > BYTES_MAX - entries->bytes) return out_of_bounds();
    tn__store_entry *entry = tn__host_alloc(1, sizeof *entry);
    if (!entry) return TN_OUT_OF_HOST_MEMORY;
    entry->is_meeting = is_meeting;
    entry->key_bytes = key_bytes;
    memcpy(entry->key, key, key_bytes);
    entry->values = tn__host_alloc(values, sizeof *entry->values);
    if (!entry->values) {
        free_entry(entries, entry);
        return TN_OUT_OF_HOST_MEMORY;
    }
    entry->next = entries->first;
    entries->first = entry;
    entries->count++;
    entries->bytes += bytes;
    *out = entry;
    return TN_OK;
}

void tn__store_entries_remove(tn__store_entries *entries, tn__store_entry *entry) {
    tn__store_entry **at = &entries->first;
    while (*at != entry)
        at = &(*at)->next;
    *at = entry->next;
    entries->count--;
    entries->bytes -= held_bytes(entries, entry);
    free_entry(entries, entry);
}

static tn_status put_value(tn__store_entries *entries, tn__store_value *value, const void *bytes,
                           uint32_t count) {
    if (count > BYTES_MAX - entries->bytes) return out_of_bounds();
    if (count) {
        value->bytes = tn__host_alloc(1, count);
        if (!value->bytes) return TN_OUT_OF_HOST_MEMORY;
        memcpy(value->bytes, bytes, count);
    }
    value->count = count;
    value->is_there = 1;
    entries->bytes += count;
    return TN_OK;
}

tn_status tn__store_entries_set(tn__store_entries *entries, const void *key, size_t key_bytes,
                                const void *value, uint32_t value_bytes) {
    tn__store_entry *entry = tn__store_entries_find(entries, key, key_bytes);
    if (entry) {
        const tn__store_value *held = entry->values;
        int is_same = !entry->is_meeting && held->count == value_bytes &&
                      (!value_bytes || memcmp(held->bytes, value, value_bytes) == 0);
        return is_same ? TN_OK
                       : TN_FAIL(TN_INVALID_STATE, "the store has another value of this key");
    }
    TN_TRY(add_entry(entries, key, key_bytes, 0, &entry));
    tn_status status = put_value(entries, entry->values, value, value_bytes);
    if (status != TN_OK) tn__store_entries_remove(entries, entry);
    return status;
}

tn_status tn__store_entries_come(tn__store_entries *entries, const void *key, size_t key_bytes,
                                 int rank, const void *value, uint32_t value_bytes,
                                 tn__store_entry **out) {
    tn__store_entry *entry = tn__store_entries_find(entries, key, key_bytes);
    if (!entry) TN_TRY(add_entry(entries, key, key_bytes, 1, &entry));
    if (!entry->is_meeting || entry->values[rank].is_there)
        return TN_FAIL(TN_INVALID_STATE, "rank %d has come to this meeting before", rank);
    tn_status status = put_value(entries, &entry->values[rank], value, value_bytes);
    if (status != TN_OK) {
        if (!entry->came && entry->broken == TN_OK) tn__store_entries_remove(entries, entry);
        return status;
    }
    entry->came++;
    *out = entry;
    return TN_OK;
}

void tn__store_entry_missing(const tn__store_entry *entry, int rank_count, char *text,
                             size_t text_bytes) {
    tn__text out = tn__text_begin(text, text_bytes);
    for (int rank = 0; rank < rank_count; rank++)
        if (!entry->values[rank].is_there)
            tn__text_add(&out, "%srank %d", out.used ? ", " : "", rank);
}

size_t tn__store_entry_answer_bytes(const tn__store_entry *entry, int rank_count) {
    size_t bytes = 0;
    for (int rank = 0; rank < rank_count; rank++)
        bytes += COUNT_BYTES + entry->values[rank].count;
    return bytes;
}

void tn__store_entry_answer(const tn__store_entry *entry, int rank_count, unsigned char *out) {
    for (int rank = 0; rank < rank_count; rank++) {
        const tn__store_value *value = &entry->values[rank];
        for (int i = 0; i < COUNT_BYTES; i++)
            *out++ = (unsigned char)(value->count >> 8 * i);
        if (value->count) memcpy(out, value->bytes, value->count);
        out += value->count;
    }
}
