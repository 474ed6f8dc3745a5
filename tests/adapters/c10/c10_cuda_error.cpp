/* libc10_cuda.so of the tests: see c10_classes.h. It throws the class, so it has its typeinfo. */
#include "c10_classes.h"

extern "C" __attribute__((visibility("default"))) void c10_throw() {
    throw c10::OutOfMemoryError({"c10_throw", "c10", 1}, "thrown by the library itself");
}
