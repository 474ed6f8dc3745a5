/* Classes with the names that torch's exceptions have, for a libc10.so and a libc10_cuda.so of the
 * tests' own: what torch_shim.cpp looks up in a process with torch. */
#ifndef TENURE_TEST_C10_CLASSES_H
#define TENURE_TEST_C10_CLASSES_H

#include <cstdint>
#include <exception>
#include <string>

namespace c10 {

struct SourceLocation {
    const char *function;
    const char *file;
    uint32_t line;
};

class __attribute__((visibility("default"))) Error : public std::exception {
  public:
    Error(SourceLocation where, std::string message); /* in libc10.so only */
    const char *what() const noexcept override { return message_.c_str(); }
    ~Error() override { --*count_; }

  private:
    std::string message_;
    int *count_;                           /* of the objects that are alive */
    [[maybe_unused]] char more_[200] = {}; /* torch's has other members */
};

class __attribute__((visibility("default"))) OutOfMemoryError : public Error {
    using Error::Error;
};

} // namespace c10

#endif
