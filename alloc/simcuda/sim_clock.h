/* Vector clocks: who knows how much of whose work to be complete.
 *
 * Stream in slot s numbers its work 1, 2, 3 ... (epochs). A clock says for each slot up to which
 * epoch work happens before the clock's owner: a stream's next work, an event, or the host. Work
 * (slot, epoch) happens before what has the clock c if and only if c covers it. A missing entry
 * is 0, so that clocks grow only as streams appear.
 */
#ifndef TENURE_SIM_CLOCK_H
#define TENURE_SIM_CLOCK_H

#include "sim_core.h"

typedef struct sim_clock {
    uint64_t *epochs;
    uint32_t count;
} sim_clock;

static inline int tn__sim_clock_covers(const sim_clock *clock, uint32_t slot, uint64_t epoch) {
    return slot < clock->count ? clock->epochs[slot] >= epoch : epoch == 0;
}

void tn__sim_clock_set(sim_clock *clock, uint32_t slot, uint64_t epoch);
/* The later of both in each entry; 1 if that changed anything. */
int tn__sim_clock_join(sim_clock *clock, const sim_clock *other);
void tn__sim_clock_copy(sim_clock *clock, const sim_clock *other);
void tn__sim_clock_clear(sim_clock *clock);

#endif
