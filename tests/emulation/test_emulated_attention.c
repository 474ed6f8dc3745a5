/* The kernels of attention and of its gradient against the host's definition, bit for bit, on the
 * emulated device: every size of head, sequences with and without tails, grouped heads, causal or
 * not, addresses of any alignment, and values of every kind. */
#include <math.h>
#include <stdio.h>

#include "emulation_support.h"

/* Of the cases every one, or where a switch of fibers costs ten times as much every fifth. */
#ifdef __SANITIZE_ADDRESS__
enum { STEP = 5 };
#else
enum { STEP = 1 };
#endif

typedef struct attention_case {
    tn_dtype dtype;
    int64_t sequences, length, heads, heads_kv, head_dim;
    int is_causal, has_log_sum;
    float scale;
    size_t offset; /* elements that all operands are moved by */
    gpu_fill fill;
    uint64_t seed;
} attention_case;

static attention_case case_of(unsigned way, int64_t length, int64_t head_dim) {
    static const int64_t heads[][2] = {{1, 1}, {2, 1}, {3, 3}, {4, 2}};
    attention_case c = {.dtype = (tn_dtype)(TN_FP32 + way % 3),
                        .sequences = 1 + way % 2,
                        .length = length,
                        .heads = heads[way / 2 % 4][0],
                        .heads_kv = heads[way / 2 % 4][1],
                        .head_dim = head_dim,
                        .is_causal = way / 3 % 2,
                        .has_log_sum = way % 7 != 3,
                        .scale = way % 5 == 2 ? 0.7f : 1.0f / sqrtf((float)head_dim),
                        .offset = way % 4 == 3 ? way % 8 : 0,
                        .fill = GPU_FILL_NORMAL,
                        .seed = 100 + way};
    return c;
}

static void describe(const attention_case *c, char *text, size_t bytes) {
    snprintf(text, bytes, "%s%s, %lld x %lld tokens, %lld heads by %lld of %lld, %s seed %llu%s",
             tn_dtype_name(c->dtype), c->is_causal ? " causal" : "", (long long)c->sequences,
             (long long)c->length, (long long)c->heads, (long long)c->heads_kv,
             (long long)c->head_dim, gpu_fill_name(c->fill), (unsigned long long)c->seed,
             c->offset ? ", moved" : "");
}

typedef struct operands {
    twin qkv, dy, y, log_sum, dots, dqkv;
} operands;

static twin make(const attention_case *c, tn_dtype dtype, int64_t count, int is_input,
                 uint64_t salt) {
    const size_t each = tn_dtype_bytes(dtype);
    twin made = twin_make((size_t)count * each, c->offset * each);
    if (is_input) {
        gpu_fill_values(c->fill, dtype, c->seed * 8 + salt, made.host, (size_t)count);
        memcpy(made.emulated, made.host, made.bytes);
    }
    return made;
}

static operands make_operands(const attention_case *c) {
    const int64_t tokens = c->sequences * c->length, of_y = tokens * c->heads * c->head_dim;
    const int64_t packed = tokens * (c->heads + 2 * c->heads_kv) * c->head_dim;
    operands o = {.qkv = make(c, c->dtype, packed, 1, 0), .dy = make(c, c->dtype, of_y, 1, 1)};
    o.y = make(c, c->dtype, of_y, 0, 2);
    o.log_sum = make(c, TN_FP32, tokens * c->heads, 0, 3);
    o.dots = make(c, TN_FP32, tokens * c->heads, 0, 4);
    o.dqkv = make(c, c->dtype, packed, 0, 5);
    return o;
}

static void end_operands(operands *o) {
    twin_end(&o->qkv), twin_end(&o->dy), twin_end(&o->y);
    twin_end(&o->log_sum), twin_end(&o->dots), twin_end(&o->dqkv);
}

static void *side_of(const twin *of, int emulated) { return emulated ? of->emulated : of->host; }

static tn__attention_work work_of(const attention_case *c, const operands *o, int emulated) {
    tn__attention_work work = {.dtype = c->dtype,
                               .qkv = side_of(&o->qkv, emulated),
                               .tokens = c->sequences * c->length,
                               .sequence = c->length,
                               .heads = c->heads,
                               .heads_kv = c->heads_kv,
                               .head_dim = c->head_dim,
                               .is_causal = c->is_causal,
                               .scale = c->scale,
                               .y = side_of(&o->y, emulated)};
    if (c->has_log_sum) work.log_sum = side_of(&o->log_sum, emulated);
    return work;
}

static tn__attention_work gradient_of(const attention_case *c, const operands *o, int emulated) {
    tn__attention_work work = work_of(c, o, emulated);
    work.log_sum = side_of(&o->log_sum, emulated);
    work.dy = side_of(&o->dy, emulated);
    work.dots = side_of(&o->dots, emulated);
    work.dqkv = side_of(&o->dqkv, emulated);
    return work;
}

static void check_case(const attention_case *c) {
    char what[192];
    operands o = make_operands(c);
    describe(c, what, sizeof what);
    tn__attention_work work = work_of(c, &o, 0);
    tn__host_attention(&work);
    work = work_of(c, &o, 1);
    EXPECT_OK(tn__op_table_cuda.attention(emulation.device, &work, emulation.stream));
    emulation_wait(what);
    twin_compare(&o.y, "attention", what);
    twin_compare(&o.log_sum, "log_sum", what); /* unwritten: NaN, which backward must live with */
    work = gradient_of(c, &o, 0);
    tn__host_attention_gradient(&work);
    work = gradient_of(c, &o, 1);
    EXPECT_OK(tn__op_table_cuda.attention_gradient(emulation.device, &work, emulation.stream));
    emulation_wait(what);
    twin_compare(&o.dots, "attention gradient", what);
    twin_compare(&o.dqkv, "attention gradient", what);
    end_operands(&o);
}

static void heads_of_every_size_equal_the_host(void **state) {
    (void)state;
    for (int64_t head_dim = 8; head_dim <= 128; head_dim += 8 * STEP) {
        const unsigned way = (unsigned)head_dim / 8;
        const attention_case c = case_of(way, way % 5 ? 35 : 67, head_dim);
        check_case(&c);
    }
    gpu_count_report("attention, sizes of heads");
}

static void sequences_of_any_length_equal_the_host(void **state) {
    static const int64_t lengths[] = {1, 2, 16, 17, 63, 64, 65, 129};
    (void)state;
    for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i += STEP)
        for (unsigned j = 0; j < 2; j++) {
            attention_case c = case_of(i * 5 + j * 3, lengths[i], j ? 24 : 72);
            c.is_causal = (int)((i + j) % 2);
            check_case(&c);
        }
    gpu_count_report("attention, lengths of sequences");
}

static void every_way_equals_the_host_in_every_order(void **state) {
    static const uint64_t orders[] = {0, 1, 20261130};
    (void)state;
    for (unsigned way = 0; way < 24; way += STEP) {
        attention_case c = case_of(way, 70, way % 4 == 1 ? 80 : 16);
        emulated_set_order(orders[way % 3]);
        check_case(&c);
    }
    emulated_set_order(0);
    gpu_count_report("attention, every way");
}

static void values_of_every_kind_equal_the_host(void **state) {
    (void)state;
    for (unsigned way = 0; way < 2 * GPU_FILL_COUNT; way += STEP) {
        attention_case c = case_of(way, way % 4 ? 66 : 130, 16);
        c.fill = (gpu_fill)(way % GPU_FILL_COUNT);
        c.has_log_sum = 1;
        check_case(&c);
    }
    gpu_count_report("attention, values");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_of_every_size_equal_the_host),
        cmocka_unit_test(sequences_of_any_length_equal_the_host),
        cmocka_unit_test(every_way_equals_the_host_in_every_order),
        cmocka_unit_test(values_of_every_kind_equal_the_host),
    };
    emulation_begin();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    emulation_end();
    return failures;
}
