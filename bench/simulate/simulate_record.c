/* A rank's notes, intervals and pieces: see simulate_record.h. */
#include "simulate_record.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROOM_MIN = 256 };

const char *simulate_owner_name(simulate_owner owner) {
    static const char *const names[] = {
#define SIMULATE_TEXT(name, text) text,
        SIMULATE_OWNERS(SIMULATE_TEXT)
#undef SIMULATE_TEXT
    };
    return names[owner];
}

/* ---- growing --------------------------------------------------------------------------------- */

/* A place behind the others; NULL without memory. */
static void *append(simulate_record *record, void **items, size_t *count, size_t *room,
                    size_t item_bytes) {
    if (*count == *room) {
        size_t wanted = *room ? 2 * *room : ROOM_MIN;
        void *grown = realloc(*items, wanted * item_bytes);
        if (!grown) {
            record->is_complete = 0;
            return NULL;
        }
        *items = grown;
        *room = wanted;
    }
    void *place = (char *)*items + (*count)++ * item_bytes;
    memset(place, 0, item_bytes);
    return place;
}

void simulate_record_begin(simulate_record *record) {
    memset(record, 0, sizeof *record);
    record->is_complete = 1;
}

void simulate_record_end(simulate_record *record) {
    free(record->notes);
    free(record->intervals);
    free(record->pieces);
    memset(record, 0, sizeof *record);
}

void simulate_record_restart(simulate_record *record, double now_us) {
    record->note_count = record->interval_count = record->piece_count = 0;
    record->origin_us = now_us;
    record->last_us = record->piece_us = 0.0;
}

/* ---- intervals ------------------------------------------------------------------------------- */

static int number_of(simulate_record *record, uint64_t stream) {
    const int room = sizeof record->streams / sizeof record->streams[0];
    for (int i = 0; i < record->stream_count; i++) {
        if (record->streams[i] == stream) return i;
    }
    if (record->stream_count == room) return room - 1;
    record->streams[record->stream_count] = stream;
    return record->stream_count++;
}

static int is_collective(const char *what) {
    for (int i = 0; i < TN_COLLECTIVE_COUNT; i++) {
        if (strcmp(what, tn_collective_name((tn_collective)i)) == 0) return 1;
    }
    return strcmp(what, "group") == 0;
}

void simulate_record_watch(void *context, const tnsim_interval *interval) {
    simulate_record *record = context;
    const int stream = number_of(record, interval->stream);
    simulate_interval *place = append(record, (void **)&record->intervals, &record->interval_count,
                                      &record->interval_room, sizeof *record->intervals);
    if (!place) return;
    place->what = interval->what;
    place->begin_us = interval->begin_us - record->origin_us;
    place->end_us = interval->end_us - record->origin_us;
    place->stream = stream;
    place->is_communication = is_collective(interval->what);
    if (place->end_us > record->last_us) record->last_us = place->end_us;
}

/* ---- notes and pieces ------------------------------------------------------------------------ */

void simulate_record_note(simulate_record *record, const char *name,
                          const size_t owner_bytes[SIMULATE_OWNER_COUNT]) {
    simulate_note *note = append(record, (void **)&record->notes, &record->note_count,
                                 &record->note_room, sizeof *record->notes);
    if (!note) return;
    snprintf(note->name, sizeof note->name, "%s", name);
    note->time_us = record->last_us;
    memcpy(note->owner_bytes, owner_bytes, sizeof note->owner_bytes);
    for (int i = 0; i < SIMULATE_OWNER_COUNT; i++)
        note->live_bytes += owner_bytes[i];
}

void simulate_record_piece(simulate_record *record, int chunk, int microbatch, int is_backward) {
    simulate_piece *piece = append(record, (void **)&record->pieces, &record->piece_count,
                                   &record->piece_room, sizeof *record->pieces);
    if (!piece) return;
    piece->chunk = chunk;
    piece->microbatch = microbatch;
    piece->is_backward = is_backward;
    piece->own_us = record->last_us - record->piece_us;
    piece->start_us = record->piece_us;
    record->piece_us = record->last_us;
}

/* ---- sums ------------------------------------------------------------------------------------ */

static int by_begin(const void *left, const void *right) {
    const simulate_interval *a = left, *b = right;
    if (a->begin_us != b->begin_us) return a->begin_us < b->begin_us ? -1 : 1;
    if (a->end_us != b->end_us) return a->end_us < b->end_us ? -1 : 1;
    return a->stream - b->stream;
}

/* Where something of a kind runs, as the sweep has come so far. */
typedef struct cover {
    double until_us;
    double sum_us;
} cover;

/* Adds what of [begin, end) is not covered yet: intervals come by their begin. */
static void cover_add(cover *so_far, double begin_us, double end_us) {
    if (begin_us < so_far->until_us) begin_us = so_far->until_us;
    if (end_us <= begin_us) return;
    so_far->sum_us += end_us - begin_us;
    so_far->until_us = end_us;
}

/* Exposed is what all together cover and computation does not. */
void simulate_record_close(simulate_record *record) {
    cover compute = {0.0, 0.0}, communication = {0.0, 0.0}, both = {0.0, 0.0};
    if (record->interval_count > 0) /* on the host there are none, and no array */
        qsort(record->intervals, record->interval_count, sizeof *record->intervals, by_begin);
    for (size_t i = 0; i < record->interval_count; i++) {
        const simulate_interval *interval = &record->intervals[i];
        cover_add(interval->is_communication ? &communication : &compute, interval->begin_us,
                  interval->end_us);
        cover_add(&both, interval->begin_us, interval->end_us);
    }
    record->compute_us = compute.sum_us;
    record->communication_us = communication.sum_us;
    record->exposed_us = both.sum_us - compute.sum_us;
}
