/* The header of safetensors files: see safetensors.h. */
#include "safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"
#include "json_reader.h"

#define METADATA "__metadata__"

typedef struct dtype_row {
    const char *name;
    unsigned bytes;
} dtype_row;

/* Of the format, whole bytes only. */
static const dtype_row dtypes[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1},
                                   {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
                                   {"BF16", 2},    {"I32", 4}, {"U32", 4}, {"F32", 4},
                                   {"F64", 8},     {"I64", 8}, {"U64", 8}};

const char *tn__safetensors_dtype(tn_dtype dtype) {
    switch (dtype) {
    case TN_FP32: return "F32";
    case TN_BF16: return "BF16";
    case TN_FP16: return "F16";
    case TN_E4M3: return "F8_E4M3";
    case TN_E5M2: return "F8_E5M2";
    case TN_BYTE: return "U8";
    default: return NULL;
    }
}

/* ---- writing --------------------------------------------------------------------------------- */

static void write_tensor(tn__text *out, const tn__safetensor *tensor) {
    tn__text_add_json(out, tensor->name);
    tn__text_add(out, ":{\"dtype\":\"%s\",\"shape\":[", tensor->dtype);
    for (int i = 0; i < tensor->rank; i++)
        tn__text_add(out, "%s%" PRId64, i ? "," : "", tensor->shape[i]);
    tn__text_add(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", tensor->begin, tensor->end);
}

void tn__safetensors_write(tn__text *out, const tn__safetensors *header) {
    tn__text_add(out, "{\"" METADATA "\":{");
    for (size_t i = 0; i < header->note_count; i++) {
        if (i) tn__text_add(out, ",");
        tn__text_add_json(out, header->notes[i].key);
        tn__text_add(out, ":");
        tn__text_add_json(out, header->notes[i].value);
    }
    tn__text_add(out, "}");
    for (size_t i = 0; i < header->tensor_count; i++) {
        tn__text_add(out, ",");
        write_tensor(out, &header->tensors[i]);
    }
    tn__text_add(out, "}");
}

uint64_t tn__safetensors_padded(uint64_t text_bytes) {
    uint64_t whole = TN__SAFETENSORS_LENGTH_BYTES + text_bytes + TN__SAFETENSORS_ALIGNMENT - 1;
    return whole / TN__SAFETENSORS_ALIGNMENT * TN__SAFETENSORS_ALIGNMENT -
           TN__SAFETENSORS_LENGTH_BYTES;
}

/* ---- reading --------------------------------------------------------------------------------- */

static void *grow(tn__json *in, void *items, size_t count, size_t item_bytes, tn_status *status) {
    size_t room = count ? count * 2 : 8;
    if (count & (count - 1) || (count && count < 8)) return items; /* there is room */
    void *grown = tn__host_realloc(items, count, room, item_bytes);
    if (!grown) {
        *status = TN_OUT_OF_HOST_MEMORY;
        tn__json_refuse(in, "no host memory");
    }
    return grown ? grown : items;
}

static void read_notes(tn__json *in, tn__safetensors *out, tn_status *status) {
    if (out->notes) tn__json_refuse(in, METADATA " twice");
    for (tn__json_enter(in, '{'); tn__json_next(in);) {
        out->notes = grow(in, out->notes, out->note_count, sizeof *out->notes, status);
        const char *key = tn__json_key(in), *value = tn__json_string(in);
        if (!in->problem) out->notes[out->note_count++] = (tn__safetensors_note){key, value};
    }
}

static void read_shape(tn__json *in, tn__safetensor *tensor) {
    tensor->rank = 0;
    for (tn__json_enter(in, '['); tn__json_next(in); tensor->rank++) {
        uint64_t extent = tn__json_unsigned(in);
        if (tensor->rank == TN_RANK_MAX) tn__json_refuse(in, "a shape of more than 8 dimensions");
        if (extent > INT64_MAX) tn__json_refuse(in, "an extent that is too large");
        if (!in->problem) tensor->shape[tensor->rank] = (int64_t)extent;
    }
}

static void read_offsets(tn__json *in, tn__safetensor *tensor) {
    uint64_t offsets[2] = {0, 0};
    int count = 0;
    for (tn__json_enter(in, '['); tn__json_next(in); count++) {
        uint64_t offset = tn__json_unsigned(in);
        if (count < 2) offsets[count] = offset;
    }
    if (count != 2) tn__json_refuse(in, "data_offsets that are not two");
    tensor->begin = offsets[0];
    tensor->end = offsets[1];
}

enum { HAS_DTYPE = 1, HAS_SHAPE = 2, HAS_OFFSETS = 4, HAS_ALL = 7 };

static void read_tensor(tn__json *in, tn__safetensor *tensor) {
    int has = 0;
    for (tn__json_enter(in, '{'); tn__json_next(in);) {
        const char *key = tn__json_key(in);
        int what = !key                               ? 0
                   : strcmp(key, "dtype") == 0        ? HAS_DTYPE
                   : strcmp(key, "shape") == 0        ? HAS_SHAPE
                   : strcmp(key, "data_offsets") == 0 ? HAS_OFFSETS
                                                      : 0;
        if (!what) tn__json_refuse(in, "a key that tensors do not have");
        if (has & what) tn__json_refuse(in, "a key of a tensor twice");
        has |= what;
        if (what == HAS_DTYPE) tensor->dtype = tn__json_string(in);
        if (what == HAS_SHAPE) read_shape(in, tensor);
        if (what == HAS_OFFSETS) read_offsets(in, tensor);
    }
    if (has != HAS_ALL) tn__json_refuse(in, "a tensor without dtype, shape or data_offsets");
}

/* The size that dtype and shape come to is that of the offsets. */
static const char *problem_of(const tn__safetensor *tensor) {
    uint64_t bytes = 0;
    if (!tensor->dtype) return "a tensor without dtype, shape or data_offsets";
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (strcmp(dtypes[i].name, tensor->dtype) == 0) bytes = dtypes[i].bytes;
    }
    if (!bytes) return "a dtype that is not known";
    for (int i = 0; i < tensor->rank; i++) {
        if (__builtin_mul_overflow(bytes, (uint64_t)tensor->shape[i], &bytes))
            return "a shape that is too large";
    }
    if (tensor->begin > tensor->end) return "data_offsets that go backwards";
    if (tensor->end - tensor->begin != bytes) return "data_offsets that do not fit the shape";
    return NULL;
}

static void read_items(tn__json *in, tn__safetensors *out, tn_status *status) {
    for (tn__json_enter(in, '{'); tn__json_next(in);) {
        const char *name = tn__json_key(in);
        if (in->problem) return;
        if (strcmp(name, METADATA) == 0) {
            read_notes(in, out, status);
            continue;
        }
        tn__safetensor tensor = {.name = name};
        out->tensors = grow(in, out->tensors, out->tensor_count, sizeof *out->tensors, status);
        read_tensor(in, &tensor);
        if (in->problem) return;
        const char *problem = problem_of(&tensor);
        if (problem)
            tn__json_refuse(in, problem);
        else
            out->tensors[out->tensor_count++] = tensor;
    }
    (void)tn__json_end(in);
}

static int by_place(const void *left, const void *right) {
    const tn__safetensor *const *a = left, *const *b = right;
    if ((*a)->begin != (*b)->begin) return (*a)->begin < (*b)->begin ? -1 : 1;
    return ((*a)->end > (*b)->end) - ((*a)->end < (*b)->end);
}

static int by_name(const void *left, const void *right) {
    const tn__safetensor *const *a = left, *const *b = right;
    return strcmp((*a)->name, (*b)->name);
}

/* The data is covered once, and no name is there twice. */
static tn_status check_whole(const char *file, const tn__safetensors *header, uint64_t data_bytes) {
    uint64_t covered = 0;
    tn_status status = TN_OK;
    size_t count = header->tensor_count;
    tn__safetensor **sorted = tn__host_alloc(count + 1, sizeof *sorted);
    if (!sorted) return TN_OUT_OF_HOST_MEMORY;
    for (size_t i = 0; i < count; i++)
        sorted[i] = &header->tensors[i];
    qsort(sorted, count, sizeof *sorted, by_place);
    for (size_t i = 0; i < count && status == TN_OK; covered = sorted[i++]->end) {
        if (sorted[i]->begin != covered)
            status = TN_FAIL(TN_CORRUPT_INPUT, "%s: %s before byte %" PRIu64 ", of tensor %s", file,
                             sorted[i]->begin > covered ? "a hole" : "an overlap", sorted[i]->begin,
                             sorted[i]->name);
    }
    if (status == TN_OK && covered != data_bytes)
        status =
            TN_FAIL(TN_CORRUPT_INPUT,
                    "%s: its tensors have %" PRIu64 " bytes, and %" PRIu64 " follow its header",
                    file, covered, data_bytes);
    qsort(sorted, count, sizeof *sorted, by_name);
    for (size_t i = 1; i < count && status == TN_OK; i++) {
        if (by_name(&sorted[i - 1], &sorted[i]) == 0)
            status =
                TN_FAIL(TN_CORRUPT_INPUT, "%s: tensor %s is there twice", file, sorted[i]->name);
    }
    tn__host_free(sorted);
    return status;
}

tn_status tn__safetensors_read(const char *file, char *text, size_t text_bytes, uint64_t data_bytes,
                               tn__safetensors *out) {
    tn__safetensors header = {0};
    tn_status status = TN_OK;
    tn__json in = tn__json_begin(text, text_bytes);
    if (!text_bytes || text[0] != '{') tn__json_refuse(&in, "a header that does not begin with {");
    read_items(&in, &header, &status);
    if (status == TN_OK && in.problem)
        status = TN_FAIL(TN_CORRUPT_INPUT, "%s: its header has %s, at byte %zu", file, in.problem,
                         in.problem_at);
    if (status == TN_OK) status = check_whole(file, &header, data_bytes);
    if (status != TN_OK) {
        tn__safetensors_free(&header);
        return status;
    }
    *out = header;
    return TN_OK;
}

void tn__safetensors_free(tn__safetensors *header) {
    tn__host_free(header->tensors);
    tn__host_free(header->notes);
    *header = (tn__safetensors){0};
}

const char *tn__safetensors_note_of(const tn__safetensors *header, const char *key) {
    for (size_t i = 0; i < header->note_count; i++) {
        if (strcmp(header->notes[i].key, key) == 0) return header->notes[i].value;
    }
    return NULL;
}
