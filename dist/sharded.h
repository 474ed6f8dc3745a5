/* A sharded model: its units, what each has, and who holds which bucket.
 *
 *     model scope --+-- units --+-- unit 0: shard, weights, gradients, master, moments
 *                   |           +-- unit 1 ...
 *                   +-- the ring's buffer, the slot of derived columns, buckets, sums, the step
 *
 * Invariants between calls:
 * - A unit is acquired in the ring as often as is_held says (0 or 1), and that is 1 while it is in
 *   forward, and in a backward that reads weights, and between these if nothing begins between.
 * - A bucket has memory while it has an owner, and a gradient has a plane while its unit is the
 *   owner of one, and that plane is in it.
 * - A reduced gradient has a plane from the reduction that writes it to the AdamW that reads it, or
 *   where that is ahead until the bucket goes: what comm_stream frees others would wait for.
 * - `ended` of a unit counts the backwards that it has ended since the last update; it is at most
 *   micro_batches.
 * - While is_updating nothing begins, and only an update can go on.
 * - With is_update_ahead a unit is updated where its last backward ends, and then is_updated.
 * - What all ranks put in one order is put once: a call that fails behind its collective leaves
 *   `sent`, is_normed or `amaxes` as the place where it goes on, and a gather ahead that this rank
 *   could not put is `ahead`, and comes before all else.
 * - position is how many begins this step has made; trace[0 ... trace_count - 1] are those of the
 *   first step, and grow only in it.
 */
#ifndef TENURE_SHARDED_PRIVATE_H
#define TENURE_SHARDED_PRIVATE_H

#include "tenure_sharded.h"

enum { TN__SHARDED_WIDTH = 128 }; /* columns that packed elements are laid out in */

typedef enum tn__sharded_phase {
    TN__SHARDED_IDLE = 0,
    TN__SHARDED_FORWARD,
    TN__SHARDED_BACKWARD
} tn__sharded_phase;

typedef struct tn__sharded_part {
    tn_tensor gathered;    /* in the ring */
    tn_tensor weight;      /* what layers read: the same, or FP8 that is made of it */
    tn_tensor gradient;    /* {0}: frozen */
    tn_tensor master;      /* a view of the rank's elements of it; {0}: frozen, or none */
    int is_quantized_here; /* weight is not gathered */
    size_t bucket_offset;  /* in elements */
} tn__sharded_part;

typedef struct tn__sharded_bucket tn__sharded_bucket;

typedef struct tn__sharded_unit {
    char *name;
    tn_shard_plan *plan;
    tn_scope scope;
    tn__sharded_part *parts;
    tn_lease *leases; /* room for one of each part */
    int part_count;
    tn_tensor shard;   /* {0}: is_shard_made */
    int is_shard_made; /* of the master, for each gather, in the model's made_shard */
    tn_tensor version; /* then: of no bytes, and written when the master is */
    tn_sharded_model *model;
    tn_tensor master, first, second, gradient; /* {0}: no elements */
    size_t held_elements;                      /* of the rank, that train */
    size_t packed_elements;                    /* the same, rounded up to whole rows: 0 behind */
    size_t bucket_elements;
    int backward_reads_nothing;
    int ring_unit;
    tn__sharded_phase phase;
    int is_held;
    int ended;
    float amax_epsilon;         /* of its last update: a shard that is made is cast with it */
    uint64_t master_contents;   /* that it left, of a shard that is made; 0: not gathered yet */
    int is_updated;             /* in this step, ahead of tn_sharded_update */
    tn__sharded_bucket *bucket; /* that it owns; NULL */
} tn__sharded_unit;

/* Bytes at an address that stays, as they are leased while the model lives. */
typedef struct tn__sharded_buffer {
    tn_tensor memory; /* {0}: none */
    tn_lease lease;
    void *data;
} tn__sharded_buffer;

struct tn__sharded_bucket {
    tn__sharded_buffer buffer;
    tn__sharded_unit *owner; /* NULL */
};

typedef struct tn__sharded_begin {
    int unit;
    int is_backward;
} tn__sharded_begin;

/* What gradients in FP8 pass through. */
typedef struct tn__sharded_fp8 {
    tn__sharded_buffer sent, come, decoded;
} tn__sharded_fp8;

struct tn_sharded_model {
    tn_sharded_config config; /* name is the model's own copy */
    tn_device *device;
    int rank, rank_count;
    int owns_stream; /* config.comm_stream */
    tn_scope scope, units_scope;
    tn_ring *ring; /* NULL before the seal */
    tn__sharded_unit **units;
    int unit_count;
    tn__sharded_bucket *buckets;
    int bucket_count, next_bucket;
    tn_tensor arrived; /* a reduction of one micro-batch, before it is added; {0}: none is. It has
                        * memory from a reduction to the next tn__sharded_rest, as has fp8 */
    tn__sharded_fp8 fp8;
    tn_tensor
        made_shard; /* of the unit that is gathered; of the size of the largest; {0}: none is */
    tn_tensor step, squares, norm, factor;
    tn__sharded_begin *trace;
    size_t trace_count, trace_room;
    size_t position;
    int is_stray;            /* this step has left the trace */
    int has_met;             /* all ranks give the step up, which this one is yet to do */
    tn__sharded_unit *kept;  /* from its forward to its backward, which comes next; NULL */
    tn__sharded_unit *ahead; /* is to be gathered before anything else; NULL */
    tn__sharded_unit *sent;  /* its reduction is put, and its backward_end has failed behind it */
    int is_taken;            /* and what it brought is where it belongs */
    int is_update_ahead;     /* units are updated by backward_end, as update_args says */
    int is_step_counted;     /* and one has begun to be */
    tn_sharded_update_args update_args;
    int is_normed;    /* the sum of squares is put, and the update has failed behind it */
    int is_updating;  /* an update has counted its step, and failed behind it */
    tn_tensor amaxes; /* of the unit whose cast has failed behind its reduction; {0} */
    int has_amaxes;   /* and they are reduced */
    int is_ending;    /* tn_sharded_destroy has failed behind the end of all units */
    int updated;      /* units that it is done with */
    int is_stepped;   /* the next one has had its AdamW */
    tn_sharded_report counts;
};

/* ---- sharded_model.c ------------------------------------------------------------------------- */

/* PLAIN, rows x cols, with no plane yet. */
tn_status tn__sharded_plain(tn_scope scope, tn_dtype dtype, int64_t rows, int64_t cols,
                            const char *name, tn_tensor *out);

/* The first elements of a plain tensor, or those from `first` on, as a column. */
tn_status tn__sharded_view(tn_tensor base, int64_t first, int64_t count, tn_scope scope,
                           tn_stream stream, tn_tensor *out);

/* As tn__sharded_plain, all of it 0. */
tn_status tn__sharded_zeros(const tn_sharded_model *model, tn_scope scope, tn_dtype dtype,
                            int64_t rows, int64_t cols, const char *name, tn_tensor *out);

/* A unit by its number, or why it is none. */
tn_status tn__sharded_find(const tn_sharded_model *model, const char *call, int unit,
                           tn__sharded_unit **out);

/* TN_UNSUPPORTED where a stream of it captures a graph: asked before anything is done. */
tn_status tn__sharded_check_streams(const tn_sharded_model *model, const char *call);

/* TN_INVALID_STATE between a meeting of tn_sharded_abandon and its success: the other ranks have
 * given the step up, and what this one puts for all they would take for the next step's. Likewise
 * when tn_sharded_destroy has failed behind the end of all units. */
tn_status tn__sharded_check_given_up(const tn_sharded_model *model, const char *call);

/* Whether gradients of micro-batches meet in the rank's part, and not in the bucket. */
int tn__sharded_adds_parts(const tn_sharded_model *model);

/* Whether a reduction does not go straight to the rank's part, but is added or converted to it. */
int tn__sharded_passes_arrived(const tn_sharded_model *model, tn_gradient_sum sum);

/* Elements of an unit's bucket together with all of them, in bytes. */
size_t tn__sharded_bucket_bytes(const tn_sharded_model *model, const tn__sharded_unit *unit);

/* ---- sharded_unit.c -------------------------------------------------------------------------- */

void tn__sharded_unit_delete(tn__sharded_unit *unit); /* its tensors are gone, or go */

/* Where shards are made, and that of what a unit's masters have now, on the ring's stream. */
tn_status tn__sharded_made_shard_make(tn_sharded_model *model);
tn_status tn__sharded_make_shard(void *unit, tn_stream stream);

/* TN_INVALID_STATE if a shard is made of masters that are not those of the last update. */
tn_status tn__sharded_check_master(tn__sharded_unit *unit);
/* They are, from here on. */
tn_status tn__sharded_keep_master(tn__sharded_unit *unit);

/* The rank's parts of masters to the shard, if it is kept; can be made again where it fails. */
tn_status tn__sharded_cast_update(tn_sharded_model *model, tn__sharded_unit *unit,
                                  float amax_epsilon, tn_stream stream);

/* ---- sharded_bucket.c ------------------------------------------------------------------------ */

/* Books for buckets that have no memory yet, and `arrived`; the end is also made_shard's. */
tn_status tn__sharded_buckets_make(tn_sharded_model *model);
void tn__sharded_buckets_end(tn_sharded_model *model);

/* The unit owns a bucket, and its gradients have their planes there: contents undefined, or what
 * the micro-batches before have left. */
tn_status tn__sharded_bucket_take(tn_sharded_model *model, tn__sharded_unit *unit);

/* Gradients have no planes any more, and the bucket no memory, in the order of `stream`, which
 * waits for the reduction that reads it; nor has the reduced gradient, if it has been updated with.
 */
tn_status tn__sharded_bucket_drop(tn_sharded_model *model, tn__sharded_unit *unit);

/* The bucket that comes round next is given up, and the sums of what was in it are waited for, on
 * `stream`, before the reduction of another one is put: either waits for all that is on comm_stream
 * by then. If it is leased, or the driver fails, who comes next does so, and says so. */
void tn__sharded_bucket_vacate(tn_sharded_model *model);

/* All buckets that nobody will read are given up, and, if no unit is in backward, what reductions
 * pass through: `stream` waits for comm_stream. What is leased, or the driver refuses to free, goes
 * the next time. */
void tn__sharded_rest(tn_sharded_model *model);

/* TN_IN_USE: the unit would take the bucket of one in backward. */
tn_status tn__sharded_bucket_may_take(const tn_sharded_model *model, const tn__sharded_unit *unit);

/* TN_INVALID_STATE names a gradient that is not valid. */
tn_status tn__sharded_bucket_check(const tn_sharded_model *model, const tn__sharded_unit *unit);

tn_status tn__sharded_reduce(tn_sharded_model *model, tn__sharded_unit *unit);

/* Ends an UPDATE under which a collective was put, or was not: what it was to write is valid either
 * way, and what is in it nobody reads before it is written again. */
tn_status tn__sharded_end_write(tn_lease lease, tn_status status);

/* ---- sharded_memory.c ------------------------------------------------------------------------ */

tn_status tn__sharded_buffer_make(const tn_sharded_model *model, size_t bytes, tn_stream stream,
                                  const char *name, tn__sharded_buffer *out);

/* In the order of `stream`, which waits for its uses. No memory is success. */
tn_status tn__sharded_buffer_end(tn__sharded_buffer *buffer, tn_stream stream);

/* The same, where the scope ends next: what fails goes with it. */
void tn__sharded_buffer_abandon(tn__sharded_buffer *buffer, tn_stream stream);

/* Valid in the order of `stream`, with 0 from element `count` on: what is there stays. It comes
 * from the stream that it goes back to, so that no other one's memory is waited for. */
tn_status tn__sharded_plane_make(const tn_sharded_model *model, tn_tensor tensor, size_t count);

/* In the order of `stream`. {0} is success. */
tn_status tn__sharded_plane_drop(tn_tensor tensor, tn_stream stream);

/* Of the buckets that units take in turn. */
size_t tn__sharded_most_bucket_bytes(const tn_sharded_model *model);
int tn__sharded_shared_buckets(const tn_sharded_model *model);

/* The largest part of a unit's gradients that this rank has, in whole rows. */
size_t tn__sharded_most_packed(const tn_sharded_model *model);

/* Of the largest shard that is made for each gather. */
size_t tn__sharded_made_shard_bytes(const tn_sharded_model *model);

/* FP8 is summed in fp32. */
tn_dtype tn__sharded_arrived_dtype(const tn_sharded_model *model);

/* Bytes of all buckets and of what a reduction needs beside them, were gradients added up so. */
size_t tn__sharded_buckets_bytes(const tn_sharded_model *model, tn_gradient_sum sum);

/* ---- sharded_fp8.c --------------------------------------------------------------------------- */

/* Of what all ranks send to one of them. */
size_t tn__sharded_fp8_bytes(const tn__sharded_unit *unit, int rank);

/* Buffers for the largest unit, unless they are there, and their bytes. */
tn_status tn__sharded_fp8_make(tn_sharded_model *model);
tn_status tn__sharded_fp8_end(tn_sharded_model *model, tn_stream stream);
size_t tn__sharded_fp8_buffer_bytes(const tn_sharded_model *model);

/* Every rank's part of the unit's bucket, to it. */
tn_status tn__sharded_fp8_send(const tn_sharded_model *model, const tn__sharded_unit *unit);

/* The sums of this rank's elements over what the ranks have sent last, fp32, to sums. */
tn_status tn__sharded_fp8_sum(const tn_sharded_model *model, const tn__sharded_unit *unit,
                              float *sums);

/* ---- sharded_update.c ------------------------------------------------------------------------ */

/* The unit's update on comm_stream, behind its reduction; can be made again where it fails. */
tn_status tn__sharded_update_ahead(tn_sharded_model *model, tn__sharded_unit *unit);

/* ---- sharded_step.c -------------------------------------------------------------------------- */

/* What is to be gathered before anything else that all ranks put. Fails alone, and can be made
 * again: nothing else may be put before. */
tn_status tn__sharded_catch_up(tn_sharded_model *model);

/* The unit that a step begins with is gathered ahead, behind the update: with a failure of the call
 * that it is made again after, as nothing else may come. */
tn_status tn__sharded_gather_first(tn_sharded_model *model);

/* The unit is not gathered any more, and what was made of it is gone. */
tn_status tn__sharded_let_go(tn_sharded_model *model, tn__sharded_unit *unit);

/* Nothing of the step is left. TN_IN_USE, and nothing has changed, if a weight or a gradient is
 * leased. */
tn_status tn__sharded_give_up(tn_sharded_model *model);

#endif
