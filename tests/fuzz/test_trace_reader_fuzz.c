/* Mutated traces: whatever the bytes, the reader ends in a whole trace or in a positioned error.
 *
 * Each mutation is made from one of the kept inputs of tests/cli/inputs by the seed and its own
 * number alone, so a failure is replayed by TENURE_FUZZ_SEED=S TENURE_FUZZ_FIRST=N, which it
 * prints. Run under ASan and UBSan by the asan preset.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "test_support.h"
#include "trace_reader.h"

#define INPUTS TENURE_SOURCE_DIR "/tests/cli/inputs"

enum { INPUT_BYTES_MAX = 16 * 1024, INPUTS_MAX = 128, SLOTS_MAX = 16 * 1024, MUTATIONS = 20000 };

typedef struct input {
    size_t length;
    unsigned char bytes[INPUT_BYTES_MAX];
} input;

static input kept[INPUTS_MAX];
static size_t kept_count;
static size_t good_first; /* the names of good ones sort last */
static const uint64_t device_bytes = UINT64_C(1) << 30;

static uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static size_t random_below(uint64_t *state, size_t bound) {
    return bound ? (size_t)(random_next(state) % bound) : 0;
}

/* ---- mutations ---------------------------------------------------------------------------- */

/* Replaces `removed` bytes at `at` by the new ones, as far as there is room. */
static void replace(input *out, size_t at, size_t removed, const void *bytes, size_t length) {
    size_t tail = out->length - at - removed;
    if (at + length + tail > INPUT_BYTES_MAX) return;
    memmove(out->bytes + at + length, out->bytes + at + removed, tail);
    memcpy(out->bytes + at, bytes, length);
    out->length = at + length + tail;
}

static void insert_token(input *out, uint64_t *state) {
    static const char *const tokens[] = {",",
                                         "\n",
                                         "a,",
                                         "f,",
                                         "-",
                                         "0x",
                                         "18446744073709551615",
                                         "99999999999999999999",
                                         "(nil)",
                                         ".",
                                         "\r",
                                         "a,1,1073741824,0\n",
                                         "f,1,,\n",
                                         "allocate failure",
                                         " ",
                                         "1e9",
                                         "a,1,0,3\n"};
    const char *token = tokens[random_below(state, sizeof(tokens) / sizeof(tokens[0]))];
    size_t at = random_below(state, out->length + 1);
    size_t removed = random_below(state, 2) ? random_below(state, out->length - at + 1) % 4 : 0;
    replace(out, at, removed, token, strlen(token));
}

/* Copies a piece of this or another input into this one. */
static void splice(input *out, const input *from, uint64_t *state) {
    static unsigned char piece[INPUT_BYTES_MAX];
    size_t begin = random_below(state, from->length + 1);
    size_t length = random_below(state, from->length - begin + 1);
    memcpy(piece, from->bytes + begin, length);
    replace(out, random_below(state, out->length + 1), 0, piece, length);
}

/* A row that is right in itself, between two rows: what follows may still be whole. */
static void insert_row(input *out, uint64_t *state) {
    char row[64];
    size_t at = random_below(state, out->length + 1);
    while (at < out->length && (at == 0 || out->bytes[at - 1] != '\n'))
        at++;
    int length =
        snprintf(row, sizeof(row), "a,%llu,%llu,%u\n",
                 (unsigned long long)random_next(state) >> random_below(state, 64),
                 (unsigned long long)(random_next(state) >> (34 + random_below(state, 30))),
                 (unsigned)random_below(state, 4));
    replace(out, at, 0, row, (size_t)length);
}

static void mutate_once(input *out, uint64_t *state) {
    size_t at = random_below(state, out->length);
    switch (random_below(state, 10)) {
    case 0:
        if (out->length) out->bytes[at] ^= (unsigned char)(1u << random_below(state, 8));
        break;
    case 1:
        if (out->length) out->bytes[at] = (unsigned char)random_next(state);
        break;
    case 2: out->length = random_below(state, out->length + 1); break;
    case 3: replace(out, at, random_below(state, out->length - at + 1) % 64, "", 0); break;
    case 4: splice(out, out, state); break;
    case 5: splice(out, &kept[random_below(state, kept_count)], state); break;
    case 6: insert_token(out, state); break;
    default: insert_row(out, state); break;
    }
}

static void make_mutation(input *out, uint64_t seed, uint64_t number) {
    uint64_t state = seed * UINT64_C(0x2545f4914f6cdd1d) + number;
    size_t from = random_below(&state, 2) ? good_first : 0;
    *out = kept[from + random_below(&state, kept_count - from)];
    for (size_t count = 1 + random_below(&state, 4); count > 0; count--)
        mutate_once(out, &state);
}

/* ---- what must hold ----------------------------------------------------------------------- */

static void expect(int holds, const char *what, uint64_t seed, uint64_t number) {
    if (!holds)
        fail_msg("%s; replay with TENURE_FUZZ_SEED=%llu TENURE_FUZZ_FIRST=%llu", what,
                 (unsigned long long)seed, (unsigned long long)number);
}

/* "fuzz:LINE: words", or of what begins as a pickle "fuzz: words", all of it printable. */
static int is_positioned(const char *message, int is_pickle) {
    unsigned long long line = is_pickle;
    int length = 0;
    if (is_pickle) {
        sscanf(message, "fuzz: %n", &length);
    } else if (sscanf(message, "fuzz:%llu: %n", &line, &length) != 1) {
        return 0;
    }
    if (length == 0 || line == 0) return 0;
    if (!message[length]) return 0;
    for (const char *at = message; *at; at++) {
        if (*at < 0x20 || *at > 0x7e) return 0;
    }
    return 1;
}

/* Allocations take slots that are free and frees give back what was taken. */
static int event_fits(const trace_reader *reader, const trace_event *event, uint64_t *taken) {
    if (event->op == TRACE_SHORTAGE) return 1;
    if (event->slot >= trace_reader_slot_count(reader) || event->slot >= SLOTS_MAX) return 0;
    if (event->stream >= trace_reader_stream_count(reader)) return 0;
    if (event->bytes > device_bytes) return 0;
    if (event->op == TRACE_ALLOC) {
        if (taken[event->slot]) return 0;
        taken[event->slot] = event->bytes + 1;
        return 1;
    }
    if (taken[event->slot] != event->bytes + 1) return 0;
    taken[event->slot] = 0;
    return 1;
}

/* Reads one mutation to its end; 1 if it was a whole trace. */
static int read_mutation(int file, uint64_t seed, uint64_t number) {
    static input mutation;
    static uint64_t taken[SLOTS_MAX];
    char error[TRACE_ERROR_BYTES] = "";
    trace_reader *reader = NULL;
    trace_event event;
    make_mutation(&mutation, seed, number);
    memset(taken, 0, sizeof(taken));
    assert_int_equal(ftruncate(file, 0), 0);
    assert_int_equal(pwrite(file, mutation.bytes, mutation.length, 0), mutation.length);
    assert_int_equal(lseek(file, 0, SEEK_SET), 0);
    trace_result result = trace_reader_open_descriptor(dup(file), "fuzz", &reader, error);
    if (result == TRACE_EVENT) {
        trace_reader_limit(reader, device_bytes);
        if (number % 2) (void)trace_reader_want_shortages(reader);
        while ((result = trace_reader_next(reader, &event)) == TRACE_EVENT)
            expect(event_fits(reader, &event, taken), "an event does not fit", seed, number);
        snprintf(error, sizeof(error), "%s", trace_reader_error(reader));
    }
    trace_reader_close(reader);
    expect(result == TRACE_END || result == TRACE_BAD_INPUT, "another result", seed, number);
    if (result == TRACE_END) expect(!error[0], "an end with a message", seed, number);
    if (result == TRACE_BAD_INPUT) {
        int is_pickle = mutation.length > 0 && mutation.bytes[0] == 0x80;
        expect(is_positioned(error, is_pickle), error, seed, number);
    }
    return result == TRACE_END;
}

/* ---- the run ------------------------------------------------------------------------------ */

static int compare_names(const struct dirent **left, const struct dirent **right) {
    return strcmp((*left)->d_name, (*right)->d_name); /* not strcoll: the same in every locale */
}

static int is_input(const struct dirent *entry) { return strstr(entry->d_name, ".csv") != NULL; }

static void load_inputs(void) {
    struct dirent **names = NULL;
    int count = scandir(INPUTS, &names, is_input, compare_names);
    assert_in_range(count, 1, INPUTS_MAX);
    for (int i = 0; i < count; i++) {
        char path[512];
        snprintf(path, sizeof(path), INPUTS "/%s", names[i]->d_name);
        FILE *file = fopen(path, "rb");
        assert_non_null(file);
        kept[i].length = fread(kept[i].bytes, 1, INPUT_BYTES_MAX, file);
        fclose(file);
        if (strncmp(names[i]->d_name, "bad", 3) == 0) good_first = (size_t)i + 1;
        free(names[i]);
    }
    free(names);
    kept_count = (size_t)count;
}

static uint64_t setting(const char *variable, uint64_t fallback) {
    const char *text = getenv(variable);
    return text && *text ? strtoull(text, NULL, 10) : fallback;
}

static void every_mutation_ends_well_or_in_a_positioned_error(void **state) {
    uint64_t seed = setting("TENURE_FUZZ_SEED", 1);
    uint64_t first = setting("TENURE_FUZZ_FIRST", 0);
    uint64_t count = setting("TENURE_FUZZ_COUNT", MUTATIONS);
    uint64_t whole = 0;
    int file = memfd_create("mutation", MFD_CLOEXEC);
    (void)state;
    assert_true(file >= 0);
    load_inputs();
    for (uint64_t number = first; number < first + count; number++)
        whole += (uint64_t)read_mutation(file, seed, number);
    close(file);
    print_message("seed %llu: %llu mutations, %llu of them whole traces\n",
                  (unsigned long long)seed, (unsigned long long)count, (unsigned long long)whole);
    /* A run in which all, or none, were refused would test half of what it should. */
    if (count >= 1000) assert_in_range(whole, count / 100, count / 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mutation_ends_well_or_in_a_positioned_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
