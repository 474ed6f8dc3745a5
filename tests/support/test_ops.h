/* What tests of ops stand on: a device with a stream, a pool and a scope, and tensors in it. */
#ifndef TENURE_TEST_OPS_H
#define TENURE_TEST_OPS_H

#include "test_support.h"

#include "tenure_ops.h"

typedef struct test_ops {
    tn_device *device;
    tn_stream stream;
    tn_pool *pool;
    tn_scope scope;
} test_ops;

/* On a device that the caller opened, and keeps. */
test_ops test_ops_open(tn_device *device);

/* Waits, closes the scope, fails unless the books balance and nothing is live, ends the pool and
 * the stream. */
void test_ops_close(test_ops *ops);

/* The same on a host device of its own. */
test_ops test_ops_open_host(void);
void test_ops_close_host(test_ops *ops);

void test_ops_wait(const test_ops *ops);

tn_scope test_ops_scope(const test_ops *ops, tn_scope_kind kind, const char *name);

tn_tensor test_plain(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols);
tn_tensor test_fp8(tn_scope scope, tn_format format, tn_dtype dtype, int64_t rows, int64_t cols);

/* An FP8_BLOCK_2D E4M3 weight. */
tn_tensor test_weight(tn_scope scope, int64_t rows, int64_t cols, int frozen,
                      tn_plane_policy policy);

/* DATA of a PLAIN tensor from and to memory of exactly its size, waiting for it. */
void test_write(const test_ops *ops, tn_tensor tensor, const void *data);
void test_read(const test_ops *ops, tn_tensor tensor, void *data);

/* Makes a plane VALID without work on the stream, as a loader would that writes by itself. */
void test_declare_valid(const test_ops *ops, tn_tensor tensor, tn_plane plane);

tn_plane_state test_state(tn_tensor tensor, tn_plane plane);
tn_ledger test_ledger(tn_scope scope);

/* The engine of GEMMs that the environment pins from now on; NULL: none. */
void test_pin_engine(const char *engine);

/* Fails unless the two say the same, peaks aside. */
void test_expect_same_ledger(const tn_ledger *before, const tn_ledger *after);

#endif
