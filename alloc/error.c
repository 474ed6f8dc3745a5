/* Statuses in words, and this thread's last failure.
 *
 * Invariants: a thread's text is always a closed string; it changes only in tn__fail and where a
 * scope or a cleanup puts it back. While a scope is open and nothing has failed in it, nothing is
 * kept: the first failure keeps what was there before.
 */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local tn__saved_error this_thread;

static _Thread_local struct scopes {
    unsigned depth;
    int is_kept; /* kept holds what the outermost scope began with */
    tn__saved_error kept;
} scopes;

typedef struct status_words {
    const char *name;
    const char *text;
} status_words;

static const status_words words_of[TN_STATUS_COUNT] = {
    [TN_OK] = {"TN_OK", "success"},
    [TN_OUT_OF_DEVICE_MEMORY] = {"TN_OUT_OF_DEVICE_MEMORY", "out of device memory"},
    [TN_OUT_OF_HOST_MEMORY] = {"TN_OUT_OF_HOST_MEMORY", "out of host memory"},
    [TN_OUT_OF_ADDRESS_SPACE] = {"TN_OUT_OF_ADDRESS_SPACE", "out of address space"},
    [TN_INVALID_ARGUMENT] = {"TN_INVALID_ARGUMENT", "invalid argument"},
    [TN_INVALID_STATE] = {"TN_INVALID_STATE", "invalid state"},
    [TN_STALE_HANDLE] = {"TN_STALE_HANDLE", "stale handle"},
    [TN_IN_USE] = {"TN_IN_USE", "in use"},
    [TN_UNSUPPORTED] = {"TN_UNSUPPORTED", "unsupported"},
    [TN_DRIVER_ERROR] = {"TN_DRIVER_ERROR", "driver error"},
    [TN_COMM_ERROR] = {"TN_COMM_ERROR", "communication error"},
    [TN_COMM_TIMEOUT] = {"TN_COMM_TIMEOUT", "communication timeout"},
    [TN_LEAK] = {"TN_LEAK", "leak"},
    [TN_IO] = {"TN_IO", "input or output error"},
    [TN_CORRUPT_INPUT] = {"TN_CORRUPT_INPUT", "corrupt input"},
};

static int is_known(tn_status status) { return (int)status >= 0 && (int)status < TN_STATUS_COUNT; }

const char *tn_status_name(tn_status status) {
    return is_known(status) ? words_of[status].name : "unknown status";
}

const char *tn_status_text(tn_status status) {
    return is_known(status) ? words_of[status].text : "unknown status";
}

const char *tn_error_last(void) { return this_thread.text; }

int tn_error_last_native(void) { return this_thread.native; }

void tn__error_save(tn__saved_error *out) { *out = this_thread; }

void tn__error_restore(const tn__saved_error *saved) { this_thread = *saved; }

void tn__error_scope_begin(void) {
    if (scopes.depth++ == 0) scopes.is_kept = 0;
}

static void keep_last(void) {
    if (scopes.depth == 0 || scopes.is_kept) return;
    scopes.kept = this_thread;
    scopes.is_kept = 1;
}

/* An inner scope leaves what was recovered from to the outermost one. */
tn_status tn__error_scope_end(tn_status status) {
    TN_ASSERT(scopes.depth > 0);
    if (--scopes.depth == 0 && scopes.is_kept && status == TN_OK) this_thread = scopes.kept;
    return status;
}

static const char *file_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

tn_status tn__fail(tn_status status, int native, const char *file, int line, const char *format,
                   ...) {
    char text[TN__ERROR_TEXT_BYTES]; /* the arguments may point into the last text */
    va_list args;
    va_start(args, format);
    int used = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    size_t at = used < 0 ? 0 : (size_t)used;
    if (at >= sizeof text) at = sizeof text - 1;
    text[at] = 0;
    snprintf(text + at, sizeof text - at, " [%s, %s:%d]", tn_status_name(status), file_of(file),
             line);
    keep_last();
    memcpy(this_thread.text, text, sizeof text);
    this_thread.native = native;
    return status;
}

void tn__check_failed(const char *file, int line, const char *text) {
    fprintf(stderr, "tenure: invariant broken at %s:%d: %s\n", file_of(file), line, text);
    abort();
}
