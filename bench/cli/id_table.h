/* A map from the ids that a trace uses to small slot numbers, holding only ids that are live.
 *
 *     id_table table = {0};
 *     id_table_insert(&table, 7, slot)      0 if there is no memory; the table is as before
 *     id_table_find(&table, 7, &slot)       1 if the id is there
 *     id_table_remove(&table, 7)            1 if the id was there
 *     id_table_deinit(&table);
 *
 * Memory grows with the largest number of ids that are live at once, not with the length of the
 * trace: removal leaves no tombstones. Not thread-safe.
 */
#ifndef TENURE_ID_TABLE_H
#define TENURE_ID_TABLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct id_table_entry {
    uint64_t id;
    uint32_t slot_plus_one; /* 0: the entry is empty */
} id_table_entry;

typedef struct id_table {
    id_table_entry *entries;
    size_t capacity; /* 0 or a power of two */
    size_t count;    /* at most 5/8 of the capacity */
    uint64_t seed;   /* another in each table: no file can choose ids that meet in one place */
} id_table;

/* The id must not be in the table; slot below UINT32_MAX. */
int id_table_insert(id_table *table, uint64_t id, uint32_t slot);
int id_table_find(const id_table *table, uint64_t id, uint32_t *slot);
int id_table_remove(id_table *table, uint64_t id);
void id_table_deinit(id_table *table);

/* Walks the table: every entry can be found from its home, the count is right. For tests. */
int id_table_is_valid(const id_table *table);

#endif
