/* The N-th host allocation fails within a gather or a parallel layer: nothing is left behind, what
 * was saved is there as it was, each gradient is what it was or has been added to as a whole, and
 * the same call then works. On one rank of two it is called again, or the communicator has failed
 * on both at once: nobody waits for a deadline.
 */
#include "parallel_support.h"

#include <string.h>

#include "host_alloc.h"

enum { ROWS = 130, K = 136, F = 72, N = 40 };

static rank_fixture all;

typedef struct fixture {
    tn_parallel parallel;
    tn_scope io, saved_scope, op;
    tn_norm_mlp_forward_args forward;
    tn_norm_mlp_backward_args backward;
    tn_norm_mlp_saved saved;
    tn_delayed_gradient delayed[2];
    tn_tensor dweight[2], dgamma, quantized, gathered;
} fixture;

static tn_tensor numbers(const fixture *f, tn_dtype dtype, int64_t rows, int64_t cols) {
    parallel_matrix matrix = parallel_numbers(rows, cols, 3);
    tn_tensor tensor = parallel_tensor(&all, f->io, dtype, &matrix);
    parallel_free(&matrix);
    return tensor;
}

static tn_tensor weight(const fixture *f, int64_t rows, int64_t cols) {
    parallel_matrix matrix = parallel_numbers(rows, cols, 4);
    tn_tensor tensor = parallel_weight(&all, f->io, TN_FORMAT_FP8_BLOCK_2D, &matrix);
    parallel_free(&matrix);
    return tensor;
}

static void make_gather(fixture *f) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = f->forward.norm.x;
    args.dst = f->quantized = test_fp8(f->io, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, K);
    args.planes = TN_QUANTIZE_COL;
    EXPECT_OK(tn_quantize(&args, all.stream));
    f->gathered = test_fp8(f->io, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, K);
}

static fixture open_fixture(int delay) {
    fixture f = {.parallel = TN_PARALLEL_INIT,
                 .forward = TN_NORM_MLP_FORWARD_ARGS_INIT,
                 .backward = TN_NORM_MLP_BACKWARD_ARGS_INIT,
                 .saved = TN_NORM_MLP_SAVED_INIT};
    f.io = parallel_scope(&all, TN_SCOPE_STEP, "io");
    f.saved_scope = parallel_scope(&all, TN_SCOPE_SAVED, "saved");
    f.op = parallel_scope(&all, TN_SCOPE_OP, "op");
    f.parallel.sequence.comm = all.comm;
    f.forward.norm.x = numbers(&f, TN_BF16, ROWS, K);
    f.forward.norm.gamma = numbers(&f, TN_FP32, 1, K);
    f.forward.w1.weight = weight(&f, F, K), f.forward.w2.weight = weight(&f, N, F);
    f.forward.y = test_plain(f.io, TN_BF16, ROWS, N);
    f.forward.common.scope = f.op, f.forward.common.saved_scope = f.saved_scope;
    f.backward.dy = numbers(&f, TN_BF16, ROWS, N);
    f.backward.w1 = f.forward.w1, f.backward.w2 = f.forward.w2;
    f.backward.norm.x = f.forward.norm.x, f.backward.norm.gamma = f.forward.norm.gamma;
    f.backward.norm.dx = test_plain(f.io, TN_BF16, ROWS, K);
    f.backward.norm.dgamma = f.dgamma = numbers(&f, TN_FP32, 1, K);
    f.backward.gradient1.dweight = f.dweight[0] = numbers(&f, TN_FP32, F, K);
    f.backward.gradient2.dweight = f.dweight[1] = numbers(&f, TN_FP32, N, F);
    f.backward.norm.accumulate = 1;
    f.backward.gradient1.accumulate = f.backward.gradient2.accumulate = 1;
    f.backward.gradient1.delay = f.backward.gradient2.delay = delay;
    f.backward.common = f.forward.common;
    make_gather(&f);
    ranks_wait(&all);
    return f;
}

static void close_fixture(fixture *f) {
    ranks_wait(&all);
    EXPECT_OK(tn_scope_close(f->op));
    EXPECT_OK(tn_scope_close(f->saved_scope));
    EXPECT_OK(tn_scope_close(f->io));
}

static tn_status gather(fixture *f) {
    tn_sequence_gather_args args = TN_SEQUENCE_GATHER_ARGS_INIT;
    args.sequence.comm = all.comm, args.scope = f->op;
    args.src = f->quantized, args.plane = TN_PLANE_COL, args.dst = f->gathered;
    return tn_sequence_gather(&args, all.stream);
}

static tn_status forward(fixture *f) {
    return tn_parallel_norm_mlp_forward(&f->parallel, &f->forward, &f->saved, all.stream);
}

static tn_status backward(fixture *f) {
    return tn_parallel_norm_mlp_backward(&f->parallel, &f->backward, &f->saved, f->delayed,
                                         all.stream);
}

static tn_status late(fixture *f) {
    for (int i = 0; i < 2; i++) {
        if (f->delayed[i].dweight.value == 0) continue;
        const tn_status status = tn_weight_gradient(&f->delayed[i], f->op, all.stream);
        if (status != TN_OK) return status;
    }
    return TN_OK;
}

/* The gradients in one row of numbers. */
static parallel_matrix gradients_of(const fixture *f) {
    parallel_matrix parts[3] = {parallel_fetch(&all, f->dweight[0]),
                                parallel_fetch(&all, f->dweight[1]),
                                parallel_fetch(&all, f->dgamma)};
    parallel_matrix row = parallel_zeros(1, F * K + N * F + K);
    int64_t at = 0;
    for (int i = 0; i < 3; i++) {
        const int64_t count = parts[i].rows * parts[i].cols;
        memcpy(row.at + at, parts[i].at, (size_t)count * sizeof(float));
        at += count;
        parallel_free(&parts[i]);
    }
    return row;
}

/* Writes them again as they were before the call. */
static void restore(const fixture *f, const parallel_matrix *row) {
    const tn_tensor targets[3] = {f->dweight[0], f->dweight[1], f->dgamma};
    const int64_t counts[3] = {(int64_t)F * K, (int64_t)N * F, K};
    int64_t at = 0;
    for (int i = 0; i < 3; i++) {
        EXPECT_OK(tn_plane_write(targets[i], TN_PLANE_DATA, row->at + at, (size_t)counts[i] * 4,
                                 NULL, 0, all.stream));
        at += counts[i];
    }
    ranks_wait(&all);
}

static void expect_whole(const parallel_matrix *after, const parallel_matrix *before,
                         const parallel_matrix *added) {
    const int64_t counts[3] = {(int64_t)F * K, (int64_t)N * F, K};
    int64_t at = 0;
    for (int i = 0; i < 3; i++) {
        const size_t bytes = (size_t)counts[i] * sizeof(float);
        if (memcmp(after->at + at, before->at + at, bytes) != 0)
            assert_memory_equal(after->at + at, added->at + at, bytes);
        at += counts[i];
    }
}

/* Fails at the first allocation, the second, ... until it works; how often it has failed. added:
 * gradients after a call that works. */
static long fail_until_it_works(fixture *f, tn_status (*call)(fixture *),
                                const parallel_matrix *added) {
    parallel_matrix before = gradients_of(f);
    const tn_norm_mlp_saved saved = f->saved;
    const tn_delayed_gradient delayed[2] = {f->delayed[0], f->delayed[1]};
    const uint64_t kept = test_ledger(f->saved_scope).tensors;
    for (long nth = 1;; nth++) {
        ranks_wait(&all);
        tn__host_alloc_fault(nth, 0);
        const tn_status status = call(f);
        tn__host_alloc_fault(0, 0);
        assert_int_equal(test_ledger(f->op).tensors, 0);
        assert_int_equal(test_ledger(f->io).leases, 0);
        if (status == TN_OK) {
            parallel_free(&before);
            return nth - 1;
        }
        EXPECT_STATUS(status, TN_OUT_OF_HOST_MEMORY);
        assert_memory_equal(&f->saved, &saved, sizeof saved);
        assert_memory_equal(f->delayed, delayed, sizeof delayed);
        assert_int_equal(test_ledger(f->saved_scope).tensors, kept);
        parallel_matrix after = gradients_of(f);
        expect_whole(&after, &before, added);
        restore(f, &before);
        parallel_free(&after);
    }
}

static void fail_each_call(int delay) {
    fixture f = open_fixture(delay), untroubled = open_fixture(0);
    EXPECT_OK(forward(&untroubled));
    EXPECT_OK(backward(&untroubled));
    parallel_matrix expected = gradients_of(&untroubled);
    assert_true(fail_until_it_works(&f, gather, &expected) >= 1);
    assert_int_equal(test_state(f.gathered, TN_PLANE_COL), TN_PLANE_VALID);
    assert_true(fail_until_it_works(&f, forward, &expected) >= 2);
    assert_true(fail_until_it_works(&f, backward, &expected) >= 4);
    EXPECT_OK(late(&f));
    assert_int_equal(test_ledger(f.saved_scope).tensors, 0);
    parallel_matrix actual = gradients_of(&f);
    assert_memory_equal(actual.at, expected.at, (size_t)actual.cols * sizeof(float));
    parallel_free(&actual), parallel_free(&expected);
    parallel_expect(&all, "y", f.forward.y, parallel_fetch(&all, untroubled.forward.y));
    parallel_expect(&all, "dx", f.backward.norm.dx,
                    parallel_fetch(&all, untroubled.backward.norm.dx));
    close_fixture(&f);
    close_fixture(&untroubled);
}

static void a_call_that_fails_has_changed_nothing(void **state) {
    (void)state;
    fail_each_call(0);
    fail_each_call(1);
}

static int is_lost(tn_status status) {
    return status == TN_COMM_ERROR || status == TN_COMM_TIMEOUT;
}

/* What has failed before a collective of the layer is called again; what has failed behind one has
 * ended the communicator. */
static tn_status forward_again(fixture *f) {
    tn_status status = forward(f);
    for (int tries = 0; tries < 3 && status != TN_OK && !is_lost(status); tries++)
        status = forward(f);
    return status == TN_OK ? tn_comm_wait(f->parallel.sequence.comm) : status;
}

/* *has_come: the fault. 1: the communicator has failed, on all ranks and at once. */
static int fail_alone(tn_comm *comm, long nth, int *has_come) {
    fixture f = open_fixture(0);
    f.parallel.sequence.comm = comm;
    if (all.rank == 1) (void)tn__host_alloc_fault(nth, 0);
    tn_status status = forward_again(&f);
    *has_come = ranks_most(&all, all.rank == 1 && tn__host_alloc_fault(0, 0) == 0) > 0.0f;
    const int is_over = ranks_most(&all, status != TN_OK) > 0.0f;
    if (is_over && status == TN_OK) status = tn_barrier(comm, all.stream);
    if (is_over && status == TN_OK) status = tn_comm_wait(comm);
    assert_int_equal(status, is_over ? TN_COMM_ERROR : TN_OK);
    close_fixture(&f);
    return is_over;
}

static void a_rank_that_fails_alone_keeps_nobody_waiting(void **state) {
    enum { DEADLINE_US = 120 * 1000 * 1000 };
    long calls = 0, over = 0;
    int has_come = 1;
    (void)state;
    for (long nth = 1; has_come; nth += 2, calls++) {
        tn_comm *comm = ranks_comm(&all, "layers", DEADLINE_US);
        const int is_over = fail_alone(comm, nth, &has_come);
        assert_int_equal(tn_comm_destroy(comm), is_over ? TN_COMM_ERROR : TN_OK);
        over += is_over;
    }
    assert_true(over > 0 && over < calls);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_that_fails_has_changed_nothing),
    };
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(a_rank_that_fails_alone_keeps_nobody_waiting),
    };
    all = ranks_open();
    all.has_given_up = all.count > 1;
    int failed = all.count > 1 ? cmocka_run_group_tests(alone, NULL, NULL)
                               : cmocka_run_group_tests(tests, NULL, NULL);
    ranks_close(&all);
    return failed;
}
