/* The list of books, their locks, and what they do when a stream ends.
 *
 * Invariants: a books keeps its pool and its device; a pool has at most one books in the list; a
 * books in the list that has no root scope is about to be collected. The device's stream watch
 * calls with the address of a books, which is looked up in the list and not used otherwise: it may
 * be about to be freed.
 */
#include "books.h"

#include "host_alloc.h"
#include "offload.h"
#include "options.h"
#include "plane_order.h"

#include <pthread.h>

typedef struct books_list {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    tn__books *first;
    tn__books *ending; /* off the list, each with a thread that frees it */
    unsigned made;     /* spreads the books over the locks */
} books_list;

static books_list list = {.lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};

static void lock_list(void) { TN_CHECK(pthread_mutex_lock(&list.lock) == 0); }

static void unlock_list(void) { TN_CHECK(pthread_mutex_unlock(&list.lock) == 0); }

tn__scope_object *tn__scope_next(const tn__scope_object *scope, const tn__scope_object *root) {
    if (scope->first_child) return scope->first_child;
    for (; scope != root; scope = scope->parent) {
        if (scope->next) return scope->next;
    }
    return NULL;
}

/* CU_STREAM_LEGACY: another name of the default stream. */
#define LEGACY_STREAM ((tn_stream)1)

/* ---- streams ------------------------------------------------------------------------------- */

/* A handle alone does not name a stream: threads share that of their per-thread default streams,
 * and others are used again. It does for the default stream and for ours, until they end. */
TN__SLOW tn_status tn__books_ask_stream_id(tn__books *books, tn_stream stream, uint64_t *out) {
    const tn__driver *driver = tn__device_driver(books->device);
    uint64_t stream_id = 0;
    TN_TRY(driver->stream_id(tn__device_state(books->device), stream, &stream_id));
    int is_kept = !stream || tn__device_owns_stream(books->device, stream);
    stream_id &= ~TN__STREAM_ID_MAY_GO;
    if (!is_kept && stream != LEGACY_STREAM) stream_id |= TN__STREAM_ID_MAY_GO;
    if (!(stream_id & TN__STREAM_ID_IN_CAPTURE) && is_kept) {
        books->recent_ids[tn__recent_place(stream)] = (tn__recent_id){stream, stream_id};
    }
    *out = stream_id;
    return TN_OK;
}

/* The default stream's place is 0, and another stream's is not. */
static void unset_recent(tn__books *books, unsigned place) {
    books->recent_ids[place] = (tn__recent_id){place ? NULL : (tn_stream)(uintptr_t)16, 0};
    TN_ASSERT(!tn__recent_is_set(books, place));
}

static void forget_recent(tn__books *books, uint64_t stream_id) {
    for (unsigned i = 0; i < TN__RECENT_STREAMS; i++) {
        if (books->recent_ids[i].stream_id == stream_id) unset_recent(books, i);
    }
}

static void forget_stream(tn__tensor_object *tensor, uint64_t stream_id) {
    for (int i = 0; i < TN_PLANE_COUNT; i++) {
        tn__plane_object *plane = &tensor->planes[i];
        tn__plane_order_forget(plane, stream_id);
        for (tn__lease_object *lease = plane->first_lease; lease; lease = lease->next) {
            if (lease->stream_id == stream_id) lease->is_stream_ended = 1;
        }
    }
}

static void on_stream_end(void *argument, tn_stream stream, uint64_t stream_id) {
    (void)stream;
    lock_list();
    tn__books *books = list.first;
    while (books && books != argument)
        books = books->next;
    if (books) tn__lock(books->lock);
    unlock_list();
    if (!books) return;
    forget_recent(books, stream_id);
    for (tn__scope_object *root = books->first_root; root; root = root->next) {
        for (tn__scope_object *scope = root; scope; scope = tn__scope_next(scope, root)) {
            tn__tensor_object *tensor = scope->first_tensor;
            for (; tensor; tensor = tensor->next) {
                forget_stream(tensor, stream_id);
                forget_stream(tensor, stream_id | TN__STREAM_ID_MAY_GO); /* before it was adopted */
            }
        }
    }
    tn__unlock(books->lock);
}

/* ---- leases -------------------------------------------------------------------------------- */

static void free_lease(tn__lease_object *lease) {
    tn__handle_destroy(lease->handle.value);
    tn__host_free(lease);
}

/* None is spare, or the next one's values are used up: once in four billion leases. */
TN__SLOW tn__lease_object *tn__books_make_first_lease(tn__books *books, tn_status *why) {
    tn__lease_object *used_up = books->spare_leases;
    if (used_up) {
        books->spare_leases = used_up->next;
        free_lease(used_up);
        return tn__books_make_lease(books, why);
    }
    tn__lease_object *lease = tn__host_alloc(1, sizeof *lease);
    *why = TN_OUT_OF_HOST_MEMORY;
    if (!lease) return NULL;
    *why = tn__handle_create(TN__HANDLE_LEASE, lease, books->lock, &lease->handle.value);
    if (*why == TN_OK) {
        lease->slot = tn__handle_slot_of(lease->handle.value);
        return lease;
    }
    tn__host_free(lease);
    return NULL;
}

static void free_leases(tn__books *books) {
    tn__lock(books->lock);
    for (tn__lease_object *lease = books->spare_leases; lease;) {
        tn__lease_object *next = lease->next;
        free_lease(lease);
        lease = next;
    }
    tn__unlock(books->lock);
}

/* ---- the list ------------------------------------------------------------------------------ */

static tn__books *find_pool(const tn_pool *pool) {
    tn__books *books = list.first;
    while (books && books->pool != pool)
        books = books->next;
    return books;
}

static tn_status make_books(tn_pool *pool, tn__books **out) {
    tn__books *books = tn__host_alloc(1, sizeof *books);
    if (!books) return TN_OUT_OF_HOST_MEMORY;
    for (unsigned i = 0; i < TN__RECENT_STREAMS; i++)
        unset_recent(books, i);
    books->pool = pool;
    books->device = tn_pool_device(pool);
    books->checks_leases = tn__options_get()->check_leases;
    books->lock = list.made++ % TN__LOCK_COUNT;
    tn__lock_prepare(books->lock);
    tn_status status = tn__device_watch_streams(books->device, on_stream_end, books);
    if (status != TN_OK) {
        tn__host_free(books);
        return status;
    }
    tn__device_retain(books->device); /* the device's streams and driver are used till the end */
    tn__pool_keep(pool);
    books->next = list.first;
    list.first = books;
    *out = books;
    return TN_OK;
}

tn_status tn__books_open(tn_pool *pool, tn__books **out) {
    tn_status status = TN_OK;
    lock_list();
    tn__books *books = find_pool(pool);
    if (!books) status = make_books(pool, &books);
    if (status == TN_OK) {
        tn__lock(books->lock);
        *out = books;
    }
    unlock_list();
    return status;
}

tn__books *tn__books_find(tn_pool *pool) {
    lock_list();
    tn__books *books = find_pool(pool);
    if (books) tn__lock(books->lock);
    unlock_list();
    return books;
}

static int is_empty(const tn__books *books) {
    tn__lock(books->lock);
    int empty = books->first_root == NULL;
    tn__unlock(books->lock);
    return empty;
}

static tn__books **link_of(tn__books **first, const tn__books *books) {
    while (*first && *first != books)
        first = &(*first)->next;
    return first;
}

/* A books that is empty stays so while the list is locked: root scopes come through the list. */
static tn__books *take_empty_locked(void) {
    tn__books **link = &list.first;
    while (*link && !is_empty(*link))
        link = &(*link)->next;
    tn__books *empty = *link;
    if (!empty) return NULL;
    *link = empty->next;
    empty->next = list.ending;
    list.ending = empty;
    return empty;
}

/* Unwatching waits for calls under way, and these take the list's lock: it must not be held. */
static void end_books(tn__books *books) {
    tn__device_unwatch_streams(books->device, books);
    tn__offload_close(books->offload);
    free_leases(books);
    tn__pool_let_go(books->pool);
    tn__device_release(books->device);
    lock_list();
    tn__books **link = link_of(&list.ending, books);
    *link = books->next;
    TN_CHECK(pthread_cond_broadcast(&list.ended) == 0);
    unlock_list();
    tn__host_free(books);
}

/* One at a time: nobody waits for more than what his own takes. */
void tn__books_collect(const tn__books *mine) {
    tn__books *empty;
    lock_list();
    while ((empty = take_empty_locked()) != NULL) {
        unlock_list();
        end_books(empty);
        lock_list();
    }
    while (*link_of(&list.ending, mine))
        TN_CHECK(pthread_cond_wait(&list.ended, &list.lock) == 0);
    unlock_list();
}
