/* A page of HTML: see html_page.h. */
#include "html_page.h"

#include <stdarg.h>

#include "report_assets.h"

enum { CELL_BYTES = 1024 }; /* longer text is cut */

void html_text(FILE *stream, const char *text) {
    for (; *text; text++) {
        switch (*text) {
        case '<': fputs("&lt;", stream); break;
        case '>': fputs("&gt;", stream); break;
        case '&': fputs("&amp;", stream); break;
        case '"': fputs("&quot;", stream); break;
        default: fputc(*text, stream);
        }
    }
}

void html_page_begin(FILE *stream, const char *title) {
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>",
          stream);
    html_text(stream, title);
    fprintf(stream, "</title>\n<style>\n%s</style>\n</head>\n<body>\n<h1>", report_style);
    html_text(stream, title);
    fputs("</h1>\n", stream);
}

void html_page_end(FILE *stream) { fputs("</body>\n</html>\n", stream); }

void html_card_begin(FILE *stream, const char *title) {
    fputs("<div class=\"card\"><h2>", stream);
    html_text(stream, title);
    fputs("</h2>\n<div class=\"scroll\">\n", stream);
}

void html_card_end(FILE *stream) { fputs("</div></div>\n", stream); }

static void put_element(FILE *stream, const char *begin, const char *text, const char *end) {
    fputs(begin, stream);
    html_text(stream, text);
    fputs(end, stream);
}

void html_paragraph(FILE *stream, const char *format, ...) {
    char text[CELL_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    put_element(stream, "<p>", text, "</p>\n");
}

void html_table_begin(FILE *stream, const char *columns, ...) {
    va_list titles;
    va_start(titles, columns);
    fputs("<table>\n<tr>", stream);
    for (; *columns; columns++) {
        const char *title = va_arg(titles, const char *);
        fputs(*columns == 'r' ? "<th class=\"n\">" : "<th>", stream);
        html_text(stream, title);
    }
    va_end(titles);
    fputc('\n', stream);
}

void html_row(FILE *stream) { fputs("<tr>", stream); }

void html_cell(FILE *stream, const char *format, ...) {
    char text[CELL_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    put_element(stream, "<td>", text, "\n");
}

void html_number(FILE *stream, const char *format, ...) {
    char text[CELL_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    put_element(stream, "<td class=\"n\">", text, "\n");
}

void html_bar(FILE *stream, double part, double whole, const char *style) {
    double percent = whole > 0 && part > 0 ? 100.0 * part / whole : 0.0;
    if (percent > 100.0) percent = 100.0;
    fprintf(stream, "<td class=\"track\"><div class=\"bar %s\" style=\"width: %d%%\"></div>\n",
            style, (int)(percent + 0.5));
}

void html_table_end(FILE *stream) { fputs("</table>\n", stream); }
