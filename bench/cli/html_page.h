/* One self-contained HTML page: no style, script, font or picture from elsewhere.
 *
 *     html_page_begin(stream, "pool weights");
 *     html_card_begin(stream, "Statistics");
 *     html_table_begin(stream, "lrr", "name", "bytes", "share");
 *     html_cell(stream, "%s", name); ...
 *     html_table_end(stream);
 *     html_card_end(stream);
 *     html_page_end(stream);
 *
 * Whatever comes from a file is escaped here. Failures of the stream are left to its ferror.
 */
#ifndef TENURE_HTML_PAGE_H
#define TENURE_HTML_PAGE_H

#include <stdio.h>

void html_page_begin(FILE *stream, const char *title);
void html_page_end(FILE *stream);

/* A part of the page with a title. What is too wide for the screen moves sideways within it. */
void html_card_begin(FILE *stream, const char *title);
void html_card_end(FILE *stream);

/* A paragraph, and text within anything else. */
void html_paragraph(FILE *stream, const char *format, ...) __attribute__((format(printf, 2, 3)));
void html_text(FILE *stream, const char *text);

/* A heading for each letter of columns: l for text, r for numbers. */
void html_table_begin(FILE *stream, const char *columns, ...);
void html_row(FILE *stream);
void html_cell(FILE *stream, const char *format, ...) __attribute__((format(printf, 2, 3)));
void html_number(FILE *stream, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A bar of part / whole. */
void html_bar(FILE *stream, double part, double whole, const char *style);
void html_table_end(FILE *stream);

#endif
