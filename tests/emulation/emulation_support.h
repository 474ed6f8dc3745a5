/* What the tests of kernels stand on: an emulated device, and operands that are there twice, once
 * for the host's definition and once for the kernel, so that the two can be compared bit for bit.
 *
 * Memory is taken for each operand by itself, of its exact size, so that a build with ASan sees a
 * read or a write beyond it; without, guard bytes see the writes. Outputs begin as 0xFF: NaN in
 * every type. Comparisons are counted under the op's name (gpu_count) and told as a table.
 *
 *     work = (tn__quantize_work){.src = x.host, .row = row.host, ...};
 *     tn__host_quantize(&work);
 *     work.src = x.emulated, work.row = row.emulated;
 *     EXPECT_OK(tn__op_table_cuda.quantize(emulation.device, &work, emulation.stream));
 *     emulation_wait(what);
 *     twin_plane_compare(&row, "quantize", what);
 */
#ifndef TENURE_EMULATION_SUPPORT_H
#define TENURE_EMULATION_SUPPORT_H

#include "emulated_driver.h"
#include "emulator.h"
#include "gpu_support.h"
#include "host_kernels.h"

typedef struct emulation_device {
    tn_device *device;
    tn_stream stream;
} emulation_device;
extern emulation_device emulation;

void emulation_begin(void);
void emulation_end(void);

/* Begins, runs all tests in rising, falling and random order of threads, where a barrier that is
 * missing shows, and ends. The sum of what they give, for main. */
int emulation_run_in_orders(int (*run_all)(void));

/* Waits for the work on the stream and fails if a kernel did what it must not. */
void emulation_wait(const char *what);

/* ---- operands ------------------------------------------------------------------------------- */

typedef struct twin {
    size_t bytes;
    unsigned char *host, *emulated;
    unsigned char *memory[2]; /* what they lie in */
} twin;

/* `offset` bytes, a multiple of the type's, past an address of 512: 0 for a tensor's own memory. */
twin twin_make(size_t bytes, size_t offset);
void twin_end(twin *of);
/* One comparison under this name; guard bytes too. */
void twin_compare(const twin *of, const char *name, const char *what);

typedef struct twin_matrix {
    tn__matrix host, emulated;
    twin memory;
} twin_matrix;

/* An output. */
twin_matrix twin_matrix_make(tn_dtype dtype, int64_t rows, int64_t cols);
/* An input, the same on both sides. */
twin_matrix twin_matrix_fill(tn_dtype dtype, int64_t rows, int64_t cols, gpu_fill fill,
                             uint64_t seed);
void twin_matrix_end(twin_matrix *of);
void twin_matrix_compare(const twin_matrix *of, const char *name, const char *what);

typedef struct twin_plane {
    tn_plane_view host, emulated;
    twin data, scale;
} twin_plane;

/* An output of any format. */
twin_plane twin_plane_make(tn_format format, tn_plane plane, tn_dtype dtype, int64_t m, int64_t k);
/* Both sides get what the host's has; padding of scales becomes NaN: nobody may read it. */
void twin_plane_share(twin_plane *of);
void twin_plane_end(twin_plane *of);
void twin_plane_compare(const twin_plane *of, const char *name, const char *what);

/* A norm's scratch; free() ends it. */
void *emulation_parts(int64_t rows, int64_t cols, int numbers);

/* ---- shapes --------------------------------------------------------------------------------- */

/* Calls check for tails in both dimensions: every `step`-th of 1 ... 129 as the number of rows and
 * of columns, beside a whole tile, and alone. */
void emulation_each_tail(int step, void (*check)(int64_t rows, int64_t cols, uint64_t seed));

#endif
