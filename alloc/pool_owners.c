/* Live blocks by owner and call site: see pool_report.h.
 *
 * Owners and sites are the callers' texts, compared as texts: the same name from two translation
 * units is one owner. Up to TN__OWNERS_MAX - 1 are told apart.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "pool_internal.h"

/* ---- summing --------------------------------------------------------------------------------- */

enum { SLOT_COUNT = 4 * TN__OWNERS_MAX }; /* a power of two, and never more than a quarter full */

/* Where the sum of an owner lies, by a hash of its texts; 0: the slot is empty. */
typedef struct owner_index {
    uint16_t slots[SLOT_COUNT];
} owner_index;

static uint32_t hash_text(uint32_t hash, const char *text) {
    for (; text && *text; text++)
        hash = (hash ^ (unsigned char)*text) * 16777619u;
    return (hash ^ (text ? 1u : 2u)) * 16777619u;
}

static int is_same_text(const char *a, const char *b) {
    if (a == b) return 1;
    return a && b && strcmp(a, b) == 0;
}

/* The slot of the owner, or the empty one where it goes. */
static uint16_t *find_slot(owner_index *index, const tn__owners *owners, const tn__piece *block) {
    uint32_t hash = hash_text(hash_text(2166136261u, block->owner), block->site);
    for (;; hash++) {
        uint16_t *slot = &index->slots[hash % SLOT_COUNT];
        const tn__owner_sum *sum;
        if (*slot == 0) return slot;
        sum = &owners->sums[*slot - 1];
        if (is_same_text(sum->owner, block->owner) && is_same_text(sum->site, block->site)) {
            return slot;
        }
    }
}

/* The last sum is for all that there is no room to tell apart. */
static tn__owner_sum *sum_for(owner_index *index, tn__owners *owners, const tn__piece *block) {
    uint16_t *slot = find_slot(index, owners, block);
    if (*slot == 0 && owners->count >= TN__OWNERS_MAX - 1) {
        tn__owner_sum *others = &owners->sums[TN__OWNERS_MAX - 1];
        if (owners->count == TN__OWNERS_MAX) return others;
        owners->count = TN__OWNERS_MAX;
        *others = (tn__owner_sum){.owner = "others"};
        return others;
    }
    if (*slot == 0) {
        owners->sums[owners->count] = (tn__owner_sum){.owner = block->owner, .site = block->site};
        *slot = (uint16_t)++owners->count;
    }
    return &owners->sums[*slot - 1];
}

static int compare_sums(const void *a, const void *b) {
    const tn__owner_sum *left = a;
    const tn__owner_sum *right = b;
    if (left->bytes != right->bytes) return left->bytes > right->bytes ? -1 : 1;
    if (left->oldest_age == right->oldest_age) return 0;
    return left->oldest_age > right->oldest_age ? -1 : 1;
}

void tn__owners_gather(tn_pool *pool, tn__owners *out) {
    owner_index index = {{0}};
    tn__piece *block = tn__heap_next_block(&pool->heap, NULL);
    out->count = 0;
    for (; block; block = tn__heap_next_block(&pool->heap, block)) {
        tn__owner_sum *sum = sum_for(&index, out, block);
        uint64_t age = pool->heap.operation - block->age;
        sum->bytes += block->asked_bytes;
        sum->blocks++;
        if (age > sum->oldest_age) sum->oldest_age = age;
    }
    qsort(out->sums, out->count, sizeof out->sums[0], compare_sums);
}

/* ---- writing --------------------------------------------------------------------------------- */

static const char *plural(size_t count) { return count == 1 ? "" : "s"; }

static void write_sum(tn__text *out, const tn__owner_sum *sum, int is_first, int with_age) {
    tn__text_add(out, "%s%s%s%s%s: %zu bytes in %zu block%s", is_first ? "" : ", ",
                 sum->owner ? sum->owner : "unnamed", sum->site ? " (" : "",
                 sum->site ? sum->site : "", sum->site ? ")" : "", sum->bytes, sum->blocks,
                 plural(sum->blocks));
    if (with_age) tn__text_add(out, " (oldest %" PRIu64 " operations ago)", sum->oldest_age);
}

static void write_more(tn__text *out, const tn__owners *owners, size_t shown) {
    size_t bytes = 0;
    size_t blocks = 0;
    for (size_t i = shown; i < owners->count; i++) {
        bytes += owners->sums[i].bytes;
        blocks += owners->sums[i].blocks;
    }
    tn__text_add(out, "%sand %zu more owner%s with %zu bytes in %zu block%s", shown ? ", " : "",
                 owners->count - shown, plural(owners->count - shown), bytes, blocks,
                 plural(blocks));
}

void tn__owners_write_line(tn__text *out, const tn__owners *owners, size_t most, size_t most_bytes,
                           int with_ages) {
    const size_t more_bytes = 120; /* the words of write_more with the largest numbers */
    size_t shown = 0;
    if (owners->count == 0) tn__text_add(out, "none");
    for (; shown < owners->count && shown < most; shown++) {
        tn__text measured = tn__text_begin(NULL, 0);
        write_sum(&measured, &owners->sums[shown], shown == 0, with_ages);
        if (out->used + measured.used + more_bytes > most_bytes) break;
        write_sum(out, &owners->sums[shown], shown == 0, with_ages);
    }
    if (shown < owners->count) write_more(out, owners, shown);
}

void tn__owners_write_text(tn__text *out, const tn__owners *owners) {
    for (size_t i = 0; i < owners->count; i++) {
        const tn__owner_sum *sum = &owners->sums[i];
        tn__text_add(out, "  %16zu in %8zu block%s oldest %" PRIu64 " operations ago  %s%s%s\n",
                     sum->bytes, sum->blocks, sum->blocks == 1 ? ", " : "s,", sum->oldest_age,
                     sum->owner ? sum->owner : "unnamed", sum->site ? ", " : "",
                     sum->site ? sum->site : "");
    }
    if (owners->count == 0) tn__text_add(out, "  none\n");
}

void tn__owners_write_json(tn__text *out, const tn__owners *owners, const char *indent) {
    int is_first = 1;
    for (size_t i = 0; i < owners->count; i++) {
        const tn__owner_sum *sum = &owners->sums[i];
        tn__text_next_item(out, &is_first, indent);
        tn__text_add(out, "{\"owner\": ");
        tn__text_add_json(out, sum->owner);
        tn__text_add(out, ", \"site\": ");
        tn__text_add_json(out, sum->site);
        tn__text_add(out,
                     ", \"bytes\": %zu, \"blocks\": %zu, \"oldest_age_operations\": %" PRIu64 "}",
                     sum->bytes, sum->blocks, sum->oldest_age);
    }
}

/* ---- leaks ----------------------------------------------------------------------------------- */

tn_status tn__pool_report_leak(tn_pool *pool) {
    const size_t most_bytes =
        1700; /* of the error text; the pool's name and the site come on top */
    char text[TN__ERROR_TEXT_BYTES];
    tn__text line = tn__text_begin(text, sizeof text);
    tn__owners owners;
    tn__owners_gather(pool, &owners);
    tn__owners_write_line(&line, &owners, TN__OWNERS_MAX, most_bytes, 1);
    return TN_FAIL(TN_LEAK, "pool %.200s still has %zu live block%s of %zu bytes: %s", pool->name,
                   pool->heap.block_count, plural(pool->heap.block_count), pool->heap.live_bytes,
                   text);
}
