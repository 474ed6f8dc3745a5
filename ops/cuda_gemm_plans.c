/* The plans of a device: see cuda_gemm.h.
 *
 * A table of buckets by the shape's hash, each a list. A plan is made without the lock, which may
 * take cuBLASLt a good part of a millisecond; of two threads that make the same one, the second
 * drops its own.
 *
 * A shape that is tuned gets a plan of more candidates than the others (cuda_gemm_offers.c), which
 * takes the place of the one that it had.
 */
#include "cuda_gemm.h"
#include "host_alloc.h"

#include <string.h>

/* ---- cuBLASLt for a device ------------------------------------------------------------------ */

static tn_status gemm_make(tn__cuda_context *context, tn__cuda_gemm **out) {
    const tn__blas *blas;
    TN_TRY(tn__blas_get(&blas));
    TN_TRY(context->driver->make_current(context->state));
    tn__cuda_gemm *gemm = tn__host_alloc(1, sizeof *gemm);
    if (!gemm) return TN_OUT_OF_HOST_MEMORY;
    gemm->blas = blas;
    tn_status status = tn__blas_status(blas, blas->Create(&gemm->handle), "Create", "this device");
    if (status != TN_OK) {
        tn__host_free(gemm);
        return status;
    }
    gemm->own_processors = context->product_processors;
    pthread_mutex_init(&gemm->lock, NULL);
    *out = gemm;
    return TN_OK;
}

tn_status tn__gemm_of(tn__cuda_context *context, tn__cuda_gemm **out) {
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    tn_status status = TN_OK;
    tn__cuda_gemm *gemm = __atomic_load_n(&context->gemm, __ATOMIC_ACQUIRE);
    if (!gemm) {
        pthread_mutex_lock(&making);
        gemm = context->gemm;
        if (!gemm) status = gemm_make(context, &gemm);
        if (status == TN_OK) __atomic_store_n(&context->gemm, gemm, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&making);
    }
    if (status == TN_OK) *out = gemm;
    return status;
}

void tn__cuda_gemm_end(tn__cuda_context *context) {
    tn__cuda_gemm *gemm = context->gemm;
    if (!gemm) return;
    for (int i = 0; i < TN__GEMM_PLANS_MAX; i++) {
        while (gemm->buckets[i]) {
            tn__gemm_plan *first = gemm->buckets[i];
            gemm->buckets[i] = first->next;
            tn__gemm_plan_end(gemm, first);
        }
    }
    if (!tn__driver_is_gone() && context->driver->make_current(context->state) == TN_OK)
        (void)gemm->blas->Destroy(gemm->handle);
    pthread_mutex_destroy(&gemm->lock);
    tn__host_free(gemm);
    context->gemm = NULL;
}

/* ---- shapes --------------------------------------------------------------------------------- */

static int operands_equal(const tn__blas_operand *x, const tn__blas_operand *y) {
    return x->kind == y->kind && x->dtype == y->dtype && x->is_transposed == y->is_transposed;
}

static int shapes_equal(const tn__blas_shape *x, const tn__blas_shape *y) {
    return x->rows == y->rows && x->cols == y->cols && x->contracted == y->contracted &&
           operands_equal(&x->a, &y->a) && operands_equal(&x->b, &y->b) && x->d == y->d &&
           x->has_beta == y->has_beta && x->has_bias == y->has_bias &&
           x->processors == y->processors;
}

static uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ (hash >> 29);
}

static uint64_t types_of(const tn__blas_operand *operand) {
    return ((uint64_t)operand->kind * 64 + (uint64_t)operand->dtype) * 2 +
           (uint64_t)(operand->is_transposed != 0);
}

static tn__gemm_plan **bucket_of(tn__cuda_gemm *gemm, const tn__blas_shape *shape) {
    uint64_t hash = mixed(0, (uint64_t)shape->rows);
    hash = mixed(hash, (uint64_t)shape->cols);
    hash = mixed(hash, (uint64_t)shape->contracted);
    hash = mixed(hash, types_of(&shape->a) << 32 | types_of(&shape->b));
    hash = mixed(hash, ((uint64_t)shape->d * 2 + (uint64_t)(shape->has_beta != 0)) * 2 +
                           (uint64_t)(shape->has_bias != 0));
    hash = mixed(hash, (uint64_t)shape->processors);
    return &gemm->buckets[hash % TN__GEMM_PLANS_MAX];
}

/* ---- one plan ------------------------------------------------------------------------------- */

void tn__gemm_plan_end(const tn__cuda_gemm *gemm, tn__gemm_plan *plan) {
    if (!plan) return;
    tn__blas_product_end(gemm->blas, &plan->product);
    pthread_mutex_destroy(&plan->lock);
    tn__host_free(plan);
}

/* Chooses the algorithm, which is put behind the offers if it is none of them. */
static cublasStatus_t take_also(const tn__cuda_gemm *gemm, tn__gemm_plan *plan,
                                const tn__gemm_candidate *also) {
    int place = 0;
    while (place < plan->count &&
           !tn__gemm_is_algorithm(&plan->candidates[place], &also->algorithm))
        place++;
    if (place == plan->count) {
        cublasStatus_t status =
            tn__gemm_offer_check(gemm, &plan->product, &plan->shape, &also->algorithm,
                                 &plan->candidates[place].workspace_bytes);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        plan->candidates[place].algorithm = also->algorithm;
        plan->count++;
    }
    plan->candidates[place].us = also->us;
    plan->chosen = place;
    plan->is_measured = 1;
    return CUBLAS_STATUS_SUCCESS;
}

static tn_status fill_plan(const tn__cuda_gemm *gemm, const tn__gemm_candidate *also,
                           const tn__gemm_offers *offers, tn__gemm_plan *plan) {
    char text[TN__BLAS_TEXT_BYTES];
    memcpy(plan->candidates, offers->found, (size_t)offers->count * sizeof *offers->found);
    plan->count = offers->count;
    if (!also) return TN_OK;
    cublasStatus_t status = take_also(gemm, plan, also);
    if (status == CUBLAS_STATUS_SUCCESS) return TN_OK;
    tn__blas_shape_text(&plan->shape, text);
    return tn__blas_status(gemm->blas, status, "MatmulAlgoCheck", text);
}

/* Takes over the product, also when it fails. */
static tn_status plan_of(const tn__cuda_gemm *gemm, const tn__blas_shape *shape,
                         const tn__gemm_candidate *also, const tn__gemm_offers *offers,
                         tn__blas_product *product, tn__gemm_plan **out) {
    size_t candidates = (size_t)offers->count + (also ? 1 : 0);
    tn__gemm_plan *made = tn__host_alloc(1, sizeof *made + candidates * sizeof(tn__gemm_candidate));
    if (!made) {
        tn__blas_product_end(gemm->blas, product);
        return TN_OUT_OF_HOST_MEMORY;
    }
    made->shape = *shape;
    made->product = *product;
    pthread_mutex_init(&made->lock, NULL);
    tn_status status = fill_plan(gemm, also, offers, made);
    if (status != TN_OK) {
        tn__gemm_plan_end(gemm, made);
        return status;
    }
    *out = made;
    return TN_OK;
}

tn_status tn__gemm_plan_make(const tn__cuda_gemm *gemm, const tn__blas_shape *shape,
                             const tn__gemm_candidate *also, int is_wide, tn__gemm_plan **out) {
    tn__blas_product product;
    tn__gemm_plan *made = NULL;
    char text[TN__BLAS_TEXT_BYTES];
    TN_TRY(tn__blas_product_make(gemm->blas, shape, &product));
    tn__gemm_offers *offers = tn__host_alloc(1, sizeof *offers);
    if (!offers) {
        tn__blas_product_end(gemm->blas, &product);
        return TN_OUT_OF_HOST_MEMORY;
    }
    cublasStatus_t asked = tn__gemm_offers_get(gemm, &product, shape, is_wide, offers);
    tn_status status = TN_OK;
    if (asked == CUBLAS_STATUS_NOT_SUPPORTED && shape->has_bias && !also) {
        offers->count = 0; /* known from now on: the bias is for us to add */
    } else if (asked != CUBLAS_STATUS_SUCCESS) {
        tn__blas_product_end(gemm->blas, &product);
        tn__blas_shape_text(shape, text);
        status = tn__blas_status(gemm->blas, asked, "MatmulAlgoGetHeuristic", text);
    }
    if (status == TN_OK) status = plan_of(gemm, shape, also, offers, &product, &made);
    tn__host_free(offers);
    if (status != TN_OK) return status;
    made->is_wide = is_wide;
    *out = made;
    return TN_OK;
}

size_t tn__gemm_plan_workspace(const tn__gemm_plan *plan) {
    size_t most = 0;
    for (int i = 0; i < plan->count; i++) {
        if (plan->candidates[i].workspace_bytes > most) most = plan->candidates[i].workspace_bytes;
    }
    return most;
}

/* ---- the table: under the lock -------------------------------------------------------------- */

static tn__gemm_plan *find(tn__cuda_gemm *gemm, const tn__blas_shape *shape) {
    tn__gemm_plan *plan = *bucket_of(gemm, shape);
    while (plan && !shapes_equal(&plan->shape, shape))
        plan = plan->next;
    return plan;
}

static void unlink_plan(tn__cuda_gemm *gemm, tn__gemm_plan *plan) {
    tn__gemm_plan **link = bucket_of(gemm, &plan->shape);
    while (*link != plan)
        link = &(*link)->next;
    *link = plan->next;
    plan->next = NULL;
    gemm->count--;
}

static int goes_before(const tn__gemm_plan *x, const tn__gemm_plan *y) {
    if (x->is_measured != y->is_measured) return !x->is_measured;
    return x->last_use < y->last_use;
}

/* Makes room if it is full: NULL, or the plan that had to go. */
static tn__gemm_plan *make_room(tn__cuda_gemm *gemm) {
    tn__gemm_plan *oldest = NULL;
    if (gemm->count < TN__GEMM_PLANS_MAX) return NULL;
    for (int i = 0; i < TN__GEMM_PLANS_MAX; i++) {
        for (tn__gemm_plan *plan = gemm->buckets[i]; plan; plan = plan->next) {
            if (plan->users == 0 && (!oldest || goes_before(plan, oldest))) oldest = plan;
        }
    }
    if (oldest) unlink_plan(gemm, oldest);
    return oldest;
}

static void link_plan(tn__cuda_gemm *gemm, tn__gemm_plan *plan) {
    tn__gemm_plan **bucket = bucket_of(gemm, &plan->shape);
    plan->next = *bucket;
    plan->last_use = ++gemm->uses;
    *bucket = plan;
    gemm->count++;
}

/* `made` is NULL, or a plan for the shape, which becomes the table's or stays the caller's. */
static tn__gemm_plan *use_plan(tn__cuda_gemm *gemm, const tn__blas_shape *shape,
                               tn__gemm_plan **made, int *chosen) {
    tn__gemm_plan *gone = NULL;
    pthread_mutex_lock(&gemm->lock);
    tn__gemm_plan *plan = find(gemm, shape);
    if (!plan && *made) {
        gone = make_room(gemm);
        plan = *made;
        *made = NULL;
        link_plan(gemm, plan);
    }
    if (plan) {
        plan->users++;
        plan->last_use = ++gemm->uses;
        *chosen = plan->chosen;
    }
    pthread_mutex_unlock(&gemm->lock);
    tn__gemm_plan_end(gemm, gone);
    return plan;
}

tn_status tn__gemm_plan_acquire(tn__cuda_gemm *gemm, const tn__blas_shape *shape,
                                tn__gemm_plan **out, int *chosen) {
    tn__gemm_plan *made = NULL;
    tn__gemm_plan *plan = use_plan(gemm, shape, &made, chosen);
    if (!plan) {
        TN_TRY(tn__gemm_plan_make(gemm, shape, NULL, 0, &made));
        plan = use_plan(gemm, shape, &made, chosen);
        tn__gemm_plan_end(gemm, made);
    }
    *out = plan;
    return TN_OK;
}

void tn__gemm_plan_release(tn__cuda_gemm *gemm, tn__gemm_plan *plan) {
    int ends = 0;
    pthread_mutex_lock(&gemm->lock);
    plan->users--;
    ends = plan->users == 0 && plan->is_replaced;
    pthread_mutex_unlock(&gemm->lock);
    if (ends) tn__gemm_plan_end(gemm, plan);
}

/* Puts it into the table in the place of `before`, NULL: of any. 0: another thread has put another
 * one there since, which stays, and the plan is ended. */
static int put(tn__cuda_gemm *gemm, const tn__gemm_plan *before, tn__gemm_plan *plan) {
    tn__gemm_plan *gone = NULL, *room = NULL;
    pthread_mutex_lock(&gemm->lock);
    tn__gemm_plan *there = find(gemm, &plan->shape);
    const int is_put = !before || there == before;
    if (is_put && there) {
        unlink_plan(gemm, there);
        there->is_replaced = 1;
        if (there->users == 0) gone = there; /* else its last user ends it */
    }
    if (is_put) {
        room = make_room(gemm);
        link_plan(gemm, plan);
    }
    pthread_mutex_unlock(&gemm->lock);
    tn__gemm_plan_end(gemm, gone);
    tn__gemm_plan_end(gemm, room);
    if (!is_put) tn__gemm_plan_end(gemm, plan);
    return is_put;
}

void tn__gemm_plan_put(tn__cuda_gemm *gemm, tn__gemm_plan *plan) { (void)put(gemm, NULL, plan); }

/* Of the plan that there is now, which is held until another one has its place. */
static tn_status widen(tn__cuda_gemm *gemm, tn__gemm_plan *plan, int *is_done) {
    tn__gemm_candidate chosen;
    tn__gemm_plan *wide;
    pthread_mutex_lock(&gemm->lock);
    const int is_measured = plan->is_measured;
    if (is_measured) chosen = plan->candidates[plan->chosen];
    const tn_gemm_engine engine = plan->engine;
    pthread_mutex_unlock(&gemm->lock);
    TN_TRY(tn__gemm_plan_make(gemm, &plan->shape, is_measured ? &chosen : NULL, 1, &wide));
    wide->engine = engine;
    *is_done = put(gemm, plan, wide);
    return TN_OK;
}

tn_status tn__gemm_plan_widen(tn__cuda_gemm *gemm, const tn__blas_shape *shape) {
    tn_status status = TN_OK;
    for (int is_done = 0; status == TN_OK && !is_done;) {
        tn__gemm_plan *plan;
        int unused;
        TN_TRY(tn__gemm_plan_acquire(gemm, shape, &plan, &unused));
        is_done = plan->is_wide || plan->count == 0;
        if (!is_done) status = widen(gemm, plan, &is_done);
        tn__gemm_plan_release(gemm, plan);
    }
    return status;
}
