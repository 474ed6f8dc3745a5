/* Vector clocks: see sim_clock.h. Entries only ever grow while a clock lives. */
#include <string.h>

#include "sim_clock.h"

static void reach(sim_clock *clock, uint32_t count) {
    if (count <= clock->count) return;
    clock->epochs = tn__sim_grow(clock->epochs, count, sizeof *clock->epochs);
    memset(clock->epochs + clock->count, 0, (count - clock->count) * sizeof *clock->epochs);
    clock->count = count;
}

void tn__sim_clock_set(sim_clock *clock, uint32_t slot, uint64_t epoch) {
    reach(clock, slot + 1);
    clock->epochs[slot] = epoch;
}

int tn__sim_clock_join(sim_clock *clock, const sim_clock *other) {
    int changed = 0;
    reach(clock, other->count);
    for (uint32_t slot = 0; slot < other->count; slot++) {
        if (other->epochs[slot] <= clock->epochs[slot]) continue;
        clock->epochs[slot] = other->epochs[slot];
        changed = 1;
    }
    return changed;
}

void tn__sim_clock_copy(sim_clock *clock, const sim_clock *other) {
    reach(clock, other->count);
    for (uint32_t slot = 0; slot < clock->count; slot++) {
        clock->epochs[slot] = slot < other->count ? other->epochs[slot] : 0;
    }
}

void tn__sim_clock_clear(sim_clock *clock) {
    tn__sim_free(clock->epochs);
    clock->epochs = NULL;
    clock->count = 0;
}
