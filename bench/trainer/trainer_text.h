/* The trainer's data: bytes of files one after the other, of which the tail is held out.
 *
 *     | files in the order given ............................... | held out: the last tenth |
 *     | windows for training begin anywhere here                 | windows for validation   |
 *
 * A window is `sequence` tokens and the byte after the last one: the token at i is to predict the
 * one at i + 1. No window reaches over the border. Which windows a step takes follows from the seed
 * and the step's number alone.
 */
#ifndef TENURE_TRAINER_TEXT_H
#define TENURE_TRAINER_TEXT_H

#include <stddef.h>
#include <stdint.h>

enum { TRAINER_FILES_MAX = 256, TRAINER_MESSAGE_BYTES = 512 };

typedef struct trainer_text {
    unsigned char *bytes;
    size_t count;
    size_t train_count; /* the bytes before the tail that is held out */
    int files;
    uint64_t checksum; /* FNV-1a of all bytes: says which text it was */
} trainer_text;

/* Reads the files, or if count is 0 the project's own README, docs/ and public headers, in the
 * order of their names. 1, or 0 with the reason in `message`; at least `least` bytes held out. */
int trainer_text_read(const char *const *paths, int count, size_t least, trainer_text *out,
                      char message[TRAINER_MESSAGE_BYTES]);

void trainer_text_free(trainer_text *text);

/* Windows for training: `windows` of them, tokens and targets [windows * sequence] each. */
void trainer_text_batch(const trainer_text *text, uint64_t seed, int64_t windows, int64_t sequence,
                        unsigned char *tokens, unsigned char *targets);

/* Windows of the tail, the `index`-th batch of them, one window after the other and round. */
void trainer_text_held_out(const trainer_text *text, int64_t index, int64_t windows,
                           int64_t sequence, unsigned char *tokens, unsigned char *targets);

/* Batches of that size that the tail has, at least 1. */
int64_t trainer_text_held_out_batches(const trainer_text *text, int64_t windows, int64_t sequence);

#endif
