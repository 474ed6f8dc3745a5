/* The ring of gather buffers, inside: slots, units, and how a unit comes and goes.
 *
 *      EMPTY --> RESERVED --> COMM --> READY --> IN_USE --> DRAINING --> EMPTY
 *        a         b           c        d          e           f
 *
 *      a  a place is chosen; the communication stream waits for what lies there (DRAINING slots)
 *      b  the gather is put on the communication stream; if it is not, the slot is EMPTY again
 *      c  the slot's *lane* waits for that stream: for this gather, as the next is not put yet
 *      d  the weights adopt their planes, ready in the order of the lane: first hold
 *      e  last hold over: the planes are dropped, which has the lane wait for all their uses. READY
 *         goes the same way if the unit is displaced
 *      f  the communication stream has waited for the lane
 *
 * A lane is a stream on which nothing runs: it only waits, so where it stands is where the memory
 * of its slot is free. That is all the synchronisation there is, and the host never takes part.
 *
 * A slot is a record and a lane; where it lies in the buffer is said with each gather. Without a
 * schedule slot k is always at k x the largest unit. Units without bytes have a record of their own
 * behind those, with the communication stream for a lane.
 *
 * Callers hold the ring's lock. The one thing that is called without it is the return of a plane
 * (tn__ring_plane), which is an atomic flag.
 */
#ifndef TENURE_RING_SLOTS_H
#define TENURE_RING_SLOTS_H

#include <pthread.h>
#include <stdatomic.h>

#include "ring_place.h"
#include "tenure_lifetime.h"
#include "tenure_registration.h"
#include "tenure_ring.h"

/* What a unit is gathered from and how: the plan and the communicator, or what a test says. The
 * buffer's bytes that it takes are the same on all ranks. Neither function waits on the host. */
typedef struct tn__ring_source {
    size_t bytes;
    uint64_t hash; /* of all that ranks must agree in */
    tn_status (*gather)(void *context, const void *shard, void *buffer, tn_stream stream);
    /* Fills in plane, data, scale and their bytes of one tensor. */
    tn_status (*locate)(void *context, int tensor, const void *shard, void *buffer,
                        tn_foreign_memory *out);
    void (*release)(void *context); /* with the ring; NULL: nothing is to be done */
    void *context;
} tn__ring_source;

/* A weight, and whether its plane is still in the ring's memory: set at the adoption, cleared by
 * the release, on whichever thread that comes. A plane that was saved elsewhere keeps it. */
typedef struct tn__ring_plane {
    tn_tensor tensor;
    unsigned planes; /* TN_PLANE_BITs that its format has */
    tn_plane plane;  /* that was adopted last */
    atomic_int is_out;
} tn__ring_plane;

typedef struct tn__ring_unit {
    char *name;
    tn__ring_source source;
    size_t bytes;    /* in the buffer: a multiple of TN__RING_ALIGNMENT */
    tn_tensor shard; /* {0}: this rank has none */
    tn__ring_plane *planes;
    int plane_count;
    int own_slot;           /* of a unit without bytes; else -1 */
    int slot;               /* that it is in, from RESERVED to DRAINING with planes out; else -1 */
    int is_wanted;          /* a prefetch of it waits for room */
    uint64_t wanted_number; /* which was the first to want */
} tn__ring_unit;

/* One acquire that has not been released. The newest is the first to go. */
typedef struct tn__ring_hold tn__ring_hold;
struct tn__ring_hold {
    tn_ring *ring;
    tn__ring_hold *next;
    int unit;
    tn_tensor token;    /* in the scope of the acquire, whose closing gives it back; {0}: none */
    atomic_int is_over; /* the token's release has nothing to do any more, and frees this */
};

typedef struct tn__ring_slot {
    tn_ring_state state;
    tn_stream lane;
    int unit; /* -1: EMPTY, or DRAINING without planes out */
    size_t offset, bytes;
    uint64_t contents;    /* of the shard that was gathered */
    uint64_t number;      /* of the gather, or of the drain: what is older goes first */
    tn_lease shard_lease; /* while there are planes: what they were gathered from stays as it is */
    int has_shard_lease;
    const void *shard; /* its address */
    int holds;
    int forsaken; /* of the holds: their scope is closed, and they could not be ended yet */
    tn__ring_hold *first_hold;
    tn_stream stream; /* of the newest acquire: derived planes are freed in its order */
} tn__ring_slot;

/* A schedule, and how far the calls have followed it. */
typedef struct tn__ring_schedule {
    tn_ring_op *ops;
    size_t *offsets; /* of the gather that an op starts */
    int count;       /* 0: there is none */
    int next;        /* the op that comes next */
    int is_astray;   /* other calls came: until nothing is gathered */
} tn__ring_schedule;

struct tn_ring {
    atomic_int references; /* the program's, and of each hold that has a token: of the lock */
    pthread_mutex_t lock;
    char *name;
    tn_scope scope;
    tn_device *device;
    tn_comm *comm; /* NULL in tests without one */
    tn_stream stream;
    int owns_stream;
    tn_ring_full full;
    int slots_wanted;
    size_t budget_bytes;

    tn__ring_unit *units;
    int unit_count, unit_room;
    tn__ring_slot *slots;
    int slot_count;   /* that have lanes; those of units without bytes follow */
    int record_count; /* of all of them */
    size_t stride;    /* from slot to slot; 0: as the schedule says */
    int is_sealed;

    tn_tensor buffer;
    tn_lease buffer_lease; /* from the seal to the end: the addresses stay */
    char *base;
    size_t buffer_bytes;
    tn_ring_register registration_wanted;
    tn_registration *registration; /* of the buffer, on all ranks; NULL: there is none */
    tn_registration *leftovers[2]; /* that some ranks have not, and that did not end yet; by kind */
    char *register_text;           /* why it is not as wanted; NULL: it is */
    size_t needed_bytes;           /* by the schedules so far */
    int needed_slots;

    tn__ring_schedule schedule;
    uint64_t clock; /* counts gathers, drains and wants */
    tn_ring_stats stats;
};

/* ---- ring_state.c: the transitions; nothing else changes a slot's state -------------------- */

/* EMPTY to RESERVED, at an offset where nothing is held: the communication stream waits for what
 * drains there, and those slots are EMPTY. */
tn_status tn__ring_reserve(tn_ring *ring, int slot, int unit, size_t offset);

/* RESERVED to COMM; EMPTY if it fails. */
tn_status tn__ring_gather(tn_ring *ring, int slot);

/* COMM to READY: on failure it is COMM, with nothing lost. Success if it is READY or IN_USE. */
tn_status tn__ring_arm(tn_ring *ring, int slot);

/* The shard has been written since it was gathered. */
tn_status tn__ring_is_outdated(const tn_ring *ring, int slot, int *out);

/* READY to IN_USE with the first hold, or one hold more. Planes that are absent are adopted. */
tn_status tn__ring_hold_begin(tn_ring *ring, int slot, tn__ring_hold *hold, tn_stream stream);

/* Ends a lease whose contents nobody will want, or that only read: if the driver can not be told of
 * it now, it is told later. */
void tn__ring_lease_end(tn_lease lease);

/* A hold that is in no slot, and its token. */
void tn__ring_hold_delete(tn_ring *ring, tn__ring_hold *hold);

/* The newest hold is over, and is not the last. */
void tn__ring_hold_end(tn_ring *ring, int slot);

/* The hold's scope has been closed: it is one of those that wait for their end, without a record.
 * And the end of one of them that is not the last hold. */
void tn__ring_forsake(tn_ring *ring, tn__ring_hold *hold);
void tn__ring_forsaken_end(tn_ring *ring, int slot);

/* COMM, READY or IN_USE with no more than one hold to DRAINING, and no hold is left. TN_IN_USE, and
 * nothing has changed, while a plane is leased. Another failure leaves the state: some planes are
 * gone, and the call is to be repeated. */
tn_status tn__ring_drain(tn_ring *ring, int slot);

/* DRAINING, of which no plane is out, to EMPTY: the communication stream waits for the lane. */
tn_status tn__ring_reclaim(tn_ring *ring, int slot);

/* Everything goes, whoever holds it; TN_IN_USE, and nothing has changed, if a plane is leased or
 * still out elsewhere. */
tn_status tn__ring_drain_all(tn_ring *ring);

/* The unit may be gathered anew, if it is nowhere: TN_IN_USE while planes of an earlier gather are
 * out. */
tn_status tn__ring_settle_unit(tn_ring *ring, int unit);

/* A plane of the unit is in the ring's memory. */
int tn__ring_unit_is_out(const tn__ring_unit *unit);

/* No one holds what is there, nor any plane of it: another unit may come. */
int tn__ring_slot_is_free(const tn_ring *ring, const tn__ring_slot *slot);

/* All that is said above, of every slot and unit. */
int tn__ring_is_valid(const tn_ring *ring);

/* ---- ring_room.c: where the next gather goes ----------------------------------------------- */

/* Finds a slot and an offset for a unit that is nowhere; 0: there is no room now. planned: that of
 * the schedule; SIZE_MAX: none. */
int tn__ring_find_room(const tn_ring *ring, int unit, size_t planned, int *slot, size_t *offset);

/* The unit that was prefetched first of those that nobody has acquired; -1: none. */
int tn__ring_oldest_unheld(const tn_ring *ring);

/* TN_IN_USE with who holds what. */
tn_status tn__ring_fail_full(const tn_ring *ring, int unit);

/* ---- ring_schedule.c ----------------------------------------------------------------------- */

/* Checks a schedule as tn_ring_schedule_set says. demand, and if it is wanted the offset of the
 * gather that each op starts (SIZE_MAX: none), are set on success. */
tn_status tn__ring_schedule_trace(const tn_ring *ring, const tn_ring_op *ops, int count,
                                  tn_ring_demand *demand, size_t *offsets);
tn_status tn__ring_schedule_set(tn_ring *ring, const tn_ring_op *ops, int count);

/* The offset that the schedule has for a gather that this op starts; SIZE_MAX: it has none. Before
 * anything is done for the op. */
size_t tn__ring_schedule_offset(tn_ring *ring, tn_ring_op op);

/* The op has been done. */
void tn__ring_schedule_advance(tn_ring *ring, tn_ring_op op);

void tn__ring_schedule_deinit(tn__ring_schedule *schedule);

/* ---- ring_books.c -------------------------------------------------------------------------- */

/* Into the hash that ranks compare: what happened to which unit where. */
void tn__ring_mix(tn_ring *ring, uint64_t what, int unit, size_t offset);

/* ---- ring_make.c --------------------------------------------------------------------------- */

/* Ends a reference. Whoever closes a token's scope while the ring ends finds the lock there. */
void tn__ring_drop(tn_ring *ring);

/* A ring whose units need no communicator, if config->comm is NULL. */
tn_status tn__ring_create(const tn_ring_config *config, tn_ring **out);

/* A unit that is gathered as its source says; name, source and tensors are copied. */
tn_status tn__ring_unit_add(tn_ring *ring, const char *name, const tn__ring_source *source,
                            tn_tensor shard, const tn_tensor *tensors, int tensor_count, int *out);

/* Makes a unit's shard valid on the stream. */
typedef tn_status (*tn__ring_make)(void *context, tn_stream stream);

/* As tn_ring_unit_add, of a unit whose shard is made for each gather, in memory that others' are
 * made in, too. What it is made of has been written since if `version` has, which is leased as a
 * shard is. No plane may lie in the shard. */
tn_status tn__ring_made_unit_add(tn_ring *ring, const tn_ring_unit_config *config,
                                 tn_tensor version, tn__ring_make make, void *context, int *out);

/* ---- ring_register.c ------------------------------------------------------------------------ */

/* The buffer, whose memory fits its registration; leased. */
tn_status tn__ring_buffer_take(tn_ring *ring, size_t bytes);

/* Registers the buffer as far as that can be. Every rank calls, prepared. Never fails: statistics
 * have what it comes to. */
tn_status tn__ring_prepare_registration(tn_ring *ring);
void tn__ring_register(tn_ring *ring);

/* TN_IN_USE while captured graphs may have the registration. */
tn_status tn__ring_check_end(const tn_ring *ring);

/* Ends the registration, and then the buffer. */
tn_status tn__ring_buffer_free(tn_ring *ring);

/* ---- ring.c -------------------------------------------------------------------------------- */

/* Releases what it can of what closed scopes have left, and starts prefetches that have room. Of
 * those one may fail, and is started by a later call: nothing else is gathered before. */
tn_status tn__ring_settle(tn_ring *ring);

/* The same, of a program that puts other collectives than the ring's: before each of them. */
tn_status tn__ring_catch_up(tn_ring *ring);

/* TN_INVALID_ARGUMENT: there is no such unit. */
tn_status tn__ring_check_unit(const tn_ring *ring, int unit, const char *call);

#endif
