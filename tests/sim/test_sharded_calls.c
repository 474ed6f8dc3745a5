/* Every driver call of giving up a sharded model's step, and of its end, fails once, on a stream of
 * another library, whose uses are told to the driver at once: the call that failed is made again,
 * and nothing is left behind. Masters that others write where no begin comes to see it. And buffers
 * whose stream is gone.
 */
#include "sharded_model_support.h"
#include "tenure_simulated.h"
#include "test_pools.h"
#include "test_support.h"

#include <stdio.h>

#include "sharded.h"

enum { UNITS = 3, ROWS = 136, COLS = 72, MICRO_BATCHES = 2, CODE_OUT_OF_MEMORY = 2, TRIES = 3 };

static tn_device *device;
static tn_pool *pool;
static tn_stream stream; /* another library's, or is_own */
static int is_own;
static tn_comm *comm;
static tn_scope scope;
static tn_sharded_model *model;
static int calls_failed;
static int halves;    /* lives in which giving up failed behind the meeting */
static int half_ends; /* and in which the model's end failed behind that of its units */

/* ---- the model ------------------------------------------------------------------------------- */

static void open_comm(void) {
    tn_comm_config config = TN_COMM_CONFIG_INIT;
    config.device = device;
    config.engine = TN_COMM_SIMULATED;
    config.rank_count = 2;
    EXPECT_OK(tn_comm_create(&config, &comm));
}

static void open_model(tn_gradient_wire wire) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    const tn_sharded_tensor weight = {.name = "w",
                                      .format = TN_FORMAT_FP8_BLOCK_2D,
                                      .dtype = TN_E4M3,
                                      .rows = ROWS,
                                      .cols = COLS};
    config.scope = scope, config.comm = comm, config.stream = stream;
    config.micro_batches = MICRO_BATCHES;
    config.gradient_wire = wire;
    model = sharded_model_open(&config, weight, UNITS);
}

/* Whose shards are made of its masters, with one micro-batch a step. */
static void open_made_model(void) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    const tn_sharded_tensor weight = {.name = "w", .dtype = TN_BF16, .rows = ROWS, .cols = COLS};
    config.scope = scope, config.comm = comm, config.stream = stream;
    config.shards_from_masters = 1;
    model = sharded_model_open(&config, weight, UNITS);
}

static void open_device(void) {
    tn_scope_config of_scope = TN_SCOPE_CONFIG_INIT;
    device = test_open_sim(0, 0);
    pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    stream = is_own ? test_open_stream(device) : test_open_foreign_stream(device);
    of_scope.pool = pool;
    EXPECT_OK(tn_scope_create(&of_scope, &scope));
    open_comm();
    calls_failed = 0;
}

static void open_all(tn_gradient_wire wire) {
    open_device();
    open_model(wire);
}

/* The model has ended. */
static void close_all(int is_lost) {
    const tn_status status = tn_comm_destroy(comm);
    assert_true(status == TN_OK || (is_lost && status == TN_COMM_ERROR));
    EXPECT_OK(tn_scope_close(scope));
    EXPECT_OK(tn_device_synchronize(device));
    EXPECT_OK(tn_pool_check(pool));
    EXPECT_OK(tn_pool_destroy(pool));
    if (is_own) EXPECT_OK(tn_stream_destroy(device, stream));
    if (!is_own) test_close_foreign_stream(device, stream);
    test_close_sim(device);
}

/* ---- faults ---------------------------------------------------------------------------------- */

static uint64_t armed_at;
static long armed;
static int has_come; /* the fault that was armed last */

static void arm(long nth) {
    armed = nth, armed_at = test_sim_get()->call_count(NULL);
    test_sim_get()->fault(NULL, nth, 0, CODE_OUT_OF_MEMORY);
}

static void disarm(void) {
    has_come = test_sim_get()->call_count(NULL) - armed_at >= (uint64_t)armed;
    test_sim_get()->fault(NULL, 0, 0, 0);
}

/* 0: the communicator has failed, and nothing can be made again. */
#define MAKE(call)                                                                                 \
    do {                                                                                           \
        tn_status made = TN_UNSUPPORTED;                                                           \
        for (int tries = 0; tries < TRIES && made != TN_OK; tries++) {                             \
            made = (call);                                                                         \
            calls_failed += made != TN_OK;                                                         \
            if (made == TN_COMM_ERROR) return 0;                                                   \
        }                                                                                          \
        EXPECT_OK(made);                                                                           \
    } while (0)

static int backward(int unit) {
    MAKE(tn_sharded_backward_begin(model, unit));
    if (!tn_sharded_accumulates(model, unit))
        MAKE(tn_plane_fill(tn_sharded_gradient(model, unit, 0), TN_PLANE_DATA, 0, stream));
    MAKE(tn_sharded_backward_end(model, unit));
    return 1;
}

static int pass(void) {
    for (int unit = 0; unit < UNITS; unit++) {
        MAKE(tn_sharded_forward_begin(model, unit));
        MAKE(tn_sharded_forward_end(model, unit));
    }
    for (int unit = UNITS; unit-- > 0;)
        if (!backward(unit)) return 0;
    return 1;
}

static int step(void) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    update.max_norm = 1.0f;
    for (int i = 0; i < MICRO_BATCHES; i++)
        if (!pass()) return 0;
    MAKE(tn_sharded_update(model, &update));
    return 1;
}

/* What goes on with the step that the other ranks have given up; tn_sharded_abandon has failed. */
static void expect_given_up_only(void) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    for (int unit = 0; unit < UNITS; unit++) {
        EXPECT_STATUS(tn_sharded_forward_begin(model, unit), TN_INVALID_STATE);
        EXPECT_STATUS(tn_sharded_backward_begin(model, unit), TN_INVALID_STATE);
        EXPECT_STATUS(tn_sharded_backward_end(model, unit), TN_INVALID_STATE);
        EXPECT_ERROR_HAS("tn_sharded_abandon of model sharded has failed half-way: call it again");
    }
    EXPECT_STATUS(tn_sharded_update_ahead(model, &update), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tn_sharded_abandon of");
    EXPECT_STATUS(tn_sharded_update(model, &update), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tn_sharded_abandon of");
}

/* In the middle of a backward, where gradients are in buckets, and some are reduced. */
static int given_up(long nth) {
    if (!pass() || !backward(UNITS - 1)) return 0;
    MAKE(tn_sharded_backward_begin(model, UNITS - 2));
    MAKE(tn_plane_fill(tn_sharded_gradient(model, UNITS - 2, 0), TN_PLANE_DATA, 0, stream));
    arm(nth);
    const tn_status given = tn_sharded_abandon(model);
    disarm();
    calls_failed += given != TN_OK;
    if (given == TN_COMM_ERROR) return 0;
    if (model->has_met) expect_given_up_only();
    halves += model->has_met;
    if (given != TN_OK) MAKE(tn_sharded_abandon(model));
    return step();
}

static int ended(long nth) {
    if (!pass() || !backward(UNITS - 1)) return 0;
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    tn_sharded_model *ends = model;
    arm(nth);
    model = NULL; /* whatever has become of its communicator */
    const tn_status first = tn_sharded_destroy(ends);
    disarm();
    calls_failed += first != TN_OK;
    if (first == TN_COMM_ERROR) return 0;
    if (first != TN_OK && ends->is_ending) {
        EXPECT_STATUS(tn_sharded_update_ahead(ends, &update), TN_INVALID_STATE);
        EXPECT_ERROR_HAS("tn_sharded_destroy of model sharded has failed half-way: call it again");
        half_ends++;
    }
    if (first != TN_OK) MAKE(tn_sharded_destroy(ends));
    return 1;
}

/* What all lives begin and end with. 1: its communicator was lost. */
static int live(int (*life)(long nth), long nth) {
    const int is_lost = !life(nth);
    if (is_lost) disarm();
    const tn_status ends = tn_sharded_destroy(model);
    if (!is_lost) EXPECT_OK(ends);
    close_all(is_lost);
    return is_lost;
}

/* The N-th driver call from some point of a model's life on, for each N. */
static void fail_each(const char *name, tn_gradient_wire wire, int (*life)(long nth)) {
    long lives = 0, failed = 0, lost = 0;
    for (has_come = 1; has_come; lives++) {
        open_all(wire);
        lost += live(life, lives + 1);
        failed += calls_failed > 0;
    }
    printf("  %s: %ld lives, %ld with a call that failed, %ld communicators lost\n", name, lives,
           failed, lost);
    assert_true(failed > lost);
}

static void a_step_is_given_up_again(void **state) {
    (void)state;
    fail_each("given up", TN_GRADIENT_WIRE_PLAIN, given_up);
    fail_each("given up, gradients in FP8", TN_GRADIENT_WIRE_FP8, given_up);
    assert_true(halves > 0);
}

static void an_end_is_called_again(void **state) {
    (void)state;
    fail_each("ended", TN_GRADIENT_WIRE_PLAIN, ended);
    fail_each("ended, gradients in FP8", TN_GRADIENT_WIRE_FP8, ended);
    assert_true(half_ends > 0);
}

/* ---- masters that others write --------------------------------------------------------------- */

/* Within a step, where no begin of a unit comes any more. */
typedef enum moment { IN_LAST_BACKWARD, BEHIND_IT, MOMENTS } moment;

static int write_master(int unit) {
    tn_sharded_unit_info info = TN_SHARDED_UNIT_INFO_INIT;
    EXPECT_OK(tn_sharded_unit_info_get(model, unit, &info));
    MAKE(tn_plane_fill(info.master, TN_PLANE_DATA, 0, stream));
    return 1;
}

/* As far as the last backward's end. */
static int step_to_last_backward(void) {
    for (int i = 0; i < UNITS; i++) {
        MAKE(tn_sharded_forward_begin(model, i));
        MAKE(tn_sharded_forward_end(model, i));
    }
    for (int i = UNITS; i-- > 1;)
        if (!backward(i)) return 0;
    MAKE(tn_sharded_backward_begin(model, 0));
    MAKE(tn_plane_fill(tn_sharded_gradient(model, 0, 0), TN_PLANE_DATA, 0, stream));
    return 1;
}

static int step_with_write(int unit, moment when) {
    if (!step_to_last_backward()) return 0;
    if (when == IN_LAST_BACKWARD && !write_master(unit)) return 0;
    MAKE(tn_sharded_backward_end(model, 0));
    return when == IN_LAST_BACKWARD || write_master(unit);
}

static void expect_foreign(tn_status status, int unit) {
    char words[64];
    snprintf(words, sizeof words, "the masters of unit unit %d were written by", unit);
    EXPECT_STATUS(status, TN_INVALID_STATE);
    EXPECT_ERROR_HAS(words);
}

/* With an update of all in turn, and ahead. */
static int made_step(long nth) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    const int is_ahead = nth % 2 != 0;
    update.max_norm = is_ahead ? 0.0f : 1.0f;
    if (is_ahead) MAKE(tn_sharded_update_ahead(model, &update));
    if (!pass()) return 0;
    MAKE(tn_sharded_update(model, is_ahead ? NULL : &update));
    return 1;
}

static int made_steps(long nth) {
    if (!made_step(nth)) return 0;
    arm(nth);
    if (!made_step(nth)) return 0;
    disarm();
    return made_step(nth);
}

/* A call that is made again takes what the model itself wrote for no other's. */
static void a_step_is_gone_on_with(void **state) {
    long lives = 0, failed = 0;
    (void)state;
    is_own = 1;
    for (has_come = 1; has_come; lives++) {
        open_device();
        open_made_model();
        if (!live(made_steps, lives + 1)) failed += calls_failed > 0;
    }
    is_own = 0;
    printf("  gone on with: %ld lives, %ld with a call that failed\n", lives, failed);
    assert_true(failed > 0);
}

/* The update takes nothing that others wrote; nor does a step after one that was given up. */
static void an_update_is_of_the_masters_that_were_gathered(void **state) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    (void)state;
    for (int when = 0; when < MOMENTS; when++) {
        for (int unit = 0; unit < UNITS; unit++) {
            open_device();
            open_made_model();
            assert_true(step_with_write(unit, (moment)when));
            for (int tries = 0; tries < 2; tries++)
                expect_foreign(tn_sharded_update(model, &update), unit);
            EXPECT_OK(tn_sharded_abandon(model));
            expect_foreign(tn_sharded_forward_begin(model, unit), unit);
            EXPECT_OK(tn_sharded_destroy(model));
            close_all(0);
        }
    }
}

/* Those of units that were updated with their backward's end are found by the update of all. */
static void so_is_an_update_ahead(void **state) {
    tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    (void)state;
    for (int unit = 0; unit < UNITS; unit++) {
        open_device();
        open_made_model();
        EXPECT_OK(tn_sharded_update_ahead(model, &update));
        assert_true(step_to_last_backward() && write_master(unit));
        if (unit == 0) expect_foreign(tn_sharded_backward_end(model, 0), 0);
        if (unit > 0) {
            EXPECT_OK(tn_sharded_backward_end(model, 0));
            expect_foreign(tn_sharded_update(model, NULL), unit);
        }
        EXPECT_OK(tn_sharded_destroy(model));
        close_all(0);
    }
}

/* ---- what a collective was put under --------------------------------------------------------- */

/* Valid whether the driver notes its use or not: what was put will write it, and is put once. */
static void what_a_collective_writes_is_valid(void **state) {
    long nth = 1, failed = 0;
    (void)state;
    open_all(TN_GRADIENT_WIRE_PLAIN);
    tn_tensor to = {0};
    EXPECT_OK(tn__sharded_zeros(model, scope, TN_FP32, 1, 128, "to", &to));
    for (has_come = 1; has_come; nth++) {
        tn_plane_view view;
        tn_lease lease;
        tn_plane_state is = TN_PLANE_ABSENT;
        EXPECT_OK(tn_lease_begin(to, TN_PLANE_DATA, TN_UPDATE, stream, &lease, &view));
        test_sim_write(device, stream, view.data, 128 * sizeof(float), 5.0);
        arm(nth);
        const tn_status status = tn__sharded_end_write(lease, TN_OK);
        disarm();
        failed += status != TN_OK;
        EXPECT_OK(tn_plane_state_get(to, TN_PLANE_DATA, &is));
        assert_int_equal(is, TN_PLANE_VALID);
        EXPECT_STATUS(tn_lease_end(lease), TN_STALE_HANDLE);
    }
    assert_true(failed > 0);
    EXPECT_OK(tn_sharded_destroy(model));
    close_all(0);
}

/* ---- a buffer -------------------------------------------------------------------------------- */

static tn__sharded_buffer make_buffer(tn_stream on) {
    tn__sharded_buffer buffer;
    EXPECT_OK(tn__sharded_buffer_make(model, 1 << 20, on, "buffer", &buffer));
    test_sim_write(device, on, buffer.data, 1 << 20, 5.0);
    return buffer;
}

/* What the driver fails at is left for the next call, or goes with the scope. */
static long fail_buffers(int ends) {
    long nth = 1, failed = 0;
    for (has_come = 1; has_come; nth++) {
        tn__sharded_buffer buffer = make_buffer(stream);
        tn_stream other = test_open_stream(device);
        arm(nth);
        const tn_status status = tn__sharded_buffer_end(&buffer, other);
        disarm();
        failed += status != TN_OK;
        if (status != TN_OK) assert_int_not_equal(buffer.memory.value, 0);
        if (ends) EXPECT_OK(tn__sharded_buffer_end(&buffer, other));
        if (!ends) tn__sharded_buffer_abandon(&buffer, other);
        assert_int_equal(buffer.memory.value, 0);
        EXPECT_OK(tn_stream_synchronize(device, other));
        EXPECT_OK(tn_stream_destroy(device, other));
    }
    return failed;
}

static void a_buffer_ends_the_next_time(void **state) {
    (void)state;
    open_all(TN_GRADIENT_WIRE_PLAIN);
    assert_true(fail_buffers(1) > 4);
    assert_true(fail_buffers(0) > 4);
    EXPECT_OK(tn_sharded_destroy(model));
    close_all(0);
}

/* No end of its lease is possible: the scope takes it along. */
static void a_buffer_whose_stream_is_gone_is_given_up(void **state) {
    (void)state;
    open_all(TN_GRADIENT_WIRE_PLAIN);
    tn_stream gone = test_open_foreign_stream(device);
    tn__sharded_buffer buffer = make_buffer(gone);
    EXPECT_OK(tn_device_synchronize(device));
    test_close_foreign_stream(device, gone);
    tn_stream another = test_open_foreign_stream(device); /* that has its handle now */
    EXPECT_STATUS(tn__sharded_buffer_end(&buffer, stream), TN_INVALID_ARGUMENT);
    assert_int_not_equal(buffer.lease.value, 0);
    tn__sharded_buffer_abandon(&buffer, stream);
    assert_int_equal(buffer.memory.value, 0);
    test_close_foreign_stream(device, another);
    EXPECT_OK(tn_sharded_destroy(model));
    close_all(0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_is_given_up_again),
        cmocka_unit_test(an_end_is_called_again),
        cmocka_unit_test(a_step_is_gone_on_with),
        cmocka_unit_test(an_update_is_of_the_masters_that_were_gathered),
        cmocka_unit_test(so_is_an_update_ahead),
        cmocka_unit_test(what_a_collective_writes_is_valid),
        cmocka_unit_test(a_buffer_ends_the_next_time),
        cmocka_unit_test(a_buffer_whose_stream_is_gone_is_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
