/* The treap of heap_tree.h: insertion splits the subtree below the new node, removal joins the
 * two below the old one; both walk down once and never recurse. */
#include "heap_tree.h"

/* The finalizer of splitmix64: neighbouring keys get unrelated priorities. */
static uint64_t priority_of(uint64_t major, uint64_t minor) {
    uint64_t x = major * 0x9E3779B97F4A7C15u ^ minor;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static int is_below(const tn__tree_node *node, uint64_t major, uint64_t minor) {
    return node->major != major ? node->major < major : node->minor < minor;
}

void tn__tree_insert(tn__tree_node **root, tn__tree_node *node, uint64_t major, uint64_t minor) {
    tn__tree_node **at = root;
    tn__tree_node *rest;
    tn__tree_node **below = &node->left;
    tn__tree_node **above = &node->right;
    node->major = major;
    node->minor = minor;
    node->priority = priority_of(major, minor);
    while (*at && (*at)->priority >= node->priority) {
        at = is_below(*at, major, minor) ? &(*at)->right : &(*at)->left;
    }
    rest = *at;
    *at = node;
    while (rest) {
        if (is_below(rest, major, minor)) {
            *below = rest;
            below = &rest->right;
            rest = rest->right;
        } else {
            *above = rest;
            above = &rest->left;
            rest = rest->left;
        }
    }
    *below = NULL;
    *above = NULL;
}

void tn__tree_remove(tn__tree_node **root, tn__tree_node *node) {
    tn__tree_node **at = root;
    tn__tree_node *left = node->left;
    tn__tree_node *right = node->right;
    while (*at != node) {
        at = is_below(*at, node->major, node->minor) ? &(*at)->right : &(*at)->left;
    }
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
    node->left = NULL;
    node->right = NULL;
}

tn__tree_node *tn__tree_at_least(tn__tree_node *root, uint64_t major, uint64_t minor) {
    tn__tree_node *found = NULL;
    while (root) {
        if (is_below(root, major, minor)) {
            root = root->right;
        } else {
            found = root;
            root = root->left;
        }
    }
    return found;
}

tn__tree_node *tn__tree_at_most(tn__tree_node *root, uint64_t major, uint64_t minor) {
    tn__tree_node *found = NULL;
    while (root) {
        if (is_below(root, major, minor) || (root->major == major && root->minor == minor)) {
            found = root;
            root = root->right;
        } else {
            root = root->left;
        }
    }
    return found;
}

tn__tree_node *tn__tree_next(tn__tree_node *root, const tn__tree_node *node) {
    tn__tree_node *found = NULL;
    if (node->right) {
        for (found = node->right; found->left;)
            found = found->left;
        return found;
    }
    while (root != node) {
        if (is_below(root, node->major, node->minor)) {
            root = root->right;
        } else {
            found = root;
            root = root->left;
        }
    }
    return found;
}

tn__tree_node *tn__tree_last(tn__tree_node *root) {
    while (root && root->right)
        root = root->right;
    return root;
}

int tn__tree_is_valid(tn__tree_node *root, size_t count) {
    const tn__tree_node *before = NULL;
    tn__tree_node *node = tn__tree_at_least(root, 0, 0);
    for (; node; before = node, node = tn__tree_next(root, node)) {
        if (count-- == 0) return 0;
        if (before && !is_below(before, node->major, node->minor)) return 0;
        if (node->left && node->left->priority > node->priority) return 0;
        if (node->right && node->right->priority > node->priority) return 0;
    }
    return count == 0;
}
