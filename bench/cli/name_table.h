/* Texts under small numbers: the same text has the same number. Number 0 is "", unnamed.
 *
 *     name_table names = {0};
 *     name_table_add(&names, text, length, &number)     0 if there is no memory
 *     name_table_text(&names, number)
 *     name_table_deinit(&names);
 *
 * What comes in is from files: bytes that are no UTF-8 and control characters become '?', and what
 * is beyond NAME_BYTES_MAX is left out, so that a name can go into any format. From the 65,535th
 * on all are one name, "others". Not thread-safe.
 */
#ifndef TENURE_NAME_TABLE_H
#define TENURE_NAME_TABLE_H

#include <stddef.h>
#include <stdint.h>

#define NAME_BYTES_MAX 120
#define NAMES_MAX      65536u

typedef struct name_table {
    char **names; /* of numbers 1 to count */
    uint32_t count;
    uint32_t capacity;
    uint32_t *slots; /* numbers by hash; 0: empty */
    uint32_t slot_count;
} name_table;

int name_table_add(name_table *table, const char *text, size_t length, uint32_t *out);
const char *name_table_text(const name_table *table, uint32_t number);
void name_table_deinit(name_table *table);

#endif
