/* A page of HTML: see html_page.h. */
#include "html_page.h"

#include <stdarg.h>

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
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>", stream);
    html_text(stream, title);
    fputs("</title>\n<style>\n"
          "body { font: 14px/1.4 sans-serif; margin: 2em auto; max-width: 70em; color: #222; }\n"
          "table { border-collapse: collapse; }\n"
          "th, td { padding: 2px 10px; text-align: left; border-bottom: 1px solid #ddd; }\n"
          "td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }\n"
          "div.bar { height: 10px; min-width: 1px; }\n"
          "svg { display: block; margin: 4px 0 12px; background: #f4f4f4; }\n"
          ".live { fill: #4878a8; background: #4878a8; }\n"
          ".free { fill: #9cc59c; background: #9cc59c; }\n"
          ".pending { fill: #d8a848; background: #d8a848; }\n"
          ".void { fill: #e4e4e4; background: #e4e4e4; }\n"
          ".imported { fill: #707070; background: #707070; }\n"
          "span.key { padding: 0 8px; margin-right: 4px; }\n"
          "polyline { fill: none; stroke: #4878a8; stroke-width: 1.5; }\n"
          "</style>\n</head>\n<body>\n<h1>",
          stream);
    html_text(stream, title);
    fputs("</h1>\n", stream);
}

void html_page_end(FILE *stream) { fputs("</body>\n</html>\n", stream); }

void html_section(FILE *stream, const char *title) {
    fputs("<h2>", stream);
    html_text(stream, title);
    fputs("</h2>\n", stream);
}

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
    fprintf(stream,
            "<td style=\"width: 20em\"><div class=\"bar %s\" style=\"width: %d%%\"></div>\n", style,
            (int)(percent + 0.5));
}

void html_table_end(FILE *stream) { fputs("</table>\n", stream); }
