/* The battery beyond 2^31 elements: 65537 x 32768, whose last row begins at element 2^31, and
 * 8388737 x 257, which has more tiles of 128 rows than a grid's second dimension has blocks.
 *
 *     gpu_test_op_battery_large                 one to five ways of each op at the first shape,
 *                                               one at the second
 *     gpu_test_op_battery_large --op NAME       one op
 *     gpu_test_op_battery_large --shape 0       one shape
 *     gpu_test_op_battery_large --ways N        so many ways of each
 *     gpu_test_op_battery_large --rehearse      small shapes, the host driver in the GPU's place
 *
 * Every byte of every output is compared with what a compact matrix gives on the host
 * (op_battery_bands_support.c). Not among them: a map of rows and a history of amaxes, which have
 * no elements to speak of; stochastic rounding, where an element draws by its place; the cross
 * entropy and products, which are only near the host's; what a training step has beside casts, with
 * sums over all rows or nine operands; and attention, whose work grows with the square of the rows.
 * The GPU needs 60 GB, the host 20.
 */
#include "op_battery_bands_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static gpu_side gpu, host;
static int is_rehearsal, only_shape = -1;
static unsigned ways; /* 0: as many as the op has kinds of */
static const char *only_op;

static const int64_t shapes[][2] = {{65537, 32768}, {8388737, 257}};
static const int64_t rehearsed[][2] = {{5 * 1024 + 1, 260}, {9 * 1024 + 3 * 128 + 5, 257}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static int is_left_out(const battery_op *op) {
    static const char *const names[] = {
        "pad groups",    "scale update",      "quantize, stochastically",
        "norm backward", "embed backward",    "weights of rows",
        "adamw",         "cross entropy",     "grouped gemm",
        "attention",     "attention backward"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(op->name, names[i]) == 0) return 1;
    return 0;
}

static void check_case(const battery_op *op, const battery_case *large) {
    battery_case compact = *large;
    compact.rows = large->bands->compact_rows;
    battery_operands on_device = battery_prepare(&gpu, op, large);
    battery_operands on_host = battery_prepare(&host, op, &compact);
    EXPECT_OK(op->launch(&gpu, large, &on_device));
    EXPECT_OK(op->launch(&host, &compact, &on_host));
    battery_results expected = battery_fetch(&host, &on_host);
    for (int i = 0; i < on_host.out_count; i++) {
        const int equal = battery_large_equal(&gpu, large->bands, &on_device.out[i],
                                              &on_host.out[i], &expected.copies[i]);
        if (!equal)
            printf("  %s way %u, %lld x %lld, %s differs\n", op->name, large->way,
                   (long long)large->rows, (long long)large->cols, on_host.out[i].name);
        battery_count(op, BATTERY_LARGE, equal);
    }
    battery_results_end(&on_host, &expected);
    battery_end(&gpu, &on_device);
    battery_end(&host, &on_host);
}

/* As many as show each format; the first one of a cast is 1D from bf16 to both planes. */
static unsigned ways_of(const battery_op *op, int shape) {
    const unsigned sixth = op->ways / 6;
    if (ways > 0) return ways;
    if (shape > 0) return 1;
    return sixth < 1 ? 1 : sixth > 5 ? 5 : sixth;
}

static void check_op(const battery_op *op) {
    if (is_left_out(op)) return;
    for (int shape = 0; shape < SHAPES; shape++) {
        const int64_t *of = is_rehearsal ? rehearsed[shape] : shapes[shape];
        const battery_bands bands = battery_bands_of(of[0]);
        if (only_shape >= 0 && shape != only_shape) continue;
        for (unsigned i = 0; i < ways_of(op, shape); i++) {
            const unsigned way = (49 + 11 * i + 22 * (unsigned)shape) % op->ways;
            battery_case c = {of[0], of[1], GPU_FILL_NORMAL, way + 3, way, &bands};
            check_case(op, &c);
        }
    }
}

static void every_op_beyond_2_to_the_31_elements(void **state) {
    (void)state;
    battery_each_op(only_op, check_op);
    assert_int_equal(battery_failures(BATTERY_LARGE), 0);
}

static void read_options(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--rehearse") == 0)
            is_rehearsal = 1;
        else if (strcmp(argv[i], "--op") == 0 && i + 1 < argc)
            only_op = argv[++i];
        else if (strcmp(argv[i], "--shape") == 0 && i + 1 < argc)
            only_shape = atoi(argv[++i]);
        else if (strcmp(argv[i], "--ways") == 0 && i + 1 < argc)
            ways = (unsigned)atoi(argv[++i]);
        else {
            fprintf(stderr, "usage: %s [--op NAME] [--shape 0|1] [--ways N] [--rehearse]\n",
                    argv[0]);
            exit(2);
        }
    }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_op_beyond_2_to_the_31_elements)};
    read_options(argc, argv);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (is_rehearsal)
        gpu_open_host(&gpu, (size_t)64 << 30);
    else
        gpu_open(&gpu);
    gpu_open_host(&host, (size_t)64 << 30);
    int failures = cmocka_run_group_tests_name("battery", tests, NULL, NULL);
    battery_print_table("operation");
    if (failures == 0) {
        gpu_close(&host);
        gpu_close(&gpu);
    }
    return failures;
}
