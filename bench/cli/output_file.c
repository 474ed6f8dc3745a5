/* Whole files or none: see output_file.h. Compression is a stream of stdio over zlib's. */
#include "output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

enum { PARTS_MAX = 100 }; /* names that are tried for what is half-written */

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

/* Closes the descriptor if it fails. */
static FILE *open_compressed(int descriptor) {
    cookie_io_functions_t calls = {.write = write_compressed, .close = close_compressed};
    compressed *self = calloc(1, sizeof *self);
    FILE *stream = NULL;
    if (self) self->file = gzdopen(descriptor, "wb6");
    if (self && self->file) stream = fopencookie(self, "w", calls);
    if (stream) return stream;
    if (self && self->file) {
        (void)gzclose(self->file);
    } else {
        close(descriptor);
    }
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

static int choose_name(output_file *out, const char *path) {
    char *there = realpath(path, NULL); /* of a link, what it leads to */
    out->path = there ? there : strdup(path);
    return out->path != NULL;
}

int output_part_make(const char *path, const char *ending, char **part) {
    struct stat about;
    int descriptor = -1;
    int had_file = stat(path, &about) == 0;
    *part = NULL;
    for (int i = 1; i <= PARTS_MAX && descriptor < 0; i++) {
        free(*part);
        if (asprintf(part, "%s.part%.0d%s", path, i > 1 ? i : 0, ending) < 0) {
            *part = NULL;
            errno = ENOMEM;
            return -1;
        }
        descriptor = open(*part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (descriptor < 0 && errno != EEXIST) break;
    }
    if (descriptor >= 0 && had_file) (void)fchmod(descriptor, about.st_mode & 0777);
    if (descriptor < 0) {
        free(*part);
        *part = NULL;
    }
    return descriptor;
}

/* NULL and errno. */
static FILE *open_output(output_file *out, const char *path) {
    int descriptor;
    FILE *stream;
    errno = EISDIR;
    if (is_folder(out->path)) return NULL;
    descriptor = is_special(out->path) ? open(out->path, O_WRONLY | O_CLOEXEC)
                                       : output_part_make(out->path, "", &out->part);
    if (descriptor < 0) return NULL;
    if (ends_in_gz(path)) {
        stream = open_compressed(descriptor);
    } else {
        stream = fdopen(descriptor, "w");
        if (!stream) close(descriptor);
    }
    if (!stream && out->part) (void)unlink(out->part);
    if (!stream) errno = ENOMEM;
    return stream;
}

int output_begin(output_file *out, const char *path, char *error) {
    *out = (output_file){0};
    if (strcmp(path, "-") == 0) {
        out->stream = stdout;
        return 1;
    }
    if (!choose_name(out, path)) {
        fail(out, "out of host memory", error);
        forget(out);
        return 0;
    }
    out->stream = open_output(out, path);
    if (out->stream) return 1;
    fail(out, strerror(errno), error);
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
