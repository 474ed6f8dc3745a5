/* Symmetry, for plane_protocol.pml: of all states that differ only in the names of planes, streams,
 * leases and free blocks, one stands for all. The two planes are alike (each derives from the
 * other, or neither does), the two streams are, the leases of users are, and blocks that are free.
 *
 * Included in the verifier that spin makes; `now` is its state.
 */
static int number_from(const char *variable) {
    const char *text = getenv(variable);
    return text ? atoi(text) : 0;
}

typedef struct alike {
    struct plane_object planes[4];
    struct lease_object leases[SLOTS];
    struct pool_block blocks[4];
} alike;

static unsigned swapped_bits(unsigned bits) { return (bits & 1) << 1 | bits >> 1; }

static void swap_block_streams(struct pool_block *block) {
    if (block->is_taken) block->home = !block->home;
    block->writes_unseen = swapped_bits(block->writes_unseen);
    block->reads_unseen = swapped_bits(block->reads_unseen);
    block->writes_unrecorded = swapped_bits(block->writes_unrecorded);
    block->reads_unrecorded = swapped_bits(block->reads_unrecorded);
}

static void swap_streams(alike *all) {
    for (int i = 0; i < 4; i++) {
        struct plane_object *plane = &all->planes[i];
        if (plane->has_write) plane->write_stream = !plane->write_stream;
        plane->reads = swapped_bits(plane->reads);
        plane->reads_unrecorded = swapped_bits(plane->reads_unrecorded);
    }
    for (int i = 0; i < SLOTS; i++) {
        if (all->leases[i].is_open) all->leases[i].stream = !all->leases[i].stream;
    }
    for (int i = 0; i < 4; i++)
        swap_block_streams(&all->blocks[i]);
}

static void swap_planes(alike *all) {
    for (int i = 0; i < 4; i += 2) {
        struct plane_object plane = all->planes[i];
        struct pool_block block = all->blocks[i];
        all->planes[i] = all->planes[i + 1];
        all->planes[i + 1] = plane;
        all->blocks[i] = all->blocks[i + 1];
        all->blocks[i + 1] = block;
    }
    for (int i = 0; i < SLOTS; i++) {
        if (all->leases[i].is_open) all->leases[i].plane = !all->leases[i].plane;
    }
}

static void sort_leases(alike *all) {
    for (int i = 1; i < LEASES; i++) {
        for (int j = i;
             j > 0 && memcmp(&all->leases[j - 1], &all->leases[j], sizeof all->leases[0]) < 0;
             j--) {
            struct lease_object lease = all->leases[j];
            all->leases[j] = all->leases[j - 1];
            all->leases[j - 1] = lease;
        }
    }
}

static void sort_free_blocks(alike *all) {
    for (int i = 0; i < 4; i++) {
        for (int j = i + 1; j < 4; j++) {
            struct pool_block block = all->blocks[i];
            if (block.is_taken || all->blocks[j].is_taken) continue;
            if (memcmp(&block, &all->blocks[j], sizeof block) >= 0) continue;
            all->blocks[i] = all->blocks[j];
            all->blocks[j] = block;
        }
    }
}

/* The greatest of the four namings. */
static void rename_alike(void) {
    alike best, other;
    memset(&best, 0, sizeof best);
    memcpy(best.planes, now.planes, sizeof best.planes);
    memcpy(best.leases, now.leases, sizeof best.leases);
    memcpy(best.blocks, now.blocks, sizeof best.blocks);
    other = best;
    sort_leases(&best);
    sort_free_blocks(&best);
    for (int naming = 1; naming < 4; naming++) {
        if (naming & 1)
            swap_streams(&other);
        else
            swap_planes(&other);
        alike sorted = other;
        sort_leases(&sorted);
        sort_free_blocks(&sorted);
        if (memcmp(&sorted, &best, sizeof best) > 0) best = sorted;
    }
    memcpy(now.planes, best.planes, sizeof best.planes);
    memcpy(now.leases, best.leases, sizeof best.leases);
    memcpy(now.blocks, best.blocks, sizeof best.blocks);
}
