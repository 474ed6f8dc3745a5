/* Devices and streams of the public interface: a thin layer over the driver's table.
 *
 * It chooses the driver, knows which streams were made here, tells the pools when one ends, and
 * counts what keeps a device open.
 *
 * Invariants, under the device's lock:
 *   - streams holds each stream made by tn_stream_create and not yet destroyed, and each one that
 *     was adopted and not yet forgotten, once;
 *   - a watcher is freed by its unwatch alone, and never while its callback runs, or a wait is put
 *     on a stream that it hears of;
 *   - spare_events are recorded nowhere that still matters: an event may be recorded anew as soon
 *     as the wait for it was put on a stream.
 * No driver call that waits, and no callback, is made under the lock.
 */
#include "driver_state.h"
#include "host_alloc.h"
#include "no_wait.h"
#include "options.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { SPARE_EVENTS_MAX = 8 };

typedef struct own_stream {
    tn_stream stream;
    int is_adopted; /* another library made it, and its caller tells us when it ends */
    int is_ending;  /* a thread is in tn_stream_destroy or tn_stream_forget with it */
} own_stream;

typedef struct watcher {
    struct watcher *next;
    tn__stream_end_callback callback;
    tn__user_wait_callback wait_callback; /* NULL: does not care */
    const _Atomic uint64_t *known_bits;   /* of the streams whose waits it cares for */
    void *argument;
    int running; /* callbacks under way, and waits that it hears of */
} watcher;

/* Who hears of one wait. Others that would do without: they wait once more when they have to. */
enum { TOLD_MAX = 4 };

struct tn_device {
    const tn__driver *driver;
    tn__driver_device *state;
    tn_device_info info;
    atomic_long users; /* pools */
    pthread_mutex_t lock;
    pthread_cond_t callback_ended;
    own_stream *streams;
    size_t stream_count;
    size_t stream_capacity;
    watcher *watchers;
    size_t unwatching;                     /* threads that wait for a callback to end */
    _Atomic(tn__attachment *) attachments; /* only grows while the device lives */
    tn__event spare_events[SPARE_EVENTS_MAX];
    size_t spare_event_count;
};

const char *tn_version(void) { return TN_VERSION_STRING; }

const char *tn_driver_call_name(tn_driver_call call) {
    static const char *const names[TN_CALL_COUNT] = {
        [TN_CALL_MEM_CREATE] = "mem_create",
        [TN_CALL_MEM_RELEASE] = "mem_release",
        [TN_CALL_ADDRESS_RESERVE] = "address_reserve",
        [TN_CALL_ADDRESS_FREE] = "address_free",
        [TN_CALL_MEM_MAP] = "mem_map",
        [TN_CALL_MEM_SET_ACCESS] = "mem_set_access",
        [TN_CALL_MEM_UNMAP] = "mem_unmap",
        [TN_CALL_MEM_SHARE] = "mem_share",
        [TN_CALL_MEM_ALLOC] = "mem_alloc",
        [TN_CALL_MEM_FREE] = "mem_free",
        [TN_CALL_STREAM] = "stream",
        [TN_CALL_STREAM_WAIT] = "stream_wait",
        [TN_CALL_EVENT] = "event",
        [TN_CALL_EVENT_RECORD] = "event_record",
        [TN_CALL_EVENT_QUERY] = "event_query",
        [TN_CALL_EVENT_SYNCHRONIZE] = "event_synchronize",
        [TN_CALL_LAUNCH] = "launch",
    };
    int is_known = (int)call >= 0 && (int)call < TN_CALL_COUNT;
    return is_known ? names[call] : "unknown driver call";
}

/* ---- the choice of a driver ---------------------------------------------------------------- */

static tn_driver_kind kind_of(const tn_device_config *config) {
    if (config->driver != TN_DRIVER_AUTO) return config->driver;
    switch (tn__options_get()->driver) {
    case TN__DRIVER_CHOICE_CUDA: return TN_DRIVER_CUDA;
    case TN__DRIVER_CHOICE_HOST: return TN_DRIVER_HOST;
    default: return TN_DRIVER_AUTO;
    }
}

/* One who names a library means it: then its absence is no reason to take the CPU instead. */
static int names_a_library(const tn_device_config *config) {
    return config->cuda_library || strcmp(tn__options_get()->cuda_library, "libcuda.so.1") != 0;
}

static tn_status open_as(tn_device *device, const tn__driver *driver,
                         const tn_device_config *config) {
    device->driver = driver;
    return driver->open(config, &device->info, &device->state);
}

static tn_status open_driver(tn_device *device, const tn_device_config *config) {
    tn_driver_kind kind = kind_of(config);
    if (kind != TN_DRIVER_HOST) {
        tn_status status = open_as(device, &tn__driver_cuda, config);
        int is_final = kind == TN_DRIVER_CUDA || status != TN_UNSUPPORTED;
        if (is_final || names_a_library(config)) return status;
    }
    return open_as(device, &tn__driver_host, config);
}

static void print_options(void) {
    char text[4096];
    (void)tn_options_describe(text, sizeof text);
    fprintf(stderr, "tenure %s\n%s", TN_VERSION_STRING, text);
}

static void print_device(const tn_device *device) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!tn__options_get()->verbose) return;
    pthread_once(&once, print_options);
    fprintf(stderr, "tenure device: driver %s, %s%s, ordinal %d, %zu bytes in granules of %zu%s\n",
            device->driver->name, device->info.name, device->info.simulated ? " (simulated)" : "",
            device->info.ordinal, device->info.memory_bytes, device->info.granularity_bytes,
            device->info.supports_vmm ? ", virtual memory management" : "");
}

/* ---- devices ------------------------------------------------------------------------------- */

static tn_status check_config(const tn_device_config *config) {
    TN_REQUIRE(config->size == sizeof *config,
               "tn_device_config.size is %zu, not %zu: begin with TN_DEVICE_CONFIG_INIT",
               config->size, sizeof *config);
    TN_REQUIRE((int)config->driver >= TN_DRIVER_AUTO && (int)config->driver <= TN_DRIVER_HOST,
               "%d is no tn_driver_kind", (int)config->driver);
    TN_REQUIRE(config->ordinal >= 0, "device ordinal %d", config->ordinal);
    return TN_OK;
}

tn_status tn_device_create(const tn_device_config *config, tn_device **out) {
    static const tn_device_config defaults = TN_DEVICE_CONFIG_INIT;
    TN_REQUIRE(out, "tn_device_create: out is NULL");
    if (!config) config = &defaults;
    TN_TRY(check_config(config));
    tn_device *device = tn__host_alloc(1, sizeof *device);
    if (!device) return TN_OUT_OF_HOST_MEMORY;
    tn__error_scope_begin();
    tn_status status = tn__error_scope_end(open_driver(device, config));
    if (status != TN_OK) {
        tn__host_free(device);
        return status;
    }
    pthread_mutex_init(&device->lock, NULL);
    pthread_cond_init(&device->callback_ended, NULL);
    print_device(device);
    *out = device;
    return TN_OK;
}

tn__attachment *tn__device_attachment(tn_device *device, const void *key) {
    tn__attachment *found = atomic_load_explicit(&device->attachments, memory_order_acquire);
    while (found && found->key != key)
        found = found->next;
    return found;
}

void tn__device_attach(tn_device *device, tn__attachment *attachment) {
    TN_ASSERT(!tn__device_attachment(device, attachment->key));
    attachment->next = atomic_load(&device->attachments);
    while (!atomic_compare_exchange_weak(&device->attachments, &attachment->next, attachment))
        continue;
}

/* The last one attached ends first: it may rely on those before it. */
static void end_attachments(tn_device *device) {
    tn__attachment *first = atomic_load(&device->attachments);
    while (first) {
        tn__attachment *next = first->next;
        first->end(first);
        first = next;
    }
}

/* What the driver does not take back now keeps the device: it can be destroyed again. */
static tn_status empty_attachments(tn_device *device) {
    tn__attachment *now = atomic_load(&device->attachments);
    for (; now; now = now->next) {
        if (now->empty) TN_TRY(now->empty(now));
    }
    return TN_OK;
}

static void free_device(tn_device *device) {
    TN_ASSERT(!device->watchers);
    end_attachments(device);
    for (size_t i = 0; i < device->spare_event_count; i++)
        (void)device->driver->event_destroy(device->state, device->spare_events[i]);
    device->driver->close(device->state);
    pthread_cond_destroy(&device->callback_ended);
    pthread_mutex_destroy(&device->lock);
    tn__host_free(device->streams);
    tn__host_free(device);
}

tn_status tn_device_destroy(tn_device *device) {
    if (!device || tn__driver_is_gone()) return TN_OK;
    pthread_mutex_lock(&device->lock);
    size_t streams = device->stream_count;
    pthread_mutex_unlock(&device->lock);
    long users = atomic_load(&device->users);
    if (users || streams) {
        return TN_FAIL(TN_IN_USE,
                       "the device (%s, ordinal %d) is used by %ld pool%s and %zu stream%s: "
                       "destroy them first",
                       device->info.name, device->info.ordinal, users, users == 1 ? "" : "s",
                       streams, streams == 1 ? "" : "s");
    }
    TN_TRY(empty_attachments(device));
    free_device(device);
    return TN_OK;
}

tn_status tn_device_info_get(const tn_device *device, tn_device_info *out) {
    TN_REQUIRE(device, "tn_device_info_get: device is NULL");
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_device_info_get: begin with TN_DEVICE_INFO_INIT");
    *out = device->info;
    return TN_OK;
}

tn_status tn_device_synchronize(tn_device *device) {
    TN_REQUIRE(device, "tn_device_synchronize: device is NULL");
    return device->driver->synchronize(device->state);
}

tn_status tn_device_driver_stats(const tn_device *device, tn_driver_stats *out) {
    TN_REQUIRE(device, "tn_device_driver_stats: device is NULL");
    TN_REQUIRE(out && out->size == sizeof *out,
               "tn_device_driver_stats: begin with TN_DRIVER_STATS_INIT");
    return device->driver->stats(device->state, out);
}

const tn__driver *tn__device_driver(const tn_device *device) { return device->driver; }

tn__driver_device *tn__device_state(const tn_device *device) { return device->state; }

void tn__device_retain(tn_device *device) { atomic_fetch_add(&device->users, 1); }

void tn__device_release(tn_device *device) {
    long before = atomic_fetch_sub(&device->users, 1);
    TN_CHECK(before > 0);
}

/* ---- streams ------------------------------------------------------------------------------- */

/* Room for one more, so that adding it can not fail once the driver has made it. */
static tn_status make_stream_room_locked(tn_device *device) {
    if (device->stream_count < device->stream_capacity) return TN_OK;
    size_t capacity = device->stream_capacity ? device->stream_capacity * 2 : 8;
    own_stream *grown =
        tn__host_realloc(device->streams, device->stream_capacity, capacity, sizeof *grown);
    if (!grown) return TN_OUT_OF_HOST_MEMORY;
    device->streams = grown;
    device->stream_capacity = capacity;
    return TN_OK;
}

tn_status tn_stream_create(tn_device *device, tn_stream *out) {
    TN_REQUIRE(device && out, "tn_stream_create: device or out is NULL");
    TN_TRY(tn__driver_require_present("tn_stream_create"));
    tn_stream stream = NULL;
    pthread_mutex_lock(&device->lock);
    tn_status status = make_stream_room_locked(device);
    if (status == TN_OK) status = device->driver->stream_create(device->state, &stream);
    if (status == TN_OK) {
        device->streams[device->stream_count++] = (own_stream){.stream = stream};
        *out = stream;
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

/* The driver may give the handle of a stream that has just ended to a new one, before the thread
 * that ended the old one has struck it off: then both are here, told apart by that. */
static own_stream *find_own_locked(tn_device *device, tn_stream stream, int is_ending) {
    for (size_t i = 0; i < device->stream_count; i++) {
        own_stream *own = &device->streams[i];
        if (own->stream == stream && own->is_ending == is_ending) return own;
    }
    return NULL;
}

int tn__device_owns_stream(tn_device *device, tn_stream stream) {
    pthread_mutex_lock(&device->lock);
    int is_own = find_own_locked(device, stream, 0) || find_own_locked(device, stream, 1);
    pthread_mutex_unlock(&device->lock);
    return is_own;
}

/* Takes the right to end the stream: one thread gets it. */
static tn_status claim_ending(tn_device *device, tn_stream stream, int is_adopted) {
    pthread_mutex_lock(&device->lock);
    own_stream *own = find_own_locked(device, stream, 0);
    int is_claimed = own && own->is_adopted == is_adopted;
    if (is_claimed) own->is_ending = 1;
    pthread_mutex_unlock(&device->lock);
    TN_REQUIRE(is_claimed, "%p is no stream that was %s of this device", stream,
               is_adopted ? "adopted by tn_stream_adopt" : "made by tn_stream_create");
    return TN_OK;
}

static void settle_ending(tn_device *device, tn_stream stream, int has_ended) {
    pthread_mutex_lock(&device->lock);
    own_stream *own = find_own_locked(device, stream, 1);
    own->is_ending = 0;
    if (has_ended) *own = device->streams[--device->stream_count];
    pthread_mutex_unlock(&device->lock);
}

static void let_go_locked(tn_device *device, watcher *told) {
    if (--told->running == 0 && device->unwatching) {
        pthread_cond_broadcast(&device->callback_ended);
    }
}

/* A watcher under way can not be freed: its unwatch waits. Its successor is read, and put under
 * way, before the lock is let go. */
static void tell_stream_end(tn_device *device, tn_stream stream, uint64_t id) {
    pthread_mutex_lock(&device->lock);
    for (watcher *now = device->watchers; now; now = now->next) {
        now->running++;
        pthread_mutex_unlock(&device->lock);
        now->callback(now->argument, stream, id);
        pthread_mutex_lock(&device->lock);
        let_go_locked(device, now);
    }
    pthread_mutex_unlock(&device->lock);
}

/* The pools forget the stream, with its work done. */
static tn_status end_uses(tn_device *device, tn_stream stream) {
    uint64_t id;
    TN_TRY(device->driver->stream_id(device->state, stream, &id));
    TN_TRY(device->driver->stream_synchronize(device->state, stream));
    tell_stream_end(device, stream, id);
    return TN_OK;
}

static tn_status end_stream(tn_device *device, tn_stream stream) {
    TN_TRY(end_uses(device, stream));
    return device->driver->stream_destroy(device->state, stream);
}

tn_status tn_stream_destroy(tn_device *device, tn_stream stream) {
    if (!stream || tn__driver_is_gone()) return TN_OK;
    TN_REQUIRE(device, "tn_stream_destroy: device is NULL");
    TN_TRY(claim_ending(device, stream, 0));
    tn__error_scope_begin();
    tn_status status = tn__error_scope_end(end_stream(device, stream));
    settle_ending(device, stream, status == TN_OK);
    return status;
}

/* That the handle means a stream of this device, and not a default one. */
static tn_status check_adoptable(tn_device *device, tn_stream stream) {
    const uintptr_t default_handles = 2; /* CU_STREAM_LEGACY and _PER_THREAD are 1 and 2 */
    int ordinal = device->info.ordinal;
    uint64_t id;
    TN_REQUIRE((uintptr_t)stream > default_handles,
               "tn_stream_adopt: a default stream has no end and need not be adopted");
    TN_TRY(device->driver->stream_id(device->state, stream, &id));
    if (device->driver->stream_ordinal) {
        TN_TRY(device->driver->stream_ordinal(device->state, stream, &ordinal));
    }
    TN_REQUIRE(ordinal == device->info.ordinal,
               "tn_stream_adopt: stream %p belongs to device %d and not to device %d", stream,
               ordinal, device->info.ordinal);
    return TN_OK;
}

static tn_status adopt_locked(tn_device *device, tn_stream stream) {
    const own_stream *own = find_own_locked(device, stream, 0);
    if (own) {
        return TN_FAIL(TN_INVALID_STATE, "tn_stream_adopt: %p was %s already", stream,
                       own->is_adopted ? "adopted" : "made by tn_stream_create: its end is known");
    }
    TN_TRY(make_stream_room_locked(device));
    device->streams[device->stream_count++] = (own_stream){.stream = stream, .is_adopted = 1};
    return TN_OK;
}

tn_status tn_stream_adopt(tn_device *device, tn_stream stream) {
    TN_REQUIRE(device, "tn_stream_adopt: device is NULL");
    TN_TRY(check_adoptable(device, stream));
    pthread_mutex_lock(&device->lock);
    tn_status status = adopt_locked(device, stream);
    pthread_mutex_unlock(&device->lock);
    return status;
}

tn_status tn_stream_forget(tn_device *device, tn_stream stream) {
    if (!stream || tn__driver_is_gone()) return TN_OK;
    TN_REQUIRE(device, "tn_stream_forget: device is NULL");
    TN_TRY(claim_ending(device, stream, 1));
    tn_status status = end_uses(device, stream);
    settle_ending(device, stream, status == TN_OK);
    return status;
}

tn_status tn_stream_synchronize(tn_device *device, tn_stream stream) {
    TN_REQUIRE(device, "tn_stream_synchronize: device is NULL");
    return device->driver->stream_synchronize(device->state, stream);
}

/* ---- waits --------------------------------------------------------------------------------- */

/* A wait under way: its event, and who hears of it. */
typedef struct waiting {
    tn__user_wait wait;
    tn__event event; /* NULL: none was to spare */
    size_t told_count;
    struct {
        watcher *watcher;
        tn__user_wait_callback callback;
    } told[TOLD_MAX];
} waiting;

/* Those that know both streams stay until the wait is over. */
static void pin_watchers_locked(tn_device *device, waiting *w) {
    uint64_t bits = tn__stream_bit(w->wait.stream) | tn__stream_bit(w->wait.other);
    for (watcher *now = device->watchers; now && w->told_count < TOLD_MAX; now = now->next) {
        if (!now->wait_callback) continue;
        if (bits & ~atomic_load_explicit(now->known_bits, memory_order_relaxed)) continue;
        now->running++;
        w->told[w->told_count].watcher = now;
        w->told[w->told_count++].callback = now->wait_callback;
    }
}

static void begin_wait(tn_device *device, waiting *w) {
    w->event = NULL;
    w->told_count = 0;
    pthread_mutex_lock(&device->lock);
    pin_watchers_locked(device, w);
    if (device->spare_event_count) w->event = device->spare_events[--device->spare_event_count];
    pthread_mutex_unlock(&device->lock);
}

static void tell_wait(const waiting *w) {
    for (size_t i = 0; i < w->told_count; i++)
        w->told[i].callback(w->told[i].watcher->argument, &w->wait);
}

static void destroy_event(tn_device *device, tn__event event) {
    tn__saved_error error;
    tn__error_save(&error);
    (void)device->driver->event_destroy(device->state, event);
    tn__error_restore(&error);
}

static void end_wait(tn_device *device, waiting *w) {
    pthread_mutex_lock(&device->lock);
    for (size_t i = 0; i < w->told_count; i++)
        let_go_locked(device, w->told[i].watcher);
    if (w->event && device->spare_event_count < SPARE_EVENTS_MAX) {
        device->spare_events[device->spare_event_count++] = w->event;
        w->event = NULL;
    }
    pthread_mutex_unlock(&device->lock);
    if (w->event) destroy_event(device, w->event);
}

/* What was recorded in a capture is waited for in the graph alone; a stream that waits for it is in
 * the capture from then on. What can not be asked counts as captured. */
static int is_in_capture(tn_device *device, tn_stream stream) {
    int is_capturing = 1;
    tn__error_scope_begin();
    (void)device->driver->stream_is_capturing(device->state, stream, &is_capturing);
    (void)tn__error_scope_end(TN_OK);
    return is_capturing;
}

static tn_status put_wait(tn_device *device, waiting *w, int is_outside) {
    const tn__driver *driver = device->driver;
    if (!w->event) TN_TRY(driver->event_create(device->state, &w->event));
    tell_wait(w);
    TN_TRY((is_outside ? driver->event_record_outside
                       : driver->event_record)(device->state, w->event, w->wait.other));
    TN_TRY(driver->stream_wait_event(device->state, w->wait.stream, w->event));
    if (w->told_count && !is_in_capture(device, w->wait.stream)) {
        w->wait.is_put = 1;
        tell_wait(w);
    }
    return TN_OK;
}

static tn_status wait_between(tn_device *device, tn_stream stream, tn_stream other,
                              int is_outside) {
    static atomic_uint_fast64_t last_number;
    TN_REQUIRE(device, "tn_stream_wait: device is NULL");
    TN_TRY(tn__driver_require_present("tn_stream_wait"));
    waiting w; /* not all of it is set: there is room for some that do not hear of it */
    w.wait = (tn__user_wait){.stream = stream, .other = other};
    begin_wait(device, &w);
    if (w.told_count) w.wait.number = ++last_number;
    tn_status status = put_wait(device, &w, is_outside);
    end_wait(device, &w);
    return status;
}

tn_status tn_stream_wait(tn_device *device, tn_stream stream, tn_stream other) {
    return wait_between(device, stream, other, 0);
}

tn_status tn__stream_wait_outside(tn_device *device, tn_stream stream, tn_stream other) {
    return wait_between(device, stream, other, 1);
}

tn_status tn_copy(tn_device *device, void *dst, const void *src, size_t bytes, tn_stream stream) {
    TN_REQUIRE(device, "tn_copy: device is NULL");
    if (!bytes) return TN_OK;
    TN_REQUIRE(dst && src, "tn_copy of %zu bytes from %p to %p", bytes, src, dst);
    return device->driver->copy(device->state, dst, src, bytes, stream);
}

tn_status tn_fill(tn_device *device, void *dst, unsigned char byte, size_t bytes,
                  tn_stream stream) {
    TN_REQUIRE(device, "tn_fill: device is NULL");
    if (!bytes) return TN_OK;
    TN_REQUIRE(dst, "tn_fill of %zu bytes at NULL", bytes);
    return device->driver->fill(device->state, dst, byte, bytes, stream);
}

/* ---- waits for all work ------------------------------------------------------------------- */

static int is_capturing(const tn_device *device, tn_stream stream) {
    int is_capturing = 0;
    (void)device->driver->stream_is_capturing(device->state, stream, &is_capturing);
    return is_capturing;
}

static int is_any_capturing(tn_device *device) {
    int any = tn__is_capture_open() || is_capturing(device, NULL);
    pthread_mutex_lock(&device->lock);
    for (size_t i = 0; i < device->stream_count && !any; i++) {
        const own_stream *own = &device->streams[i];
        any = !own->is_ending && is_capturing(device, own->stream);
    }
    pthread_mutex_unlock(&device->lock);
    return any;
}

/* The captures are looked at last: one that a user began before he began a no-wait time, which has
 * ended since, is seen. */
tn_status tn__device_wait_begin(tn_device *device) {
    if (!tn__driver_wait_begin()) {
        return TN_FAIL(TN_INVALID_STATE, "a use that no event is behind must be waited for with "
                                         "the device, which is not to be waited for now");
    }
    tn__error_scope_begin();
    int any = is_any_capturing(device);
    (void)tn__error_scope_end(TN_OK);
    if (!any) return TN_OK;
    tn__driver_wait_end();
    return TN_FAIL(TN_INVALID_STATE, "a use that no event is behind must be waited for with "
                                     "the device: not while a stream captures");
}

/* ---- watchers ------------------------------------------------------------------------------ */

tn_status tn__device_watch_streams(tn_device *device, tn__stream_end_callback callback,
                                   void *argument) {
    watcher *added = tn__host_alloc(1, sizeof *added);
    if (!added) return TN_OUT_OF_HOST_MEMORY;
    added->callback = callback;
    added->argument = argument;
    pthread_mutex_lock(&device->lock);
    added->next = device->watchers;
    device->watchers = added;
    pthread_mutex_unlock(&device->lock);
    return TN_OK;
}

static watcher **find_watcher_locked(tn_device *device, const void *argument) {
    watcher **link = &device->watchers;
    while (*link && (*link)->argument != argument)
        link = &(*link)->next;
    return link;
}

void tn__device_watch_waits(tn_device *device, tn__user_wait_callback callback,
                            const _Atomic uint64_t *known_bits, const void *argument) {
    pthread_mutex_lock(&device->lock);
    watcher *found = *find_watcher_locked(device, argument);
    TN_CHECK(found);
    found->wait_callback = callback;
    found->known_bits = known_bits;
    pthread_mutex_unlock(&device->lock);
}

void tn__device_unwatch_streams(tn_device *device, void *argument) {
    watcher *removed = NULL;
    pthread_mutex_lock(&device->lock);
    device->unwatching++;
    while (*find_watcher_locked(device, argument) &&
           (*find_watcher_locked(device, argument))->running)
        pthread_cond_wait(&device->callback_ended, &device->lock);
    device->unwatching--;
    watcher **link = find_watcher_locked(device, argument);
    if (*link) {
        removed = *link;
        *link = removed->next;
    }
    pthread_mutex_unlock(&device->lock);
    tn__host_free(removed);
}
