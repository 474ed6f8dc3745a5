/* A device, a pool, two streams and a root scope for tests of tensors; and a way to derive. */
#ifndef TENURE_TENSOR_FIXTURE_H
#define TENURE_TENSOR_FIXTURE_H

#include "tenure_lifetime.h"
#include "test_support.h"

typedef struct tensor_fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream stream;
    tn_stream other;
    tn_scope scope; /* a root of kind MODEL, called "model" */
} tensor_fixture;

/* Also sets the derive function of 2D tensors to fixture_derive. */
void tensor_fixture_open(tensor_fixture *fixture);     /* host driver */
void tensor_fixture_open_sim(tensor_fixture *fixture); /* simulated CUDA */

/* Closes the scope unless a test has, and everything else; fails if the ledger does not balance,
 * or if the pool still owns a byte after the scope is closed. */
void tensor_fixture_close(tensor_fixture *fixture);

/* For cmocka, with one fixture for a program: opened on either driver, and closed. */
int tensor_fixture_set_up(void **state);
int tensor_fixture_set_up_sim(void **state);
int tensor_fixture_tear_down(void **state);

/* Transposes data and scales in stream order (a host task; a declared kernel where simulated). */
tn_status fixture_derive(tn_device *device, const tn_plane_view *from, const tn_plane_view *to,
                         tn_stream stream);

/* Calls of fixture_derive so far. The nth call from now fails without work; 0: none does. */
int fixture_derive_calls(void);
void fixture_derive_fault(int nth);

/* A tensor called `name` with the defaults but for what is given; in the fixture's scope. */
tn_tensor fixture_tensor(const tensor_fixture *fixture, tn_format format, int64_t rows,
                         int64_t cols, const char *name);

/* Makes the plane valid with a WRITE lease under which nothing is put on the stream. */
void fixture_write(tn_tensor tensor, tn_plane plane, tn_stream stream);

/* Writes ROW so and derives COL, both on the fixture's stream. */
void fixture_write_both(const tensor_fixture *fixture, tn_tensor tensor);

/* A lease whose addresses nobody wants. */
tn_lease fixture_lease(tn_tensor tensor, tn_plane plane, tn_access access, tn_stream stream);

/* On the simulated driver: a kernel that touches all of the plane. */
void fixture_touch(const tensor_fixture *fixture, const tn_plane_view *view, int is_write,
                   tn_stream stream);

tn_plane_state fixture_state(tn_tensor tensor, tn_plane plane);
void fixture_expect_states(tn_tensor tensor, tn_plane_state row, tn_plane_state col);
size_t fixture_owned_bytes(const tensor_fixture *fixture);
tn_ledger fixture_ledger(tn_scope scope);

/* Device-side waits put in so far. */
uint64_t fixture_waits(const tensor_fixture *fixture);

#endif
