/* What the store holds: values by key, and meetings that not all ranks have come to yet.
 *
 * Invariants: an entry is a value or a meeting, never both; a meeting ends when the last rank has
 * come (its values are read, then it is gone) or is broken for good (its text stays for those who
 * come late). Bounded by a count of entries and a sum of bytes.
 */
#ifndef TENURE_TCP_STORE_ENTRIES_H
#define TENURE_TCP_STORE_ENTRIES_H

#include "error.h"
#include "tcp_store_wire.h"

enum { TN__STORE_TEXT_BYTES = 256 };

typedef struct tn__store_value {
    unsigned char *bytes;
    uint32_t count;
    int is_there;
} tn__store_value;

typedef struct tn__store_entry {
    struct tn__store_entry *next;
    int is_meeting;
    int came;                /* of a meeting: ranks */
    tn__store_value *values; /* of a meeting one for each rank, else one */
    tn_status broken;        /* of a meeting: TN_OK, or why there will be none */
    char text[TN__STORE_TEXT_BYTES];
    size_t key_bytes;
    unsigned char key[TN__STORE_KEY_MAX];
} tn__store_entry;

typedef struct tn__store_entries {
    tn__store_entry *first;
    int rank_count;
    size_t count;
    size_t bytes;
} tn__store_entries;

void tn__store_entries_free(tn__store_entries *entries);

/* NULL: there is none. */
tn__store_entry *tn__store_entries_find(const tn__store_entries *entries, const void *key,
                                        size_t key_bytes);

/* TN_INVALID_STATE if the key has another value or is a meeting, TN_OUT_OF_HOST_MEMORY beyond the
 * bounds. */
tn_status tn__store_entries_set(tn__store_entries *entries, const void *key, size_t key_bytes,
                                const void *value, uint32_t value_bytes);

/* A rank comes to the meeting of this key, which is made by the first. */
tn_status tn__store_entries_come(tn__store_entries *entries, const void *key, size_t key_bytes,
                                 int rank, const void *value, uint32_t value_bytes,
                                 tn__store_entry **out);

void tn__store_entries_remove(tn__store_entries *entries, tn__store_entry *entry);

/* "rank 1, rank 3": who has not come. */
void tn__store_entry_missing(const tn__store_entry *entry, int rank_count, char *text,
                             size_t text_bytes);

/* Bytes of the answer to a meeting: each rank's count (4 bytes) and value; then the answer. */
size_t tn__store_entry_answer_bytes(const tn__store_entry *entry, int rank_count);
void tn__store_entry_answer(const tn__store_entry *entry, int rank_count, unsigned char *out);

#endif
