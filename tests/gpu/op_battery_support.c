/* The battery's engine: see op_battery_support.h. */
#include "op_battery_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const battery_table *const battery_tables[] = {&battery_casts, &battery_small_ops,
                                                      &battery_groups};
enum { TABLE_COUNT = sizeof battery_tables / sizeof *battery_tables };

const tn_dtype battery_floats[3] = {TN_FP32, TN_BF16, TN_FP16};
const tn_dtype battery_codes[2] = {TN_E4M3, TN_E5M2};

/* ---- operands ------------------------------------------------------------------------------- */

void battery_keep(battery_operands *operands, tn_tensor tensor) {
    assert_true(operands->in_count < BATTERY_INPUTS_MAX);
    operands->in[operands->in_count++] = tensor;
}

tn_tensor battery_input(gpu_side *side, const battery_case *c, battery_operands *operands,
                        tn_dtype dtype, int64_t rows, int64_t cols, uint64_t salt) {
    size_t count = (size_t)rows * (size_t)cols;
    tn_tensor tensor = gpu_plain(side, dtype, rows, cols);
    void *data = malloc(count * tn_dtype_bytes(dtype) + 1);
    gpu_fill_values(c->fill, dtype, c->seed * 16 + salt, data, count);
    gpu_upload(side, tensor, data);
    free(data);
    battery_keep(operands, tensor);
    return tensor;
}

tn_tensor battery_skip(gpu_side *side, battery_operands *operands) {
    operands->skip = gpu_plain(side, TN_FP32, 1, 1);
    battery_flag(side, operands, 0.0f);
    battery_keep(operands, operands->skip);
    return operands->skip;
}

void battery_flag(gpu_side *side, const battery_operands *operands, float value) {
    gpu_upload(side, operands->skip, &value);
}

tn_tensor battery_bytes(gpu_side *side, const battery_case *c, battery_operands *operands,
                        int64_t count) {
    uint64_t state = c->seed + 99;
    tn_tensor tensor = gpu_plain(side, TN_BYTE, 1, count);
    unsigned char *data = malloc((size_t)count + 1);
    for (int64_t i = 0; i < count; i++)
        data[i] = (unsigned char)gpu_random(&state);
    gpu_upload(side, tensor, data);
    free(data);
    battery_keep(operands, tensor);
    return tensor;
}

static void add(battery_operands *operands, battery_output output) {
    assert_true(operands->out_count < BATTERY_OUTPUTS_MAX);
    operands->out[operands->out_count++] = output;
}

void battery_output_add(battery_operands *operands, const char *name, tn_tensor tensor,
                        tn_plane plane) {
    add(operands, (battery_output){name, tensor, plane, 0});
}

void battery_derived_add(battery_operands *operands, const char *name, tn_tensor tensor,
                         tn_plane plane) {
    add(operands, (battery_output){name, tensor, plane, 1});
}

static int is_before(const battery_operands *operands, int output) {
    for (int i = 0; i < output; i++)
        if (operands->out[i].tensor.value == operands->out[output].tensor.value) return 1;
    return 0;
}

/* Planes of one tensor are leased at once, so that none makes another one stale. */
static void poison_tensor(gpu_side *side, const battery_operands *operands, tn_tensor tensor) {
    tn_lease leases[BATTERY_OUTPUTS_MAX];
    int count = 0;
    for (int i = 0; i < operands->out_count; i++) {
        const battery_output *out = &operands->out[i];
        tn_plane_view view;
        if (out->tensor.value != tensor.value || out->is_derived) continue;
        EXPECT_OK(
            tn_lease_begin(tensor, out->plane, TN_WRITE, side->stream, &leases[count++], &view));
        if (view.layout.data_bytes > 0)
            EXPECT_OK(tn_fill(side->device, view.data, 0xFF, view.layout.data_bytes, side->stream));
        if (view.layout.scale_bytes > 0)
            EXPECT_OK(
                tn_fill(side->device, view.scale, 0xFF, view.layout.scale_bytes, side->stream));
    }
    while (count > 0)
        EXPECT_OK(tn_lease_end(leases[--count]));
}

void battery_poison(gpu_side *side, const battery_operands *operands) {
    for (int i = 0; i < operands->out_count; i++)
        if (!is_before(operands, i)) poison_tensor(side, operands, operands->out[i].tensor);
}

battery_operands battery_prepare(gpu_side *side, const battery_op *op, const battery_case *c) {
    battery_operands operands = {.in_count = 0};
    op->prepare(side, c, &operands);
    battery_poison(side, &operands);
    return operands;
}

void battery_end(gpu_side *side, battery_operands *operands) {
    for (int i = 0; i < operands->out_count; i++)
        if (!is_before(operands, i)) gpu_destroy(side, operands->out[i].tensor);
    for (int i = 0; i < operands->in_count; i++)
        gpu_destroy(side, operands->in[i]);
}

/* ---- results -------------------------------------------------------------------------------- */

battery_results battery_fetch(gpu_side *side, const battery_operands *operands) {
    battery_results results = {.copies = {{.data = NULL}}};
    for (int i = 0; i < operands->out_count; i++)
        results.copies[i] = gpu_download(side, operands->out[i].tensor, operands->out[i].plane);
    return results;
}

void battery_compare(const battery_operands *operands, const battery_results *actual,
                     const battery_results *expected, const char *name, const char *what) {
    for (int i = 0; i < operands->out_count; i++) {
        char part[224];
        snprintf(part, sizeof part, "%s, %s", what, operands->out[i].name);
        gpu_count(name, gpu_copies_equal(&actual->copies[i], &expected->copies[i], part));
    }
}

void battery_results_end(const battery_operands *operands, battery_results *results) {
    for (int i = 0; i < operands->out_count; i++)
        gpu_copy_end(&results->copies[i]);
}

/* ---- cases ---------------------------------------------------------------------------------- */

typedef struct battery {
    gpu_side *device, *host;
    uint64_t seed; /* a new one for each case */
} battery;

static battery_results run_on(gpu_side *side, const battery_op *op, const battery_case *c,
                              battery_operands *operands) {
    *operands = battery_prepare(side, op, c);
    op->launch(side, c, operands);
    return battery_fetch(side, operands);
}

static void check_case(battery *b, const battery_op *op, int64_t rows, int64_t cols, gpu_fill fill,
                       unsigned way) {
    battery_case c = {rows, cols, fill, b->seed++, way % op->ways};
    battery_operands on_device, on_host;
    char what[160];
    battery_results actual = run_on(b->device, op, &c, &on_device);
    battery_results expected = run_on(b->host, op, &c, &on_host);
    snprintf(what, sizeof what, "%s way %u, %lld x %lld %s, seed %llu", op->name, c.way,
             (long long)rows, (long long)cols, gpu_fill_name(fill), (unsigned long long)c.seed);
    battery_compare(&on_device, &actual, &expected, op->name, what);
    battery_results_end(&on_device, &actual);
    battery_results_end(&on_host, &expected);
    battery_end(b->device, &on_device);
    battery_end(b->host, &on_host);
}

static int is_untouched(const battery_results *results, int count) {
    for (int i = 0; i < count; i++) {
        const gpu_copy *copy = &results->copies[i];
        for (size_t at = 0; at < copy->layout.data_bytes; at++)
            if (copy->data[at] != 0xFF) return 0;
        for (size_t at = 0; at < copy->layout.scale_bytes; at++)
            if (((const unsigned char *)copy->scale)[at] != 0xFF) return 0;
    }
    return 1;
}

/* With the flag set, whatever its value, no byte of an output changes. */
static void check_skip_on(gpu_side *side, const battery_op *op, unsigned way) {
    static const float flags[] = {1.0f, -2.5f, 0x1p-149f};
    battery_case c = {130, 40, GPU_FILL_NORMAL, way + 1, way};
    battery_operands operands = battery_prepare(side, op, &c);
    if (operands.skip.value) {
        battery_flag(side, &operands, flags[way / 2 % 3]);
        op->launch(side, &c, &operands);
        battery_results results = battery_fetch(side, &operands);
        char name[80];
        snprintf(name, sizeof name, "%s, skipped", op->name);
        gpu_count(name, is_untouched(&results, operands.out_count));
        battery_results_end(&operands, &results);
    }
    battery_end(side, &operands);
}

static void check_skip(battery *b, const battery_op *op) {
    for (unsigned way = 0; way < op->ways; way++) {
        check_skip_on(b->device, op, way);
        check_skip_on(b->host, op, way);
    }
}

/* Every way with every fill, of a shape with tails in both dimensions. */
static void check_ways(battery *b, const battery_op *op, battery_extent extent) {
    static const int64_t shapes[][2] = {{130, 24}, {129, 257}};
    int fills = extent == BATTERY_WHOLE ? GPU_FILL_COUNT : 2;
    for (unsigned way = 0; way < op->ways; way++) {
        for (int f = 0; f < fills; f++) {
            const int64_t *shape = shapes[(way + (unsigned)f) % 2];
            gpu_fill fill =
                (gpu_fill)(extent == BATTERY_WHOLE ? f
                                                   : (int)(way + 3 * (unsigned)f) % GPU_FILL_COUNT);
            check_case(b, op, shape[0], shape[1], fill, way);
        }
    }
}

static void check_tails(battery *b, const battery_op *op, battery_extent extent) {
    int step = extent == BATTERY_WHOLE ? 1 : 16;
    unsigned way = 0;
    for (int64_t tail = 1; tail <= 129; tail += step) {
        check_case(b, op, tail, 136, GPU_FILL_NORMAL, way++);
        check_case(b, op, 136, tail, GPU_FILL_SPECIAL, way++);
        check_case(b, op, 128 + tail, 258 - tail, GPU_FILL_NORMAL, way++);
    }
}

/* TransformerEngine's list (leading dimensions flattened), one row, one column, nothing. */
static void check_shapes(battery *b, const battery_op *op, battery_extent extent) {
    static const int64_t shapes[][2] = {
        {0, 128},    {128, 0},    {1, 1},       {1, 16},      {1, 300},    {300, 1},
        {65, 96},    {256, 256},  {16, 512},    {303, 300},   {1024, 1},   {1, 1024},
        {993, 512},  {256, 1024}, {512, 512},   {305, 256},   {256, 272},  {2000, 1024},
        {128, 7168}, {513, 131},  {2048, 1024}, {4096, 1632}, {256, 65536}};
    size_t count = extent == BATTERY_WHOLE ? sizeof shapes / sizeof *shapes : 12;
    for (size_t s = 0; s < count; s++) {
        unsigned ways = extent == BATTERY_WHOLE && op->ways < 8 ? op->ways : 2;
        for (unsigned i = 0; i < ways; i++) {
            gpu_fill fill = i ? GPU_FILL_RANGE : GPU_FILL_NORMAL;
            check_case(b, op, shapes[s][0], shapes[s][1], fill, (unsigned)s + 5 * i);
        }
    }
}

void battery_run(gpu_side *device, gpu_side *host, battery_extent extent) {
    battery b = {device, host, 1};
    for (int t = 0; t < TABLE_COUNT; t++) {
        for (int i = 0; i < battery_tables[t]->count; i++) {
            const battery_op *op = &battery_tables[t]->ops[i];
            check_ways(&b, op, extent);
            check_skip(&b, op);
            check_tails(&b, op, extent);
            check_shapes(&b, op, extent);
        }
    }
}

void battery_each_op(void (*check)(const battery_op *op)) {
    for (int t = 0; t < TABLE_COUNT; t++)
        for (int i = 0; i < battery_tables[t]->count; i++)
            check(&battery_tables[t]->ops[i]);
}
