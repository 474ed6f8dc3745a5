/* The rows: see public_calls_support.h. */
#include "public_calls_support.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "host_alloc.h"

#define MIB MIB_BYTES

/* ---- the program that is under way ----------------------------------------------------------- */

static tn_device *open_device(int ordinal) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_device *device = NULL;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    config.ordinal = ordinal;
    EXPECT_OK(tn_device_create(&config, &device));
    return device;
}

/* Two live blocks, of which b has used one, and two holes, one of them still in use by b. */
static void fill(public_subject *s, tn_pool *pool, void **blocks) {
    void *holes[2];
    blocks[0] = test_take(pool, 4 * MIB, s->a);
    holes[0] = test_take(pool, 6 * MIB, s->a);
    blocks[1] = test_take(pool, 1000, s->a);
    holes[1] = test_take(pool, 3 * MIB, s->a);
    blocks[2] = test_take(pool, 2 * MIB, s->a);
    test_sim_write(s->device, s->a, blocks[0], 4 * MIB, 10);
    test_sim_write(s->device, s->b, holes[1], 3 * MIB, 1e5);
    EXPECT_OK(tn_record_use(holes[1], s->b));
    EXPECT_OK(tn_record_use(blocks[1], s->b));
    test_give(pool, holes[0], s->a);
    test_give(pool, holes[1], s->a);
}

void public_subject_open(public_subject *s, const public_call *call) {
    tnsim_config config = {.size = sizeof config, .memory_bytes = 120 * MIB, .device_count = 2};
    memset(s, 0, sizeof *s);
    s->file = -1;
    assert_int_equal(test_sim_get()->configure(&config), 0);
    s->device = open_device(0);
    s->peer = open_device(1);
    s->a = test_open_stream(s->device);
    s->b = test_open_stream(s->device);
    s->pages = test_open_pool(s->device, TN_BACKING_VMM, 0);
    s->plain = test_open_pool(s->device, TN_BACKING_PLAIN, 0);
    fill(s, s->pages, s->blocks);
    fill(s, s->plain, s->blocks + 3);
    snprintf(s->path, sizeof s->path, P_tmpdir "/tenure_public_faults.%d", (int)getpid());
    if (call->setup) call->setup(s);
}

static void close_graphs(public_subject *s) {
    if (!s->graphs) return;
    tn_checkpoint_destroy(s->checkpoint);
    if (s->graph.graph) test_graph_destroy(s->device, &s->graph);
    if (s->memory) EXPECT_OK(tn_graph_memory_release(s->graphs, s->memory, s->a));
    EXPECT_OK(tn_pool_destroy(s->graphs));
}

void public_subject_close(public_subject *s) {
    for (int i = 0; i < SUBJECT_BLOCKS; i++)
        EXPECT_OK(tn_free(s->blocks[i], s->a));
    EXPECT_OK(tn_free(s->made_block, s->a));
    EXPECT_OK(tn_free(s->shareable, s->a));
    if (s->file >= 0) close(s->file);
    close_graphs(s);
    EXPECT_OK(tn_pool_destroy(s->made));
    EXPECT_OK(tn_pool_destroy(s->pages));
    EXPECT_OK(tn_pool_destroy(s->plain));
    EXPECT_OK(tn_stream_destroy(s->device, s->extra_stream));
    if (s->foreign) {
        EXPECT_OK(
            tn__device_driver(s->device)->stream_destroy(tn__device_state(s->device), s->foreign));
    }
    EXPECT_OK(tn_stream_destroy(s->device, s->a));
    EXPECT_OK(tn_stream_destroy(s->device, s->b));
    EXPECT_OK(tn_device_destroy(s->extra));
    EXPECT_OK(tn_device_destroy(s->peer));
    test_close_sim(s->device);
    assert_int_equal(tn__host_live_blocks(), 0);
    (void)unlink(s->path);
}

/* ---- words and devices ----------------------------------------------------------------------- */

static tn_status given(int is_there) { return is_there ? TN_OK : TN_INVALID_STATE; }

static tn_status run_version(public_subject *s) { return (void)s, given(tn_version() != NULL); }
static tn_status run_status_name(public_subject *s) {
    return (void)s, given(tn_status_name(TN_LEAK) != NULL);
}
static tn_status run_status_text(public_subject *s) {
    return (void)s, given(tn_status_text(TN_LEAK) != NULL);
}
static tn_status run_error_last(public_subject *s) {
    return (void)s, given(tn_error_last() != NULL);
}
static tn_status run_error_last_native(public_subject *s) {
    (void)s;
    (void)tn_error_last_native();
    return TN_OK;
}
static tn_status run_options_describe(public_subject *s) {
    return (void)s, given(tn_options_describe(NULL, 0) > 0);
}
static tn_status run_driver_call_name(public_subject *s) {
    return (void)s, given(tn_driver_call_name(TN_CALL_MEM_MAP) != NULL);
}
static tn_status run_event_kind_name(public_subject *s) {
    return (void)s, given(tn_event_kind_name(TN_EVENT_FREE) != NULL);
}

static tn_status run_device_create(public_subject *s) {
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    config.driver = TN_DRIVER_CUDA;
    config.cuda_library = TENURE_SIM_LIBRARY;
    return tn_device_create(&config, &s->extra);
}
static void end_extra_device(public_subject *s) {
    EXPECT_OK(tn_device_destroy(s->extra));
    s->extra = NULL;
}
static void extra_device(public_subject *s) { s->extra = open_device(0); }
static tn_status run_device_destroy(public_subject *s) {
    tn_status status = tn_device_destroy(s->extra);
    if (status == TN_OK) s->extra = NULL;
    return status;
}
static tn_status run_device_info(public_subject *s) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    return tn_device_info_get(s->device, &info);
}
static tn_status run_device_synchronize(public_subject *s) {
    return tn_device_synchronize(s->device);
}
static tn_status run_driver_stats(public_subject *s) {
    tn_driver_stats stats = TN_DRIVER_STATS_INIT;
    return tn_device_driver_stats(s->device, &stats);
}

/* ---- streams --------------------------------------------------------------------------------- */

static tn_status run_stream_create(public_subject *s) {
    return tn_stream_create(s->device, &s->extra_stream);
}
static void end_extra_stream(public_subject *s) {
    EXPECT_OK(tn_stream_destroy(s->device, s->extra_stream));
    s->extra_stream = NULL;
}
static void extra_stream_in_use(public_subject *s) {
    s->extra_stream = test_open_stream(s->device);
    EXPECT_OK(tn_record_use(s->blocks[0], s->extra_stream));
    EXPECT_OK(tn_record_use(s->blocks[4], s->extra_stream));
}
static tn_status run_stream_destroy(public_subject *s) {
    tn_status status = tn_stream_destroy(s->device, s->extra_stream);
    if (status == TN_OK) s->extra_stream = NULL;
    return status;
}
/* As another library makes it: the device does not hear of its end. */
static void foreign_stream(public_subject *s) {
    EXPECT_OK(
        tn__device_driver(s->device)->stream_create(tn__device_state(s->device), &s->foreign));
    EXPECT_OK(tn_record_use(s->blocks[0], s->foreign));
}
static void adopted_stream(public_subject *s) {
    foreign_stream(s);
    EXPECT_OK(tn_stream_adopt(s->device, s->foreign));
}
static tn_status run_stream_adopt(public_subject *s) {
    return tn_stream_adopt(s->device, s->foreign);
}
static tn_status run_stream_forget(public_subject *s) {
    return tn_stream_forget(s->device, s->foreign);
}
static void forget_stream(public_subject *s) { EXPECT_OK(tn_stream_forget(s->device, s->foreign)); }
static tn_status run_stream_synchronize(public_subject *s) {
    return tn_stream_synchronize(s->device, s->b);
}
static tn_status run_stream_wait(public_subject *s) {
    return tn_stream_wait(s->device, s->a, s->b);
}
static tn_status run_copy(public_subject *s) {
    return tn_copy(s->device, s->blocks[2], s->blocks[0], 1000, s->a);
}
static tn_status run_fill(public_subject *s) {
    return tn_fill(s->device, s->blocks[0], 1, 1000, s->a);
}

/* ---- pools ----------------------------------------------------------------------------------- */

static tn_status run_pool_create(public_subject *s) {
    return tn_pool_create(s->device, NULL, &s->made);
}
static void end_made_pool(public_subject *s) {
    EXPECT_OK(tn_pool_destroy(s->made));
    s->made = NULL;
}
static void made_idle_pool(public_subject *s) {
    void *block;
    s->made = test_open_pool(s->device, TN_BACKING_VMM, 0);
    block = test_take(s->made, 5 * MIB, s->a);
    test_sim_write(s->device, s->b, block, 5 * MIB, 1e3);
    EXPECT_OK(tn_record_use(block, s->b));
    test_give(s->made, block, s->a);
}
static tn_status run_pool_destroy(public_subject *s) {
    tn_status status = tn_pool_destroy(s->made);
    if (status == TN_OK) s->made = NULL;
    return status;
}
static tn_status run_trim_pages(public_subject *s) { return tn_pool_trim(s->pages, 0, NULL); }
static tn_status run_trim_plain(public_subject *s) { return tn_pool_trim(s->plain, 0, NULL); }
static tn_status run_limit_set(public_subject *s) {
    tn_pool_stats stats = test_pool_stats(s->pages);
    return tn_pool_limit_set(s->pages, stats.reserved_bytes);
}
static void end_limit(public_subject *s) { EXPECT_OK(tn_pool_limit_set(s->pages, 0)); }
static tn_status run_stats_get(public_subject *s) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    return tn_pool_stats_get(s->pages, &stats);
}
static tn_status run_reset_peaks(public_subject *s) { return tn_pool_stats_reset_peaks(s->pages); }
static tn_status run_check(public_subject *s) { return tn_pool_check(s->pages); }
static tn_status run_pool_device(public_subject *s) {
    return given(tn_pool_device(s->pages) == s->device);
}
static tn_status run_pool_name(public_subject *s) {
    return given(strcmp(tn_pool_name(s->pages), "pool") == 0);
}
static tn_status run_trace_begin(public_subject *s) {
    return tn_pool_trace_begin(s->pages, s->path);
}
static void end_trace(public_subject *s) { EXPECT_OK(tn_pool_trace_end(s->pages)); }
static void begin_trace(public_subject *s) { EXPECT_OK(tn_pool_trace_begin(s->pages, s->path)); }
static tn_status run_trace_end(public_subject *s) { return tn_pool_trace_end(s->pages); }

/* ---- blocks ---------------------------------------------------------------------------------- */

static tn_status alloc(public_subject *s, tn_pool *pool, size_t bytes, tn_stream stream) {
    return tn_alloc(pool, bytes, stream, NULL, &s->made_block);
}
static tn_status run_alloc_grow(public_subject *s) { return alloc(s, s->pages, 20 * MIB, s->a); }
static tn_status run_alloc_small(public_subject *s) { return alloc(s, s->pages, 700, s->b); }
static tn_status run_alloc_hole(public_subject *s) { return alloc(s, s->pages, 3 * MIB, s->b); }
static tn_status run_alloc_plain(public_subject *s) { return alloc(s, s->plain, 40 * MIB, s->b); }
static tn_status run_alloc_plain_small(public_subject *s) {
    return alloc(s, s->plain, 3 * MIB, s->b);
}
static void free_made_block(public_subject *s) {
    EXPECT_OK(tn_free(s->made_block, s->a));
    s->made_block = NULL;
}
static tn_status free_block(public_subject *s, int at, tn_stream stream) {
    tn_status status = tn_free(s->blocks[at], stream);
    if (status == TN_OK) s->blocks[at] = NULL;
    return status;
}
static tn_status run_free(public_subject *s) { return free_block(s, 0, s->a); }
static tn_status run_free_used(public_subject *s) { return free_block(s, 1, s->b); }
static tn_status run_free_plain(public_subject *s) { return free_block(s, 4, s->b); }
static tn_status run_free_on_legacy(public_subject *s) { return free_block(s, 2, NULL); }
static tn_status run_record_use(public_subject *s) { return tn_record_use(s->blocks[0], s->b); }
static tn_status run_record_use_plain(public_subject *s) {
    return tn_record_use(s->blocks[3], NULL);
}
static tn_status run_block_info(public_subject *s) {
    return tn_block_info(s->blocks[0], NULL, NULL);
}

/* ---- graph pools ----------------------------------------------------------------------------- */

static void open_graphs(public_subject *s) {
    s->graphs = test_open_graph_pool(s->device, TN_BACKING_VMM);
    test_capture_begin(s->device, s->a, TEST_CAPTURE_GLOBAL);
}
static void capture_something(public_subject *s) {
    void *block = NULL;
    open_graphs(s);
    EXPECT_OK(tn_graph_capture_begin(s->graphs, s->a));
    EXPECT_OK(tn_alloc(s->graphs, 3 * MIB, s->a, NULL, &block));
    test_sim_write(s->device, s->a, block, 3 * MIB, 10);
    EXPECT_OK(tn_free(block, s->a));
}
static void captured_graph(public_subject *s) {
    capture_something(s);
    EXPECT_OK(tn_graph_capture_end(s->graphs, &s->memory));
    s->graph = test_capture_end(s->device, s->a);
    test_graph_launch(s->device, &s->graph, s->a);
}
static tn_status run_graph_pool_create(public_subject *s) {
    return tn_graph_pool_create(s->device, NULL, &s->made);
}
static tn_status run_capture_begin(public_subject *s) {
    return tn_graph_capture_begin(s->graphs, s->a);
}
static void abort_capture(public_subject *s) {
    EXPECT_OK(tn_graph_capture_abort(s->graphs));
    s->graph = test_capture_end(s->device, s->a);
}
static void end_stream_capture(public_subject *s) { s->graph = test_capture_end(s->device, s->a); }
static tn_status run_capture_end(public_subject *s) {
    return tn_graph_capture_end(s->graphs, &s->memory);
}
static tn_status run_capture_abort(public_subject *s) { return tn_graph_capture_abort(s->graphs); }
static tn_status run_alloc_captured(public_subject *s) {
    return alloc(s, s->graphs, 20 * MIB, s->a);
}
static void free_captured(public_subject *s) {
    free_made_block(s);
    abort_capture(s);
}
static tn_status run_memory_release(public_subject *s) {
    tn_status status = tn_graph_memory_release(s->graphs, s->memory, s->a);
    if (status == TN_OK) s->memory = 0;
    return status;
}
static tn_status run_checkpoint(public_subject *s) {
    return tn_pool_checkpoint(s->graphs, &s->checkpoint);
}
static void keep_checkpoint(public_subject *s) {
    void *block = NULL;
    open_graphs(s);
    EXPECT_OK(tn_graph_capture_begin(s->graphs, s->a));
    EXPECT_OK(tn_alloc(s->graphs, 3 * MIB, s->a, NULL, &block));
    EXPECT_OK(tn_graph_capture_end(s->graphs, &s->memory));
    s->graph = test_capture_end(s->device, s->a);
    EXPECT_OK(tn_pool_checkpoint(s->graphs, &s->checkpoint));
    EXPECT_OK(tn_free(block, s->b));
    s->extra_block = block;
}
static tn_status run_restore(public_subject *s) {
    return tn_pool_restore(s->graphs, s->checkpoint, s->a);
}
static void free_restored(public_subject *s) { EXPECT_OK(tn_free(s->extra_block, s->a)); }
static tn_status run_checkpoint_destroy(public_subject *s) {
    tn_checkpoint_destroy(s->checkpoint);
    s->checkpoint = NULL;
    return TN_OK;
}

/* ---- tenure_pool.h --------------------------------------------------------------------------- */

static tn_status run_limits_set(public_subject *s) {
    return (void)s, tn_process_limits_set(GIB_BYTES, GIB_BYTES / 2);
}
static void no_limits(public_subject *s) {
    (void)s;
    EXPECT_OK(tn_process_limits_set(0, 0));
}
static tn_status run_limits_get(public_subject *s) {
    tn_process_limits limits = TN_PROCESS_LIMITS_INIT;
    return (void)s, tn_process_limits_get(&limits);
}
static int no_help(void *context, const tn_pressure *pressure) {
    return (void)context, (void)pressure, 0;
}
static tn_status run_callback_set(public_subject *s) {
    return tn_pool_pressure_callback_set(s->pages, no_help, NULL);
}
static tn_status run_report(public_subject *s) {
    char text[20000];
    return given(tn_pool_report(s->pages, TN_REPORT_JSON, text, sizeof text) > 0);
}
static tn_status run_snapshot(public_subject *s) {
    return tn_pool_snapshot_write(s->pages, s->path);
}
static tn_status run_events_begin(public_subject *s) {
    return tn_pool_events_begin(s->pages, 100, 0);
}
static void begin_events(public_subject *s) { EXPECT_OK(tn_pool_events_begin(s->pages, 100, 0)); }
static void end_events(public_subject *s) { EXPECT_OK(tn_pool_events_end(s->pages)); }
static tn_status run_events_read(public_subject *s) {
    size_t count = 0;
    return tn_pool_events_read(s->pages, NULL, 0, &count, NULL);
}
static tn_status run_events_end(public_subject *s) { return tn_pool_events_end(s->pages); }
static tn_status run_peer_enable(public_subject *s) {
    return tn_pool_peer_enable(s->pages, s->peer);
}
static void disable_peer(public_subject *s) { EXPECT_OK(tn_pool_peer_disable(s->pages, s->peer)); }
static void enable_peer(public_subject *s) { EXPECT_OK(tn_pool_peer_enable(s->pages, s->peer)); }
static tn_status run_peer_disable(public_subject *s) {
    return tn_pool_peer_disable(s->pages, s->peer);
}

/* ---- pause, sharing -------------------------------------------------------------------------- */

/* A driver that refuses to undo what was done leaves the pool paused. */
static tn_status run_pause(public_subject *s) {
    tn_status status = tn_pool_pause(s->pages, 1);
    if (status == TN_INVALID_STATE && s->is_tried) {
        TN_TRY(tn_pool_resume(s->pages));
        status = tn_pool_pause(s->pages, 1);
    }
    s->is_tried = 1;
    return status;
}
static void resume(public_subject *s) { EXPECT_OK(tn_pool_resume(s->pages)); }
static void pause_pages(public_subject *s) { EXPECT_OK(tn_pool_pause(s->pages, 1)); }
static tn_status run_resume(public_subject *s) { return tn_pool_resume(s->pages); }
static tn_status run_no_wait_begin(public_subject *s) { return (void)s, tn_no_wait_begin(); }
static void end_no_wait(public_subject *s) {
    (void)s;
    EXPECT_OK(tn_no_wait_end());
}
static void begin_no_wait(public_subject *s) {
    (void)s;
    EXPECT_OK(tn_no_wait_begin());
}
static tn_status run_no_wait_end(public_subject *s) { return (void)s, tn_no_wait_end(); }
static tn_status run_page_bytes(public_subject *s) {
    return given(tn_pool_page_bytes(s->pages) > 0);
}
static void shareable_block(public_subject *s) {
    tn_alloc_options options = TN_ALLOC_OPTIONS_INIT;
    options.flags = TN_ALLOC_SHAREABLE;
    EXPECT_OK(tn_alloc(s->pages, 3 * MIB, s->a, &options, &s->shareable));
}
static tn_status run_share_export(public_subject *s) {
    return tn_share_export(s->shareable, &s->share, &s->file);
}
static void exported_block(public_subject *s) {
    shareable_block(s);
    EXPECT_OK(run_share_export(s));
}
static tn_status run_share_import(public_subject *s) {
    return tn_share_import(s->pages, &s->share, s->file, &s->imported);
}
static void close_import(public_subject *s) { EXPECT_OK(tn_share_close(s->imported, s->a)); }
static void imported_block(public_subject *s) {
    exported_block(s);
    EXPECT_OK(run_share_import(s));
}
static tn_status run_share_close(public_subject *s) { return tn_share_close(s->imported, s->a); }

/* ---- the table ------------------------------------------------------------------------------- */

const public_call public_calls[] = {
    {"tn_version", NULL, run_version, NULL, PURE},
    {"tn_status_name", NULL, run_status_name, NULL, PURE},
    {"tn_status_text", NULL, run_status_text, NULL, PURE},
    {"tn_error_last", NULL, run_error_last, NULL, PURE},
    {"tn_error_last_native", NULL, run_error_last_native, NULL, PURE},
    {"tn_options_describe", NULL, run_options_describe, NULL, PURE},
    {"tn_driver_call_name", NULL, run_driver_call_name, NULL, PURE},
    {"tn_event_kind_name", NULL, run_event_kind_name, NULL, PURE},
    {"tn_device_create", NULL, run_device_create, end_extra_device, 0},
    {"tn_device_destroy", extra_device, run_device_destroy, NULL, ENDS},
    {"tn_device_info_get", NULL, run_device_info, NULL, PURE},
    {"tn_device_synchronize", NULL, run_device_synchronize, NULL, 0},
    {"tn_device_driver_stats", NULL, run_driver_stats, NULL, PURE},
    {"tn_stream_create", NULL, run_stream_create, end_extra_stream, 0},
    {"tn_stream_destroy", extra_stream_in_use, run_stream_destroy, NULL, ENDS},
    {"tn_stream_adopt", foreign_stream, run_stream_adopt, forget_stream, 0},
    {"tn_stream_forget", adopted_stream, run_stream_forget, NULL, ENDS},
    {"tn_stream_synchronize", NULL, run_stream_synchronize, NULL, 0},
    {"tn_stream_wait", NULL, run_stream_wait, NULL, 0},
    {"tn_copy", NULL, run_copy, NULL, 0},
    {"tn_fill", NULL, run_fill, NULL, 0},
    {"tn_pool_create", NULL, run_pool_create, end_made_pool, 0},
    {"tn_pool_destroy", made_idle_pool, run_pool_destroy, NULL, GIVES_BACK | ENDS},
    {"tn_pool_trim", NULL, run_trim_pages, NULL, GIVES_BACK},
    {"tn_pool_trim", NULL, run_trim_plain, NULL, GIVES_BACK},
    {"tn_pool_limit_set", NULL, run_limit_set, end_limit, PURE},
    {"tn_pool_stats_get", NULL, run_stats_get, NULL, PURE},
    {"tn_pool_stats_reset_peaks", NULL, run_reset_peaks, NULL, PURE},
    {"tn_pool_check", NULL, run_check, NULL, PURE},
    {"tn_pool_device", NULL, run_pool_device, NULL, PURE},
    {"tn_pool_name", NULL, run_pool_name, NULL, PURE},
    {"tn_pool_trace_begin", NULL, run_trace_begin, end_trace, 0},
    {"tn_pool_trace_end", begin_trace, run_trace_end, NULL, ENDS},
    {"tn_alloc", NULL, run_alloc_grow, free_made_block, 0},
    {"tn_alloc", NULL, run_alloc_small, free_made_block, 0},
    {"tn_alloc", NULL, run_alloc_hole, free_made_block, 0},
    {"tn_alloc", NULL, run_alloc_plain, free_made_block, GIVES_BACK},
    {"tn_alloc", NULL, run_alloc_plain_small, free_made_block, 0},
    {"tn_free", NULL, run_free, NULL, ENDS},
    {"tn_free", NULL, run_free_used, NULL, ENDS},
    {"tn_free", NULL, run_free_plain, NULL, ENDS},
    {"tn_free", NULL, run_free_on_legacy, NULL, ENDS},
    {"tn_record_use", NULL, run_record_use, NULL, 0},
    {"tn_record_use", NULL, run_record_use_plain, NULL, 0},
    {"tn_block_info", NULL, run_block_info, NULL, PURE},
    {"tn_process_limits_set", NULL, run_limits_set, no_limits, PURE},
    {"tn_process_limits_get", NULL, run_limits_get, NULL, PURE},
    {"tn_pool_pressure_callback_set", NULL, run_callback_set, NULL, PURE},
    {"tn_pool_report", NULL, run_report, NULL, 0},
    {"tn_pool_snapshot_write", NULL, run_snapshot, NULL, 0},
    {"tn_pool_events_begin", NULL, run_events_begin, end_events, 0},
    {"tn_pool_events_read", begin_events, run_events_read, NULL, PURE},
    {"tn_pool_events_end", begin_events, run_events_end, NULL, ENDS},
    {"tn_graph_pool_create", NULL, run_graph_pool_create, end_made_pool, 0},
    {"tn_graph_capture_begin", open_graphs, run_capture_begin, abort_capture, 0},
    {"tn_graph_capture_end", capture_something, run_capture_end, end_stream_capture, ENDS},
    {"tn_graph_capture_abort", capture_something, run_capture_abort, end_stream_capture, ENDS},
    {"tn_alloc", capture_something, run_alloc_captured, free_captured, 0},
    {"tn_graph_memory_release", captured_graph, run_memory_release, NULL, ENDS},
    {"tn_pool_checkpoint", captured_graph, run_checkpoint, NULL, ENDS},
    {"tn_pool_restore", keep_checkpoint, run_restore, free_restored, 0},
    {"tn_checkpoint_destroy", keep_checkpoint, run_checkpoint_destroy, NULL, PURE},
    {"tn_pool_pause", NULL, run_pause, resume, GIVES_BACK},
    {"tn_pool_resume", pause_pages, run_resume, NULL, ENDS},
    {"tn_no_wait_begin", NULL, run_no_wait_begin, end_no_wait, PURE},
    {"tn_no_wait_end", begin_no_wait, run_no_wait_end, NULL, PURE},
    {"tn_pool_page_bytes", NULL, run_page_bytes, NULL, PURE},
    {"tn_share_export", shareable_block, run_share_export, NULL, ENDS},
    {"tn_share_import", exported_block, run_share_import, close_import, BLAMES_FILE},
    {"tn_share_close", imported_block, run_share_close, NULL, ENDS},
    {"tn_pool_peer_enable", NULL, run_peer_enable, disable_peer, 0},
    {"tn_pool_peer_disable", enable_peer, run_peer_disable, NULL, ENDS},
};
const size_t public_call_count = sizeof public_calls / sizeof *public_calls;
