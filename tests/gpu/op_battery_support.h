/* The battery: every op, over shapes and values, on two sides, bit for bit.
 *
 * An op is a row of a table: how it makes its operands for a case, and how it is put on the
 * stream. The battery makes the operands on both sides from the same seed, fills the outputs with
 * 0xFF (NaN, the padding of scales too), runs the op on each side and compares every byte of every
 * output. It ends with a table of op, cases and failures.
 *
 * The sides are the host driver, which is the definition, and a CUDA device: a real one in
 * tests/gpu/test_op_battery.c, the emulated one in tests/emulation/test_emulated_battery.c.
 *
 * A new family is a file op_battery_<family>_support.c with its table, and its line in
 * battery_tables (op_battery_support.c).
 */
#ifndef TENURE_OP_BATTERY_SUPPORT_H
#define TENURE_OP_BATTERY_SUPPORT_H

#include "gpu_support.h"

enum { BATTERY_INPUTS_MAX = 8, BATTERY_OUTPUTS_MAX = 6 };

/* Of a matrix that is too large to be made and computed on the host: three tiles of 128 rows have
 * values, and all others are alike, so that a matrix of few tiles tells what each must become. */
enum { BATTERY_BANDS = 3 };
typedef struct battery_bands {
    int64_t tile[BATTERY_BANDS];    /* of the large matrix */
    int64_t compact[BATTERY_BANDS]; /* of the compact one */
    int64_t rows, compact_rows;
} battery_bands;

typedef struct battery_case {
    int64_t rows, cols;
    gpu_fill fill;
    uint64_t seed;
    unsigned way;               /* below the op's `ways`: types, formats, modes */
    const battery_bands *bands; /* NULL: all is of the fill. Else rows are those of one of both */
} battery_case;

/* Which band is in the tile of rows of the case's matrix, or -1; and where it is. */
int battery_band_at(const battery_case *c, int64_t tile);
int64_t battery_band_tile(const battery_case *c, int band);

typedef enum battery_likeness {
    BATTERY_LIKE_ITSELF = 0,
    BATTERY_LIKE_DATA,  /* the bytes are laid out as the data of a plane of `like` */
    BATTERY_LIKE_SCALES /* as its scales */
} battery_likeness;

typedef struct battery_output {
    const char *name;
    tn_tensor tensor;
    tn_plane plane;
    battery_likeness likeness;
    tn_tensor like;
    tn_plane like_plane;
    int is_derived; /* the op makes it from another plane of its tensor: not to be written before */
    tn_tensor initial; /* what the op finds in it, one of `in`; {0}: all bytes are 0xFF */
} battery_output;

typedef struct battery_operands {
    tn_tensor in[BATTERY_INPUTS_MAX];
    int in_count;
    battery_output out[BATTERY_OUTPUTS_MAX];
    int out_count;
    tn_tensor random; /* of stochastic rounding, one of `out`; {0}: none */
    tn_tensor skip;   /* what this way takes as its skip flag, one of `in`; {0}: it takes none */
} battery_operands;

typedef struct battery_op {
    const char *name;
    unsigned ways;
    void (*prepare)(gpu_side *side, const battery_case *c, battery_operands *operands);
    /* Asynchronous, the same for every call: it may be captured into a graph. */
    tn_status (*launch)(gpu_side *side, const battery_case *c, const battery_operands *operands);
} battery_op;

typedef struct battery_table {
    const battery_op *ops;
    int count;
    int is_near; /* the host's results are near, not the same: each run is held to another one */
} battery_table;

extern const battery_table battery_casts, battery_formats, battery_producers, battery_groups,
    battery_small_ops, battery_near_ops, battery_training, battery_products, battery_attention;

/* ---- for prepare ---------------------------------------------------------------------------- */

/* An input of the case's fill, of bytes any; `salt` tells inputs of one case apart. */
tn_tensor battery_input(gpu_side *side, const battery_case *c, battery_operands *operands,
                        tn_dtype dtype, int64_t rows, int64_t cols, uint64_t salt);

/* The skip flag, 0 until battery_flag changes it. */
tn_tensor battery_skip(gpu_side *side, battery_operands *operands);
void battery_flag(gpu_side *side, const battery_operands *operands, float value);

/* One of `count` choices that the case makes, for what is too much to be a way of its own. */
unsigned battery_pick(const battery_case *c, unsigned salt, unsigned count);

/* An input that is made already, to be destroyed with the others. */
void battery_keep(battery_operands *operands, tn_tensor tensor);

/* A plane of a tensor that the op writes, or derives, or updates from the contents of `initial`, a
 * PLAIN input of as many bytes. */
void battery_output_add(battery_operands *operands, const char *name, tn_tensor tensor,
                        tn_plane plane);
void battery_derived_add(battery_operands *operands, const char *name, tn_tensor tensor,
                         tn_plane plane);
void battery_updated_add(battery_operands *operands, const char *name, tn_tensor tensor,
                         tn_tensor initial);

/* How the output that was added last is laid out, where its own format does not tell. */
void battery_output_like(battery_operands *operands, tn_tensor like, tn_plane plane,
                         battery_likeness likeness);

/* ROW, COL or both of a tensor, as the bits of `planes` say; `planes` 0 means ROW. */
void battery_planes_add(battery_operands *operands, tn_tensor tensor, unsigned planes);

extern const tn_dtype battery_floats[3], battery_codes[2];
extern const tn_plane battery_row_and_col[2];

/* ---- one run of an op ----------------------------------------------------------------------- */

/* The op's operands on one side, outputs all 0xFF; and their end. */
battery_operands battery_prepare(gpu_side *side, const battery_op *op, const battery_case *c);
void battery_poison(gpu_side *side, const battery_operands *operands);
/* Of derived planes that are there: their bytes, behind the back of their tensors. */
void battery_poison_derived(gpu_side *side, const battery_operands *operands);
void battery_end(gpu_side *side, battery_operands *operands);

/* The bytes of all outputs; said where they differ if they do. */
typedef struct battery_results {
    gpu_copy copies[BATTERY_OUTPUTS_MAX];
} battery_results;
battery_results battery_fetch(gpu_side *side, const battery_operands *operands);
int battery_results_equal(const battery_operands *operands, const battery_results *actual,
                          const battery_results *expected, const char *what);
void battery_results_end(const battery_operands *operands, battery_results *results);

/* ---- all runs ------------------------------------------------------------------------------- */

typedef enum battery_extent {
    BATTERY_SMALL, /* under a tool that is a hundred times slower */
    BATTERY_SHORT, /* for each commit, on a CPU */
    BATTERY_WHOLE  /* everything but what needs more than 2^31 elements */
} battery_extent;

typedef struct battery_config {
    gpu_side *device, *host;
    battery_extent extent;
    int threads;      /* that share the cases; each has streams of its own on both sides */
    const char *only; /* this op alone; NULL: all */
} battery_config;

/* Each op on both sides: the same bits; and with its skip flag set: none changed. */
void battery_run(const battery_config *config);

/* An op that the device has not, by its name in the table: from now on it is passed by. Products
 * are, if a device of a build without cuBLASLt has none. */
void battery_leave_out(const char *name);
void battery_look_for_products(gpu_side *device);

/* Calls `check` with each op of each table, or with the one of this name. */
void battery_each_op(const char *only, void (*check)(const battery_op *op));

/* ---- the table ------------------------------------------------------------------------------ */

typedef enum battery_column {
    BATTERY_COMPARED = 0, /* on two sides */
    BATTERY_SKIPPED,      /* with the skip flag set */
    BATTERY_REPLAYED,     /* from a graph */
    BATTERY_REORDERED,    /* threads and blocks in another order */
    BATTERY_LARGE,        /* more than 2^31 elements */
    BATTERY_COLUMNS
} battery_column;

/* Counts a case of an op; `passed` 0 is a failure. From any thread. */
void battery_count(const battery_op *op, battery_column column, int passed);
long battery_failures(battery_column column);
/* Ops, their cases and failures, and the sums of all. */
void battery_print_table(const char *title);

#endif
