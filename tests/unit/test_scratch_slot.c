/* Scratch slots: whose they are, what they cost, what is in them, and what stands in the way. */
#include "tensor_fixture.h"

#include <string.h>

#include "host_alloc.h"
#include "tenure_pool.h"

/* 256 x 128 and 130 x 600: a buffer takes the larger plane, its data rounded up to 256 bytes. */
enum { ROW_BYTES = 256 * 128 + 2 * 4 * 4, SMALL = 256 * 128 + 2 * 4 * 4 };
enum { WIDE_ROW_BYTES = 78000 + 2 * 8 * 4, LARGE = 78080 + 5 * 4 * 4 };

static int open_fixture(void **state) {
    static tensor_fixture fixture;
    tensor_fixture_open(&fixture);
    EXPECT_OK(tn_scope_policy_set(fixture.scope, TN_POLICY_SCRATCH));
    *state = &fixture;
    return 0;
}

static int close_fixture(void **state) {
    fixture_derive_fault(0);
    tensor_fixture_close(*state);
    return 0;
}

static tn_scope child(tn_scope parent, const char *name) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = parent;
    config.kind = TN_SCOPE_LAYER;
    config.name = name;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

static tn_tensor weight_in(const tensor_fixture *f, tn_scope scope, int64_t rows, int64_t cols,
                           const char *name) {
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, rows, cols, name);
    EXPECT_OK(tn_tensor_move(tensor, scope));
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    return tensor;
}

static tn_tensor weight(const tensor_fixture *f, const char *name) {
    return weight_in(f, f->scope, 256, 128, name);
}

/* The address of COL, which is read and left in the slot. */
static void *read_col(tn_tensor tensor, tn_stream stream) {
    tn_plane_view view;
    tn_lease lease;
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_COL, TN_READ, stream, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
    return view.data;
}

static size_t col_bytes(tn_scope scope) {
    tn_ledger ledger = fixture_ledger(scope);
    return ledger.data_bytes[TN_PLANE_COL] + ledger.scale_bytes[TN_PLANE_COL];
}

/* ---- bytes and addresses --------------------------------------------------------------------- */

static void a_stack_shares_one_buffer_at_one_address(void **state) {
    const tensor_fixture *f = *state;
    enum { LAYERS = 5 };
    tn_tensor layers[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        layers[i] = weight(f, "w");
    assert_int_equal(fixture_owned_bytes(f), LAYERS * ROW_BYTES);
    void *address = read_col(layers[0], f->stream);
    for (int step = 0; step < 3; step++) {
        for (int i = LAYERS - 1; i >= 0; i--) {
            assert_ptr_equal(read_col(layers[i], f->stream), address);
            assert_int_equal(fixture_owned_bytes(f), LAYERS * ROW_BYTES + SMALL);
            EXPECT_OK(tn_plane_release(layers[i], TN_PLANE_COL, f->stream));
            assert_int_equal(fixture_state(layers[i], TN_PLANE_COL), TN_PLANE_ABSENT);
        }
    }
    tn_ledger ledger = fixture_ledger(f->scope);
    assert_int_equal(ledger.peak_total_bytes, LAYERS * ROW_BYTES + SMALL);
    assert_int_equal(ledger.peak_plane_bytes[TN_PLANE_COL], 0); /* the slot's are booked as DATA */
    assert_int_equal(ledger.data_bytes[TN_PLANE_DATA], SMALL);
}

static void what_is_in_the_slot_is_the_transpose(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, 3, 2, "w");
    unsigned char row[6] = {1, 2, 3, 4, 5, 6}, col[6] = {0};
    float scale[4] = {0.5f, 0, 0, 0}, got[4];
    EXPECT_OK(tn_plane_write(tensor, TN_PLANE_ROW, row, 6, scale, sizeof scale, f->stream));
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_COL, col, 6, got, sizeof got, f->stream));
    EXPECT_OK(tn_stream_synchronize(f->device, f->stream));
    assert_memory_equal(col, ((unsigned char[]){1, 3, 5, 2, 4, 6}), 6);
    assert_memory_equal(got, scale, sizeof scale);
    assert_int_equal(col_bytes(f->scope), 0);
}

typedef struct seen {
    int scratch;
    size_t bytes;
    tn_tensor tensor;
} seen;

static void see(void *argument, tn_tensor tensor, const tn_tensor_info *info,
                const size_t data_bytes[TN_PLANE_COUNT], const size_t scale_bytes[TN_PLANE_COUNT]) {
    seen *all = argument;
    (void)scale_bytes;
    if (strcmp(info->name, "scratch") != 0) return;
    all->scratch++;
    all->bytes += data_bytes[TN_PLANE_DATA];
    all->tensor = tensor;
}

static void the_slot_is_a_tensor_that_the_program_can_only_see(void **state) {
    const tensor_fixture *f = *state;
    seen all = {0};
    tn_lease lease;
    tn_plane_view view;
    (void)read_col(weight(f, "w"), f->stream);
    EXPECT_OK(tn_scope_visit(f->scope, see, &all));
    assert_int_equal(all.scratch, 1);
    assert_int_equal(all.bytes, SMALL);
    EXPECT_STATUS(tn_tensor_destroy(all.tensor, f->stream), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("the library's own");
    EXPECT_STATUS(tn_lease_begin(all.tensor, TN_PLANE_DATA, TN_WRITE, f->stream, &lease, &view),
                  TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_tensor_move(all.tensor, f->scope), TN_INVALID_ARGUMENT);
    EXPECT_OK(tn_ledger_check(f->pool));
}

static void it_grows_to_the_largest_that_there_is(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor small = weight(f, "small");
    (void)read_col(small, f->stream);
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + SMALL);
    tn_tensor large = weight_in(f, f->scope, 130, 600, "large");
    (void)read_col(small, f->stream); /* fits: no growth for one that has not asked */
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + WIDE_ROW_BYTES + SMALL);
    (void)read_col(large, f->stream);
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + WIDE_ROW_BYTES + LARGE);
    assert_int_equal(fixture_state(small, TN_PLANE_COL), TN_PLANE_ABSENT);
    (void)read_col(small, f->stream);
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + WIDE_ROW_BYTES + LARGE);
    assert_int_equal(fixture_state(large, TN_PLANE_COL), TN_PLANE_ABSENT);
}

static void nothing_is_made_for_what_has_no_elements_or_no_derivation(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor empty = weight_in(f, f->scope, 0, 128, "empty");
    tn_tensor scaled = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_1D, 256, 128, "1d");
    EXPECT_OK(tn_plane_require(empty, TN_PLANE_COL, f->stream));
    fixture_write(scaled, TN_PLANE_ROW, f->stream);
    size_t owned = fixture_owned_bytes(f);
    EXPECT_STATUS(tn_plane_require(scaled, TN_PLANE_COL, f->stream), TN_UNSUPPORTED);
    EXPECT_OK(tn_scope_scratch_reserve(f->scope, f->stream));
    assert_int_equal(fixture_owned_bytes(f), owned);
}

/* L1.4: memory that a plane of its own has goes at the next release, and the slot is next. */
static void a_plane_with_memory_of_its_own_goes_at_its_release(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor w = weight(f, "w");
    EXPECT_OK(tn_tensor_set_policy(w, TN_POLICY_KEEP));
    EXPECT_OK(tn_plane_require(w, TN_PLANE_COL, f->stream));
    assert_int_equal(col_bytes(f->scope), 256 * 128 + 16);
    EXPECT_OK(tn_tensor_set_policy(w, TN_POLICY_DEFAULT));
    (void)read_col(w, f->stream);
    EXPECT_OK(tn_plane_release(w, TN_PLANE_ROW, f->stream)); /* not the derived one: stays */
    assert_int_equal(fixture_state(w, TN_PLANE_ROW), TN_PLANE_VALID);
    EXPECT_OK(tn_plane_release(w, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES);
    (void)read_col(w, f->stream);
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + SMALL);
}

/* ---- whose slot ------------------------------------------------------------------------------ */

static void the_nearest_scope_with_a_slot_has_it(void **state) {
    const tensor_fixture *f = *state;
    tn_scope block = child(f->scope, "block"), layer = child(block, "layer");
    tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
    tn_tensor outer = weight(f, "outer");
    tn_tensor inner = weight_in(f, layer, 130, 600, "inner");
    EXPECT_OK(tn_scope_scratch_config_set(block, &config));
    (void)read_col(inner, f->stream);
    (void)read_col(outer, f->stream);
    assert_int_equal(fixture_ledger(layer).total_bytes, WIDE_ROW_BYTES);
    assert_int_equal(fixture_ledger(block).total_bytes, WIDE_ROW_BYTES + LARGE);
    assert_int_equal(fixture_owned_bytes(f), WIDE_ROW_BYTES + LARGE + ROW_BYTES + SMALL);
    assert_int_equal(fixture_state(inner, TN_PLANE_COL), TN_PLANE_VALID); /* not displaced */
    EXPECT_OK(tn_scope_close(block));
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + SMALL);
}

static void a_tensor_that_moves_leaves_a_slot_that_it_can_not_reach(void **state) {
    const tensor_fixture *f = *state;
    tn_scope a = child(f->scope, "a"), b = child(f->scope, "b"), below = child(a, "below");
    tn_lease lease;
    tn_plane_view view;
    tn_tensor w = weight_in(f, a, 256, 128, "w");
    EXPECT_OK(tn_scope_scratch_reserve(a, f->stream));
    EXPECT_OK(tn_scope_policy_set(b, TN_POLICY_SCRATCH));
    (void)read_col(w, f->stream);
    EXPECT_OK(tn_tensor_move(w, below)); /* the same slot */
    assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_VALID);
    EXPECT_OK(tn_lease_begin(w, TN_PLANE_COL, TN_READ, f->stream, &lease, &view));
    EXPECT_STATUS(tn_tensor_move(w, b), TN_IN_USE);
    EXPECT_ERROR_HAS("moving its tensor");
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_tensor_move(w, b));
    assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_ABSENT);
    (void)read_col(w, f->stream);
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + 2 * SMALL); /* a's, and the root's */
    EXPECT_OK(tn_scope_close(a));
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + SMALL);
    assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_VALID);
}

/* ---- who stands in the way ------------------------------------------------------------------- */

static void a_leased_plane_is_not_displaced(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor first = weight(f, "first"), second = weight(f, "second");
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_lease_begin(first, TN_PLANE_COL, TN_READ, f->other, &lease, &view));
    EXPECT_STATUS(tn_plane_require(second, TN_PLANE_COL, f->stream), TN_IN_USE);
    EXPECT_ERROR_HAS("tensor first, plane COL is under a READ lease");
    EXPECT_ERROR_HAS("deriving another plane into its scratch slot must wait");
    assert_int_equal(fixture_state(first, TN_PLANE_COL), TN_PLANE_VALID);
    EXPECT_STATUS(tn_scope_scratch_release(f->scope, f->stream), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_plane_require(second, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_state(first, TN_PLANE_COL), TN_PLANE_ABSENT);
}

static void two_buffers_take_turns(void **state) {
    const tensor_fixture *f = *state;
    tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
    tn_tensor layers[3] = {weight(f, "a"), weight(f, "b"), weight(f, "c")};
    tn_lease lease;
    tn_plane_view view;
    config.buffers = 2;
    EXPECT_OK(tn_scope_scratch_config_set(f->scope, &config));
    EXPECT_OK(tn_scope_scratch_reserve(f->scope, f->stream));
    assert_int_equal(fixture_owned_bytes(f), 3 * ROW_BYTES + 2 * SMALL);
    EXPECT_OK(tn_lease_begin(layers[0], TN_PLANE_COL, TN_READ, f->stream, &lease, &view));
    void *b = read_col(layers[1], f->other); /* while a is read */
    assert_ptr_not_equal(b, view.data);
    assert_ptr_equal(read_col(layers[2], f->other), b); /* a's turn, but it is leased */
    assert_int_equal(fixture_state(layers[1], TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_equal(fixture_state(layers[0], TN_PLANE_COL), TN_PLANE_VALID);
    EXPECT_OK(tn_lease_end(lease));
    assert_ptr_equal(read_col(layers[1], f->stream), view.data);
    assert_int_equal(fixture_state(layers[2], TN_PLANE_COL), TN_PLANE_VALID);
}

/* After an abandoned write the plane in the slot may be all that is left of the contents. */
static void the_last_copy_is_not_displaced(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor first = weight(f, "first"), second = weight(f, "second");
    tn_lease lease;
    tn_plane_view view;
    (void)read_col(first, f->stream);
    EXPECT_STATUS(tn_plane_drop(first, TN_PLANE_ROW, f->stream), TN_INVALID_STATE);
    EXPECT_OK(tn_lease_begin(first, TN_PLANE_ROW, TN_WRITE, f->stream, &lease, &view));
    EXPECT_STATUS(tn_plane_require(second, TN_PLANE_COL, f->stream), TN_INVALID_STATE);
    EXPECT_OK(tn_lease_abandon(lease));
    assert_int_equal(fixture_state(first, TN_PLANE_COL), TN_PLANE_VALID);
    EXPECT_STATUS(tn_plane_require(second, TN_PLANE_COL, f->stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tensor first, plane COL is VALID and the last copy");
    EXPECT_STATUS(tn_scope_scratch_release(f->scope, f->stream), TN_INVALID_STATE);
    EXPECT_OK(tn_plane_require(first, TN_PLANE_ROW, f->stream)); /* back from the slot */
    EXPECT_OK(tn_plane_require(second, TN_PLANE_COL, f->stream));
}

/* Else what is left in the slot would be the last copy in its tensor, which nothing displaces. */
static void what_is_saved_takes_its_derived_plane_out_of_the_slot(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor first = weight(f, "first"), second = weight(f, "second"), saved;
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_lease_begin(first, TN_PLANE_COL, TN_READ, f->stream, &lease, &view));
    EXPECT_STATUS(tn_tensor_save(first, TN_PLANE_BIT(TN_PLANE_ROW), f->scope, f->stream, &saved),
                  TN_IN_USE);
    assert_int_equal(fixture_state(first, TN_PLANE_ROW), TN_PLANE_VALID);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_OK(tn_tensor_save(first, TN_PLANE_BIT(TN_PLANE_ROW), f->scope, f->stream, &saved));
    assert_int_equal(fixture_state(first, TN_PLANE_ROW), TN_PLANE_ABSENT);
    assert_int_equal(fixture_state(first, TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_ptr_equal(read_col(second, f->stream), view.data);
    EXPECT_OK(tn_tensor_restore_into(saved, first));
    assert_ptr_equal(read_col(first, f->stream), view.data);
}

/* ---- writing --------------------------------------------------------------------------------- */

static void a_write_gives_the_plane_memory_of_its_own(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor w = weight(f, "w");
    tn_lease lease;
    tn_plane_view view;
    void *address = read_col(w, f->stream);
    EXPECT_STATUS(tn_lease_begin(w, TN_PLANE_COL, TN_UPDATE, f->stream, &lease, &view),
                  TN_INVALID_STATE);
    EXPECT_ERROR_HAS("in a scratch slot");
    EXPECT_OK(tn_lease_begin(w, TN_PLANE_COL, TN_WRITE, f->stream, &lease, &view));
    assert_ptr_not_equal(view.data, address);
    assert_int_equal(col_bytes(f->scope), 256 * 128 + 16);
    EXPECT_OK(tn_lease_end(lease)); /* ROW is stale, and this policy keeps none */
    assert_int_equal(fixture_state(w, TN_PLANE_ROW), TN_PLANE_ABSENT);
    EXPECT_OK(tn_plane_require(w, TN_PLANE_ROW, f->stream)); /* now ROW is the derived one */
    assert_int_equal(fixture_owned_bytes(f), 256 * 128 + 16 + SMALL);
}

/* The old contents stay readable where they are until the new ones are whole. */
static void a_replacement_reads_the_slot_and_then_leaves_it(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor w = weight(f, "w"), other = weight(f, "other");
    tn_lease lease;
    tn_plane_view view, old;
    void *address = read_col(w, f->stream);
    for (int is_end = 0; is_end < 2; is_end++) {
        EXPECT_OK(tn_lease_begin(w, TN_PLANE_COL, TN_REPLACE, f->stream, &lease, &view));
        EXPECT_OK(tn_lease_old_view(lease, &old));
        assert_ptr_equal(old.data, address);
        assert_ptr_not_equal(view.data, address);
        EXPECT_STATUS(tn_plane_require(other, TN_PLANE_COL, f->stream), TN_IN_USE);
        EXPECT_OK(is_end ? tn_lease_end(lease) : tn_lease_abandon(lease));
        assert_int_equal(col_bytes(f->scope), is_end ? 256 * 128 + 16 : 0);
        assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_VALID);
    }
    assert_ptr_equal(read_col(other, f->stream), address);
    assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_VALID);
}

enum { FILLERS_MAX = 4096 };

/* Takes all that the pool may have, in blocks too small for a plane. */
static int fill_pool(const tensor_fixture *f, void **blocks) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    tn_status status = TN_OK;
    int count = 0;
    EXPECT_OK(tn_pool_stats_get(f->pool, &stats));
    EXPECT_OK(tn_process_limits_set(stats.reserved_bytes, 0));
    while (status == TN_OK && count < FILLERS_MAX) {
        status = tn_alloc(f->pool, 16384, f->stream, NULL, &blocks[count]);
        if (status == TN_OK) count++;
    }
    assert_int_equal(status, TN_OUT_OF_DEVICE_MEMORY);
    return count;
}

static void a_write_that_finds_no_memory_leaves_it_in_the_slot(void **state) {
    const tensor_fixture *f = *state;
    static void *blocks[FILLERS_MAX];
    tn_tensor w = weight(f, "w");
    tn_lease lease;
    tn_plane_view view;
    void *address = read_col(w, f->stream);
    int calls = fixture_derive_calls();
    int count = fill_pool(f, blocks);
    EXPECT_STATUS(tn_lease_begin(w, TN_PLANE_COL, TN_WRITE, f->stream, &lease, &view),
                  TN_OUT_OF_DEVICE_MEMORY);
    assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_VALID);
    assert_int_equal(fixture_state(w, TN_PLANE_ROW), TN_PLANE_VALID);
    assert_ptr_equal(read_col(w, f->stream), address);
    assert_int_equal(fixture_derive_calls(), calls);
    EXPECT_OK(tn_ledger_check(f->pool));
    while (count > 0)
        EXPECT_OK(tn_free(blocks[--count], f->stream));
    EXPECT_OK(tn_process_limits_set(0, 0));
}

static void a_derivation_that_fails_leaves_the_slot_free(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor w = weight(f, "w");
    fixture_derive_fault(1);
    EXPECT_STATUS(tn_plane_require(w, TN_PLANE_COL, f->stream), TN_DRIVER_ERROR);
    assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_ABSENT);
    EXPECT_OK(tn_scope_scratch_release(f->scope, f->stream));
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES);
    for (long nth = 1;; nth++) { /* the first need makes slot and memory, or nothing */
        tn__host_alloc_fault(nth, 1);
        tn_status status = tn_plane_require(w, TN_PLANE_COL, f->stream);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) break;
        assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
        assert_int_equal(fixture_owned_bytes(f), ROW_BYTES);
        assert_int_equal(fixture_ledger(f->scope).tensors, 1);
    }
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + SMALL);
}

/* ---- reserving ------------------------------------------------------------------------------- */

static void a_reserved_slot_does_not_grow_by_itself(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor small = weight(f, "small");
    tn_lease lease;
    tn_plane_view view;
    EXPECT_OK(tn_scope_scratch_reserve(f->scope, f->stream));
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + SMALL);
    void *address = read_col(small, f->stream);
    tn_tensor large = weight_in(f, f->scope, 130, 600, "large");
    EXPECT_STATUS(tn_plane_require(large, TN_PLANE_COL, f->stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tn_scope_scratch_reserve has pinned it");
    assert_int_equal(fixture_state(small, TN_PLANE_COL), TN_PLANE_VALID);
    assert_ptr_equal(read_col(small, f->stream), address);
    EXPECT_OK(tn_lease_begin(small, TN_PLANE_COL, TN_READ, f->stream, &lease, &view));
    EXPECT_STATUS(tn_scope_scratch_reserve(f->scope, f->stream), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + WIDE_ROW_BYTES + SMALL);
    EXPECT_OK(tn_scope_scratch_reserve(f->scope, f->stream));
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + WIDE_ROW_BYTES + LARGE);
    (void)read_col(large, f->stream);
    EXPECT_OK(tn_scope_scratch_reserve(f->scope, f->stream)); /* large enough: nothing moves */
    assert_int_equal(fixture_state(large, TN_PLANE_COL), TN_PLANE_VALID);
}

static void a_reservation_that_fails_changes_nothing(void **state) {
    const tensor_fixture *f = *state;
    tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
    tn_tensor w = weight(f, "w");
    config.buffers = 3;
    EXPECT_OK(tn_scope_scratch_config_set(f->scope, &config));
    (void)read_col(w, f->stream); /* one of the three */
    (void)weight_in(f, f->scope, 130, 600, "large");
    size_t owned = fixture_owned_bytes(f);
    for (long nth = 1;; nth++) {
        tn__host_alloc_fault(nth, 1);
        tn_status status = tn_scope_scratch_reserve(f->scope, f->stream);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) break;
        assert_int_equal(fixture_owned_bytes(f), owned);
        assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_VALID);
        EXPECT_OK(tn_ledger_check(f->pool));
    }
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES + WIDE_ROW_BYTES + 3 * LARGE);
}

static void a_slot_larger_than_any_device_is_refused(void **state) {
    const tensor_fixture *f = *state;
    (void)fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, INT64_C(1) << 31, INT64_C(1) << 31, "vast");
    EXPECT_STATUS(tn_scope_scratch_reserve(f->scope, f->stream), TN_OUT_OF_DEVICE_MEMORY);
    EXPECT_ERROR_HAS("no device has as many");
    assert_int_equal(fixture_ledger(f->scope).tensors, 1);
}

static void a_released_slot_is_gone(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor w = weight(f, "w");
    EXPECT_OK(tn_scope_scratch_release(f->scope, f->stream)); /* none: success */
    (void)read_col(w, f->stream);
    EXPECT_OK(tn_scope_scratch_release(f->scope, f->stream));
    assert_int_equal(fixture_state(w, TN_PLANE_COL), TN_PLANE_ABSENT);
    assert_int_equal(fixture_owned_bytes(f), ROW_BYTES);
    assert_int_equal(fixture_ledger(f->scope).tensors, 1);
}

static void wrong_configurations_are_refused(void **state) {
    const tensor_fixture *f = *state;
    tn_scratch_config config = TN_SCRATCH_CONFIG_INIT;
    config.buffers = 0;
    EXPECT_STATUS(tn_scope_scratch_config_set(f->scope, &config), TN_INVALID_ARGUMENT);
    config.buffers = 9;
    EXPECT_STATUS(tn_scope_scratch_config_set(f->scope, &config), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_scope_scratch_config_set(f->scope, NULL), TN_INVALID_ARGUMENT);
    config.buffers = 2;
    EXPECT_STATUS(tn_scope_scratch_config_set((tn_scope){0}, &config), TN_STALE_HANDLE);
    (void)read_col(weight(f, "w"), f->stream);
    EXPECT_STATUS(tn_scope_scratch_config_set(f->scope, &config), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tn_scope_scratch_release");
}

int main(void) {
#define WITH_FIXTURE(test) cmocka_unit_test_setup_teardown(test, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        WITH_FIXTURE(a_stack_shares_one_buffer_at_one_address),
        WITH_FIXTURE(what_is_in_the_slot_is_the_transpose),
        WITH_FIXTURE(the_slot_is_a_tensor_that_the_program_can_only_see),
        WITH_FIXTURE(it_grows_to_the_largest_that_there_is),
        WITH_FIXTURE(nothing_is_made_for_what_has_no_elements_or_no_derivation),
        WITH_FIXTURE(a_plane_with_memory_of_its_own_goes_at_its_release),
        WITH_FIXTURE(the_nearest_scope_with_a_slot_has_it),
        WITH_FIXTURE(a_tensor_that_moves_leaves_a_slot_that_it_can_not_reach),
        WITH_FIXTURE(a_leased_plane_is_not_displaced),
        WITH_FIXTURE(two_buffers_take_turns),
        WITH_FIXTURE(the_last_copy_is_not_displaced),
        WITH_FIXTURE(what_is_saved_takes_its_derived_plane_out_of_the_slot),
        WITH_FIXTURE(a_write_gives_the_plane_memory_of_its_own),
        WITH_FIXTURE(a_replacement_reads_the_slot_and_then_leaves_it),
        WITH_FIXTURE(a_write_that_finds_no_memory_leaves_it_in_the_slot),
        WITH_FIXTURE(a_derivation_that_fails_leaves_the_slot_free),
        WITH_FIXTURE(a_reserved_slot_does_not_grow_by_itself),
        WITH_FIXTURE(a_reservation_that_fails_changes_nothing),
        WITH_FIXTURE(a_slot_larger_than_any_device_is_refused),
        WITH_FIXTURE(a_released_slot_is_gone),
        WITH_FIXTURE(wrong_configurations_are_refused),
    };
    return cmocka_run_group_tests_name("unit/scratch_slot", tests, NULL, NULL);
}
