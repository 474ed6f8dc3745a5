/* See table_support.h. */
#include "table_support.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test_support.h"

enum { TABLE_BYTES_MAX = 65536, HEAD_LINES = 3, SUM_DIGITS = 16 };

/* FNV-1a, as ops/cuda_gemm_file.c says. */
static uint64_t sum_of(const char *text, size_t bytes) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)text[i]) * 0x100000001B3u;
    return hash;
}

/* Each line's ends it, and is of all before it. */
static void put_sums(char *text) {
    int number = 0;
    for (char *end = strchr(text, '\n'); end; end = strchr(end + 1, '\n')) {
        char digits[SUM_DIGITS + 1];
        if (++number <= HEAD_LINES) continue;
        char *sum = end - SUM_DIGITS;
        assert_int_equal(sum[-1], ' ');
        snprintf(digits, sizeof digits, "%016" PRIx64, sum_of(text, (size_t)(sum - 1 - text)));
        memcpy(sum, digits, SUM_DIGITS);
    }
}

void table_edit(const char *path, const char *from, const char *to) {
    char *text = calloc(TABLE_BYTES_MAX, 1), *edited = calloc(TABLE_BYTES_MAX, 1);
    FILE *file = fopen(path, "r");
    assert_true(text && edited && file);
    assert_true(fread(text, 1, TABLE_BYTES_MAX - 1, file) < TABLE_BYTES_MAX - 1);
    assert_int_equal(fclose(file), 0);
    const char *at = strstr(text, from);
    assert_non_null(at);
    snprintf(edited, TABLE_BYTES_MAX, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    put_sums(edited);
    file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(edited, file) >= 0);
    assert_int_equal(fclose(file), 0);
    free(text), free(edited);
}
