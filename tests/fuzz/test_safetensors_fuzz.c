/* Mutated headers of safetensors files and indexes of checkpoints: whatever the bytes, the reader
 * ends in what the rules of the format allow or in TN_CORRUPT_INPUT with words.
 *
 * Each mutation is made from a kept text by the seed and its own number alone, so a failure is
 * replayed by TENURE_FUZZ_SEED=S TENURE_FUZZ_FIRST=N, which it prints. Run under ASan and UBSan by
 * the asan preset: the text lies at the end of its memory.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_index.h"
#include "host_alloc.h"
#include "fuzz_support.h"

enum { TEXT_MAX = 4096, MUTATIONS = 30000, LAST_LINE_BYTES = 21 };

static const char *const headers[] = {
    "{}",
    "{\"__metadata__\":{\"format\":\"pt\",\"part/a\":\"0badcafe [2,3] 0+6\"},"
    "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
    "\"b \\u00e9\\ud83d\\ude00\\n\":{\"shape\":[],\"data_offsets\":[24,25],\"dtype\":\"U8\"}}   ",
    "{ \"e\" : { \"dtype\" : \"BF16\" , \"shape\" : [ 0 , 7 ] , \"data_offsets\" : [ 0 , 0 ] } }",
};

static const char *const indexes[] = {
    "{\"format\":\"tenure-checkpoint\",\"version\":1,\"generation\":7,\"step\":3,"
    "\"plan_hash\":\"0123456789abcdef\",\"files\":[{\"name\":\"rank-00000.safetensors\","
    "\"bytes\":100,\"header_bytes\":64,\"header_crc32\":\"01234567\"}],"
    "\"tensors\":[{\"name\":\"a\",\"dtype\":\"F32\",\"shape\":[3,2],\"parts\":[{\"file\":0,"
    "\"begin\":64,\"bytes\":24,\"crc32\":\"89abcdef\",\"pieces\":[[2,4],[0,2]]}]},"
    "{\"name\":\"b\",\"dtype\":\"U8\",\"shape\":[0],\"parts\":[]}],",
};

static size_t replace(char *text, size_t length, size_t at, size_t removed, const char *with) {
    size_t added = strlen(with), tail = length - at - removed;
    if (at + added + tail > TEXT_MAX) return length;
    memmove(text + at + added, text + at + removed, tail);
    memcpy(text + at, with, added);
    return at + added + tail;
}

static size_t mutate(char *text, size_t length, uint64_t *state) {
    static const char *const tokens[] = {"{",
                                         "}",
                                         "[",
                                         "]",
                                         ",",
                                         ":",
                                         "\"",
                                         "\\u",
                                         "\\ud800",
                                         "\\",
                                         "-",
                                         "1e9",
                                         "18446744073709551616",
                                         "null",
                                         "true",
                                         "0",
                                         "9",
                                         "\x80",
                                         "\xF0",
                                         "\\u0000",
                                         "[[[[[[[[[[[[[[[[[",
                                         "9223372036854775807",
                                         "\"dtype\":\"F32\",",
                                         "\"F8_E4M3\"",
                                         " "};
    for (size_t rounds = 1 + fuzz_below(state, 3); rounds; rounds--) {
        size_t at = fuzz_below(state, length + 1);
        size_t removed = fuzz_below(state, 2) ? fuzz_below(state, length - at + 1) % 9 : 0;
        if (fuzz_below(state, 3) == 0 && length)
            text[fuzz_below(state, length)] ^= (char)(1u << fuzz_below(state, 8));
        else
            length = replace(text, length, at, removed,
                             tokens[fuzz_below(state, sizeof tokens / sizeof *tokens)]);
    }
    return length;
}

static char replay[96]; /* the line that a failure prints */

static void check_header(char *text, size_t length, uint64_t data_bytes) {
    tn__safetensors header;
    uint64_t covered = 0;
    tn_status status = tn__safetensors_read("mutated", text, length, data_bytes, &header);
    if (status != TN_OK) {
        if (status != TN_CORRUPT_INPUT) fail_msg("%s: %s", replay, tn_error_last());
        EXPECT_ERROR_HAS("mutated");
        return;
    }
    for (size_t i = 0; i < header.tensor_count; i++) {
        const tn__safetensor *tensor = &header.tensors[i];
        if (tensor->begin > tensor->end || tensor->end > data_bytes || tensor->rank > TN_RANK_MAX)
            fail_msg("%s: tensor %s", replay, tensor->name);
        covered += tensor->end - tensor->begin;
    }
    if (covered != data_bytes) fail_msg("%s: not all is covered", replay);
    tn__safetensors_free(&header);
}

/* With a last line that is right, so that the rest is looked at. */
static tn_status check_index(const char *text, size_t length) {
    char *whole = tn__host_alloc(length + LAST_LINE_BYTES + 1, 1);
    tn__index index;
    memcpy(whole, text, length);
    snprintf(whole + length, LAST_LINE_BYTES + 1, "\n\"crc32\":\"%08x\"}\n",
             (unsigned)tn__crc32(0, text, length));
    tn_status status = tn__index_read("mutated", whole, length + LAST_LINE_BYTES, &index);
    if (status != TN_OK) {
        if (status != TN_CORRUPT_INPUT) fail_msg("%s: %s", replay, tn_error_last());
        return status;
    }
    for (size_t i = 0; i < index.part_count; i++) {
        const tn__index_part *part = &index.parts[i];
        if (part->file >= index.file_count ||
            part->begin + part->bytes > index.files[part->file].bytes)
            fail_msg("%s: part %zu", replay, i);
    }
    tn__index_free(&index);
    return TN_OK;
}

static void mutated_texts_are_read_or_refused(void **state) {
    (void)state;
    uint64_t seed = fuzz_setting("TENURE_FUZZ_SEED", 20260),
             first = fuzz_setting("TENURE_FUZZ_FIRST", 0);
    uint64_t end = getenv("TENURE_FUZZ_FIRST") ? first + 1 : MUTATIONS;
    for (uint64_t number = first; number < end; number++) {
        uint64_t random = seed * UINT64_C(0x100000001b3) + number;
        char text[TEXT_MAX];
        int is_index = fuzz_below(&random, 2) == 0;
        const char *kept = is_index ? indexes[0] : headers[fuzz_below(&random, 3)];
        size_t length = strlen(kept);
        memcpy(text, kept, length);
        length = mutate(text, length, &random);
        snprintf(replay, sizeof replay, "TENURE_FUZZ_SEED=%llu TENURE_FUZZ_FIRST=%llu",
                 (unsigned long long)seed, (unsigned long long)number);
        if (is_index) {
            (void)check_index(text, length);
        } else {
            char *exact = tn__host_alloc(length + 1, 1);
            memcpy(exact, text, length);
            check_header(exact, length, (uint64_t)fuzz_below(&random, 2) * 25);
            tn__host_free(exact);
        }
        if (tn__host_live_blocks() != 0) fail_msg("%s: memory is left", replay);
    }
}

/* The kept texts themselves are good, or mutations of them would show little. */
static void kept_texts_are_good(void **state) {
    (void)state;
    static const uint64_t data_bytes[] = {0, 25, 0};
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        char text[TEXT_MAX];
        tn__safetensors header;
        memcpy(text, headers[i], strlen(headers[i]));
        EXPECT_OK(tn__safetensors_read("kept", text, strlen(headers[i]), data_bytes[i], &header));
        if (i == 1) {
            assert_int_equal(header.tensor_count, 2);
            assert_string_equal(header.tensors[1].name, "b \xC3\xA9\xF0\x9F\x98\x80\n");
            assert_string_equal(tn__safetensors_note_of(&header, "format"), "pt");
        }
        tn__safetensors_free(&header);
    }
    EXPECT_OK(check_index(indexes[0], strlen(indexes[0])));
}

static void refuse(const char *header, uint64_t data_bytes, const char *words) {
    char text[TEXT_MAX];
    tn__safetensors out;
    memcpy(text, header, strlen(header));
    EXPECT_STATUS(tn__safetensors_read("bad", text, strlen(header), data_bytes, &out),
                  TN_CORRUPT_INPUT);
    EXPECT_ERROR_HAS(words);
}

static void each_rule_is_held(void **state) {
    (void)state;
#define ONE(shape, offsets)                                                                        \
    "{\"a\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
    refuse("", 0, "does not begin with {");
    refuse(" {}", 0, "does not begin with {");
    refuse("{} x", 0, "something behind the end");
    refuse("{}", 4, "0 bytes, and 4 follow");
    refuse(ONE("[1]", "[0,4]"), 8, "4 bytes, and 8 follow");
    refuse(ONE("[1]", "[4,8]"), 8, "a hole before byte 4");
    refuse(ONE("[2]", "[0,4]"), 4, "do not fit the shape");
    refuse(ONE("[1]", "[8,4]"), 8, "go backwards");
    refuse(ONE("[-1]", "[0,4]"), 4, "no whole number");
    refuse(ONE("[1.0]", "[0,4]"), 4, "no whole number");
    refuse(ONE("[4611686018427387904,16]", "[0,4]"), 4, "a shape that is too large");
    refuse(ONE("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "more than 8 dimensions");
    refuse(ONE("[1]", "[0,4,4]"), 4, "not two");
    refuse("{\"a\":{\"dtype\":\"F33\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, "not known");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 4, "without dtype, shape or");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]},"
           "\"b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}",
           1, "an overlap before byte 0");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]},"
           "\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[1,2]}}",
           2, "tensor a is there twice");
    refuse("{\"__metadata__\":{\"a\":1}}", 0, "no string");
    refuse("{\"a\\ud800\":{}}", 0, "half a surrogate pair");
    refuse("{\"a\\u0000\":{}}", 0, "a 0 in a string");
    refuse("{\"\xC0\x80\":{}}", 0, "not UTF-8");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kept_texts_are_good),
        cmocka_unit_test(each_rule_is_held),
        cmocka_unit_test(mutated_texts_are_read_or_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
