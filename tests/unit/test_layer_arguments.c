/* What the Linear layer refuses: one row a mistake, with the exact status, the words, and nothing
 * changed. Each row puts one wrong tensor, number or scope in one place of arguments that are
 * right. */
#include "test_ops.h"

#include <stddef.h>
#include <string.h>

#include "tenure_layers.h"
#include "tenure_lifetime.h"

enum { ROWS = 64, IN = 96, OUT = 300 };

typedef enum which {
    NONE, /* {0} */
    STALE,
    X,           /* bf16 ROWS x IN, valid, as are all that no name says otherwise of */
    X_FP32,      /* the same shape */
    X_WIDE,      /* a column more */
    DY,          /* bf16 ROWS x OUT */
    DX,          /* fp32 ROWS x IN */
    Y,           /* bf16 ROWS x OUT */
    Y_BUSY,      /* the same under a WRITE lease */
    X_BUSY,      /* bf16 ROWS x IN under a WRITE lease */
    WEIGHT,      /* 2D OUT x IN, ROW, trainable */
    FROZEN,      /* the same, frozen */
    WEIGHT_NEW,  /* the same without planes */
    WEIGHT_E5M2, /* ROW in E5M2 */
    TENSOR,      /* one scale, ROW */
    MXFP8,       /* a format without a recipe */
    VECTORS,     /* 1D OUT x IN */
    SOURCE,      /* bf16 OUT x IN */
    SOURCE_FP32,
    DWEIGHT,     /* fp32 OUT x IN */
    DWEIGHT_NEW, /* the same, nothing in it */
    BIAS,        /* fp32 OUT */
    BIAS_MORE,   /* one more */
    FLAG,        /* fp32, one */
    SAVED,       /* 1D ROWS x IN, COL */
    SAVED_TALL,  /* a row more */
    SAVED_FP32,  /* with scales that are no powers of two */
    SAVED_E5M2,
    BYTES,
    ELSEWHERE, /* bf16 ROWS x IN on another device */
    WHICH_COUNT
} which;

typedef struct fixture {
    test_ops ops, other;
    tn_scope op, saved, closed;
    tn_tensor tensor[WHICH_COUNT];
    tn_lease busy[2];
} fixture;

static tn_tensor plain(const test_ops *ops, tn_dtype dtype, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_plain(ops->scope, dtype, rows, cols);
    test_declare_valid(ops, tensor, TN_PLANE_DATA);
    return tensor;
}

static tn_tensor quantized(const fixture *f, tn_format format, tn_dtype dtype, tn_scale_mode mode,
                           int64_t rows, tn_plane plane) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    config.format = format;
    config.dtype = dtype;
    config.scale_mode = mode;
    config.rank = 2;
    config.shape[0] = rows, config.shape[1] = IN;
    EXPECT_OK(tn_tensor_create(f->ops.scope, &config, &tensor));
    if (plane != TN_PLANE_DATA) test_declare_valid(&f->ops, tensor, plane);
    return tensor;
}

static void make_plain(fixture *f) {
    tn_tensor *t = f->tensor;
    const test_ops *ops = &f->ops;
    t[X] = plain(ops, TN_BF16, ROWS, IN), t[X_FP32] = plain(ops, TN_FP32, ROWS, IN);
    t[X_WIDE] = plain(ops, TN_BF16, ROWS, IN + 1), t[X_BUSY] = plain(ops, TN_BF16, ROWS, IN);
    t[DY] = plain(ops, TN_BF16, ROWS, OUT), t[DX] = plain(ops, TN_FP32, ROWS, IN);
    t[Y] = plain(ops, TN_BF16, ROWS, OUT), t[Y_BUSY] = plain(ops, TN_BF16, ROWS, OUT);
    t[SOURCE] = plain(ops, TN_BF16, OUT, IN), t[SOURCE_FP32] = plain(ops, TN_FP32, OUT, IN);
    t[DWEIGHT] = plain(ops, TN_FP32, OUT, IN);
    t[DWEIGHT_NEW] = test_plain(ops->scope, TN_FP32, OUT, IN);
    t[BIAS] = plain(ops, TN_FP32, 1, OUT), t[BIAS_MORE] = plain(ops, TN_FP32, 1, OUT + 1);
    t[FLAG] = plain(ops, TN_FP32, 1, 1), t[BYTES] = plain(ops, TN_BYTE, ROWS, IN);
    t[ELSEWHERE] = plain(&f->other, TN_BF16, ROWS, IN);
    t[STALE] = plain(ops, TN_BF16, ROWS, IN);
    EXPECT_OK(tn_tensor_destroy(t[STALE], ops->stream));
}

static void make_quantized(fixture *f) {
    const tn_format vectors = TN_FORMAT_FP8_BLOCK_1D, tiles = TN_FORMAT_FP8_BLOCK_2D;
    const tn_scale_mode pow2 = TN_SCALE_POW2;
    tn_tensor *t = f->tensor;
    t[WEIGHT] = quantized(f, tiles, TN_E4M3, pow2, OUT, TN_PLANE_ROW);
    t[FROZEN] = quantized(f, tiles, TN_E4M3, pow2, OUT, TN_PLANE_ROW);
    EXPECT_OK(tn_tensor_set_frozen(t[FROZEN], 1));
    t[WEIGHT_NEW] = quantized(f, tiles, TN_E4M3, pow2, OUT, TN_PLANE_DATA);
    t[WEIGHT_E5M2] = quantized(f, tiles, TN_E5M2, pow2, OUT, TN_PLANE_ROW);
    t[TENSOR] = quantized(f, TN_FORMAT_FP8_TENSOR, TN_E4M3, pow2, OUT, TN_PLANE_ROW);
    t[MXFP8] = quantized(f, TN_FORMAT_MXFP8, TN_E4M3, pow2, OUT, TN_PLANE_ROW);
    t[VECTORS] = quantized(f, vectors, TN_E4M3, pow2, OUT, TN_PLANE_ROW);
    t[SAVED] = quantized(f, vectors, TN_E4M3, pow2, ROWS, TN_PLANE_COL);
    t[SAVED_TALL] = quantized(f, vectors, TN_E4M3, pow2, ROWS + 1, TN_PLANE_COL);
    t[SAVED_FP32] = quantized(f, vectors, TN_E4M3, TN_SCALE_FP32, ROWS, TN_PLANE_COL);
    t[SAVED_E5M2] = quantized(f, vectors, TN_E5M2, pow2, ROWS, TN_PLANE_COL);
}

static fixture open_fixture(void) {
    fixture f = {.ops = test_ops_open_host()};
    tn_plane_view view;
    f.other = test_ops_open_host();
    f.op = test_ops_scope(&f.ops, TN_SCOPE_OP, "op");
    f.saved = test_ops_scope(&f.ops, TN_SCOPE_SAVED, "saved");
    f.closed = test_ops_scope(&f.ops, TN_SCOPE_OP, "closed");
    EXPECT_OK(tn_scope_close(f.closed));
    make_plain(&f);
    make_quantized(&f);
    for (int i = 0; i < 2; i++) {
        tn_tensor busy = f.tensor[i ? Y_BUSY : X_BUSY];
        EXPECT_OK(tn_lease_begin(busy, TN_PLANE_DATA, TN_WRITE, f.ops.stream, &f.busy[i], &view));
    }
    return f;
}

static void close_fixture(fixture *f) {
    EXPECT_OK(tn_lease_end(f->busy[0]));
    EXPECT_OK(tn_lease_end(f->busy[1]));
    test_ops_close_host(&f->other);
    test_ops_close_host(&f->ops);
}

/* ---- right arguments ------------------------------------------------------------------------- */

typedef enum layer { FORWARD, BACKWARD, LAYER_COUNT } layer;

typedef struct call {
    tn_linear_forward_args forward;
    tn_linear_backward_args backward;
    tn_linear_saved saved;
    tn_delayed_gradient delayed;
    int has_no_saved, has_no_delayed;
} call;

static call right_call(const fixture *f, layer which_layer) {
    const tn_tensor *t = f->tensor;
    call c = {.forward = TN_LINEAR_FORWARD_ARGS_INIT, .backward = TN_LINEAR_BACKWARD_ARGS_INIT};
    c.forward.x = t[X], c.forward.w.weight = t[WEIGHT], c.forward.w.bias = t[BIAS];
    c.forward.w.source = t[SOURCE], c.forward.w.skip = t[FLAG], c.forward.y = t[Y];
    c.forward.common.scope = f->op, c.forward.common.saved_scope = f->saved;
    c.backward.dy = t[DY], c.backward.w.weight = t[WEIGHT], c.backward.dx = t[DX];
    c.backward.gradient.dweight = t[DWEIGHT], c.backward.gradient.dbias = t[BIAS];
    c.backward.gradient.accumulate = 1;
    c.backward.common.scope = f->op, c.backward.common.saved_scope = f->saved;
    if (which_layer == BACKWARD) c.saved.x = t[SAVED];
    return c;
}

static tn_status make_call(layer which_layer, call *c, tn_stream stream) {
    tn_linear_saved *saved = c->has_no_saved ? NULL : &c->saved;
    if (which_layer == FORWARD) return tn_linear_forward(&c->forward, saved, stream);
    return tn_linear_backward(&c->backward, saved, c->has_no_delayed ? NULL : &c->delayed, stream);
}

/* ---- wrong ones ------------------------------------------------------------------------------ */

typedef struct mistake {
    layer layer;
    size_t offset; /* in call */
    int wrong;     /* a `which`, or a number */
    int is_number;
    tn_status status;
    const char *words;
} mistake;

#define AT(field) offsetof(call, field)
#define BAD       TN_INVALID_ARGUMENT

static const mistake mistakes[] = {
    {FORWARD, AT(forward.x), NONE, 0, TN_STALE_HANDLE, ""},
    {FORWARD, AT(forward.x), STALE, 0, TN_STALE_HANDLE, ""},
    {FORWARD, AT(forward.x), MXFP8, 0, BAD, "x (tensor"},
    {FORWARD, AT(forward.x), SAVED_FP32, 0, BAD, "has scale mode"},
    {FORWARD, AT(forward.x), SAVED_E5M2, 0, BAD, "x (tensor"},
    {FORWARD, AT(forward.x), SAVED, 0, TN_UNSUPPORTED, "ROW"},
    {FORWARD, AT(forward.x), BYTES, 0, BAD, "x (tensor"},
    {FORWARD, AT(forward.x), X_WIDE, 0, BAD, "its columns are x's"},
    {FORWARD, AT(forward.x), X_BUSY, 0, TN_IN_USE, "WRITE"},
    {FORWARD, AT(forward.x), ELSEWHERE, 0, BAD, "another device"},
    {FORWARD, AT(forward.w.weight), NONE, 0, TN_STALE_HANDLE, ""},
    {FORWARD, AT(forward.w.weight), SOURCE, 0, BAD, "w.source is given, but w.weight"},
    {FORWARD, AT(forward.w.weight), VECTORS, 0, TN_UNSUPPORTED, "w.weight (tensor"},
    {FORWARD, AT(forward.w.weight), MXFP8, 0, TN_UNSUPPORTED, "w.weight (tensor"},
    {FORWARD, AT(forward.w.weight), BYTES, 0, BAD, "w.weight (tensor"},
    {FORWARD, AT(forward.w.bias), BIAS_MORE, 0, BAD, "w.bias (tensor"},
    {FORWARD, AT(forward.w.bias), WEIGHT, 0, BAD, "w.bias (tensor"},
    {FORWARD, AT(forward.w.source), NONE, 0, BAD, "w.skip is given, but no w.source"},
    {FORWARD, AT(forward.w.source), X, 0, BAD, "w.source (tensor"},
    {FORWARD, AT(forward.w.source), WEIGHT, 0, BAD, "w.source (tensor"},
    {FORWARD, AT(forward.w.skip), BIAS, 0, BAD, "w.skip (tensor"},
    {FORWARD, AT(forward.w.skip), BYTES, 0, BAD, "w.skip (tensor"},
    {FORWARD, AT(forward.w.weight), WEIGHT_NEW, 0, TN_INVALID_STATE, "skip flag"},
    {FORWARD, AT(forward.y), X, 0, BAD, "y (tensor"},
    {FORWARD, AT(forward.y), BYTES, 0, BAD, "y (tensor"},
    {FORWARD, AT(forward.y), Y_BUSY, 0, TN_IN_USE, "WRITE"},
    {FORWARD, AT(forward.common.next_weight), VECTORS, 0, BAD, "common.next_weight (tensor"},
    {FORWARD, AT(forward.common.next_weight), STALE, 0, TN_STALE_HANDLE, ""},
    {FORWARD, AT(forward.common.gradient_dtype), TN_BF16, 1, BAD, "common.gradient_dtype is 1"},
    {FORWARD, AT(forward.common.precision), 3, 1, BAD, "common.precision is 3"},
    {FORWARD, AT(forward.common.recompute), 2, 1, BAD, "common.recompute is 2"},
    {FORWARD, AT(has_no_saved), 1, 1, BAD, "saved is NULL"},

    {BACKWARD, AT(backward.dy), X, 0, BAD, "its columns are weight's rows"},
    {BACKWARD, AT(backward.dy), VECTORS, 0, BAD, "dy (tensor"},
    {BACKWARD, AT(backward.w.weight), FROZEN, 0, BAD, "gradient.dweight is given, but w.weight"},
    {BACKWARD, AT(backward.w.weight), MXFP8, 0, TN_UNSUPPORTED, "w.weight (tensor"},
    {BACKWARD, AT(backward.w.weight), WEIGHT_NEW, 0, TN_INVALID_STATE, ""},
    {BACKWARD, AT(backward.w.weight), TENSOR, 0, BAD, "saved->x (tensor"},
    {BACKWARD, AT(backward.w.weight), SOURCE_FP32, 0, BAD, "both must be one type"},
    {BACKWARD, AT(backward.w.weight), SOURCE, 0, BAD, "x is {0}, but gradient.dweight needs it"},
    {BACKWARD, AT(saved.x), NONE, 0, BAD, "saved->x, which is {0}"},
    {BACKWARD, AT(saved.x), SAVED_TALL, 0, BAD, "saved->x (tensor"},
    {BACKWARD, AT(saved.x), SAVED_FP32, 0, BAD, "saved->x (tensor"},
    {BACKWARD, AT(saved.x), SAVED_E5M2, 0, BAD, "saved->x (tensor"},
    {BACKWARD, AT(saved.x), X, 0, BAD, "saved->x (tensor"},
    {BACKWARD, AT(backward.dx), X_WIDE, 0, BAD, "dx (tensor"},
    {BACKWARD, AT(backward.dx), VECTORS, 0, BAD, "dx (tensor"},
    {BACKWARD, AT(backward.dx), X_BUSY, 0, TN_IN_USE, "WRITE"},
    {BACKWARD, AT(backward.gradient.dweight), X, 0, BAD, "gradient.dweight (tensor"},
    {BACKWARD, AT(backward.gradient.dweight), WEIGHT, 0, BAD, "gradient.dweight (tensor"},
    {BACKWARD, AT(backward.gradient.dweight), DWEIGHT_NEW, 0, TN_INVALID_STATE, ""},
    {BACKWARD, AT(backward.w.bias), BIAS, 0, BAD, "gradient.dbias and w.bias share memory"},
    {BACKWARD, AT(backward.gradient.dbias), BIAS_MORE, 0, BAD, "gradient.dbias (tensor"},
    {BACKWARD, AT(backward.gradient.delay), 2, 1, BAD, "delay of gradient.dweight is 2"},
    {BACKWARD, AT(backward.common.precision), TN_BACKWARD_HIGH_PRECISION, 1, BAD,
     "w.source is {0}"},
    {BACKWARD, AT(backward.common.precision), TN_BACKWARD_DEQUANTIZED, 1, TN_INVALID_STATE, "ROW"},
};

typedef struct states {
    tn_ledger ledger;
    tn_plane_state plane[WHICH_COUNT][TN_PLANE_COUNT];
} states;

static states states_of(const fixture *f) {
    states s = {.ledger = test_ledger(f->ops.scope)};
    for (int w = X; w < WHICH_COUNT; w++) {
        for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
            if (tn_plane_state_get(f->tensor[w], (tn_plane)plane, &s.plane[w][plane]) != TN_OK)
                s.plane[w][plane] = TN_PLANE_ABSENT;
        }
    }
    return s;
}

static void expect_nothing_changed(const fixture *f, const states *before, int index) {
    const states after = states_of(f);
    test_expect_same_ledger(&before->ledger, &after.ledger);
    for (int w = X; w < WHICH_COUNT; w++) {
        for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
            if (before->plane[w][plane] == after.plane[w][plane]) continue;
            fail_msg("mistake %d: tensor %d, plane %d was %d and is %d", index, w, plane,
                     (int)before->plane[w][plane], (int)after.plane[w][plane]);
        }
    }
}

static void expect_refused(const fixture *f, layer which_layer, call *c, tn_status expected,
                           const char *words, int index) {
    const states before = states_of(f);
    const tn_linear_saved saved = c->saved;
    tn_status status = make_call(which_layer, c, f->ops.stream);
    if (status != expected || !strstr(tn_error_last(), words)) {
        fail_msg("mistake %d: %s, \"%s\"; expected %s, \"%s\"", index, tn_status_name(status),
                 tn_error_last(), tn_status_name(expected), words);
    }
    expect_nothing_changed(f, &before, index);
    assert_memory_equal(&saved, &c->saved, sizeof saved);
    assert_int_equal(c->delayed.dweight.value, 0);
}

static void every_mistake_has_its_status_and_changes_nothing(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        const mistake *m = &mistakes[i];
        call c = right_call(&f, m->layer);
        const int number = m->wrong;
        if (m->is_number)
            memcpy((char *)&c + m->offset, &number, sizeof number);
        else
            memcpy((char *)&c + m->offset, &f.tensor[m->wrong], sizeof(tn_tensor));
        expect_refused(&f, m->layer, &c, m->status, m->words, (int)i);
    }
    close_fixture(&f);
}

/* The rows above prove little if the arguments that they change were wrong already. */
static void the_right_arguments_are_taken(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (int i = 0; i < LAYER_COUNT; i++) {
        call c = right_call(&f, (layer)i);
        EXPECT_OK(make_call((layer)i, &c, f.ops.stream));
        assert_int_equal(c.saved.x.value != 0, i == FORWARD);
    }
    close_fixture(&f);
}

static void scopes_must_be_there_and_alive(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (int i = 0; i < 4; i++) {
        const layer which_layer = i / 2 ? BACKWARD : FORWARD;
        call c = right_call(&f, which_layer);
        tn_scope *scope = i / 2 ? &c.backward.common.scope : &c.forward.common.scope;
        *scope = i % 2 ? f.closed : (tn_scope){0};
        expect_refused(&f, which_layer, &c, i % 2 ? TN_STALE_HANDLE : BAD, "", i);
    }
    call c = right_call(&f, FORWARD);
    c.forward.common.saved_scope = f.closed;
    expect_refused(&f, FORWARD, &c, TN_STALE_HANDLE, "", 4);
    close_fixture(&f);
}

/* A plane that a READ lease derived from the other one, of what was saved or is the caller's. */
static void what_was_derived_of_operands_goes_after_a_failure(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (int i = 0; i < 3; i++) {
        tn_tensor x = test_fp8(f.ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, ROWS, IN);
        tn_tensor dy = test_fp8(f.ops.scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, ROWS, OUT);
        test_declare_valid(&f.ops, x, TN_PLANE_ROW);
        test_declare_valid(&f.ops, dy, TN_PLANE_ROW);
        call c = right_call(&f, BACKWARD);
        c.backward.w.weight = f.tensor[TENSOR];
        c.backward.dx = f.tensor[X_BUSY];
        c.saved.x = i == 0 ? x : (tn_tensor){0};
        if (i > 0) c.backward.x = x;
        if (i > 1) c.backward.dy = dy, c.backward.gradient.dbias = (tn_tensor){0};
        expect_refused(&f, BACKWARD, &c, TN_IN_USE, "", i);
        assert_int_equal(test_state(x, TN_PLANE_COL), TN_PLANE_ABSENT);
        assert_int_equal(test_state(dy, TN_PLANE_COL), TN_PLANE_ABSENT);
        c.backward.dx = f.tensor[DX];
        EXPECT_OK(make_call(BACKWARD, &c, f.ops.stream));
    }
    close_fixture(&f);
}

/* Nothing is made in it: on the call's stream it could not be destroyed again. */
static void scopes_are_of_the_tensors_device(void **state) {
    (void)state;
    fixture f = open_fixture();
    const tn_ledger before = test_ledger(f.other.scope);
    for (int i = 0; i < 4; i++) {
        const layer which_layer = i / 2 ? BACKWARD : FORWARD;
        call c = right_call(&f, which_layer);
        tn_layer_common *common = which_layer == FORWARD ? &c.forward.common : &c.backward.common;
        c.backward.gradient.delay = i == 3; /* so that something is kept */
        *(i % 2 ? &common->saved_scope : &common->scope) = f.other.scope;
        expect_refused(&f, which_layer, &c, BAD, "of another device", i);
        const tn_ledger after = test_ledger(f.other.scope);
        test_expect_same_ledger(&before, &after);
    }
    close_fixture(&f);
}

static void sizes_and_structs_must_be_right(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (int i = 0; i < LAYER_COUNT; i++) {
        call c = right_call(&f, (layer)i);
        c.forward.size = c.backward.size = 8;
        expect_refused(&f, (layer)i, &c, BAD, "size is 8", i);
    }
    EXPECT_STATUS(tn_linear_forward(NULL, NULL, f.ops.stream), BAD);
    EXPECT_STATUS(tn_linear_backward(NULL, NULL, NULL, f.ops.stream), BAD);
    EXPECT_STATUS(tn_weight_gradient(NULL, f.op, f.ops.stream), BAD);
    close_fixture(&f);
}

/* ---- options that do not go together --------------------------------------------------------- */

static void two_e5m2_operands_are_unsupported(void **state) {
    (void)state;
    fixture f = open_fixture();
    call c = right_call(&f, BACKWARD);
    c.backward.w.weight = f.tensor[WEIGHT_E5M2];
    c.backward.common.gradient_dtype = TN_E5M2;
    expect_refused(&f, BACKWARD, &c, TN_UNSUPPORTED, "w.weight (tensor", 0);
    close_fixture(&f);
}

static void a_delayed_gradient_needs_a_place_and_a_scope(void **state) {
    (void)state;
    fixture f = open_fixture();
    call c = right_call(&f, BACKWARD);
    c.backward.gradient.delay = 1;
    c.has_no_delayed = 1;
    expect_refused(&f, BACKWARD, &c, BAD, "delayed is NULL", 0);
    c.has_no_delayed = 0;
    c.backward.common.saved_scope = (tn_scope){0};
    expect_refused(&f, BACKWARD, &c, BAD, "common.saved_scope is {0}", 1);
    c.backward.common.saved_scope = f.saved;
    c.backward.gradient.dweight = (tn_tensor){0};
    expect_refused(&f, BACKWARD, &c, BAD, "gradient.dweight is {0}, but is to be delayed", 2);
    c = right_call(&f, BACKWARD);
    c.backward.gradient.delay = 1;
    EXPECT_OK(make_call(BACKWARD, &c, f.ops.stream));
    c.saved.x = f.tensor[SAVED];
    EXPECT_STATUS(make_call(BACKWARD, &c, f.ops.stream), BAD);
    EXPECT_ERROR_HAS("delayed still holds another gradient");
    EXPECT_OK(tn_weight_gradient(&c.delayed, f.op, f.ops.stream));
    EXPECT_STATUS(tn_weight_gradient(&c.delayed, f.op, f.ops.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("delayed->dweight is {0}");
    close_fixture(&f);
}

/* Without dx nothing reads the weight or its source, which the gradient would take the place of. */
static void a_gradient_is_not_its_own_weight(void **state) {
    (void)state;
    fixture f = open_fixture();
    call c = right_call(&f, BACKWARD);
    c.backward.w.weight = c.backward.gradient.dweight = f.tensor[SOURCE];
    c.backward.x = f.tensor[X];
    c.backward.dx = (tn_tensor){0};
    c.backward.gradient.accumulate = 0;
    expect_refused(&f, BACKWARD, &c, BAD, "and w.weight share memory", 0);
    EXPECT_OK(
        tn_tensor_view_rows(f.tensor[SOURCE], 0, OUT, f.ops.scope, &c.backward.gradient.dweight));
    expect_refused(&f, BACKWARD, &c, BAD, "and w.weight share memory", 1);
    c = right_call(&f, BACKWARD);
    c.backward.w.source = c.backward.gradient.dweight;
    c.backward.dx = (tn_tensor){0};
    expect_refused(&f, BACKWARD, &c, BAD, "and w.source share memory", 2);
    c.backward.w.source = f.tensor[SOURCE_FP32];
    /* Backward does not read it. */
    EXPECT_OK(tn_tensor_destroy(f.tensor[SOURCE_FP32], f.ops.stream));
    EXPECT_OK(make_call(BACKWARD, &c, f.ops.stream));
    close_fixture(&f);
}

/* What the call makes for it is to outlive the call. */
static void a_delayed_operand_that_is_made_needs_a_scope(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (int i = 0; i < 3; i++) {
        call c = right_call(&f, BACKWARD);
        c.saved.x = (tn_tensor){0};
        c.backward.x = f.tensor[X];
        c.backward.w.source = f.tensor[SOURCE];
        c.backward.gradient.delay = 1;
        c.backward.common.recompute = 1;
        c.backward.common.saved_scope = (tn_scope){0};
        c.backward.common.precision = (tn_backward_precision)i;
        if (i == TN_BACKWARD_HIGH_PRECISION)
            EXPECT_OK(make_call(BACKWARD, &c, f.ops.stream));
        else
            expect_refused(&f, BACKWARD, &c, BAD, "common.saved_scope is {0}", i);
    }
    close_fixture(&f);
}

/* What is derived ahead is derived beside the call. */
static void a_side_is_another_stream_than_the_calls(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (int i = 0; i < LAYER_COUNT; i++) {
        call c = right_call(&f, (layer)i);
        tn_layer_common *common = i == FORWARD ? &c.forward.common : &c.backward.common;
        common->next_weight = f.tensor[TENSOR];
        expect_refused(&f, (layer)i, &c, BAD, "but common.side is NULL", 0);
        common->side = f.ops.stream;
        expect_refused(&f, (layer)i, &c, BAD, "common.side is the call's own stream", 1);
        common->next_weight = (tn_tensor){0};
        expect_refused(&f, (layer)i, &c, BAD, "common.side is the call's own stream", 2);
        common->next_weight = f.tensor[SOURCE], common->side = NULL;
        EXPECT_OK(make_call((layer)i, &c, f.ops.stream));
    }
    close_fixture(&f);
}

/* What is multiplied as it is must be of one type: named operand by operand. */
static void high_precision_needs_operands_of_one_type(void **state) {
    (void)state;
    fixture f = open_fixture();
    call c = right_call(&f, BACKWARD);
    c.backward.common.precision = TN_BACKWARD_HIGH_PRECISION;
    c.backward.w.source = f.tensor[SOURCE_FP32];
    expect_refused(&f, BACKWARD, &c, BAD, "w.source (tensor", 0);
    c.backward.w.source = f.tensor[SOURCE];
    expect_refused(&f, BACKWARD, &c, BAD, "x is {0}", 1);
    c.backward.x = f.tensor[X_FP32];
    expect_refused(&f, BACKWARD, &c, BAD, "x (tensor", 2);
    c.backward.x = f.tensor[X_WIDE];
    expect_refused(&f, BACKWARD, &c, BAD, "dy's rows x weight's columns", 3);
    c.backward.x = f.tensor[X];
    EXPECT_OK(make_call(BACKWARD, &c, f.ops.stream));
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mistake_has_its_status_and_changes_nothing),
        cmocka_unit_test(the_right_arguments_are_taken),
        cmocka_unit_test(scopes_must_be_there_and_alive),
        cmocka_unit_test(scopes_are_of_the_tensors_device),
        cmocka_unit_test(what_was_derived_of_operands_goes_after_a_failure),
        cmocka_unit_test(sizes_and_structs_must_be_right),
        cmocka_unit_test(two_e5m2_operands_are_unsupported),
        cmocka_unit_test(a_delayed_gradient_needs_a_place_and_a_scope),
        cmocka_unit_test(a_gradient_is_not_its_own_weight),
        cmocka_unit_test(a_delayed_operand_that_is_made_needs_a_scope),
        cmocka_unit_test(a_side_is_another_stream_than_the_calls),
        cmocka_unit_test(high_precision_needs_operands_of_one_type),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
