/* The small operations of a trainer: tn_axpy, tn_convert, tn_embed and its gradient,
 * tn_cross_entropy. */
#include "op_call.h"
#include "tenure_train.h"

enum { VOCABULARY_MIN = 256, VOCABULARY_MAX = 65536, EMBED_ROWS = 256 };

/* ---- axpy and convert: x to y, element by element ------------------------------------------ */

static tn_status check_pair(tn__op_call *call, tn_tensor x, tn_tensor y, tn_tensor_info *x_info,
                            tn_tensor_info *y_info) {
    TN_TRY(tn__op_tensor(call, "x", x, x_info));
    TN_TRY(tn__op_tensor(call, "y", y, y_info));
    TN_TRY(tn__op_require_float(call, "x", x_info));
    TN_TRY(tn__op_require_float(call, "y", y_info));
    TN_REQUIRE(x_info->rows * x_info->cols == y_info->rows * y_info->cols,
               "%s: x (tensor %s) has %lld elements, y (tensor %s) has %lld", call->name,
               x_info->name, (long long)(x_info->rows * x_info->cols), y_info->name,
               (long long)(y_info->rows * y_info->cols));
    return TN_OK;
}

tn_status tn_axpy(const tn_axpy_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_axpy", stream);
    tn_tensor_info x = TN_TENSOR_INFO_INIT, y = TN_TENSOR_INFO_INIT;
    tn__axpy_work work;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(check_pair(&call, args->x, args->y, &x, &y));
    work.alpha = args->alpha;
    tn_status status = tn__op_lease_matrix(&call, args->x, &x, TN_READ, &work.x);
    if (status == TN_OK) status = tn__op_lease_matrix(&call, args->y, &y, TN_UPDATE, &work.y);
    if (status == TN_OK && !tn__is_empty(&y)) {
        status = tn__op_require_whole_16(&call, (uintptr_t)work.x.data | (uintptr_t)work.y.data);
        if (status == TN_OK) status = TN__OP_RUN(&call, axpy, &work);
    }
    return tn__op_finish(&call, status);
}

tn_status tn_convert(const tn_convert_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_convert", stream);
    tn_tensor_info x = TN_TENSOR_INFO_INIT, y = TN_TENSOR_INFO_INIT;
    tn__matrix from, to;
    TN_TRY(tn__op_init());
    TN__OP_REQUIRE_ARGS(call.name, args);
    TN_TRY(check_pair(&call, args->x, args->y, &x, &y));
    tn_status status = tn__op_lease_matrix(&call, args->x, &x, TN_READ, &from);
    if (status == TN_OK) status = tn__op_lease_matrix(&call, args->y, &y, TN_WRITE, &to);
    if (status == TN_OK && !tn__is_empty(&y)) {
        status = tn__op_require_whole_16(&call, (uintptr_t)from.data | (uintptr_t)to.data);
        if (status == TN_OK) status = TN__OP_RUN(&call, convert, &from, &to);
    }
    return tn__op_finish(&call, status);
}

/* ---- embed --------------------------------------------------------------------------------- */

/* A list of bytes, one a row of something that has `rows` rows. */
static tn_status check_bytes(tn__op_call *call, const char *role, tn_tensor tensor, int64_t rows,
                             tn_tensor_info *info) {
    TN_TRY(tn__op_tensor(call, role, tensor, info));
    TN_TRY(tn__op_require_dtype(call, role, info, TN_BYTE));
    TN_REQUIRE(info->rows * info->cols == rows,
               "%s: %s (tensor %s) has %lld elements, expected %lld, one for each row", call->name,
               role, info->name, (long long)(info->rows * info->cols), (long long)rows);
    return TN_OK;
}

static tn_status check_embed(tn__op_call *call, const tn_embed_args *args, tn_tensor_info *tokens,
                             tn_tensor_info *table, tn_tensor_info *y) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(tn__op_tensor(call, "y", args->y, y));
    TN_TRY(tn__op_tensor(call, "table", args->table, table));
    TN_TRY(tn__op_require_float(call, "y", y));
    TN_TRY(tn__op_require_format(call, "table", table, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, "table", table, y->dtype));
    TN_TRY(tn__op_require_shape(call, "table", table, EMBED_ROWS, y->cols,
                                "one row for each byte, y's columns"));
    return check_bytes(call, "tokens", args->tokens, y->rows, tokens);
}

tn_status tn_embed(const tn_embed_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_embed", stream);
    tn_tensor_info tokens = TN_TENSOR_INFO_INIT, table = tokens, y = tokens;
    tn__embed_work work;
    tn_plane_view bytes;
    TN_TRY(tn__op_init());
    TN_TRY(check_embed(&call, args, &tokens, &table, &y));
    tn_status status = tn__op_lease(&call, args->tokens, TN_PLANE_DATA, TN_READ, &bytes);
    if (status == TN_OK) {
        status = tn__op_lease_matrix(&call, args->table, &table, TN_READ, &work.table);
    }
    if (status == TN_OK) status = tn__op_lease_matrix(&call, args->y, &y, TN_WRITE, &work.y);
    if (status == TN_OK && !tn__is_empty(&y)) {
        work.tokens = bytes.data;
        status = TN__OP_RUN(&call, embed, &work);
    }
    return tn__op_finish(&call, status);
}

static tn_status check_embed_backward(tn__op_call *call, const tn_embed_backward_args *args,
                                      tn_tensor_info *tokens, tn_tensor_info *dy,
                                      tn_tensor_info *dtable) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(tn__op_tensor(call, "dy", args->dy, dy));
    TN_TRY(tn__op_tensor(call, "dtable", args->dtable, dtable));
    TN_TRY(tn__op_require_float(call, "dy", dy));
    TN_TRY(tn__op_require_float(call, "dtable", dtable));
    TN_TRY(tn__op_require_shape(call, "dtable", dtable, EMBED_ROWS, dy->cols,
                                "one row for each byte, dy's columns"));
    return check_bytes(call, "tokens", args->tokens, dy->rows, tokens);
}

tn_status tn_embed_backward(const tn_embed_backward_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_embed_backward", stream);
    tn_tensor_info tokens = TN_TENSOR_INFO_INIT, dy = tokens, dtable = tokens;
    tn__embed_gradient_work work = {.skip = NULL};
    tn_plane_view bytes;
    TN_TRY(tn__op_init());
    TN_TRY(check_embed_backward(&call, args, &tokens, &dy, &dtable));
    work.accumulate = args->accumulate != 0;
    tn_status status = tn__op_lease_skip(&call, args->skip, &work.skip);
    if (status == TN_OK) status = tn__op_lease(&call, args->tokens, TN_PLANE_DATA, TN_READ, &bytes);
    if (status == TN_OK) status = tn__op_lease_matrix(&call, args->dy, &dy, TN_READ, &work.dy);
    if (status == TN_OK)
        status = tn__op_require_kept(&call, work.skip, "dtable", args->dtable, TN_PLANE_DATA);
    if (status == TN_OK)
        status = tn__op_lease_matrix(&call, args->dtable, &dtable,
                                     work.accumulate ? TN_UPDATE : TN_WRITE, &work.table);
    if (status == TN_OK && !tn__is_empty(&dtable)) {
        work.tokens = bytes.data;
        status = TN__OP_RUN(&call, embed_gradient, &work);
    }
    return tn__op_finish(&call, status);
}

/* ---- cross entropy ------------------------------------------------------------------------- */

typedef struct loss_tensors {
    tn_tensor_info logits, targets, loss, dlogits;
} loss_tensors;

static tn_status check_cross_entropy(tn__op_call *call, const tn_cross_entropy_args *args,
                                     loss_tensors *t) {
    TN__OP_REQUIRE_ARGS(call->name, args);
    TN_TRY(tn__op_tensor(call, "logits", args->logits, &t->logits));
    TN_TRY(tn__op_require_float(call, "logits", &t->logits));
    TN_REQUIRE(t->logits.cols >= VOCABULARY_MIN && t->logits.cols <= VOCABULARY_MAX,
               "%s: logits (tensor %s) has %lld columns, expected %d to %d", call->name,
               t->logits.name, (long long)t->logits.cols, VOCABULARY_MIN, VOCABULARY_MAX);
    TN_TRY(check_bytes(call, "targets", args->targets, t->logits.rows, &t->targets));
    TN_TRY(tn__op_tensor(call, "loss", args->loss, &t->loss));
    TN_TRY(tn__op_require_format(call, "loss", &t->loss, TN_FORMAT_PLAIN));
    TN_TRY(tn__op_require_dtype(call, "loss", &t->loss, TN_FP32));
    TN_REQUIRE(t->loss.rows * t->loss.cols == t->logits.rows,
               "%s: loss (tensor %s) has %lld elements, expected %lld, one for each row of logits",
               call->name, t->loss.name, (long long)(t->loss.rows * t->loss.cols),
               (long long)t->logits.rows);
    TN_TRY(tn__op_tensor(call, "dlogits", args->dlogits, &t->dlogits));
    TN_TRY(tn__op_require_float(call, "dlogits", &t->dlogits));
    return tn__op_require_shape(call, "dlogits", &t->dlogits, t->logits.rows, t->logits.cols,
                                "the shape of logits");
}

static tn_status lease_cross_entropy(tn__op_call *call, const tn_cross_entropy_args *args,
                                     const loss_tensors *t, tn__cross_entropy_work *work) {
    tn_plane_view targets, loss;
    TN_TRY(tn__op_lease_matrix(call, args->logits, &t->logits, TN_READ, &work->logits));
    TN_TRY(tn__op_lease(call, args->targets, TN_PLANE_DATA, TN_READ, &targets));
    TN_TRY(tn__op_lease_matrix(call, args->dlogits, &t->dlogits, TN_WRITE, &work->dlogits));
    TN_TRY(tn__op_lease(call, args->loss, TN_PLANE_DATA, TN_WRITE, &loss));
    work->targets = targets.data;
    work->loss = loss.data;
    return TN_OK;
}

tn_status tn_cross_entropy(const tn_cross_entropy_args *args, tn_stream stream) {
    tn__op_call call = tn__op_begin("tn_cross_entropy", stream);
    loss_tensors t = {.logits = TN_TENSOR_INFO_INIT};
    tn__cross_entropy_work work;
    TN_TRY(tn__op_init());
    TN_TRY(check_cross_entropy(&call, args, &t));
    tn_status status = lease_cross_entropy(&call, args, &t, &work);
    if (status == TN_OK && !tn__is_empty(&t.logits)) {
        status = TN__OP_RUN(&call, cross_entropy, &work);
    }
    return tn__op_finish(&call, status);
}
