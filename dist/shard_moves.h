/* Moves between two plans of a unit, as shard_moves.c finds them and shard_reshard.c puts them on a
 * communicator. */
#ifndef TENURE_SHARD_MOVES_H
#define TENURE_SHARD_MOVES_H

#include "tenure_shard.h"

typedef struct tn__move_list {
    tn_shard_move *items;
    size_t count, room;
} tn__move_list;

struct tn_shard_moves {
    int from_ranks, to_ranks, rank_count; /* rank_count: the more of both */
    tn__move_list list[TN_SHARD_PART_COUNT];
    size_t *to_count; /* bytes or elements of each rank of `to`: to_ranks numbers of each part */
};

#endif
