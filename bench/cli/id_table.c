/* Open addressing with linear probing over a power-of-two array; see id_table.h.
 *
 * Invariant: between an entry's home (its hash) and the place where it is, no place is empty.
 * Removal keeps it by moving later entries of the same run back into the hole, so lookups of ids
 * that are not there stay short however many ids have come and gone.
 */
#include "id_table.h"

#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

enum { FIRST_CAPACITY = 1024 };

/* Ids count up by one in our traces and by aligned addresses in RMM's: both need mixing. These
 * are the constants of the finalizer of splitmix64. */
static size_t home_of(const id_table *table, uint64_t id) {
    id ^= table->seed;
    id ^= id >> 30;
    id *= UINT64_C(0xbf58476d1ce4e5b9);
    id ^= id >> 27;
    id *= UINT64_C(0x94d049bb133111eb);
    id ^= id >> 31;
    return (size_t)id & (table->capacity - 1);
}

static size_t next_place(const id_table *table, size_t place) {
    return (place + 1) & (table->capacity - 1);
}

/* The place of the id, or the empty place where it would go. The table has an empty place. */
static size_t place_of(const id_table *table, uint64_t id) {
    size_t place = home_of(table, id);
    while (table->entries[place].slot_plus_one != 0 && table->entries[place].id != id)
        place = next_place(table, place);
    return place;
}

static uint64_t make_seed(void) {
    uint64_t seed = 0;
    if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) == (ssize_t)sizeof seed) return seed;
    return (uint64_t)clock() ^ (uint64_t)time(NULL) << 20; /* a system without: still not chosen */
}

static int grow(id_table *table) {
    id_table larger = *table;
    larger.capacity = table->capacity ? table->capacity * 2 : FIRST_CAPACITY;
    if (table->capacity == 0) larger.seed = make_seed();
    larger.entries = calloc(larger.capacity, sizeof(*larger.entries));
    if (!larger.entries) return 0;
    for (size_t i = 0; i < table->capacity; i++) {
        if (table->entries[i].slot_plus_one == 0) continue;
        larger.entries[place_of(&larger, table->entries[i].id)] = table->entries[i];
    }
    free(table->entries);
    *table = larger;
    return 1;
}

int id_table_insert(id_table *table, uint64_t id, uint32_t slot) {
    if ((table->count + 1) * 8 > table->capacity * 5 && !grow(table)) return 0;
    id_table_entry *entry = &table->entries[place_of(table, id)];
    entry->id = id;
    entry->slot_plus_one = slot + 1;
    table->count++;
    return 1;
}

int id_table_find(const id_table *table, uint64_t id, uint32_t *slot) {
    if (table->capacity == 0) return 0;
    const id_table_entry *entry = &table->entries[place_of(table, id)];
    if (entry->slot_plus_one == 0) return 0;
    *slot = entry->slot_plus_one - 1;
    return 1;
}

int id_table_remove(id_table *table, uint64_t id) {
    if (table->capacity == 0) return 0;
    size_t hole = place_of(table, id);
    if (table->entries[hole].slot_plus_one == 0) return 0;
    size_t mask = table->capacity - 1;
    for (size_t place = next_place(table, hole); table->entries[place].slot_plus_one != 0;
         place = next_place(table, place)) {
        /* An entry may move back to the hole unless its home lies after the hole. */
        size_t from_home = (place - home_of(table, table->entries[place].id)) & mask;
        size_t from_hole = (place - hole) & mask;
        if (from_home < from_hole) continue;
        table->entries[hole] = table->entries[place];
        hole = place;
    }
    table->entries[hole].slot_plus_one = 0;
    table->count--;
    return 1;
}

void id_table_deinit(id_table *table) {
    free(table->entries);
    *table = (id_table){0};
}

int id_table_is_valid(const id_table *table) {
    size_t count = 0;
    for (size_t i = 0; i < table->capacity; i++) {
        if (table->entries[i].slot_plus_one == 0) continue;
        count++;
        if (place_of(table, table->entries[i].id) != i) return 0;
    }
    return count == table->count && count * 8 <= table->capacity * 5;
}
