/* A checkpoint of one process: what is loaded is what was saved, and nothing else ever is: not
 * after a kill at any step of saving, a step that fails, a full disk, or damage to any region of a
 * file.
 */
#include "checkpoint_support.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "file_steps.h"
#include "host_alloc.h"
#include "tensor_internal.h"

static checkpoint_model model;

static int set_up(void **state) {
    (void)state;
    checkpoint_model_open(&model, NULL);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    checkpoint_model_close(&model);
    assert_int_equal(tn__host_live_blocks(), 0);
    return 0;
}

/* ---- saved and loaded ------------------------------------------------------------------------ */

static void what_is_loaded_is_what_was_saved(void **state) {
    (void)state;
    char first[600], second[600];
    EXPECT_OK(checkpoint_model_save(&model, 1));
    checkpoint_model_file(&model, first, sizeof first);
    assert_int_equal(checkpoint_model_load(&model), 1);
    EXPECT_OK(checkpoint_model_save(&model, 2));
    checkpoint_model_file(&model, second, sizeof second);
    assert_string_not_equal(first, second);
    assert_int_equal(access(first, F_OK), -1);
    assert_int_equal(checkpoint_model_load(&model), 2);
}

static void planes_that_are_absent_are_made(void **state) {
    (void)state;
    EXPECT_OK(checkpoint_model_save(&model, 3));
    for (int i = 0; i < MODEL_TENSORS; i++) {
        EXPECT_OK(tn_tensor_set_regatherable(model.tensors[i], 1));
        EXPECT_OK(tn_plane_drop(model.tensors[i], i == 1 ? TN_PLANE_ROW : TN_PLANE_DATA,
                                model.on.stream));
    }
    EXPECT_OK(tn_checkpoint_load(&model.config, model.on.stream));
    /* What lies between the pieces of the blob is of no entry. */
    assert_int_equal(checkpoint_model_load(&model), 3);
}

static void a_part_of_the_elements_can_be_loaded(void **state) {
    (void)state;
    float before[300 * 70], after[300 * 70];
    EXPECT_OK(checkpoint_model_save(&model, 4));
    EXPECT_OK(tn_plane_read(model.tensors[0], TN_PLANE_DATA, before, sizeof before, NULL, 0,
                            model.on.stream));
    EXPECT_OK(tn_stream_synchronize(model.on.device, model.on.stream));
    checkpoint_model_fill(&model, 5);
    tn_checkpoint_piece piece = {.first = 12345, .count = 4321, .offset = 8};
    tn_checkpoint_entry entry = model.entries[0];
    entry.pieces = &piece;
    tn_checkpoint_config config = model.config;
    config.entries = &entry, config.entry_count = 1;
    EXPECT_OK(tn_checkpoint_load(&config, model.on.stream));
    EXPECT_OK(tn_plane_read(model.tensors[0], TN_PLANE_DATA, after, sizeof after, NULL, 0,
                            model.on.stream));
    EXPECT_OK(tn_stream_synchronize(model.on.device, model.on.stream));
    assert_memory_equal(after + 2, before + 12345, 4321 * sizeof *after);
}

/* ---- steps that fail and kills --------------------------------------------------------------- */

typedef struct plot {
    long nth; /* step from now that it happens at */
    int code; /* errno; 0: the process is killed there */
} plot;

static int happen(void *context, const char *step, const char *path) {
    plot *now = context;
    (void)step, (void)path;
    if (--now->nth != 0) return 0;
    if (!now->code) raise(SIGKILL);
    return now->code;
}

static void each_step_of_saving_may_fail(void **state) {
    (void)state;
    long failures = 0, successes = 0;
    EXPECT_OK(checkpoint_model_save(&model, 6));
    for (long nth = 1;; nth++) {
        plot now = {nth, nth % 2 ? EIO : ENOSPC};
        unsigned seed = (unsigned)nth + 10;
        tn__file_steps_watch(happen, &now);
        tn_status status = checkpoint_model_save(&model, seed);
        tn__file_steps_watch(NULL, NULL);
        unsigned loaded = checkpoint_model_load(&model);
        if (status == TN_OK) {
            assert_int_equal(loaded, seed);
            successes++;
        } else {
            EXPECT_STATUS(status, TN_IO);
            failures++;
        }
        if (now.nth > 0) break; /* it had fewer steps */
    }
    assert_true(failures >= 12); /* making directories, the file, the index, putting it in place */
    assert_true(successes >= 3); /* what was before can not be removed; and nothing happens */
    EXPECT_OK(checkpoint_model_save(&model, 7));
    char file[600];
    checkpoint_model_file(&model, file, sizeof file); /* nothing of the failed ones is left */
}

/* From the moment the index is put in place, directories can not be brought to the disk. */
static int fail_behind_rename(void *context, const char *step, const char *path) {
    int *is_renamed = context;
    (void)path;
    if (strcmp(step, "rename") == 0) *is_renamed = 1;
    return *is_renamed && strcmp(step, "sync directory") == 0 ? EIO : 0;
}

static size_t read_whole(const char *path, char *bytes, size_t room) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t count = fread(bytes, 1, room, file);
    assert_int_equal(fclose(file), 0);
    assert_true(count < room);
    return count;
}

/* A machine that loses its power there may find the index as it was before. */
static void an_index_that_is_not_on_the_disk_costs_no_files(void **state) {
    (void)state;
    static char before[65536];
    char index[600];
    int is_renamed = 0;
    EXPECT_OK(checkpoint_model_save(&model, 50));
    snprintf(index, sizeof index, "%s/index.json", model.path);
    size_t bytes = read_whole(index, before, sizeof before);
    tn__file_steps_watch(fail_behind_rename, &is_renamed);
    tn_status status = checkpoint_model_save(&model, 51);
    tn__file_steps_watch(NULL, NULL);
    EXPECT_STATUS(status, TN_IO);
    assert_int_equal(checkpoint_model_load(&model), 51);
    FILE *file = fopen(index, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(before, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(checkpoint_model_load(&model), 50);
    EXPECT_OK(checkpoint_model_save(&model, 52));
    checkpoint_model_file(&model, index, sizeof index); /* and one directory is left */
}

static int fail_to_sync_above(void *context, const char *step, const char *path) {
    return strcmp(step, "sync directory") == 0 && strcmp(path, context) == 0 ? EIO : 0;
}

static void a_new_directory_is_on_the_disk(void **state) {
    (void)state;
    char above[600], path[640];
    snprintf(above, sizeof above, "%s/", model.path);
    snprintf(path, sizeof path, "%s/below", model.path);
    EXPECT_OK(checkpoint_model_save(&model, 53));
    tn_checkpoint_config config = model.config;
    config.path = path;
    tn__file_steps_watch(fail_to_sync_above, above);
    tn_status status = tn_checkpoint_save(&config, model.on.stream);
    tn__file_steps_watch(NULL, NULL);
    EXPECT_STATUS(status, TN_IO);
    assert_int_not_equal(access(path, F_OK), 0);
}

static void a_directory_of_others_stays(void **state) {
    (void)state;
    char directory[600], file[640];
    snprintf(directory, sizeof directory, "%s/00009000", model.path);
    snprintf(file, sizeof file, "%s/notes.txt", directory);
    EXPECT_OK(checkpoint_model_save(&model, 57));
    assert_int_equal(mkdir(directory, 0777), 0);
    int made = open(file, O_WRONLY | O_CREAT, 0666);
    assert_true(made >= 0);
    close(made);
    EXPECT_OK(checkpoint_model_save(&model, 54));
    EXPECT_OK(checkpoint_model_save(&model, 55));
    assert_int_equal(unlink(file), 0);
    EXPECT_OK(checkpoint_model_save(&model, 56));
    assert_int_not_equal(access(directory, F_OK), 0); /* an empty one is ours */
}

static void each_step_of_loading_may_fail(void **state) {
    (void)state;
    long failures = 0;
    EXPECT_OK(checkpoint_model_save(&model, 8));
    for (long nth = 1;; nth++) {
        plot now = {nth, EIO};
        checkpoint_model_fill(&model, 9);
        tn__file_steps_watch(happen, &now);
        tn_status status = tn_checkpoint_load(&model.config, model.on.stream);
        tn__file_steps_watch(NULL, NULL);
        if (now.nth > 0) {
            EXPECT_OK(status);
            break;
        }
        if (status != TN_OK) failures++;
    }
    assert_true(failures >= 8);
    assert_int_equal(checkpoint_model_load(&model), 8);
}

extern char **environ;

/* This program once more, to be killed: 1 if it was; 0: it came to its end. */
static int save_in_a_killed_process(long nth, unsigned seed) {
    char number[32], step[32];
    pid_t child;
    int status;
    snprintf(number, sizeof number, "%u", seed);
    snprintf(step, sizeof step, "%ld", nth);
    char *const arguments[] = {(char *)"test_checkpoint", model.path, number, step, NULL};
    assert_int_equal(posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments, environ), 0);
    assert_true(waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status)) {
        assert_int_equal(WTERMSIG(status), SIGKILL);
        return 1;
    }
    assert_int_equal(WEXITSTATUS(status), 0);
    return 0;
}

static void a_kill_at_any_step_leaves_a_whole_checkpoint(void **state) {
    (void)state;
    long kept = 0, replaced = 0;
    int was_killed = 1;
    for (long nth = 1; was_killed; nth++) {
        unsigned before = 100 + (unsigned)nth, after = 500 + (unsigned)nth;
        EXPECT_OK(checkpoint_model_save(&model, before));
        was_killed = save_in_a_killed_process(nth, after);
        unsigned loaded = checkpoint_model_load(&model);
        assert_true(loaded == before || loaded == after);
        kept += loaded == before;
        replaced += loaded == after;
    }
    assert_true(kept >= 12);
    assert_true(replaced >= 4); /* after it was put in place, while the one before is removed */
}

static int save_and_be_killed(char **arguments) {
    plot now = {atol(arguments[3]), 0};
    checkpoint_model_open(&model, arguments[1]);
    tn__file_steps_watch(happen, &now);
    return checkpoint_model_save(&model, (unsigned)atol(arguments[2])) == TN_OK ? 0 : 1;
}

static void a_disk_that_is_full_is_a_status(void **state) {
    (void)state;
    struct rlimit before, limited;
    EXPECT_OK(checkpoint_model_save(&model, 20));
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    for (rlim_t bytes = 0; bytes < 100000; bytes += 9973) {
        limited = before;
        limited.rlim_cur = bytes;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limited), 0);
        tn_status status = checkpoint_model_save(&model, 21);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        EXPECT_STATUS(status, TN_IO);
        EXPECT_ERROR_HAS("rank-00000.safetensors");
        EXPECT_ERROR_HAS(strerror(EFBIG));
        assert_int_equal(checkpoint_model_load(&model), 20);
    }
}

static void host_memory_may_run_out_at_any_time(void **state) {
    (void)state;
    long failures = 0;
    tn_status status = TN_OUT_OF_HOST_MEMORY;
    EXPECT_OK(checkpoint_model_save(&model, 30));
    long blocks = tn__host_live_blocks();
    for (long nth = 1; status != TN_OK; nth++, failures++) {
        tn__host_alloc_fault(nth, 0);
        model.config.step = 31;
        status = tn_checkpoint_save(&model.config, model.on.stream);
        tn__host_alloc_fault(0, 0);
        if (status != TN_OK) EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
        assert_int_equal(tn__host_live_blocks(), blocks);
    }
    assert_true(failures > 15);
    status = TN_OUT_OF_HOST_MEMORY;
    for (long nth = 1; status != TN_OK; nth++, failures++) {
        tn__host_alloc_fault(nth, 0);
        status = tn_checkpoint_load(&model.config, model.on.stream);
        tn__host_alloc_fault(0, 0);
        if (status != TN_OK) EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
    }
    assert_true(failures > 30);
    assert_true(checkpoint_model_has(&model, 30));
}

/* ---- damage ---------------------------------------------------------------------------------- */

static size_t size_of(const char *path) {
    struct stat facts;
    assert_int_equal(stat(path, &facts), 0);
    return (size_t)facts.st_size;
}

static void flip(const char *path, size_t at) {
    unsigned char byte;
    int file = open(path, O_RDWR);
    assert_true(file >= 0);
    assert_int_equal(pread(file, &byte, 1, (off_t)at), 1);
    byte ^= 0x20;
    assert_int_equal(pwrite(file, &byte, 1, (off_t)at), 1);
    close(file);
}

/* Refused with the file's name, and nothing of the destination has changed. */
static void expect_refused(const char *path, const char *words) {
    EXPECT_STATUS(tn_checkpoint_load(&model.config, model.on.stream), TN_CORRUPT_INPUT);
    EXPECT_ERROR_HAS(path);
    EXPECT_ERROR_HAS(words);
    assert_true(checkpoint_model_has(&model, 41));
}

static void a_damaged_byte_anywhere_is_refused(void **state) {
    (void)state;
    char file[600], index[600];
    EXPECT_OK(checkpoint_model_save(&model, 40));
    checkpoint_model_file(&model, file, sizeof file);
    snprintf(index, sizeof index, "%s/index.json", model.path);
    checkpoint_model_fill(&model, 41);
    size_t bytes = size_of(file), flips = 0;
    for (size_t at = 0; at < bytes; at += at < 2000 ? 13 : 997, flips++) {
        flip(file, at);
        expect_refused(file, "crc32");
        flip(file, at);
    }
    flip(file, bytes - 1);
    expect_refused(file, "crc32");
    flip(file, bytes - 1);
    assert_true(flips > 200);
    for (size_t at = 0; at < size_of(index); at += 7) {
        flip(index, at);
        expect_refused(index, "crc32");
        flip(index, at);
    }
    assert_int_equal(checkpoint_model_load(&model), 40);
}

static void files_of_another_size_or_none_are_refused(void **state) {
    (void)state;
    char file[600], index[600], away[700];
    EXPECT_OK(checkpoint_model_save(&model, 42));
    checkpoint_model_file(&model, file, sizeof file);
    snprintf(index, sizeof index, "%s/index.json", model.path);
    snprintf(away, sizeof away, "%s.away", file);
    checkpoint_model_fill(&model, 41);
    size_t bytes = size_of(file);
    assert_int_equal(truncate(file, (off_t)bytes + 1), 0);
    expect_refused(file, "bytes, and the index says");
    assert_int_equal(truncate(file, (off_t)bytes), 0);
    EXPECT_OK(tn_checkpoint_load(&model.config, model.on.stream));
    checkpoint_model_fill(&model, 41);
    assert_int_equal(rename(file, away), 0);
    expect_refused(file, "is missing");
    assert_int_equal(rename(away, file), 0);
    assert_int_equal(truncate(file, (off_t)bytes - 1), 0);
    expect_refused(file, "bytes, and the index says");
    assert_int_equal(truncate(file, 3), 0);
    expect_refused(file, "3 bytes, and the index says");
    assert_int_equal(truncate(index, (off_t)size_of(index) - 1), 0);
    expect_refused(index, "crc32");
    assert_int_equal(truncate(index, 0), 0);
    expect_refused(index, "0 bytes are no index");
}

/* Nobody ever writes to the other end: to open it as any file would wait for that. */
static void what_is_no_file_is_refused(void **state) {
    (void)state;
    char file[600], index[600], away[700];
    EXPECT_OK(checkpoint_model_save(&model, 45));
    checkpoint_model_file(&model, file, sizeof file);
    snprintf(index, sizeof index, "%s/index.json", model.path);
    checkpoint_model_fill(&model, 41);
    for (int i = 0; i < 2; i++) {
        const char *path = i ? index : file;
        tn_checkpoint_info info = TN_CHECKPOINT_INFO_INIT;
        snprintf(away, sizeof away, "%s.away", path);
        assert_int_equal(rename(path, away), 0);
        assert_int_equal(mkfifo(path, 0600), 0);
        expect_refused(path, "is not a file");
        EXPECT_STATUS(tn_checkpoint_info_get(model.path, &info), i ? TN_CORRUPT_INPUT : TN_OK);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(mkdir(path, 0700), 0);
        expect_refused(path, "is not a file");
        assert_int_equal(rmdir(path), 0);
        assert_int_equal(rename(away, path), 0);
    }
    assert_int_equal(checkpoint_model_load(&model), 45);
}

static void a_file_of_another_checkpoint_is_refused(void **state) {
    (void)state;
    char file[600], foreign[700], kept[700];
    EXPECT_OK(checkpoint_model_save(&model, 43));
    checkpoint_model_file(&model, file, sizeof file);
    snprintf(kept, sizeof kept, "%s/kept", model.path);
    assert_int_equal(link(file, kept), 0); /* survives its directory */
    EXPECT_OK(checkpoint_model_save(&model, 44));
    checkpoint_model_file(&model, foreign, sizeof foreign);
    checkpoint_model_fill(&model, 41);
    assert_int_equal(size_of(kept), size_of(foreign));
    assert_int_equal(rename(kept, foreign), 0);
    expect_refused(foreign, "crc32 of its header");
}

/* ---- arguments ------------------------------------------------------------------------------- */

static void expect_save_refused(const tn_checkpoint_entry *entries, size_t count, tn_status status,
                                const char *words) {
    tn_checkpoint_config config = model.config;
    config.entries = entries, config.entry_count = count;
    EXPECT_STATUS(tn_checkpoint_save(&config, model.on.stream), status);
    EXPECT_ERROR_HAS(words);
}

static void what_can_not_be_saved_is_named(void **state) {
    (void)state;
    EXPECT_OK(checkpoint_model_save(&model, 50));
    tn_checkpoint_piece piece = model.pieces[0][0];
    tn_checkpoint_entry entry = model.entries[0];
    entry.pieces = &piece;
    piece.count--;
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT,
                        "element 20999 of model.master is saved by");
    piece.first = 1;
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "element 0 of model.master is saved by no");
    piece.first = 2;
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "piece 0 is elements 2 + 20999 of 21000");
    piece = model.pieces[0][0];
    piece.offset = 4;
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "piece 0 is bytes 4 + 84000 of 84000");
    tn_checkpoint_piece twice[2] = {{0, 21000, 0}, {7, 1, 0}};
    entry.pieces = twice, entry.piece_count = 2;
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "element 7 of model.master is saved twice");
    tn_checkpoint_entry two[2] = {model.entries[0], model.entries[0]};
    expect_save_refused(two, 2, TN_INVALID_ARGUMENT, "entry model.master is there twice");
    entry = model.entries[0];
    entry.name = "\xFF";
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "its name is no UTF-8");
    entry.name = "__metadata__";
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "the format's own name");
    entry.name = "";
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "has no name");
    entry = model.entries[0];
    entry.dtype = TN_E2M1;
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "saved as bytes");
    entry = model.entries[0];
    entry.shape[1] = -1;
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "shape[1] is -1");
    entry.shape[0] = entry.shape[1] = INT64_MAX;
    expect_save_refused(&entry, 1, TN_INVALID_ARGUMENT, "shape is too large");
    assert_int_equal(checkpoint_model_load(&model), 50);
}

static void what_is_not_there_is_not_loaded(void **state) {
    (void)state;
    tn_checkpoint_config config = model.config;
    tn_checkpoint_info info = TN_CHECKPOINT_INFO_INIT;
    checkpoint_model_fill(&model, 41);
    EXPECT_STATUS(tn_checkpoint_load(&config, model.on.stream), TN_IO);
    EXPECT_ERROR_HAS("there is no checkpoint");
    EXPECT_STATUS(tn_checkpoint_info_get(model.path, &info), TN_IO);
    EXPECT_OK(checkpoint_model_save(&model, 51));
    checkpoint_model_fill(&model, 41);
    tn_checkpoint_entry entry = model.entries[0];
    config.entries = &entry, config.entry_count = 1;
    entry.name = "model.mistress";
    EXPECT_STATUS(tn_checkpoint_load(&config, model.on.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("has no entry model.mistress");
    entry = model.entries[0];
    entry.shape[0] = 70, entry.shape[1] = 300;
    EXPECT_STATUS(tn_checkpoint_load(&config, model.on.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("model.master as [300,70], and [70,300] is asked for");
    entry = model.entries[0];
    entry.dtype = TN_E4M3;
    EXPECT_STATUS(tn_checkpoint_load(&config, model.on.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("model.master as F32, and F8_E4M3 is asked for");
    config = model.config;
    config.plan_hash++;
    EXPECT_STATUS(tn_checkpoint_load(&config, model.on.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("was saved with plan hash 123456789abcdef0, not 123456789abcdef1");
    config.plan_hash = 0, config.path = NULL;
    EXPECT_STATUS(tn_checkpoint_load(&config, model.on.stream), TN_INVALID_ARGUMENT);
    assert_true(checkpoint_model_has(&model, 41));
}

/* Between the index and the files that it names. */
static int save_another(void *context, const char *step, const char *path) {
    (void)context;
    if (strcmp(step, "open") != 0 || !strstr(path, ".safetensors")) return 0;
    tn__file_steps_watch(NULL, NULL);
    EXPECT_OK(checkpoint_model_save(&model, 47));
    checkpoint_model_fill(&model, 41);
    return 0;
}

static void what_is_replaced_meanwhile_is_loaded_again(void **state) {
    (void)state;
    EXPECT_OK(checkpoint_model_save(&model, 46));
    tn__file_steps_watch(save_another, NULL);
    EXPECT_STATUS(tn_checkpoint_load(&model.config, model.on.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("another one was put in its place while it was read: load it again");
    assert_true(checkpoint_model_has(&model, 41));
    assert_int_equal(checkpoint_model_load(&model), 47);
}

static uint64_t contents_of(tn_tensor tensor) {
    uint64_t contents = 0;
    EXPECT_OK(tn__tensor_contents(tensor, &contents));
    return contents;
}

/* Nor does one that was leased before it count as written. */
static void a_plane_that_is_leased_is_in_use(void **state) {
    uint64_t before[MODEL_TENSORS];
    (void)state;
    EXPECT_OK(checkpoint_model_save(&model, 52));
    checkpoint_model_fill(&model, 41);
    for (int i = 0; i < MODEL_TENSORS; i++)
        before[i] = contents_of(model.tensors[i]);
    tn_lease lease = fixture_lease(model.tensors[2], TN_PLANE_DATA, TN_READ, model.on.stream);
    EXPECT_STATUS(tn_checkpoint_load(&model.config, model.on.stream), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    assert_true(checkpoint_model_has(&model, 41));
    for (int i = 0; i < MODEL_TENSORS; i++)
        assert_int_equal(contents_of(model.tensors[i]), before[i]);
    assert_int_equal(checkpoint_model_load(&model), 52);
}

#define CHECKPOINT_TEST(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        CHECKPOINT_TEST(what_is_loaded_is_what_was_saved),
        CHECKPOINT_TEST(planes_that_are_absent_are_made),
        CHECKPOINT_TEST(a_part_of_the_elements_can_be_loaded),
        CHECKPOINT_TEST(each_step_of_saving_may_fail),
        CHECKPOINT_TEST(an_index_that_is_not_on_the_disk_costs_no_files),
        CHECKPOINT_TEST(a_new_directory_is_on_the_disk),
        CHECKPOINT_TEST(a_directory_of_others_stays),
        CHECKPOINT_TEST(each_step_of_loading_may_fail),
        CHECKPOINT_TEST(a_kill_at_any_step_leaves_a_whole_checkpoint),
        CHECKPOINT_TEST(a_disk_that_is_full_is_a_status),
        CHECKPOINT_TEST(host_memory_may_run_out_at_any_time),
        CHECKPOINT_TEST(a_damaged_byte_anywhere_is_refused),
        CHECKPOINT_TEST(files_of_another_size_or_none_are_refused),
        CHECKPOINT_TEST(what_is_no_file_is_refused),
        CHECKPOINT_TEST(a_file_of_another_checkpoint_is_refused),
        CHECKPOINT_TEST(what_can_not_be_saved_is_named),
        CHECKPOINT_TEST(what_is_not_there_is_not_loaded),
        CHECKPOINT_TEST(what_is_replaced_meanwhile_is_loaded_again),
        CHECKPOINT_TEST(a_plane_that_is_leased_is_in_use),
    };
    if (argc == 4) return save_and_be_killed(argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
