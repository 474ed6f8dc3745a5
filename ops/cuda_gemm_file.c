/* The choices of a device as text, and back.
 *
 *     tenure gemm table 1
 *     device 9.0 NVIDIA H200
 *     cublaslt 130100
 *     4096 7168 2048 0 0 bf16 e4m3 1x128 n e4m3 128x128 n 61250 0 <128 digits: the algorithm>
 *     end 1 <16 digits: FNV-1a of all before this line>
 *
 * A line is rows, columns, contracted, whether D is added to, whether cuBLASLt adds a bias, D's
 * type, of A and then of B: type, scaling, n or t (stored transposed); the time in ns; workspace
 * bytes; cuBLASLt's own description of the algorithm, which holds for that version of cuBLASLt
 * alone. Only shapes that were measured are written.
 *
 * Nothing of a file counts before its end has been found and its sum is right, all of it has been
 * read, and every algorithm has been accepted by cuBLASLt for its shape.
 */
#include "cuda_gemm.h"
#include "host_alloc.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_VERSION = 1, WORD_BYTES = 16, ALGORITHM_WORDS = 8, LINE_BYTES = 512 };

static const char *const kind_names[] = {"plain", "1x128", "128x128", "tensor"};
enum { KINDS = sizeof kind_names / sizeof *kind_names };

static uint64_t hash_of(const char *text, size_t bytes) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)text[i]) * 0x100000001B3u;
    return hash;
}

static void device_line(const tn__cuda_context *context, char *line, size_t bytes) {
    snprintf(line, bytes, "device %d.%d %s", context->info.compute_major,
             context->info.compute_minor, context->info.name);
}

/* ---- writing -------------------------------------------------------------------------------- */

/* Lines of at most LINE_BYTES, for which there is room. */
typedef struct writer {
    char *text;
    size_t used;
} writer;

static char *end_of(const writer *out) { return out->text + out->used; }

/* What snprintf has put at the end, in room for a line. */
static void grow(writer *out, int length) {
    TN_CHECK(length >= 0 && length < LINE_BYTES);
    out->used += (size_t)length;
}

static void put_operand(writer *out, const tn__blas_operand *operand) {
    grow(out, snprintf(end_of(out), LINE_BYTES, " %s %s %c", tn_dtype_name(operand->dtype),
                       kind_names[operand->kind], operand->is_transposed ? 't' : 'n'));
}

static void put_plan(writer *out, const tn__gemm_plan *plan) {
    const tn__blas_shape *shape = &plan->shape;
    const tn__gemm_candidate *chosen = &plan->candidates[plan->chosen];
    grow(out, snprintf(end_of(out), LINE_BYTES, "%" PRId64 " %" PRId64 " %" PRId64 " %d %d %s",
                       shape->rows, shape->cols, shape->contracted, shape->has_beta != 0,
                       shape->has_bias != 0, tn_dtype_name(shape->d)));
    put_operand(out, &shape->a);
    put_operand(out, &shape->b);
    grow(out, snprintf(end_of(out), LINE_BYTES, " %" PRId64 " %zu ",
                       (int64_t)(chosen->us * 1000.0 + 0.5), chosen->workspace_bytes));
    for (int i = 0; i < ALGORITHM_WORDS; i++)
        grow(out,
             snprintf(end_of(out), LINE_BYTES, "%016" PRIx64, (uint64_t)chosen->algorithm.data[i]));
    grow(out, snprintf(end_of(out), LINE_BYTES, "\n"));
}

static void put_all(writer *out, const tn__cuda_context *context, const tn__cuda_gemm *gemm) {
    char line[LINE_BYTES / 2];
    int count = 0;
    device_line(context, line, sizeof line);
    grow(out, snprintf(end_of(out), LINE_BYTES, "tenure gemm table %d\n", FILE_VERSION));
    grow(out, snprintf(end_of(out), LINE_BYTES, "%s\n", line));
    grow(out, snprintf(end_of(out), LINE_BYTES, "cublaslt %zu\n", gemm->blas->GetVersion()));
    for (int i = 0; i < TN__GEMM_PLANS_MAX; i++) {
        for (const tn__gemm_plan *plan = gemm->buckets[i]; plan; plan = plan->next) {
            if (!plan->is_measured) continue;
            put_plan(out, plan);
            count++;
        }
    }
    grow(out, snprintf(end_of(out), LINE_BYTES, "end %d %016" PRIx64 "\n", count,
                       hash_of(out->text, out->used)));
}

tn_status tn__cuda_gemm_table_text(tn_device *device, char **text, size_t *bytes) {
    enum { OTHER_LINES = 5 };
    tn__cuda_context *context;
    tn__cuda_gemm *gemm;
    TN_TRY(tn__cuda_context_of(device, &context));
    TN_TRY(tn__gemm_of(context, &gemm));
    pthread_mutex_lock(&gemm->lock);
    writer out = {tn__host_alloc((size_t)gemm->count + OTHER_LINES, LINE_BYTES), 0};
    if (out.text) put_all(&out, context, gemm);
    pthread_mutex_unlock(&gemm->lock);
    if (!out.text) return TN_OUT_OF_HOST_MEMORY;
    *text = out.text;
    *bytes = out.used;
    return TN_OK;
}

/* ---- reading -------------------------------------------------------------------------------- */

typedef struct reader {
    tn__cuda_context *context;
    tn__cuda_gemm *gemm;
    const char *text;
    size_t bytes;
    size_t at; /* of the next line */
    int number;
    char line[LINE_BYTES];
    tn__gemm_plan *plans; /* read so far */
    int count;
} reader;

static tn_status corrupt(const reader *of, const char *what) {
    return TN_FAIL(TN_CORRUPT_INPUT, "line %d of the table of GEMMs: %s", of->number, what);
}

/* The next line without its end. */
static tn_status next_line(reader *of) {
    const char *start = of->text + of->at;
    const char *end = memchr(start, '\n', of->bytes - of->at);
    of->number++;
    if (!end) return corrupt(of, "the file ends without its last line");
    size_t length = (size_t)(end - start);
    if (length >= sizeof of->line) return corrupt(of, "it is too long");
    if (memchr(start, 0, length)) return corrupt(of, "it has a byte of 0");
    memcpy(of->line, start, length);
    of->line[length] = 0;
    of->at += length + 1;
    return TN_OK;
}

static tn_status read_head(reader *of) {
    char expected[LINE_BYTES];
    TN_TRY(next_line(of));
    snprintf(expected, sizeof expected, "tenure gemm table %d", FILE_VERSION);
    if (strcmp(of->line, expected) != 0) return corrupt(of, "it is not \"tenure gemm table 1\"");
    TN_TRY(next_line(of));
    device_line(of->context, expected, sizeof expected);
    if (strcmp(of->line, expected) != 0)
        return TN_FAIL(TN_UNSUPPORTED, "the table of GEMMs is of \"%s\", this is \"%s\": tune anew",
                       of->line, expected);
    TN_TRY(next_line(of));
    snprintf(expected, sizeof expected, "cublaslt %zu", of->gemm->blas->GetVersion());
    if (strcmp(of->line, expected) != 0)
        return TN_FAIL(TN_UNSUPPORTED, "the table of GEMMs is of \"%s\", this is \"%s\": tune anew",
                       of->line, expected);
    return TN_OK;
}

static int read_dtype(const char *word, tn_dtype *out) {
    for (int dtype = 0; dtype < TN_DTYPE_COUNT; dtype++)
        if (strcmp(word, tn_dtype_name((tn_dtype)dtype)) == 0) return *out = (tn_dtype)dtype, 1;
    return 0;
}

static int read_operand(const char *dtype, const char *kind, const char *turned,
                        tn__blas_operand *out) {
    int found = -1;
    for (int i = 0; i < KINDS; i++)
        if (strcmp(kind, kind_names[i]) == 0) found = i;
    out->kind = (tn__operand_kind)found;
    out->is_transposed = turned[0] == 't';
    return found >= 0 && read_dtype(dtype, &out->dtype) && turned[1] == 0 &&
           (turned[0] == 't' || turned[0] == 'n');
}

static int read_algorithm(const char *digits, cublasLtMatmulAlgo_t *out) {
    char word[WORD_BYTES + 1] = "";
    if (strlen(digits) != (size_t)ALGORITHM_WORDS * WORD_BYTES) return 0;
    if (strspn(digits, "0123456789abcdef") != strlen(digits)) return 0;
    for (int i = 0; i < ALGORITHM_WORDS; i++) {
        memcpy(word, digits + (size_t)i * WORD_BYTES, WORD_BYTES);
        out->data[i] = strtoull(word, NULL, 16);
    }
    return 1;
}

/* What a product of a shape can be: sizes of a matrix each, and types that there is a GEMM of. */
static int is_sane(const tn__blas_shape *shape, const tn__gemm_candidate *candidate) {
    const int64_t most = (int64_t)1 << 48;
    int is_plain = shape->a.kind == TN__OPERAND_PLAIN;
    int is_fp8 = shape->a.dtype == TN_E4M3 || shape->a.dtype == TN_E5M2;
    if (shape->rows < 1 || shape->cols < 1 || shape->contracted < 1) return 0;
    if (shape->rows > most || shape->cols > most || shape->contracted > most) return 0;
    if (is_plain != (shape->b.kind == TN__OPERAND_PLAIN) || is_plain == is_fp8) return 0;
    if ((shape->has_beta | shape->has_bias) & ~1) return 0;
    return candidate->us > 0.0 && candidate->us < 1e12;
}

static tn_status read_plan(reader *of) {
    char words[7][WORD_BYTES], digits[ALGORITHM_WORDS * WORD_BYTES + 1];
    tn__blas_shape shape;
    tn__gemm_candidate candidate;
    int64_t ns = 0;
    int used = 0;
    memset(&shape, 0, sizeof shape);
    memset(&candidate, 0, sizeof candidate);
    int fields =
        sscanf(of->line,
               "%" SCNd64 " %" SCNd64 " %" SCNd64 " %d %d %15s %15s %15s %15s %15s %15s %15s"
               " %" SCNd64 " %zu %128s%n",
               &shape.rows, &shape.cols, &shape.contracted, &shape.has_beta, &shape.has_bias,
               words[0], words[1], words[2], words[3], words[4], words[5], words[6], &ns,
               &candidate.workspace_bytes, digits, &used);
    if (fields != 15 || of->line[used]) return corrupt(of, "it is no line of a shape");
    candidate.us = (double)ns / 1000.0; /* whole numbers are the same in every locale */
    if (!read_dtype(words[0], &shape.d) || !read_operand(words[1], words[2], words[3], &shape.a) ||
        !read_operand(words[4], words[5], words[6], &shape.b))
        return corrupt(of, "a type or a scaling is unknown");
    if (!read_algorithm(digits, &candidate.algorithm)) return corrupt(of, "it has no algorithm");
    if (!is_sane(&shape, &candidate)) return corrupt(of, "there is no such product");
    tn__gemm_plan *plan;
    TN_TRY(tn__gemm_plan_make(of->gemm, &shape, &candidate, &plan));
    plan->next = of->plans;
    of->plans = plan;
    of->count++;
    return TN_OK;
}

/* The last line, before any other is believed: how many shapes there are, and the sum of it all. */
static tn_status check_end(const reader *of, int *count) {
    uint64_t hash = 0;
    int used = 0;
    char line[LINE_BYTES] = "";
    size_t start = of->bytes > 0 ? of->bytes - 1 : 0;
    while (start > 0 && of->text[start - 1] != '\n')
        start--;
    size_t length = of->bytes - start;
    if (length == 0 || length >= sizeof line || of->text[of->bytes - 1] != '\n')
        return corrupt(of, "the file ends without its last line");
    memcpy(line, of->text + start, length - 1);
    if (sscanf(line, "end %d %16" SCNx64 "%n", count, &hash, &used) != 2 ||
        (size_t)used != length - 1)
        return corrupt(of, "the file ends without its last line");
    if (hash != hash_of(of->text, start)) return corrupt(of, "the sum of the file is not its own");
    return TN_OK;
}

static tn_status read_all(reader *of) {
    int count = 0;
    TN_TRY(read_head(of));
    TN_TRY(check_end(of, &count));
    if (count < 0 || count > TN__GEMM_PLANS_MAX) return corrupt(of, "there are too many shapes");
    while (of->count < count) {
        TN_TRY(next_line(of));
        TN_TRY(read_plan(of));
    }
    TN_TRY(next_line(of));
    return of->at == of->bytes ? TN_OK : corrupt(of, "there are more shapes than it ends with");
}

tn_status tn__cuda_gemm_table_take(tn_device *device, const char *text, size_t bytes) {
    reader of = {.text = text, .bytes = bytes};
    TN_TRY(tn__cuda_context_of(device, &of.context));
    TN_TRY(tn__gemm_of(of.context, &of.gemm));
    TN_TRY(of.context->driver->make_current(of.context->state));
    tn_status status = read_all(&of);
    while (of.plans) {
        tn__gemm_plan *first = of.plans;
        of.plans = first->next;
        first->next = NULL;
        if (status == TN_OK) tn__gemm_plan_put(of.gemm, first);
        if (status != TN_OK) tn__gemm_plan_end(of.gemm, first);
    }
    return status;
}
