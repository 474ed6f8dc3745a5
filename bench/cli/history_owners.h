/* Sums of a history by owner, and which owners are worth a colour of their own. */
#ifndef TENURE_HISTORY_OWNERS_H
#define TENURE_HISTORY_OWNERS_H

#include "memory_history.h"

#define OWNER_QUARTERS 4

typedef struct owner_sums {
    uint32_t owner;
    uint64_t blocks;        /* that it had in all */
    uint64_t bytes;         /* of those */
    uint64_t peak_bytes;    /* the most that it had at once */
    uint64_t bytes_at_peak; /* when all owners together had most */
    uint64_t alive_bytes;   /* after the last event */
    uint64_t alive_blocks;
    uint32_t oldest; /* the event that made the oldest of those */
    int grows;       /* its least in each quarter of the events is more by a tenth of its peak */
    uint64_t least_bytes[OWNER_QUARTERS];
} owner_sums;

typedef struct history_owners {
    owner_sums *sums; /* those with blocks, most peak_bytes first */
    uint32_t count;
    uint32_t *ranks; /* of an owner's number: its index in sums, or UINT32_MAX */
    uint32_t name_count;
    uint64_t peak_bytes;
    uint32_t peak_event;
} history_owners;

/* Gives the blocks of a history without owners one by size. 0 if there is no memory. */
int history_name_by_size(memory_history *history);

/* 0 if there is no memory. */
int history_owners_gather(const memory_history *history, history_owners *out);
void history_owners_deinit(history_owners *owners);

/* "unnamed" for none. */
const char *history_owner_name(const memory_history *history, uint32_t owner);

#endif
