/* Sums by owner: see history_owners.h. One walk over the events finds the peak, another what each
 * owner had then. */
#include "history_owners.h"

#include <stdlib.h>
#include <string.h>

enum { GROWTH_PART = 10 }; /* of the peak, from quarter to quarter: less comes and goes */

const char *history_owner_name(const memory_history *history, uint32_t owner) {
    const char *name = name_table_text(&history->owners, owner);
    return name[0] ? name : "unnamed";
}

int history_name_by_size(memory_history *history) {
    static const struct {
        uint64_t from;
        const char *name;
    } classes[] = {{UINT64_C(256) << 20, "blocks of 256 MiB and more"},
                   {UINT64_C(64) << 20, "blocks of 64 to 256 MiB"},
                   {UINT64_C(16) << 20, "blocks of 16 to 64 MiB"},
                   {UINT64_C(2) << 20, "blocks of 2 to 16 MiB"},
                   {UINT64_C(64) << 10, "blocks of 64 KiB to 2 MiB"},
                   {0, "blocks below 64 KiB"}};
    enum { CLASS_COUNT = sizeof classes / sizeof classes[0] };
    uint32_t owners[CLASS_COUNT];
    if (history->has_owners) return 1;
    for (int i = 0; i < CLASS_COUNT; i++) {
        if (!name_table_add(&history->owners, classes[i].name, strlen(classes[i].name), &owners[i]))
            return 0;
    }
    for (uint32_t i = 0; i < history->block_count; i++) {
        int at = 0;
        while (history->blocks[i].bytes < classes[at].from)
            at++;
        history->blocks[i].owner = owners[at];
    }
    return 1;
}

/* ---- gathering ------------------------------------------------------------------------------- */

typedef struct walk {
    const memory_history *history;
    uint64_t *live; /* of each owner, by its number */
    uint64_t total;
    int quarter;
} walk;

static void enter_quarter(walk *at, history_owners *out, int quarter) {
    for (uint32_t i = 0; i < out->name_count; i++) {
        for (int q = at->quarter + 1; q <= quarter; q++)
            out->sums[i].least_bytes[q] = at->live[i];
    }
    at->quarter = quarter;
}

static void walk_event(walk *at, history_owners *out, uint32_t event) {
    const memory_history *history = at->history;
    const history_block *block;
    owner_sums *sums;
    uint64_t *live;
    if (history->events[event].kind > HISTORY_FREE) return;
    block = &history->blocks[history->events[event].index];
    sums = &out->sums[block->owner];
    live = &at->live[block->owner];
    if (history->events[event].kind == HISTORY_FREE) {
        *live -= block->bytes;
        at->total -= block->bytes;
        if (*live < sums->least_bytes[at->quarter]) sums->least_bytes[at->quarter] = *live;
        return;
    }
    *live += block->bytes;
    at->total += block->bytes;
    sums->blocks++;
    sums->bytes += block->bytes;
    if (*live > sums->peak_bytes) sums->peak_bytes = *live;
    if (at->total > out->peak_bytes) {
        out->peak_bytes = at->total;
        out->peak_event = event;
    }
}

static void gather_lives(const memory_history *history, history_owners *out, uint64_t *live) {
    walk at = {history, live, 0, -1};
    uint32_t count = history->event_count;
    for (uint32_t i = 0; i < count; i++) {
        int quarter = (int)((uint64_t)i * OWNER_QUARTERS / count);
        if (quarter != at.quarter) enter_quarter(&at, out, quarter);
        walk_event(&at, out, i);
    }
    if (count) enter_quarter(&at, out, OWNER_QUARTERS - 1);
}

static void gather_blocks(const memory_history *history, history_owners *out) {
    for (uint32_t i = 0; i < history->block_count; i++) {
        const history_block *block = &history->blocks[i];
        owner_sums *sums = &out->sums[block->owner];
        if (block->begin <= out->peak_event && block->end > out->peak_event)
            sums->bytes_at_peak += block->bytes;
        if (block->end != HISTORY_ALIVE) continue;
        if (sums->alive_blocks == 0 || block->begin < sums->oldest) sums->oldest = block->begin;
        sums->alive_blocks++;
        sums->alive_bytes += block->bytes;
    }
}

static int compare_sums(const void *a, const void *b) {
    const owner_sums *left = a;
    const owner_sums *right = b;
    if (left->peak_bytes != right->peak_bytes) return left->peak_bytes > right->peak_bytes ? -1 : 1;
    return left->owner < right->owner ? -1 : 1;
}

static void keep_and_rank(history_owners *out) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < out->name_count; i++) {
        owner_sums *sums = &out->sums[i];
        if (sums->blocks == 0) continue;
        sums->grows = 1;
        for (int q = 1; q < OWNER_QUARTERS; q++)
            sums->grows &=
                sums->least_bytes[q] > sums->least_bytes[q - 1] + sums->peak_bytes / GROWTH_PART;
        out->sums[kept++] = *sums;
    }
    out->count = kept;
    qsort(out->sums, kept, sizeof *out->sums, compare_sums);
    memset(out->ranks, 0xff, out->name_count * sizeof *out->ranks);
    for (uint32_t i = 0; i < kept; i++)
        out->ranks[out->sums[i].owner] = i;
}

int history_owners_gather(const memory_history *history, history_owners *out) {
    uint64_t *live;
    *out = (history_owners){.name_count = history->owners.count + 1};
    out->sums = calloc(out->name_count, sizeof *out->sums);
    out->ranks = calloc(out->name_count, sizeof *out->ranks);
    live = calloc(out->name_count, sizeof *live);
    if (!out->sums || !out->ranks || !live) {
        free(live);
        history_owners_deinit(out);
        return 0;
    }
    for (uint32_t i = 0; i < out->name_count; i++)
        out->sums[i].owner = i;
    gather_lives(history, out, live);
    gather_blocks(history, out);
    keep_and_rank(out);
    free(live);
    return 1;
}

void history_owners_deinit(history_owners *owners) {
    free(owners->sums);
    free(owners->ranks);
    *owners = (history_owners){0};
}
