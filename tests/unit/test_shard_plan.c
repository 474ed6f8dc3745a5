/* Plans of shards: what is refused and how, which layout is chosen, what a hash tells apart, and
 * that a plan that can not be made leaves nothing behind. */
#include "test_support.h"

#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"
#include "tenure_shard.h"

static tn_shard_tensor tensor_of(tn_format format, int64_t rows, int64_t cols) {
    tn_shard_tensor tensor = {.format = format, .dtype = TN_E4M3, .rows = rows, .cols = cols};
    if (format == TN_FORMAT_PLAIN) tensor.dtype = TN_BF16;
    if (format == TN_FORMAT_NVFP4) tensor.dtype = TN_E2M1;
    return tensor;
}

static tn_shard_plan_config config_of(const tn_shard_tensor *tensors, int count, int ranks) {
    tn_shard_plan_config config = TN_SHARD_PLAN_CONFIG_INIT;
    config.name = "layer";
    config.tensors = tensors, config.tensor_count = count;
    config.rank_count = ranks;
    return config;
}

static tn_shard_plan *plan_of(const tn_shard_plan_config *config) {
    tn_shard_plan *plan = NULL;
    EXPECT_OK(tn_shard_plan_create(config, &plan));
    return plan;
}

static tn_shard_plan_info info_of(const tn_shard_plan *plan) {
    tn_shard_plan_info info = TN_SHARD_PLAN_INFO_INIT;
    EXPECT_OK(tn_shard_plan_info_get(plan, &info));
    return info;
}

static tn_shard_cost cost_of(const tn_shard_plan *plan, tn_shard_layout layout) {
    tn_shard_cost cost = TN_SHARD_COST_INIT;
    EXPECT_OK(tn_shard_cost_get(plan, layout, &cost));
    return cost;
}

/* ---- refusals ------------------------------------------------------------------------------- */

static void refused(const tn_shard_plan_config *config, tn_status status, const char *words) {
    tn_shard_plan *plan = NULL;
    long blocks = tn__host_live_blocks();
    EXPECT_STATUS(tn_shard_plan_create(config, &plan), status);
    EXPECT_ERROR_HAS(words);
    assert_null(plan);
    assert_int_equal(tn__host_live_blocks(), blocks);
}

static void configurations_that_can_not_be_are_named(void **state) {
    (void)state;
    tn_shard_tensor good[2] = {tensor_of(TN_FORMAT_FP8_BLOCK_2D, 256, 256),
                               tensor_of(TN_FORMAT_PLAIN, 1, 256)};
    const tn_shard_plan_config all_good = config_of(good, 2, 4);
    tn_shard_plan_config config = all_good;
    refused(NULL, TN_INVALID_ARGUMENT, "config is not TN_SHARD_PLAN_CONFIG_INIT");
    config.size = 8;
    refused(&config, TN_INVALID_ARGUMENT, "config is not TN_SHARD_PLAN_CONFIG_INIT");
    EXPECT_STATUS(tn_shard_plan_create(&all_good, NULL), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("out is NULL");
    config = all_good, config.tensor_count = -1;
    refused(&config, TN_INVALID_ARGUMENT, "unit layer: tensor_count is -1, expected 0 to 4096");
    config = all_good, config.tensor_count = TN_SHARD_TENSORS_MAX + 1;
    refused(&config, TN_INVALID_ARGUMENT, "tensor_count is 4097");
    config = all_good, config.rank_count = 0;
    refused(&config, TN_INVALID_ARGUMENT, "rank_count is 0, expected 1 to 1024");
    config = all_good, config.rank_count = 1025;
    refused(&config, TN_INVALID_ARGUMENT, "rank_count is 1025");
    config = all_good, config.layout = TN_SHARD_LAYOUT_COUNT;
    refused(&config, TN_INVALID_ARGUMENT, "layout is 4, which there is not");
    config = all_good, config.layout = (tn_shard_layout)-1;
    refused(&config, TN_INVALID_ARGUMENT, "layout is -1");
    config = all_good, config.tensors = NULL;
    refused(&config, TN_INVALID_ARGUMENT, "tensors is NULL, and tensor_count 2");
}

static void tensor_refused(tn_shard_tensor bad, const char *words) {
    tn_shard_tensor tensors[2] = {tensor_of(TN_FORMAT_FP8_BLOCK_2D, 256, 256), bad};
    tn_shard_plan_config config = config_of(tensors, 2, 4);
    refused(&config, TN_INVALID_ARGUMENT, words);
}

static void tensors_that_can_not_be_are_named(void **state) {
    (void)state;
    tn_shard_tensor bad = tensor_of(TN_FORMAT_FP8_BLOCK_2D, 128, 128);
    bad.name = "down";
    bad.format = TN_FORMAT_COUNT;
    tensor_refused(bad, "unit layer, tensor 1 (down): format is 6, which there is not");
    bad = tensor_of(TN_FORMAT_FP8_BLOCK_2D, 128, 128), bad.dtype = TN_BF16;
    tensor_refused(bad, "bf16 is no element type of format fp8_block_2d");
    bad = tensor_of(TN_FORMAT_FP8_BLOCK_2D, 128, 128), bad.scale_mode = (tn_scale_mode)9;
    tensor_refused(bad, "scale_mode is 9");
    tensor_refused(tensor_of(TN_FORMAT_PLAIN, -1, 8), "-1 x 8, expected 0 to 2^62");
    tensor_refused(tensor_of(TN_FORMAT_PLAIN, 8, INT64_MAX), "expected 0 to 2^62");
    bad = tensor_of(TN_FORMAT_PLAIN, 8, 8), bad.frozen = 2;
    tensor_refused(bad, "frozen is 2, expected 0 or 1");
    tensor_refused(tensor_of(TN_FORMAT_PLAIN, INT64_C(1) << 40, INT64_C(1) << 40),
                   "does not fit 63 bits");
    tensor_refused(tensor_of(TN_FORMAT_PLAIN, INT64_C(1) << 30, INT64_C(1) << 25),
                   "more than a unit can have");
    tensor_refused(tensor_of(TN_FORMAT_PLAIN, INT64_C(1) << 30, INT64_C(1) << 19),
                   "unit layer takes more than");
}

static void flat_of_what_it_can_not_cut_is_refused_by_name(void **state) {
    static const tn_format formats[] = {TN_FORMAT_FP8_BLOCK_1D, TN_FORMAT_MXFP8, TN_FORMAT_NVFP4};
    (void)state;
    for (int i = 0; i < 3; i++) {
        tn_shard_tensor tensors[2] = {tensor_of(TN_FORMAT_FP8_BLOCK_2D, 256, 256),
                                      tensor_of(formats[i], 256, 256)};
        tn_shard_plan_config config = config_of(tensors, 2, 3);
        config.layout = TN_SHARD_FLAT;
        tensors[1].name = "gate";
        refused(&config, TN_UNSUPPORTED, "unit layer can not be FLAT: tensor gate is ");
        EXPECT_ERROR_HAS(tn_format_name(formats[i]));
        config.layout = TN_SHARD_AUTO;
        tn_shard_plan *plan = plan_of(&config);
        assert_int_equal(info_of(plan).layout, TN_SHARD_RAGGED);
        assert_false(cost_of(plan, TN_SHARD_FLAT).is_possible);
        tn_shard_plan_destroy(plan);
        tensors[1].rows = 0; /* nothing of it is there to be cut */
        config.layout = TN_SHARD_FLAT;
        tn_shard_plan_destroy(plan_of(&config));
    }
}

static void questions_that_can_not_be_answered_are_refused(void **state) {
    (void)state;
    tn_shard_tensor tensor = tensor_of(TN_FORMAT_FP8_BLOCK_2D, 300, 256);
    tn_shard_plan_config config = config_of(&tensor, 1, 3);
    tn_shard_plan *plan = plan_of(&config);
    tn_shard_plan_info info = {0};
    tn_shard_cost cost = TN_SHARD_COST_INIT;
    tn_shard_piece piece = TN_SHARD_PIECE_INIT;
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    const tn_segment *segments;
    size_t bytes, offset;
    int64_t elements;
    char room[64];
    EXPECT_STATUS(tn_shard_plan_info_get(NULL, &info), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_plan_info_get(plan, &info), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("out is not TN_SHARD_PLAN_INFO_INIT");
    EXPECT_STATUS(tn_shard_tensor_get(plan, 1, &tensor), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tensor 1 of unit layer, which has 1 tensors");
    EXPECT_STATUS(tn_shard_cost_get(plan, TN_SHARD_AUTO, &cost), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("layout is 0, expected TILES, RAGGED or FLAT");
    EXPECT_STATUS(tn_shard_piece_get(plan, 3, 0, &piece), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("rank 3 of unit layer, which has 3 ranks");
    EXPECT_STATUS(tn_shard_piece_get(plan, -1, 0, &piece), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_piece_get(plan, 0, -1, &piece), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_bytes(plan, 3, &bytes), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_bytes(plan, 0, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_packed_elements(plan, 9, &elements), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_bucket_offset(plan, 9, &elements), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_bucket_segments(plan, NULL, &bytes), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_segments(plan, TN_SHARD_PHASE_COUNT, &segments, &bytes),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("phase is 2, which there is not");
    EXPECT_STATUS(tn_shard_sent_bytes(plan, TN_SHARD_FORWARD, 0, &offset, NULL),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_shard_plane_memory(plan, TN_SHARD_FORWARD, 0, room, NULL, &memory),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("gathered is NULL");
    EXPECT_STATUS(tn_shard_plane_memory(plan, TN_SHARD_FORWARD, 0, room, room, NULL),
                  TN_INVALID_ARGUMENT);
    tn_shard_plan_destroy(plan);
    config.layout = TN_SHARD_FLAT;
    plan = plan_of(&config);
    EXPECT_STATUS(tn_shard_plane_memory(plan, TN_SHARD_FORWARD, 0, NULL, room, &memory),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("scales are in the shard");
    tn_shard_plan_destroy(plan);
    tn_shard_plan_destroy(NULL);
    assert_int_equal(tn_shard_plan_text(NULL, room, sizeof room), 0);
    assert_string_equal(tn_shard_layout_name((tn_shard_layout)7), "unknown layout");
}

/* ---- the choice ----------------------------------------------------------------------------- */

static tn_shard_layout layout_of(const tn_shard_tensor *tensors, int count, int ranks) {
    tn_shard_plan_config config = config_of(tensors, count, ranks);
    tn_shard_plan *plan = plan_of(&config);
    tn_shard_layout layout = info_of(plan).layout;
    tn_shard_plan_destroy(plan);
    return layout;
}

static void tiles_if_they_come_out_even_else_flat(void **state) {
    (void)state;
    tn_shard_tensor even[2] = {tensor_of(TN_FORMAT_FP8_BLOCK_2D, 1024, 256),
                               tensor_of(TN_FORMAT_PLAIN, 512, 100)};
    tn_shard_tensor uneven = tensor_of(TN_FORMAT_FP8_BLOCK_2D, 192, 256);
    tn_shard_tensor scaled_once = tensor_of(TN_FORMAT_FP8_TENSOR, 1024, 256);
    assert_int_equal(layout_of(even, 2, 4), TN_SHARD_TILES);
    assert_int_equal(layout_of(even, 2, 8), TN_SHARD_FLAT);
    assert_int_equal(layout_of(&uneven, 1, 2), TN_SHARD_FLAT); /* the last tile row is short */
    assert_int_equal(layout_of(&uneven, 1, 1), TN_SHARD_TILES);
    assert_int_equal(layout_of(&scaled_once, 1, 8), TN_SHARD_TILES);
    assert_int_equal(layout_of(NULL, 0, 5), TN_SHARD_TILES);
}

/* cost = bytes on the wire / rate + latencies + copied / rate + largest shard * price. */
static void costs_are_the_published_sum(void **state) {
    (void)state;
    tn_shard_tensor tensor = tensor_of(TN_FORMAT_FP8_BLOCK_2D, 576, 7168);
    tn_shard_plan_config config = config_of(&tensor, 1, 4);
    config.costs = (tn_shard_costs){.wire_bytes_per_us = 1000,
                                    .memory_bytes_per_us = 100,
                                    .latency_ns = 7,
                                    .memory_ns_per_mib = 1 << 20};
    tn_shard_plan *plan = plan_of(&config);
    tn_shard_cost tiles = cost_of(plan, TN_SHARD_TILES), flat = cost_of(plan, TN_SHARD_FLAT);
    tn_shard_cost ragged = cost_of(plan, TN_SHARD_RAGGED);
    uint64_t tile = 128 * 7168 + 56 * 4, short_tile = 64 * 7168 + 56 * 4;
    uint64_t part = (576 * 7168 / 4 + 63) / 64 * 64, scales = 5 * 56 * 4;
    assert_int_equal(tiles.largest_bytes, 2 * 2 * tile);
    assert_int_equal(tiles.unit_bytes, 2 * (4 * tile + short_tile));
    assert_int_equal(tiles.wire_bytes, 3 * tiles.largest_bytes);
    assert_int_equal(tiles.shard_bytes_max, 2 * tile);
    assert_int_equal(tiles.collectives, 2);
    assert_int_equal(tiles.copy_bytes, 0);
    assert_int_equal(tiles.cost_ns, 14 + tiles.wire_bytes + 2 * tile);
    assert_int_equal(ragged.largest_bytes, 2 * (tile + short_tile));
    assert_int_equal(flat.largest_bytes, 2 * part);
    assert_int_equal(flat.wire_bytes, 3 * 2 * part + 2 * 3 * (280 / 4) * 4);
    assert_int_equal(flat.copy_bytes, 2 * 280 * 4);
    assert_int_equal(flat.shard_bytes_max, part + scales);
    assert_int_equal(flat.collectives, 3);
    assert_int_equal(flat.cost_ns, 21 + flat.wire_bytes + 10 * flat.copy_bytes + part + scales);
    assert_int_equal(info_of(plan).layout, TN_SHARD_FLAT);
    assert_int_equal(info_of(plan).amax_count, 280);
    tn_shard_plan_destroy(plan);
    config.costs = (tn_shard_costs){.latency_ns = 1000 * 1000};
    plan = plan_of(&config);
    assert_int_equal(info_of(plan).layout, TN_SHARD_TILES); /* of those with fewest collectives */
    tn_shard_plan_destroy(plan);
    config.costs = (tn_shard_costs){.latency_ns = 1000 * 1000, .memory_ns_per_mib = 1000};
    plan = plan_of(&config);
    assert_int_equal(info_of(plan).layout, TN_SHARD_RAGGED);
    tn_shard_plan_destroy(plan);
}

static void a_price_beyond_64_bits_is_the_most_there_is(void **state) {
    (void)state;
    tn_shard_tensor tensor = tensor_of(TN_FORMAT_PLAIN, 1024, 1024);
    tn_shard_plan_config config = config_of(&tensor, 1, 4);
    config.costs.memory_ns_per_mib = UINT64_MAX;
    config.costs.latency_ns = UINT64_MAX;
    tn_shard_plan *plan = plan_of(&config);
    assert_true(cost_of(plan, TN_SHARD_TILES).cost_ns == UINT64_MAX);
    tn_shard_plan_destroy(plan);
}

static void frozen_tensors_have_no_part_in_buckets_and_the_last_amaxes(void **state) {
    (void)state;
    tn_shard_tensor tensors[3] = {tensor_of(TN_FORMAT_FP8_BLOCK_2D, 300, 200),
                                  tensor_of(TN_FORMAT_FP8_BLOCK_2D, 200, 100),
                                  tensor_of(TN_FORMAT_FP8_TENSOR, 10, 10)};
    tn_shard_plan_config config = config_of(tensors, 3, 3);
    int64_t offset;
    tensors[0].frozen = 1;
    config.layout = TN_SHARD_FLAT;
    tn_shard_plan *plan = plan_of(&config);
    tn_shard_plan_info info = info_of(plan);
    assert_int_equal(info.amax_count, 4 + 4 + 8); /* 2 tiles, one scale; 6 tiles: to 4 each */
    assert_int_equal(info.amax_count_trained, 4 + 4);
    assert_int_equal(info.bucket_elements, (200 * 100 + 63) / 64 * 64 + 128);
    EXPECT_OK(tn_shard_bucket_offset(plan, 0, &offset));
    assert_int_equal(offset, -1);
    EXPECT_OK(tn_shard_bucket_offset(plan, 1, &offset));
    assert_int_equal(offset, 0);
    assert_int_equal(info.is_same_in_backward, 1);
    tn_shard_plan_destroy(plan);
}

/* ---- hash and text -------------------------------------------------------------------------- */

static uint64_t hash_of(const tn_shard_plan_config *config) {
    tn_shard_plan *plan = plan_of(config);
    uint64_t hash = info_of(plan).hash;
    tn_shard_plan_destroy(plan);
    return hash;
}

enum { HASHES_MAX = 16 };

static void a_hash_tells_apart_whatever_ranks_must_agree_in(void **state) {
    (void)state;
    tn_shard_tensor tensors[2] = {tensor_of(TN_FORMAT_FP8_BLOCK_2D, 1024, 256),
                                  tensor_of(TN_FORMAT_FP8_BLOCK_2D, 1024, 256)};
    tn_shard_plan_config config = config_of(tensors, 2, 4);
    uint64_t hash[HASHES_MAX];
    int count = 0;
    config.layout = TN_SHARD_TILES;
    tensors[0].name = "q", tensors[1].name = "k";
    hash[count++] = hash_of(&config);
    assert_true(hash_of(&config) == hash[0]);
    tensors[0].name = "k", tensors[1].name = "q";
    hash[count++] = hash_of(&config);
    tensors[1].frozen = 1;
    hash[count++] = hash_of(&config);
    tensors[1].scale_mode = TN_SCALE_FP32;
    hash[count++] = hash_of(&config);
    tensors[1].dtype = TN_E5M2;
    hash[count++] = hash_of(&config);
    tensors[1].rows = 256, tensors[1].cols = 1024;
    hash[count++] = hash_of(&config);
    tensors[1].format = TN_FORMAT_FP8_TENSOR;
    hash[count++] = hash_of(&config);
    config.layout = TN_SHARD_RAGGED;
    hash[count++] = hash_of(&config);
    config.layout = TN_SHARD_FLAT;
    hash[count++] = hash_of(&config);
    config.rank_count = 3;
    hash[count++] = hash_of(&config);
    config.tensor_count = 1;
    hash[count++] = hash_of(&config);
    config.name = "other";
    hash[count++] = hash_of(&config);
    for (int a = 0; a < count; a++) {
        for (int b = 0; b < a; b++)
            if (hash[a] == hash[b]) fail_msg("%d and %d have one hash", b, a);
    }
}

/* Prices decide a layout and are no part of it: ranks may have measured different ones. */
static void prices_are_not_in_the_hash(void **state) {
    (void)state;
    tn_shard_tensor tensor = tensor_of(TN_FORMAT_FP8_BLOCK_2D, 1000, 256);
    tn_shard_plan_config config = config_of(&tensor, 1, 4);
    config.layout = TN_SHARD_RAGGED;
    uint64_t hash = hash_of(&config);
    config.costs.latency_ns = 5000;
    assert_true(hash_of(&config) == hash);
}

static void a_text_says_what_was_chosen_and_what_it_costs(void **state) {
    (void)state;
    tn_shard_tensor tensors[2] = {tensor_of(TN_FORMAT_FP8_BLOCK_1D, 256, 256),
                                  tensor_of(TN_FORMAT_PLAIN, 384, 16)};
    tn_shard_plan_config config = config_of(tensors, 2, 2);
    char text[4096], cut[40];
    tensors[0].name = "up", tensors[0].frozen = 1;
    tn_shard_plan *plan = plan_of(&config);
    size_t length = tn_shard_plan_text(plan, text, sizeof text);
    assert_int_equal(length, strlen(text));
    assert_non_null(strstr(text, "unit layer on 2 ranks: ragged (tile rows do not come out even, "
                                 "and flat is not possible), hash "));
    assert_non_null(strstr(text, "  tiles   padding "));
    assert_non_null(strstr(text, "  flat    not possible: tensor up is fp8_block_1d"));
    assert_non_null(strstr(text, "tensor up: fp8_block_1d e4m3 256 x 256, frozen, gathered: ROW, "
                                 "in backward COL"));
    assert_non_null(strstr(text, "tensor tensor 1: plain bf16 384 x 16, gathered: DATA"));
    assert_non_null(strstr(text, "  rank 0: "));
    assert_int_equal(tn_shard_plan_text(plan, cut, sizeof cut), length);
    assert_memory_equal(cut, text, sizeof cut - 1);
    assert_int_equal(tn_shard_plan_text(plan, NULL, 0), length);
    tn_shard_plan_destroy(plan);
}

/* ---- limits --------------------------------------------------------------------------------- */

static void the_largest_unit_and_most_ranks_are_planned(void **state) {
    (void)state;
    tn_shard_tensor *tensors = calloc(TN_SHARD_TENSORS_MAX, sizeof *tensors);
    assert_non_null(tensors);
    for (int i = 0; i < TN_SHARD_TENSORS_MAX; i++)
        tensors[i] = tensor_of(TN_FORMAT_FP8_BLOCK_2D, 100 + i % 50, 16);
    tn_shard_plan_config config = config_of(tensors, TN_SHARD_TENSORS_MAX, 8);
    tn_shard_plan_destroy(plan_of(&config));
    config.tensor_count = 12, config.rank_count = TN_SHARD_RANKS_MAX;
    tn_shard_plan *plan = plan_of(&config);
    tn_shard_piece piece = TN_SHARD_PIECE_INIT;
    EXPECT_OK(tn_shard_piece_get(plan, TN_SHARD_RANKS_MAX - 1, 11, &piece));
    tn_shard_plan_destroy(plan);
    free(tensors);
}

static void a_plan_that_finds_no_memory_leaves_nothing(void **state) {
    static const tn_shard_layout layouts[] = {TN_SHARD_AUTO, TN_SHARD_RAGGED, TN_SHARD_FLAT};
    (void)state;
    tn_shard_tensor tensors[3] = {tensor_of(TN_FORMAT_FP8_BLOCK_2D, 700, 200),
                                  tensor_of(TN_FORMAT_PLAIN, 130, 40),
                                  tensor_of(TN_FORMAT_FP8_TENSOR, 300, 64)};
    tn_shard_plan_config config = config_of(tensors, 3, 20);
    long blocks = tn__host_live_blocks();
    for (int i = 0; i < 6; i++) {
        int and_after = i % 2, failures = 0;
        config.layout = layouts[i / 2];
        for (long nth = 1;; nth++) {
            tn_shard_plan *plan = NULL;
            tn__host_alloc_fault(nth, and_after);
            tn_status status = tn_shard_plan_create(&config, &plan);
            tn__host_alloc_fault(0, 0);
            if (status == TN_OK) {
                tn_shard_plan_destroy(plan);
                break;
            }
            assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
            assert_null(plan);
            assert_int_equal(tn__host_live_blocks(), blocks);
            failures++;
        }
        assert_in_range(failures, 15, 60);
        assert_int_equal(tn__host_live_blocks(), blocks);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(configurations_that_can_not_be_are_named),
        cmocka_unit_test(tensors_that_can_not_be_are_named),
        cmocka_unit_test(flat_of_what_it_can_not_cut_is_refused_by_name),
        cmocka_unit_test(questions_that_can_not_be_answered_are_refused),
        cmocka_unit_test(tiles_if_they_come_out_even_else_flat),
        cmocka_unit_test(costs_are_the_published_sum),
        cmocka_unit_test(a_price_beyond_64_bits_is_the_most_there_is),
        cmocka_unit_test(frozen_tensors_have_no_part_in_buckets_and_the_last_amaxes),
        cmocka_unit_test(a_hash_tells_apart_whatever_ranks_must_agree_in),
        cmocka_unit_test(prices_are_not_in_the_hash),
        cmocka_unit_test(a_text_says_what_was_chosen_and_what_it_costs),
        cmocka_unit_test(the_largest_unit_and_most_ranks_are_planned),
        cmocka_unit_test(a_plan_that_finds_no_memory_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
