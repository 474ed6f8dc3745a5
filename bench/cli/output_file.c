/* Whole files or none: see output_file.h. Compression is a stream of stdio over zlib's. */
#include "output_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

static int ends_in_gz(const char *path) {
    size_t length = strlen(path);
    return length > 3 && strcmp(path + length - 3, ".gz") == 0;
}

static int fail(const output_file *out, const char *words, char *error) {
    snprintf(error, OUTPUT_ERROR_BYTES, "%.300s can not be written: %s",
             out->path ? out->path : "standard output", words);
    return 0;
}

static void forget(output_file *out) {
    free(out->path);
    free(out->part);
    *out = (output_file){0};
}

/* ---- compression ----------------------------------------------------------------------------- */

typedef struct compressed {
    gzFile file;
    int error; /* errno of the first failure: zlib says it once */
} compressed;

static int failed(compressed *self) {
    if (!self->error) self->error = errno ? errno : EIO;
    errno = self->error;
    return EOF;
}

static ssize_t write_compressed(void *cookie, const char *bytes, size_t length) {
    compressed *self = cookie;
    errno = 0;
    if (gzwrite(self->file, bytes, (unsigned)length) == (int)length) return (ssize_t)length;
    (void)failed(self);
    return 0;
}

static int close_compressed(void *cookie) {
    compressed *self = cookie;
    int result = 0;
    errno = 0;
    if (gzclose(self->file) != Z_OK) result = failed(self);
    free(self);
    return result;
}

static FILE *open_compressed(const char *path) {
    cookie_io_functions_t calls = {.write = write_compressed, .close = close_compressed};
    compressed *self = calloc(1, sizeof *self);
    FILE *stream = NULL;
    if (self) self->file = gzopen(path, "wb6e");
    if (self && self->file) stream = fopencookie(self, "w", calls);
    if (stream) return stream;
    if (self && self->file) (void)gzclose(self->file);
    free(self);
    return NULL;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* What is there and is no file (a device, a pipe) can not be renamed over. */
static int is_special(const char *path) {
    struct stat about;
    return stat(path, &about) == 0 && !S_ISREG(about.st_mode);
}

static int is_folder(const char *path) {
    struct stat about;
    return stat(path, &about) == 0 && S_ISDIR(about.st_mode);
}

static int choose_names(output_file *out, const char *path) {
    char *there = realpath(path, NULL); /* of a link, what it leads to */
    out->path = there ? there : strdup(path);
    if (!out->path) return 0;
    if (is_special(out->path)) return 1;
    return asprintf(&out->part, "%s.part", out->path) > 0 || (out->part = NULL, 0);
}

int output_begin(output_file *out, const char *path, char *error) {
    const char *opened;
    *out = (output_file){0};
    if (strcmp(path, "-") == 0) {
        out->stream = stdout;
        return 1;
    }
    if (!choose_names(out, path)) {
        fail(out, "out of host memory", error);
        forget(out);
        return 0;
    }
    opened = out->part ? out->part : out->path;
    errno = is_folder(opened) ? EISDIR : 0;
    if (errno == 0) out->stream = ends_in_gz(path) ? open_compressed(opened) : fopen(opened, "we");
    if (out->stream) return 1;
    fail(out, errno ? strerror(errno) : "out of host memory", error);
    forget(out);
    return 0;
}

/* Why a write has failed, now or long ago; 0 if none has. stdio keeps that there was a failure and
 * not which: a byte more is likely to fail for the same reason. */
static int reason_of(FILE *stream) {
    int had_failed = ferror(stream);
    errno = 0;
    if (!had_failed) return fflush(stream) == 0 ? 0 : errno ? errno : EIO;
    clearerr(stream);
    (void)fputc('\n', stream);
    return fflush(stream) != 0 && errno ? errno : EIO;
}

/* The reason why what was written is not there; 0 if it is. */
static int close_stream(output_file *out) {
    int reason = reason_of(out->stream);
    if (out->stream == stdout) return reason;
    if (!reason && fileno(out->stream) >= 0 && out->part && fsync(fileno(out->stream)) != 0)
        reason = errno;
    errno = 0;
    if (fclose(out->stream) != 0 && !reason) reason = errno ? errno : EIO;
    return reason;
}

int output_end(output_file *out, char *error) {
    int reason = close_stream(out);
    if (!reason && out->part && rename(out->part, out->path) != 0) reason = errno;
    if (reason) {
        if (out->part) (void)unlink(out->part);
        fail(out, strerror(reason), error);
    }
    forget(out);
    return !reason;
}

void output_abandon(output_file *out) {
    if (out->stream && out->stream != stdout) (void)close_stream(out);
    if (out->part) (void)unlink(out->part);
    forget(out);
}
