/* Curves and blocks for a page: see report_data.h. */
#include "report_data.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "name_table.h"

#define GAP_BYTES (UINT64_C(2) << 20) /* smaller gaps between blocks are part of a range */

enum { RANGES_MAX = 4096, NAMES_SHOWN = 4096 };

/* ---- curves ---------------------------------------------------------------------------------- */

static uint64_t reserved_before(const memory_history *history) {
    uint64_t bytes = history_reserved_bytes(history);
    for (uint32_t i = 0; i < history->change_count; i++)
        bytes -= (uint64_t)history->changes[i].bytes;
    return bytes;
}

static int allocate_curve(const memory_history *history, report_curve *out) {
    size_t buckets = out->bucket_count;
    out->stacks = calloc(buckets * out->track_count + 1, sizeof *out->stacks);
    out->most = calloc(buckets + 1, sizeof *out->most);
    out->least = calloc(buckets + 1, sizeof *out->least);
    if (history->change_count > 0) out->reserved = calloc(buckets + 1, sizeof *out->reserved);
    return out->stacks && out->most && out->least && (out->reserved || history->change_count == 0);
}

typedef struct curve_walk {
    const memory_history *history;
    const history_owners *owners;
    uint64_t live[CURVE_TRACKS + 1];
    uint64_t total;
    uint64_t reserved;
} curve_walk;

static void walk_event(curve_walk *walk, const history_event *event) {
    const history_block *block;
    uint64_t bytes;
    uint32_t track;
    if (event->kind == HISTORY_RESERVE)
        walk->reserved += (uint64_t)walk->history->changes[event->index].bytes;
    if (event->kind > HISTORY_FREE) return;
    block = &walk->history->blocks[event->index];
    bytes = event->kind == HISTORY_ALLOC ? block->bytes : 0 - block->bytes;
    track = walk->owners->ranks[block->owner];
    walk->live[track < CURVE_TRACKS ? track : CURVE_TRACKS] += bytes;
    walk->total += bytes;
}

static void note_event(const curve_walk *walk, report_curve *out, uint32_t event) {
    uint32_t bucket = event / out->stride;
    int is_first = event % out->stride == 0;
    double total = (double)walk->total;
    if (is_first || total > out->most[bucket]) {
        out->most[bucket] = total;
        for (uint32_t i = 0; i < out->track_count; i++)
            out->stacks[(size_t)bucket * out->track_count + i] = (double)walk->live[i];
    }
    if (is_first || total < out->least[bucket]) out->least[bucket] = total;
    if (out->reserved && (double)walk->reserved > out->reserved[bucket])
        out->reserved[bucket] = (double)walk->reserved;
}

int report_curve_make(const memory_history *history, const history_owners *owners,
                      report_curve *out) {
    curve_walk walk = {.history = history, .owners = owners};
    uint32_t count = history->event_count;
    *out = (report_curve){.stride = count / CURVE_BUCKETS + (count % CURVE_BUCKETS != 0)};
    if (out->stride == 0) out->stride = 1;
    out->bucket_count = (count + out->stride - 1) / out->stride;
    out->track_count = owners->count > CURVE_TRACKS ? CURVE_TRACKS + 1 : owners->count;
    if (!allocate_curve(history, out)) {
        report_curve_deinit(out);
        return 0;
    }
    walk.reserved = reserved_before(history);
    for (uint32_t i = 0; i < count; i++) {
        walk_event(&walk, &history->events[i]);
        note_event(&walk, out, i);
    }
    return 1;
}

void report_curve_deinit(report_curve *curve) {
    free(curve->stacks);
    free(curve->most);
    free(curve->least);
    free(curve->reserved);
    *curve = (report_curve){0};
}

/* ---- base 64 --------------------------------------------------------------------------------- */

typedef struct base64 {
    FILE *stream;
    uint32_t bits;
    int count; /* bytes in bits */
} base64;

static void put_quad(base64 *self) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t bits = self->bits << (8 * (3 - self->count));
    for (int i = 0; i < 4; i++) {
        char digit = digits[bits >> (18 - 6 * i) & 63];
        fputc(i <= self->count ? digit : '=', self->stream);
    }
    self->bits = 0;
    self->count = 0;
}

static void put_byte(base64 *self, unsigned char byte) {
    self->bits = self->bits << 8 | byte;
    if (++self->count == 3) put_quad(self);
}

static void put_end(base64 *self) {
    if (self->count) put_quad(self);
}

/* 7 bits a byte, the lowest first; the last byte has its top bit clear. */
static void put_number(base64 *self, uint64_t number) {
    while (number >= 128) {
        put_byte(self, (unsigned char)(number & 127) | 128);
        number >>= 7;
    }
    put_byte(self, (unsigned char)number);
}

/* Doubles as they lie in memory, least byte first. */
static void write_doubles(FILE *stream, const char *name, const double *values, size_t count) {
    base64 out = {.stream = stream};
    fprintf(stream, ",\n\"%s\":\"", name);
    for (size_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        for (int byte = 0; byte < 8; byte++)
            put_byte(&out, (unsigned char)(bits >> (8 * byte)));
    }
    put_end(&out);
    fputc('"', stream);
}

/* Whole microseconds since the time before. */
static void write_times(FILE *stream, const memory_history *history) {
    base64 out = {.stream = stream};
    uint32_t stride = history->event_count / TIMES_MAX + 1;
    uint32_t count = (history->event_count + stride - 1) / stride;
    double begin_us = history->events[0].time_us;
    uint64_t before = 0;
    fprintf(stream, ",\n\"timeStride\":%" PRIu32 ",\"timeCount\":%" PRIu32 ",\"times\":\"", stride,
            count);
    for (uint32_t i = 0; i < count; i++) {
        double us = history->events[(size_t)i * stride].time_us - begin_us;
        uint64_t now = us > 0 && us < 9e15 ? (uint64_t)us : before;
        put_number(&out, now - before);
        before = now;
    }
    put_end(&out);
    fputc('"', stream);
}

/* ---- names ----------------------------------------------------------------------------------- */

/* Names are clean UTF-8 (name_table.h); "<" could end the script. */
static void write_name(FILE *stream, const char *name) {
    fputc('"', stream);
    for (; *name; name++) {
        if (*name == '<' || *name == '>' || *name == '&') {
            fprintf(stream, "\\u%04x", (unsigned char)*name);
            continue;
        }
        if (*name == '"' || *name == '\\') fputc('\\', stream);
        fputc(*name, stream);
    }
    fputc('"', stream);
}

static void write_names(FILE *stream, const memory_history *history, const history_owners *owners) {
    fputs(",\n\"owners\":[", stream);
    for (uint32_t i = 0; i < owners->count && i < NAMES_SHOWN; i++) {
        if (i) fputc(',', stream);
        write_name(stream, history_owner_name(history, owners->sums[i].owner));
    }
    fputs("]", stream);
}

/* ---- addresses ------------------------------------------------------------------------------- */

typedef struct address_range {
    uint64_t from;
    uint64_t to;
} address_range;

static int compare_ranges(const void *a, const void *b) {
    uint64_t left = ((const address_range *)a)->from;
    uint64_t right = ((const address_range *)b)->from;
    return left < right ? -1 : left > right;
}

/* Sorted ranges, those with a smaller gap between them joined; the new count. */
static size_t join(address_range *ranges, size_t count, uint64_t gap) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        address_range *last = kept ? &ranges[kept - 1] : NULL;
        if (last && (ranges[i].from <= last->to || ranges[i].from - last->to < gap)) {
            if (ranges[i].to > last->to) last->to = ranges[i].to;
        } else {
            ranges[kept++] = ranges[i];
        }
    }
    return kept;
}

/* Where blocks ever lay, as few enough ranges; the count. */
static size_t gather_ranges(const memory_history *history, address_range *ranges) {
    size_t count = 0;
    uint64_t gap = GAP_BYTES;
    for (uint32_t i = 0; i < history->block_count; i++) {
        const history_block *block = &history->blocks[i];
        if (history_has_place(block))
            ranges[count++] = (address_range){block->address, block->address + block->bytes};
    }
    for (uint32_t i = 0; i < history->segment_count; i++) {
        uint64_t from = history->segments[i].address;
        uint64_t to = from + history->segments[i].bytes;
        if (to > from) ranges[count++] = (address_range){from, to};
    }
    if (count) qsort(ranges, count, sizeof *ranges, compare_ranges);
    count = join(ranges, count, gap);
    while (count > RANGES_MAX) {
        gap *= 2;
        count = join(ranges, count, gap);
    }
    return count;
}

static void write_ranges(FILE *stream, const address_range *ranges, size_t count) {
    fprintf(stream, ",\n\"base\":\"0x%" PRIx64 "\",\"ranges\":[", count ? ranges[0].from : 0);
    for (size_t i = 0; i < count; i++)
        fprintf(stream, "%s[%" PRIu64 ",%" PRIu64 "]", i ? "," : "",
                ranges[i].from - ranges[0].from, ranges[i].to - ranges[i].from);
    fputs("]", stream);
}

static void write_segments(FILE *stream, const memory_history *history, uint64_t base) {
    fputs(",\n\"segments\":[", stream);
    for (uint32_t i = 0; i < history->segment_count && i < RANGES_MAX; i++)
        fprintf(stream, "%s[%" PRIu64 ",%" PRIu64 "]", i ? "," : "",
                history->segments[i].address - base, history->segments[i].bytes);
    fputs("]", stream);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static int compare_sizes(const void *a, const void *b) {
    uint64_t left = *(const uint64_t *)a;
    uint64_t right = *(const uint64_t *)b;
    return left > right ? -1 : left < right;
}

/* Blocks of at least *least bytes are shown, of those of exactly that many the first *ties. */
static int choose_blocks(const memory_history *history, uint64_t *least, uint32_t *ties) {
    uint64_t *sizes;
    *least = 0;
    *ties = history->block_count;
    if (history->block_count <= BLOCKS_MAX) return 1;
    sizes = malloc(history->block_count * sizeof *sizes);
    if (!sizes) return 0;
    for (uint32_t i = 0; i < history->block_count; i++)
        sizes[i] = history->blocks[i].bytes;
    qsort(sizes, history->block_count, sizeof *sizes, compare_sizes);
    *least = sizes[BLOCKS_MAX - 1];
    *ties = 0;
    for (uint32_t i = 0; i < BLOCKS_MAX; i++)
        *ties += sizes[i] == *least;
    free(sizes);
    return 1;
}

/* Each block: events since the begin of the one before, events that it lived (0: to the end),
 * owner, stream, bytes, address since the base (1 more; 0: none). In the order of their begins. */
static uint32_t write_blocks(FILE *stream, const memory_history *history,
                             const history_owners *owners, uint64_t base, uint64_t least,
                             uint32_t ties) {
    base64 out = {.stream = stream};
    uint32_t before = 0;
    uint32_t count = 0;
    fputs(",\n\"blocks\":\"", stream);
    for (uint32_t i = 0; i < history->event_count; i++) {
        const history_block *block = &history->blocks[history->events[i].index];
        if (history->events[i].kind != HISTORY_ALLOC || block->bytes < least) continue;
        if (block->bytes == least) {
            if (ties == 0) continue;
            ties--;
        }
        put_number(&out, block->begin - before);
        put_number(&out, block->end == HISTORY_ALIVE ? 0 : block->end - block->begin);
        put_number(&out, owners->ranks[block->owner]);
        put_number(&out, block->stream);
        put_number(&out, block->bytes);
        put_number(&out, history_has_place(block) ? block->address - base + 1 : 0);
        before = block->begin;
        count++;
    }
    put_end(&out);
    fputc('"', stream);
    return count;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void write_head(FILE *stream, const memory_history *history, const history_owners *owners,
                       const report_curve *curve) {
    fprintf(stream,
            "{\"events\":%" PRIu32 ",\"before\":%" PRIu32 ",\"peak\":%" PRIu64
            ",\"peakEvent\":%" PRIu32 ",\"stride\":%" PRIu32 ",\"buckets\":%" PRIu32
            ",\"tracks\":%" PRIu32 ",\"hasTimes\":%s,\"hasAddresses\":%s,\"blockTotal\":%" PRIu32,
            history->event_count, history->before_count, owners->peak_bytes, owners->peak_event,
            curve->stride, curve->bucket_count, curve->track_count,
            history->has_times ? "true" : "false", history->has_addresses ? "true" : "false",
            history->block_count);
    fputs(",\"shortages\":[", stream);
    for (uint32_t i = 0; i < history->shortage_count && i < NAMES_SHOWN; i++)
        fprintf(stream, "%s%" PRIu32, i ? "," : "", history->shortages[i].event);
    fputs("]", stream);
}

int report_data_write(FILE *stream, const memory_history *history, const history_owners *owners,
                      const report_curve *curve) {
    size_t most = (size_t)history->block_count + history->segment_count + 1;
    address_range *ranges = calloc(most, sizeof *ranges);
    uint64_t least = 0;
    uint32_t ties = 0;
    uint64_t base;
    size_t range_count;
    if (!ranges || !choose_blocks(history, &least, &ties)) {
        free(ranges);
        return 0;
    }
    range_count = gather_ranges(history, ranges);
    base = range_count ? ranges[0].from : 0;
    write_head(stream, history, owners, curve);
    write_names(stream, history, owners);
    write_times(stream, history);
    write_doubles(stream, "stacks", curve->stacks,
                  (size_t)curve->bucket_count * curve->track_count);
    write_doubles(stream, "most", curve->most, curve->bucket_count);
    write_doubles(stream, "least", curve->least, curve->bucket_count);
    if (curve->reserved) write_doubles(stream, "reserved", curve->reserved, curve->bucket_count);
    write_ranges(stream, ranges, range_count);
    write_segments(stream, history, base);
    fprintf(stream, ",\n\"blockCount\":%" PRIu32,
            write_blocks(stream, history, owners, base, least, ties));
    fputs("}\n", stream);
    free(ranges);
    return 1;
}
