/* Gathers of activations that are cut over ranks by rows: every bit of data and scales, the bytes
 * on the wire, and what memory there is meanwhile.
 *
 * Expected is what one rank makes of all rows: ROW by one cast, COL by a cast of each rank's rows
 * and a loop that puts them where the header says.
 */
#include "ranks_support.h"
#include "tenure_parallel.h"
#include "test_ops.h"

#include <stdlib.h>
#include <string.h>

enum { RANKS_MAX = 8, TILE = 128 };

static rank_fixture all;

/* How many rows each rank has: of the first `ranks` entries. */
typedef struct cut {
    const char *what;
    int64_t rows[RANKS_MAX];
} cut;

static const cut cuts[] = {
    {"whole tiles", {128, 128, 128, 128, 128, 128, 128, 128}},
    {"no whole tile", {5, 130, 127, 77, 1, 2, 3, 4}},
    {"ranks without rows", {0, 200, 0, 129, 0, 0, 64, 0}},
    {"nothing at all", {0}},
    {"a last one that is short", {256, 128, 128, 40, 0, 0, 0, 0}},
};

static int64_t first_of(const int64_t *rows, int rank) {
    int64_t first = 0;
    for (int i = 0; i < rank; i++)
        first += rows[i];
    return first;
}

static int64_t first_in_tiles(const int64_t *rows, int rank) {
    int64_t first = 0;
    for (int i = 0; i < rank; i++)
        first = (first + rows[i] + TILE - 1) / TILE * TILE;
    return first;
}

static int64_t total_in_tiles(const int64_t *rows) {
    int64_t total = 0;
    for (int i = 0; i < all.count; i++)
        if (rows[i]) total = first_in_tiles(rows, i) + rows[i];
    return total;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static tn_scope open_scope(const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope;
    config.pool = all.pool;
    config.kind = TN_SCOPE_OP;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

/* Any bf16 of magnitudes 2^-8 to 2^8, with some zeros. */
static uint16_t number_at(int64_t at) {
    uint32_t mixed = (uint32_t)at * 2654435761u + 977u;
    mixed ^= mixed >> 15;
    mixed *= 2246822519u;
    if (mixed % 37 == 0) return 0;
    return (uint16_t)((mixed & 0x807f) | (119 + (mixed >> 16) % 17) << 7);
}

/* Rows first to first + rows - 1 of the activation. */
static tn_tensor make_plain(tn_scope scope, int64_t first, int64_t rows, int64_t cols) {
    tn_tensor tensor = test_plain(scope, TN_BF16, rows, cols);
    const size_t count = (size_t)(rows * cols);
    uint16_t *data = malloc(count * 2 + 1);
    for (size_t i = 0; i < count; i++)
        data[i] = number_at(first * cols + (int64_t)i);
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_DATA, data, count * 2, NULL, 0, all.stream));
    EXPECT_OK(tn_stream_synchronize(all.device, all.stream));
    free(data);
    return tensor;
}

static tn_tensor make_quantized(tn_scope scope, int64_t first, int64_t rows, int64_t cols,
                                unsigned planes) {
    tn_quantize_args args = TN_QUANTIZE_ARGS_INIT;
    args.src = make_plain(scope, first, rows, cols);
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, rows, cols);
    args.planes = planes;
    EXPECT_OK(tn_quantize(&args, all.stream));
    EXPECT_OK(tn_tensor_destroy(args.src, all.stream));
    return args.dst;
}

typedef struct bytes {
    unsigned char *data, *scale;
    tn_plane_layout layout;
} bytes;

static bytes room_for(tn_tensor tensor, tn_plane plane) {
    bytes b;
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &b.layout));
    b.data = calloc(1, b.layout.data_bytes + 1), b.scale = calloc(1, b.layout.scale_bytes + 1);
    return b;
}

static bytes fetch(tn_tensor tensor, tn_plane plane) {
    bytes b = room_for(tensor, plane);
    EXPECT_OK(tn_plane_read(tensor, plane, b.data, b.layout.data_bytes,
                            b.layout.scale_bytes ? b.scale : NULL, b.layout.scale_bytes,
                            all.other));
    ranks_wait(&all);
    return b;
}

static void forget(bytes *b) { free(b->data), free(b->scale); }

static void expect_same_bytes(const char *what, bytes actual, bytes expected) {
    assert_int_equal(actual.layout.data_bytes, expected.layout.data_bytes);
    assert_int_equal(actual.layout.scale_bytes, expected.layout.scale_bytes);
    if (memcmp(actual.data, expected.data, expected.layout.data_bytes) != 0 ||
        memcmp(actual.scale, expected.scale, expected.layout.scale_bytes) != 0)
        fail_msg("rank %d of %d, %s: another plane", all.rank, all.count, what);
    forget(&actual), forget(&expected);
}

/* COL of [total, cols] from that of each rank's rows. */
static bytes expected_col(tn_scope scope, const int64_t *rows, int64_t cols) {
    tn_tensor shape = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, total_in_tiles(rows), cols);
    bytes whole = room_for(shape, TN_PLANE_COL);
    for (int r = 0; r < all.count; r++) {
        const int64_t at = first_in_tiles(rows, r);
        tn_tensor part = make_quantized(scope, first_of(rows, r), rows[r], cols, TN_QUANTIZE_COL);
        bytes b = fetch(part, TN_PLANE_COL);
        for (int64_t k = 0; k < b.layout.rows && rows[r]; k++)
            memcpy(whole.data + k * (int64_t)whole.layout.row_bytes + at,
                   b.data + k * (int64_t)b.layout.row_bytes, (size_t)rows[r]);
        memcpy(whole.scale + (size_t)(at / TILE) * (size_t)whole.layout.scale_stride * 4, b.scale,
               b.layout.scale_bytes);
        forget(&b);
    }
    return whole;
}

static bytes expected_of(tn_scope scope, const int64_t *rows, int64_t cols, tn_plane plane) {
    const int64_t total = first_of(rows, all.count);
    if (plane == TN_PLANE_COL) return expected_col(scope, rows, cols);
    if (plane == TN_PLANE_DATA) return fetch(make_plain(scope, 0, total, cols), plane);
    return fetch(make_quantized(scope, 0, total, cols, TN_QUANTIZE_ROW), plane);
}

/* ---- gathers --------------------------------------------------------------------------------- */

static tn_sequence_gather_args gather_args(tn_scope scope, const int64_t *rows, int64_t cols,
                                           tn_plane plane) {
    tn_sequence_gather_args args = TN_SEQUENCE_GATHER_ARGS_INIT;
    const int64_t first = first_of(rows, all.rank), own = rows[all.rank];
    int64_t total;
    args.sequence.comm = all.comm, args.sequence.rows = rows;
    args.plane = plane;
    EXPECT_OK(tn_sequence_rows(&args.sequence, own, plane, &total));
    assert_int_equal(total,
                     plane == TN_PLANE_COL ? total_in_tiles(rows) : first_of(rows, all.count));
    if (plane == TN_PLANE_DATA) {
        args.src = make_plain(scope, first, own, cols);
        args.dst = test_plain(scope, TN_BF16, total, cols);
    } else {
        args.src = make_quantized(scope, first, own, cols,
                                  plane == TN_PLANE_ROW ? TN_QUANTIZE_ROW : TN_QUANTIZE_COL);
        args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, total, cols);
    }
    args.scope = scope;
    return args;
}

/* Of this rank's plane, with ROW's scales in up4(rows) columns as they lie. */
static uint64_t wire_bytes_of(tn_tensor src, tn_plane plane) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(src, plane, &layout));
    return (uint64_t)(layout.data_bytes + layout.scale_bytes) * (uint64_t)(all.count - 1);
}

static void gather_of(const cut *c, int64_t cols, tn_plane plane) {
    tn_scope scope = open_scope("gather"), expecting = open_scope("expected");
    const tn_sequence_gather_args args = gather_args(scope, c->rows, cols, plane);
    const tn_comm_stats before = ranks_stats(&all);
    EXPECT_OK(tn_sequence_gather(&args, all.stream));
    const tn_comm_stats after = ranks_stats(&all);
    const uint64_t sent =
        after.wire_bytes[TN_ALL_GATHER_UNEVEN] - before.wire_bytes[TN_ALL_GATHER_UNEVEN];
    assert_int_equal(sent, wire_bytes_of(args.src, plane));
    expect_same_bytes(c->what, fetch(args.dst, plane),
                      expected_of(expecting, c->rows, cols, plane));
    assert_int_equal(test_ledger(scope).leases, 0);
    EXPECT_OK(tn_scope_close(expecting));
    EXPECT_OK(tn_scope_close(scope));
}

static void each_plane_is_that_of_each_ranks_rows(void **state) {
    static const int64_t columns[] = {1, 300};
    static const tn_plane planes[] = {TN_PLANE_DATA, TN_PLANE_ROW, TN_PLANE_COL};
    (void)state;
    for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++)
        for (size_t k = 0; k < 2; k++)
            for (size_t p = 0; p < 3; p++)
                gather_of(&cuts[c], columns[k], planes[p]);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static size_t plane_bytes(tn_tensor tensor, tn_plane plane) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &layout));
    return layout.data_bytes + layout.scale_bytes;
}

/* Bytes of the slot as the header has it. */
static size_t slot_bytes(const int64_t *rows, int64_t cols, tn_plane plane) {
    size_t strip = 0, strips = plane == TN_PLANE_COL ? (size_t)cols : (size_t)(cols + 127) / 128;
    if (plane == TN_PLANE_DATA) return 0;
    for (int r = 0; r < all.count; r++)
        strip += plane == TN_PLANE_COL ? (size_t)rows[r] : (size_t)(rows[r] + 3) / 4 * 16;
    const size_t most = TN_GATHER_SLOT_BYTES / strip ? TN_GATHER_SLOT_BYTES / strip : 1;
    return (strips < most ? strips : most) * strip;
}

static void peak_of(const int64_t *rows, int64_t cols, tn_plane plane) {
    tn_scope scope = open_scope("peak");
    const tn_sequence_gather_args args = gather_args(scope, rows, cols, plane);
    ranks_wait(&all);
    EXPECT_OK(tn_scope_ledger_reset_peaks(scope));
    const tn_ledger before = test_ledger(scope);
    EXPECT_OK(tn_pool_stats_reset_peaks(all.pool));
    const tn_pool_stats pool = test_pool_stats(all.pool);
    EXPECT_OK(tn_sequence_gather(&args, all.stream));
    const tn_ledger after = test_ledger(scope);
    const size_t output = plane_bytes(args.dst, plane), slot = slot_bytes(rows, cols, plane);
    assert_true(slot <= TN_GATHER_SLOT_BYTES);
    assert_int_equal(after.total_bytes - before.total_bytes, output);
    assert_int_equal(after.peak_total_bytes - before.total_bytes, output + slot);
    /* Blocks round up: an output's two, the slot's one. */
    const tn_pool_stats peak = test_pool_stats(all.pool);
    assert_true(peak.peak_live_bytes - pool.live_bytes >= output + slot);
    assert_true(peak.peak_live_bytes - pool.live_bytes <= output + slot + 3 * 512);
    ranks_wait(&all);
    EXPECT_OK(tn_scope_close(scope));
}

static void peak_is_the_output_and_a_slot(void **state) {
    const int64_t rows[RANKS_MAX] = {1100, 1100, 1100, 1000, 0, 0, 0, 0};
    (void)state;
    if (all.count <= 2) peak_of(rows, 4100, TN_PLANE_COL); /* more than a slot on one rank */
    peak_of(rows, 300, TN_PLANE_ROW);
    peak_of(rows, 300, TN_PLANE_DATA);
    peak_of(cuts[1].rows, 300, TN_PLANE_COL);
}

static void several_slots_make_the_same_plane(void **state) {
    const cut large = {"several slots", {1100, 1100, 1100, 1000, 0, 0, 0, 0}};
    (void)state;
    if (all.count <= 2) gather_of(&large, 4100, TN_PLANE_COL);
}

/* A gather that nobody waits for ends with its scope; one that two streams wait for is there. */
static void a_pending_gather_belongs_to_its_scope(void **state) {
    const int64_t *rows = cuts[1].rows;
    tn_scope scope = open_scope("pending");
    tn_sequence_gather_args args = gather_args(scope, rows, 300, TN_PLANE_COL);
    tn_plane_view view;
    tn_lease first, second;
    (void)state;
    ranks_gate *gate = ranks_gate_put(&all, all.stream);
    EXPECT_OK(tn_sequence_gather(&args, all.stream));
    EXPECT_OK(tn_lease_begin(args.dst, TN_PLANE_COL, TN_READ, all.other, &first, &view));
    EXPECT_OK(tn_lease_begin(args.dst, TN_PLANE_COL, TN_READ, all.other, &second, &view));
    EXPECT_OK(tn_lease_end(first));
    EXPECT_OK(tn_lease_end(second));
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, total_in_tiles(rows), 300);
    EXPECT_OK(tn_sequence_gather(&args, all.stream));
    EXPECT_OK(tn_scope_close(scope));
    ranks_gate_open(gate);
    ranks_wait(&all);
    ranks_gate_end(gate);
    assert_int_equal(test_pool_stats(all.pool).live_bytes, 0);
}

/* ---- sums ------------------------------------------------------------------------------------ */

static void reduce_of(const int64_t *rows, int64_t cols, tn_dtype dtype, tn_dtype to) {
    tn_scope scope = open_scope("sums");
    const int64_t total = first_of(rows, all.count), own = rows[all.rank];
    const size_t count = (size_t)(total * cols), kept = (size_t)(own * cols);
    float *data = calloc(count + 1, 4), *expected = calloc(kept + 1, 4);
    tn_sequence_reduce_args args = TN_SEQUENCE_REDUCE_ARGS_INIT;
    tn_tensor wide = test_plain(scope, TN_FP32, total, cols);
    tn_tensor result = test_plain(scope, TN_FP32, own, cols);
    tn_convert_args convert = TN_CONVERT_ARGS_INIT;
    for (size_t i = 0; i < count; i++)
        data[i] = (float)((int)(i % 13) - 6) * (float)(1 + all.rank % 3);
    for (size_t i = 0; i < kept; i++) {
        const size_t at = i + (size_t)(first_of(rows, all.rank) * cols);
        for (int r = 0; r < all.count; r++)
            expected[i] += (float)((int)(at % 13) - 6) * (float)(1 + r % 3);
    }
    EXPECT_OK(tn_plane_write(wide, TN_PLANE_DATA, data, count * 4, NULL, 0, all.stream));
    args.src = test_plain(scope, dtype, total, cols), args.dst = test_plain(scope, to, own, cols);
    convert.x = wide, convert.y = args.src;
    EXPECT_OK(tn_convert(&convert, all.stream));
    args.sequence.comm = all.comm, args.sequence.rows = rows, args.scope = scope;
    EXPECT_OK(tn_sequence_reduce(&args, all.stream));
    convert.x = args.dst, convert.y = result;
    EXPECT_OK(tn_convert(&convert, all.stream));
    EXPECT_OK(tn_plane_read(result, TN_PLANE_DATA, data, kept * 4, NULL, 0, all.stream));
    ranks_wait(&all);
    /* Sums of small whole numbers: exact in bf16 below 257. */
    for (size_t i = 0; i < kept; i++)
        assert_true(data[i] == expected[i]);
    free(data), free(expected);
    EXPECT_OK(tn_scope_close(scope));
}

static void sums_over_ranks_keep_each_ranks_rows(void **state) {
    (void)state;
    for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++) {
        reduce_of(cuts[c].rows, 37, TN_FP32, TN_FP32);
        reduce_of(cuts[c].rows, 37, TN_FP32, TN_BF16);
        reduce_of(cuts[c].rows, 37, TN_BF16, TN_BF16);
    }
}

/* ---- counts and refusals --------------------------------------------------------------------- */

static void every_rank_learns_all_counts(void **state) {
    const int64_t own[2] = {all.rank * 100 + 7, -all.rank};
    int64_t counts[2 * RANKS_MAX];
    tn_scope scope = open_scope("counts");
    (void)state;
    EXPECT_OK(tn_counts_exchange(all.comm, own, 2, counts, scope, all.stream));
    for (int r = 0; r < all.count; r++) {
        assert_int_equal(counts[2 * r], r * 100 + 7);
        assert_int_equal(counts[2 * r + 1], -r);
    }
    assert_int_equal(test_ledger(scope).total_bytes, 0);
    EXPECT_OK(tn_counts_exchange(all.comm, own, 0, counts, scope, all.stream));
    EXPECT_STATUS(tn_counts_exchange(all.comm, NULL, 2, counts, scope, all.stream),
                  TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_scope_close(scope));
}

static void what_does_not_fit_is_refused_before_any_collective(void **state) {
    tn_scope scope = open_scope("refusals");
    const tn_sequence_gather_args good = gather_args(scope, cuts[0].rows, 130, TN_PLANE_ROW);
    tn_sequence_gather_args args = good;
    const tn_comm_stats before = ranks_stats(&all);
    (void)state;
    args.plane = TN_PLANE_DATA;
    EXPECT_STATUS(tn_sequence_gather(&args, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("plane DATA of src");
    args = good;
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E4M3, 5, 130);
    EXPECT_STATUS(tn_sequence_gather(&args, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("is 5 x 130, expected");
    args.dst = test_fp8(scope, TN_FORMAT_FP8_BLOCK_1D, TN_E5M2, 128 * all.count, 130);
    EXPECT_STATUS(tn_sequence_gather(&args, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("must be the same");
    args.src = args.dst = test_fp8(scope, TN_FORMAT_FP8_TENSOR, TN_E4M3, 128 * all.count, 130);
    args.sequence.rows = NULL;
    EXPECT_STATUS(tn_sequence_gather(&args, all.stream), TN_UNSUPPORTED);
    args = good;
    args.sequence.rows = cuts[1].rows;
    EXPECT_STATUS(tn_sequence_gather(&args, all.stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("sequence.rows says");
    args = good;
    args.sequence.comm = NULL;
    EXPECT_STATUS(tn_sequence_gather(&args, all.stream), TN_INVALID_ARGUMENT);
    args = good;
    args.plane = TN_PLANE_COL;
    EXPECT_STATUS(tn_sequence_gather(&args, all.stream), TN_UNSUPPORTED);
    const tn_comm_stats after = ranks_stats(&all);
    assert_memory_equal(&after, &before, sizeof before);
    assert_int_equal(test_state(good.dst, TN_PLANE_ROW), TN_PLANE_ABSENT);
    EXPECT_OK(tn_scope_close(scope));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_plane_is_that_of_each_ranks_rows),
        cmocka_unit_test(peak_is_the_output_and_a_slot),
        cmocka_unit_test(several_slots_make_the_same_plane),
        cmocka_unit_test(a_pending_gather_belongs_to_its_scope),
        cmocka_unit_test(sums_over_ranks_keep_each_ranks_rows),
        cmocka_unit_test(every_rank_learns_all_counts),
        cmocka_unit_test(what_does_not_fit_is_refused_before_any_collective),
    };
    return RANKS_RUN(&all, tests);
}
