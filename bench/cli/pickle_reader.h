/* Reads a Python pickle of plain data, and runs nothing.
 *
 *     pickle *root = NULL;
 *     char error[PICKLE_ERROR_BYTES];
 *     if (pickle_read(bytes, length, &root, error) != PICKLE_READ) puts(error);
 *     const pickle_value *segments = pickle_member(root, pickle_root(root), "segments");
 *     pickle_free(root);
 *
 * A pickle is a program for a stack machine; those of its instructions that make None, booleans,
 * whole numbers of 64 bits, floats, texts, bytes, lists, tuples and dicts are carried out here, in
 * protocols 2 to 5. Every other instruction ends the reading with an error that names it: what
 * names a Python object, calls one or builds one is not looked at further. Nothing here recurses,
 * memory grows with the file's length only (each instruction makes at most one value or one
 * entry), and memo numbers are keys and no indices, so that a large one costs nothing.
 *
 * A value can be reached by several ways, and lists and dicts can hold themselves: whoever walks
 * them goes to a fixed depth and counts. Texts point into the bytes, which must outlive them. A
 * pickle is used by one thread.
 */
#ifndef TENURE_PICKLE_READER_H
#define TENURE_PICKLE_READER_H

#include <stddef.h>
#include <stdint.h>

#define PICKLE_ERROR_BYTES 512

typedef enum pickle_result { PICKLE_READ, PICKLE_BAD_INPUT, PICKLE_NO_MEMORY } pickle_result;

typedef enum pickle_kind {
    PICKLE_NONE,
    PICKLE_BOOLEAN,
    PICKLE_INTEGER,
    PICKLE_FLOAT,
    PICKLE_TEXT, /* of bytes too */
    PICKLE_LIST, /* of tuples too */
    PICKLE_DICT
} pickle_kind;

typedef struct pickle_value {
    pickle_kind kind;
    uint32_t count; /* of a list's items, twice a dict's members, a text's bytes */
    union {
        int64_t integer; /* booleans: 0 or 1 */
        double number;
        const char *text; /* not 0-terminated */
        uint32_t *items;  /* numbers of values; of a dict key, value, key, value ... */
    } of;
} pickle_value;

typedef struct pickle pickle;

pickle_result pickle_read(const unsigned char *bytes, size_t length, pickle **out, char *error);

/* NULL is a no-op. */
void pickle_free(pickle *self);

/* What the pickle is of. */
const pickle_value *pickle_root(const pickle *self);

/* How many values there are: at most one for each byte. */
uint32_t pickle_value_count(const pickle *self);

/* The number of a value, below the count. */
uint32_t pickle_value_number(const pickle *self, const pickle_value *value);

/* An item of a list, index below its count. */
const pickle_value *pickle_item(const pickle *self, const pickle_value *list, uint32_t index);

/* The value of a dict under a text, the last if there are several; NULL if it has none or is no
 * dict. */
const pickle_value *pickle_member(const pickle *self, const pickle_value *dict, const char *name);

/* 1 if the value is that text. NULL is none. */
int pickle_is_text(const pickle_value *value, const char *text);

#endif
