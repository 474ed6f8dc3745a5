/* Memory bugs that users of other libraries met, and what happens with the same code here.
 *
 * Each test begins with what its users did, in short, and says what came of it there (the pull
 * requests and issues are TransformerEngine's). The ledger is exact after every step.
 */
#include "tenure_lifetime.h"
#include "tensor_fixture.h"

/* A 2D-scaled 256 x 384 tensor: fp32 scales [2, 4] for ROW and [3, 4] for COL. */
enum {
    M = 256,
    K = 384,
    ROW_BYTES = M * K + 2 * 4 * 4,
    COL_BYTES = K * M + 3 * 4 * 4,
    ROW_BIT = 1 << TN_PLANE_ROW,
    COL_BIT = 1 << TN_PLANE_COL
};

static tn_tensor weight(const tensor_fixture *f) {
    return fixture_tensor(f, TN_FORMAT_FP8_BLOCK_2D, M, K, "w");
}

/* All that is owned, by the ledger and by the pool. */
static void expect_bytes(const tensor_fixture *f, size_t bytes) {
    assert_int_equal(fixture_ledger(f->scope).total_bytes, bytes);
    assert_int_equal(fixture_owned_bytes(f), bytes);
    EXPECT_OK(tn_ledger_check(f->pool));
}

static tn_scope child_scope(const tensor_fixture *f, tn_scope_kind kind) {
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    tn_scope scope = {0};
    config.parent = f->scope;
    config.kind = kind;
    EXPECT_OK(tn_scope_create(&config, &scope));
    return scope;
}

/* ---- L3: gathered activations --------------------------------------------------------------- */

/* PR 2125:   data = transpose(data)          # re-arranges what was gathered
 * The old `data` was the only reference that could free the gathered buffer: it stayed till the
 * process ended. Here a plane's memory is replaced under a lease, whose end frees the old one. */
static void a_transpose_in_place_strands_no_buffer(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor gathered = weight(f);
    tn_plane_view view, old;
    tn_lease lease;
    fixture_write(gathered, TN_PLANE_ROW, f->stream);
    expect_bytes(f, ROW_BYTES);
    EXPECT_OK(tn_lease_begin(gathered, TN_PLANE_ROW, TN_REPLACE, f->stream, &lease, &view));
    EXPECT_OK(tn_lease_old_view(lease, &old));
    assert_ptr_not_equal(view.data, old.data);
    expect_bytes(f, 2 * ROW_BYTES);
    EXPECT_OK(tn_lease_end(lease));
    expect_bytes(f, ROW_BYTES);
    EXPECT_OK(tn_tensor_destroy(gathered, f->stream));
    expect_bytes(f, 0);
}

/* PR 2125:   finish(handle); ...; finish(handle)      # the second one transposed back
 * A gathered tensor that was waited for twice was post-processed twice. Here post-processing makes
 * a plane valid, and what is valid is not made again. */
static void post_processing_twice_is_once(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor gathered = weight(f);
    int calls = fixture_derive_calls();
    fixture_write(gathered, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(gathered, TN_PLANE_COL, f->stream));
    assert_int_equal(fixture_derive_calls(), calls + 1);
    expect_bytes(f, ROW_BYTES + COL_BYTES);
    EXPECT_OK(tn_plane_require(gathered, TN_PLANE_COL, f->other));
    assert_int_equal(fixture_derive_calls(), calls + 1);
    expect_bytes(f, ROW_BYTES + COL_BYTES);
}

/* L3.5: a gather that nobody waits for. The buffer is its scope's, whatever became of it. */
static void what_is_never_waited_for_dies_with_its_scope(void **state) {
    const tensor_fixture *f = *state;
    tn_scope op = child_scope(f, TN_SCOPE_OP);
    tn_tensor gathered = weight(f);
    EXPECT_OK(tn_tensor_move(gathered, op));
    fixture_write(gathered, TN_PLANE_ROW, f->other);
    expect_bytes(f, ROW_BYTES);
    EXPECT_OK(tn_scope_close(op));
    expect_bytes(f, 0);
    EXPECT_STATUS(tn_plane_drop(gathered, TN_PLANE_ROW, f->stream), TN_STALE_HANDLE);
}

/* ---- L2: sharded training ------------------------------------------------------------------- */

/* PR 2805, issues 2681 and 2717:   out = quantizer.make_empty(shape); update(src, out)
 * make_empty allocated both planes; the update filled one, and the other lived as long. Here a new
 * tensor has no plane, and has those that were written. */
static void making_a_tensor_makes_no_buffers(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor out = weight(f);
    expect_bytes(f, 0);
    fixture_write(out, TN_PLANE_ROW, f->stream);
    expect_bytes(f, ROW_BYTES);
    assert_int_equal(fixture_state(out, TN_PLANE_COL), TN_PLANE_ABSENT);
    EXPECT_OK(tn_tensor_destroy(out, f->stream));
    expect_bytes(f, 0);
}

/* PR 2805:   self.workspaces["weight"] = workspace      # in every layer's forward
 * Every layer kept its quantized copy until the next step. Here it is of the layer's scope, and one
 * that is to live longer has to be moved out of it. */
static void a_workspace_is_not_cached_per_layer(void **state) {
    const tensor_fixture *f = *state;
    for (int layer = 0; layer < 8; layer++) {
        tn_scope scope = child_scope(f, TN_SCOPE_LAYER);
        tn_tensor workspace = weight(f);
        EXPECT_OK(tn_tensor_move(workspace, scope));
        fixture_write(workspace, TN_PLANE_ROW, f->stream);
        expect_bytes(f, ROW_BYTES);
        EXPECT_OK(tn_scope_close(scope));
        expect_bytes(f, 0);
    }
    assert_int_equal(fixture_ledger(f->scope).peak_total_bytes, ROW_BYTES);
}

/* PR 2805, issues 2681 and 2717:   all_gather(buffer); backward made the buffer's transpose
 * The gather buffer was used again, its transpose stayed on it until the next forward. Here writing
 * one plane makes the other stale, and UNTIL_LAST_USE frees it in the same transition. */
static void no_transpose_stays_on_a_reused_gather_buffer(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor buffer = weight(f);
    EXPECT_OK(tn_tensor_set_frozen(buffer, 1));
    EXPECT_OK(tn_tensor_set_policy(buffer, TN_POLICY_UNTIL_LAST_USE));
    for (int layer = 0; layer < 3; layer++) {
        fixture_write(buffer, TN_PLANE_ROW, f->stream);
        expect_bytes(f, ROW_BYTES);
        EXPECT_OK(tn_plane_require(buffer, TN_PLANE_COL, f->stream));
        expect_bytes(f, ROW_BYTES + COL_BYTES);
    }
    EXPECT_OK(tn_plane_release(buffer, TN_PLANE_COL, f->stream));
    expect_bytes(f, ROW_BYTES);
}

/* Under KEEP the memory stays for the next transpose, and can not be taken for a valid one. */
static void a_transpose_that_is_kept_is_stale(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor buffer = weight(f);
    fixture_write(buffer, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(buffer, TN_PLANE_COL, f->stream));
    fixture_write(buffer, TN_PLANE_ROW, f->stream);
    assert_int_equal(fixture_state(buffer, TN_PLANE_COL), TN_PLANE_STALE);
    expect_bytes(f, ROW_BYTES + COL_BYTES);
    EXPECT_OK(tn_plane_drop(buffer, TN_PLANE_COL, f->stream));
    expect_bytes(f, ROW_BYTES);
}

/* ---- state rules ----------------------------------------------------------------------------- */

/*   ctx.save_for_backward(weight_fp8); weight_fp8.update_usage(columnwise=False)
 * The saved object and the live one shared planes: what one dropped the other missed, or neither
 * freed. Here saving moves the planes. */
static void what_is_saved_is_not_shared_with_the_live_tensor(void **state) {
    const tensor_fixture *f = *state;
    tn_scope saved_scope = child_scope(f, TN_SCOPE_SAVED);
    tn_tensor live = weight(f), saved = {0};
    fixture_write(live, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(live, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_tensor_save(live, ROW_BIT | COL_BIT, saved_scope, f->stream, &saved));
    expect_bytes(f, ROW_BYTES + COL_BYTES);
    assert_int_equal(fixture_state(live, TN_PLANE_ROW), TN_PLANE_ABSENT);
    assert_int_equal(fixture_state(live, TN_PLANE_COL), TN_PLANE_ABSENT);
    fixture_write(live, TN_PLANE_ROW, f->stream);
    assert_int_equal(fixture_state(saved, TN_PLANE_COL), TN_PLANE_VALID);
    expect_bytes(f, 2 * ROW_BYTES + COL_BYTES);
    EXPECT_OK(tn_tensor_destroy(live, f->stream));
    expect_bytes(f, ROW_BYTES + COL_BYTES);
    EXPECT_OK(tn_scope_close(saved_scope));
    expect_bytes(f, 0);
}

/*   tensor.clear(); assert tensor._rowwise_data is not None      # a tensor of 0 bytes
 * Clearing left planes of 0 bytes, which looked present. Here a dropped plane is ABSENT. */
static void a_cleared_tensor_claims_no_plane(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor cleared = {0};
    tn_plane_view view;
    tn_lease lease;
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2, config.shape[0] = M, config.shape[1] = K;
    config.regatherable = 1;
    EXPECT_OK(tn_tensor_create(f->scope, &config, &cleared));
    fixture_write(cleared, TN_PLANE_ROW, f->stream);
    expect_bytes(f, ROW_BYTES);
    EXPECT_OK(tn_plane_drop(cleared, TN_PLANE_ROW, f->stream));
    expect_bytes(f, 0);
    assert_int_equal(fixture_ledger(f->scope).planes, 0);
    assert_int_equal(fixture_state(cleared, TN_PLANE_ROW), TN_PLANE_ABSENT);
    EXPECT_STATUS(tn_lease_begin(cleared, TN_PLANE_ROW, TN_READ, f->stream, &lease, &view),
                  TN_INVALID_STATE);
    expect_bytes(f, 0);
}

/*   if isinstance(weight, Float8Tensor): weight.update(...)      # it was a Float8BlockwiseTensor
 * The guard asked for the wrong type, and the update silently did nothing. Here there is one type,
 * its format is data that the library looks at, and a call that does not fit is refused by name.
 * So the bug can not be written: there is no guard to get wrong, and no call that does nothing. */
static void an_update_that_does_not_fit_is_refused(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = weight(f);
    unsigned char data[16] = {0};
    tn_plane_view view;
    tn_lease lease;
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_DATA, TN_UPDATE, f->stream, &lease, &view),
                  TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("has no plane");
    EXPECT_STATUS(tn_lease_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f->stream, &lease, &view),
                  TN_INVALID_STATE);
    EXPECT_STATUS(tn_plane_write(tensor, TN_PLANE_ROW, data, sizeof data, NULL, 0, f->stream),
                  TN_INVALID_ARGUMENT);
    expect_bytes(f, 0);
}

/* Asking for COL when only its scales were missing rebuilt nothing and failed later. Here a plane
 * is its elements and its scales: both are there or neither. */
static void a_plane_is_rebuilt_with_its_scales(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = weight(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f->stream));
    tn_ledger ledger = fixture_ledger(f->scope);
    assert_int_equal(ledger.data_bytes[TN_PLANE_COL], 0);
    assert_int_equal(ledger.scale_bytes[TN_PLANE_COL], 0);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    ledger = fixture_ledger(f->scope);
    assert_int_equal(ledger.data_bytes[TN_PLANE_COL], K * M);
    assert_int_equal(ledger.scale_bytes[TN_PLANE_COL], COL_BYTES - K * M);
}

static void row_comes_back_from_col_in_2d_only(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor two = weight(f);
    tn_tensor one = fixture_tensor(f, TN_FORMAT_FP8_BLOCK_1D, M, K, "one");
    fixture_write(two, TN_PLANE_COL, f->stream);
    expect_bytes(f, COL_BYTES);
    EXPECT_OK(tn_plane_require(two, TN_PLANE_ROW, f->stream));
    expect_bytes(f, COL_BYTES + ROW_BYTES);
    fixture_write(one, TN_PLANE_COL, f->stream);
    size_t before = fixture_owned_bytes(f);
    EXPECT_STATUS(tn_plane_require(one, TN_PLANE_ROW, f->stream), TN_UNSUPPORTED);
    expect_bytes(f, before);
}

static void the_last_plane_goes_only_with_its_tensor(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor tensor = weight(f);
    fixture_write(tensor, TN_PLANE_ROW, f->stream);
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream), TN_INVALID_STATE);
    expect_bytes(f, ROW_BYTES);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f->stream));
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f->stream));
    expect_bytes(f, COL_BYTES);
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_COL, f->stream), TN_INVALID_STATE);
    EXPECT_OK(tn_tensor_destroy(tensor, f->stream));
    expect_bytes(f, 0);
}

static void a_view_does_not_outlive_its_base(void **state) {
    const tensor_fixture *f = *state;
    tn_tensor base = weight(f), view = {0}, odd = {0};
    fixture_write(base, TN_PLANE_ROW, f->stream);
    EXPECT_OK(tn_tensor_view_rows(base, 128, 128, f->scope, &view));
    expect_bytes(f, ROW_BYTES);
    EXPECT_STATUS(tn_tensor_destroy(base, f->stream), TN_IN_USE);
    EXPECT_STATUS(tn_tensor_view_rows(base, 64, 128, f->scope, &odd), TN_UNSUPPORTED);
    expect_bytes(f, ROW_BYTES);
    EXPECT_OK(tn_tensor_destroy(view, f->stream));
    EXPECT_OK(tn_tensor_destroy(base, f->stream));
    expect_bytes(f, 0);
}

#define TEST(name)                                                                                 \
    cmocka_unit_test_setup_teardown(name, tensor_fixture_set_up, tensor_fixture_tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_transpose_in_place_strands_no_buffer),
        TEST(post_processing_twice_is_once),
        TEST(what_is_never_waited_for_dies_with_its_scope),
        TEST(making_a_tensor_makes_no_buffers),
        TEST(a_workspace_is_not_cached_per_layer),
        TEST(no_transpose_stays_on_a_reused_gather_buffer),
        TEST(a_transpose_that_is_kept_is_stale),
        TEST(what_is_saved_is_not_shared_with_the_live_tensor),
        TEST(a_cleared_tensor_claims_no_plane),
        TEST(an_update_that_does_not_fit_is_refused),
        TEST(a_plane_is_rebuilt_with_its_scales),
        TEST(row_comes_back_from_col_in_2d_only),
        TEST(the_last_plane_goes_only_with_its_tensor),
        TEST(a_view_does_not_outlive_its_base),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
