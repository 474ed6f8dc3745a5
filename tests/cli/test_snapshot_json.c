/* The map of a pool: every piece tiles its region, and the pieces add up to the statistics, which
 * are made by other code. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "tenure_pool.h"
#include "test_pools.h"

typedef struct fixture {
    tn_device *device;
    tn_pool *pool;
    tn_stream streams[2];
    char path[64];
} fixture;

static int open_as(void **state, tn_pool_backing backing) {
    static fixture f;
    f.device = test_open_sim(512 * MIB_BYTES, 0);
    f.pool = test_open_pool(f.device, backing, 0);
    for (int i = 0; i < 2; i++)
        f.streams[i] = test_open_stream(f.device);
    snprintf(f.path, sizeof f.path, "snapshot-%d.json", (int)getpid());
    *state = &f;
    return 0;
}

static int open_vmm(void **state) { return open_as(state, TN_BACKING_VMM); }
static int open_plain(void **state) { return open_as(state, TN_BACKING_PLAIN); }

static int close_fixture(void **state) {
    fixture *f = *state;
    EXPECT_OK(tn_pool_destroy(f->pool));
    for (int i = 0; i < 2; i++)
        EXPECT_OK(tn_stream_destroy(f->device, f->streams[i]));
    test_close_sim(f->device);
    (void)remove(f->path);
    return 0;
}

static cJSON *read_json(const char *path) {
    FILE *file = fopen(path, "r");
    size_t room = 1 << 22;
    char *text = calloc(1, room);
    cJSON *value;
    assert_non_null(file);
    assert_true(fread(text, 1, room - 1, file) < room - 1);
    fclose(file);
    value = cJSON_ParseWithOpts(text, NULL, 1);
    if (!value) fail_msg("no JSON: %s", text);
    free(text);
    return value;
}

static const cJSON *member(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!item) fail_msg("there is no %s", name);
    return item;
}

static size_t number(const cJSON *object, const char *name) {
    const cJSON *item = member(object, name);
    assert_true(cJSON_IsNumber(item));
    return (size_t)item->valuedouble;
}

static int is_kind(const cJSON *piece, const char *kind) {
    return piece && strcmp(cJSON_GetStringValue(member(piece, "kind")), kind) == 0;
}

/* ---- adding up ------------------------------------------------------------------------------- */

static int is_pending(const cJSON *piece) {
    const cJSON *stream = member(piece, "stream");
    const cJSON *use;
    cJSON_ArrayForEach(use, member(piece, "uses")) {
        int is_own = cJSON_IsNumber(stream) && number(use, "stream") == number(piece, "stream");
        if (!is_own && cJSON_IsFalse(member(use, "is_complete"))) return 1;
    }
    return 0;
}

static size_t overlap(const cJSON *piece, size_t begin, size_t end) {
    size_t first = number(piece, "offset");
    size_t last = first + number(piece, "bytes");
    if (first < begin) first = begin;
    if (last > end) last = end;
    return last > first ? last - first : 0;
}

/* Free memory is in the heap, or kept by a thread. */
static int is_free(const cJSON *piece) {
    return is_kind(piece, "free") || is_kind(piece, "cached");
}

/* The run from the piece on: idle pages in it are cached, the rest is partly used. */
static const cJSON *add_run(const cJSON *first, size_t page_bytes, tn_pool_stats *sums) {
    size_t begin = number(first, "offset");
    size_t end = begin;
    const cJSON *piece = first;
    for (; is_free(piece); piece = piece->next)
        end += number(piece, "bytes");
    begin = (begin + page_bytes - 1) / page_bytes * page_bytes;
    end = end / page_bytes * page_bytes;
    for (piece = first; is_free(piece); piece = piece->next) {
        size_t bytes = number(piece, "bytes");
        size_t idle = overlap(piece, begin, end);
        assert_int_equal(cJSON_IsTrue(member(piece, "is_pending")), is_pending(piece));
        if (is_pending(piece)) {
            sums->pending_bytes += bytes;
        } else {
            sums->cached_bytes += idle;
            sums->partial_bytes += bytes - idle;
        }
    }
    return piece;
}

static void add_live(const cJSON *piece, tn_pool_stats *sums) {
    size_t asked = number(piece, "asked_bytes");
    assert_true(asked <= number(piece, "bytes"));
    sums->live_bytes += asked;
    sums->live_blocks++;
    sums->partial_bytes += number(piece, "bytes") - asked;
    if (cJSON_IsTrue(member(piece, "is_owned"))) sums->owned_bytes += asked;
}

static size_t mapped_bytes(const cJSON *region, size_t begin, size_t end) {
    size_t page_bytes = number(region, "page_bytes");
    size_t bytes = 0;
    const cJSON *span;
    cJSON_ArrayForEach(span, member(region, "mapped_pages")) {
        size_t first = (size_t)cJSON_GetArrayItem(span, 0)->valuedouble * page_bytes;
        size_t last = first + (size_t)cJSON_GetArrayItem(span, 1)->valuedouble * page_bytes;
        if (first < begin) first = begin;
        if (last > end) last = end;
        if (last > first) bytes += last - first;
    }
    return bytes;
}

static void check_tiles(const cJSON *region) {
    size_t offset = 0;
    const cJSON *piece;
    cJSON_ArrayForEach(piece, member(region, "pieces")) {
        size_t bytes = number(piece, "bytes");
        int is_mapped = is_kind(piece, "live") || is_free(piece);
        assert_int_equal(number(piece, "offset"), offset);
        assert_int_equal(mapped_bytes(region, offset, offset + bytes), is_mapped ? bytes : 0);
        offset += bytes;
    }
    assert_int_equal(offset, number(region, "bytes"));
}

static tn_pool_stats add_up(const cJSON *snapshot) {
    tn_pool_stats sums = TN_POOL_STATS_INIT;
    const cJSON *region;
    cJSON_ArrayForEach(region, member(snapshot, "regions")) {
        const cJSON *piece = member(region, "pieces")->child;
        check_tiles(region);
        sums.address_bytes += number(region, "bytes");
        sums.reserved_bytes += mapped_bytes(region, 0, number(region, "bytes"));
        while (piece) {
            if (is_free(piece)) {
                piece = add_run(piece, number(region, "page_bytes"), &sums);
                continue;
            }
            if (is_kind(piece, "live")) add_live(piece, &sums);
            piece = piece->next;
        }
    }
    return sums;
}

static void expect_sums(fixture *f) {
    cJSON *snapshot;
    const cJSON *told;
    tn_pool_stats stats = test_pool_stats(f->pool);
    tn_pool_stats sums;
    EXPECT_OK(tn_pool_snapshot_write(f->pool, f->path));
    snapshot = read_json(f->path);
    told = member(snapshot, "statistics");
    sums = add_up(snapshot);
    assert_int_equal(sums.live_bytes, stats.live_bytes);
    assert_int_equal(sums.cached_bytes, stats.cached_bytes);
    assert_int_equal(sums.pending_bytes, stats.pending_bytes);
    assert_int_equal(sums.partial_bytes, stats.partial_bytes);
    assert_int_equal(sums.owned_bytes, stats.owned_bytes);
    assert_int_equal(sums.live_blocks, stats.live_blocks);
    assert_int_equal(sums.address_bytes, stats.address_bytes);
    assert_int_equal(sums.reserved_bytes + stats.driver_held_bytes, stats.reserved_bytes);
#define EXPECT_TOLD(unit, role, name, meaning)                                                     \
    assert_int_equal(number(told, #name), (size_t)stats.name);
    TN_POOL_STATS_TABLE(EXPECT_TOLD)
    cJSON_Delete(snapshot);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static uint32_t next_random(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void the_pieces_add_up_to_the_statistics(void **state) {
    enum { BLOCKS = 40, STEPS = 400 };
    fixture *f = *state;
    void *blocks[BLOCKS] = {NULL};
    uint32_t seed = 20261129;
    size_t pending = 0;
    expect_sums(f);
    for (int step = 0; step < STEPS; step++) {
        size_t i = next_random(&seed) % BLOCKS;
        tn_stream stream = f->streams[next_random(&seed) % 2];
        if (!blocks[i]) {
            size_t bytes = 1 + next_random(&seed) % (step % 3 ? 6 * MIB_BYTES : 100000);
            EXPECT_OK(tn_alloc(f->pool, bytes, stream, NULL, &blocks[i]));
            test_sim_write(f->device, stream, blocks[i], bytes, 50);
        } else {
            EXPECT_OK(tn_free(blocks[i], stream));
            blocks[i] = NULL;
        }
        if (step % 20 == 0) expect_sums(f);
        if (test_pool_stats(f->pool).pending_bytes > 0) pending++;
    }
    assert_true(pending > STEPS / 10);
    for (int i = 0; i < BLOCKS; i++)
        EXPECT_OK(tn_free(blocks[i], f->streams[0]));
    expect_sums(f);
}

static void names_streams_and_events_are_in_it(void **state) {
    fixture *f = *state;
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    const cJSON *piece;
    const cJSON *events;
    cJSON *snapshot;
    void *block = NULL;
    options.owner = "a \"weight\"";
    options.site = "m.c:12";
    EXPECT_OK(tn_pool_events_begin(f->pool, 16, 1));
    EXPECT_OK(tn_alloc(f->pool, 5 * MIB_BYTES, f->streams[0], &options, &block));
    EXPECT_OK(tn_record_use(block, f->streams[1]));
    EXPECT_OK(tn_pool_snapshot_write(f->pool, f->path));
    snapshot = read_json(f->path);
    piece = member(member(snapshot, "regions")->child, "pieces")->child;
    while (!is_kind(piece, "live"))
        piece = piece->next;
    assert_string_equal(cJSON_GetStringValue(member(piece, "owner")), "a \"weight\"");
    assert_string_equal(cJSON_GetStringValue(member(piece, "site")), "m.c:12");
    assert_int_equal(number(piece, "asked_bytes"), 5 * MIB_BYTES);
    assert_int_equal(cJSON_GetArraySize(member(piece, "uses")), 1);
    assert_int_not_equal(number(member(piece, "uses")->child, "stream"), number(piece, "stream"));
    assert_int_equal(cJSON_GetArraySize(member(snapshot, "streams")), 2);
    events = member(snapshot, "events");
    assert_int_equal(cJSON_GetArraySize(events), 3);
    assert_string_equal(cJSON_GetStringValue(member(cJSON_GetArrayItem(events, 2), "kind")),
                        "record_use");
    assert_true(cJSON_GetArraySize(member(cJSON_GetArrayItem(events, 2), "frames")) > 2);
    cJSON_Delete(snapshot);
    /* Nothing is taken out of the ring. */
    EXPECT_OK(tn_pool_snapshot_write(f->pool, f->path));
    snapshot = read_json(f->path);
    assert_int_equal(cJSON_GetArraySize(member(snapshot, "events")), 3);
    cJSON_Delete(snapshot);
    EXPECT_OK(tn_pool_events_end(f->pool));
    test_give(f->pool, block, f->streams[0]);
}

static void a_failure_leaves_an_older_file(void **state) {
    fixture *f = *state;
    char part[80];
    cJSON *snapshot;
    EXPECT_STATUS(tn_pool_snapshot_write(NULL, f->path), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_snapshot_write(f->pool, NULL), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_snapshot_write(f->pool, ""), TN_INVALID_ARGUMENT);
    EXPECT_STATUS(tn_pool_snapshot_write(f->pool, "no/such/directory/x"), TN_IO);
    EXPECT_ERROR_HAS("no/such/directory/x");
    EXPECT_OK(tn_pool_snapshot_write(f->pool, f->path));
    /* Where the unfinished file would lie is a directory: it can not be written. */
    snprintf(part, sizeof part, "%s.part", f->path);
    assert_int_equal(mkdir(part, 0700), 0);
    EXPECT_STATUS(tn_pool_snapshot_write(f->pool, f->path), TN_IO);
    assert_int_equal(rmdir(part), 0);
    snapshot = read_json(f->path);
    assert_int_equal(number(snapshot, "operations"), 0);
    cJSON_Delete(snapshot);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_pieces_add_up_to_the_statistics, open_vmm,
                                        close_fixture),
        cmocka_unit_test_setup_teardown(the_pieces_add_up_to_the_statistics, open_plain,
                                        close_fixture),
        cmocka_unit_test_setup_teardown(names_streams_and_events_are_in_it, open_vmm,
                                        close_fixture),
        cmocka_unit_test_setup_teardown(a_failure_leaves_an_older_file, open_vmm, close_fixture),
    };
    return cmocka_run_group_tests_name("cli/snapshot_json", tests, NULL, NULL);
}
