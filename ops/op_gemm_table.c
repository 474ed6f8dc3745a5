/* Tables of GEMMs as files, and the answers of devices that have one way for each product. */
#include "op_gemm.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "host_alloc.h"

enum { FILE_BYTES_MAX = 1 << 20 };

/* ---- files ---------------------------------------------------------------------------------- */

static tn_status require_path(const char *call, const tn_device *device, const char *path) {
    TN_REQUIRE(device, "%s: device is NULL", call);
    TN_REQUIRE(path && path[0], "%s: the path is empty", call);
    return TN_OK;
}

static tn_status write_file(const char *path, const char *text, size_t bytes) {
    static unsigned saves; /* processes and threads may save to one path at the same time */
    size_t part_bytes = strlen(path) + 48;
    char *part = tn__host_alloc(part_bytes, 1);
    if (!part) return TN_OUT_OF_HOST_MEMORY;
    snprintf(part, part_bytes, "%s.%ld.%u.part", path, (long)getpid(),
             __atomic_add_fetch(&saves, 1, __ATOMIC_RELAXED));
    FILE *file = fopen(part, "wxe");
    int error = file ? 0 : errno;
    if (file && fwrite(text, 1, bytes, file) != bytes) error = errno;
    if (file && fclose(file) != 0 && !error) error = errno;
    if (!error && rename(part, path) != 0) error = errno;
    if (error && file) (void)remove(part);
    tn__host_free(part);
    if (!error) return TN_OK;
    return TN_FAIL(TN_IO, "the table of GEMMs %s can not be written: %s", path, strerror(error));
}

static tn_status read_file(const char *path, char **text, size_t *bytes) {
    FILE *file = fopen(path, "re");
    if (!file)
        return TN_FAIL(TN_IO, "the table of GEMMs %s can not be read: %s", path, strerror(errno));
    char *read = tn__host_alloc(FILE_BYTES_MAX, 1);
    size_t count = read ? fread(read, 1, FILE_BYTES_MAX, file) : 0;
    int error = ferror(file) ? errno : 0;
    (void)fclose(file);
    if (!read) return TN_OUT_OF_HOST_MEMORY;
    if (!error && count < FILE_BYTES_MAX) {
        *text = read;
        *bytes = count;
        return TN_OK;
    }
    tn__host_free(read);
    if (error)
        return TN_FAIL(TN_IO, "the table of GEMMs %s can not be read: %s", path, strerror(error));
    return TN_FAIL(TN_CORRUPT_INPUT, "%s is longer than any table of GEMMs", path);
}

tn_status tn_gemm_table_save(tn_device *device, const char *path) {
    char *text = NULL;
    size_t bytes = 0;
    TN_TRY(require_path("tn_gemm_table_save", device, path));
    TN_TRY(tn__op_table_of(device)->gemm_table_text(device, &text, &bytes));
    tn_status status = write_file(path, text, bytes);
    tn__host_free(text);
    return status;
}

tn_status tn_gemm_table_load(tn_device *device, const char *path) {
    char *text = NULL;
    size_t bytes = 0;
    TN_TRY(require_path("tn_gemm_table_load", device, path));
    TN_TRY(read_file(path, &text, &bytes));
    tn_status status = tn__op_table_of(device)->gemm_table_take(device, text, bytes);
    tn__host_free(text);
    return status;
}

/* ---- devices with one way ------------------------------------------------------------------- */

tn_status tn__gemm_tune_nothing(tn_device *device, const tn__gemm_work *work, tn_stream stream) {
    (void)device, (void)work, (void)stream;
    return TN_OK;
}

tn_status tn__gemm_only_choice(const tn__gemm_work *work, const char *description,
                               size_t scratch_bytes, tn_gemm_choice *out) {
    TN_REQUIRE(work->algorithm <= 1,
               "algorithm is %d, expected at most 1: there is one on this "
               "device",
               work->algorithm);
    *out = (tn_gemm_choice){.size = sizeof *out,
                            .algorithm = 1,
                            .algorithms = 1,
                            .workspace_bytes = scratch_bytes,
                            .scratch_bytes = scratch_bytes};
    snprintf(out->description, sizeof out->description, "%s", description);
    return TN_OK;
}

static tn_status no_table(void) {
    return TN_FAIL(TN_UNSUPPORTED,
                   "there is one way for each GEMM on this device, so that there is "
                   "no table of them: such files are of CUDA devices");
}

tn_status tn__gemm_no_table_text(tn_device *device, char **text, size_t *bytes) {
    (void)device, (void)text, (void)bytes;
    return no_table();
}

tn_status tn__gemm_no_table_take(tn_device *device, const char *text, size_t bytes) {
    (void)device, (void)text, (void)bytes;
    return no_table();
}
