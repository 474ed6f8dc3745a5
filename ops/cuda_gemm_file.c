/* The choices of a device as text, and back.
 *
 *     tenure gemm table 2
 *     device 9.0 NVIDIA H200
 *     cublaslt 130100
 *     4096 7168 2048 0 0 bf16 e4m3 1x128 n e4m3 128x128 n 61250 0 auto <128 digits> <sum>
 *     end 1 <sum>
 *
 * A line of a shape is rows, columns, contracted, whether D is added to, whether cuBLASLt adds a
 * bias, D's type, of A and then of B: type, scaling, n or t (stored transposed); the time in ns;
 * workspace bytes; the engine that is faster, or auto; cuBLASLt's own description of the algorithm,
 * which holds for that version of cuBLASLt alone, or ours (cuda_gemm_own.c). Only shapes that were
 * measured are written. A sum is 16 digits, FNV-1a of the file up to the blank before it: a message
 * names the line that it goes wrong in, and a line that is missing or at another place shows, too.
 *
 * A line whose algorithm is ours is left out where that does not run: on a driver that lacks what
 * it needs, or of another version of it. The shape stays as it is, and can be tuned.
 *
 * Nothing is shown to cuBLASLt before the sum of its line is right, and nothing of a file counts
 * before all of it has been read and every other algorithm has been accepted for its shape.
 */
#include "cuda_gemm.h"
#include "host_alloc.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_VERSION = 2, WORD_BYTES = 16, ALGORITHM_WORDS = 8, LINE_BYTES = 512 };

static const char *const kind_names[] = {"plain", "1x128", "128x128", "tensor"};
enum { KINDS = sizeof kind_names / sizeof *kind_names };

/* Of a text that is read or written: FNV-1a of its first `bytes`. */
typedef struct running_sum {
    uint64_t hash;
    size_t bytes;
} running_sum;

static const running_sum sum_of_nothing = {0xCBF29CE484222325u, 0};

static uint64_t sum_until(running_sum *sum, const char *text, size_t bytes) {
    for (; sum->bytes < bytes; sum->bytes++)
        sum->hash = (sum->hash ^ (unsigned char)text[sum->bytes]) * 0x100000001B3u;
    return sum->hash;
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
    running_sum sum;
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

static void end_line(writer *out) {
    uint64_t sum = sum_until(&out->sum, out->text, out->used);
    grow(out, snprintf(end_of(out), LINE_BYTES, " %016" PRIx64 "\n", sum));
}

static void put_plan(writer *out, const tn__gemm_plan *plan) {
    const tn__blas_shape *shape = &plan->shape;
    const tn__gemm_candidate *chosen = &plan->candidates[plan->chosen];
    grow(out, snprintf(end_of(out), LINE_BYTES, "%" PRId64 " %" PRId64 " %" PRId64 " %d %d %s",
                       shape->rows, shape->cols, shape->contracted, shape->has_beta != 0,
                       shape->has_bias != 0, tn_dtype_name(shape->d)));
    put_operand(out, &shape->a);
    put_operand(out, &shape->b);
    grow(out, snprintf(end_of(out), LINE_BYTES, " %" PRId64 " %zu %s ",
                       (int64_t)(chosen->us * 1000.0 + 0.5), chosen->workspace_bytes,
                       tn_gemm_engine_name(plan->engine)));
    for (int i = 0; i < ALGORITHM_WORDS; i++)
        grow(out,
             snprintf(end_of(out), LINE_BYTES, "%016" PRIx64, (uint64_t)chosen->algorithm.data[i]));
    end_line(out);
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
    grow(out, snprintf(end_of(out), LINE_BYTES, "end %d", count));
    end_line(out);
}

tn_status tn__cuda_gemm_table_text(tn_device *device, char **text, size_t *bytes) {
    enum { OTHER_LINES = 5 };
    tn__cuda_context *context;
    tn__cuda_gemm *gemm;
    TN_TRY(tn__cuda_context_of(device, &context));
    TN_TRY(tn__gemm_of(context, &gemm));
    pthread_mutex_lock(&gemm->lock);
    writer out = {tn__host_alloc((size_t)gemm->count + OTHER_LINES, LINE_BYTES), 0, sum_of_nothing};
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
    running_sum sum;
    char line[LINE_BYTES];
    tn__gemm_plan *plans; /* read so far */
    int count;            /* of lines, also of those that are left out */
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

/* Cuts the sum off the line, if it is right. */
static tn_status take_sum(reader *of) {
    char expected[LINE_BYTES];
    size_t length = strlen(of->line);
    size_t start = of->at - length - 1; /* of the line in the text */
    if (length < WORD_BYTES + 1) return corrupt(of, "it is no line of a shape");
    length -= WORD_BYTES + 1;
    snprintf(expected, sizeof expected, " %016" PRIx64,
             sum_until(&of->sum, of->text, start + length));
    if (strcmp(of->line + length, expected) != 0)
        return corrupt(of, "its sum is not that of the file so far");
    of->line[length] = 0;
    return TN_OK;
}

static tn_status read_head(reader *of) {
    char expected[LINE_BYTES];
    TN_TRY(next_line(of));
    snprintf(expected, sizeof expected, "tenure gemm table %d", FILE_VERSION);
    if (strcmp(of->line, expected) != 0) return corrupt(of, "it is not \"tenure gemm table 2\"");
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

static int read_engine(const char *word, tn_gemm_engine *out) {
    for (int i = 0; i < TN_GEMM_ENGINE_COUNT; i++)
        if (strcmp(word, tn_gemm_engine_name((tn_gemm_engine)i)) == 0)
            return *out = (tn_gemm_engine)i, 1;
    return 0;
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

static int is_left_out(const reader *of, const tn__blas_shape *shape,
                       const tn__gemm_candidate *candidate) {
    if (!tn__gemm_is_of_ours(&candidate->algorithm)) return 0;
    return !tn__gemm_is_own(&candidate->algorithm) || !tn__gemm_own_takes(of->gemm, shape);
}

static tn_status make_plan(reader *of, const tn__blas_shape *shape,
                           const tn__gemm_candidate *candidate, tn_gemm_engine engine) {
    tn__gemm_plan *plan;
    if (!is_left_out(of, shape, candidate)) {
        TN_TRY(tn__gemm_plan_make(of->gemm, shape, candidate, 0, &plan));
        plan->engine = engine;
        plan->next = of->plans;
        of->plans = plan;
    }
    of->count++;
    return TN_OK;
}

static tn_status read_plan(reader *of) {
    char words[8][WORD_BYTES], digits[ALGORITHM_WORDS * WORD_BYTES + 1];
    tn__blas_shape shape;
    tn__gemm_candidate candidate;
    tn_gemm_engine engine;
    int64_t ns = 0;
    int used = 0;
    memset(&shape, 0, sizeof shape);
    memset(&candidate, 0, sizeof candidate);
    int fields =
        sscanf(of->line,
               "%" SCNd64 " %" SCNd64 " %" SCNd64 " %d %d %15s %15s %15s %15s %15s %15s %15s"
               " %" SCNd64 " %zu %15s %128s%n",
               &shape.rows, &shape.cols, &shape.contracted, &shape.has_beta, &shape.has_bias,
               words[0], words[1], words[2], words[3], words[4], words[5], words[6], &ns,
               &candidate.workspace_bytes, words[7], digits, &used);
    if (fields != 16 || of->line[used]) return corrupt(of, "it is no line of a shape");
    candidate.us = (double)ns / 1000.0; /* whole numbers are the same in every locale */
    if (!read_dtype(words[0], &shape.d) || !read_operand(words[1], words[2], words[3], &shape.a) ||
        !read_operand(words[4], words[5], words[6], &shape.b))
        return corrupt(of, "a type or a scaling is unknown");
    if (!read_engine(words[7], &engine) || engine == TN_GEMM_ENGINE_WGMMA)
        return corrupt(of, "an engine is unknown");
    if (!read_algorithm(digits, &candidate.algorithm)) return corrupt(of, "it has no algorithm");
    if (!is_sane(&shape, &candidate)) return corrupt(of, "there is no such product");
    return make_plan(of, &shape, &candidate, engine);
}

static tn_status read_end(const reader *of) {
    int count = 0, used = 0;
    if (sscanf(of->line, "end %d%n", &count, &used) != 1 || of->line[used])
        return corrupt(of, "it is not the last line");
    if (count != of->count) return corrupt(of, "there are more or fewer shapes than it says");
    return of->at == of->bytes ? TN_OK : corrupt(of, "there is something behind it");
}

static tn_status read_all(reader *of) {
    TN_TRY(read_head(of));
    for (;;) {
        TN_TRY(next_line(of));
        TN_TRY(take_sum(of));
        if (strncmp(of->line, "end", 3) == 0) return read_end(of);
        if (of->count == TN__GEMM_PLANS_MAX) return corrupt(of, "there are too many shapes");
        TN_TRY(read_plan(of));
    }
}

tn_status tn__cuda_gemm_table_take(tn_device *device, const char *text, size_t bytes) {
    reader of = {.text = text, .bytes = bytes, .sum = sum_of_nothing};
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
