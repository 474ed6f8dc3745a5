/* Mutated snapshots of PyTorch: whatever the bytes, they are a history or an error with a reason.
 *
 * A history that comes out is whole: every writer takes it, and the trace that is written of it is
 * read again with as many events. Mutations are of the kept snapshots under tests/cli/inputs; each
 * is made from the seed and its own number alone, and replayed by TENURE_FUZZ_SEED=S
 * TENURE_FUZZ_FIRST=N, which a failure prints. TENURE_FUZZ_COUNT=N makes longer runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fuzz_support.h"
#include "history_write.h"
#include "report_data.h"
#include "torch_history.h"
#include "trace_reader.h"

#define INPUTS TENURE_SOURCE_DIR "/tests/cli/inputs"

enum { INPUT_COUNT = 3, MUTATIONS = 10000 };

static fuzz_input kept[INPUT_COUNT];
static int trace_file;

/* ---- mutations ------------------------------------------------------------------------------- */

#define TOKEN(text)                                                                                \
    { text, sizeof(text) - 1 }

/* Whole instructions, those that are refused among them. */
static void put_instruction(fuzz_input *out, uint64_t *state) {
    static const struct {
        const char *bytes;
        size_t length;
    } tokens[] = {TOKEN("("),
                  TOKEN("e"),
                  TOKEN("u"),
                  TOKEN("t"),
                  TOKEN("a"),
                  TOKEN("s"),
                  TOKEN("0"),
                  TOKEN("1"),
                  TOKEN("2"),
                  TOKEN("N"),
                  TOKEN("]"),
                  TOKEN("}"),
                  TOKEN("l"),
                  TOKEN("d"),
                  TOKEN("\x94"),
                  TOKEN("h\x01"),
                  TOKEN("h\x05"),
                  TOKEN("h\x20"),
                  TOKEN("K\x00"),
                  TOKEN("\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"),
                  TOKEN("\x85"),
                  TOKEN("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"),
                  TOKEN("\x87"),
                  TOKEN("j\xff\xff\xff\xff"),
                  TOKEN("."),
                  TOKEN("r\xff\xff\xff\xff"),
                  TOKEN("cos\nsystem\n"),
                  TOKEN("\x8c\x05"
                        "alloc"),
                  TOKEN("R"),
                  TOKEN("\x8c\x0e"
                        "free_completed"),
                  TOKEN("\x93"),
                  TOKEN("\x8c\x04"
                        "size")};
    size_t which = fuzz_below(state, sizeof(tokens) / sizeof(tokens[0]));
    size_t at = 2 + fuzz_below(state, out->length - 2);
    size_t removed = fuzz_below(state, 2) ? tokens[which].length : 0;
    if (removed > out->length - at) removed = out->length - at;
    fuzz_input_replace(out, at, removed, tokens[which].bytes, tokens[which].length);
}

static void splice(fuzz_input *out, const fuzz_input *from, uint64_t *state) {
    static unsigned char piece[FUZZ_INPUT_BYTES_MAX];
    size_t begin = fuzz_below(state, from->length);
    size_t length = fuzz_below(state, from->length - begin) % 512;
    memcpy(piece, from->bytes + begin, length);
    fuzz_input_replace(out, fuzz_below(state, out->length), 0, piece, length);
}

/* What numbers are made of comes often: then the pickle stays whole and the snapshot goes wrong. */
static void change_number(fuzz_input *out, uint64_t *state) {
    size_t at = 2 + fuzz_below(state, out->length - 2);
    while (at + 9 < out->length && out->bytes[at] != 'K' && out->bytes[at] != 'J' &&
           out->bytes[at] != 'M' && out->bytes[at] != 0x8a)
        at++;
    if (at + 9 < out->length)
        out->bytes[at + 1 + fuzz_below(state, 5)] ^= 1u << fuzz_below(state, 8);
}

static void mutate_once(fuzz_input *out, uint64_t *state) {
    size_t at = fuzz_below(state, out->length);
    if (out->length < 4) return;
    switch (fuzz_below(state, 12)) {
    case 0: out->bytes[at] ^= (unsigned char)(1u << fuzz_below(state, 8)); break;
    case 1: out->bytes[at] = (unsigned char)fuzz_next(state); break;
    case 2: out->length = 1 + fuzz_below(state, out->length); break;
    case 3: fuzz_input_replace(out, at, fuzz_below(state, out->length - at) % 16, "", 0); break;
    case 4: splice(out, &kept[fuzz_below(state, INPUT_COUNT)], state); break;
    case 5:
    case 6: put_instruction(out, state); break;
    default: change_number(out, state); break;
    }
}

/* ---- what must hold -------------------------------------------------------------------------- */

/* Each block is made once and freed at most once, later; what is alive is what nobody freed. */
static int is_whole(const memory_history *history) {
    uint32_t allocs = 0;
    for (uint32_t i = 0; i < history->event_count; i++) {
        const history_event *event = &history->events[i];
        if (i > 0 && event->time_us < history->events[i - 1].time_us) return 0;
        if (event->kind == HISTORY_RESERVE && event->index >= history->change_count) return 0;
        if (event->kind == HISTORY_SHORTAGE && event->index >= history->shortage_count) return 0;
        if (event->kind > HISTORY_FREE) continue;
        if (event->index >= history->block_count) return 0;
        if (event->kind == HISTORY_ALLOC && history->blocks[event->index].begin != i) return 0;
        if (event->kind == HISTORY_FREE && history->blocks[event->index].end != i) return 0;
        allocs += event->kind == HISTORY_ALLOC;
    }
    for (uint32_t i = 0; i < history->block_count; i++) {
        const history_block *block = &history->blocks[i];
        if (block->end <= block->begin || block->owner > history->owners.count) return 0;
        if (block->stream >= history->stream_count) return 0;
    }
    return allocs == history->block_count;
}

/* The events of blocks that a trace of it has, or -1 if the reader refuses it. */
static long events_of_trace(const memory_history *history) {
    char error[TRACE_ERROR_BYTES];
    char *text = NULL;
    size_t bytes = 0;
    long count = 0;
    trace_reader *reader = NULL;
    trace_event event;
    trace_result result;
    FILE *stream = open_memstream(&text, &bytes);
    history_write_trace(stream, history);
    assert_int_equal(fclose(stream), 0);
    assert_int_equal(ftruncate(trace_file, 0), 0);
    assert_int_equal(pwrite(trace_file, text, bytes, 0), bytes);
    assert_int_equal(lseek(trace_file, 0, SEEK_SET), 0);
    free(text);
    result = trace_reader_open_descriptor(dup(trace_file), "fuzz", &reader, error);
    if (result != TRACE_EVENT) return -1;
    while ((result = trace_reader_next(reader, &event)) == TRACE_EVENT)
        count++;
    if (result != TRACE_END) print_message("%s\n", trace_reader_error(reader));
    trace_reader_close(reader);
    return result == TRACE_END ? count : -1;
}

/* Everything that can be made of a history is made of it, as far as memory goes. */
static int all_writers_take(memory_history *history) {
    history_owners owners;
    report_curve curve;
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    int is_written = history_write_torch(stream, history) && history_write_chrome(stream, history);
    if (is_written && history->event_count > 0) {
        assert_true(history_owners_gather(history, &owners));
        assert_true(report_curve_make(history, &owners, &curve));
        is_written = report_data_write(stream, history, &owners, &curve);
        report_curve_deinit(&curve);
        history_owners_deinit(&owners);
    }
    assert_int_equal(fclose(stream), 0);
    free(text);
    return is_written;
}

/* 1 if it was a snapshot. */
static int read_mutation(uint64_t seed, uint64_t number) {
    static fuzz_input mutation;
    char error[HISTORY_ERROR_BYTES] = "";
    uint64_t state = seed * UINT64_C(0x2545f4914f6cdd1d) + number;
    memory_history *history = NULL;
    long blocks = 0;
    int status;
    mutation = kept[fuzz_below(&state, INPUT_COUNT)];
    for (size_t count = 1 + fuzz_below(&state, 3); count > 0; count--)
        mutate_once(&mutation, &state);
    status = torch_history_read("fuzz", mutation.bytes, mutation.length, (int)fuzz_below(&state, 2),
                                &history, error);
    fuzz_expect(status == 0 || status == 2, "another status", seed, number);
    if (status == 2) {
        fuzz_expect(strncmp(error, "fuzz: ", 6) == 0 && error[6], "an error without a reason", seed,
                    number);
        return 0;
    }
    fuzz_expect(is_whole(history), "a history that is not whole", seed, number);
    for (uint32_t i = 0; i < history->event_count; i++)
        blocks += history->events[i].kind <= HISTORY_FREE;
    fuzz_expect(events_of_trace(history) == blocks, "another trace", seed, number);
    fuzz_expect(all_writers_take(history), "a writer does not take it", seed, number);
    history_destroy(history);
    return 1;
}

/* ---- the run --------------------------------------------------------------------------------- */

static void load_inputs(void) {
    static const char *const names[INPUT_COUNT] = {"torch_small.pickle", "torch_two_devices.pickle",
                                                   "torch_real.pickle"};
    for (int i = 0; i < INPUT_COUNT; i++) {
        char path[512];
        snprintf(path, sizeof(path), INPUTS "/%s", names[i]);
        fuzz_input_load(&kept[i], path);
    }
}

static void every_mutation_is_a_history_or_an_error(void **state) {
    uint64_t seed = fuzz_setting("TENURE_FUZZ_SEED", 1);
    uint64_t first = fuzz_setting("TENURE_FUZZ_FIRST", 0);
    uint64_t count = fuzz_setting("TENURE_FUZZ_COUNT", MUTATIONS);
    uint64_t whole = 0;
    (void)state;
    load_inputs();
    trace_file = memfd_create("trace", MFD_CLOEXEC);
    assert_true(trace_file >= 0);
    for (uint64_t number = first; number < first + count; number++)
        whole += (uint64_t)read_mutation(seed, number);
    close(trace_file);
    print_message("seed %llu: %llu mutations, %llu of them snapshots\n", (unsigned long long)seed,
                  (unsigned long long)count, (unsigned long long)whole);
    /* A run in which all, or none, were refused would test half of what it should. */
    if (count >= 1000) assert_in_range(whole, count / 20, count - count / 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mutation_is_a_history_or_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
