/* What a sharded model refuses, on every rank alike, and that it has changed nothing then; and what
 * it says beforehand about the memory that it takes. */
#include "model_support.h"

#include <math.h>

static rank_fixture all;

static tn_scope open_scope(void) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.pool = all.pool;
    config.name = "arguments";
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_tensor open_plain(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.dtype = dtype;
    config.rank = 2, config.shape[0] = rows, config.shape[1] = cols;
    EXPECT_OK(tn_tensor_create(scope, &config, &tensor));
    EXPECT_OK(tn_plane_fill(tensor, TN_PLANE_DATA, 0, all.stream));
    return tensor;
}

static tn_sharded_config config_of(tn_scope scope) {
    tn_sharded_config config = TN_SHARDED_CONFIG_INIT;
    config.scope = scope;
    config.comm = all.comm;
    config.stream = all.stream;
    return config;
}

static void refuse_another_device(void) {
    tn_device *device = test_open_host();
    tn_pool *pool = test_open_pool(device, TN_BACKING_AUTO, 0);
    tn_scope_config there = TN_SCOPE_CONFIG_INIT;
    tn_sharded_model *model = NULL;
    tn_scope scope = {0};
    there.pool = pool;
    EXPECT_OK(tn_scope_create(&there, &scope));
    const tn_sharded_config config = config_of(scope);
    EXPECT_STATUS(tn_sharded_create(&config, &model), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("the communicator ranks and the scope are of different devices");
    EXPECT_OK(tn_scope_close(scope));
    EXPECT_OK(tn_pool_destroy(pool));
    EXPECT_OK(tn_device_destroy(device));
}

static void a_bad_configuration_is_refused(void **state) {
    (void)state;
    tn_scope scope = open_scope();
    tn_sharded_model *model = NULL;
    tn_sharded_config config = config_of(scope);
    EXPECT_STATUS(tn_sharded_create(NULL, &model), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_sharded_create(&config, NULL), TN_INVALID_ARGUMENT);
    config.comm = NULL;
    EXPECT_STATUS(tn_sharded_create(&config, &model), TN_INVALID_ARGUMENT);
    config = config_of(scope), config.gradient_dtype = TN_FP16;
    EXPECT_STATUS(tn_sharded_create(&config, &model), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("gradient_dtype");
    config = config_of(scope), config.micro_batches = -1;
    EXPECT_STATUS(tn_sharded_create(&config, &model), TN_INVALID_ARGUMENT);
    config = config_of(scope), config.gradient_sum = (tn_gradient_sum)7;
    EXPECT_STATUS(tn_sharded_create(&config, &model), TN_INVALID_ARGUMENT);
    config = config_of(scope), config.ring_registration = (tn_ring_register)3;
    EXPECT_STATUS(tn_sharded_create(&config, &model), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("ring_registration is 3");
    config = config_of((tn_scope){0});
    EXPECT_STATUS(tn_sharded_create(&config, &model), TN_INVALID_ARGUMENT);
    refuse_another_device();
    config = config_of(scope), config.step = open_plain(scope, TN_FP32, 1, 2);
    EXPECT_STATUS(tn_sharded_create(&config, &model), TN_INVALID_ARGUMENT);
    assert_null(model);
    TN_EXPECT_LIVE_BYTES(scope, 8);
    EXPECT_OK(tn_sharded_destroy(NULL));
    EXPECT_OK(tn_scope_close(scope));
}

static void a_bad_unit_is_refused(void **state) {
    (void)state;
    tn_scope scope = open_scope();
    tn_sharded_model *model = NULL;
    const tn_sharded_config config = config_of(scope);
    tn_sharded_unit_config unit = TN_SHARDED_UNIT_CONFIG_INIT;
    tn_ledger before = TN_LEDGER_INIT;
    tn_tensor initial = open_plain(scope, TN_FP32, 64, 64);
    const tn_sharded_tensor good = {.name = "w",
                                    .format = TN_FORMAT_FP8_BLOCK_2D,
                                    .dtype = TN_E4M3,
                                    .rows = 64,
                                    .cols = 64,
                                    .initial = initial};
    tn_sharded_tensor tensor = good;
    int number = -1;
    EXPECT_OK(tn_sharded_create(&config, &model));
    EXPECT_OK(tn_scope_ledger(scope, &before));
    unit.tensors = &tensor;
    EXPECT_STATUS(tn_sharded_unit_add(model, &unit, &number), TN_INVALID_ARGUMENT);
    unit.tensor_count = 1;
    tensor.rows = 65;
    EXPECT_STATUS(tn_sharded_unit_add(model, &unit, &number), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("initial of tensor w");
    tensor.rows = tensor.cols = INT64_C(1) << 62;
    EXPECT_STATUS(tn_sharded_unit_add(model, &unit, &number), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("initial of tensor w");
    tensor = good, tensor.format = TN_FORMAT_FP8_BLOCK_1D;
    EXPECT_STATUS(tn_sharded_unit_add(model, &unit, &number), TN_UNSUPPORTED);
    tensor = good, tensor.format = TN_FORMAT_PLAIN, tensor.dtype = TN_FP32;
    tensor.high_precision = 1;
    EXPECT_STATUS(tn_sharded_unit_add(model, &unit, &number), TN_INVALID_ARGUMENT);
    tensor = good, tensor.initial = (tn_tensor){0};
    EXPECT_STATUS(tn_sharded_unit_add(model, &unit, &number), TN_STALE_HANDLE);
    tensor = good, tensor.frozen = 1, tensor.first = initial;
    EXPECT_STATUS(tn_sharded_unit_add(model, &unit, &number), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_sharded_seal(model), TN_INVALID_ARGUMENT);
    assert_int_equal(number, -1);
    TN_EXPECT_NO_GROWTH(scope, &before);
    EXPECT_OK(tn_sharded_destroy(model));
    EXPECT_OK(tn_scope_close(scope));
}

/* ---- calls out of order --------------------------------------------------------------------- */

static void calls_out_of_order_are_refused(void **state) {
    (void)state;
    const model_options options = model_options_small(2);
    const tn_sharded_update_args update = TN_SHARDED_UPDATE_ARGS_INIT;
    test_model *model = model_open(&all, &options, NULL);
    tn_sharded_model *sharded = model->sharded;
    tn_ledger before = TN_LEDGER_INIT;
    EXPECT_OK(tn_scope_ledger(model->scope, &before));
    EXPECT_STATUS(tn_sharded_forward_begin(sharded, 2), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_sharded_forward_begin(sharded, -1), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_sharded_forward_end(sharded, 0), TN_INVALID_STATE);
    EXPECT_STATUS(tn_sharded_backward_end(sharded, 0), TN_INVALID_STATE);
    EXPECT_STATUS(tn_sharded_seal(sharded), TN_INVALID_STATE);
    EXPECT_STATUS(tn_sharded_update(sharded, &update), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("0 of 1 micro-batches");
    EXPECT_OK(tn_sharded_forward_begin(sharded, 0));
    EXPECT_STATUS(tn_sharded_forward_begin(sharded, 0), TN_INVALID_STATE);
    EXPECT_STATUS(tn_sharded_backward_begin(sharded, 0), TN_INVALID_STATE);
    EXPECT_STATUS(tn_sharded_update(sharded, &update), TN_INVALID_STATE);
    EXPECT_OK(tn_sharded_forward_end(sharded, 0));
    EXPECT_OK(tn_sharded_backward_begin(sharded, 0));
    EXPECT_STATUS(tn_sharded_backward_end(sharded, 0), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("was not written");
    EXPECT_OK(tn_sharded_abandon(sharded));
    TN_EXPECT_NO_GROWTH(model->scope, &before);
    model_step(model, 0);
    model_close(model);
}

/* Arguments that no AdamW and no cast takes, one by one; 0: there are no more. */
static int spoil(tn_sharded_update_args *args, int which, const tn_tensor rates[3]) {
    const struct {
        float *number;
        float value;
    } numbers[] = {{&args->learning_rate, NAN},  {&args->learning_rate, -1.0f},
                   {&args->beta1, 1.0f},         {&args->beta1, -0.5f},
                   {&args->beta2, 1.0f},         {&args->beta2, NAN},
                   {&args->epsilon, 0.0f},       {&args->epsilon, INFINITY},
                   {&args->weight_decay, -1.0f}, {&args->weight_decay, INFINITY},
                   {&args->gradient_scale, NAN}, {&args->max_norm, -1.0f},
                   {&args->amax_epsilon, -1.0f}, {&args->amax_epsilon, NAN}};
    const int count = (int)(sizeof numbers / sizeof *numbers);
    *args = (tn_sharded_update_args)TN_SHARDED_UPDATE_ARGS_INIT;
    if (which < count) *numbers[which].number = numbers[which].value;
    if (which >= count && which < count + 3) args->rate = rates[which - count];
    return which < count + 3;
}

/* Refused before a unit is updated with them: the step can be given up, and is as it was. */
static void a_bad_update_changes_nothing(void **state) {
    (void)state;
    const model_options options = model_options_small(2);
    const tn_sharded_update_args good = TN_SHARDED_UPDATE_ARGS_INIT;
    tn_sharded_update_args args;
    test_model *model = model_open(&all, &options, NULL);
    const tn_tensor rates[3] = {open_plain(model->scope, TN_BF16, 1, 1),
                                open_plain(model->scope, TN_FP32, 1, 2),
                                open_plain(model->scope, TN_FP32, 1, 1)};
    EXPECT_OK(tn_tensor_destroy(rates[2], all.stream));
    for (int which = 0; spoil(&args, which, rates); which++)
        assert_int_not_equal(tn_sharded_update_ahead(model->sharded, &args), TN_OK);
    model_pass(model, 0, 0);
    for (int which = 0; spoil(&args, which, rates); which++) {
        const tn_status status = tn_sharded_update(model->sharded, &args);
        EXPECT_STATUS(status,
                      args.rate.value == rates[2].value ? TN_STALE_HANDLE : TN_INVALID_ARGUMENT);
    }
    EXPECT_OK(tn_sharded_abandon(model->sharded));
    model_pass(model, 0, 0);
    EXPECT_OK(tn_sharded_update(model->sharded, &good));
    model_close(model);
}

static void an_update_ahead_is_told_before_it_begins(void **state) {
    (void)state;
    const model_options options = model_options_small(2);
    tn_sharded_update_args args = TN_SHARDED_UPDATE_ARGS_INIT;
    tn_sharded_config config = config_of(open_scope());
    tn_sharded_model *unsealed = NULL;
    EXPECT_OK(tn_sharded_create(&config, &unsealed));
    EXPECT_STATUS(tn_sharded_update_ahead(unsealed, &args), TN_INVALID_STATE);
    EXPECT_OK(tn_sharded_destroy(unsealed));
    EXPECT_OK(tn_scope_close(config.scope));
    test_model *model = model_open(&all, &options, NULL);
    EXPECT_STATUS(tn_sharded_update_ahead(NULL, &args), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_sharded_update_ahead(model->sharded, NULL), TN_INVALID_ARGUMENT);
    args.max_norm = 1.0f;
    EXPECT_STATUS(tn_sharded_update_ahead(model->sharded, &args), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("a norm is of all gradients");
    args.max_norm = 0.0f;
    model_pass(model, 0, 0);
    EXPECT_STATUS(tn_sharded_update_ahead(model->sharded, &args), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("has ended: call it before");
    EXPECT_STATUS(tn_sharded_update(model->sharded, NULL), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_sharded_update(model->sharded, &args));
    model_close(model);
}

/* A plane that someone holds stays, and the call says who holds it and can be made again. */
static void what_is_leased_stays(void **state) {
    (void)state;
    const model_options options = model_options_small(1);
    test_model *model = model_open(&all, &options, NULL);
    const tn_tensor weight = tn_sharded_weight(model->sharded, 0, BLOCK_UP);
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_sharded_forward_begin(model->sharded, 0));
    EXPECT_OK(tn_lease_begin(weight, TN_PLANE_ROW, TN_READ, all.stream, &lease, &view));
    EXPECT_STATUS(tn_sharded_forward_end(model->sharded, 0), TN_IN_USE);
    EXPECT_STATUS(tn_sharded_abandon(model->sharded), TN_IN_USE);
    EXPECT_STATUS(tn_sharded_destroy(model->sharded), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_sharded_forward_end(model->sharded, 0));
    EXPECT_OK(tn_sharded_abandon(model->sharded));
    model_step(model, 0);
    model_close(model);
}

static void a_bucket_in_use_is_not_taken(void **state) {
    (void)state;
    model_options options = model_options_small(2);
    options.gradient_slots = 1;
    test_model *model = model_open(&all, &options, NULL);
    const tn_tensor gradient = tn_sharded_gradient(model->sharded, 0, BLOCK_UP);
    tn_plane_state plane = TN_PLANE_ABSENT;
    EXPECT_OK(tn_sharded_backward_begin(model->sharded, 0));
    EXPECT_OK(tn_plane_fill(gradient, TN_PLANE_DATA, 0, all.stream));
    EXPECT_STATUS(tn_sharded_backward_begin(model->sharded, 1), TN_IN_USE);
    EXPECT_ERROR_HAS("gradient_slots");
    EXPECT_OK(tn_plane_state_get(gradient, TN_PLANE_DATA, &plane));
    assert_int_equal(plane, TN_PLANE_VALID);
    EXPECT_OK(tn_sharded_abandon(model->sharded));
    model_step(model, 0);
    model_close(model);
}

/* Units that are gathered, and one whose backward has begun, end with their model. */
static void a_model_ends_in_the_middle_of_a_step(void **state) {
    (void)state;
    model_options options = model_options_small(2);
    options.keep_after_forward = 1;
    test_model *model = model_open(&all, &options, NULL);
    EXPECT_OK(tn_sharded_forward_begin(model->sharded, 0));
    EXPECT_OK(tn_sharded_forward_end(model->sharded, 0));
    EXPECT_OK(tn_sharded_forward_begin(model->sharded, 1));
    EXPECT_OK(tn_sharded_backward_begin(model->sharded, 0));
    model_close(model);
}

/* ---- what it says --------------------------------------------------------------------------- */

static void bytes_of_either_sum_are_told_beforehand(void **state) {
    (void)state;
    size_t sums[2] = {0, 0};
    for (int sum = TN_GRADIENT_SUM_SHARDED; sum <= TN_GRADIENT_SUM_WHOLE; sum++) {
        model_options options = model_options_small(3);
        options.micro_batches = 4;
        options.sum = (tn_gradient_sum)sum;
        test_model *model = model_open(&all, &options, NULL);
        const tn_sharded_report report = model_report(model);
        const size_t told[2] = {report.sharded_sum_bytes, report.whole_sum_bytes};
        if (sum == 0) sums[0] = told[0], sums[1] = told[1];
        assert_int_equal(told[0], sums[0]);
        assert_int_equal(told[1], sums[1]);
        assert_int_equal(report.gradient_bytes + report.bucket_bytes, told[sum]);
        model_close(model);
    }
    /* Three layers whole, against two buckets, a part that has arrived, and the parts. */
    assert_true(all.count < 3 || sums[0] < sums[1]);
}

/* A step in another order than the first one's is counted, and has the same result. */
static void another_order_is_counted(void **state) {
    (void)state;
    const model_options options = model_options_small(3);
    test_model *model = model_open(&all, &options, NULL);
    model_step(model, 0);
    model_step(model, 1);
    const tn_sharded_report before = model_report(model);
    assert_int_equal(before.strays, 0);
    assert_int_equal(before.gathers_late, 6);
    assert_int_equal(before.gathers_ahead, 5);
    EXPECT_OK(tn_sharded_forward_begin(model->sharded, 2));
    EXPECT_OK(tn_sharded_forward_end(model->sharded, 2));
    assert_int_equal(model_report(model).strays, 1);
    EXPECT_OK(tn_sharded_abandon(model->sharded));
    model_step(model, 2);
    assert_int_equal(model_report(model).strays, 1);
    model_close(model);
}

/* The last unit stays for its backward, in the one slot that there is: what comes instead of that
 * gets the slot. */
static void a_unit_that_is_kept_makes_room(void **state) {
    (void)state;
    model_options options = model_options_small(2);
    options.ring_slots = 1;
    test_model *model = model_open(&all, &options, NULL);
    model_step(model, 0);
    for (int way = 0; way < 2; way++) {
        for (int unit = 0; unit < 2; unit++) {
            EXPECT_OK(tn_sharded_forward_begin(model->sharded, unit));
            EXPECT_OK(tn_sharded_forward_end(model->sharded, unit));
        }
        EXPECT_OK(way ? tn_sharded_forward_begin(model->sharded, 0)
                      : tn_sharded_backward_begin(model->sharded, 0));
        EXPECT_OK(tn_sharded_abandon(model->sharded));
    }
    model_step(model, 1);
    model_close(model);
}

/* A model that keeps all its units gathered has room for them, or says so before it starts. */
static void a_ring_that_is_too_small_is_refused(void **state) {
    (void)state;
    tn_scope scope = open_scope();
    tn_sharded_model *model = NULL;
    tn_sharded_config config = config_of(scope);
    tn_sharded_unit_config unit = TN_SHARDED_UNIT_CONFIG_INIT;
    const tn_sharded_tensor tensor = {.name = "w",
                                      .format = TN_FORMAT_FP8_BLOCK_2D,
                                      .dtype = TN_E4M3,
                                      .rows = 256,
                                      .cols = 256,
                                      .initial = open_plain(scope, TN_FP32, 256, 256)};
    int number;
    config.keep_after_forward = 1, config.ring_slots = 2;
    EXPECT_OK(tn_sharded_create(&config, &model));
    unit.tensors = &tensor, unit.tensor_count = 1;
    for (int i = 0; i < 3; i++)
        EXPECT_OK(tn_sharded_unit_add(model, &unit, &number));
    EXPECT_STATUS(tn_sharded_seal(model), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("ring_slots");
    EXPECT_OK(tn_sharded_destroy(model));
    config.keep_after_forward = 0, config.ring_slots = 0, config.ring_bytes = 1000;
    EXPECT_OK(tn_sharded_create(&config, &model));
    EXPECT_OK(tn_sharded_unit_add(model, &unit, &number));
    const tn_status status = tn_sharded_seal(model);
    assert_true(status != TN_OK);
    EXPECT_OK(tn_sharded_destroy(model));
    EXPECT_OK(tn_scope_close(scope));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_bad_configuration_is_refused),
        cmocka_unit_test(a_bad_unit_is_refused),
        cmocka_unit_test(calls_out_of_order_are_refused),
        cmocka_unit_test(a_bad_update_changes_nothing),
        cmocka_unit_test(an_update_ahead_is_told_before_it_begins),
        cmocka_unit_test(what_is_leased_stays),
        cmocka_unit_test(a_bucket_in_use_is_not_taken),
        cmocka_unit_test(a_model_ends_in_the_middle_of_a_step),
        cmocka_unit_test(bytes_of_either_sum_are_told_beforehand),
        cmocka_unit_test(another_order_is_counted),
        cmocka_unit_test(a_unit_that_is_kept_makes_room),
        cmocka_unit_test(a_ring_that_is_too_small_is_refused),
    };
    return RANKS_RUN(&all, tests);
}
