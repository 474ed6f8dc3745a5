/* An ordered index that lives inside the things it orders: a treap.
 *
 * A node's key is the pair (major, minor); keys in one tree differ. The order of the nodes is a
 * search tree over keys and a heap over priorities, which are a hash of the key: so the shape
 * depends on the keys alone, depth is logarithmic in expectation, nothing is allocated, and
 * equal histories give equal trees.
 *
 *                 (key 40, priority 9)
 *                /                    \
 *     (key 10, priority 7)     (key 70, priority 3)
 */
#ifndef TENURE_HEAP_TREE_H
#define TENURE_HEAP_TREE_H

#include <stddef.h>
#include <stdint.h>

typedef struct tn__tree_node tn__tree_node;
struct tn__tree_node {
    tn__tree_node *left;
    tn__tree_node *right;
    uint64_t priority;
    uint64_t major;
    uint64_t minor;
};

/* The thing around a node. */
#define TN__TREE_ITEM(node, type, member)                                                          \
    ((node) ? (type *)(void *)((char *)(node)-offsetof(type, member)) : NULL)

void tn__tree_insert(tn__tree_node **root, tn__tree_node *node, uint64_t major, uint64_t minor);

/* The node must be in the tree. */
void tn__tree_remove(tn__tree_node **root, tn__tree_node *node);

/* The node with the smallest key that is at least (major, minor); NULL if there is none. */
tn__tree_node *tn__tree_at_least(tn__tree_node *root, uint64_t major, uint64_t minor);

/* The node with the largest key that is at most (major, minor); NULL if there is none. */
tn__tree_node *tn__tree_at_most(tn__tree_node *root, uint64_t major, uint64_t minor);

/* The node after `node` in key order; NULL after the last. */
tn__tree_node *tn__tree_next(tn__tree_node *root, const tn__tree_node *node);

/* The node with the largest key; NULL if the tree is empty. */
tn__tree_node *tn__tree_last(tn__tree_node *root);

/* 1 if keys are in order, priorities are a heap, and exactly `count` nodes are in it. */
int tn__tree_is_valid(tn__tree_node *root, size_t count);

#endif
