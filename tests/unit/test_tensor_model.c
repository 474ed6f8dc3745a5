/* Every sequence of up to five effective operations on one tensor, against a model of its states.
 *
 * The model below says the status and the new state of each operation; the real tensor must
 * agree, and after every step its ledger, the model's bytes and the pool's owned bytes are equal.
 * A step that the model says changes nothing is checked and not extended: what follows it is what
 * follows the shorter sequence.
 */
#include "tensor_fixture.h"

#include <string.h>

enum { DEPTH = 5, ROW = 0, COL = 1, LEASES_MAX = 5 };

typedef enum operation {
    MAKE_ROW,
    MAKE_COL,
    WRITE_ROW,
    WRITE_COL,
    UPDATE_ROW,
    UPDATE_COL,
    READ_ROW,
    READ_COL,
    REQUIRE_ROW,
    REQUIRE_COL,
    DROP_ROW,
    DROP_COL,
    RELEASE_ROW,
    RELEASE_COL,
    END_OLDEST,
    END_NEWEST,
    ABANDON_OLDEST,
    ABANDON_NEWEST,
    FREEZE,
    DESTROY,
    OPERATION_COUNT
} operation;

static const char *const operation_names[OPERATION_COUNT] = {
    "make ROW",   "make COL",       "write ROW",      "write COL",   "update ROW",
    "update COL", "read ROW",       "read COL",       "require ROW", "require COL",
    "drop ROW",   "drop COL",       "release ROW",    "release COL", "end oldest",
    "end newest", "abandon oldest", "abandon newest", "freeze",      "destroy"};

/* ---- the model ----------------------------------------------------------------------------- */

typedef struct model_lease {
    int plane;
    tn_access access;
    int made;         /* the plane was absent */
    int staled_other; /* the other plane was valid */
} model_lease;

typedef struct model {
    int is_2d, is_until_last_use;
    int alive, frozen;
    tn_plane_state state[2];
    model_lease leases[LEASES_MAX]; /* oldest first */
    int lease_count;
} model;

static int leases_on(const model *m, int plane) {
    int count = 0;
    for (int i = 0; i < m->lease_count; i++)
        count += m->leases[i].plane == plane;
    return count;
}

static model_lease *writer_of(model *m, int plane) {
    for (int i = 0; i < m->lease_count; i++) {
        if (m->leases[i].plane == plane && m->leases[i].access != TN_READ) return &m->leases[i];
    }
    return NULL;
}

static tn_status model_require(model *m, int plane) {
    if (m->state[plane] == TN_PLANE_VALID) return TN_OK;
    if (writer_of(m, ROW) || writer_of(m, COL)) return TN_IN_USE;
    if (m->state[!plane] != TN_PLANE_VALID) return TN_INVALID_STATE;
    if (!m->is_2d) return TN_UNSUPPORTED;
    m->state[plane] = TN_PLANE_VALID;
    return TN_OK;
}

static tn_status model_begin(model *m, int plane, tn_access access) {
    model_lease lease = {plane, access, 0, 0};
    if (access == TN_READ) {
        tn_status status = model_require(m, plane);
        if (status != TN_OK) return status;
    } else {
        const model_lease *other = writer_of(m, !plane);
        if (leases_on(m, plane)) return TN_IN_USE;
        if (leases_on(m, !plane) && !(other && other->access == TN_WRITE)) return TN_IN_USE;
        if (access == TN_UPDATE && m->state[plane] != TN_PLANE_VALID) return TN_INVALID_STATE;
        lease.made = m->state[plane] == TN_PLANE_ABSENT;
        lease.staled_other = m->state[!plane] == TN_PLANE_VALID;
        m->state[plane] = TN_PLANE_ALLOCATED;
        if (lease.staled_other) m->state[!plane] = TN_PLANE_STALE;
    }
    m->leases[m->lease_count++] = lease;
    return TN_OK;
}

static tn_status model_finish(model *m, int at, int is_end) {
    if (m->lease_count == 0) return TN_STALE_HANDLE;
    model_lease lease = m->leases[at];
    tn_plane_state *other = &m->state[!lease.plane];
    memmove(&m->leases[at], &m->leases[at + 1], (size_t)(m->lease_count - at - 1) * sizeof lease);
    m->lease_count--;
    if (lease.access == TN_READ) return TN_OK;
    if (is_end) {
        m->state[lease.plane] = TN_PLANE_VALID;
        if (m->is_2d && m->is_until_last_use && *other == TN_PLANE_STALE) *other = TN_PLANE_ABSENT;
    } else {
        m->state[lease.plane] = lease.made ? TN_PLANE_ABSENT : TN_PLANE_ALLOCATED;
        if (lease.staled_other && *other == TN_PLANE_STALE) *other = TN_PLANE_VALID;
    }
    return TN_OK;
}

static tn_status model_drop(model *m, int plane) {
    const model_lease *other = writer_of(m, !plane);
    int can_come_back = m->state[plane] == TN_PLANE_STALE && other && other->staled_other;
    if (leases_on(m, plane)) return TN_IN_USE;
    if (m->state[plane] == TN_PLANE_VALID && m->state[!plane] != TN_PLANE_VALID) {
        return TN_INVALID_STATE;
    }
    if (can_come_back) return TN_INVALID_STATE;
    m->state[plane] = TN_PLANE_ABSENT;
    return TN_OK;
}

static tn_status model_release(model *m, int plane) {
    int may = m->is_2d && m->is_until_last_use && m->frozen && !leases_on(m, plane) &&
              m->state[!plane] == TN_PLANE_VALID;
    if (may) m->state[plane] = TN_PLANE_ABSENT;
    return TN_OK;
}

static tn_status model_destroy(model *m) {
    if (m->lease_count) return TN_IN_USE;
    m->alive = 0;
    m->state[ROW] = m->state[COL] = TN_PLANE_ABSENT;
    return TN_OK;
}

static tn_status model_step(model *m, operation op) {
    int plane = op & 1;
    int newest = m->lease_count ? m->lease_count - 1 : 0;
    if (!m->alive) return TN_STALE_HANDLE;
    switch (op) {
    case MAKE_ROW:
    case MAKE_COL:
        if (m->state[plane] == TN_PLANE_ABSENT) m->state[plane] = TN_PLANE_ALLOCATED;
        return TN_OK;
    case WRITE_ROW:
    case WRITE_COL: return model_begin(m, plane, TN_WRITE);
    case UPDATE_ROW:
    case UPDATE_COL: return model_begin(m, plane, TN_UPDATE);
    case READ_ROW:
    case READ_COL: return model_begin(m, plane, TN_READ);
    case REQUIRE_ROW:
    case REQUIRE_COL: return model_require(m, plane);
    case DROP_ROW:
    case DROP_COL: return model_drop(m, plane);
    case RELEASE_ROW:
    case RELEASE_COL: return model_release(m, plane);
    case END_OLDEST: return model_finish(m, 0, 1);
    case END_NEWEST: return model_finish(m, newest, 1);
    case ABANDON_OLDEST: return model_finish(m, 0, 0);
    case ABANDON_NEWEST: return model_finish(m, newest, 0);
    case FREEZE: m->frozen = 1; return TN_OK;
    case DESTROY: return model_destroy(m);
    default: return TN_INVALID_ARGUMENT;
    }
}

/* ---- the real one -------------------------------------------------------------------------- */

typedef struct real {
    tn_tensor tensor;
    tn_lease leases[LEASES_MAX];
    int lease_count;
    tn_stream stream;
} real;

static tn_status real_finish(real *r, int at, int is_end) {
    if (r->lease_count == 0) return tn_lease_end((tn_lease){0});
    tn_lease lease = r->leases[at];
    tn_status status = is_end ? tn_lease_end(lease) : tn_lease_abandon(lease);
    memmove(&r->leases[at], &r->leases[at + 1], (size_t)(r->lease_count - at - 1) * sizeof lease);
    r->lease_count--;
    return status;
}

static tn_status real_begin(real *r, tn_plane plane, tn_access access) {
    tn_plane_view view;
    tn_status status =
        tn_lease_begin(r->tensor, plane, access, r->stream, &r->leases[r->lease_count], &view);
    if (status == TN_OK) r->lease_count++;
    return status;
}

static tn_status real_step(real *r, operation op) {
    tn_plane plane = op & 1 ? TN_PLANE_COL : TN_PLANE_ROW;
    int newest = r->lease_count ? r->lease_count - 1 : 0;
    switch (op) {
    case MAKE_ROW:
    case MAKE_COL: return tn_plane_make(r->tensor, plane, r->stream);
    case WRITE_ROW:
    case WRITE_COL: return real_begin(r, plane, TN_WRITE);
    case UPDATE_ROW:
    case UPDATE_COL: return real_begin(r, plane, TN_UPDATE);
    case READ_ROW:
    case READ_COL: return real_begin(r, plane, TN_READ);
    case REQUIRE_ROW:
    case REQUIRE_COL: return tn_plane_require(r->tensor, plane, r->stream);
    case DROP_ROW:
    case DROP_COL: return tn_plane_drop(r->tensor, plane, r->stream);
    case RELEASE_ROW:
    case RELEASE_COL: return tn_plane_release(r->tensor, plane, r->stream);
    case END_OLDEST: return real_finish(r, 0, 1);
    case END_NEWEST: return real_finish(r, newest, 1);
    case ABANDON_OLDEST: return real_finish(r, 0, 0);
    case ABANDON_NEWEST: return real_finish(r, newest, 0);
    case FREEZE: return tn_tensor_set_frozen(r->tensor, 1);
    case DESTROY: return tn_tensor_destroy(r->tensor, r->stream);
    default: return TN_INVALID_ARGUMENT;
    }
}

/* ---- the search ---------------------------------------------------------------------------- */

/* 130 x 600: ROW and COL differ in scales, and 1D differs from 2D. */
static const size_t plane_bytes[2][2] = {
    {78000 + 5 * 132 * 4, 78000 + 2 * 600 * 4}, /* 1D */
    {78000 + 2 * 8 * 4, 78000 + 5 * 4 * 4},     /* 2D */
};

typedef struct search {
    tensor_fixture fixture;
    operation path[DEPTH];
    uint64_t sequences;
} search;

static void fail_at(const search *s, int length, const char *what) {
    print_error("sequence:");
    for (int i = 0; i < length; i++)
        print_error(" %s;", operation_names[s->path[i]]);
    print_error("\n");
    fail_msg("%s (last error: %s)", what, tn_error_last());
}

static void compare(const search *s, const model *m, const real *r, int length) {
    size_t bytes = 0, planes = 0;
    for (int i = 0; i < 2; i++) {
        if (m->state[i] == TN_PLANE_ABSENT) continue;
        bytes += plane_bytes[m->is_2d][i];
        planes++;
    }
    if (m->alive) {
        if (fixture_state(r->tensor, TN_PLANE_ROW) != m->state[ROW]) fail_at(s, length, "ROW");
        if (fixture_state(r->tensor, TN_PLANE_COL) != m->state[COL]) fail_at(s, length, "COL");
    }
    tn_ledger ledger = fixture_ledger(s->fixture.scope);
    if (ledger.total_bytes != bytes) fail_at(s, length, "the ledger's bytes");
    if (ledger.planes != planes) fail_at(s, length, "the ledger's planes");
    if (ledger.leases != (uint64_t)m->lease_count) fail_at(s, length, "the ledger's leases");
    if (fixture_owned_bytes(&s->fixture) != bytes) fail_at(s, length, "the pool's owned bytes");
    if (tn_ledger_check(s->fixture.pool) != TN_OK) fail_at(s, length, "the ledger's check");
}

static int step(search *s, model *m, real *r, int length) {
    model before = *m;
    operation op = s->path[length - 1];
    tn_status expected = model_step(m, op);
    tn_status got = real_step(r, op);
    if (got != expected) {
        print_error("expected %s, got %s\n", tn_status_name(expected), tn_status_name(got));
        fail_at(s, length, "the status");
    }
    compare(s, m, r, length);
    return memcmp(&before, m, sizeof before) != 0;
}

/* Runs the first `length` operations of the path from nothing; 1 if the last one had an effect. */
static int run(search *s, const model *start, int length) {
    model m = *start;
    real r = {.stream = s->fixture.stream};
    int has_effect = 0;
    r.tensor =
        fixture_tensor(&s->fixture, m.is_2d ? TN_FORMAT_FP8_BLOCK_2D : TN_FORMAT_FP8_BLOCK_1D, 130,
                       600, "subject");
    EXPECT_OK(tn_tensor_set_policy(r.tensor, m.is_until_last_use ? TN_POLICY_UNTIL_LAST_USE
                                                                 : TN_POLICY_KEEP));
    for (int i = 1; i <= length; i++)
        has_effect = step(s, &m, &r, i);
    while (r.lease_count)
        EXPECT_OK(real_finish(&r, 0, 0));
    if (m.alive) EXPECT_OK(tn_tensor_destroy(r.tensor, r.stream));
    if (fixture_owned_bytes(&s->fixture)) fail_at(s, length, "bytes after destroy");
    s->sequences++;
    return has_effect;
}

static void extend(search *s, const model *start, int length) {
    if (length == DEPTH) return;
    for (int op = 0; op < OPERATION_COUNT; op++) {
        s->path[length] = (operation)op;
        if (run(s, start, length + 1)) extend(s, start, length + 1);
    }
}

/* The states are the same whatever is derived, so nothing is. */
static tn_status derive_nothing(tn_device *device, const tn_plane_view *from,
                                const tn_plane_view *to, tn_stream stream) {
    (void)device, (void)from, (void)to, (void)stream;
    return TN_OK;
}

static void search_all(int is_2d, int is_until_last_use, uint64_t sequences) {
    search s = {0};
    model start = {.alive = 1};
    start.is_2d = is_2d;
    start.is_until_last_use = is_until_last_use;
    tensor_fixture_open(&s.fixture);
    EXPECT_OK(tn_format_set_derive(TN_FORMAT_FP8_BLOCK_2D, derive_nothing));
    extend(&s, &start, 0);
    assert_int_equal(s.sequences, sequences);
    tensor_fixture_close(&s.fixture);
}

static void sequences_of_1d_that_keeps(void **state) {
    (void)state;
    search_all(0, 0, 23240);
}

static void sequences_of_1d_until_last_use(void **state) {
    (void)state;
    search_all(0, 1, 23240);
}

static void sequences_of_2d_that_keeps(void **state) {
    (void)state;
    search_all(1, 0, 26120);
}

static void sequences_of_2d_until_last_use(void **state) {
    (void)state;
    search_all(1, 1, 26120);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sequences_of_1d_that_keeps),
        cmocka_unit_test(sequences_of_1d_until_last_use),
        cmocka_unit_test(sequences_of_2d_that_keeps),
        cmocka_unit_test(sequences_of_2d_until_last_use),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
