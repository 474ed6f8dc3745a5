/* Texts by number: see name_table.h. At least half of the slots are empty. */
#include "name_table.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_SLOTS = 256 };

/* ---- texts ----------------------------------------------------------------------------------- */

/* The bytes of the UTF-8 character that begins here; 0 if none does. */
static size_t character_bytes(const unsigned char *at, size_t left) {
    size_t bytes = at[0] < 0x80 ? 1 : at[0] < 0xc2 ? 0 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
    if (bytes == 0 || at[0] > 0xf4 || bytes > left) return 0;
    for (size_t i = 1; i < bytes; i++) {
        if ((at[i] & 0xc0) != 0x80) return 0;
    }
    if (at[0] == 0xe0 && at[1] < 0xa0) return 0;
    if (at[0] == 0xed && at[1] > 0x9f) return 0; /* halves of pairs of UTF-16 */
    if (at[0] == 0xf0 && at[1] < 0x90) return 0;
    if (at[0] == 0xf4 && at[1] > 0x8f) return 0;
    return bytes;
}

/* Into out, which has NAME_BYTES_MAX + 1 bytes; the length. */
static size_t clean(const char *text, size_t length, char *out) {
    size_t used = 0;
    size_t at = 0;
    while (at < length) {
        const unsigned char *from = (const unsigned char *)text + at;
        size_t bytes = character_bytes(from, length - at);
        int is_plain = bytes > 0 && from[0] >= 0x20 && from[0] != 0x7f;
        if (bytes == 0) bytes = 1;
        if (used + bytes > NAME_BYTES_MAX) break;
        if (is_plain) {
            memcpy(out + used, from, bytes);
            used += bytes;
        } else {
            out[used++] = '?';
        }
        at += bytes;
    }
    out[used] = 0;
    return used;
}

static uint32_t hash_text(const char *text) {
    uint32_t hash = 2166136261u;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 16777619u;
    return hash;
}

/* ---- the table ------------------------------------------------------------------------------- */

/* The slot of the name, or the empty one where it goes. */
static uint32_t *find_slot(const name_table *table, const char *name) {
    uint32_t at = hash_text(name);
    for (;; at++) {
        uint32_t *slot = &table->slots[at & (table->slot_count - 1)];
        if (*slot == 0 || strcmp(table->names[*slot - 1], name) == 0) return slot;
    }
}

static int grow_slots(name_table *table) {
    uint32_t *before = table->slots;
    uint32_t count = table->slot_count ? table->slot_count * 2 : FIRST_SLOTS;
    uint32_t *slots = calloc(count, sizeof *slots);
    if (!slots) return 0;
    table->slots = slots;
    table->slot_count = count;
    for (uint32_t number = 1; number <= table->count; number++)
        *find_slot(table, table->names[number - 1]) = number;
    free(before);
    return 1;
}

static int reserve(name_table *table) {
    if (table->count == table->capacity) {
        uint32_t capacity = table->capacity ? table->capacity * 2 : FIRST_SLOTS / 2;
        char **names = realloc(table->names, capacity * sizeof *names);
        if (!names) return 0;
        table->names = names;
        table->capacity = capacity;
    }
    return table->slot_count > 2 * (table->count + 1) || grow_slots(table);
}

int name_table_add(name_table *table, const char *text, size_t length, uint32_t *out) {
    char name[NAME_BYTES_MAX + 1];
    uint32_t *slot;
    size_t bytes = clean(text, length, name);
    *out = 0;
    if (bytes == 0) return 1;
    if (!reserve(table)) return 0;
    slot = find_slot(table, name);
    if (*slot == 0 && table->count + 2 >= NAMES_MAX) {
        memcpy(name, "others", sizeof "others");
        bytes = strlen(name);
        slot = find_slot(table, name);
    }
    if (*slot == 0) {
        char *copy = malloc(bytes + 1);
        if (!copy) return 0;
        memcpy(copy, name, bytes + 1);
        table->names[table->count++] = copy;
        *slot = table->count;
    }
    *out = *slot;
    return 1;
}

const char *name_table_text(const name_table *table, uint32_t number) {
    return number > 0 && number <= table->count ? table->names[number - 1] : "";
}

void name_table_deinit(name_table *table) {
    for (uint32_t i = 0; i < table->count; i++)
        free(table->names[i]);
    free(table->names);
    free(table->slots);
    *table = (name_table){0};
}
