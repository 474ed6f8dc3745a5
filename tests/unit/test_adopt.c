/* Adopted memory: used in place, counted apart from what the pool owns, released exactly once. */
#include "tensor_fixture.h"

#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"
#include "tenure_lifetime.h"

enum { ROWS = 256, COLS = 384, DATA_BYTES = ROWS * COLS, SCALE_BYTES = 2 * 4 * 4 };

/* Somebody's memory for a 2D ROW plane. */
typedef struct lender {
    unsigned char *data;
    float *scale;
    int released;
} lender;

static void release(void *context) { ((lender *)context)->released++; }

static void owner_init(lender *self) {
    self->data = malloc(DATA_BYTES);
    self->scale = calloc(1, SCALE_BYTES);
    self->released = 0;
    assert_non_null(self->data);
    assert_non_null(self->scale);
    for (size_t i = 0; i < DATA_BYTES; i++)
        self->data[i] = (unsigned char)(i * 7 + i / COLS);
    for (int row = 0; row < 2; row++) {
        for (int col = 0; col < 3; col++)
            self->scale[row * 4 + col] = (float)(1 + row * 3 + col);
    }
}

static void owner_deinit(lender *self) {
    free(self->data);
    free(self->scale);
}

static tn_tensor_config config_of(void) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    config.format = TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = TN_E4M3;
    config.rank = 2;
    config.shape[0] = ROWS;
    config.shape[1] = COLS;
    config.name = "theirs";
    return config;
}

static tn_foreign_memory memory_of(lender *self, tn_stream stream) {
    tn_foreign_memory memory = TN_FOREIGN_MEMORY_INIT;
    memory.plane = TN_PLANE_ROW;
    memory.data = self->data;
    memory.data_bytes = DATA_BYTES;
    memory.scale = self->scale;
    memory.scale_bytes = SCALE_BYTES;
    memory.stream = stream;
    memory.release = release;
    memory.context = self;
    return memory;
}

static tn_tensor adopt_in(tn_scope scope, lender *self, tn_stream stream) {
    tn_tensor_config config = config_of();
    tn_foreign_memory memory = memory_of(self, stream);
    tn_tensor tensor = {0};
    EXPECT_OK(tn_tensor_adopt(scope, &config, &memory, &tensor));
    return tensor;
}

static void expect_bytes(const tensor_fixture *f, size_t owned, size_t foreign) {
    tn_ledger ledger = fixture_ledger(f->scope);
    assert_int_equal(ledger.total_bytes, owned);
    assert_int_equal(ledger.foreign_bytes, foreign);
    assert_int_equal(fixture_owned_bytes(f), owned);
    EXPECT_OK(tn_ledger_check(f->pool));
}

/* ---- its life ------------------------------------------------------------------------------ */

static void the_plane_is_the_memory_itself(void **state) {
    tensor_fixture f;
    lender owner;
    tn_lease lease;
    tn_plane_view view;
    (void)state;
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_tensor tensor = adopt_in(f.scope, &owner, f.other);
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_VALID);
    expect_bytes(&f, 0, DATA_BYTES + SCALE_BYTES);
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_UPDATE, f.stream, &lease, &view));
    assert_ptr_equal(view.data, owner.data);
    assert_ptr_equal(view.scale, owner.scale);
    EXPECT_STATUS(tn_tensor_destroy(tensor, f.stream), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, f.stream), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("last copy");
    assert_int_equal(owner.released, 0);
    EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
    assert_int_equal(owner.released, 1);
    expect_bytes(&f, 0, 0);
    tensor_fixture_close(&f);
    assert_int_equal(owner.released, 1);
    owner_deinit(&owner);
}

static void what_is_derived_from_it_is_the_pools(void **state) {
    tensor_fixture f;
    lender owner;
    (void)state;
    unsigned char *col = malloc(DATA_BYTES);
    float col_scale[3 * 4];
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_tensor tensor = adopt_in(f.scope, &owner, f.other);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f.stream));
    expect_bytes(&f, DATA_BYTES + sizeof col_scale, DATA_BYTES + SCALE_BYTES);
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f.stream)); /* no longer the last copy */
    assert_int_equal(owner.released, 1);
    expect_bytes(&f, DATA_BYTES + sizeof col_scale, 0);
    EXPECT_OK(tn_plane_read(tensor, TN_PLANE_COL, col, DATA_BYTES, col_scale, sizeof col_scale,
                            f.stream));
    EXPECT_OK(tn_stream_synchronize(f.device, f.stream));
    for (int row = 0; row < ROWS; row++) {
        for (int at = 0; at < COLS; at++)
            assert_int_equal(col[at * ROWS + row], owner.data[row * COLS + at]);
    }
    assert_true(col_scale[2 * 4 + 1] == owner.scale[1 * 4 + 2]);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_ROW, f.stream)); /* anew, in memory of the pool */
    expect_bytes(&f, 2 * DATA_BYTES + SCALE_BYTES + sizeof col_scale, 0);
    tensor_fixture_close(&f);
    assert_int_equal(owner.released, 1);
    owner_deinit(&owner);
    free(col);
}

static void a_scope_that_closes_releases_what_is_in_it(void **state) {
    tensor_fixture f;
    lender owners[3];
    tn_scope inner, innermost;
    tn_scope_config config = TN_SCOPE_CONFIG_INIT;
    (void)state;
    tensor_fixture_open(&f);
    config.kind = TN_SCOPE_STEP;
    config.parent = f.scope;
    EXPECT_OK(tn_scope_create(&config, &inner));
    config.parent = inner;
    EXPECT_OK(tn_scope_create(&config, &innermost));
    for (int i = 0; i < 3; i++)
        owner_init(&owners[i]);
    adopt_in(inner, &owners[0], f.other);
    adopt_in(innermost, &owners[1], f.other);
    tn_tensor moved = adopt_in(innermost, &owners[2], f.other);
    EXPECT_OK(tn_tensor_move(moved, f.scope));
    assert_int_equal(fixture_ledger(innermost).foreign_bytes, DATA_BYTES + SCALE_BYTES);
    assert_int_equal(fixture_ledger(inner).foreign_bytes, (size_t)2 * (DATA_BYTES + SCALE_BYTES));
    expect_bytes(&f, 0, (size_t)3 * (DATA_BYTES + SCALE_BYTES));
    EXPECT_OK(tn_scope_close(inner));
    assert_int_equal(owners[0].released, 1);
    assert_int_equal(owners[1].released, 1);
    assert_int_equal(owners[2].released, 0);
    expect_bytes(&f, 0, DATA_BYTES + SCALE_BYTES);
    tensor_fixture_close(&f);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(owners[i].released, 1);
        owner_deinit(&owners[i]);
    }
}

/* ---- the release --------------------------------------------------------------------------- */

typedef struct busy_owner {
    tensor_fixture *fixture;
    tn_tensor other; /* of the same pool, so under the same lock */
    int released;
} busy_owner;

static void release_that_calls_back(void *context) {
    busy_owner *self = context;
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor made;
    EXPECT_OK(tn_tensor_destroy(self->other, self->fixture->stream));
    EXPECT_OK(tn_tensor_create(self->fixture->scope, &config, &made));
    EXPECT_STATUS(tn_plane_make(made, TN_PLANE_ROW, NULL), TN_INVALID_ARGUMENT);
    self->released++;
}

static void a_release_may_call_the_library(void **state) {
    tensor_fixture f;
    lender owner;
    tn_tensor tensor;
    (void)state;
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_tensor_config config = config_of();
    tn_foreign_memory memory = memory_of(&owner, NULL);
    busy_owner busy = {&f, adopt_in(f.scope, &owner, NULL), 0};
    memory.release = release_that_calls_back;
    memory.context = &busy;
    EXPECT_OK(tn_tensor_adopt(f.scope, &config, &memory, &tensor));
    EXPECT_STATUS(tn_plane_drop(tensor, TN_PLANE_ROW, NULL), TN_INVALID_STATE);
    EXPECT_OK(tn_tensor_destroy(tensor, NULL));
    EXPECT_ERROR_HAS("last copy"); /* what failed in the release is the owner's business */
    assert_int_equal(busy.released, 1);
    assert_int_equal(owner.released, 1);
    tensor_fixture_close(&f);
    owner_deinit(&owner);
}

static void a_release_is_not_asked_for(void **state) {
    tensor_fixture f;
    lender owner;
    tn_tensor tensor;
    (void)state;
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_tensor_config config = config_of();
    tn_foreign_memory memory = memory_of(&owner, NULL);
    memory.release = NULL;
    EXPECT_OK(tn_tensor_adopt(f.scope, &config, &memory, &tensor));
    tensor_fixture_close(&f);
    assert_int_equal(owner.released, 0);
    owner_deinit(&owner);
}

/* ---- what is refused ----------------------------------------------------------------------- */

static void memory_that_may_only_be_read_is_not_written(void **state) {
    tensor_fixture f;
    lender owner;
    tn_tensor tensor;
    tn_lease lease;
    tn_plane_view view;
    (void)state;
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_tensor_config config = config_of();
    tn_foreign_memory memory = memory_of(&owner, f.other);
    memory.read_only = 1;
    EXPECT_OK(tn_tensor_adopt(f.scope, &config, &memory, &tensor));
    for (int access = TN_WRITE; access <= TN_UPDATE; access++) {
        EXPECT_STATUS(
            tn_lease_begin(tensor, TN_PLANE_ROW, (tn_access)access, f.stream, &lease, &view),
            TN_INVALID_STATE);
        EXPECT_ERROR_HAS("tensor theirs, plane ROW is memory that was adopted to be read only");
    }
    EXPECT_OK(tn_lease_begin(tensor, TN_PLANE_ROW, TN_READ, f.stream, &lease, &view));
    EXPECT_OK(tn_lease_end(lease));
    fixture_write(tensor, TN_PLANE_COL, f.stream); /* the other plane is the pool's */
    assert_int_equal(fixture_state(tensor, TN_PLANE_ROW), TN_PLANE_STALE);
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f.stream));
    assert_int_equal(owner.released, 1);
    tensor_fixture_close(&f);
    owner_deinit(&owner);
}

static void expect_refused(tensor_fixture *f, const tn_foreign_memory *memory, const char *words) {
    tn_tensor_config config = config_of();
    tn_tensor tensor = {77};
    EXPECT_STATUS(tn_tensor_adopt(f->scope, &config, memory, &tensor), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS(words);
    assert_int_equal(tensor.value, 77);
    assert_int_equal(fixture_ledger(f->scope).tensors, 0);
    expect_bytes(f, 0, 0);
}

static void memory_that_does_not_fit_the_plane_is_refused(void **state) {
    tensor_fixture f;
    lender owner;
    (void)state;
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_foreign_memory memory, good = memory_of(&owner, f.other);
#define REFUSED(field, value, words)                                                               \
    do {                                                                                           \
        memory = good;                                                                             \
        memory.field = (value);                                                                    \
        expect_refused(&f, &memory, words);                                                        \
    } while (0)
    REFUSED(size, 1, "TN_FOREIGN_MEMORY_INIT");
    REFUSED(plane, TN_PLANE_DATA, "no plane DATA");
    REFUSED(plane, (tn_plane)99, "no plane");
    REFUSED(data, NULL, "data is NULL");
    REFUSED(scale, NULL, "scale is NULL");
    REFUSED(data_bytes, DATA_BYTES - 1, "data of the plane takes 98304 bytes: 98303 were given");
    REFUSED(scale_bytes, SCALE_BYTES - 1, "scale of the plane takes 32 bytes: 31 were given");
    REFUSED(scale, (char *)owner.scale + 2, "is not aligned to 4 bytes");
    REFUSED(data, (void *)(UINTPTR_MAX - DATA_BYTES / 2), "passes the end of all addresses");
    REFUSED(scale, owner.data + DATA_BYTES - SCALE_BYTES, "overlap");
    REFUSED(stream, (tn_stream)&f, "stream");
#undef REFUSED
    expect_refused(&f, NULL, "TN_FOREIGN_MEMORY_INIT");
    assert_int_equal(owner.released, 0);
    tensor_fixture_close(&f);
    owner_deinit(&owner);
}

static void a_plane_without_elements_needs_no_memory(void **state) {
    tensor_fixture f;
    lender owner = {0};
    tn_tensor tensor;
    (void)state;
    tensor_fixture_open(&f);
    tn_tensor_config config = config_of();
    tn_foreign_memory memory = memory_of(&owner, f.other);
    config.shape[0] = 0;
    EXPECT_OK(tn_tensor_adopt(f.scope, &config, &memory, &tensor));
    expect_bytes(&f, 0, 0);
    EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f.stream));
    tensor_fixture_close(&f);
    assert_int_equal(owner.released, 1);
}

static void an_adoption_that_fails_changes_nothing(void **state) {
    tensor_fixture f;
    lender owner;
    tn_tensor tensor = {0};
    int failures = 0;
    (void)state;
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_tensor_config config = config_of();
    tn_foreign_memory memory = memory_of(&owner, f.other);
    size_t blocks = tn__host_live_blocks();
    for (;;) {
        tn__host_alloc_fault(failures + 1, 0);
        tn_status status = tn_tensor_adopt(f.scope, &config, &memory, &tensor);
        tn__host_alloc_fault(0, 0);
        if (status == TN_OK) break;
        assert_int_equal(status, TN_OUT_OF_HOST_MEMORY);
        assert_int_equal(tn__host_live_blocks(), blocks);
        assert_int_equal(fixture_ledger(f.scope).tensors, 0);
        expect_bytes(&f, 0, 0);
        failures++;
    }
    assert_int_equal(failures, 3); /* the tensor, its name, the owner's record */
    assert_int_equal(owner.released, 0);
    tensor_fixture_close(&f);
    assert_int_equal(owner.released, 1);
    owner_deinit(&owner);
}

/* ---- a tensor that stays ------------------------------------------------------------------- */

static tn_tensor regatherable_tensor(const tensor_fixture *f) {
    tn_tensor_config config = config_of();
    tn_tensor tensor = {0};
    config.regatherable = 1;
    EXPECT_OK(tn_tensor_create(f->scope, &config, &tensor));
    return tensor;
}

static void a_tensor_takes_memory_again_and_again(void **state) {
    tensor_fixture f;
    lender owner;
    (void)state;
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_foreign_memory memory = memory_of(&owner, f.other);
    tn_tensor tensor = regatherable_tensor(&f);
    for (int round = 1; round <= 3; round++) {
        EXPECT_OK(tn_plane_adopt(tensor, &memory));
        fixture_expect_states(tensor, TN_PLANE_VALID, TN_PLANE_ABSENT);
        EXPECT_OK(tn_plane_require(tensor, TN_PLANE_COL, f.stream));
        expect_bytes(&f, DATA_BYTES + 3 * 4 * 4, DATA_BYTES + SCALE_BYTES);
        EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f.stream));
        EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_ROW, f.stream)); /* the last copy */
        assert_int_equal(owner.released, round);
        fixture_expect_states(tensor, TN_PLANE_ABSENT, TN_PLANE_ABSENT);
        expect_bytes(&f, 0, 0);
    }
    tensor_fixture_close(&f);
    assert_int_equal(owner.released, 3);
    owner_deinit(&owner);
}

static void a_tensor_that_has_a_plane_takes_none(void **state) {
    tensor_fixture f;
    lender owner;
    tn_tensor view;
    (void)state;
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_foreign_memory memory = memory_of(&owner, f.other);
    tn_tensor tensor = regatherable_tensor(&f);
    tn_lease lease = fixture_lease(tensor, TN_PLANE_COL, TN_WRITE, f.stream);
    EXPECT_STATUS(tn_plane_adopt(tensor, &memory), TN_IN_USE);
    EXPECT_OK(tn_lease_end(lease));
    EXPECT_STATUS(tn_plane_adopt(tensor, &memory), TN_INVALID_STATE);
    EXPECT_ERROR_HAS("tensor theirs has its plane COL, which is VALID");
    EXPECT_OK(tn_plane_drop(tensor, TN_PLANE_COL, f.stream));
    memory.data_bytes--;
    EXPECT_STATUS(tn_plane_adopt(tensor, &memory), TN_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("tn_plane_adopt: data of the plane takes");
    memory.data_bytes++;
    EXPECT_OK(tn_tensor_view_rows(tensor, 0, 128, f.scope, &view));
    EXPECT_STATUS(tn_plane_adopt(view, &memory), TN_INVALID_STATE);
    EXPECT_OK(tn_plane_adopt(tensor, &memory));
    EXPECT_STATUS(tn_plane_adopt(tensor, &memory), TN_INVALID_STATE);
    EXPECT_OK(tn_tensor_destroy(view, f.stream));
    EXPECT_OK(tn_tensor_destroy(tensor, f.stream));
    EXPECT_STATUS(tn_plane_adopt(tensor, &memory), TN_STALE_HANDLE);
    EXPECT_STATUS(tn_plane_adopt(tensor, NULL), TN_INVALID_ARGUMENT);
    assert_int_equal(owner.released, 1);
    tensor_fixture_close(&f);
    owner_deinit(&owner);
}

static void a_plane_that_can_not_be_adopted_stays_absent(void **state) {
    tensor_fixture f;
    lender owner;
    (void)state;
    tensor_fixture_open(&f);
    owner_init(&owner);
    tn_foreign_memory memory = memory_of(&owner, f.other);
    tn_tensor tensor = regatherable_tensor(&f);
    size_t blocks = tn__host_live_blocks();
    tn__host_alloc_fault(1, 0);
    EXPECT_STATUS(tn_plane_adopt(tensor, &memory), TN_OUT_OF_HOST_MEMORY);
    tn__host_alloc_fault(0, 0);
    assert_int_equal(tn__host_live_blocks(), blocks);
    fixture_expect_states(tensor, TN_PLANE_ABSENT, TN_PLANE_ABSENT);
    expect_bytes(&f, 0, 0);
    EXPECT_OK(tn_plane_adopt(tensor, &memory));
    tensor_fixture_close(&f);
    assert_int_equal(owner.released, 1);
    owner_deinit(&owner);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_plane_is_the_memory_itself),
        cmocka_unit_test(what_is_derived_from_it_is_the_pools),
        cmocka_unit_test(a_scope_that_closes_releases_what_is_in_it),
        cmocka_unit_test(a_release_may_call_the_library),
        cmocka_unit_test(a_release_is_not_asked_for),
        cmocka_unit_test(memory_that_may_only_be_read_is_not_written),
        cmocka_unit_test(memory_that_does_not_fit_the_plane_is_refused),
        cmocka_unit_test(a_plane_without_elements_needs_no_memory),
        cmocka_unit_test(an_adoption_that_fails_changes_nothing),
        cmocka_unit_test(a_tensor_takes_memory_again_and_again),
        cmocka_unit_test(a_tensor_that_has_a_plane_takes_none),
        cmocka_unit_test(a_plane_that_can_not_be_adopted_stays_absent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
