/* Writes a pickle of plain data, in protocol 2: any Python reads it, and PyTorch's viewer does.
 *
 *     pickle_begin(stream);
 *     pickle_dict_begin(stream);
 *     pickle_text(stream, "a");  pickle_integer(stream, 7);
 *     pickle_dict_end(stream);
 *     pickle_end(stream);                                        {"a": 7}
 *
 * What comes again is written once, remembered under a number, and recalled. Failures of the stream
 * are left to its ferror.
 */
#ifndef TENURE_PICKLE_WRITER_H
#define TENURE_PICKLE_WRITER_H

#include <stdint.h>
#include <stdio.h>

void pickle_begin(FILE *stream);
void pickle_end(FILE *stream);

void pickle_dict_begin(FILE *stream);
void pickle_dict_end(FILE *stream);

/* pickle_list_next comes before each item, with its index: readers take a thousand at a time. */
void pickle_list_begin(FILE *stream);
void pickle_list_next(FILE *stream, uint32_t index);
void pickle_list_end(FILE *stream);

void pickle_integer(FILE *stream, int64_t value);
void pickle_boolean(FILE *stream, int value);
void pickle_text(FILE *stream, const char *text); /* UTF-8 */

/* The last two values as a tuple. */
void pickle_pair(FILE *stream);

/* The last value gets the number; a recall is that value again. */
void pickle_remember(FILE *stream, uint32_t number);
void pickle_recall(FILE *stream, uint32_t number);

#endif
