/* Files and directories, each call one step that either is done or fails with TN_IO and names the
 * path and the reason. A watcher may see every step before it is done and make it fail: for tests
 * that let each step fail in turn, or end the program there. */
#ifndef TENURE_FILE_STEPS_H
#define TENURE_FILE_STEPS_H

#include "error.h"

/* Called before each step of any thread: an errno that the step is to fail with, or 0. */
typedef int (*tn__file_watcher)(void *context, const char *step, const char *path);
TN_SISTER_API void tn__file_steps_watch(tn__file_watcher watcher, void *context);

/* A path of host memory: directory + "/" + name. NULL: no memory. */
char *tn__file_path(const char *directory, const char *name);

tn_status tn__file_create(const char *path, int *file); /* for writing; must not be there */
tn_status tn__file_write(int file, const char *path, const void *data, size_t bytes,
                         uint64_t offset);
tn_status tn__file_sync(int file, const char *path);
tn_status tn__file_close(int file, const char *path); /* also on failure it is closed */
tn_status tn__file_rename(const char *from, const char *to);

/* *is_there 0, *file -1: there is none. */
tn_status tn__file_open(const char *path, int *file, uint64_t *bytes, int *is_there);
/* TN_CORRUPT_INPUT if the file ends before. */
tn_status tn__file_read(int file, const char *path, void *data, size_t bytes, uint64_t offset);

/* Success if it is there; a new one is on the disk. */
tn_status tn__directory_make(const char *path);
tn_status tn__directory_sync(const char *path);

/* Calls visit with each name but . and .. until one is not TN_OK. */
typedef tn_status (*tn__directory_visit)(void *context, const char *name);
tn_status tn__directory_list(const char *path, tn__directory_visit visit, void *context);

/* Removes the directory with the files in it; directories within stay, and then it does too. */
tn_status tn__directory_remove(const char *path);

#endif
