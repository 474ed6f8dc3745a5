/* Reading the trainer's text and cutting windows from it: see trainer_text.h. */
#include "trainer_text.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "option_values.h"
#include "random_fill.h"

/* One in so many bytes is held out. */
enum { HELD_OUT_SHARE = 10 };

static int fail(char message[TRAINER_MESSAGE_BYTES], const char *what, const char *which) {
    snprintf(message, TRAINER_MESSAGE_BYTES, "%s: %s", what, which);
    return 0;
}

static int append(trainer_text *text, const char *path, char message[TRAINER_MESSAGE_BYTES]) {
    size_t bytes = 0;
    unsigned char *contents = option_read_file(path, 0, &bytes);
    unsigned char *grown = NULL;
    if (!contents) return fail(message, "the text can not be read", path);
    grown = realloc(text->bytes, text->count + bytes + 1);
    if (grown) {
        memcpy(grown + text->count, contents, bytes);
        text->bytes = grown;
        text->count += bytes;
        text->files++;
    }
    free(contents);
    return grown ? 1 : fail(message, "no memory for the text", path);
}

/* README, docs and public headers, sorted by path. */
static int append_project(trainer_text *text, char message[TRAINER_MESSAGE_BYTES]) {
    static const char *const patterns[] = {"README.md", "docs/*.md", "*/tenure_*.h"};
    glob_t found = {0};
    int complete = 1;
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        char pattern[4096];
        if (!option_project_path(patterns[i], pattern, sizeof pattern)) continue;
        (void)glob(pattern, GLOB_APPEND, NULL, &found); /* to what there is: nothing at first */
    }
    if (found.gl_pathc == 0) complete = fail(message, "the project's text is not here", "--text");
    for (size_t i = 0; i < found.gl_pathc && complete; i++)
        complete = append(text, found.gl_pathv[i], message);
    globfree(&found);
    return complete;
}

static uint64_t checksum_of(const unsigned char *bytes, size_t count) {
    uint64_t sum = 0xcbf29ce484222325u;
    for (size_t i = 0; i < count; i++)
        sum = (sum ^ bytes[i]) * 0x100000001b3u;
    return sum;
}

int trainer_text_read(const char *const *paths, int count, size_t least, trainer_text *out,
                      char message[TRAINER_MESSAGE_BYTES]) {
    trainer_text text = {0};
    int complete = 1;
    if (count == 0) complete = append_project(&text, message);
    for (int i = 0; i < count && complete; i++)
        complete = append(&text, paths[i], message);
    text.train_count = text.count - text.count / HELD_OUT_SHARE;
    if (complete && text.count / HELD_OUT_SHARE < least) {
        char words[64];
        snprintf(words, sizeof words, "%zu bytes, expected at least %zu", text.count,
                 least * HELD_OUT_SHARE);
        complete = fail(message, "the text is too short", words);
    }
    if (!complete) {
        trainer_text_free(&text);
        return 0;
    }
    text.checksum = checksum_of(text.bytes, text.count);
    *out = text;
    return 1;
}

void trainer_text_free(trainer_text *text) {
    free(text->bytes);
    *text = (trainer_text){0};
}

/* ---- windows -------------------------------------------------------------------------------- */

static void cut(const unsigned char *from, int64_t window, int64_t sequence, unsigned char *tokens,
                unsigned char *targets) {
    memcpy(tokens + window * sequence, from, (size_t)sequence);
    memcpy(targets + window * sequence, from + 1, (size_t)sequence);
}

void trainer_text_batch(const trainer_text *text, uint64_t seed, int64_t windows, int64_t sequence,
                        unsigned char *tokens, unsigned char *targets) {
    uint64_t state = seed;
    for (int64_t i = 0; i < windows; i++) {
        const size_t at = random_next(&state) % (text->train_count - (size_t)sequence);
        cut(text->bytes + at, i, sequence, tokens, targets);
    }
}

/* Whole windows in the tail, whose last byte is only a target. */
static int64_t held_out_windows(const trainer_text *text, int64_t sequence) {
    return ((int64_t)(text->count - text->train_count) - 1) / sequence;
}

void trainer_text_held_out(const trainer_text *text, int64_t index, int64_t windows,
                           int64_t sequence, unsigned char *tokens, unsigned char *targets) {
    const unsigned char *tail = text->bytes + text->train_count;
    for (int64_t i = 0; i < windows; i++) {
        const int64_t window = (index * windows + i) % held_out_windows(text, sequence);
        cut(tail + window * sequence, i, sequence, tokens, targets);
    }
}

int64_t trainer_text_held_out_batches(const trainer_text *text, int64_t windows, int64_t sequence) {
    const int64_t batches = held_out_windows(text, sequence) / windows;
    return batches > 0 ? batches : 1;
}
