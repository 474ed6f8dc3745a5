/* Which plane a GEMM's operand is read from: every format on every architecture, by hand. */
#include "tensor_fixture.h"

#include "tenure_lifetime.h"

/* Planes of FPROP A, B, DGRAD A, B, WGRAD A, B: D(ATA), R(OW), C(OL); "" is refused. */
static const char *const expected[TN_FORMAT_COUNT][TN_ARCHITECTURE_COUNT] = {
    [TN_FORMAT_PLAIN] = {"DDDDDD", "DDDDDD", "DDDDDD", "DDDDDD", "DDDDDD", "DDDDDD"},
    [TN_FORMAT_FP8_BLOCK_1D] =
        {[TN_ARCHITECTURE_HOST] = "RRRCCC", [TN_ARCHITECTURE_HOPPER] = "RRRCCC"},
    [TN_FORMAT_FP8_BLOCK_2D] =
        {[TN_ARCHITECTURE_HOST] = "RRRCCC", [TN_ARCHITECTURE_HOPPER] = "RRRCCC"},
    [TN_FORMAT_FP8_TENSOR] = {[TN_ARCHITECTURE_HOST] = "RRRCCC",
                              [TN_ARCHITECTURE_ADA] = "RRRCCC",
                              [TN_ARCHITECTURE_HOPPER] = "RRRCCC",
                              [TN_ARCHITECTURE_BLACKWELL] = "RRRRRR",
                              [TN_ARCHITECTURE_BLACKWELL_RTX] = "RRRCCC"},
    [TN_FORMAT_MXFP8] = {[TN_ARCHITECTURE_BLACKWELL] = "RRRCCC"},
    [TN_FORMAT_NVFP4] =
        {[TN_ARCHITECTURE_BLACKWELL] = "RRRCCC", [TN_ARCHITECTURE_BLACKWELL_RTX] = "RRRCCC"},
};

static void expect_refused(tn_format format, tn_architecture architecture, tn_operand operand) {
    tn_plane plane = TN_PLANE_COUNT;
    EXPECT_STATUS(tn_format_operand(format, architecture, operand, &plane), TN_UNSUPPORTED);
    EXPECT_ERROR_HAS(tn_format_name(format));
    EXPECT_ERROR_HAS(tn_architecture_name(architecture));
    assert_int_equal(plane, TN_PLANE_COUNT);
}

static void operands_are_read_from_the_planes_of_the_table(void **state) {
    (void)state;
    for (int format = 0; format < TN_FORMAT_COUNT; format++) {
        for (int architecture = 0; architecture < TN_ARCHITECTURE_COUNT; architecture++) {
            const char *planes = expected[format][architecture];
            for (int operand = 0; operand < TN_OPERAND_COUNT; operand++) {
                tn_format of = (tn_format)format;
                tn_architecture on = (tn_architecture)architecture;
                tn_plane plane = TN_PLANE_COUNT;
                if (!planes) {
                    expect_refused(of, on, (tn_operand)operand);
                    continue;
                }
                EXPECT_OK(tn_format_operand(of, on, (tn_operand)operand, &plane));
                assert_int_equal(tn_plane_name(plane)[0], planes[operand]);
            }
        }
    }
}

static void a_refusal_says_where_there_are_such_gemms(void **state) {
    tn_plane plane;
    (void)state;
    EXPECT_STATUS(tn_format_operand(TN_FORMAT_FP8_BLOCK_2D, TN_ARCHITECTURE_BLACKWELL,
                                    TN_OPERAND_FPROP_B, &plane),
                  TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("format fp8_block_2d has no GEMM on Blackwell: GEMMs with fp32 scales of "
                     "blocks exist on compute capability 9.0 only");
    EXPECT_STATUS(
        tn_format_operand(TN_FORMAT_MXFP8, TN_ARCHITECTURE_HOST, TN_OPERAND_FPROP_A, &plane),
        TN_UNSUPPORTED);
    EXPECT_ERROR_HAS("format mxfp8 has no GEMM on the host");
}

static void values_that_are_none_are_refused(void **state) {
    tn_plane plane;
    (void)state;
    EXPECT_STATUS(
        tn_format_operand(TN_FORMAT_COUNT, TN_ARCHITECTURE_HOST, TN_OPERAND_FPROP_A, &plane),
        TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("unknown format 6");
    EXPECT_STATUS(
        tn_format_operand(TN_FORMAT_PLAIN, (tn_architecture)-1, TN_OPERAND_FPROP_A, &plane),
        TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("unknown architecture -1");
    EXPECT_STATUS(
        tn_format_operand(TN_FORMAT_PLAIN, TN_ARCHITECTURE_HOST, TN_OPERAND_COUNT, &plane),
        TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("unknown operand 6");
    EXPECT_STATUS(
        tn_format_operand(TN_FORMAT_PLAIN, TN_ARCHITECTURE_HOST, TN_OPERAND_FPROP_A, NULL),
        TN_INVALID_ARGUMENT);
    assert_string_equal(tn_architecture_name((tn_architecture)99), "unknown architecture");
}

static void a_device_says_which_architecture_it_is(void **state) {
    tensor_fixture host, sim;
    (void)state;
    assert_int_equal(tn_device_architecture(NULL), TN_ARCHITECTURE_OTHER);
    tensor_fixture_open(&host);
    assert_int_equal(tn_device_architecture(host.device), TN_ARCHITECTURE_HOST);
    tensor_fixture_close(&host);
    tensor_fixture_open_sim(&sim);
    assert_int_equal(tn_device_architecture(sim.device), TN_ARCHITECTURE_HOPPER);
    tensor_fixture_close(&sim);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operands_are_read_from_the_planes_of_the_table),
        cmocka_unit_test(a_refusal_says_where_there_are_such_gemms),
        cmocka_unit_test(values_that_are_none_are_refused),
        cmocka_unit_test(a_device_says_which_architecture_it_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
