/* The index of a checkpoint, made of the headers of its files and checked. See checkpoint_index.h;
 * its text is read and written in checkpoint_text.c. */
#include "checkpoint_index.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "host_alloc.h"

uint32_t tn__crc32(uint32_t crc, const void *data, size_t bytes) {
    return (uint32_t)crc32_z(crc, data, bytes);
}

unsigned tn__index_dtype_bytes(const char *dtype) {
    for (int i = 0; i < TN_DTYPE_COUNT; i++) {
        const char *name = tn__safetensors_dtype((tn_dtype)i);
        if (name && strcmp(name, dtype) == 0) return (unsigned)tn_dtype_bytes((tn_dtype)i);
    }
    return 0;
}

void tn__index_free(tn__index *index) {
    tn__host_free(index->files);
    tn__host_free(index->tensors);
    tn__host_free(index->parts);
    tn__host_free(index->runs);
    tn__host_free(index->text);
    *index = (tn__index){0};
}

static int compare_name(const void *name, const void *tensor) {
    return strcmp(name, ((const tn__index_tensor *)tensor)->name);
}

const tn__index_tensor *tn__index_find(const tn__index *index, const char *name) {
    if (!index->tensor_count) return NULL;
    return bsearch(name, index->tensors, index->tensor_count, sizeof *index->tensors, compare_name);
}

/* ---- what a file says of itself -------------------------------------------------------------- */

/* The notes are walked over with this; *at NULL once they are not as they should be. */
static uint64_t read_number(const char **at, int base) {
    char *end = NULL;
    if (!*at || **at < '0' || **at > 'f') return *at = NULL, 0;
    uint64_t value = strtoull(*at, &end, base);
    *at = end == *at ? NULL : end;
    return value;
}

static void expect(const char **at, char expected) {
    if (!*at) return;
    *at = **at == expected ? *at + 1 : NULL;
}

static void read_note_shape(const char **at, tn__index_tensor *tensor) {
    expect(at, '[');
    while (*at && **at != ']' && tensor->rank < TN_RANK_MAX) {
        if (tensor->rank) expect(at, ',');
        tensor->shape[tensor->rank++] = (int64_t)read_number(at, 10);
    }
    expect(at, ']');
}

static int64_t count_elements(const tn__index_tensor *tensor) {
    int64_t elements = 1;
    for (int i = 0; i < tensor->rank; i++) {
        if (__builtin_mul_overflow(elements, tensor->shape[i], &elements)) return -1;
    }
    return elements;
}

static tn_status add_run(tn__index *index, tn__index_run run) {
    if ((index->run_count & (index->run_count - 1)) == 0) {
        size_t room = index->run_count ? 2 * index->run_count : 1;
        tn__index_run *grown = tn__host_realloc(index->runs, index->run_count, room, sizeof *grown);
        if (!grown) return TN_OUT_OF_HOST_MEMORY;
        index->runs = grown;
    }
    index->runs[index->run_count++] = run;
    return TN_OK;
}

/* What the note says of a tensor: crc, shape and runs, which are added to the index. */
static tn_status read_note(tn__index *index, const char *file, const tn__safetensor *stored,
                           const char *note, tn__index_tensor *tensor, tn__index_part *part) {
    const char *at = note;
    part->crc = (uint32_t)read_number(&at, 16);
    expect(&at, ' ');
    read_note_shape(&at, tensor);
    part->first_run = index->run_count;
    while (at && *at) {
        tn__index_run run;
        expect(&at, ' ');
        run.first = (int64_t)read_number(&at, 10);
        expect(&at, '+');
        run.count = (int64_t)read_number(&at, 10);
        if (at) TN_TRY(add_run(index, run));
    }
    part->run_count = index->run_count - part->first_run;
    tensor->elements = count_elements(tensor);
    if (at) return TN_OK;
    return TN_FAIL(TN_CORRUPT_INPUT, "%s: its note of %s is not as this program writes it", file,
                   stored->name);
}

static int is_same_tensor(const tn__index_tensor *one, const tn__index_tensor *other) {
    return strcmp(one->name, other->name) == 0 && strcmp(one->dtype, other->dtype) == 0 &&
           one->rank == other->rank && memcmp(one->shape, other->shape, sizeof one->shape) == 0;
}

static tn_status disagree(const tn__index *index, size_t at, const char *name) {
    const char *other = at < index->tensor_count ? index->tensors[at].name : "no entry";
    return TN_FAIL(TN_INVALID_ARGUMENT,
                   "rank %zu saves %s where rank 0 saves %s: all ranks name the same entries, with "
                   "the same dtypes and shapes",
                   index->file_count, name, other);
}

static tn_status add_tensor(tn__index *index, size_t at, const tn__index_file *file,
                            const tn__safetensors *header, const tn__safetensor *stored) {
    const size_t prefix = strlen(TN__CHECKPOINT_PART);
    tn__index_tensor tensor = {.name = stored->name, .dtype = stored->dtype};
    tn__index_part part = {.file = index->file_count,
                           .begin = file->header_bytes + stored->begin,
                           .bytes = stored->end - stored->begin};
    const tn__safetensors_note *note = at < header->note_count ? &header->notes[at] : NULL;
    if (!note || strncmp(note->key, TN__CHECKPOINT_PART, prefix) != 0 ||
        strcmp(note->key + prefix, stored->name) != 0)
        return TN_FAIL(TN_CORRUPT_INPUT, "%s has no note of %s", file->name, stored->name);
    TN_TRY(read_note(index, file->name, stored, note->value, &tensor, &part));
    if (index->file_count == 0) {
        tensor.first_part = at * index->file_total;
        tensor.part_count = index->file_total;
        index->tensors[at] = tensor;
    } else if (!is_same_tensor(&index->tensors[at], &tensor)) {
        return disagree(index, at, stored->name);
    }
    index->parts[at * index->file_total + index->file_count] = part;
    return TN_OK;
}

static tn_status make_room(tn__index *index, size_t file_total, size_t tensor_count) {
    index->file_total = file_total;
    index->tensor_count = tensor_count;
    index->part_count = tensor_count * file_total;
    index->files = tn__host_alloc(file_total, sizeof *index->files);
    index->tensors = tn__host_alloc(tensor_count + 1, sizeof *index->tensors);
    index->parts = tn__host_alloc(index->part_count + 1, sizeof *index->parts);
    return index->files && index->tensors && index->parts ? TN_OK : TN_OUT_OF_HOST_MEMORY;
}

tn_status tn__index_add_file(tn__index *index, size_t file_total, const tn__index_file *file,
                             const tn__safetensors *header) {
    if (!index->files) TN_TRY(make_room(index, file_total, header->tensor_count));
    TN_ASSERT(index->file_count < index->file_total);
    for (size_t i = 0; i < header->tensor_count; i++) {
        if (i >= index->tensor_count) return disagree(index, i, header->tensors[i].name);
        TN_TRY(add_tensor(index, i, file, header, &header->tensors[i]));
    }
    if (header->tensor_count < index->tensor_count)
        return disagree(index, header->tensor_count, "no entry");
    index->files[index->file_count++] = *file;
    return TN_OK;
}

/* ---- every element once ---------------------------------------------------------------------- */

static int by_first(const void *left, const void *right) {
    const tn__index_run *a = left, *b = right;
    return (a->first > b->first) - (a->first < b->first);
}

static tn_status check_part(const tn__index *index, const tn__index_tensor *tensor,
                            const tn__index_part *part) {
    uint64_t elements = 0, bytes;
    const tn__index_file *file = &index->files[part->file];
    for (size_t i = 0; i < part->run_count; i++) {
        const tn__index_run *run = &index->runs[part->first_run + i];
        if (run->first < 0 || run->count < 0 || run->first > tensor->elements ||
            run->count > tensor->elements - run->first)
            return TN_FAIL(TN_CORRUPT_INPUT,
                           "%s has elements %" PRId64 " + %" PRId64 " of %s, which has %" PRId64,
                           file->name, run->first, run->count, tensor->name, tensor->elements);
        elements += (uint64_t)run->count;
    }
    int is_too_large =
        __builtin_mul_overflow(elements, (uint64_t)tn__index_dtype_bytes(tensor->dtype), &bytes);
    if (!is_too_large && bytes == part->bytes && part->begin >= file->header_bytes &&
        part->begin <= file->bytes && part->bytes <= file->bytes - part->begin)
        return TN_OK;
    return TN_FAIL(TN_CORRUPT_INPUT,
                   "%s has %" PRIu64 " bytes of %s, and its pieces are %" PRIu64 " elements",
                   file->name, part->bytes, tensor->name, elements);
}

static tn_status check_cover(const tn__index_tensor *tensor, tn__index_run *runs, size_t count,
                             tn_status when_not) {
    int64_t covered = 0;
    qsort(runs, count, sizeof *runs, by_first);
    for (size_t i = 0; i < count; i++) {
        if (!runs[i].count) continue;
        if (runs[i].first < covered)
            return TN_FAIL(when_not, "element %" PRId64 " of %s is saved twice", runs[i].first,
                           tensor->name);
        if (runs[i].first > covered) break;
        covered += runs[i].count;
    }
    if (covered == tensor->elements) return TN_OK;
    return TN_FAIL(when_not, "element %" PRId64 " of %s is saved by no rank", covered,
                   tensor->name);
}

static tn_status check_tensor(const tn__index *index, const tn__index_tensor *tensor,
                              tn__index_run *room, tn_status when_not) {
    size_t count = 0;
    if (tensor->elements < 0 || !tn__index_dtype_bytes(tensor->dtype))
        return TN_FAIL(TN_CORRUPT_INPUT, "tensor %s has a dtype or a shape that can not be",
                       tensor->name);
    for (size_t i = 0; i < tensor->part_count; i++) {
        const tn__index_part *part = &index->parts[tensor->first_part + i];
        TN_TRY(check_part(index, tensor, part));
        for (size_t j = 0; j < part->run_count; j++)
            room[count++] = index->runs[part->first_run + j];
    }
    return check_cover(tensor, room, count, when_not);
}

tn_status tn__index_check(const tn__index *index, tn_status when_not) {
    tn_status status = TN_OK;
    tn__index_run *room = tn__host_alloc(index->run_count + 1, sizeof *room);
    if (!room) return TN_OUT_OF_HOST_MEMORY;
    for (size_t i = 0; i < index->tensor_count && status == TN_OK; i++)
        status = check_tensor(index, &index->tensors[i], room, when_not);
    tn__host_free(room);
    return status;
}
