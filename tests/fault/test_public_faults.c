/* Each public function of tenure_alloc.h and tenure_pool.h, in the middle of a program, while the
 * N-th driver call or the N-th host allocation fails, once or from then on, for every N until the
 * call does without. It succeeds, or its status says what failed and the program's pools are as
 * they were; without the fault it then succeeds. Functions that ask for nothing are shown to.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host_alloc.h"
#include "public_calls_support.h"

enum { NTH_MAX = 3000, CUDA_UNKNOWN = 999 };

typedef enum fault_kind { DRIVER_FAULT, HOST_FAULT } fault_kind;

typedef struct fault {
    fault_kind kind;
    int and_after;
} fault;

static const char *const fault_names[] = {"driver call", "host allocation"};

/* ---- what must not change -------------------------------------------------------------------- */

typedef struct pools_state {
    tn_pool_stats stats[SUBJECT_POOLS];
    long host_blocks;
} pools_state;

static void read_state(const public_subject *s, pools_state *out) {
    tn_pool *const pools[SUBJECT_POOLS] = {s->pages, s->plain, s->made, s->graphs};
    memset(out, 0, sizeof *out);
    for (int i = 0; i < SUBJECT_POOLS; i++) {
        if (pools[i]) out->stats[i] = test_pool_stats(pools[i]);
    }
    out->host_blocks = tn__host_live_blocks();
}

static void expect_blocks_unchanged(const tn_pool_stats *before, const tn_pool_stats *after) {
    assert_int_equal(before->live_bytes, after->live_bytes);
    assert_int_equal(before->live_blocks, after->live_blocks);
    assert_int_equal(before->owned_bytes, after->owned_bytes);
    assert_int_equal(before->allocs, after->allocs);
    assert_int_equal(before->frees, after->frees);
    assert_int_equal(before->peak_live_bytes, after->peak_live_bytes);
}

static void expect_memory_unchanged(const tn_pool_stats *before, const tn_pool_stats *after) {
    assert_int_equal(before->reserved_bytes, after->reserved_bytes);
    assert_int_equal(before->address_bytes, after->address_bytes);
    assert_int_equal(before->driver_held_bytes, after->driver_held_bytes);
    assert_int_equal(before->partial_bytes, after->partial_bytes);
    assert_int_equal(before->peak_reserved_bytes, after->peak_reserved_bytes);
    assert_int_equal(before->cached_bytes + before->pending_bytes,
                     after->cached_bytes + after->pending_bytes);
}

/* A driver that refuses everything from then on does not take back either what the call had just
 * got: that stays in the pool. */
static void expect_unchanged(const pools_state *before, const pools_state *after,
                             const public_call *call, const fault *f) {
    int keeps_memory = f->kind == DRIVER_FAULT && f->and_after;
    for (int i = 0; i < SUBJECT_POOLS; i++) {
        expect_blocks_unchanged(&before->stats[i], &after->stats[i]);
        if (call->flags & GIVES_BACK || keeps_memory) continue;
        expect_memory_unchanged(&before->stats[i], &after->stats[i]);
    }
}

/* ---- one run --------------------------------------------------------------------------------- */

static void put_fault(const fault *f, long nth) {
    if (f->kind == DRIVER_FAULT) {
        assert_int_equal(test_sim_get()->fault(NULL, nth, f->and_after, nth ? CUDA_UNKNOWN : 0), 0);
    } else {
        tn__host_alloc_fault(nth, f->and_after);
    }
}

static int is_right_status(const public_call *call, const fault *f, tn_status status) {
    if (f->kind == HOST_FAULT) return status == TN_OUT_OF_HOST_MEMORY;
    if (call->flags & BLAMES_FILE && status == TN_CORRUPT_INPUT)
        return tn_error_last_native() == CUDA_UNKNOWN;
    return status == TN_DRIVER_ERROR && strstr(tn_error_last(), "CUDA_ERROR_UNKNOWN") != NULL;
}

static void expect_right_status(const public_call *call, const fault *f, long nth,
                                tn_status status) {
    if (is_right_status(call, f, status)) return;
    fail_msg("%s, %s %ld fails%s: %s: %s", call->function, fault_names[f->kind], nth,
             f->and_after ? " and all after" : "", tn_status_name(status), tn_error_last());
}

/* 1 if the fault made the call fail; *is_reached: there was an nth of what should fail. */
static int run_once(const public_call *call, const fault *f, long nth, int *is_reached) {
    public_subject s;
    pools_state before;
    pools_state after;
    uint64_t calls;
    tn_status status;
    public_subject_open(&s, call);
    read_state(&s, &before);
    calls = test_sim_get()->call_count(NULL);
    put_fault(f, nth);
    status = call->run(&s);
    put_fault(f, 0);
    *is_reached = test_sim_get()->call_count(NULL) - calls >= (uint64_t)nth;
    if (status != TN_OK) {
        expect_right_status(call, f, nth, status);
        read_state(&s, &after);
        expect_unchanged(&before, &after, call, f);
        EXPECT_OK(call->run(&s));
    }
    if (call->undo) call->undo(&s);
    public_subject_close(&s);
    return status != TN_OK;
}

/* ---- the loops ------------------------------------------------------------------------------- */

/* Most calls are meant to fail somewhere: a loop that faults nothing shows nothing. */
static void fail_each_driver_call(int and_after) {
    const fault f = {DRIVER_FAULT, and_after};
    int failed = 0;
    for (size_t i = 0; i < public_call_count; i++) {
        int is_reached = 1;
        for (long nth = 1; is_reached; nth++) {
            assert_true(nth < NTH_MAX);
            failed += run_once(&public_calls[i], &f, nth, &is_reached);
        }
    }
    assert_true(failed > 100);
}

static void a_driver_call_that_fails_once_changes_nothing(void **state) {
    (void)state;
    fail_each_driver_call(0);
}

static void a_driver_that_fails_from_then_on_leaves_the_blocks(void **state) {
    (void)state;
    fail_each_driver_call(1);
}

/* How many allocations a call makes is not known: it is done when some in a row did not matter. */
static void fail_each_allocation(const public_call *call, int and_after) {
    enum { ENOUGH = 6 };
    const fault f = {HOST_FAULT, and_after};
    int ignored;
    long nth = 0;
    for (int passed = 0; passed < ENOUGH;) {
        int failed = run_once(call, &f, ++nth, &ignored);
        passed = failed ? 0 : passed + 1;
        if (call->flags & PURE) assert_false(failed);
    }
}

static void host_memory_that_fails_changes_nothing(void **state) {
    (void)state;
    for (size_t i = 0; i < public_call_count; i++) {
        fail_each_allocation(&public_calls[i], 0);
        fail_each_allocation(&public_calls[i], 1);
    }
}

static void pure_calls_ask_nothing_of_the_driver(void **state) {
    (void)state;
    for (size_t i = 0; i < public_call_count; i++) {
        const public_call *call = &public_calls[i];
        public_subject s;
        uint64_t calls;
        public_subject_open(&s, call);
        calls = test_sim_get()->call_count(NULL);
        EXPECT_OK(call->run(&s));
        calls = test_sim_get()->call_count(NULL) - calls;
        if (call->flags & PURE && calls) fail_msg("%s makes driver calls", call->function);
        if (call->undo) call->undo(&s);
        public_subject_close(&s);
    }
}

/* ---- no function is left out ----------------------------------------------------------------- */

static char *read_file(const char *name) {
    enum { MOST = 1 << 20 };
    char path[1024];
    char *text = calloc(MOST, 1);
    FILE *file;
    assert_non_null(text);
    snprintf(path, sizeof path, "%s/alloc/%s", TENURE_SOURCE_DIR, name);
    file = fopen(path, "r");
    if (!file) fail_msg("%s can not be read", path);
    assert_true(fread(text, 1, MOST - 1, file) > 0);
    fclose(file);
    return text;
}

static int has_row(const char *function, size_t length) {
    for (size_t i = 0; i < public_call_count; i++) {
        const char *name = public_calls[i].function;
        if (strlen(name) == length && memcmp(name, function, length) == 0) return 1;
    }
    return 0;
}

/* Declarations begin a line with TN_API; the name is what stands before the first bracket. */
static int count_declarations(const char *header, const char *map) {
    char *text = read_file(header);
    int count = 0;
    for (char *at = strstr(text, "\nTN_API "); at; at = strstr(at + 1, "\nTN_API ")) {
        const char *end = at + strcspn(at, "(");
        const char *name = end;
        char line[128];
        while (name[-1] == '_' || (name[-1] >= 'a' && name[-1] <= 'z'))
            name--;
        snprintf(line, sizeof line, "\n    %.*s;", (int)(end - name), name);
        if (!strstr(map, line)) fail_msg("%s is not in the symbol map", line + 5);
        if (!has_row(name, (size_t)(end - name)))
            fail_msg("%.*s of %s has no row in public_calls_support.c", (int)(end - name), name,
                     header);
        count++;
    }
    free(text);
    return count;
}

static void every_public_function_has_a_row(void **state) {
    char *map = read_file("tenure.map");
    int count;
    (void)state;
    count = count_declarations("tenure_alloc.h", map) + count_declarations("tenure_pool.h", map);
    assert_true(count > 50);
    for (size_t i = 0; i < public_call_count; i++) {
        if (!strstr(map, public_calls[i].function))
            fail_msg("%s is no public function", public_calls[i].function);
    }
    free(map);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_public_function_has_a_row),
        cmocka_unit_test(pure_calls_ask_nothing_of_the_driver),
        cmocka_unit_test(a_driver_call_that_fails_once_changes_nothing),
        cmocka_unit_test(a_driver_that_fails_from_then_on_leaves_the_blocks),
        cmocka_unit_test(host_memory_that_fails_changes_nothing),
    };
    return cmocka_run_group_tests_name("fault/public_faults", tests, NULL, NULL);
}
