/* All blocks by address: a treap, under one mutex.
 *
 * Blocks do not overlap. A node's priority is not below its children's; priorities are random, so
 * that the tree is about 2 log2(n) deep whatever the order of addresses.
 */
#include "dropin.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static tn__dropin_block *root;
static uint64_t last_serial;
static uint64_t random_state = 0x9E3779B97F4A7C15u;

void tn__dropin_blocks_lock(void) { pthread_mutex_lock(&mutex); }
void tn__dropin_blocks_unlock(void) { pthread_mutex_unlock(&mutex); }

static uint32_t draw(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

/* What is below the address goes left, all else right. */
static void split(tn__dropin_block *tree, uintptr_t address, tn__dropin_block **left,
                  tn__dropin_block **right) {
    while (tree) {
        if (tree->address < address) {
            *left = tree;
            left = &tree->right;
            tree = tree->right;
        } else {
            *right = tree;
            right = &tree->left;
            tree = tree->left;
        }
    }
    *left = *right = NULL;
}

/* All of `left` is below all of `right`. */
static tn__dropin_block *join(tn__dropin_block *left, tn__dropin_block *right) {
    tn__dropin_block *result = NULL;
    tn__dropin_block **at = &result;
    while (left && right) {
        if (left->priority >= right->priority) {
            *at = left;
            at = &left->right;
            left = left->right;
        } else {
            *at = right;
            at = &right->left;
            right = right->left;
        }
    }
    *at = left ? left : right;
    return result;
}

static tn__dropin_block *take_at(tn__dropin_block **at) {
    tn__dropin_block *block = *at;
    if (!block) return NULL;
    *at = join(block->left, block->right);
    block->left = block->right = NULL;
    return block;
}

/* One of the driver's that is where the new block is. The last one that begins before the new one's
 * end is the only one that can be. */
static tn__dropin_block *take_stale(const tn__dropin_block *block) {
    tn__dropin_block **found = NULL;
    for (tn__dropin_block **at = &root; *at;) {
        int is_before = (*at)->address < block->address + block->bytes;
        if (is_before) found = at;
        at = is_before ? &(*at)->right : &(*at)->left;
    }
    if (!found || (*found)->kind != TN__DROPIN_DRIVER) return NULL;
    return (*found)->address + (*found)->bytes > block->address ? take_at(found) : NULL;
}

tn__dropin_block *tn__dropin_blocks_add(tn__dropin_block *block) {
    tn__dropin_block **at = &root;
    tn__dropin_block *stale = NULL, *one;
    pthread_mutex_lock(&mutex);
    while ((one = take_stale(block)) != NULL) {
        one->next = stale;
        stale = one;
    }
    block->serial = ++last_serial;
    block->priority = draw();
    while (*at && (*at)->priority > block->priority) {
        at = block->address < (*at)->address ? &(*at)->left : &(*at)->right;
    }
    split(*at, block->address, &block->left, &block->right);
    *at = block;
    pthread_mutex_unlock(&mutex);
    return stale;
}

tn__dropin_block *tn__dropin_blocks_take(uintptr_t address) {
    tn__dropin_block **at = &root;
    tn__dropin_block *block;
    pthread_mutex_lock(&mutex);
    while (*at && (*at)->address != address)
        at = address < (*at)->address ? &(*at)->left : &(*at)->right;
    block = take_at(at);
    pthread_mutex_unlock(&mutex);
    return block;
}

/* The last one that does not begin behind the address is the only one that can hold it. */
int tn__dropin_blocks_find(uintptr_t address, tn__dropin_block *out) {
    const tn__dropin_block *found = NULL;
    int holds;
    pthread_mutex_lock(&mutex);
    for (const tn__dropin_block *at = root; at;) {
        if (at->address <= address) found = at;
        at = at->address <= address ? at->right : at->left;
    }
    holds = found && address - found->address < found->bytes;
    if (holds) *out = *found;
    pthread_mutex_unlock(&mutex);
    return holds;
}

/* Depth is that of a treap; the whole of it may have to be seen. */
static tn__dropin_block **find_of(tn__dropin_block **at, const tn__dropin_device *device) {
    tn__dropin_block **found;
    if (!*at || (*at)->device == device) return at;
    found = find_of(&(*at)->left, device);
    return *found ? found : find_of(&(*at)->right, device);
}

tn__dropin_block *tn__dropin_blocks_take_any(const tn__dropin_device *device) {
    tn__dropin_block *block;
    pthread_mutex_lock(&mutex);
    block = take_at(find_of(&root, device));
    pthread_mutex_unlock(&mutex);
    return block;
}
