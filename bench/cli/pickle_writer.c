/* Instructions of a pickle: see pickle_writer.h. */
#include "pickle_writer.h"

#include <string.h>

enum { LIST_BATCH = 1000 };

static void put_number(FILE *stream, uint64_t number, int bytes) {
    for (int i = 0; i < bytes; i++)
        fputc((int)(number >> (8 * i)) & 0xff, stream);
}

void pickle_begin(FILE *stream) { fputs("\x80\x02", stream); }
void pickle_end(FILE *stream) { fputc('.', stream); }

void pickle_dict_begin(FILE *stream) { fputs("}(", stream); }
void pickle_dict_end(FILE *stream) { fputc('u', stream); }

void pickle_list_begin(FILE *stream) { fputs("](", stream); }
void pickle_list_end(FILE *stream) { fputc('e', stream); }

void pickle_list_next(FILE *stream, uint32_t index) {
    if (index > 0 && index % LIST_BATCH == 0) fputs("e(", stream);
}

void pickle_integer(FILE *stream, int64_t value) {
    if (value >= 0 && value < 256) {
        fputc('K', stream);
        put_number(stream, (uint64_t)value, 1);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
        fputc('J', stream);
        put_number(stream, (uint64_t)value, 4);
    } else {
        fputs("\x8a\x08", stream);
        put_number(stream, (uint64_t)value, 8);
    }
}

void pickle_boolean(FILE *stream, int value) { fputc(value ? 0x88 : 0x89, stream); }

void pickle_text(FILE *stream, const char *text) {
    size_t length = strlen(text);
    fputc('X', stream);
    put_number(stream, length, 4);
    fwrite(text, 1, length, stream);
}

void pickle_pair(FILE *stream) { fputc(0x86, stream); }

void pickle_remember(FILE *stream, uint32_t number) {
    fputc('r', stream);
    put_number(stream, number, 4);
}

void pickle_recall(FILE *stream, uint32_t number) {
    fputc('j', stream);
    put_number(stream, number, 4);
}
