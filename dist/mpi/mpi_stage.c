/* Stages: see mpi_stage.h. */
#include "mpi_stage.h"

#include "host_alloc.h"

enum { WORD_BYTES = 64 /* a line of its own */ };

/* How far an opened stage is ahead: of more rounds than are ever on streams at once. */
static const uint32_t FAR_AHEAD = (uint32_t)1 << 30;

/* ---- one stage ------------------------------------------------------------------------------ */

static void end_stage(tn__mpi_stage *stage) {
    if (stage->word) (void)stage->driver->host_free(stage->on, stage->word);
    if (stage->passed) (void)stage->driver->event_destroy(stage->on, stage->passed);
    pthread_cond_destroy(&stage->changed);
    pthread_mutex_destroy(&stage->lock);
    tn__host_free(stage);
}

/* A wait that passes at once shows whether the device has such waits, for such memory. */
static tn_status try_a_wait(tn__mpi_stage *stage) {
    tn_stream stream;
    tn__saved_error saved;
    TN_TRY(stage->driver->stream_create(stage->on, &stream));
    tn_status status = stage->driver->stream_wait_value(stage->on, stream, stage->word, 0);
    if (status == TN_OK) status = stage->driver->stream_synchronize(stage->on, stream);
    tn__error_save(&saved);
    (void)stage->driver->stream_destroy(stage->on, stream);
    tn__error_restore(&saved);
    return status;
}

static tn_status make_memory(tn__mpi_stage *stage) {
    void *pinned;
    size_t slots_bytes = (size_t)TN__STAGE_SLOTS * TN__STAGE_SLOT_BYTES;
    TN_TRY(stage->driver->event_create(stage->on, &stage->passed));
    TN_TRY(stage->driver->host_alloc(stage->on, WORD_BYTES + slots_bytes, &pinned));
    stage->word = pinned;
    for (int i = 0; i < TN__STAGE_SLOTS; i++)
        stage->slots[i] = (unsigned char *)pinned + WORD_BYTES + (size_t)i * TN__STAGE_SLOT_BYTES;
    __atomic_store_n(stage->word, 0, __ATOMIC_RELEASE);
    return try_a_wait(stage);
}

static tn_status make_stage(tn_device *device, tn__mpi_stage **out) {
    const tn__driver *driver = tn__device_driver(device);
    tn__saved_error saved;
    if (!driver->stream_wait_value)
        return TN_FAIL(TN_UNSUPPORTED, "the %s driver has no waits for values", driver->name);
    tn__mpi_stage *stage = tn__host_alloc(1, sizeof *stage);
    if (!stage) return TN_OUT_OF_HOST_MEMORY;
    stage->driver = driver;
    stage->on = tn__device_state(device);
    pthread_mutex_init(&stage->lock, NULL);
    pthread_cond_init(&stage->changed, NULL);
    tn_status status = make_memory(stage);
    if (status != TN_OK) {
        tn__error_save(&saved);
        end_stage(stage);
        tn__error_restore(&saved);
        return status;
    }
    *out = stage;
    return TN_OK;
}

/* ---- the stages of a device ----------------------------------------------------------------- */

typedef struct device_stages {
    tn__attachment base;
    tn__mpi_stage *first;
} device_stages;

static pthread_mutex_t stages_lock = PTHREAD_MUTEX_INITIALIZER;
static const char stages_key;

/* The device has no streams of ours any more; what else is on it may be a stage's. */
static void end_stages(tn__attachment *base) {
    device_stages *stages = (device_stages *)base;
    if (stages->first) (void)stages->first->driver->synchronize(stages->first->on);
    while (stages->first) {
        tn__mpi_stage *stage = stages->first;
        TN_ASSERT(!stage->is_taken);
        stages->first = stage->next;
        end_stage(stage);
    }
    tn__host_free(stages);
}

static device_stages *stages_of_locked(tn_device *device) {
    device_stages *stages = (device_stages *)tn__device_attachment(device, &stages_key);
    if (stages) return stages;
    stages = tn__host_alloc(1, sizeof *stages);
    if (!stages) return NULL;
    stages->base.key = &stages_key;
    stages->base.end = end_stages;
    tn__device_attach(device, &stages->base);
    return stages;
}

/* What the last communicator has put on streams is all done. */
static int is_spare(tn__mpi_stage *stage) {
    int is_done = 0;
    if (stage->is_taken || stage->is_lost) return 0;
    return stage->driver->event_is_done(stage->on, stage->passed, &is_done) == TN_OK && is_done;
}

static void start_over(tn__mpi_stage *stage) {
    stage->is_taken = 1;
    stage->came = stage->put = 0;
    stage->is_open = 0;
    __atomic_store_n(stage->word, 0, __ATOMIC_RELEASE);
}

static tn_status take_locked(tn_device *device, tn__mpi_stage **out) {
    device_stages *stages = stages_of_locked(device);
    if (!stages) return TN_OUT_OF_HOST_MEMORY;
    tn__mpi_stage *stage = stages->first;
    while (stage && !is_spare(stage))
        stage = stage->next;
    if (!stage) {
        TN_TRY(make_stage(device, &stage));
        stage->next = stages->first;
        stages->first = stage;
    }
    start_over(stage);
    *out = stage;
    return TN_OK;
}

tn_status tn__stage_take(tn_device *device, tn__mpi_stage **out) {
    pthread_mutex_lock(&stages_lock);
    tn_status status = take_locked(device, out);
    pthread_mutex_unlock(&stages_lock);
    return status;
}

void tn__stage_give(tn__mpi_stage *stage) {
    pthread_mutex_lock(&stages_lock);
    TN_ASSERT(stage->is_taken);
    stage->is_taken = 0;
    pthread_mutex_unlock(&stages_lock);
}

unsigned char *tn__stage_slot(tn__mpi_stage *stage, uint64_t round) {
    return stage->slots[round % TN__STAGE_SLOTS];
}

/* ---- on the stream --------------------------------------------------------------------------- */

/* The stream's host function: makes no driver call, and waits for nothing. */
static void note_came(void *argument) {
    tn__mpi_stage *stage = argument;
    pthread_mutex_lock(&stage->lock);
    stage->came++;
    pthread_cond_broadcast(&stage->changed);
    pthread_mutex_unlock(&stage->lock);
}

tn_status tn__stage_put_ready(tn__mpi_stage *stage, tn_stream stream) {
    TN_TRY(stage->driver->host_task(stage->on, note_came, stage, stream));
    stage->put++;
    return TN_OK;
}

tn_status tn__stage_put_wait(tn__mpi_stage *stage, uint64_t round, tn_stream stream) {
    TN_ASSERT(round <= stage->put);
    return stage->driver->stream_wait_value(stage->on, stream, stage->word, (uint32_t)round);
}

tn_status tn__stage_put_end(tn__mpi_stage *stage, tn_stream stream) {
    tn_status status = stage->driver->event_record(stage->on, stage->passed, stream);
    if (status != TN_OK) stage->is_lost = 1;
    return status;
}

/* ---- the worker ------------------------------------------------------------------------------ */

int tn__stage_await(tn__mpi_stage *stage, uint64_t round, const _Atomic int *is_aborted) {
    pthread_mutex_lock(&stage->lock);
    while (stage->came < round && !atomic_load(is_aborted))
        pthread_cond_wait(&stage->changed, &stage->lock);
    pthread_mutex_unlock(&stage->lock);
    return !atomic_load(is_aborted);
}

void tn__stage_publish(tn__mpi_stage *stage, uint64_t round) {
    TN_ASSERT(!stage->is_open);
    __atomic_store_n(stage->word, (uint32_t)round, __ATOMIC_RELEASE);
}

void tn__stage_open(tn__mpi_stage *stage) {
    if (stage->is_open) return;
    stage->is_open = 1;
    uint32_t word = __atomic_load_n(stage->word, __ATOMIC_ACQUIRE);
    __atomic_store_n(stage->word, word + FAR_AHEAD, __ATOMIC_RELEASE);
}

void tn__stage_wake(tn__mpi_stage *stage) {
    pthread_mutex_lock(&stage->lock);
    pthread_cond_broadcast(&stage->changed);
    pthread_mutex_unlock(&stage->lock);
}
