/* Tenure: the ring, in whose fixed memory gathered units take turns.
 *
 *     tn_ring *ring;
 *     tn_ring_config config = TN_RING_CONFIG_INIT;
 *     config.scope = model, config.comm = comm, config.slots = 2;
 *     tn_ring_create(&config, &ring);
 *     for (int i = 0; i < count; i++) {
 *         tn_ring_unit_config unit = TN_RING_UNIT_CONFIG_INIT;
 *         unit.plan = plans[i], unit.shard = shards[i];
 *         unit.tensors = weights[i], unit.tensor_count = 4;
 *         tn_ring_unit_add(ring, &unit, &units[i]);
 *     }
 *     tn_ring_seal(ring);                              (all its memory, once)
 *     for (int i = 0; i < count; i++) {
 *         tn_ring_acquire(ring, units[i], step, stream);
 *         if (i + 1 < count) tn_ring_prefetch(ring, units[i + 1]);
 *         ... ops that lease the weights of unit i, on any streams ...
 *         tn_ring_release(ring, units[i]);
 *     }
 *     tn_ring_destroy(ring);
 *
 * A *unit* is the tensors that one collective gathers (tenure_shard.h). Its weights are ordinary
 * tensors whose handles stay; while the unit is not acquired they have no plane. From acquire to
 * release their ROW (PLAIN: DATA) planes are valid, may be read, and lie in the ring's buffer as
 * memory that was adopted (tn_plane_adopt): the ledger has the buffer once, as a tensor of the
 * ring's scope with the ring's name, and the planes as foreign_bytes. COL is derived by whoever
 * reads it, as ever; the release drops it, too.
 *
 * Order. Gathers run on one communication stream, in the order of the calls. A lease of a weight
 * waits on the device for its unit's gather, and for none that was started after it. A place in the
 * buffer is written again behind all uses of what was there, on every stream, by waits on the
 * device. No call here waits on the host but tn_ring_verify, tn_ring_destroy, and tn_ring_seal
 * where the buffer is registered. On a stream that captures (the caller's or that of communication)
 * prefetch, acquire and release are TN_UNSUPPORTED, and neither ring nor capture has changed.
 *
 * What is gathered is always what the shard holds. While a unit is acquired its shard is leased, so
 * that nobody writes it (TN_IN_USE: release before the update); what was prefetched before a write
 * is gathered again when it is acquired.
 *
 * Ranks. Every decision follows from the calls alone, never from how far a device is: ranks that
 * make the same calls start the same gathers in the same order at the same offsets. tn_ring_verify
 * compares a hash of them all. A communicator that fails leaves the ring whole: gathers fail with
 * its status, releases and the end of the ring work as ever.
 *
 * Threads: any thread may call; the order of calls is the program's business, as a communicator's.
 * A call that fails has acquired and released nothing; units that are not acquired may have been
 * gathered or displaced by it.
 */
#ifndef TENURE_RING_H
#define TENURE_RING_H

#include "tenure_shard.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tn_ring tn_ring;

/* ---- making a ring ------------------------------------------------------------------------- */

/* What becomes of a prefetch that finds no room. */
typedef enum tn_ring_full {
    TN_RING_FULL_WAIT = 0, /* it is started by the release that makes room, on the device behind the
                            * uses of what was there; or by the unit's acquire */
    TN_RING_FULL_FAIL      /* it is TN_IN_USE, and the text says who holds what */
} tn_ring_full;

/* The buffer is registered with the communicator, once and as a whole (tenure_registration.h), so
 * that gathers need no copy of the communicator's own. Its memory is then one block of one physical
 * handle where the pool has such (a pool with one can not be paused), or what the pool has of
 * tn_comm_memory_functions. Whatever fails, on any rank, no rank has it registered so, and the ring
 * works as well: tn_ring_stats says what has become of it. With engines that register nothing this
 * is without effect. */
typedef enum tn_ring_register {
    TN_RING_REGISTER_AUTO = 0, /* as a symmetric window; else as a buffer; else not */
    TN_RING_REGISTER_BUFFER,   /* as a buffer; else not */
    TN_RING_REGISTER_NONE
} tn_ring_register;

typedef struct tn_ring_config {
    size_t size;
    tn_scope scope;   /* of the buffer; it can not be closed before the ring is destroyed */
    tn_comm *comm;    /* must outlive the ring */
    tn_stream stream; /* of communication; must outlive the ring; NULL: the ring makes one */
    const char *name; /* copied; NULL: "ring" */
    int slots; /* units at a time, if there is no schedule, at most TN_RING_SLOTS_MAX; 0: as many
                * of the largest as the budget holds, or 2 without one */
    size_t budget_bytes; /* the buffer is never larger; 0: no bound */
    tn_ring_full full;
    tn_ring_register registration;
} tn_ring_config;
#define TN_RING_CONFIG_INIT                                                                        \
    {                                                                                              \
        sizeof(tn_ring_config), {0}, NULL, NULL, NULL, 0, 0, TN_RING_FULL_WAIT,                    \
            TN_RING_REGISTER_AUTO                                                                  \
    }

enum { TN_RING_SLOTS_MAX = 64 };

TN_API TN_MUST_USE tn_status tn_ring_create(const tn_ring_config *config, tn_ring **out);

/* Releases whatever is acquired and frees the buffer, in the order of the communication stream;
 * ends the streams that it made, waiting for what is on them. TN_IN_USE while a plane of a unit is
 * leased, or was saved in another tensor, or the buffer is registered with a communicator that is
 * in captured graphs (tenure_comm_graph.h): nothing is destroyed. If the driver fails, the ring
 * takes no more calls but this one again. NULL is a no-op. */
TN_API tn_status tn_ring_destroy(tn_ring *ring);

typedef struct tn_ring_unit_config {
    size_t size;
    const char *name;          /* in texts; copied; NULL: the plan's */
    const tn_shard_plan *plan; /* must outlive the ring */
    tn_shard_phase phase;      /* what a gather brings; where BACKWARD brings other planes than
                                * FORWARD, the tensors are in two units, one acquired at a time */
    tn_tensor shard;           /* this rank's bytes, a tensor of TN_BYTE, without elements if it has
                                * none: it is to be written whenever those of other ranks are, as
                                * tn_shard_cast does. {0}: it has none, and no rank writes its own
                                * between a prefetch and the acquire */
    const tn_tensor *tensors;  /* in the plan's order; copied. They have no planes, and may end
                                * before the ring; they become regatherable */
    int tensor_count;
} tn_ring_unit_config;
#define TN_RING_UNIT_CONFIG_INIT                                                                   \
    { sizeof(tn_ring_unit_config), NULL, NULL, TN_SHARD_FORWARD, {0}, NULL, 0 }

/* *out: 0, 1, 2 and so on. TN_INVALID_ARGUMENT: what does not fit the plan; TN_INVALID_STATE: a
 * tensor that has a plane, or the ring is sealed. */
TN_API TN_MUST_USE tn_status tn_ring_unit_add(tn_ring *ring, const tn_ring_unit_config *config,
                                              int *out);

/* ---- schedules ----------------------------------------------------------------------------- */

typedef enum tn_ring_op_kind {
    TN_RING_PREFETCH = 0,
    TN_RING_ACQUIRE,
    TN_RING_RELEASE
} tn_ring_op_kind;

typedef struct tn_ring_op {
    tn_ring_op_kind kind;
    int unit;
} tn_ring_op;

typedef struct tn_ring_demand {
    size_t size;
    size_t peak_bytes;   /* the most that is gathered at one time */
    size_t buffer_bytes; /* that the placement needs: peak_bytes, where all units are of one size */
    size_t largest_bytes;
    size_t slots_bytes; /* units_at_once x largest_bytes: never less than buffer_bytes */
    int units_at_once;
    int gathers;
} tn_ring_demand;
#define TN_RING_DEMAND_INIT                                                                        \
    { sizeof(tn_ring_demand), 0, 0, 0, 0, 0, 0 }

/* What a program does with the ring in a step, in order; after the last op comes the first again.
 * A schedule says where each gather lies, so that units of unlike sizes share the buffer and do not
 * multiply: it has the bytes that are needed at one time, not slots x the largest.
 *
 * It is checked as a whole, before the first step: TN_INVALID_ARGUMENT names the op that releases
 * what is not acquired, or the unit that is still gathered at the end; TN_OUT_OF_DEVICE_MEMORY has
 * the bytes that it needs, those that are allowed, and the op that needs the most. A schedule that
 * passes never finds the ring full.
 *
 * Before the seal the buffer becomes as large as the largest of the schedules that were set; after
 * it a schedule replaces the one before, must fit the buffer, and nothing may be gathered.
 *
 * Calls that are not the schedule's next are served with the lowest gap in the buffer and counted
 * (strays), until nothing is gathered and the schedule begins anew. */
TN_API TN_MUST_USE tn_status tn_ring_schedule_set(tn_ring *ring, const tn_ring_op *ops, int count);

/* The same without effect. */
TN_API TN_MUST_USE tn_status tn_ring_schedule_check(tn_ring *ring, const tn_ring_op *ops, int count,
                                                    tn_ring_demand *out);

/* No unit is added any more, and all memory is taken: the buffer of slots x the largest unit, or of
 * what the schedules need. From here on no call takes any from the pool or the driver, but
 * tn_ring_verify. Where the buffer is registered every rank calls, with a buffer of the same size,
 * and this waits on the host for the communicator, as tn_ring_destroy does. A rank that fails can
 * call again, for which the others wait. TN_OUT_OF_DEVICE_MEMORY if it is more than the budget,
 * TN_INVALID_STATE while a group is open. */
TN_API TN_MUST_USE tn_status tn_ring_seal(tn_ring *ring);

/* ---- units come and go --------------------------------------------------------------------- */

/* Starts the unit's gather; success without effect if it is there, or under way. */
TN_API TN_MUST_USE tn_status tn_ring_prefetch(tn_ring *ring, int unit);

/* The unit's planes are valid until as many tn_ring_release; what is put on `stream` from now on
 * comes behind the gather, which is started if need be. The stream must be there until the release,
 * which frees derived planes in its order. Closing `scope` releases what was acquired in it and is
 * not released yet, as when a step fails ({0}: nothing does); if a plane is leased then, the next
 * call of the ring does.
 *
 * If there is no room, units that were prefetched and are not acquired make room, the oldest first
 * (displaced); TN_IN_USE, and the text says who holds what, if that does not help. */
TN_API TN_MUST_USE tn_status tn_ring_acquire(tn_ring *ring, int unit, tn_scope scope,
                                             tn_stream stream);

/* Ends the newest acquire of the unit; the last one drops all planes of its tensors. TN_IN_USE, and
 * nothing has changed, while one of them is leased. If the driver fails some planes are gone, and
 * the call may be repeated. */
TN_API TN_MUST_USE tn_status tn_ring_release(tn_ring *ring, int unit);

/* TN_COMM_ERROR if the gathers, releases and offsets since the seal are not the same on all ranks.
 * Collective; waits on the host, and takes 8 bytes a rank of the scope meanwhile. */
TN_API TN_MUST_USE tn_status tn_ring_verify(tn_ring *ring);

/* ---- what it is at ------------------------------------------------------------------------- */

typedef enum tn_ring_state {
    TN_RING_EMPTY = 0, /* not gathered */
    TN_RING_RESERVED,  /* it has a place: within a call only */
    TN_RING_COMM,      /* its gather is on the communication stream */
    TN_RING_READY,     /* and its lane is behind it: it may be acquired */
    TN_RING_IN_USE,    /* acquired */
    TN_RING_DRAINING   /* released: its place is free behind the last uses */
} tn_ring_state;

TN_API const char *tn_ring_state_name(tn_ring_state state);

typedef struct tn_ring_unit_info {
    size_t size;
    const char *name; /* as long as the ring lives */
    tn_ring_state state;
    int holds;     /* acquires that are not released */
    size_t bytes;  /* that it takes in the buffer */
    size_t offset; /* where it is; 0 if it is not gathered */
} tn_ring_unit_info;
#define TN_RING_UNIT_INFO_INIT                                                                     \
    { sizeof(tn_ring_unit_info), NULL, TN_RING_EMPTY, 0, 0, 0 }

TN_API TN_MUST_USE tn_status tn_ring_unit_info_get(tn_ring *ring, int unit, tn_ring_unit_info *out);

typedef enum tn_ring_registered {
    TN_RING_UNREGISTERED = 0,
    TN_RING_REGISTERED_BUFFER,
    TN_RING_REGISTERED_WINDOW
} tn_ring_registered;

typedef struct tn_ring_stats {
    size_t size;
    size_t buffer_bytes;    /* 0 before the seal */
    size_t live_bytes;      /* of units that are gathered */
    size_t peak_live_bytes; /* the most of them at one time */
    int units;
    int slots;
    uint64_t gathers;   /* collectives that were started */
    uint64_t regathers; /* of them: again, because the shard had been written since a prefetch */
    uint64_t prefetches;
    uint64_t acquires;
    uint64_t releases;
    uint64_t found;     /* acquires that found the unit gathered */
    uint64_t deferred;  /* prefetches that had to wait for room */
    uint64_t displaced; /* units that made room without having been acquired */
    uint64_t strays;    /* calls that were not the schedule's next */
    uint64_t abandoned; /* acquires that a closed scope has ended */
    uint64_t hash;      /* what tn_ring_verify compares */
    tn_ring_registered registered;
    tn_status register_status; /* the first thing that could not be registered so; TN_OK: nothing */
    const char *register_text; /* of that, in words, as long as the ring lives; "" */
    uint64_t register_us;      /* that registering took on the host, with what was tried */
} tn_ring_stats;
#define TN_RING_STATS_INIT                                                                         \
    {                                                                                              \
        sizeof(tn_ring_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,                     \
            TN_RING_UNREGISTERED, TN_OK, "", 0                                                     \
    }

TN_API TN_MUST_USE tn_status tn_ring_stats_get(tn_ring *ring, tn_ring_stats *out);

#ifdef __cplusplus
}
#endif
#endif
