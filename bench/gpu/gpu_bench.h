/* What the measurements of tenure-bench-gpu and tenure-bench-layer share: the GPU, tensors of
 * random data, times, rows.
 *
 * A time is taken with the host's clock over many launches. The launches are put behind a gate, a
 * host task that blocks the stream, and the clock starts when the gate opens: so the GPU works
 * without waiting for the host, as long as a batch fits the driver's launch queue (GATED_MAX).
 * Any call that fails ends the program with its words: a benchmark has nothing to save.
 */
#ifndef TENURE_GPU_BENCH_H
#define TENURE_GPU_BENCH_H

#include <stdio.h>

#include <cjson/cJSON.h>

#include "driver.h"
#include "tenure_ops.h"

enum { GPU_BENCH_BATCHES = 5, GPU_BENCH_GATED_MAX = 400 };

typedef struct gpu_bench {
    tn_device *device;
    tn_device_info info;
    tn_pool *pool;
    tn_stream stream;
    tn_scope scope;
    tn_tensor noise;  /* bf16, normal: what other tensors are filled from */
    int is_rehearsal; /* on the host, each piece of work twice: it can be done, times say nothing */
} gpu_bench;

/* Ends the program if the status is a failure. */
#define GPU_BENCH_TRY(call) gpu_bench_require((call), #call)
void gpu_bench_require(tn_status status, const char *call);
_Noreturn void gpu_bench_out_of_memory(void);

/* A real GPU, or for a rehearsal the host; 0 if there is none, and a message says why. */
int gpu_bench_open(gpu_bench *bench, int ordinal, int is_rehearsal);
void gpu_bench_close(gpu_bench *bench);

/* ---- tensors ------------------------------------------------------------------------------- */

/* PLAIN [rows, cols] of fp32, bf16 or fp16 with normal values. */
tn_tensor gpu_bench_random(gpu_bench *bench, tn_dtype dtype, int64_t rows, int64_t cols);
/* PLAIN [rows, cols] with this content; cols of TN_BYTE are bytes. */
tn_tensor gpu_bench_upload(gpu_bench *bench, tn_dtype dtype, int64_t rows, int64_t cols,
                           const void *content);
/* PLAIN [rows, cols] full of zeros. */
tn_tensor gpu_bench_zeros(gpu_bench *bench, tn_dtype dtype, int64_t rows, int64_t cols);
/* E4M3 (NVFP4: E2M1), without planes. */
tn_tensor gpu_bench_quantized(gpu_bench *bench, tn_format format, tn_scale_mode scale_mode,
                              int64_t rows, int64_t cols);
/* The same with power-of-two scales and the planes (TN_QUANTIZE_ROW, TN_QUANTIZE_COL) of random
 * values. */
tn_tensor gpu_bench_random_quantized(gpu_bench *bench, tn_format format, unsigned planes,
                                     int64_t rows, int64_t cols);
void gpu_bench_destroy(gpu_bench *bench, tn_tensor tensor);
/* Elements and scales of a plane. */
double gpu_bench_plane_bytes(tn_tensor tensor, tn_plane plane);

/* ---- times --------------------------------------------------------------------------------- */

/* Puts the work number `turn` on the stream. */
typedef void (*gpu_bench_work)(gpu_bench *bench, void *argument, int turn);

/* Seconds of one piece of work on the GPU: the median of the batches. */
double gpu_bench_device_seconds(gpu_bench *bench, gpu_bench_work work, void *argument);
/* Of one piece of work in one batch of `turns`, which must fit the queue. */
double gpu_bench_gated_seconds(gpu_bench *bench, gpu_bench_work work, void *argument, int turns);
/* Seconds that the host needs to put one piece of work on the stream: likewise. */
double gpu_bench_host_seconds(gpu_bench *bench, gpu_bench_work work, void *argument);

double gpu_bench_now(void);
double gpu_bench_median(double *values, int count);

/* ---- results ------------------------------------------------------------------------------- */

enum { GPU_BENCH_FIGURES = 12 };

/* One line of a table: a title and figures, one per column of its section. */
typedef struct gpu_bench_row {
    char title[48];
    double figures[GPU_BENCH_FIGURES];
} gpu_bench_row;

/* A table: what it shows, its columns, its rows. */
typedef struct gpu_bench_section {
    const char *key;
    const char *title;
    const char *columns[GPU_BENCH_FIGURES + 1]; /* the first is of the titles; NULL ends them */
    int decimals;
    int reference; /* figure that the others are shown as a share of; -1: none */
    gpu_bench_row rows[12];
    int row_count;
} gpu_bench_section;

gpu_bench_row *gpu_bench_row_add(gpu_bench_section *section, const char *title);

void gpu_bench_gemms(gpu_bench *bench, gpu_bench_section *section);
void gpu_bench_attention(gpu_bench *bench, gpu_bench_section *section);
void gpu_bench_pool(gpu_bench *bench, gpu_bench_section *section);
void gpu_bench_calls(gpu_bench *bench, gpu_bench_section *section);

/* ---- casts --------------------------------------------------------------------------------- */

typedef struct gpu_cast_result {
    const char *name;
    int64_t rows, cols;
    double bytes; /* that must move */
    double seconds;
    double copy_rate; /* bytes read and written in a second by copies of the same size */
} gpu_cast_result;

typedef struct gpu_cast_report {
    gpu_cast_result *results; /* of malloc */
    int count;
} gpu_cast_report;

/* Which of them: ops whose name has one of the words in it (all, without words), at one size (all,
 * with 0 rows). */
typedef struct gpu_cast_choice {
    char **words;
    int word_count;
    int64_t rows, cols;
} gpu_cast_choice;

/* How many ops and sizes that is. */
int gpu_bench_casts_chosen(const gpu_cast_choice *choice);
/* csv: a line for each result, as soon as its size is done; NULL: none. */
void gpu_bench_casts(gpu_bench *bench, const gpu_cast_choice *choice, FILE *csv,
                     gpu_cast_report *report);
/* Is it of 64 MiB or more, and below 90 % of the copy's rate? */
int gpu_cast_is_low(const gpu_cast_result *result);
/* 1 on success. */
int gpu_cast_report_print(const gpu_cast_report *report);
int gpu_cast_report_to_json(const gpu_cast_report *report, cJSON *object);

#endif
