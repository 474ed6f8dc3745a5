/* Values of command lines: see option_values.h. */
#include "option_values.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PROGRAM_PATH_BYTES = 4096 };

int option_count(const char *text, long least, long most, long *out) {
    char *end = NULL;
    const long value = strtol(text, &end, 10);
    if (end == text || *end || value < least || value > most) return 0;
    *out = value;
    return 1;
}

int option_driver(const char *text, tn_driver_kind *out) {
    static const char *const names[] = {"auto", "cuda", "host"};
    static const tn_driver_kind kinds[] = {TN_DRIVER_AUTO, TN_DRIVER_CUDA, TN_DRIVER_HOST};
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, names[i]) == 0) return *out = kinds[i], 1;
    }
    return 0;
}

int option_project_path(const char *name, char *out, size_t bytes) {
    char program[PROGRAM_PATH_BYTES] = "";
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length > 0) program[length] = 0;
    char *slash = strrchr(program, '/');
    if (slash) *slash = 0;
    const int written = snprintf(out, bytes, "%s/../../%s", program, name);
    return written >= 0 && (size_t)written < bytes;
}

const char *option_file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

unsigned char *option_read_file(const char *path, size_t least, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    unsigned char *contents = NULL;
    long length = -1;
    if (!file) return NULL;
    if (fseek(file, 0, SEEK_END) == 0) length = ftell(file);
    if (length >= 0 && (size_t)length >= least) {
        rewind(file);
        *bytes = (size_t)length;
        contents = malloc(*bytes ? *bytes : 1);
        if (contents && fread(contents, 1, *bytes, file) != *bytes) {
            free(contents);
            contents = NULL;
        }
    }
    fclose(file);
    return contents;
}
