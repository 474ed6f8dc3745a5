/* The ring of gather buffers (dist/ring_slots.h): 2 slots, 3 units, leases on two streams.
 *
 * One program calls prefetch, acquire, release, leases of weights and writes of shards, in any
 * order (STEP 0), or in that of a step, forward and backward, without end (STEP 1). Every wait of a
 * stream and every gather may fail. A call is one step, as the ring's lock has it.
 *
 * The device is not executed. For each slot's memory and each stream there are the uses that the
 * stream's next work does not come after (`unseen`): work that would meet one of them is a race,
 * however fast the device is. The units hold no memory of their own, so a plane of unit u is
 * whatever slot it was adopted in.
 *
 * Checked in every state: no race; what a lease reads is the unit, of the shard as it is; the
 * planes of a unit are there just as long as the program has it acquired; a full ring is full of
 * acquired units; when all leases and acquires are over the ring is empty.
 *
 * PLANTED: 1 a gather does not wait for the lane, 2 the lane does not wait for the gather, 3 a
 * release ignores leases, 4 the lane does not wait for the second stream's uses, 5 an acquired unit
 * is displaced, 6 prefetched units are never displaced, 7 an outdated gather passes, 8 a gather
 * that fails keeps its slot.
 */
#ifndef STEP
#define STEP 0
#endif
#ifndef PLANTED
#define PLANTED 0
#endif

#define SLOTS   2
#define UNITS   3
#define NOWHERE 2 /* no slot */
#define NOBODY  3 /* no unit */

/* Streams: two of the program, that of communication, a lane for each slot. */
#define A       0
#define B       1
#define C       2
#define LANE(s) (3 + (s))
#define STREAMS 5

mtype = { EMPTY, COMM, READY, IN_USE, DRAINING };

/* Uses of memory are by A, B (reads) and C (writes): a bit of each. */
#define BIT(stream) (1 << (stream))
byte unseen[SLOTS * STREAMS];
#define UNSEEN(s, stream) unseen[(s) * STREAMS + (stream)]

/* What a stream's waiter does not come after: of A and B never the other one's reads. */
#define OF_OTHER(stream)     ((stream) == A -> BIT(B) : ((stream) == B -> BIT(A) : 0))
#define KNOWN(where, stream) ((UNSEEN(where, stream) | OF_OTHER(stream)) & ~BIT(stream))

#define IS_FREE(where)   (state[where] == EMPTY || state[where] == DRAINING)
#define IS_UNHELD(where) (state[where] == COMM || state[where] == READY)

mtype state[SLOTS] = EMPTY;
byte unit_in[SLOTS] = NOBODY;
byte holds[SLOTS];
byte older[SLOTS];     /* 1: was gathered before the other one */
bit gathered_of[SLOTS];  /* the shard's version that the ring takes it for */
byte memory_of[SLOTS] = NOBODY; /* what was really written there last */
bit memory_version[SLOTS];

byte slot_of[UNITS] = NOWHERE;
bit version[UNITS];    /* of the shard */
bit is_out[UNITS];     /* the weights have their planes */
byte used_by[UNITS];   /* streams that have leased them since */
byte leases[UNITS];    /* BITs of the streams on which there is one now */

byte acquired[UNITS];  /* what the program has acquired, by its own count */

bool ok;               /* of the last call */
bool failed;           /* of the last wait or gather */
byte s, o, x;

/* ---- the device ---------------------------------------------------------------------------- */

/* `later` comes after all that is on `earlier`, as far as slot `where` is concerned; or the driver
 * fails, and nothing has changed. Of what one stream of the program knows about the other one's
 * reads, or a lane of the other slot, nothing is kept: it counts as unseen. */
inline wait(where, later, earlier) {
    if
    :: failed = false;
       UNSEEN(where, later) = UNSEEN(where, later) & KNOWN(where, earlier)
    :: failed = true
    fi
}

/* Whoever comes after a write comes after all that was before it. */
inline write(where) {
    assert((UNSEEN(where, C) & (BIT(A) | BIT(B))) == 0); /* RACE */
    UNSEEN(where, A) = BIT(C);
    UNSEEN(where, B) = BIT(C);
    UNSEEN(where, LANE(where)) = BIT(C)
}

inline read(u, stream) {
    assert(slot_of[u] != NOWHERE && state[slot_of[u]] == IN_USE);   /* GIVEN AWAY */
    assert((UNSEEN(slot_of[u], stream) & BIT(C)) == 0);              /* RACE */
    assert(memory_of[slot_of[u]] == u && memory_version[slot_of[u]] == version[u]); /* VALUE */
    UNSEEN(slot_of[u], C) = UNSEEN(slot_of[u], C) | BIT(stream);
    UNSEEN(slot_of[u], LANE(slot_of[u])) = UNSEEN(slot_of[u], LANE(slot_of[u])) | BIT(stream)
}

/* ---- transitions --------------------------------------------------------------------------- */

/* IN_USE, READY or COMM to DRAINING: the lane waits for all uses of the planes. `ok` says so. */
inline drain(where) {
    ok = true;
    o = unit_in[where];
    if
    :: leases[o] != 0 && PLANTED != 3 -> ok = false /* TN_IN_USE */
    :: else
    fi;
    if
    :: ok && (used_by[o] & BIT(A)) -> wait(where, LANE(where), A); ok = !failed
    :: else
    fi;
    if
    :: ok && (used_by[o] & BIT(B)) && PLANTED != 4 -> wait(where, LANE(where), B); ok = !failed
    :: else
    fi;
    if
    :: ok -> is_out[o] = 0;
             used_by[o] = 0;
             slot_of[o] = NOWHERE;
             unit_in[where] = NOBODY;
             holds[where] = 0;
             version[o] = 0; /* names of versions are used again */
             gathered_of[where] = 0;
             memory_of[where] = NOBODY;
             memory_version[where] = 0;
             older[0] = 0;
             older[1] = 0;
             state[where] = DRAINING
    :: else
    fi
}

/* EMPTY or DRAINING to COMM: behind the lane. */
inline gather(where, u) {
    ok = true;
    if
    :: state[where] == DRAINING && PLANTED != 1 -> wait(where, C, LANE(where)); ok = !failed
    :: else
    fi;
    if
    :: ok -> state[where] = EMPTY;
             if
             :: ok = true
             :: ok = false /* the collective fails */
             fi
    :: else
    fi;
    if
    :: ok -> write(where);
             memory_of[where] = u;
             memory_version[where] = version[u];
             gathered_of[where] = version[u];
             unit_in[where] = u;
             slot_of[u] = where;
             state[where] = COMM;
             older[where] = 0;
             older[1 - where] = (IS_FREE(1 - where) -> 0 : 1)
    :: !ok && PLANTED == 8 && state[where] == EMPTY -> state[where] = COMM; unit_in[where] = u
    :: else
    fi
}

/* COMM to READY: for this gather only, as the next has not been put. */
inline arm(where) {
    ok = true;
    if
    :: state[where] == COMM && PLANTED != 2 -> wait(where, LANE(where), C); ok = !failed
    :: else
    fi;
    if
    :: ok && state[where] == COMM -> state[where] = READY
    :: else
    fi
}

/* A slot for the next gather, in s; NOWHERE: there is none. */
inline find_room(may_displace) {
    s = NOWHERE;
    if
    :: IS_FREE(0) -> s = 0
    :: !IS_FREE(0) && IS_FREE(1) -> s = 1
    :: else
    fi;
    if
    :: s == NOWHERE && may_displace && PLANTED != 6 ->
       if
       :: IS_UNHELD(0) && (!IS_UNHELD(1) || older[0]) -> s = 0
       :: IS_UNHELD(1) && !(IS_UNHELD(0) && older[0]) -> s = 1
       :: !IS_UNHELD(0) && !IS_UNHELD(1) && PLANTED == 5 -> s = 0
       :: else
       fi;
       if
       :: s != NOWHERE -> drain(s);
                          if
                          :: !ok -> s = NOWHERE
                          :: else
                          fi
       :: else
       fi
    :: else
    fi
}

/* The unit to where it may be acquired. */
inline bring(u, may_displace) {
    ok = true;
    if
    :: slot_of[u] != NOWHERE && holds[slot_of[u]] == 0 && gathered_of[slot_of[u]] != version[u] &&
       PLANTED != 7 ->
       s = slot_of[u];
       drain(s);
       if
       :: ok -> gather(s, u)
       :: else
       fi
    :: slot_of[u] == NOWHERE ->
       find_room(may_displace);
       if
       :: s == NOWHERE -> ok = false
       :: else -> gather(s, u)
       fi
    :: else
    fi;
    if
    :: ok && slot_of[u] != NOWHERE -> s = slot_of[u]; arm(s)
    :: else
    fi
}

/* ---- calls --------------------------------------------------------------------------------- */

inline prefetch(u) { atomic { bring(u, 0); clear() } }

inline acquire(u) {
    atomic {
        bring(u, 1);
        if
        :: ok -> s = slot_of[u];
                 is_out[u] = 1;
                 holds[s] = holds[s] + 1;
                 state[s] = IN_USE
        /* FULL, unless it was the driver that failed: of what is acquired; and never in a step. */
        :: !ok && s == NOWHERE && !failed -> assert(STEP == 0 && holds[0] > 0 && holds[1] > 0)
        :: else
        fi;
        x = ok;
        acquired[u] = acquired[u] + ok;
        clear()
    }
}

inline release(u) {
    atomic {
        ok = false;
        if
        :: slot_of[u] != NOWHERE && holds[slot_of[u]] > 1 ->
           holds[slot_of[u]] = holds[slot_of[u]] - 1; ok = true
        :: slot_of[u] != NOWHERE && holds[slot_of[u]] == 1 -> s = slot_of[u]; drain(s)
        :: else
        fi;
        x = ok;
        acquired[u] = acquired[u] - ok;
        clear()
    }
}

/* A lease waits for the lane, and its work may come until it ends. */
inline lease(u, stream) {
    atomic {
        s = slot_of[u];
        wait(s, stream, LANE(s));
        if
        :: !failed -> leases[u] = leases[u] | BIT(stream);
                      used_by[u] = used_by[u] | BIT(stream);
                      read(u, stream)
        :: else
        fi;
        clear()
    }
}

inline end_lease(u, stream) {
    atomic {
        read(u, stream);
        leases[u] = leases[u] & ~BIT(stream);
        clear()
    }
}

inline write_shard(u) { atomic { version[u] = 1 - version[u] } }

/* What is of no meaning between two calls would only make more states. */
inline clear() {
    ok = false;
    failed = false;
    s = 0;
    o = 0;
    assert(is_out[0] == (acquired[0] > 0)); /* KEPT */
    assert(is_out[1] == (acquired[1] > 0));
    assert(is_out[2] == (acquired[2] > 0))
}

#define IS_LEASED(u, stream) ((leases[u] & BIT(stream)) != 0)
#define MAY_LEASE(u, stream) (is_out[u] && !IS_LEASED(u, stream))
/* Of a unit that is nowhere it makes no difference. */
#define MAY_WRITE(u) (slot_of[u] != NOWHERE && holds[slot_of[u]] == 0)
#define MAY_HOLD(u) (slot_of[u] == NOWHERE || holds[slot_of[u]] < 2)

inline any_lease(u) {
    if
    :: MAY_LEASE(u, A) -> lease(u, A)
    :: MAY_LEASE(u, B) -> lease(u, B)
    :: IS_LEASED(u, A) -> end_lease(u, A)
    :: IS_LEASED(u, B) -> end_lease(u, B)
    :: true
    fi
}

/* However it came here, all can be ended, and nothing is left. */
inline finish(u) {
    do
    :: IS_LEASED(u, A) -> end_lease(u, A)
    :: IS_LEASED(u, B) -> end_lease(u, B)
    :: !IS_LEASED(u, A) && !IS_LEASED(u, B) && slot_of[u] != NOWHERE &&
       holds[slot_of[u]] > 0 -> release(u)
    :: else -> break
    od;
    atomic {
        do
        :: slot_of[u] != NOWHERE -> s = slot_of[u]; drain(s)
        :: else -> break
        od;
        clear()
    }
}

/* ---- programs ------------------------------------------------------------------------------ */

byte u, back;

init {
    do
    :: STEP == 0 ->
       select(u : 0 .. 2);
       if
       :: prefetch(u)
       :: MAY_HOLD(u) -> acquire(u)
       :: release(u)
       :: any_lease(u)
       :: MAY_WRITE(u) -> write_shard(u)
       fi;
       x = 0
    :: STEP == 1 ->
       x = 0;
       do /* it is full of this and the one before only, which is released */
       :: x == 0 -> acquire(u)
       :: else -> break
       od;
       if
       :: !back && u < 2 -> prefetch(u + 1)
       :: back && u > 0 -> prefetch(u - 1)
       :: else
       fi;
       x = 0;
       do
       :: x == 0 -> any_lease(u); release(u)
       :: else -> break
       od;
       if
       :: !back && u < 2 -> u = u + 1
       :: !back && u == 2 -> back = 1
       :: back && u > 0 -> u = u - 1
       :: back && u == 0 -> back = 0
       fi;
       x = 0
    :: break
    od;
    finish(0);
    finish(1);
    finish(2);
    assert(IS_FREE(0) && IS_FREE(1)); /* EMPTY */
    assert(!is_out[0] && !is_out[1] && !is_out[2])
}
