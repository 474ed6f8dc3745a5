/* libc10.so of the tests: see c10_classes.h. */
#include "c10_classes.h"

static int count;

c10::Error::Error(SourceLocation where, std::string message)
    : message_(std::move(message) + " (" + where.file + ")"), count_(&count) {
    count++;
}

extern "C" __attribute__((visibility("default"))) int c10_errors_alive() { return count; }
