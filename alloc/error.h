/* How failures are recorded: one place that keeps this thread's last error in words.
 *
 * A function that fails returns the value of one of these macros, so that the status and its
 * text can not part. The text says what failed, why, and what to do about it.
 */
#ifndef TENURE_ERROR_H
#define TENURE_ERROR_H

#include "tenure_alloc.h"

#if defined(__GNUC__)
#define TN_PRINTF(format_at, args_at) __attribute__((format(printf, format_at, args_at)))
#define TN__SLOW                      __attribute__((noinline))
#else
#define TN_PRINTF(format_at, args_at)
#define TN__SLOW
#endif

/* Symbols that libtenure's sister libraries use; listed apart in alloc/tenure.map. */
#define TN_SISTER_API TN_API

/* Records the failure and returns `status`. Never allocates. */
TN_SISTER_API tn_status tn__fail(tn_status status, int native, const char *file, int line,
                                 const char *format, ...) TN_PRINTF(5, 6);

/* Keeps this thread's last error over a cleanup that may fail too. */
enum { TN__ERROR_TEXT_BYTES = 2048 };
typedef struct tn__saved_error {
    int native;
    char text[TN__ERROR_TEXT_BYTES];
} tn__saved_error;
TN_SISTER_API void tn__error_save(tn__saved_error *out);
TN_SISTER_API void tn__error_restore(const tn__saved_error *saved);

/* Around a call that may fail inside, recover, and succeed: if `status` is TN_OK, the end puts this
 * thread's last error back as it was at the begin. Scopes nest. Cheap unless something fails. */
TN_SISTER_API void tn__error_scope_begin(void);
TN_SISTER_API tn_status tn__error_scope_end(tn_status status);

/* The analyzer can not see that tn__fail returns its status, which is never TN_OK. */
#ifdef __clang_analyzer__
#define TN__FAILED(status, ...) (tn__fail((status), __VA_ARGS__), (status))
#else
#define TN__FAILED(status, ...) tn__fail((status), __VA_ARGS__)
#endif
#define TN_FAIL(status, ...) TN__FAILED(status, 0, __FILE__, __LINE__, __VA_ARGS__)
#define TN_FAIL_NATIVE(status, native, ...)                                                        \
    TN__FAILED(status, (native), __FILE__, __LINE__, __VA_ARGS__)

/* Returns from the calling function with the status of `call` if that is not TN_OK. */
#define TN_TRY(call)                                                                               \
    do {                                                                                           \
        tn_status tn_try_status_ = (call);                                                         \
        if (tn_try_status_ != TN_OK) return tn_try_status_;                                        \
    } while (0)

/* TN_REQUIRE: always on, at the public border: returns TN_INVALID_ARGUMENT with the words. */
#define TN_REQUIRE(condition, ...)                                                                 \
    do {                                                                                           \
        if (!(condition)) return TN_FAIL(TN_INVALID_ARGUMENT, __VA_ARGS__);                        \
    } while (0)

/* TN_CHECK: always on and cheap; a broken invariant ends the process with file, line and text.
 * TN_ASSERT: debug builds. TN_ASSERT_SLOW: builds with TENURE_SLOW_ASSERTS (walks everything). */
TN_SISTER_API void tn__check_failed(const char *file, int line, const char *text)
    __attribute__((noreturn));
#define TN_CHECK(condition)                                                                        \
    ((condition) ? (void)0 : tn__check_failed(__FILE__, __LINE__, #condition))
#ifndef NDEBUG
#define TN_ASSERT(condition) TN_CHECK(condition)
#else
#define TN_ASSERT(condition) ((void)sizeof(!(condition)))
#endif
#ifdef TENURE_SLOW_ASSERTS
#define TN_ASSERT_SLOW(condition) TN_CHECK(condition)
#else
#define TN_ASSERT_SLOW(condition) ((void)sizeof(!(condition)))
#endif

#endif
