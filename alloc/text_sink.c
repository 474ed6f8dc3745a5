/* Bounded text: see text_sink.h. */
#include "text_sink.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

tn__text tn__text_begin(char *text, size_t bytes) {
    if (bytes == 0) text = NULL;
    if (text) text[0] = 0;
    return (tn__text){text, bytes, 0};
}

void tn__text_add(tn__text *out, const char *format, ...) {
    size_t room = out->text && out->used < out->bytes ? out->bytes - out->used : 0;
    char *at = room ? out->text + out->used : NULL;
    va_list args;
    va_start(args, format);
    int wrote = vsnprintf(at, room, format, args);
    va_end(args);
    TN_ASSERT(wrote >= 0);
    if (wrote > 0) out->used += (size_t)wrote;
}

void tn__text_add_size(tn__text *out, uint64_t bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes / 1024.0;
    size_t unit = 0;
    if (bytes < 1024) {
        tn__text_add(out, "%u B", (unsigned)bytes);
        return;
    }
    for (; value >= 1024.0 && unit + 1 < sizeof units / sizeof units[0]; unit++)
        value /= 1024.0;
    tn__text_add(out, "%.1f %s", value, units[unit]);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

/* Bytes of the UTF-8 character that begins here; 0 if none does. Not the overlong ones, surrogates
 * and numbers beyond Unicode: JSON readers refuse them. */
static size_t utf8_length(const unsigned char *text) {
    unsigned lead = text[0];
    unsigned least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    unsigned most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0 || text[1] < least || text[1] > most) return 0;
    for (size_t i = 2; i < length; i++) {
        if ((text[i] & 0xC0) != 0x80) return 0;
    }
    return length;
}

void tn__text_add_json(tn__text *out, const char *text) {
    const unsigned char *at = (const unsigned char *)text;
    if (!text) {
        tn__text_add(out, "null");
        return;
    }
    tn__text_add(out, "\"");
    while (*at) {
        size_t length = utf8_length(at);
        if (*at == '"' || *at == '\\') {
            tn__text_add(out, "\\%c", *at);
        } else if (*at < 0x20) {
            tn__text_add(out, "\\u%04x", *at);
        } else if (*at < 0x80) {
            tn__text_add(out, "%c", *at);
        } else if (length > 0) {
            tn__text_add(out, "%.*s", (int)length, (const char *)at);
        } else {
            tn__text_add(out, "\\ufffd");
        }
        at += length > 0 ? length : 1;
    }
    tn__text_add(out, "\"");
}

void tn__text_next_item(tn__text *out, int *is_first, const char *indent) {
    tn__text_add(out, "%s\n%s", *is_first ? "" : ",", indent);
    *is_first = 0;
}
