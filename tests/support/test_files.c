/* Files of tests: see test_support.h. */
#include <errno.h>
#include <ftw.h>
#include <stdio.h>

#include "test_support.h"

static int remove_one(const char *path, const struct stat *of, int kind, struct FTW *at) {
    (void)of, (void)kind, (void)at;
    return remove(path);
}

void test_remove_tree(const char *path) {
    enum { OPEN_AT_ONCE = 16 };
    const int failed = nftw(path, remove_one, OPEN_AT_ONCE, FTW_DEPTH | FTW_PHYS);
    if (failed) assert_int_equal(errno, ENOENT);
}
