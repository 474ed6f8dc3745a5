/* The text of a checkpoint's index, written and read: see checkpoint_index.h. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "checkpoint_index.h"
#include "host_alloc.h"
#include "json_reader.h"

#define FORMAT    "tenure-checkpoint"
#define LAST_LINE "\n\"crc32\":\"%08x\"}\n"

enum { LAST_LINE_BYTES = 21 };

/* ---- written --------------------------------------------------------------------------------- */

static void write_part(tn__text *out, const tn__index *index, const tn__index_part *part) {
    tn__text_add(out,
                 "{\"file\":%zu,\"begin\":%" PRIu64 ",\"bytes\":%" PRIu64
                 ",\"crc32\":\"%08x\",\"pieces\":[",
                 part->file, part->begin, part->bytes, (unsigned)part->crc);
    for (size_t i = 0; i < part->run_count; i++) {
        const tn__index_run *run = &index->runs[part->first_run + i];
        tn__text_add(out, "%s[%" PRId64 ",%" PRId64 "]", i ? "," : "", run->first, run->count);
    }
    tn__text_add(out, "]}");
}

static void write_tensor(tn__text *out, const tn__index *index, const tn__index_tensor *tensor) {
    int is_first = 1;
    tn__text_add(out, "{\"name\":");
    tn__text_add_json(out, tensor->name);
    tn__text_add(out, ",\"dtype\":\"%s\",\"shape\":[", tensor->dtype);
    for (int i = 0; i < tensor->rank; i++)
        tn__text_add(out, "%s%" PRId64, i ? "," : "", tensor->shape[i]);
    tn__text_add(out, "],\"parts\":[");
    for (size_t i = 0; i < tensor->part_count; i++) {
        const tn__index_part *part = &index->parts[tensor->first_part + i];
        if (!part->bytes) continue;
        if (!is_first) tn__text_add(out, ",");
        is_first = 0;
        write_part(out, index, part);
    }
    tn__text_add(out, "]}");
}

static void write_file(tn__text *out, const tn__index_file *file) {
    tn__text_add(out, "{\"name\":");
    tn__text_add_json(out, file->name);
    tn__text_add(out,
                 ",\"bytes\":%" PRIu64 ",\"header_bytes\":%" PRIu64 ",\"header_crc32\":\"%08x\"}",
                 file->bytes, file->header_bytes, (unsigned)file->header_crc);
}

void tn__index_write(tn__text *out, const tn__index *index) {
    tn__text_add(out,
                 "{\"format\":\"" FORMAT "\",\"version\":%d,\"generation\":%" PRIu64
                 ",\"step\":%" PRIu64 ",\"plan_hash\":\"%016" PRIx64 "\",\n\"files\":[",
                 TN__CHECKPOINT_VERSION, index->generation, index->step, index->plan_hash);
    for (size_t i = 0; i < index->file_count; i++) {
        if (i) tn__text_add(out, ",\n");
        write_file(out, &index->files[i]);
    }
    tn__text_add(out, "],\n\"tensors\":[");
    for (size_t i = 0; i < index->tensor_count; i++) {
        if (i) tn__text_add(out, ",\n");
        write_tensor(out, index, &index->tensors[i]);
    }
    tn__text_add(out, "],");
    int is_whole = out->text && out->used < out->bytes;
    tn__text_add(out, LAST_LINE, is_whole ? (unsigned)tn__crc32(0, out->text, out->used) : 0);
}

/* ---- read ------------------------------------------------------------------------------------ */

typedef struct reading {
    tn__json in;
    tn__index index;
    tn_status status;
} reading;

/* Room for one more of `count` items. */
static int make_room(reading *now, void **items, size_t count, size_t item_bytes) {
    size_t room = count ? 2 * count : 1;
    if (now->in.problem) return 0;
    if (count & (count - 1)) return 1;
    void *grown = tn__host_realloc(*items, count, room, item_bytes);
    if (grown) return *items = grown, 1;
    now->status = TN_OUT_OF_HOST_MEMORY;
    tn__json_refuse(&now->in, "no host memory");
    return 0;
}
#define ROOM(now, list, count)                                                                     \
    make_room((now), (void **)&(now)->index.list, (now)->index.count, sizeof *(now)->index.list)

static int is_key(const char *key, const char *expected) {
    return key && strcmp(key, expected) == 0;
}

/* A number of `digits` hexadecimal digits in a string. */
static uint64_t read_hex(tn__json *in, size_t digits) {
    uint64_t value = 0;
    const char *text = tn__json_string(in);
    if (!text || strlen(text) != digits || strspn(text, "0123456789abcdef") != digits) {
        tn__json_refuse(in, "a checksum that is none");
        return 0;
    }
    for (; *text; text++)
        value = value * 16 + (uint64_t)(*text <= '9' ? *text - '0' : *text - 'a' + 10);
    return value;
}

static int64_t read_count(tn__json *in) {
    uint64_t value = tn__json_unsigned(in);
    if (value > INT64_MAX) tn__json_refuse(in, "a number that is too large");
    return in->problem ? 0 : (int64_t)value;
}

static void read_file(reading *now) {
    tn__index_file file = {{0}, 0, 0, 0};
    for (tn__json_enter(&now->in, '{'); tn__json_next(&now->in);) {
        const char *key = tn__json_key(&now->in);
        if (is_key(key, "name")) {
            const char *name = tn__json_string(&now->in);
            if (!name || !*name || strlen(name) >= sizeof file.name || strchr(name, '/'))
                tn__json_refuse(&now->in, "a name that no file of a checkpoint has");
            else
                memcpy(file.name, name, strlen(name));
        } else if (is_key(key, "bytes")) {
            file.bytes = tn__json_unsigned(&now->in);
        } else if (is_key(key, "header_bytes")) {
            file.header_bytes = tn__json_unsigned(&now->in);
        } else if (is_key(key, "header_crc32")) {
            file.header_crc = (uint32_t)read_hex(&now->in, 8);
        } else {
            tn__json_skip(&now->in);
        }
    }
    if (!*file.name || file.header_bytes > file.bytes)
        tn__json_refuse(&now->in, "a file without a name or shorter than its header");
    if (ROOM(now, files, file_count)) now->index.files[now->index.file_count++] = file;
}

static void read_runs(reading *now, tn__index_part *part) {
    part->first_run = now->index.run_count;
    for (tn__json_enter(&now->in, '['); tn__json_next(&now->in);) {
        int64_t numbers[2] = {0, 0};
        int count = 0;
        for (tn__json_enter(&now->in, '['); tn__json_next(&now->in); count++) {
            int64_t number = read_count(&now->in);
            if (count < 2) numbers[count] = number;
        }
        if (count != 2) tn__json_refuse(&now->in, "a piece that is not two numbers");
        if (ROOM(now, runs, run_count))
            now->index.runs[now->index.run_count++] = (tn__index_run){numbers[0], numbers[1]};
    }
    part->run_count = now->index.run_count - part->first_run;
}

static void read_part(reading *now) {
    tn__index_part part = {.file = SIZE_MAX};
    for (tn__json_enter(&now->in, '{'); tn__json_next(&now->in);) {
        const char *key = tn__json_key(&now->in);
        if (is_key(key, "file"))
            part.file = (size_t)tn__json_unsigned(&now->in);
        else if (is_key(key, "begin"))
            part.begin = tn__json_unsigned(&now->in);
        else if (is_key(key, "bytes"))
            part.bytes = tn__json_unsigned(&now->in);
        else if (is_key(key, "crc32"))
            part.crc = (uint32_t)read_hex(&now->in, 8);
        else if (is_key(key, "pieces"))
            read_runs(now, &part);
        else
            tn__json_skip(&now->in);
    }
    if (part.file >= now->index.file_count) tn__json_refuse(&now->in, "a part of no file");
    if (ROOM(now, parts, part_count)) now->index.parts[now->index.part_count++] = part;
}

static void read_shape(reading *now, tn__index_tensor *tensor) {
    for (tn__json_enter(&now->in, '['); tn__json_next(&now->in);) {
        int64_t extent = read_count(&now->in);
        if (tensor->rank == TN_RANK_MAX)
            tn__json_refuse(&now->in, "a shape of more than 8 dimensions");
        else
            tensor->shape[tensor->rank++] = extent;
    }
}

/* In order of names, so that no two are alike. */
static void add_tensor(reading *now, tn__index_tensor *tensor) {
    size_t count = now->index.tensor_count;
    tensor->elements = 1;
    for (int i = 0; i < tensor->rank; i++) {
        if (__builtin_mul_overflow(tensor->elements, tensor->shape[i], &tensor->elements)) {
            tn__json_refuse(&now->in, "a shape that is too large");
            return;
        }
    }
    if (!tensor->name || !tensor->dtype)
        tn__json_refuse(&now->in, "a tensor without a name or a dtype");
    else if (count && strcmp(now->index.tensors[count - 1].name, tensor->name) >= 0)
        tn__json_refuse(&now->in, "tensors that are not in the order of their names");
    if (ROOM(now, tensors, tensor_count)) now->index.tensors[now->index.tensor_count++] = *tensor;
}

static void read_tensor(reading *now) {
    tn__index_tensor tensor = {.first_part = now->index.part_count};
    for (tn__json_enter(&now->in, '{'); tn__json_next(&now->in);) {
        const char *key = tn__json_key(&now->in);
        if (is_key(key, "name")) {
            tensor.name = tn__json_string(&now->in);
        } else if (is_key(key, "dtype")) {
            tensor.dtype = tn__json_string(&now->in);
        } else if (is_key(key, "shape")) {
            read_shape(now, &tensor);
        } else if (is_key(key, "parts")) {
            for (tn__json_enter(&now->in, '['); tn__json_next(&now->in);)
                read_part(now);
        } else {
            tn__json_skip(&now->in);
        }
    }
    tensor.part_count = now->index.part_count - tensor.first_part;
    add_tensor(now, &tensor);
}

static void read_key(reading *now, const char *key) {
    tn__json *in = &now->in;
    if (is_key(key, "format")) {
        const char *format = tn__json_string(in);
        if (!format || strcmp(format, FORMAT) != 0) tn__json_refuse(in, "another format");
    } else if (is_key(key, "version")) {
        if (tn__json_unsigned(in) != TN__CHECKPOINT_VERSION)
            tn__json_refuse(in, "a version that this program does not know");
    } else if (is_key(key, "generation")) {
        now->index.generation = tn__json_unsigned(in);
    } else if (is_key(key, "step")) {
        now->index.step = tn__json_unsigned(in);
    } else if (is_key(key, "plan_hash")) {
        now->index.plan_hash = read_hex(in, 16);
    } else if (is_key(key, "files")) {
        for (tn__json_enter(in, '['); tn__json_next(in);)
            read_file(now);
    } else if (is_key(key, "tensors")) {
        for (tn__json_enter(in, '['); tn__json_next(in);)
            read_tensor(now);
    } else {
        tn__json_skip(in);
    }
}

/* What the last line says is so. */
static tn_status check_sum(const char *path, const char *text, size_t bytes, uint32_t *out) {
    char line[LAST_LINE_BYTES + 1];
    if (bytes < LAST_LINE_BYTES)
        return TN_FAIL(TN_CORRUPT_INPUT, "%s: %zu bytes are no index of a checkpoint", path, bytes);
    size_t before = bytes - LAST_LINE_BYTES;
    uint32_t crc = *out = tn__crc32(0, text, before);
    snprintf(line, sizeof line, LAST_LINE, (unsigned)crc);
    if (memcmp(line, text + before, LAST_LINE_BYTES) == 0) return TN_OK;
    return TN_FAIL(TN_CORRUPT_INPUT,
                   "%s: its crc32 is %08x, and its last line does not say so: it is damaged, cut "
                   "off, or no index of a checkpoint",
                   path, (unsigned)crc);
}

tn_status tn__index_read(const char *path, char *text, size_t bytes, tn__index *out) {
    reading now = {.in = tn__json_begin(text, bytes), .index = {.text = text}};
    now.status = check_sum(path, text, bytes, &now.index.crc);
    if (now.status == TN_OK) {
        for (tn__json_enter(&now.in, '{'); tn__json_next(&now.in);)
            read_key(&now, tn__json_key(&now.in));
        (void)tn__json_end(&now.in);
        if (!now.index.file_count) tn__json_refuse(&now.in, "no files");
    }
    if (now.status == TN_OK && now.in.problem)
        now.status = TN_FAIL(TN_CORRUPT_INPUT, "%s: it has %s, at byte %zu", path, now.in.problem,
                             now.in.problem_at);
    if (now.status == TN_OK) now.status = tn__index_check(&now.index, TN_CORRUPT_INPUT);
    if (now.status != TN_OK) {
        tn__index_free(&now.index);
        return now.status;
    }
    *out = now.index;
    return TN_OK;
}
