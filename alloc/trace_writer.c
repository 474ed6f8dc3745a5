/* The trace file: see trace_writer.h. zlib writes both kinds; "T" means without compression. */
#include "trace_writer.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "host_alloc.h"
#include "tenure_pool.h"

struct tn__trace_writer {
    gzFile file;
    char *path;
    pid_t process;
    double start_us;
    uint64_t last_id;
    int64_t stream_count;
    int error; /* errno of the first write that failed */
};

static int is_gzip_name(const char *path) {
    size_t length = strlen(path);
    return length > 3 && strcmp(path + length - 3, ".gz") == 0;
}

static void note_error(tn__trace_writer *trace) {
    if (!trace->error) trace->error = errno ? errno : EIO;
}

tn_status tn__trace_open(const char *path, double start_us, tn__trace_writer **out) {
    tn__trace_writer *trace = tn__host_alloc(1, sizeof *trace);
    if (!trace) return TN_OUT_OF_HOST_MEMORY;
    trace->path = tn__host_strdup(path);
    if (!trace->path) {
        tn__host_free(trace);
        return TN_OUT_OF_HOST_MEMORY;
    }
    errno = 0;
    trace->file = gzopen(path, is_gzip_name(path) ? "wb6e" : "wbTe");
    if (!trace->file) {
        tn_status status = TN_FAIL(TN_IO, "the trace %s can not be written: %s", path,
                                   errno ? strerror(errno) : "zlib has no memory");
        tn__host_free(trace->path);
        tn__host_free(trace);
        return status;
    }
    trace->process = getpid();
    trace->start_us = start_us;
    if (gzputs(trace->file, "op,id,bytes,stream,time_us,address,owner\n") < 0) note_error(trace);
    *out = trace;
    return TN_OK;
}

typedef struct owner_text {
    char text[TN_EVENT_OWNER_BYTES];
} owner_text;

static owner_text owner_on_a_line(const char *owner) {
    owner_text out = {{0}};
    for (size_t i = 0; owner && owner[i] && i + 1 < sizeof out.text; i++) {
        unsigned char byte = (unsigned char)owner[i];
        out.text[i] = byte < 0x20 || byte == 0x7f ? '?' : owner[i];
    }
    return out;
}

uint64_t tn__trace_alloc(tn__trace_writer *trace, const tn__trace_block *block,
                         int64_t *stream_number, double now_us) {
    uint64_t id = ++trace->last_id;
    if (*stream_number < 0) *stream_number = trace->stream_count++;
    errno = 0;
    if (gzprintf(trace->file, "a,%" PRIu64 ",%zu,%" PRId64 ",%.0f,0x%" PRIxPTR ",%s\n", id,
                 block->bytes, *stream_number, now_us - trace->start_us, block->address,
                 owner_on_a_line(block->owner).text) <= 0) {
        note_error(trace);
    }
    return id;
}

void tn__trace_free(tn__trace_writer *trace, uint64_t id, double now_us) {
    errno = 0;
    if (gzprintf(trace->file, "f,%" PRIu64 ",,,%.0f,,\n", id, now_us - trace->start_us) <= 0) {
        note_error(trace);
    }
}

void tn__trace_shortage(tn__trace_writer *trace, const tn__trace_block *block, double now_us) {
    errno = 0;
    if (gzprintf(trace->file, "o,,%zu,,%.0f,,%s\n", block->bytes, now_us - trace->start_us,
                 owner_on_a_line(block->owner).text) <= 0) {
        note_error(trace);
    }
}

tn_status tn__trace_close(tn__trace_writer *trace) {
    tn_status status = TN_OK;
    if (trace->process == getpid()) {
        errno = 0;
        if (gzclose(trace->file) != Z_OK) note_error(trace);
        if (trace->error) {
            status = TN_FAIL(TN_IO, "the trace %s is not complete: %s", trace->path,
                             strerror(trace->error));
        }
    }
    tn__host_free(trace->path);
    tn__host_free(trace);
    return status;
}
