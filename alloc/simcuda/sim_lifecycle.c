/* Load, configuration, fork, exit and unload of the simulated driver.
 *
 * - Loaded: configured from the environment.
 * - In a forked child every call returns CUDA_ERROR_NOT_INITIALIZED, for good: the driver does
 *   not survive a fork. Nothing is checked when the child ends.
 * - From the start of exit() calls return CUDA_ERROR_DEINITIALIZED. Exit handlers run backwards, so
 *   handlers that were registered before this library was loaded see that, as with the real one.
 * - At unload, by dlclose or at exit, what is left is printed; see tnsim_leftovers.
 */
#include <ctype.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim_lifecycle.h"
#include "sim_memory.h"
#include "sim_race.h"
#include "sim_stream.h"

#define DEFAULT_MEMORY        ((size_t)139 << 30)
#define DEFAULT_GRANULARITY   ((size_t)2 << 20)
#define DEFAULT_ADDRESS_SPACE ((size_t)128 << 40)
#define STRICT_UNLOAD_STATUS  97

static atomic_int is_forked;
static atomic_int is_exiting;

int tn__sim_is_forked(void) { return atomic_load_explicit(&is_forked, memory_order_relaxed); }
int tn__sim_is_exiting(void) { return atomic_load_explicit(&is_exiting, memory_order_relaxed); }

/* ---- configuration --------------------------------------------------------------------------- */

static int parse_size(const char *text, size_t *bytes) {
    static const struct {
        const char *unit;
        double factor;
    } units[] = {{"", 1},
                 {"KiB", 1024.0},
                 {"MiB", 1024.0 * 1024},
                 {"GiB", 1024.0 * 1024 * 1024},
                 {"TiB", 1024.0 * 1024 * 1024 * 1024}};
    char *end;
    double number = strtod(text, &end);
    if (end == text || number <= 0) return 0;
    while (isspace((unsigned char)*end))
        end++;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        double product = number * units[i].factor;
        if (strcmp(end, units[i].unit) != 0) continue;
        if (product < 1 || product >= 0x1p62) return 0;
        *bytes = (size_t)product;
        return 1;
    }
    return 0;
}

static void warn_of_variable(const char *name, const char *value, const char *accepted) {
    fprintf(stderr, "tenure-simcuda: %s=%s is ignored: it takes %s\n", name, value, accepted);
}

static void configure_from_environment(tnsim_config *config) {
    const char *memory = getenv("TENURE_SIM_MEMORY");
    const char *devices = getenv("TENURE_SIM_DEVICES");
    const char *backed = getenv("TENURE_SIM_BACKED");
    if (memory && !parse_size(memory, &config->memory_bytes)) {
        warn_of_variable("TENURE_SIM_MEMORY", memory, "a size such as 80GiB");
    }
    if (devices) {
        int count = atoi(devices);
        int is_valid = count >= 1 && count <= SIM_DEVICES_MAX;
        if (is_valid) config->device_count = count;
        if (!is_valid) warn_of_variable("TENURE_SIM_DEVICES", devices, "a count from 1 to 32");
    }
    if (backed) {
        int is_valid = strcmp(backed, "0") == 0 || strcmp(backed, "1") == 0;
        if (is_valid) config->backed = backed[0] == '1';
        if (!is_valid) warn_of_variable("TENURE_SIM_BACKED", backed, "0 or 1");
    }
}

static void set_defaults(tnsim_config *config) {
    if (!config->memory_bytes) config->memory_bytes = DEFAULT_MEMORY;
    if (!config->device_count) config->device_count = 1;
    if (!config->granularity_bytes) config->granularity_bytes = DEFAULT_GRANULARITY;
    if (!config->address_space_bytes) config->address_space_bytes = DEFAULT_ADDRESS_SPACE;
}

static int config_is_valid(const tnsim_config *config) {
    size_t granularity = config->granularity_bytes;
    if (config->device_count < 0 || config->device_count > SIM_DEVICES_MAX) return 0;
    if (granularity == 0) return 1;
    return granularity % (size_t)sysconf(_SC_PAGESIZE) == 0 &&
           (granularity & (granularity - 1)) == 0;
}

static void clear_devices(void) {
    for (int i = 0; i < SIM_DEVICES_MAX; i++) {
        sim_device *device = &tn__sim.devices[i];
        memset(device, 0, sizeof *device);
        device->memory_bytes = tn__sim.config.memory_bytes;
        device->file = -1;
    }
}

/* Under the lock. */
static void start_again(const tnsim_config *config) {
    tn__sim_streams_reset();
    tn__sim_memory_reset();
    tn__sim_races_reset();
    tn__sim.config = *config;
    tn__sim.generation++;
    tn__sim.initialized = 0;
    tn__sim.now = 0;
    tn__sim.memory_time = 0;
    tn__sim.random = config->seed;
    memset(tn__sim.counts, 0, sizeof tn__sim.counts);
    memset(tn__sim.faults, 0, sizeof tn__sim.faults);
    memset(&tn__sim.any_fault, 0, sizeof tn__sim.any_fault);
    clear_devices();
}

int tnsim_configure(const tnsim_config *given) {
    tnsim_config config = {.size = sizeof config};
    if (given && given->size != sizeof config) return CUDA_ERROR_INVALID_VALUE;
    if (given) config = *given;
    if (!config_is_valid(&config)) return CUDA_ERROR_INVALID_VALUE;
    if (!given) configure_from_environment(&config);
    set_defaults(&config);
    if (!tn__sim_lock()) return CUDA_ERROR_NOT_INITIALIZED;
    start_again(&config);
    tn__sim_unlock();
    return CUDA_SUCCESS;
}

/* ---- fork, exit, load, unload ---------------------------------------------------------------- */

static void before_fork(void) { pthread_mutex_lock(&tn__sim.lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&tn__sim.lock); }
static void after_fork_in_child(void) {
    atomic_store(&is_forked, 1);
    pthread_mutex_unlock(&tn__sim.lock);
}

static void when_exit_begins(void *ignored) {
    (void)ignored;
    atomic_store(&is_exiting, 1);
}

/* What atexit is made of. ThreadSanitizer's atexit forgets which library asked, and so would call
 * the handler after this one has been unloaded. */
int __cxa_atexit(void (*handler)(void *), void *argument, void *library);
extern void *__dso_handle __attribute__((visibility("hidden")));

__attribute__((constructor)) static void load(void) {
    clear_devices();
    tnsim_configure(NULL);
    tn__sim_streams_load();
    tn__sim_races_load();
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    __cxa_atexit(when_exit_begins, NULL, &__dso_handle);
}

__attribute__((destructor)) static void unload(void) {
    const char *strict = getenv("TENURE_SIM_STRICT_UNLOAD");
    tnsim_config config;
    char text[4096];
    int left;
    if (tn__sim_is_forked()) return;
    atomic_store(&is_exiting, 1);
    tn__sim_values_unload();
    tn__sim_streams_unload();
    left = tnsim_leftovers(text, sizeof text);
    if (left) fprintf(stderr, "tenure-simcuda: at unload %d things are left\n%s", left, text);
    if (left && strict && strcmp(strict, "1") == 0) {
        fflush(NULL);
        _exit(STRICT_UNLOAD_STATUS);
    }
    config = tn__sim.config;
    start_again(&config);
}

/* ---- leftovers ------------------------------------------------------------------------------- */

void tn__sim_report_line(sim_report *report, const char *format, ...) {
    va_list arguments;
    int length;
    size_t room = report->bytes - report->used;
    if (!report->text || room <= 1) return;
    va_start(arguments, format);
    length = vsnprintf(report->text + report->used, room, format, arguments);
    va_end(arguments);
    if (length > 0) report->used += (size_t)length < room ? (size_t)length : room - 1;
}

int tnsim_leftovers(char *text, size_t text_bytes) {
    sim_report report = {text, text_bytes, 0};
    int left;
    if (text && text_bytes) text[0] = '\0';
    if (!tn__sim_lock()) return 0;
    left = tn__sim_memory_leftovers(&report) + tn__sim_stream_leftovers(&report);
    tn__sim_unlock();
    return left;
}
