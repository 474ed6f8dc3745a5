/* Scaled numbers to codes on the host: the definition of both roundings. */
#include "host_kernels.h"
#include "host_number.h"

static tn__small_float type_of(tn_dtype dtype) {
    switch (dtype) {
    case TN_E4M3: return tn__type_e4m3();
    case TN_E5M2: return tn__type_e5m2();
    default: return tn__type_e2m1();
    }
}

static void encode_to_nearest(tn_dtype dtype, int count, const float *scaled, uint8_t *code) {
    if (dtype != TN_E2M1) {
        tn__store_floats(dtype, code, 0, count, scaled);
        return;
    }
    for (int i = 0; i < count; i++)
        code[i] = tn__float_to_e2m1(scaled[i]);
}

/* Where numbers are drawn: those of a group stay until another group's are asked for. */
typedef struct draw {
    tn__random state;
    uint64_t group;
    uint32_t words[4];
    int has_words;
} draw;

static uint32_t draw_at(draw *from, int64_t row, int64_t col, int64_t cols) {
    const uint64_t group = tn__random_group_of(row, col, cols);
    if (!from->has_words || group != from->group) {
        tn__random_words(from->state, group, from->words);
        from->group = group;
        from->has_words = 1;
    }
    return tn__random_number(from->words, (int)(col % TN__RANDOM_GROUP));
}

void tn__host_encode(const tn__quantize_work *work, tn__run run, int count, const float *scaled,
                     uint8_t *code) {
    if (!work->random) {
        encode_to_nearest(work->dtype, count, scaled, code);
        return;
    }
    const tn__small_float type = type_of(work->dtype);
    draw from = {.state = *work->random};
    for (int i = 0; i < count; i++) {
        const int64_t row = run.is_down ? run.row + i : run.row;
        const int64_t col = run.is_down ? run.col : run.col + i;
        const uint32_t random = draw_at(&from, row, col, work->src.cols);
        code[i] = (uint8_t)tn__round_stochastically(type, scaled[i], random);
    }
}
