/* A log of RMM: see history_write.h. */
#include "history_write.h"

#include <inttypes.h>

/* Where blocks are put whose addresses nobody knows: one each, beyond those of user space. */
#define MADE_ADDRESS ((uint64_t)1 << 48)

static uint64_t address_of(const memory_history *history, uint32_t index) {
    uint64_t address = history->blocks[index].address;
    return address ? address : MADE_ADDRESS + (uint64_t)index * 512;
}

/* The time of day, counted from midnight; days go round. */
static void put_clock(FILE *stream, double time_us) {
    uint64_t us = time_us > 0 && time_us < 1e18 ? (uint64_t)time_us : 0;
    uint64_t seconds = us / 1000000;
    fprintf(stream, "%02u:%02u:%02u.%06u", (unsigned)(seconds / 3600 % 24),
            (unsigned)(seconds / 60 % 60), (unsigned)(seconds % 60), (unsigned)(us % 1000000));
}

static void put_block(FILE *stream, const memory_history *history, const history_event *event) {
    const history_block *block = &history->blocks[event->index];
    fprintf(stream, ",%s,0x%" PRIx64 ",%" PRIu64 ",0x%" PRIx64 "\n",
            event->kind == HISTORY_ALLOC ? "allocate" : "free", address_of(history, event->index),
            block->bytes, history->stream_names[block->stream]);
}

/* RMM's replay tells threads apart, and a history does not know them: all is thread 1. */
void history_write_rmm(FILE *stream, const memory_history *history) {
    fputs("Thread,Time,Action,Pointer,Size,Stream\n", stream);
    for (uint32_t i = 0; i < history->event_count; i++) {
        const history_event *event = &history->events[i];
        if (event->kind == HISTORY_RESERVE) continue;
        fputs("1,", stream);
        put_clock(stream, event->time_us - history->events[0].time_us);
        if (event->kind == HISTORY_SHORTAGE) {
            fprintf(stream, ",allocate failure,(nil),%" PRIu64 ",0x0\n",
                    history->shortages[event->index].asked_bytes);
        } else {
            put_block(stream, history, event);
        }
    }
}
