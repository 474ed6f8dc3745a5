/* What each op refuses: one row a mistake, with the exact status, the words, and nothing changed.
 *
 * Every op has arguments that are right; a row puts one wrong tensor in one place of them. */
#include "test_ops.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

enum { ROWS = 64, COLS = 96, OUT = 300 };

typedef enum which {
    NONE, /* {0} */
    STALE,
    BF16,         /* ROWS x COLS, valid, as are all that no name says otherwise of */
    FP32,         /* the same shape */
    BF16_TALL,    /* one row more */
    BF16_WIDE,    /* one column more */
    BF16_OUT,     /* ROWS x OUT */
    BF16_OUT_IN,  /* OUT x COLS */
    BYTES,        /* ROWS bytes */
    BYTES_MORE,   /* one more */
    TABLE,        /* bf16 256 x COLS */
    TABLE_FEW,    /* bf16 255 x COLS */
    TABLE_FP32,   /* fp32 256 x COLS */
    LOSS,         /* fp32 ROWS */
    VECTORS,      /* 1D ROWS x COLS, ROW and COL */
    VECTORS_OUT,  /* 1D ROWS x OUT, ROW and COL */
    VECTORS_E5M2, /* 1D ROWS x COLS, E5M2, ROW */
    VECTORS_FP32, /* 1D ROWS x COLS with fp32 scales */
    VECTORS_TALL, /* 1D, one row more */
    VECTORS_NEW,  /* 1D ROWS x COLS, without planes */
    TILES,        /* 2D OUT x COLS, ROW, trainable */
    TILES_FROZEN,
    TILES_E5M2,  /* 2D OUT x COLS, E5M2, ROW */
    TILES_SMALL, /* 2D ROWS x COLS, ROW */
    TILES_NEW,   /* 2D OUT x COLS, without planes */
    BUSY,        /* bf16 ROWS x COLS under a WRITE lease */
    BUSY_OUT,    /* bf16 ROWS x OUT under a WRITE lease */
    ELSEWHERE,   /* bf16 ROWS x COLS on another device */
    WHICH_COUNT
} which;

typedef struct fixture {
    test_ops ops, other;
    tn_scope op;
    tn_tensor tensor[WHICH_COUNT];
    tn_lease busy, busy_out;
} fixture;

static tn_tensor valid(const test_ops *ops, tn_tensor tensor, int planes) {
    for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
        if (planes & (1 << plane)) test_declare_valid(ops, tensor, (tn_plane)plane);
    }
    return tensor;
}

enum { DATA = 1 << TN_PLANE_DATA, ROW = 1 << TN_PLANE_ROW, COL = 1 << TN_PLANE_COL };

static tn_tensor plain(fixture *f, tn_dtype dtype, int64_t rows, int64_t cols) {
    return valid(&f->ops, test_plain(f->ops.scope, dtype, rows, cols), DATA);
}

/* Both planes of a 1D tensor can only be written at once. */
static tn_tensor vectors(fixture *f, tn_dtype dtype, tn_scale_mode mode, int64_t rows,
                         int64_t cols) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor;
    tn_lease row, col;
    tn_plane_view view;
    config.format = TN_FORMAT_FP8_BLOCK_1D;
    config.dtype = dtype;
    config.scale_mode = mode;
    config.rank = 2;
    config.shape[0] = rows, config.shape[1] = cols;
    EXPECT_OK(tn_tensor_create(f->ops.scope, &config, &tensor));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_WRITE, f->ops.stream, &row, &view));
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_WRITE, f->ops.stream, &col, &view));
    EXPECT_OK(tn_lease_end(row));
    EXPECT_OK(tn_lease_end(col));
    return tensor;
}

static tn_tensor tiles(fixture *f, tn_dtype dtype, int64_t rows, int frozen) {
    tn_tensor tensor = test_fp8(f->ops.scope, TN_FORMAT_FP8_BLOCK_2D, dtype, rows, COLS);
    EXPECT_OK(tn_tensor_set_frozen(tensor, frozen));
    return valid(&f->ops, tensor, ROW);
}

static void make_plain(fixture *f) {
    tn_tensor *t = f->tensor;
    t[BF16] = plain(f, TN_BF16, ROWS, COLS);
    t[FP32] = plain(f, TN_FP32, ROWS, COLS);
    t[BF16_TALL] = plain(f, TN_BF16, ROWS + 1, COLS);
    t[BF16_WIDE] = plain(f, TN_BF16, ROWS, COLS + 1);
    t[BF16_OUT] = plain(f, TN_BF16, ROWS, OUT);
    t[BF16_OUT_IN] = plain(f, TN_BF16, OUT, COLS);
    t[BYTES] = plain(f, TN_BYTE, 1, ROWS);
    t[BYTES_MORE] = plain(f, TN_BYTE, 1, ROWS + 1);
    t[TABLE] = plain(f, TN_BF16, 256, COLS);
    t[TABLE_FEW] = plain(f, TN_BF16, 255, COLS);
    t[TABLE_FP32] = plain(f, TN_FP32, 256, COLS);
    t[LOSS] = plain(f, TN_FP32, 1, ROWS);
}

static fixture open_fixture(void) {
    fixture f = {.ops = test_ops_open_host()};
    tn_tensor *t = f.tensor;
    tn_plane_view view;
    f.other = test_ops_open_host();
    f.op = test_ops_scope(&f.ops, TN_SCOPE_OP, "op");
    make_plain(&f);
    t[STALE] = plain(&f, TN_BF16, ROWS, COLS);
    EXPECT_OK(tn_tensor_destroy(t[STALE], f.ops.stream));
    t[VECTORS] = vectors(&f, TN_E4M3, TN_SCALE_POW2, ROWS, COLS);
    t[VECTORS_OUT] = vectors(&f, TN_E4M3, TN_SCALE_POW2, ROWS, OUT);
    t[VECTORS_E5M2] = vectors(&f, TN_E5M2, TN_SCALE_POW2, ROWS, COLS);
    t[VECTORS_FP32] = vectors(&f, TN_E4M3, TN_SCALE_FP32, ROWS, COLS);
    t[VECTORS_TALL] = vectors(&f, TN_E4M3, TN_SCALE_POW2, ROWS + 1, COLS);
    t[VECTORS_NEW] = test_fp8(f.ops.scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, ROWS, COLS);
    t[TILES] = tiles(&f, TN_E4M3, OUT, 0);
    t[TILES_FROZEN] = tiles(&f, TN_E4M3, OUT, 1);
    t[TILES_E5M2] = tiles(&f, TN_E5M2, OUT, 1);
    t[TILES_SMALL] = tiles(&f, TN_E4M3, ROWS, 1);
    t[TILES_NEW] = test_fp8(f.ops.scope, TN_FORMAT_FP8_BLOCK_2D, TN_E4M3, OUT, COLS);
    t[BUSY] = plain(&f, TN_BF16, ROWS, COLS);
    t[BUSY_OUT] = plain(&f, TN_BF16, ROWS, OUT);
    t[ELSEWHERE] = valid(&f.other, test_plain(f.other.scope, TN_BF16, ROWS, COLS), DATA);
    EXPECT_OK(tn_lease_begin(t[BUSY], TN_PLANE_DATA, TN_WRITE, f.ops.stream, &f.busy, &view));
    EXPECT_OK(
        tn_lease_begin(t[BUSY_OUT], TN_PLANE_DATA, TN_WRITE, f.ops.stream, &f.busy_out, &view));
    return f;
}

static void close_fixture(fixture *f) {
    EXPECT_OK(tn_lease_end(f->busy));
    EXPECT_OK(tn_lease_end(f->busy_out));
    test_ops_close_host(&f->other);
    test_ops_close_host(&f->ops);
}

/* ---- right arguments ----------------------------------------------------------------------- */

typedef enum op {
    QUANTIZE,
    DEQUANTIZE,
    TRANSPOSE,
    FPROP,
    DGRAD,
    WGRAD,
    PLAIN_GEMM,
    AXPY,
    CONVERT,
    EMBED,
    CROSS_ENTROPY,
    OP_COUNT
} op;

typedef union any_args {
    tn_quantize_args quantize;
    tn_dequantize_args dequantize;
    tn_transpose_args transpose;
    tn_gemm_args gemm;
    tn_axpy_args axpy;
    tn_convert_args convert;
    tn_embed_args embed;
    tn_cross_entropy_args cross_entropy;
} any_args;

static any_args gemm_args(const fixture *f, tn_gemm_form form, which a, which b, which d) {
    any_args args = {.gemm = TN_GEMM_ARGS_INIT};
    args.gemm.form = form;
    args.gemm.a = f->tensor[a], args.gemm.b = f->tensor[b], args.gemm.d = f->tensor[d];
    args.gemm.scope = f->op;
    return args;
}

static any_args small_args(const fixture *f, op operation) {
    const tn_tensor *t = f->tensor;
    any_args args;
    switch (operation) {
    case AXPY: args.axpy = (tn_axpy_args){sizeof args.axpy, t[BF16], t[FP32], 1.0f}; break;
    case CONVERT: args.convert = (tn_convert_args){sizeof args.convert, t[FP32], t[BF16]}; break;
    case EMBED: args.embed = (tn_embed_args){sizeof args.embed, t[BYTES], t[TABLE], t[BF16]}; break;
    default:
        args.cross_entropy = (tn_cross_entropy_args){sizeof args.cross_entropy, t[BF16_OUT],
                                                     t[BYTES], t[LOSS], t[BF16_OUT]};
        break;
    }
    return args;
}

static any_args right_args(const fixture *f, op operation) {
    const tn_tensor *t = f->tensor;
    any_args args;
    switch (operation) {
    case QUANTIZE:
        args.quantize = (tn_quantize_args)TN_QUANTIZE_ARGS_INIT;
        args.quantize.src = t[BF16];
        args.quantize.dst = t[VECTORS];
        args.quantize.planes = TN_QUANTIZE_ROW | TN_QUANTIZE_COL;
        return args;
    case DEQUANTIZE:
        args.dequantize =
            (tn_dequantize_args){sizeof args.dequantize, t[VECTORS], TN_PLANE_ROW, t[BF16], {0}};
        return args;
    case TRANSPOSE:
        args.transpose = (tn_transpose_args){sizeof args.transpose, t[TILES], TN_PLANE_COL};
        return args;
    case FPROP: return gemm_args(f, TN_GEMM_FPROP, VECTORS, TILES, BF16_OUT);
    case DGRAD: return gemm_args(f, TN_GEMM_DGRAD, VECTORS_OUT, TILES, BF16);
    case WGRAD: return gemm_args(f, TN_GEMM_WGRAD, VECTORS_OUT, VECTORS, BF16_OUT_IN);
    case PLAIN_GEMM: return gemm_args(f, TN_GEMM_FPROP, BF16, BF16_OUT_IN, BF16_OUT);
    default: return small_args(f, operation);
    }
}

static tn_status call(op operation, const any_args *args, tn_stream stream) {
    switch (operation) {
    case QUANTIZE: return tn_quantize(&args->quantize, stream);
    case DEQUANTIZE: return tn_dequantize(&args->dequantize, stream);
    case TRANSPOSE: return tn_transpose(&args->transpose, stream);
    case FPROP:
    case DGRAD:
    case WGRAD:
    case PLAIN_GEMM: return tn_gemm(&args->gemm, stream);
    case AXPY: return tn_axpy(&args->axpy, stream);
    case CONVERT: return tn_convert(&args->convert, stream);
    case EMBED: return tn_embed(&args->embed, stream);
    default: return tn_cross_entropy(&args->cross_entropy, stream);
    }
}

/* ---- wrong ones ---------------------------------------------------------------------------- */

typedef struct mistake {
    op operation;
    size_t offset; /* of the tensor in the arguments */
    which wrong;
    tn_status status;
    const char *words;
} mistake;

#define AT(arguments, field) offsetof(arguments, field)
#define BAD                  TN_INVALID_ARGUMENT

static const mistake mistakes[] = {
    {QUANTIZE, AT(tn_quantize_args, src), NONE, TN_STALE_HANDLE, ""},
    {QUANTIZE, AT(tn_quantize_args, src), STALE, TN_STALE_HANDLE, ""},
    {QUANTIZE, AT(tn_quantize_args, src), BYTES, BAD, "src"},
    {QUANTIZE, AT(tn_quantize_args, src), VECTORS, BAD, "src"},
    {QUANTIZE, AT(tn_quantize_args, src), BF16_TALL, BAD, "65 x 96"},
    {QUANTIZE, AT(tn_quantize_args, src), BF16_WIDE, BAD, "64 x 97"},
    {QUANTIZE, AT(tn_quantize_args, src), ELSEWHERE, BAD, "another device"},
    {QUANTIZE, AT(tn_quantize_args, src), BUSY, TN_IN_USE, "WRITE"},
    {QUANTIZE, AT(tn_quantize_args, dst), BF16, BAD, "dst"},
    {QUANTIZE, AT(tn_quantize_args, dst), STALE, TN_STALE_HANDLE, ""},
    {QUANTIZE, AT(tn_quantize_args, dst), VECTORS_TALL, BAD, "expected 64 x 96"},

    {DEQUANTIZE, AT(tn_dequantize_args, src), BF16, BAD, "src"},
    {DEQUANTIZE, AT(tn_dequantize_args, src), VECTORS_NEW, TN_INVALID_STATE, "ROW"},
    {DEQUANTIZE, AT(tn_dequantize_args, src), NONE, TN_STALE_HANDLE, ""},
    {DEQUANTIZE, AT(tn_dequantize_args, dst), VECTORS, BAD, "dst"},
    {DEQUANTIZE, AT(tn_dequantize_args, dst), BYTES, BAD, "dst"},
    {DEQUANTIZE, AT(tn_dequantize_args, dst), BF16_TALL, BAD, "dst"},
    {DEQUANTIZE, AT(tn_dequantize_args, dst), BUSY, TN_IN_USE, "WRITE"},

    {TRANSPOSE, AT(tn_transpose_args, tensor), VECTORS, BAD, "tensor"},
    {TRANSPOSE, AT(tn_transpose_args, tensor), BF16, BAD, "tensor"},
    {TRANSPOSE, AT(tn_transpose_args, tensor), TILES_NEW, TN_INVALID_STATE, ""},
    {TRANSPOSE, AT(tn_transpose_args, tensor), STALE, TN_STALE_HANDLE, ""},

    {FPROP, AT(tn_gemm_args, a), NONE, TN_STALE_HANDLE, ""},
    {FPROP, AT(tn_gemm_args, a), BF16, BAD, "both"},
    {FPROP, AT(tn_gemm_args, a), TILES_SMALL, TN_UNSUPPORTED, "are both fp8_block_2d"},
    {FPROP, AT(tn_gemm_args, a), VECTORS_OUT, BAD, "its columns are a's"},
    {FPROP, AT(tn_gemm_args, a), VECTORS_TALL, BAD, "d (tensor"},
    {FPROP, AT(tn_gemm_args, a), VECTORS_NEW, TN_INVALID_STATE, "ROW"},
    {FPROP, AT(tn_gemm_args, b), BF16_OUT_IN, BAD, "both"},
    {FPROP, AT(tn_gemm_args, b), VECTORS, BAD, "d (tensor"},
    {FPROP, AT(tn_gemm_args, b), TILES_NEW, TN_INVALID_STATE, "ROW"},
    {FPROP, AT(tn_gemm_args, b), STALE, TN_STALE_HANDLE, ""},
    {FPROP, AT(tn_gemm_args, d), VECTORS_OUT, BAD, "d (tensor"},
    {FPROP, AT(tn_gemm_args, d), BYTES, BAD, "d (tensor"},
    {FPROP, AT(tn_gemm_args, d), BF16, BAD, "expected 64 x 300"},
    {FPROP, AT(tn_gemm_args, d), BUSY_OUT, TN_IN_USE, "WRITE"},
    {FPROP, AT(tn_gemm_args, d), ELSEWHERE, BAD, "another device"},
    {DGRAD, AT(tn_gemm_args, b), VECTORS, BAD, "its rows are a's columns"},
    {DGRAD, AT(tn_gemm_args, a), VECTORS, BAD, "its rows are a's columns"},
    {DGRAD, AT(tn_gemm_args, d), BF16_TALL, BAD, "expected 64 x 96"},
    {WGRAD, AT(tn_gemm_args, b), VECTORS_TALL, BAD, "its rows are a's"},
    {WGRAD, AT(tn_gemm_args, b), VECTORS_NEW, TN_INVALID_STATE, "COL"},
    {WGRAD, AT(tn_gemm_args, d), BF16_OUT, BAD, "expected 300 x 96"},
    {PLAIN_GEMM, AT(tn_gemm_args, a), FP32, BAD, "expected"},
    {PLAIN_GEMM, AT(tn_gemm_args, a), BYTES, BAD, "a (tensor"},
    {PLAIN_GEMM, AT(tn_gemm_args, b), VECTORS, BAD, "both"},
    {PLAIN_GEMM, AT(tn_gemm_args, b), BF16_WIDE, BAD, "b (tensor"},
    {PLAIN_GEMM, AT(tn_gemm_args, a), BUSY, TN_IN_USE, "WRITE"},

    {AXPY, AT(tn_axpy_args, x), BF16_TALL, BAD, "elements"},
    {AXPY, AT(tn_axpy_args, x), VECTORS, BAD, "x (tensor"},
    {AXPY, AT(tn_axpy_args, x), FP32, TN_IN_USE, "READ"}, /* y itself */
    {AXPY, AT(tn_axpy_args, y), BYTES, BAD, "y (tensor"},
    {AXPY, AT(tn_axpy_args, y), NONE, TN_STALE_HANDLE, ""},
    {CONVERT, AT(tn_convert_args, x), BF16_WIDE, BAD, "elements"},
    {CONVERT, AT(tn_convert_args, y), BYTES, BAD, "y (tensor"},
    {CONVERT, AT(tn_convert_args, y), BUSY, TN_IN_USE, "WRITE"},

    {EMBED, AT(tn_embed_args, tokens), BYTES_MORE, BAD, "tokens"},
    {EMBED, AT(tn_embed_args, tokens), BF16, BAD, "tokens"},
    {EMBED, AT(tn_embed_args, table), TABLE_FEW, BAD, "expected 256 x 96"},
    {EMBED, AT(tn_embed_args, table), TABLE_FP32, BAD, "table"},
    {EMBED, AT(tn_embed_args, y), BF16_WIDE, BAD, "table"},
    {CROSS_ENTROPY, AT(tn_cross_entropy_args, logits), BF16, BAD, "96 columns"},
    {CROSS_ENTROPY, AT(tn_cross_entropy_args, targets), BYTES_MORE, BAD, "targets"},
    {CROSS_ENTROPY, AT(tn_cross_entropy_args, targets), LOSS, BAD, "targets"},
    {CROSS_ENTROPY, AT(tn_cross_entropy_args, loss), BYTES, BAD, "loss"},
    {CROSS_ENTROPY, AT(tn_cross_entropy_args, loss), FP32, BAD, "loss"},
    {CROSS_ENTROPY, AT(tn_cross_entropy_args, dlogits), BF16, BAD, "dlogits"},
    {CROSS_ENTROPY, AT(tn_cross_entropy_args, dlogits), BF16_OUT, TN_IN_USE, "READ"},
};

typedef struct states {
    tn_ledger ledger;
    tn_plane_state plane[WHICH_COUNT][TN_PLANE_COUNT];
} states;

static states states_of(const fixture *f) {
    states s = {.ledger = test_ledger(f->ops.scope)};
    for (int w = BF16; w < WHICH_COUNT; w++) {
        for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
            if (tn_plane_state_get(f->tensor[w], (tn_plane)plane, &s.plane[w][plane]) != TN_OK) {
                s.plane[w][plane] = TN_PLANE_ABSENT;
            }
        }
    }
    return s;
}

static void expect_nothing_changed(const states *before, const states *after, int index) {
    test_expect_same_ledger(&before->ledger, &after->ledger);
    for (int w = BF16; w < WHICH_COUNT; w++) {
        for (int plane = 0; plane < TN_PLANE_COUNT; plane++) {
            if (before->plane[w][plane] == after->plane[w][plane]) continue;
            fail_msg("mistake %d: tensor %d, plane %d was %d and is %d", index, w, plane,
                     (int)before->plane[w][plane], (int)after->plane[w][plane]);
        }
    }
}

static void every_mistake_has_its_status_and_changes_nothing(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        const mistake *m = &mistakes[i];
        any_args args = right_args(&f, m->operation);
        states before = states_of(&f);
        memcpy((char *)&args + m->offset, &f.tensor[m->wrong], sizeof(tn_tensor));
        tn_status status = call(m->operation, &args, f.ops.stream);
        if (status != m->status || !strstr(tn_error_last(), m->words)) {
            fail_msg("mistake %zu: %s, \"%s\"; expected %s, \"%s\"", i, tn_status_name(status),
                     tn_error_last(), tn_status_name(m->status), m->words);
        }
        states after = states_of(&f);
        expect_nothing_changed(&before, &after, (int)i);
    }
    close_fixture(&f);
}

/* The rows above prove little if the arguments that they change were wrong already. */
static void the_right_arguments_are_taken(void **state) {
    (void)state;
    fixture f = open_fixture();
    for (int operation = 0; operation < OP_COUNT; operation++) {
        any_args args = right_args(&f, (op)operation);
        if (operation == CROSS_ENTROPY) {
            args.cross_entropy.dlogits = plain(&f, TN_BF16, ROWS, OUT);
        }
        EXPECT_OK(call((op)operation, &args, f.ops.stream));
    }
    close_fixture(&f);
}

/* ---- what is not a tensor ------------------------------------------------------------------ */

static void arguments_of_another_size_are_refused(void **state) {
    (void)state;
    fixture f = open_fixture();
    states before = states_of(&f);
    for (int operation = 0; operation < OP_COUNT; operation++) {
        any_args args = right_args(&f, (op)operation);
        size_t size = 8; /* the first field of all */
        memcpy(&args, &size, sizeof size);
        EXPECT_STATUS(call((op)operation, &args, f.ops.stream), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("size is 8");
    }
    EXPECT_STATUS(tn_quantize(NULL, f.ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_gemm(NULL, f.ops.stream), TN_INVALID_ARGUMENT);
    states after = states_of(&f);
    expect_nothing_changed(&before, &after, -1);
    close_fixture(&f);
}

static void numbers_out_of_range_are_refused(void **state) {
    (void)state;
    fixture f = open_fixture();
    states before = states_of(&f);
    const float epsilons[] = {-1.0f, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        any_args args = right_args(&f, QUANTIZE);
        args.quantize.amax_epsilon = epsilons[i];
        EXPECT_STATUS(call(QUANTIZE, &args, f.ops.stream), TN_INVALID_ARGUMENT);
        EXPECT_ERROR_HAS("amax_epsilon");
    }
    any_args quantize = right_args(&f, QUANTIZE), dequantize = right_args(&f, DEQUANTIZE);
    any_args transpose = right_args(&f, TRANSPOSE), gemm = right_args(&f, FPROP);
    quantize.quantize.planes = 4;
    EXPECT_STATUS(call(QUANTIZE, &quantize, f.ops.stream), TN_INVALID_ARGUMENT);
    dequantize.dequantize.plane = TN_PLANE_COUNT;
    EXPECT_STATUS(call(DEQUANTIZE, &dequantize, f.ops.stream), TN_INVALID_ARGUMENT);
    transpose.transpose.to = TN_PLANE_DATA;
    EXPECT_STATUS(call(TRANSPOSE, &transpose, f.ops.stream), TN_INVALID_ARGUMENT);
    gemm.gemm.form = (tn_gemm_form)3;
    EXPECT_STATUS(call(FPROP, &gemm, f.ops.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("form is 3");
    states after = states_of(&f);
    expect_nothing_changed(&before, &after, -1);
    close_fixture(&f);
}

static void scratch_needs_a_scope_that_is_alive(void **state) {
    (void)state;
    fixture f = open_fixture();
    states before = states_of(&f);
    tn_scope closed = test_ops_scope(&f.ops, TN_SCOPE_OP, "closed");
    EXPECT_OK(tn_scope_close(closed));
    for (int i = 0; i < 2; i++) {
        any_args args = right_args(&f, FPROP);
        args.gemm.scope = i ? closed : (tn_scope){0};
        EXPECT_STATUS(call(FPROP, &args, f.ops.stream), i ? TN_STALE_HANDLE : TN_INVALID_ARGUMENT);
        states after = states_of(&f);
        expect_nothing_changed(&before, &after, i);
    }
    close_fixture(&f);
}

static void accumulating_needs_something_to_add_to(void **state) {
    (void)state;
    fixture f = open_fixture();
    const op operations[] = {FPROP, PLAIN_GEMM};
    for (int i = 0; i < 2; i++) {
        any_args args = right_args(&f, operations[i]);
        tn_tensor d = test_plain(f.ops.scope, TN_FP32, ROWS, OUT);
        args.gemm.d = d, args.gemm.accumulate = 1;
        states before = states_of(&f);
        EXPECT_STATUS(call(operations[i], &args, f.ops.stream), TN_INVALID_STATE);
        states after = states_of(&f);
        expect_nothing_changed(&before, &after, i);
        assert_int_equal(test_state(d, TN_PLANE_DATA), TN_PLANE_ABSENT);
    }
    close_fixture(&f);
}

static void two_e5m2_operands_are_unsupported(void **state) {
    (void)state;
    fixture f = open_fixture();
    states before = states_of(&f);
    any_args args = right_args(&f, FPROP);
    args.gemm.a = f.tensor[VECTORS_E5M2];
    args.gemm.b = f.tensor[TILES_E5M2];
    EXPECT_STATUS(call(FPROP, &args, f.ops.stream), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("E5M2");
    states after = states_of(&f);
    expect_nothing_changed(&before, &after, -1);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_right_arguments_are_taken),
        cmocka_unit_test(every_mistake_has_its_status_and_changes_nothing),
        cmocka_unit_test(arguments_of_another_size_are_refused),
        cmocka_unit_test(numbers_out_of_range_are_refused),
        cmocka_unit_test(scratch_needs_a_scope_that_is_alive),
        cmocka_unit_test(accumulating_needs_something_to_add_to),
        cmocka_unit_test(two_e5m2_operands_are_unsupported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
