/* Tables of aligned text; see text_table.h.
 *
 * Invariant: `cells` holds cell_count cells in reading order; a rule is remembered as the number
 * of the row that it comes before, in rising order.
 */
#include "text_table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { RULES_MAX = 16, FIRST_CELLS = 64 };

typedef struct table_cell {
    char text[TEXT_TABLE_CELL_BYTES];
} table_cell;

struct text_table {
    char columns[TEXT_TABLE_COLUMNS_MAX + 1];
    size_t column_count;
    table_cell *cells;
    size_t cell_count;
    size_t cell_capacity;
    size_t rules[RULES_MAX];
    size_t rule_count;
    int is_incomplete;
};

/* Bytes of UTF-8 that begin a character. */
static size_t width_of(const char *text) {
    size_t width = 0;
    for (; *text; text++)
        width += ((unsigned char)*text & 0xc0) != 0x80;
    return width;
}

text_table *text_table_create(const char *columns) {
    size_t count = strlen(columns);
    if (count == 0 || count > TEXT_TABLE_COLUMNS_MAX) return NULL;
    text_table *table = calloc(1, sizeof(*table));
    if (!table) return NULL;
    snprintf(table->columns, sizeof(table->columns), "%s", columns);
    table->column_count = count;
    return table;
}

static int reserve_cell(text_table *table) {
    if (table->cell_count < table->cell_capacity) return 1;
    size_t capacity = table->cell_capacity ? table->cell_capacity * 2 : FIRST_CELLS;
    table_cell *cells = realloc(table->cells, capacity * sizeof(*cells));
    if (!cells) return 0;
    table->cells = cells;
    table->cell_capacity = capacity;
    return 1;
}

void text_table_cell(text_table *table, const char *format, ...) {
    va_list arguments;
    if (!reserve_cell(table)) {
        table->is_incomplete = 1;
        return;
    }
    table_cell *cell = &table->cells[table->cell_count++];
    va_start(arguments, format);
    vsnprintf(cell->text, sizeof(cell->text), format, arguments);
    va_end(arguments);
}

void text_table_rule(text_table *table) {
    while (!table->is_incomplete && table->cell_count % table->column_count != 0)
        text_table_cell(table, "%s", "");
    if (table->rule_count == RULES_MAX) {
        table->is_incomplete = 1;
        return;
    }
    table->rules[table->rule_count++] = table->cell_count / table->column_count;
}

static size_t column_width(const text_table *table, size_t column) {
    size_t widest = 0;
    for (size_t i = column; i < table->cell_count; i += table->column_count) {
        size_t width = width_of(table->cells[i].text);
        if (width > widest) widest = width;
    }
    return widest;
}

static void print_rule(const size_t *widths, size_t column_count, FILE *stream) {
    for (size_t column = 0; column < column_count; column++) {
        for (size_t i = 0; i < widths[column]; i++)
            fputc('-', stream);
        fputs(column + 1 < column_count ? "  " : "\n", stream);
    }
}

/* Blanks are held back until something follows them, so that no line ends in blanks. */
static void print_row(const text_table *table, size_t row, const size_t *widths, FILE *stream) {
    size_t blanks = 0;
    for (size_t column = 0; column < table->column_count; column++) {
        size_t index = row * table->column_count + column;
        const char *text = index < table->cell_count ? table->cells[index].text : "";
        size_t pad = widths[column] - width_of(text);
        int is_right = table->columns[column] == '>';
        if (is_right) blanks += pad;
        if (*text) {
            fprintf(stream, "%*s%s", (int)blanks, "", text);
            blanks = 0;
        }
        if (!is_right) blanks += pad;
        blanks += 2;
    }
    fputc('\n', stream);
}

int text_table_print(const text_table *table, FILE *stream) {
    size_t widths[TEXT_TABLE_COLUMNS_MAX];
    size_t row_count = (table->cell_count + table->column_count - 1) / table->column_count;
    size_t rule = 0;
    for (size_t column = 0; column < table->column_count; column++)
        widths[column] = column_width(table, column);
    for (size_t row = 0; row <= row_count; row++) {
        for (; rule < table->rule_count && table->rules[rule] == row; rule++)
            print_rule(widths, table->column_count, stream);
        if (row < row_count) print_row(table, row, widths, stream);
    }
    return !table->is_incomplete && !ferror(stream);
}

void text_table_destroy(text_table *table) {
    if (!table) return;
    free(table->cells);
    free(table);
}

text_number text_size(uint64_t bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    text_number out;
    double number = (double)bytes;
    size_t unit = 0;
    if (bytes < 1024) {
        snprintf(out.text, sizeof(out.text), "%llu B", (unsigned long long)bytes);
        return out;
    }
    /* What would round up to 1024.0 of a unit is shown as 1.0 of the next one. */
    for (number /= 1024.0; number >= 1023.95 && unit + 1 < sizeof(units) / sizeof(units[0]); unit++)
        number /= 1024.0;
    snprintf(out.text, sizeof(out.text), "%.1f %s", number, units[unit]);
    return out;
}

text_number text_count(uint64_t count) {
    char digits[24];
    text_number out;
    size_t length = (size_t)snprintf(digits, sizeof(digits), "%llu", (unsigned long long)count);
    size_t used = 0;
    for (size_t i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0) out.text[used++] = ',';
        out.text[used++] = digits[i];
    }
    out.text[used] = 0;
    return out;
}

text_number text_mebibytes(uint64_t bytes) {
    const uint64_t mebibyte = UINT64_C(1) << 20;
    text_number out;
    uint64_t tenths = bytes / mebibyte * 10 + (bytes % mebibyte * 10 + mebibyte / 2) / mebibyte;
    snprintf(out.text, sizeof(out.text), "%.27s.%u MiB", text_count(tenths / 10).text,
             (unsigned)(tenths % 10));
    return out;
}
