/* What every op of the battery refuses, operand by operand: a handle that is not alive, a tensor of
 * another device, of another kind of element or of another shape, a plane that is not there, an
 * output that is an input or another output. Each has its status, launches no kernel, and changes
 * neither the books nor a byte of an output. And of an empty tensor every op is success without a
 * launch.
 */
#include "emulated_driver.h"
#include "emulator.h"
#include "op_battery_support.h"
#include "scripted_cublaslt.h"
#include "tenure_lifetime.h"

#include <stdio.h>
#include <string.h>

enum { ROWS = 20, COLS = 36, CALLS = 10 };

static gpu_side device, other;

/* ---- one call ------------------------------------------------------------------------------- */

typedef struct call {
    const battery_op *op;
    battery_case c;
    battery_operands right; /* what the op takes, */
    battery_operands given; /* and what it gets */
    battery_results before;
    int has_derived;
} call;

static tn_ledger ledger(void) {
    tn_ledger of = TN_LEDGER_INIT;
    EXPECT_OK(tn_scope_ledger(device.scope, &of));
    return of;
}

static void expect_unchanged(const call *k, const tn_ledger *before, const char *what) {
    const tn_ledger after = ledger();
    assert_int_equal(after.planes, before->planes);
    assert_int_equal(after.leases, before->leases);
    assert_int_equal(after.tensors, before->tensors);
    assert_int_equal(after.total_bytes, before->total_bytes);
    if (k->has_derived) return;
    battery_results results = battery_fetch(&device, &k->right);
    const int equal = battery_results_equal(&k->right, &results, &k->before, what);
    battery_results_end(&k->right, &results);
    if (!equal) fail_msg("%s has changed an output", what);
}

/* The call with what it is given is refused, with one of the statuses, as bits. */
static void expect_refused(call *k, unsigned statuses, const char *what) {
    const tn_ledger before = ledger();
    const uint64_t launches = emulated_launch_count();
    char text[128];
    snprintf(text, sizeof text, "%s way %u seed %llu, %s", k->op->name, k->c.way,
             (unsigned long long)k->c.seed, what);
    const tn_status got = k->op->launch(&device, &k->c, &k->given);
    if (!(statuses >> got & 1))
        fail_msg("%s: %s %s", text, tn_status_name(got), got == TN_OK ? "" : tn_error_last());
    EXPECT_OK(tn_stream_synchronize(device.device, device.stream));
    if (emulated_launch_count() != launches) fail_msg("%s: a kernel was launched", text);
    expect_unchanged(k, &before, text);
    battery_count(k->op, BATTERY_COMPARED, 1);
    k->given = k->right;
}

/* ---- an operand ----------------------------------------------------------------------------- */

/* An input, the skip flag, or an output. */
typedef struct slot {
    int is_output;
    int number; /* -1: the skip flag */
} slot;
enum { ANY = 99 };

static tn_tensor tensor_of(const battery_operands *operands, slot s) {
    if (s.is_output) return operands->out[s.number].tensor;
    return s.number < 0 ? operands->skip : operands->in[s.number];
}

/* In the place of a tensor, wherever it is named: planes of one tensor are several outputs. */
static void give(call *k, slot s, tn_tensor tensor) {
    const tn_tensor was = tensor_of(&k->right, s);
    if (!s.is_output && s.number < 0) k->given.skip = tensor;
    if (!s.is_output && s.number >= 0) k->given.in[s.number] = tensor;
    for (int i = 0; s.is_output && i < k->given.out_count; i++)
        if (k->right.out[i].tensor.value == was.value) k->given.out[i].tensor = tensor;
    if (s.is_output && k->right.random.value == was.value) k->given.random = tensor;
}

static tn_tensor_info info_of(tn_tensor tensor) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    return info;
}

/* A tensor with all planes valid, or none. */
static tn_tensor make(gpu_side *side, const tn_tensor_info *like, int is_valid) {
    tn_tensor tensor =
        gpu_fp8(side, like->format, like->dtype, like->scale_mode, like->rows, like->cols);
    if (!is_valid) return tensor;
    if (like->format == TN_FORMAT_PLAIN) {
        gpu_poison(side, tensor, TN_PLANE_DATA);
        return tensor;
    }
    gpu_poison(side, tensor, TN_PLANE_ROW);
    return tensor;
}

static void check_stale(call *k, slot s) {
    const tn_tensor_info like = info_of(tensor_of(&k->right, s));
    tn_tensor gone = make(&device, &like, 0);
    gpu_destroy(&device, gone);
    give(k, s, gone);
    expect_refused(k, 1u << TN_STALE_HANDLE, "a handle that is not alive");
}

static void check_elsewhere(call *k, slot s) {
    const tn_tensor_info like = info_of(tensor_of(&k->right, s));
    tn_tensor elsewhere = make(&other, &like, 1);
    give(k, s, elsewhere);
    expect_refused(k, 1u << TN_INVALID_ARGUMENT, "of another device");
    gpu_destroy(&other, elsewhere);
}

/* Bytes in the place of floats, floats in the place of bytes and of quantized elements. */
static void check_kind(call *k, slot s) {
    tn_tensor_info like = info_of(tensor_of(&k->right, s));
    like.dtype = like.format == TN_FORMAT_PLAIN && like.dtype != TN_BYTE ? TN_BYTE : TN_FP32;
    like.format = TN_FORMAT_PLAIN;
    tn_tensor kind = make(&device, &like, 1);
    give(k, s, kind);
    expect_refused(k, 1u << TN_INVALID_ARGUMENT, "of another kind");
    gpu_destroy(&device, kind);
}

/* What may have other rows or columns: as many as there are of something, or room for more. */
static int may_vary(const call *k, slot s) {
    static const struct {
        const char *op;
        slot slot; /* number ANY: all of them */
    } free_ones[] = {
        {"transpose", {1, 0}},           /* the only operand */
        {"quantize, delayed", {0, 1}},   /* scales of more tensors */
        {"quantize, delayed", {1, ANY}}, /* history; see below for dst */
        {"scale update", {1, 0}},        /* how long a history is */
        {"bias gradient", {0, 0}},       /* rows, if none is quantized */
        {"combine rows", {0, 0}},
        {"combine rows", {0, 1}}, /* rows to choose of; copies */
        {"gather rows", {0, 0}},
        {"gather rows", {0, 2}}, /* rows to choose of */
        {"grouped quantize", {0, 1}},
        {"grouped quantize", {1, ANY}}, /* groups; room */
        {"pad groups", {1, 1}},         /* room */
        {"shard amax", {0, 0}},
        {"shard quantize", {0, 0}}, /* any part of a weight */
        {"squares", {0, 0}},        /* any gradient */
        {"shard quantize", {1, 0}}, /* room */
        {"grouped gemm", {0, 0}},
        {"grouped gemm", {0, 1}}, /* room, in planes, */
        {"grouped gemm", {0, 2}},
        {"grouped gemm", {0, 3}}, /* in matrices, */
        {"grouped gemm", {1, 0}}, /* and behind the last */
    };
    for (size_t i = 0; i < sizeof free_ones / sizeof *free_ones; i++) {
        const slot f = free_ones[i].slot;
        if (strcmp(free_ones[i].op, k->op->name) == 0 && f.is_output == s.is_output &&
            (f.number == ANY || f.number == s.number))
            return 1;
    }
    return 0;
}

static void check_shape(call *k, slot s, int64_t more_rows, int64_t more_cols) {
    tn_tensor_info like = info_of(tensor_of(&k->right, s));
    like.rows += more_rows, like.cols += more_cols;
    tn_tensor shape = make(&device, &like, 1);
    give(k, s, shape);
    expect_refused(k, 1u << TN_INVALID_ARGUMENT, more_rows ? "a row more" : "a column more");
    gpu_destroy(&device, shape);
}

static void check_absent(call *k, slot s) {
    const tn_tensor_info like = info_of(tensor_of(&k->right, s));
    tn_tensor absent = make(&device, &like, 0);
    give(k, s, absent);
    expect_refused(k, 1u << TN_INVALID_STATE, "a plane that is not there");
    gpu_destroy(&device, absent);
}

/* ---- aliases -------------------------------------------------------------------------------- */

static int are_alike(tn_tensor x, tn_tensor y) {
    const tn_tensor_info a = info_of(x), b = info_of(y);
    return a.format == b.format && a.dtype == b.dtype && a.rows == b.rows && a.cols == b.cols;
}

/* The output is every other operand of its kind in turn. It is leased, or the op has compared the
 * handles, or a plane that is to stay with a skip flag is no longer valid as it is written. */
static void check_aliases(call *k, slot s, const slot *slots, int count) {
    const unsigned refused_twice =
        1u << TN_IN_USE | 1u << TN_INVALID_ARGUMENT | 1u << TN_INVALID_STATE;
    const tn_tensor tensor = tensor_of(&k->right, s);
    for (int i = 0; i < count; i++) {
        const tn_tensor with = tensor_of(&k->right, slots[i]);
        if (with.value == tensor.value || !are_alike(with, tensor)) continue;
        give(k, s, with);
        expect_refused(k, refused_twice,
                       slots[i].is_output ? "an output twice" : "an input as output");
    }
}

/* ---- all operands of a call ----------------------------------------------------------------- */

/* 1 if the op takes it: it then minds that there is no such tensor. */
static int is_taken(call *k, slot s) {
    const tn_tensor_info like = info_of(tensor_of(&k->right, s));
    tn_tensor gone = make(&device, &like, 0);
    gpu_destroy(&device, gone);
    give(k, s, gone);
    const tn_status got = k->op->launch(&device, &k->c, &k->given);
    k->given = k->right;
    battery_poison(&device, &k->right);
    return got != TN_OK;
}

enum { SLOTS_MAX = BATTERY_INPUTS_MAX + BATTERY_OUTPUTS_MAX };

static int slots_of(call *k, slot slots[SLOTS_MAX]) {
    int count = 0;
    for (int i = 0; i < k->right.in_count; i++) {
        if (!k->right.in[i].value) continue; /* what this way of the op does without */
        const int is_skip = k->right.in[i].value == k->right.skip.value;
        slots[count] = (slot){0, is_skip ? -1 : i};
        count += is_taken(k, slots[count]);
    }
    for (int i = 0; i < k->right.out_count; i++) {
        slots[count] = (slot){1, i};
        count += is_taken(k, slots[count]);
    }
    return count;
}

/* What the op reads must be there, and so must what a skip flag may leave as it is. */
static int must_be_there(const call *k, slot s) {
    if (!s.is_output) return 1;
    const battery_output *out = &k->right.out[s.number];
    return k->right.skip.value || out->initial.value || out->is_derived;
}

static void check_call(call *k) {
    slot slots[SLOTS_MAX];
    const int count = slots_of(k, slots);
    k->has_derived = k->right.out[0].is_derived;
    if (!k->has_derived) k->before = battery_fetch(&device, &k->right);
    for (int i = 0; i < count; i++) {
        check_stale(k, slots[i]);
        check_elsewhere(k, slots[i]);
        check_kind(k, slots[i]);
        if (!may_vary(k, slots[i])) check_shape(k, slots[i], 1, 0);
        if (!may_vary(k, slots[i])) check_shape(k, slots[i], 0, 1);
        if (must_be_there(k, slots[i])) check_absent(k, slots[i]);
        if (slots[i].is_output) check_aliases(k, slots[i], slots, count);
    }
    if (!k->has_derived) battery_results_end(&k->right, &k->before);
}

static void check_op(const battery_op *op) {
    for (unsigned i = 0; i < CALLS; i++) {
        call k = {.op = op, .c = {ROWS, COLS, GPU_FILL_NORMAL, 31 + i, i * 7 % op->ways, NULL}};
        k.right = battery_prepare(&device, op, &k.c);
        k.given = k.right;
        check_call(&k);
        battery_end(&device, &k.right);
    }
}

static void every_mistake_is_refused_and_changes_nothing(void **state) {
    (void)state;
    battery_each_op(NULL, check_op);
}

/* ---- nothing to do -------------------------------------------------------------------------- */

static int has_bytes(const battery_output *out) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(out->tensor, out->plane, &layout));
    return layout.data_bytes > 0;
}

/* 1 if nothing that the op makes has a byte; or updates, if it makes nothing. */
static int makes_nothing(const battery_operands *operands) {
    int made = 0, made_bytes = 0, updated_bytes = 0;
    for (int i = 0; i < operands->out_count; i++) {
        const battery_output *out = &operands->out[i];
        made += !out->initial.value;
        if (out->initial.value)
            updated_bytes += has_bytes(out);
        else
            made_bytes += has_bytes(out);
    }
    return made > 0 ? made_bytes == 0 : updated_bytes == 0;
}

static void check_empty(const battery_op *op) {
    static const int64_t shapes[][2] = {{0, COLS}, {ROWS, 0}, {0, 0}};
    for (unsigned i = 0; i < 3 * CALLS; i++) {
        const battery_case c = {shapes[i % 3][0], shapes[i % 3][1], GPU_FILL_NORMAL,
                                70 + i,           i % op->ways,     NULL};
        battery_operands operands = battery_prepare(&device, op, &c);
        const uint64_t launches = emulated_launch_count();
        EXPECT_OK(op->launch(&device, &c, &operands));
        if (makes_nothing(&operands))
            battery_count(op, BATTERY_SKIPPED, emulated_launch_count() == launches);
        battery_end(&device, &operands);
    }
}

static void nothing_is_success_without_a_launch(void **state) {
    (void)state;
    battery_each_op(NULL, check_empty);
    assert_int_equal(battery_failures(BATTERY_SKIPPED), 0);
}

/* Rows of 3 halves: the second begins at 6 bytes. */
static void a_view_that_is_not_aligned_is_refused(void **state) {
    (void)state;
    tn_tensor base = gpu_plain(&device, TN_BF16, 4, 3), view;
    gpu_poison(&device, base, TN_PLANE_DATA);
    tn_tensor other_rows = gpu_plain(&device, TN_BF16, 1, 3);
    gpu_poison(&device, other_rows, TN_PLANE_DATA);
    EXPECT_OK(tn_tensor_view_rows(base, 1, 1, device.scope, &view));
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    tn_axpy_args axpy = TN_AXPY_ARGS_INIT;
    const uint64_t launches = emulated_launch_count();
    convert.x = axpy.x = view, convert.y = axpy.y = other_rows;
    assert_int_equal(tn_convert(&convert, device.stream), TN_INVALID_ARGUMENT);
    assert_int_equal(tn_axpy(&axpy, device.stream), TN_INVALID_ARGUMENT);
    convert.x = axpy.x = other_rows, convert.y = axpy.y = view;
    assert_int_equal(tn_convert(&convert, device.stream), TN_INVALID_ARGUMENT);
    assert_int_equal(tn_axpy(&axpy, device.stream), TN_INVALID_ARGUMENT);
    assert_int_equal(emulated_launch_count(), launches);
    tn_plane_state state_of;
    EXPECT_OK(tn_plane_state_get(base, TN_PLANE_DATA, &state_of));
    assert_int_equal(state_of, TN_PLANE_VALID);
    gpu_destroy(&device, view);
    gpu_destroy(&device, base);
    gpu_destroy(&device, other_rows);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mistake_is_refused_and_changes_nothing),
        cmocka_unit_test(nothing_is_success_without_a_launch),
        cmocka_unit_test(a_view_that_is_not_aligned_is_refused),
    };
    scripted_cublaslt_begin();
    gpu_open(&device);
    gpu_open(&other);
    battery_look_for_products(&device);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    battery_print_table("mistakes refused");
    if (failures == 0) {
        gpu_close(&other);
        gpu_close(&device);
    }
    return failures;
}
