/* A directory that can not be read to its end is not taken for a shorter one. readdir is this
 * test's. */
#include "test_support.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>

#include "file_steps.h"

static int entries_left; /* until it fails; -1: it does not */

__attribute__((visibility("default"))) struct dirent *readdir(DIR *directory) {
    static struct dirent *(*real)(DIR *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "readdir");
    if (entries_left > 0) entries_left--;
    if (entries_left != 0) return real(directory);
    errno = EIO;
    return NULL;
}

static tn_status count(void *context, const char *name) {
    (void)name;
    (*(int *)context)++;
    return TN_OK;
}

static void a_directory_that_can_not_be_read_is_said(void **state) {
    (void)state;
    int all = 0, some = 0;
    entries_left = -1;
    EXPECT_OK(tn__directory_list("/", count, &all));
    assert_true(all > 3);
    entries_left = 4;
    EXPECT_STATUS(tn__directory_list("/", count, &some), TN_IO);
    EXPECT_ERROR_HAS("/: the directory can not be read: ");
    assert_true(some <= 3);
    entries_left = -1;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_directory_that_can_not_be_read_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
