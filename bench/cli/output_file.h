/* A file that appears whole or not at all.
 *
 *     output_file out;
 *     char error[OUTPUT_ERROR_BYTES];
 *     if (!output_begin(&out, "page.html", error)) ...
 *     fprintf(out.stream, ...);
 *     if (!output_end(&out, error)) ...            or output_abandon(&out)
 *
 * What is written goes to a new file, PATH.part or PATH.part2 ..., which gets its name when all of
 * it is on its way to the disk, with the permissions that a file of that name had; until then, and
 * after a failure, such a file is as it was. Devices and pipes are written
 * to as they are. "-" is standard output. A name that ends in .gz is compressed. Failures are told
 * at the end, by the first thing that failed.
 */
#ifndef TENURE_OUTPUT_FILE_H
#define TENURE_OUTPUT_FILE_H

#include <stdio.h>

#define OUTPUT_ERROR_BYTES 512

typedef struct output_file {
    FILE *stream;
    char *path; /* NULL: standard output */
    char *part; /* NULL: written to as it is */
} output_file;

/* 1 on success; 0 with the reason in error. */
int output_begin(output_file *out, const char *path, char *error);
int output_end(output_file *out, char *error);

/* A new file beside the one of that name: PATH.part, PATH.part2 ... and the ending, readable to
 * whom that one is. What is there already is somebody's, perhaps the input. Returns its descriptor,
 * and its name to free; -1 with errno and NULL. */
int output_part_make(const char *path, const char *ending, char **part);

/* Leaves nothing behind. */
void output_abandon(output_file *out);

#endif
