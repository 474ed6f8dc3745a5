/* Shards made those of another count of ranks, on a communicator of all of them: tn_shard_reshard.
 *
 * What a rank keeps it copies; all else is one group of sends and receives, which meet in the order
 * of the list of moves, that all ranks have alike.
 */
#include "comm.h"
#include "shard_moves.h"

typedef struct resharding {
    tn_comm *comm;
    const char *from;
    char *to;
    size_t element_bytes;
    tn_stream stream;
    int rank;
} resharding;

/* 1 if the rank's part in the move is to copy it within itself (is_local) or to send or receive. */
static int concerns(const resharding *r, const tn_shard_move *move, int is_local) {
    int is_within = move->from_rank == move->to_rank;
    return is_within == is_local && (move->from_rank == r->rank || move->to_rank == r->rank);
}

static tn_status put_line(const resharding *r, const tn_shard_move *move, size_t line) {
    size_t bytes = move->count * r->element_bytes;
    size_t source = move->from_offset * r->element_bytes + line * move->from_stride;
    size_t target = move->to_offset * r->element_bytes + line * move->to_stride;
    if (move->from_rank == move->to_rank)
        return tn_copy(r->comm->device, r->to + target, r->from + source, bytes, r->stream);
    if (move->from_rank == r->rank)
        return tn_send(r->comm, r->from + source, bytes, move->to_rank, r->stream);
    return tn_receive(r->comm, r->to + target, bytes, move->from_rank, r->stream);
}

static tn_status put_moves(const resharding *r, const tn__move_list *list, int is_local) {
    for (size_t i = 0; i < list->count; i++) {
        const tn_shard_move *move = &list->items[i];
        if (!concerns(r, move, is_local)) continue;
        for (size_t line = 0; line < (size_t)move->lines; line++)
            TN_TRY(put_line(r, move, line));
    }
    return TN_OK;
}

static tn_status put_group(const resharding *r, const tn__move_list *list) {
    TN_TRY(tn_comm_group_begin(r->comm));
    tn_status status = put_moves(r, list, 0);
    if (status == TN_OK) status = tn_comm_group_end(r->comm, r->stream);
    if (status != TN_OK) tn_comm_group_cancel(r->comm);
    return status;
}

static int has_part(const tn__move_list *list, int rank, int is_source_wanted) {
    for (size_t i = 0; i < list->count; i++) {
        const tn_shard_move *move = &list->items[i];
        if ((is_source_wanted ? move->from_rank : move->to_rank) == rank) return 1;
    }
    return 0;
}

static tn_status check_reshard(const tn_shard_moves *moves, tn_shard_part part, tn_comm *comm,
                               const void *from, const void *to, size_t element_bytes) {
    TN_REQUIRE(moves && comm, "tn_shard_reshard: moves or comm is NULL");
    TN_REQUIRE((unsigned)part < TN_SHARD_PART_COUNT,
               "tn_shard_reshard: part is %d, which there is not", (int)part);
    TN_REQUIRE(tn_comm_size(comm) >= moves->rank_count,
               "tn_shard_reshard: from %d ranks to %d, and communicator %s has %d",
               moves->from_ranks, moves->to_ranks, tn_comm_name(comm), tn_comm_size(comm));
    TN_REQUIRE(part == TN_SHARD_PART_SHARD ? element_bytes == 1
                                           : element_bytes > 0 && element_bytes <= 64,
               "tn_shard_reshard: element_bytes is %zu, expected 1 of shards, 1 to 64 of packed "
               "elements",
               element_bytes);
    int rank = tn_comm_rank(comm);
    TN_REQUIRE(from || !has_part(&moves->list[part], rank, 1),
               "tn_shard_reshard: from is NULL, and rank %d has something there", rank);
    TN_REQUIRE(to || !has_part(&moves->list[part], rank, 0),
               "tn_shard_reshard: to is NULL, and rank %d gets something there", rank);
    return TN_OK;
}

tn_status tn_shard_reshard(const tn_shard_moves *moves, tn_shard_part part, tn_comm *comm,
                           const void *from, void *to, size_t element_bytes, tn_stream stream) {
    TN_TRY(check_reshard(moves, part, comm, from, to, element_bytes));
    resharding r = {comm, from, to, element_bytes, stream, tn_comm_rank(comm)};
    size_t bytes = 0;
    if (r.rank < moves->to_ranks)
        bytes = moves->to_count[(int)part * moves->to_ranks + r.rank] * element_bytes;
    if (bytes && to) TN_TRY(tn_fill(comm->device, to, 0, bytes, stream));
    TN_TRY(put_moves(&r, &moves->list[part], 1));
    return put_group(&r, &moves->list[part]);
}
