/* The emulated device itself: what it computes, and that it finds what is wrong with a kernel. */
#include <stdlib.h>
#include <string.h>

#include "emulation_support.h"
#include "planted_arguments.h"

enum { BLOCKS = 5, WORDS = BLOCKS * PLANTED_TILE, GUARDED = WORDS + 16, ORDERS = 8 };

/* Runs a planted kernel over `count` words, whose values are `first`, first + 1, ...; returns
 * what it did wrong. */
static const char *run(const char *name, uint32_t *out, int64_t count, uint64_t order) {
    static char fault[EMULATED_FAULT_BYTES];
    uint32_t *in = malloc((size_t)count * sizeof *in);
    const emulated_kernel *kernel = emulated_kernel_find("planted_kernels", name);
    assert_non_null(kernel);
    assert_int_equal(kernel->argument_bytes, sizeof(tn__planted_arguments));
    for (int64_t i = 0; i < count; i++)
        in[i] = (uint32_t)(i + 1) * 2654435761u;
    tn__planted_arguments arguments = {in, out, count};
    emulated_launch launch = {kernel, &arguments, (unsigned)((count + 63) / 64), PLANTED_THREADS};
    emulated_set_order(order);
    emulated_run(&launch);
    emulated_take_fault(fault);
    emulated_set_order(0);
    free(in);
    return fault;
}

static uint32_t value_of(int64_t index) { return (uint32_t)(index + 1) * 2654435761u; }

static int is_reversed(const uint32_t *out, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        int64_t from = i / PLANTED_TILE * PLANTED_TILE + PLANTED_TILE - 1 - i % PLANTED_TILE;
        if (out[i] != (from < count ? value_of(from) : 0)) return 0;
    }
    return 1;
}

/* ---- what it computes ----------------------------------------------------------------------- */

static void a_right_kernel_is_right_in_every_order(void **state) {
    uint32_t out[GUARDED];
    (void)state;
    for (uint64_t order = 0; order < ORDERS; order++) {
        for (int64_t count = WORDS - 70; count <= WORDS; count += 35) {
            memset(out, 0xFF, sizeof out);
            assert_string_equal(run("reverse", out, count, order), "");
            assert_true(is_reversed(out, count));
            assert_int_equal(out[count], 0xFFFFFFFF);
        }
    }
}

static uint32_t lanes_where(int first, uint32_t modulus, uint32_t wanted) {
    uint32_t mask = 0;
    for (int lane = 0; lane < 32; lane++)
        if (value_of(first + lane) % modulus == wanted) mask |= 1u << lane;
    return mask;
}

/* Over lanes [from, to) of the warp. */
static void expect_reductions(const uint32_t *out, int first, int lane) {
    uint32_t sum = 0, exclusive = 0, largest = 0, smallest = UINT32_MAX, odd = 0, has_one = 0;
    int32_t largest_signed = INT32_MIN;
    for (int other = 0; other < 32; other++) {
        uint32_t value = value_of(first + other);
        int is_in_half = other / 16 == lane / 16;
        sum += value;
        exclusive ^= value;
        if ((int32_t)value > largest_signed) largest_signed = (int32_t)value;
        if (is_in_half && value > largest) largest = value;
        if (is_in_half && value < smallest) smallest = value;
        if (is_in_half && value % 32 == 1) has_one = 1;
    }
    for (int thread = 0; thread < PLANTED_THREADS; thread++)
        odd += value_of(thread) % 2;
    assert_int_equal(out[6], sum);
    assert_int_equal(out[7], largest);
    assert_int_equal(out[8], smallest);
    assert_int_equal(out[9], largest_signed);
    assert_int_equal(out[10], exclusive);
    assert_int_equal(out[13], odd);
    assert_int_equal(out[15], has_one);
}

static void exchanges_give_what_cuda_says(void **state) {
    static uint32_t out[PLANTED_THREADS * 16];
    (void)state;
    for (uint64_t order = 0; order < ORDERS; order++) {
        assert_string_equal(run("exchanges", out, PLANTED_THREADS, order), "");
        for (int thread = 0; thread < PLANTED_THREADS; thread++) {
            int lane = thread % 32, first = thread - lane;
            const uint32_t *of = out + (size_t)thread * 16;
            assert_int_equal(of[0], value_of(first + 5));
            assert_int_equal(of[1], value_of(first + lane / 8 * 8 + 3));
            assert_int_equal(of[2], value_of(first + (lane ^ 9)));
            assert_int_equal(of[3], value_of(first + (lane < 29 ? lane + 3 : lane)));
            assert_int_equal(of[4], value_of(first + (lane % 16 >= 3 ? lane - 3 : lane)));
            assert_int_equal(of[5], lanes_where(first, 3, 0));
            assert_int_equal(of[11], lanes_where(first, 4, value_of(thread) % 4));
            assert_int_equal(of[12], value_of(first + (lane ^ 1)));
            assert_int_equal(of[14], value_of(first + 31));
            expect_reductions(of, first, lane);
        }
    }
}

/* ---- what it finds -------------------------------------------------------------------------- */

/* In a build with TSan these two are races, which end the program. */
#if !defined(__SANITIZE_THREAD__)
static int orders_that_show(const char *name) {
    uint32_t out[GUARDED];
    int shown = 0;
    for (uint64_t order = 0; order < ORDERS; order++) {
        assert_string_equal(run(name, out, PLANTED_TILE, order), "");
        int is_twice = strcmp(name, "reverse_without_barrier") != 0;
        int is_right = is_twice ? memcmp(out, (uint32_t[]){value_of(0), value_of(1)}, 8) == 0
                                : is_reversed(out, PLANTED_TILE);
        shown += !is_right;
    }
    return shown;
}

static void a_missing_barrier_gives_other_bits(void **state) {
    (void)state;
    assert_int_equal(orders_that_show("reverse_without_barrier"), ORDERS);
    assert_int_equal(orders_that_show("reverse_twice_with_one_barrier"), ORDERS);
}
#endif

#if !defined(__SANITIZE_ADDRESS__)
static void a_wrong_tail_writes_behind_its_operand(void **state) {
    (void)state;
    for (int64_t count = 1; count < PLANTED_TILE; count++) {
        uint32_t out[GUARDED];
        memset(out, 0xFF, sizeof out);
        assert_string_equal(run("copy_past_the_tail", out, count, 0), "");
        assert_int_not_equal(out[count], 0xFFFFFFFF);
    }
}
#endif

static void expect_fault(const char *kernel, const char *words) {
    for (uint64_t order = 0; order < ORDERS; order++) {
        uint32_t out[GUARDED];
        const char *fault = run(kernel, out, PLANTED_TILE, order);
        if (!strstr(fault, words)) fail_msg("%s: \"%s\", expected \"%s\"", kernel, fault, words);
        if (!strstr(fault, kernel)) fail_msg("\"%s\" does not name %s", fault, kernel);
    }
}

static void what_a_kernel_must_not_do_is_a_fault(void **state) {
    uint32_t out[GUARDED];
    (void)state;
    expect_fault("barrier_of_one_warp", "barrier");
    expect_fault("barrier_after_a_return", "return");
    expect_fault("shuffle_lacking_a_lane", "a lane that has returned");
    expect_fault("shuffle_from_outside", "a lane that takes no part");
    expect_fault("shuffles_of_two_masks", "no thread can go on");
    assert_string_equal(run("reverse", out, WORDS, 0), ""); /* the device goes on */
    assert_true(is_reversed(out, WORDS));
}

static void every_kernel_of_the_library_is_there(void **state) {
    uint64_t before = emulated_launch_count();
    twin_matrix x = twin_matrix_fill(TN_FP32, 3, 5, GPU_FILL_NORMAL, 1);
    twin_matrix y = twin_matrix_make(TN_BF16, 3, 5);
    (void)state;
    EXPECT_OK(tn__op_table_cuda.convert(emulation.device, &x.emulated, &y.emulated,
                                        emulation.stream)); /* loads all by name */
    emulation_wait("convert");
    assert_int_equal(emulated_launch_count(), before + 1);
    assert_null(emulated_kernel_find("cuda_cast", "no such kernel"));
    twin_matrix_end(&x);
    twin_matrix_end(&y);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_right_kernel_is_right_in_every_order),
        cmocka_unit_test(exchanges_give_what_cuda_says),
#if !defined(__SANITIZE_THREAD__)
        cmocka_unit_test(a_missing_barrier_gives_other_bits),
#endif
#if !defined(__SANITIZE_ADDRESS__)
        cmocka_unit_test(a_wrong_tail_writes_behind_its_operand),
#endif
        cmocka_unit_test(what_a_kernel_must_not_do_is_a_fault),
        cmocka_unit_test(every_kernel_of_the_library_is_there),
    };
    emulation_begin();
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    emulation_end();
    return failures;
}
