/* Tables of aligned text, and sizes and counts as people read them.
 *
 *     text_table *table = text_table_create("<>>");     left, right, right
 *     text_table_cell(table, "owner");                  cells fill rows from left to right
 *     text_table_cell(table, "bytes");
 *     text_table_cell(table, "share");
 *     text_table_rule(table);                           a line between two rows
 *     text_table_cell(table, "%s", name); ...
 *     text_table_print(table, stdout);
 *     text_table_destroy(table);
 *
 * Widths are counted in UTF-8 characters. Not thread-safe.
 */
#ifndef TENURE_TEXT_TABLE_H
#define TENURE_TEXT_TABLE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define TEXT_TABLE_COLUMNS_MAX 16
#define TEXT_TABLE_CELL_BYTES  128 /* longer cells are cut */

typedef struct text_table text_table;

/* One < or > per column. NULL if there is no memory. */
text_table *text_table_create(const char *columns);

/* The next cell. Without memory the table becomes incomplete, and printing says so. */
void text_table_cell(text_table *table, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Fills up the row if it is begun, and puts a line after it. */
void text_table_rule(text_table *table);

/* Two spaces between columns, no spaces at line ends. 1 on success; 0 if the table is incomplete
 * or the stream has failed. */
int text_table_print(const text_table *table, FILE *stream);

/* NULL is a no-op. */
void text_table_destroy(text_table *table);

/* Text in a struct, so that it can be an argument: text_size(n).text. */
typedef struct text_number {
    char text[40];
} text_number;

/* "512 B", "1.5 KiB", "42.5 GiB": the largest unit with at least one of it, one decimal. */
text_number text_size(uint64_t bytes);

/* "44,609.5 MiB": so that sizes of one table share a unit. */
text_number text_mebibytes(uint64_t bytes);

/* "109,804" */
text_number text_count(uint64_t count);

#endif
