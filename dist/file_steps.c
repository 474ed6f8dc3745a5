/* Files and directories in steps: see file_steps.h. */
#include "file_steps.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host_alloc.h"

enum { FILE_MODE = 0666, DIRECTORY_MODE = 0777, TRANSFER_MAX = 1 << 30 };

static _Atomic(tn__file_watcher) watcher;
static _Atomic(void *) watcher_context;

void tn__file_steps_watch(tn__file_watcher new_watcher, void *context) {
    atomic_store(&watcher_context, context);
    atomic_store(&watcher, new_watcher);
}

static int take_step(const char *step, const char *path) {
    tn__file_watcher now = atomic_load(&watcher);
    return now ? now(atomic_load(&watcher_context), step, path) : 0;
}

static tn_status fail(const char *step, const char *path, int code) {
    return TN_FAIL_NATIVE(TN_IO, code, "%s: %s: %s", path, step, strerror(code));
}

char *tn__file_path(const char *directory, const char *name) {
    size_t bytes = strlen(directory) + 1 + strlen(name) + 1;
    char *path = tn__host_alloc(bytes, 1);
    if (path) snprintf(path, bytes, "%s/%s", directory, name);
    return path;
}

/* ---- writing --------------------------------------------------------------------------------- */

tn_status tn__file_create(const char *path, int *file) {
    int code = take_step("create", path);
    int made = code ? -1 : open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, FILE_MODE);
    if (made < 0) return fail("it can not be created", path, code ? code : errno);
    *file = made;
    return TN_OK;
}

tn_status tn__file_write(int file, const char *path, const void *data, size_t bytes,
                         uint64_t offset) {
    const char *at = data;
    while (bytes) {
        int code = take_step("write", path);
        size_t most = bytes < TRANSFER_MAX ? bytes : TRANSFER_MAX;
        ssize_t wrote = code ? -1 : pwrite(file, at, most, (off_t)offset);
        if (wrote < 0 && !code && errno == EINTR) continue;
        if (wrote < 0) return fail("it can not be written", path, code ? code : errno);
        at += wrote;
        offset += (uint64_t)wrote;
        bytes -= (size_t)wrote;
    }
    return TN_OK;
}

tn_status tn__file_sync(int file, const char *path) {
    int code = take_step("sync", path);
    if (!code && fsync(file) == 0) return TN_OK;
    return fail("it can not be brought to the disk", path, code ? code : errno);
}

tn_status tn__file_close(int file, const char *path) {
    int code = take_step("close", path);
    if (close(file) != 0 && !code) code = errno;
    return code ? fail("it can not be closed", path, code) : TN_OK;
}

tn_status tn__file_rename(const char *from, const char *to) {
    int code = take_step("rename", to);
    if (!code && rename(from, to) == 0) return TN_OK;
    return fail("it can not be put in place", to, code ? code : errno);
}

/* ---- reading --------------------------------------------------------------------------------- */

tn_status tn__file_open(const char *path, int *file, uint64_t *bytes, int *is_there) {
    struct stat facts;
    int code = take_step("open", path);
    /* What is no file may keep whoever opens it waiting for its other end. */
    int opened = code ? -1 : open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (opened < 0 && !code) code = errno;
    *is_there = code != ENOENT && code != ENOTDIR;
    *file = -1;
    if (!*is_there) return TN_OK;
    if (opened < 0) return fail("it can not be opened", path, code);
    if (fstat(opened, &facts) != 0 || !S_ISREG(facts.st_mode)) {
        close(opened);
        return TN_FAIL(TN_CORRUPT_INPUT, "%s is not a file", path);
    }
    *file = opened;
    *bytes = (uint64_t)facts.st_size;
    return TN_OK;
}

tn_status tn__file_read(int file, const char *path, void *data, size_t bytes, uint64_t offset) {
    char *at = data;
    while (bytes) {
        int code = take_step("read", path);
        size_t most = bytes < TRANSFER_MAX ? bytes : TRANSFER_MAX;
        ssize_t got = code ? -1 : pread(file, at, most, (off_t)offset);
        if (got < 0 && !code && errno == EINTR) continue;
        if (got < 0) return fail("it can not be read", path, code ? code : errno);
        if (got == 0)
            return TN_FAIL(TN_CORRUPT_INPUT, "%s ends after %llu bytes, in the middle", path,
                           (unsigned long long)offset);
        at += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return TN_OK;
}

/* ---- directories ----------------------------------------------------------------------------- */

tn_status tn__directory_sync(const char *path) {
    int code = take_step("sync directory", path);
    int file = code ? -1 : open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0 || fsync(file) != 0) {
        if (!code) code = errno;
    }
    if (file >= 0) close(file);
    /* A file system that can not do it for directories has nothing to be done. */
    if (code && code != EINVAL) return fail("it can not be brought to the disk", path, code);
    return TN_OK;
}

/* "a" for "a/b", "." for "b", "/" for "/b". NULL: no memory. */
static char *parent_of(const char *path) {
    char *parent = tn__file_path(path, "");
    size_t bytes = strlen(path);
    if (!parent) return NULL;
    while (bytes > 1 && path[bytes - 1] == '/')
        bytes--;
    while (bytes > 0 && path[bytes - 1] != '/')
        bytes--;
    if (!bytes) parent[bytes++] = '.';
    parent[bytes] = 0;
    return parent;
}

/* A directory is on the disk once the one that it is in says so. */
tn_status tn__directory_make(const char *path) {
    int code = take_step("make directory", path);
    if (!code && mkdir(path, DIRECTORY_MODE) != 0) code = errno;
    if (code == EEXIST) return TN_OK;
    if (code) return fail("the directory can not be made", path, code);
    char *parent = parent_of(path);
    tn_status status = parent ? tn__directory_sync(parent) : TN_OUT_OF_HOST_MEMORY;
    tn__host_free(parent);
    if (status != TN_OK) (void)rmdir(path);
    return status;
}

/* The end of a directory and a failure to read it look the same but for errno. */
static tn_status next_entry(DIR *directory, const char *path, const struct dirent **out) {
    errno = 0;
    *out = readdir(directory);
    if (*out || errno == 0) return TN_OK;
    return fail("the directory can not be read", path, errno);
}

static tn_status list_all(DIR *directory, const char *path, tn__directory_visit visit,
                          void *context) {
    const struct dirent *entry;
    for (;;) {
        TN_TRY(next_entry(directory, path, &entry));
        if (!entry) return TN_OK;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        TN_TRY(visit(context, entry->d_name));
    }
}

tn_status tn__directory_list(const char *path, tn__directory_visit visit, void *context) {
    int code = take_step("list", path);
    DIR *directory = code ? NULL : opendir(path);
    if (!directory) return fail("the directory can not be read", path, code ? code : errno);
    tn_status status = list_all(directory, path, visit, context);
    closedir(directory);
    return status;
}

static tn_status remove_file(void *context, const char *name) {
    char *path = tn__file_path(context, name);
    if (!path) return TN_OUT_OF_HOST_MEMORY;
    int code = take_step("remove", path);
    if (!code && unlink(path) != 0) code = errno;
    tn_status status = code ? fail("it can not be removed", path, code) : TN_OK;
    tn__host_free(path);
    return status;
}

tn_status tn__directory_remove(const char *path) {
    TN_TRY(tn__directory_list(path, remove_file, (void *)(uintptr_t)path));
    int code = take_step("remove directory", path);
    if (!code && rmdir(path) == 0) return TN_OK;
    return fail("the directory can not be removed", path, code ? code : errno);
}
