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

#include "fuzz_support.h"
#include "trace_reader.h"

#define INPUTS TENURE_SOURCE_DIR "/tests/cli/inputs"

enum { INPUTS_MAX = 128, SLOTS_MAX = 16 * 1024, MUTATIONS = 20000 };

static fuzz_input kept[INPUTS_MAX];
static size_t kept_count;
static size_t good_first; /* the names of good ones sort last */
static const uint64_t device_bytes = UINT64_C(1) << 30;

/* ---- mutations ---------------------------------------------------------------------------- */

static void insert_token(fuzz_input *out, uint64_t *state) {
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
    const char *token = tokens[fuzz_below(state, sizeof(tokens) / sizeof(tokens[0]))];
    size_t at = fuzz_below(state, out->length + 1);
    size_t removed = fuzz_below(state, 2) ? fuzz_below(state, out->length - at + 1) % 4 : 0;
    fuzz_input_replace(out, at, removed, token, strlen(token));
}

/* Copies a piece of this or another input into this one. */
static void splice(fuzz_input *out, const fuzz_input *from, uint64_t *state) {
    static unsigned char piece[FUZZ_INPUT_BYTES_MAX];
    size_t begin = fuzz_below(state, from->length + 1);
    size_t length = fuzz_below(state, from->length - begin + 1);
    memcpy(piece, from->bytes + begin, length);
    fuzz_input_replace(out, fuzz_below(state, out->length + 1), 0, piece, length);
}

/* A row that is right in itself, between two rows: what follows may still be whole. */
static void insert_row(fuzz_input *out, uint64_t *state) {
    char row[64];
    size_t at = fuzz_below(state, out->length + 1);
    while (at < out->length && (at == 0 || out->bytes[at - 1] != '\n'))
        at++;
    int length = snprintf(row, sizeof(row), "a,%llu,%llu,%u\n",
                          (unsigned long long)fuzz_next(state) >> fuzz_below(state, 64),
                          (unsigned long long)(fuzz_next(state) >> (34 + fuzz_below(state, 30))),
                          (unsigned)fuzz_below(state, 4));
    fuzz_input_replace(out, at, 0, row, (size_t)length);
}

static void mutate_once(fuzz_input *out, uint64_t *state) {
    size_t at = fuzz_below(state, out->length);
    switch (fuzz_below(state, 10)) {
    case 0:
        if (out->length) out->bytes[at] ^= (unsigned char)(1u << fuzz_below(state, 8));
        break;
    case 1:
        if (out->length) out->bytes[at] = (unsigned char)fuzz_next(state);
        break;
    case 2: out->length = fuzz_below(state, out->length + 1); break;
    case 3: fuzz_input_replace(out, at, fuzz_below(state, out->length - at + 1) % 64, "", 0); break;
    case 4: splice(out, out, state); break;
    case 5: splice(out, &kept[fuzz_below(state, kept_count)], state); break;
    case 6: insert_token(out, state); break;
    default: insert_row(out, state); break;
    }
}

static void make_mutation(fuzz_input *out, uint64_t seed, uint64_t number) {
    uint64_t state = seed * UINT64_C(0x2545f4914f6cdd1d) + number;
    size_t from = fuzz_below(&state, 2) ? good_first : 0;
    *out = kept[from + fuzz_below(&state, kept_count - from)];
    for (size_t count = 1 + fuzz_below(&state, 4); count > 0; count--)
        mutate_once(out, &state);
}

/* ---- what must hold ----------------------------------------------------------------------- */

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
    static fuzz_input mutation;
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
            fuzz_expect(event_fits(reader, &event, taken), "an event does not fit", seed, number);
        snprintf(error, sizeof(error), "%s", trace_reader_error(reader));
    }
    trace_reader_close(reader);
    fuzz_expect(result == TRACE_END || result == TRACE_BAD_INPUT, "another result", seed, number);
    if (result == TRACE_END) fuzz_expect(!error[0], "an end with a message", seed, number);
    if (result == TRACE_BAD_INPUT) {
        int is_pickle = mutation.length > 0 && mutation.bytes[0] == 0x80;
        fuzz_expect(is_positioned(error, is_pickle), error, seed, number);
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
        fuzz_input_load(&kept[i], path);
        if (strncmp(names[i]->d_name, "bad", 3) == 0) good_first = (size_t)i + 1;
        free(names[i]);
    }
    free(names);
    kept_count = (size_t)count;
}

static void every_mutation_ends_well_or_in_a_positioned_error(void **state) {
    uint64_t seed = fuzz_setting("TENURE_FUZZ_SEED", 1);
    uint64_t first = fuzz_setting("TENURE_FUZZ_FIRST", 0);
    uint64_t count = fuzz_setting("TENURE_FUZZ_COUNT", MUTATIONS);
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
