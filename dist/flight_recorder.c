/* The last collectives of a communicator: see flight_recorder.h. */
#include "flight_recorder.h"

#include <stdio.h>
#include <time.h>

enum { MICROSECONDS = 1000000 };

uint64_t tn__flight_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * MICROSECONDS + (uint64_t)now.tv_nsec / 1000;
}

void tn__flight_put(tn__flight_recorder *recorder, const tn__batch *batch, uint64_t stream_id) {
    const tn__collective_call *first = &batch->calls[0];
    uint64_t sequence = ++recorder->put;
    recorder->ops[sequence % TN__FLIGHT_OPS] = (tn__flight_op){.sequence = sequence,
                                                               .kind = first->kind,
                                                               .calls = batch->call_count,
                                                               .count = first->count,
                                                               .dtype = first->dtype,
                                                               .root = first->root,
                                                               .stream_id = stream_id,
                                                               .put_us = tn__flight_now_us()};
}

void tn__flight_put_graph(tn__flight_recorder *recorder, uint64_t calls, uint64_t stream_id) {
    uint64_t sequence = ++recorder->put;
    recorder->ops[sequence % TN__FLIGHT_OPS] = (tn__flight_op){.sequence = sequence,
                                                               .is_graph = 1,
                                                               .calls = (size_t)calls,
                                                               .stream_id = stream_id,
                                                               .put_us = tn__flight_now_us()};
}

static uint64_t first_kept(const tn__flight_recorder *recorder) {
    return recorder->put > TN__FLIGHT_OPS ? recorder->put - TN__FLIGHT_OPS + 1 : 1;
}

const tn__flight_op *tn__flight_oldest(const tn__flight_recorder *recorder) {
    uint64_t sequence = recorder->done + 1;
    if (sequence > recorder->put || sequence < first_kept(recorder)) return NULL;
    return &recorder->ops[sequence % TN__FLIGHT_OPS];
}

static const char *kind_of(const tn__flight_op *op) {
    if (op->is_graph) return "graph";
    return op->calls > 1 ? "group" : tn_collective_name(op->kind);
}

void tn__flight_name(const tn__flight_op *op, char *text, size_t text_bytes) {
    snprintf(text, text_bytes, "%s %llu", kind_of(op), (unsigned long long)op->sequence);
}

void tn__flight_write_text(const tn__flight_recorder *recorder, tn__text *out) {
    uint64_t now = tn__flight_now_us();
    for (uint64_t at = first_kept(recorder); at <= recorder->put; at++) {
        const tn__flight_op *op = &recorder->ops[at % TN__FLIGHT_OPS];
        tn__text_add(out, "  %llu %s", (unsigned long long)at, kind_of(op));
        if (op->calls > 1 || op->is_graph)
            tn__text_add(out, " of %zu calls", op->calls);
        else
            tn__text_add(out, " of %zu %s, root %d", op->count, tn_dtype_name(op->dtype), op->root);
        tn__text_add(out, ", stream %llu, put %.3f s ago: %s\n", (unsigned long long)op->stream_id,
                     (double)(now - op->put_us) / MICROSECONDS,
                     at <= recorder->done ? "done" : "not known to be done");
    }
}

void tn__flight_write_json(const tn__flight_recorder *recorder, tn__text *out) {
    uint64_t now = tn__flight_now_us();
    int is_first = 1;
    for (uint64_t at = first_kept(recorder); at <= recorder->put; at++) {
        const tn__flight_op *op = &recorder->ops[at % TN__FLIGHT_OPS];
        tn__text_next_item(out, &is_first, "    ");
        tn__text_add(out,
                     "{\"sequence\": %llu, \"kind\": \"%s\", \"calls\": %zu, \"count\": %zu, "
                     "\"dtype\": \"%s\", \"root\": %d, \"stream\": %llu, \"age_us\": %llu, "
                     "\"is_done\": %s}",
                     (unsigned long long)at, kind_of(op), op->calls, op->count,
                     tn_dtype_name(op->dtype), op->root, (unsigned long long)op->stream_id,
                     (unsigned long long)(now - op->put_us),
                     at <= recorder->done ? "true" : "false");
    }
}
