/* All pools of the process: for those who need another pool than their own.
 *
 * A pool that is short takes idle memory from the others, and traces are closed when the process
 * exits. The list's lock is held for a few steps along the list and never while a pool's mutex is
 * taken or a driver is called: a pool that is worked on is pinned instead, and leaves only when
 * nobody has it pinned. Serial numbers find the way on: what is next may have changed meanwhile.
 */
#include "handle_cache.h"
#include "thread_cache.h"

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t unpinned = PTHREAD_COND_INITIALIZER;
static tn_pool *list;
static uint64_t last_serial;
static int is_first_made;

void tn__pools_enter(tn_pool *pool) {
    pthread_mutex_lock(&list_mutex);
    if (pool->serial == 0) pool->serial = ++last_serial;
    pool->next = list;
    list = pool;
    pthread_mutex_unlock(&list_mutex);
}

void tn__pools_leave(tn_pool *pool) {
    tn_pool **at = &list;
    pthread_mutex_lock(&list_mutex);
    while (*at != pool)
        at = &(*at)->next;
    *at = pool->next;
    while (pool->pins > 0)
        pthread_cond_wait(&unpinned, &list_mutex);
    pthread_mutex_unlock(&list_mutex);
}

int tn__pools_is_first(void) {
    int is_first;
    pthread_mutex_lock(&list_mutex);
    is_first = !is_first_made;
    is_first_made = 1;
    pthread_mutex_unlock(&list_mutex);
    return is_first;
}

/* ---- others ---------------------------------------------------------------------------------- */

/* The youngest pool older than that; NULL: none. */
static tn_pool *pin_before(uint64_t serial) {
    tn_pool *found = NULL;
    pthread_mutex_lock(&list_mutex);
    for (tn_pool *pool = list; pool; pool = pool->next) {
        if (pool->serial < serial && (!found || pool->serial > found->serial)) found = pool;
    }
    if (found) found->pins++;
    pthread_mutex_unlock(&list_mutex);
    return found;
}

static void unpin(tn_pool *pool) {
    pthread_mutex_lock(&list_mutex);
    pool->pins--;
    pthread_cond_broadcast(&unpinned);
    pthread_mutex_unlock(&list_mutex);
}

/* Two handles of one GPU share its memory; host devices have each their own. Pools of host memory
 * share the machine's. */
static int is_same_memory(const tn_pool *a, const tn_pool *b) {
    if (a->backing->is_host_memory || b->backing->is_host_memory) {
        return a->backing->is_host_memory && b->backing->is_host_memory;
    }
    if (a->device == b->device) return 1;
    return a->driver == b->driver && a->info.driver == TN_DRIVER_CUDA &&
           a->info.simulated == b->info.simulated && a->info.ordinal == b->info.ordinal;
}

/* The process's limits do not count host memory. */
static int can_help(const tn_pool *pool, const tn_pool *other, int is_process_wide) {
    return is_process_wide ? !other->backing->is_host_memory : is_same_memory(pool, other);
}

/* Then it is worth asking whether it may go: nothing is pending any more once that is so. */
static int has_idle(tn_pool *pool) {
    tn_pool_stats stats = TN_POOL_STATS_INIT;
    pthread_mutex_lock(&pool->mutex);
    (void)tn__caches_drain(pool);
    tn__pool_fill_stats(pool, &stats);
    pthread_mutex_unlock(&pool->mutex);
    return stats.cached_bytes + stats.pending_bytes + stats.driver_held_bytes > 0;
}

/* Also what it releases into its device's cache of handles: the request may be for other memory. */
static tn_status release_of(tn_pool *other, tn__release *release) {
    size_t counted_bytes = 0;
    tn_status status;
    if (other->settle && !has_idle(other)) return TN_OK;
    if (!tn__pool_settle(other, &release->freed_until)) return TN_OK;
    pthread_mutex_lock(&other->mutex);
    (void)tn__caches_drain(other);
    status = tn__pool_release(other, release);
    pthread_mutex_unlock(&other->mutex);
    return status == TN_OK ? tn__handle_cache_empty(other->device, &counted_bytes) : status;
}

tn_status tn__pools_release_others(tn_pool *pool, int is_process_wide, tn__release *release) {
    uint64_t serial = UINT64_MAX;
    size_t cached_bytes = 0;
    tn_status status = TN_OK;
    if (!pool->backing->is_host_memory)
        status = tn__handle_cache_empty(pool->device, &cached_bytes);
    release->released_bytes += cached_bytes;
    while (status == TN_OK && !tn__release_is_done(release)) {
        tn_pool *other = pin_before(serial);
        if (!other) break;
        serial = other->serial;
        if (other != pool && can_help(pool, other, is_process_wide)) {
            status = release_of(other, release);
        }
        unpin(other);
    }
    return status;
}

/* ---- exit ------------------------------------------------------------------------------------ */

/* A program that exits without an end to its pools keeps its trace, and is told what it left. A
 * pool that another thread is in is left alone: exit must not wait for it. */
__attribute__((destructor)) static void end_pools_at_exit(void) {
    if (pthread_mutex_trylock(&list_mutex) != 0) return;
    for (tn_pool *pool = list; pool; pool = pool->next) {
        if (pthread_mutex_trylock(&pool->mutex) != 0) continue;
        if (pool->trace) (void)tn__trace_close(pool->trace);
        pool->trace = NULL;
        tn__pool_print_end(pool, "the end of the process");
        pthread_mutex_unlock(&pool->mutex);
    }
    pthread_mutex_unlock(&list_mutex);
}
