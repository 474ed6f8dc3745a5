/* What pools are built of: the ordered index against a sorted array, the page map, sets of uses. */
#include <stdlib.h>
#include <string.h>

#include "heap_tree.h"
#include "host_alloc.h"
#include "page_map.h"
#include "pool_order.h"
#include "test_support.h"

/* ---- the index ------------------------------------------------------------------------------- */

enum { NODES = 500, STEPS = 20000 };

typedef struct keyed {
    tn__tree_node node;
    uint64_t major;
    uint64_t minor;
    int is_in;
} keyed;

static keyed nodes[NODES];

/* The oracle: looks at all of them. */
static keyed *least_at_least(uint64_t major, uint64_t minor) {
    keyed *found = NULL;
    for (int i = 0; i < NODES; i++) {
        keyed *item = &nodes[i];
        if (!item->is_in || item->major < major) continue;
        if (item->major == major && item->minor < minor) continue;
        if (found && (item->major > found->major ||
                      (item->major == found->major && item->minor > found->minor)))
            continue;
        found = item;
    }
    return found;
}

static void the_index_finds_what_a_sorted_list_finds(void **state) {
    tn__tree_node *root = NULL;
    size_t count = 0;
    uint64_t random = 12345;
    (void)state;
    memset(nodes, 0, sizeof nodes);
    for (int step = 0; step < STEPS; step++) {
        keyed *item;
        tn__tree_node *found;
        random = random * 6364136223846793005u + 1442695040888963407u;
        item = &nodes[(random >> 33) % NODES];
        if (item->is_in) {
            tn__tree_remove(&root, &item->node);
            count--;
        } else {
            item->major = (random >> 20) % 40;
            item->minor = (uint64_t)(item - nodes);
            tn__tree_insert(&root, &item->node, item->major, item->minor);
            count++;
        }
        item->is_in = !item->is_in;
        found = tn__tree_at_least(root, (random >> 40) % 41, (random >> 50) % NODES);
        assert_ptr_equal(TN__TREE_ITEM(found, keyed, node),
                         least_at_least((random >> 40) % 41, (random >> 50) % NODES));
        if (found) {
            assert_ptr_equal(TN__TREE_ITEM(tn__tree_next(root, found), keyed, node),
                             least_at_least(found->major, found->minor + 1));
        }
        if (step % 100 == 0) assert_true(tn__tree_is_valid(root, count));
    }
    assert_false(tn__tree_is_valid(root, count + 1));
    assert_ptr_equal(tn__tree_next(root, tn__tree_last(root)), NULL);
}

static size_t depth_of(const tn__tree_node *node) {
    size_t left;
    size_t right;
    if (!node) return 0;
    left = depth_of(node->left);
    right = depth_of(node->right);
    return 1 + (left > right ? left : right);
}

static void the_index_stays_shallow_for_keys_in_order(void **state) {
    tn__tree_node *root = NULL;
    (void)state;
    memset(nodes, 0, sizeof nodes);
    for (uint64_t i = 0; i < NODES; i++)
        tn__tree_insert(&root, &nodes[i].node, 512 * i, 0);
    assert_true(depth_of(root) <= 30);
    assert_true(tn__tree_is_valid(root, NODES));
}

/* ---- the page map ---------------------------------------------------------------------------- */

static tn__mapped_region region_of(uintptr_t begin, uintptr_t end, struct tn_pool *pool) {
    return (tn__mapped_region){.begin = begin, .end = end, .pool = pool};
}

static void the_page_map_finds_the_pools_of_regions_that_share_a_page(void **state) {
    const uintptr_t page = TN__MAP_PAGE_BYTES;
    const uintptr_t at = 7 * page + ((uintptr_t)3 << 40);
    struct tn_pool *pool_a = (struct tn_pool *)16;
    struct tn_pool *pool_b = (struct tn_pool *)32;
    tn__mapped_region first = region_of(at + 512, at + 2 * page + 1024, pool_a);
    tn__mapped_region second = region_of(at + 2 * page + 1024, at + 5 * page, pool_b);
    tn__mapped_region far =
        region_of((uintptr_t)1 << 56, ((uintptr_t)1 << 56) + 9000 * page, pool_b);
    (void)state;
    EXPECT_OK(tn__page_map_add(&first));
    EXPECT_OK(tn__page_map_add(&second));
    EXPECT_OK(tn__page_map_add(&far));
    assert_null(tn__page_map_find((void *)(at + 511)));
    assert_ptr_equal(tn__page_map_find((void *)(at + 512)), pool_a);
    assert_ptr_equal(tn__page_map_find((void *)(at + 2 * page + 1023)), pool_a);
    assert_ptr_equal(tn__page_map_find((void *)(at + 2 * page + 1024)), pool_b);
    assert_ptr_equal(tn__page_map_find((void *)(at + 5 * page - 1)), pool_b);
    assert_null(tn__page_map_find((void *)(at + 5 * page)));
    assert_ptr_equal(tn__page_map_find((void *)(far.end - 1)), pool_b);
    assert_null(tn__page_map_find((void *)far.end));
    assert_null(tn__page_map_find(NULL));
    assert_null(tn__page_map_find((void *)UINTPTR_MAX));
    tn__page_map_remove(&first);
    assert_null(tn__page_map_find((void *)(at + 2 * page + 1023)));
    assert_ptr_equal(tn__page_map_find((void *)(at + 2 * page + 1024)), pool_b);
    first.begin += page; /* again, with the border of the page that they share as it was */
    EXPECT_OK(tn__page_map_add(&first));
    assert_ptr_equal(tn__page_map_find((void *)(at + 2 * page)), pool_a);
    tn__page_map_remove(&second);
    assert_null(tn__page_map_find((void *)(at + 3 * page)));
    tn__page_map_remove(&first);
    tn__page_map_remove(&far);
}

static void the_page_map_refuses_what_it_can_not_hold(void **state) {
    tn__mapped_region beyond =
        region_of((uintptr_t)1 << 57, ((uintptr_t)1 << 57) + TN__MAP_PAGE_BYTES, NULL);
    tn__mapped_region region =
        region_of((uintptr_t)5 << 46, ((uintptr_t)5 << 46) + (1u << 30), (struct tn_pool *)16);
    (void)state;
    EXPECT_STATUS(tn__page_map_add(&beyond), TN_UNSUPPORTED);
    for (long nth = 1; nth <= 2; nth++) {
        tn__host_alloc_fault(nth, 0);
        EXPECT_STATUS(tn__page_map_add(&region), TN_OUT_OF_HOST_MEMORY);
        tn__host_alloc_fault(0, 0);
        assert_null(tn__page_map_find((void *)region.begin));
    }
    EXPECT_OK(tn__page_map_add(&region));
    tn__page_map_remove(&region);
    assert_int_equal(tn__host_live_blocks(), 0);
}

/* ---- uses ------------------------------------------------------------------------------------ */

static void a_set_keeps_the_last_use_of_each_stream(void **state) {
    tn__pool_stream streams[10];
    tn__uses uses = {0};
    tn__uses copy = {0};
    (void)state;
    memset(streams, 0, sizeof streams);
    for (uint32_t i = 0; i < 10; i++) {
        EXPECT_OK(tn__uses_reserve(&uses, i + 1));
        tn__uses_add(&uses, &streams[i], 5);
        tn__uses_add(&uses, &streams[i], 7);
        tn__uses_add(&uses, &streams[i], 6);
        assert_int_equal(uses.count, i + 1);
        assert_int_equal(tn__uses_items(&uses)[i].epoch, 7);
    }
    EXPECT_OK(tn__uses_copy(&copy, &uses));
    assert_true(tn__uses_equal(&copy, &uses));
    streams[3].complete = 6;
    tn__uses_settle(&uses);
    assert_int_equal(uses.count, 10);
    streams[3].complete = 7;
    tn__uses_settle(&uses);
    assert_int_equal(uses.count, 9);
    assert_false(tn__uses_equal(&copy, &uses));
    tn__uses_forget(&copy, &streams[3]);
    assert_true(tn__uses_equal(&copy, &uses));
    for (int i = 0; i < 10; i++)
        streams[i].complete = 7;
    tn__uses_settle(&uses);
    assert_int_equal(uses.count, 0);
    tn__uses_clear(&copy);
    assert_int_equal(tn__host_live_blocks(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_index_finds_what_a_sorted_list_finds),
        cmocka_unit_test(the_index_stays_shallow_for_keys_in_order),
        cmocka_unit_test(the_page_map_finds_the_pools_of_regions_that_share_a_page),
        cmocka_unit_test(the_page_map_refuses_what_it_can_not_hold),
        cmocka_unit_test(a_set_keeps_the_last_use_of_each_stream),
    };
    return cmocka_run_group_tests_name("unit/pool_structures", tests, NULL, NULL);
}
