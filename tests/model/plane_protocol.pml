/* The protocol of a tensor's planes, for the verifier of spin: see docs/plane-model.md.
 *
 *     two threads -- lock of the books -- transitions of one tensor's two planes -- pool of blocks
 *                                             leases, on two streams
 *
 * Each inline has the name and the steps of the function of tensor/ that it stands for; what may
 * fail there fails here too, or does not, both being tried. A call is atomic as far as it holds the
 * lock; a derivation gives it up in the middle. A lease's work is a step of its own, at any time
 * while the lease is open, and any thread may end it.
 *
 * What the device has done is not modelled, only what must have happened before what: `unseen` of a
 * block has the uses on one stream that the other stream's next work does not come after. So
 * nothing is ever right by luck, and the states are finitely many however long a run is.
 *
 * Checked in every state that can be reached:
 *   RACE     work touches a block while other work, not known to be done, may still use it
 *   FREED    work touches a block that its plane no longer has
 *   VALUE    a plane that says VALID does not have the tensor's value
 *   COPY     a call that keeps the tensor loses the last copy of its value
 *   LEDGER   blocks that the pool has given, that planes have, and the count of them: not all equal
 *   LEAK     a block is not free, or a lease is open, when the scope has been closed
 * and that no thread waits for ever (spin's invalid end states).
 *
 * The verifier reads two environment variables: PLANTED, the number of a fault that must be found
 * (below), and FAILURES: 1 if what may fail is to be tried both ways, 2 if that is so of allocations
 * only.
 */
#ifndef LEASES
#define LEASES 2 /* that users have open at once: 1 or 2 */
#endif
#define FROM  (LEASES) /* the derivation's own leases */
#define TO    (LEASES + 1)
#define SLOTS (LEASES + 2)

/* faults that can be planted */
#define NO_WAIT_FOR_WRITE 1
#define NO_WAIT_FOR_READS 2
#define USE_NOT_RECORDED  3
#define DROP_LEASED       4
#define DROP_LAST         5
#define REPLACE_FORGETS   6
#define LOCK_KEPT         7
#define REPLACE_HALF      8
#define SOURCE_KEPT       9

/* Planes 2 and 3 are what a REPLACE lease on 0 and 1 supersedes. Blocks are alike, so each plane
 * has a place for one; what is there while the plane is ABSENT is free. */
#define OLD(at) ((at) + 2)

/* plane states */
#define ABSENT    0
#define ALLOCATED 1
#define VALID     2
#define STALE     3
/* accesses */
#define READ    0
#define WRITE   1
#define UPDATE  2
#define REPLACE 3

#define BIT(x)   (1 << (x))
#define OTHER(x) (1 - (x))
#define ANY      15
#define WRITERS  (BIT(WRITE) | BIT(UPDATE) | BIT(REPLACE))

typedef plane_object {
    unsigned state : 2;
    bit has_write;
    bit write_stream;
    bit write_is_recorded;
    unsigned reads : 2; /* a bit a stream, also below */
    unsigned reads_unrecorded : 2;
    bit has_value /* for the checks: all of the tensor's value is in it */
};

typedef lease_object {
    bit is_open;
    bit plane;
    unsigned access : 2;
    bit stream;
    bit has_made_plane;
    unsigned state_before : 2; /* of a derivation */
    bit stale_made             /* the other plane was VALID and is STALE by this lease */
};

/* `unrecorded`: since the last event that the pool has of the stream; a part of `unseen`. */
typedef pool_block {
    bit is_taken;
    bit home;
    unsigned writes_unseen : 2;
    unsigned reads_unseen : 2;
    unsigned writes_unrecorded : 2;
    unsigned reads_unrecorded : 2
};

byte planted;
bit may_fail;
bit may_lack_memory;
bit is_locked;
bit is_closed;
bit is_alive;
bit is_2d;
bit is_until_last_use;
unsigned ledger : 3; /* blocks that the tensor's planes have */
plane_object planes[4];
lease_object leases[SLOTS];
pool_block blocks[4];

/* Scratch of one atomic step; nothing is kept in it between two. */
hidden byte ok, p, s, a, n, swapped;
hidden byte had_value;

c_code {
\#include "rename_alike.h"
};

/* ---- questions ------------------------------------------------------------------------------- */

#define ON(lease, at, accesses)                                                                    \
    (leases[lease].is_open && leases[lease].plane == (at) &&                                       \
     (BIT(leases[lease].access) & (accesses)))
#define STALES(lease, at)                                                                          \
    (leases[lease].is_open && leases[lease].plane != (at) && leases[lease].stale_made)
#if LEASES == 1
#define IS_LEASED(at, accesses)                                                                    \
    (ON(0, at, accesses) || ON(FROM, at, accesses) || ON(TO, at, accesses))
#define IS_STALED(at) STALES(0, at)
#define HAS_OPEN      (leases[0].is_open)
#define HAS_CLOSED    (!leases[0].is_open)
#else
#define IS_LEASED(at, accesses)                                                                    \
    (ON(0, at, accesses) || ON(1, at, accesses) || ON(FROM, at, accesses) || ON(TO, at, accesses))
#define IS_STALED(at) (STALES(0, at) || STALES(1, at))
#define HAS_OPEN      (leases[0].is_open || leases[1].is_open)
#define HAS_CLOSED    (!leases[0].is_open || !leases[1].is_open)
#endif
#define HAS_VALUE                                                                                  \
    (planes[0].has_value || planes[1].has_value || planes[2].has_value || planes[3].has_value)
#define WHOLE (BIT(WRITE) | BIT(REPLACE))

/* Unless EVERY_REPLACE is defined: one REPLACE lease at a time, of a valid plane. It bounds the
 * number of states. */
#ifdef EVERY_REPLACE
#define MAY_REPLACE(at) 1
#else
#define MAY_REPLACE(at) (planes[at].state == VALID && !IS_LEASED(OTHER(at), BIT(REPLACE)))
#endif

/* The plane that has what is left if the write to plane `at` should be abandoned. */
#define KEPT(at) (planes[OLD(at)].state != ABSENT -> OLD(at) : (at))


/* VALID, or STALE only by a write that may yet be abandoned, and no other plane is VALID. */
#define IS_LAST_COPY(at)                                                                           \
    ((planes[at].state == VALID || (planes[at].state == STALE && IS_STALED(at))) &&                \
     planes[OTHER(at)].state != VALID && planes[OLD(OTHER(at))].state != VALID)

/* ---- the pool: what its header promises ------------------------------------------------------ */

inline see_one(which, via) {
    blocks[which].writes_unseen = blocks[which].writes_unseen & BIT(via);
    blocks[which].reads_unseen = blocks[which].reads_unseen & BIT(via);
    blocks[which].writes_unrecorded = blocks[which].writes_unrecorded & BIT(via);
    blocks[which].reads_unrecorded = blocks[which].reads_unrecorded & BIT(via)
}

/* Work on the stream comes after what the other stream has got so far. */
inline see_all(via) {
    see_one(0, via);
    see_one(1, via);
    see_one(2, via);
    see_one(3, via)
}

inline touch(which, via, is_write) {
    assert(blocks[which].is_taken);                                          /* FREED */
    assert(!(blocks[which].writes_unseen & BIT(OTHER(via))));                /* RACE */
    assert(!(is_write) || !(blocks[which].reads_unseen & BIT(OTHER(via)))); /* RACE */
    if
    :: is_write ->
        blocks[which].writes_unseen = blocks[which].writes_unseen | BIT(via);
        blocks[which].writes_unrecorded = blocks[which].writes_unrecorded | BIT(via)
    :: else ->
        blocks[which].reads_unseen = blocks[which].reads_unseen | BIT(via);
        blocks[which].reads_unrecorded = blocks[which].reads_unrecorded | BIT(via)
    fi
}

inline forget_unrecorded(which, via) {
    blocks[which].writes_unrecorded = blocks[which].writes_unrecorded & ~BIT(via);
    blocks[which].reads_unrecorded = blocks[which].reads_unrecorded & ~BIT(via)
}

/* tn_record_use; sets ok */
inline pool_record_use(which, via) {
    if
    :: may_fail -> ok = 0
    :: ok = 1; forget_unrecorded(which, via)
    fi
}

#define SWAP(x, y, field) swapped = x.field; x.field = y.field; y.field = swapped

inline swap_blocks(x, y) {
    SWAP(blocks[x], blocks[y], is_taken);
    SWAP(blocks[x], blocks[y], home);
    SWAP(blocks[x], blocks[y], writes_unseen);
    SWAP(blocks[x], blocks[y], reads_unseen);
    SWAP(blocks[x], blocks[y], writes_unrecorded);
    SWAP(blocks[x], blocks[y], reads_unrecorded)
}

/* tn_alloc, for a place whose block is free: any free block, behind the uses of it that the pool
 * knows of. Sets ok. */
inline pool_alloc(at, via) {
    if
    :: may_lack_memory -> ok = 0
    :: ok = 1
    :: !blocks[0].is_taken && at != 0 -> ok = 1; swap_blocks(at, 0)
    :: !blocks[1].is_taken && at != 1 -> ok = 1; swap_blocks(at, 1)
    :: !blocks[2].is_taken && at != 2 -> ok = 1; swap_blocks(at, 2)
    :: !blocks[3].is_taken && at != 3 -> ok = 1; swap_blocks(at, 3)
    fi;
    if
    :: ok ->
        assert(!blocks[at].is_taken);
        blocks[at].is_taken = 1;
        blocks[at].home = via;
        blocks[at].writes_unseen = blocks[at].writes_unseen & BIT(via);
        ledger++
    :: else -> skip
    fi
}

/* tn_free of an announced block: does not fail. What the pool does not know of, it will not wait
 * for when it gives the block away. */
inline pool_free(which, via) {
    assert(blocks[which].is_taken);
    forget_unrecorded(which, via);
    forget_unrecorded(which, blocks[which].home);
    assert(!blocks[which].writes_unrecorded && !blocks[which].reads_unrecorded); /* RACE */
    blocks[which].writes_unseen = blocks[which].writes_unseen | blocks[which].reads_unseen;
    blocks[which].reads_unseen = 0;
    blocks[which].is_taken = 0;
    blocks[which].home = 0;
    ledger--
}

/* ---- plane_order.c --------------------------------------------------------------------------- */

/* tn_stream_wait; sets ok */
inline wait_for(via, used) {
    if
    :: via == (used) -> ok = 1
    :: via != (used) && may_fail -> ok = 0
    :: via != (used) -> ok = 1; see_all(via)
    fi
}

/* sets ok */
inline plane_order_before(at, how, via) {
    ok = 1;
    if
    :: how == READ && (planes[at].reads & BIT(via)) -> skip
    :: else ->
        if
        :: planted != NO_WAIT_FOR_WRITE && planes[at].has_write &&
           (how == READ || planes[at].reads == 0) ->
            wait_for(via, planes[at].write_stream)
        :: else -> skip
        fi;
        if
        :: planted != NO_WAIT_FOR_READS && ok && how != READ &&
           (planes[at].reads & BIT(OTHER(via))) ->
            wait_for(via, OTHER(via))
        :: else -> skip
        fi
    fi
}

inline plane_order_note(at, how, via) {
    if
    :: how != READ ->
        planes[at].has_write = 1;
        planes[at].write_stream = via;
        planes[at].write_is_recorded = 1;
        planes[at].reads = 0;
        planes[at].reads_unrecorded = 0
    :: else -> planes[at].reads = planes[at].reads | BIT(via)
    fi
}

/* sets ok */
inline plane_order_record(which, via) {
    if
    :: via == blocks[which].home -> ok = 1
    :: else -> pool_record_use(which, via)
    fi
}

inline plane_order_mark_unrecorded(at, via) {
    planes[at].reads_unrecorded = planes[at].reads_unrecorded | (planes[at].reads & BIT(via));
    if
    :: planes[at].has_write && planes[at].write_stream == via -> planes[at].write_is_recorded = 0
    :: else -> skip
    fi
}

/* sets ok */
inline plane_order_record_rest(at, via) {
    ok = 1;
    if
    :: planes[at].has_write && !planes[at].write_is_recorded && planes[at].write_stream != via ->
        plane_order_record(at, planes[at].write_stream);
        planes[at].write_is_recorded = ok
    :: else -> skip
    fi;
    if
    :: ok && (planes[at].reads_unrecorded & BIT(OTHER(via))) ->
        plane_order_record(at, OTHER(via));
        if
        :: ok -> planes[at].reads_unrecorded = planes[at].reads_unrecorded & BIT(via)
        :: else -> skip
        fi
    :: else -> skip
    fi
}

/* ---- plane_memory.c -------------------------------------------------------------------------- */

/* sets ok */
inline announce_free(at, via) {
    ok = 1;
    if
    :: planes[at].state != ABSENT ->
        plane_order_record_rest(at, via);
        if
        :: ok -> pool_record_use(at, via)
        :: else -> skip
        fi
    :: else -> skip
    fi
}

inline forget_plane(at) {
    planes[at].state = ABSENT;
    planes[at].has_write = 0;
    planes[at].write_stream = 0;
    planes[at].write_is_recorded = 0;
    planes[at].reads = 0;
    planes[at].reads_unrecorded = 0;
    planes[at].has_value = 0
}

inline free_announced(at, via) {
    if
    :: planes[at].state != ABSENT -> pool_free(at, via)
    :: else -> skip
    fi;
    forget_plane(at)
}

/* sets ok */
inline free_plane(at, via) {
    announce_free(at, via);
    if
    :: ok -> free_announced(at, via)
    :: else -> skip
    fi
}

/* ---- plane_transition.c ---------------------------------------------------------------------- */

/* sets ok */
inline transition_make(at, via) {
    ok = 1;
    if
    :: planes[at].state == ABSENT ->
        pool_alloc(at, via);
        if
        :: ok ->
            planes[at].state = ALLOCATED;
            plane_order_note(at, WRITE, via)
        :: else -> skip
        fi
    :: else -> skip
    fi
}

inline swap_planes(x, y) {
    SWAP(planes[x], planes[y], state);
    SWAP(planes[x], planes[y], has_write);
    SWAP(planes[x], planes[y], write_stream);
    SWAP(planes[x], planes[y], write_is_recorded);
    SWAP(planes[x], planes[y], reads);
    SWAP(planes[x], planes[y], reads_unrecorded);
    SWAP(planes[x], planes[y], has_value);
    swap_blocks(x, y)
}

/* Sets ok */
inline replace_memory(at, via) {
    plane_order_before(at, READ, via);
    if
    :: ok -> pool_alloc(OLD(at), via)
    :: else -> skip
    fi;
    if
    :: ok -> plane_order_note(at, READ, via); swap_planes(at, OLD(at))
    :: !ok && planted == REPLACE_HALF -> planes[at].state = ALLOCATED; planes[at].has_value = 0
    :: else -> skip
    fi
}

inline clear_lease(lease) {
    leases[lease].is_open = 0;
    leases[lease].plane = 0;
    leases[lease].access = READ;
    leases[lease].stream = 0;
    leases[lease].has_made_plane = 0;
    leases[lease].state_before = ABSENT;
    leases[lease].stale_made = 0
}

inline let_in(lease, at, how, via) {
    plane_order_note(at, how, via);
    leases[lease].is_open = 1;
    leases[lease].plane = at;
    leases[lease].access = how;
    leases[lease].stream = via;
    assert(how != READ || planes[at].has_value); /* VALUE */
    if
    :: how != READ ->
        planes[at].state = ALLOCATED;
        planes[at].has_value = 0;
        if
        :: lease != TO && planes[KEPT(OTHER(at))].state == VALID ->
            planes[KEPT(OTHER(at))].state = STALE;
            leases[lease].stale_made = 1
        :: else -> skip
        fi
    :: else -> skip
    fi
}

/* sets ok */
inline transition_begin(lease, at, how, via) {
    ok = 0;
    if
    :: how == READ && !IS_LEASED(at, WRITERS) -> ok = 1
    :: how != READ && !IS_LEASED(at, ANY) &&
       (lease == TO || !IS_LEASED(OTHER(at), ANY & ~WHOLE)) ->
        ok = how != REPLACE || MAY_REPLACE(at)
    :: else -> skip
    fi;
    ok = ok && ((BIT(how) & WHOLE) || planes[at].state == VALID);
    if
    :: ok ->
        leases[lease].has_made_plane = planes[at].state == ABSENT;
        if
        :: lease == TO -> leases[lease].state_before = planes[at].state
        :: else -> skip
        fi;
        if
        :: planes[at].state == ABSENT -> transition_make(at, via)
        :: planes[at].state != ABSENT && how == REPLACE -> replace_memory(at, via)
        :: else -> plane_order_before(at, how, via)
        fi;
        if
        :: ok -> let_in(lease, at, how, via)
        :: else -> clear_lease(lease)
        fi
    :: else -> skip
    fi
}

/* Under UNTIL_LAST_USE, the other plane if it is stale. Sets ok. */
inline free_stale(at, via) {
    ok = 1;
    if
    :: is_until_last_use && is_2d && planes[OTHER(at)].state == STALE -> free_plane(OTHER(at), via)
    :: else -> skip
    fi
}

/* What the write makes superfluous. Once the old memory is gone there is no way back: a stale plane
 * that can not be freed then stays. Sets ok. */
inline free_superseded(at, via) {
    if
    :: planes[OLD(at)].state == ABSENT -> free_stale(at, via)
    :: planes[OLD(at)].state != ABSENT && planted == REPLACE_FORGETS ->
        forget_plane(OLD(at));
        ok = 1
    :: else ->
        free_plane(OLD(at), via);
        if
        :: ok -> free_stale(at, via); ok = 1
        :: else -> skip
        fi
    fi
}

/* sets ok; a failure leaves the lease open */
inline end_lease(lease, at) {
    if
    :: planted == USE_NOT_RECORDED -> ok = 1
    :: else -> plane_order_record(at, leases[lease].stream)
    fi;
    if
    :: ok && leases[lease].access != READ && lease != TO ->
        free_superseded(at, leases[lease].stream)
    :: else -> skip
    fi;
    if
    :: ok && leases[lease].access != READ ->
        planes[at].state = VALID;
        planes[at].has_value = 1;
        if
        :: planes[OTHER(at)].state != VALID -> planes[OTHER(at)].has_value = 0
        :: else -> skip
        fi;
        if
        :: planes[OLD(OTHER(at))].state != VALID -> planes[OLD(OTHER(at))].has_value = 0
        :: else -> skip
        fi
    :: else -> skip
    fi;
    if
    :: ok -> clear_lease(lease)
    :: else -> skip
    fi
}

inline transition_end(lease) {
    if
    :: leases[lease].plane == 0 -> end_lease(lease, 0)
    :: else -> end_lease(lease, 1)
    fi
}

inline give_up_write(lease, at) {
    planes[at].state = ALLOCATED;
    if
    :: lease == TO && !leases[lease].has_made_plane ->
        planes[at].state = leases[lease].state_before
    :: else -> skip
    fi;
    if
    :: leases[lease].has_made_plane -> free_plane(at, leases[lease].stream)
    :: else -> skip
    fi
}

/* The plane has its old memory again, if that was replaced. The new one goes back on the stream
 * that it was allocated on, of which the pool need not be told. */
inline abandon_lease(lease, at) {
    had_value = planes[OLD(at)].state != ABSENT;
    if
    :: had_value -> swap_planes(at, OLD(at))
    :: else -> skip
    fi;
    plane_order_record(at, leases[lease].stream);
    if
    :: !ok -> plane_order_mark_unrecorded(at, leases[lease].stream)
    :: else -> skip
    fi;
    leases[lease].is_open = 0;
    if
    :: had_value -> free_announced(OLD(at), leases[lease].stream)
    :: !had_value && leases[lease].access != READ -> give_up_write(lease, at)
    :: else -> skip
    fi;
    if
    :: leases[lease].stale_made && planes[KEPT(OTHER(at))].state == STALE ->
        planes[KEPT(OTHER(at))].state = VALID
    :: else -> skip
    fi;
    clear_lease(lease)
}

inline transition_abandon(lease) {
    if
    :: leases[lease].plane == 0 -> abandon_lease(lease, 0)
    :: else -> abandon_lease(lease, 1)
    fi
}

/* ---- calls ----------------------------------------------------------------------------------- */

inline assert_plane(at) {
    assert(planes[at].state != VALID || planes[at].has_value);        /* VALUE */
    assert(blocks[at].is_taken == (planes[at].state != ABSENT)); /* LEDGER */
}

/* And what every call must leave behind. */
inline unlock() {
    assert_plane(0);
    assert_plane(1);
    assert_plane(2);
    assert_plane(3);
    assert(ledger == blocks[0].is_taken + blocks[1].is_taken + blocks[2].is_taken +
                     blocks[3].is_taken); /* LEDGER */
    assert(leases[FROM].is_open == leases[TO].is_open); /* LEAK */
    assert(planes[2].state == ABSENT || IS_LEASED(0, BIT(REPLACE)));
    assert(planes[3].state == ABSENT || IS_LEASED(1, BIT(REPLACE)));
    c_code { rename_alike(); };
    is_locked = 0
}

inline lock_if(condition) {
    !is_locked && (condition);
    is_locked = 1
}

inline pick(out) {
    if
    :: out = 0
    :: out = 1
    fi
}

/* Sets n to the first lease that is closed: there is one. */
inline pick_closed() {
    n = 0;
    do
    :: leases[n].is_open -> n++
    :: else -> break
    od
}

inline pick_open() {
    if
    :: leases[0].is_open -> n = 0
#if LEASES > 1
    :: leases[1].is_open -> n = 1
#endif
    fi
}

/* tn_lease_begin, but for a READ of a plane that is to be derived */
inline call_begin() {
    lock_if(is_alive && HAS_CLOSED);
    pick_closed();
    pick(p);
    pick(s);
    if
    :: a = READ
    :: a = WRITE
    :: a = UPDATE
    :: a = REPLACE
    fi;
    had_value = HAS_VALUE;
    transition_begin(n, p, a, s);
    assert(ok || !had_value || HAS_VALUE); /* COPY */
    if
    :: !ok && planted == LOCK_KEPT -> goto stop
    :: else -> skip
    fi;
    unlock()
}

inline call_end() {
    lock_if(HAS_OPEN);
    pick_open();
    transition_end(n);
    unlock()
}

inline call_abandon() {
    lock_if(HAS_OPEN);
    pick_open();
    transition_abandon(n);
    unlock()
}

inline call_make() {
    lock_if(is_alive);
    pick(p);
    pick(s);
    transition_make(p, s);
    unlock()
}

#define MAY_FREE(at) (!IS_LEASED(at, ANY) || planted == DROP_LEASED)
#define MAY_LOSE(at) (!IS_LAST_COPY(at) || planted == DROP_LAST)

/* tn_plane_drop, and tn_plane_release of a frozen tensor */
inline call_drop(is_allowed) {
    lock_if(is_alive);
    pick(p);
    pick(s);
    had_value = HAS_VALUE;
    if
    :: MAY_FREE(p) && (is_allowed) -> free_plane(p, s)
    :: else -> skip
    fi;
    assert(!had_value || HAS_VALUE); /* COPY */
    unlock()
}

/* tn_tensor_destroy and tn_scope_close: all planes, each on a stream of its own if that is the last
 * that used it; here on any, which says more. */
inline call_destroy(is_close) {
    lock_if((is_alive || is_close) && !IS_LEASED(0, ANY) && !IS_LEASED(1, ANY));
    pick(p);
    pick(s);
    announce_free(0, p);
    if
    :: ok -> announce_free(1, s)
    :: else -> skip
    fi;
    if
    :: ok ->
        free_announced(0, p);
        free_announced(1, s);
        is_alive = 0;
        is_2d = 0;
        is_until_last_use = 0;
        is_closed = is_close;
        assert(!blocks[0].is_taken && !blocks[1].is_taken && !blocks[2].is_taken &&
               !blocks[3].is_taken); /* LEAK */
        assert(ledger == 0)          /* LEAK */
    :: else -> skip
    fi;
    unlock()
}

inline call_create() {
    lock_if(!is_closed && !is_alive);
    if
    :: is_2d = 0
    :: is_2d = 1
    :: is_2d = 1; is_until_last_use = 1
    fi;
    is_alive = 1;
    unlock()
}

/* The work of an open lease, on its stream; that of a REPLACE reads the old buffer, too. */
inline work() {
    HAS_OPEN;
    pick_open();
    touch(leases[n].plane, leases[n].stream, leases[n].access != READ);
    if
    :: planes[OLD(leases[n].plane)].state != ABSENT && leases[n].access == REPLACE ->
        touch(OLD(leases[n].plane), leases[n].stream, 0)
    :: else -> skip
    fi
}

/* tn__transition_derive up to where the lock is given up. Sets ok if there is work to do. */
inline derive_begin() {
    lock_if(is_alive && is_2d && !IS_LEASED(0, WRITERS) && !IS_LEASED(1, WRITERS) &&
            (planes[0].state == VALID) != (planes[1].state == VALID));
    p = planes[0].state == VALID;
    pick(s);
    transition_begin(FROM, OTHER(p), READ, s);
    if
    :: ok ->
        transition_begin(TO, p, WRITE, s);
        if
        :: !ok && planted != SOURCE_KEPT -> transition_abandon(FROM); ok = 0
        :: else -> skip
        fi
    :: else -> skip
    fi;
    unlock()
}

/* Sets ok if the plane has been derived, and p and s to the plane and the stream. */
inline derive_end(is_done) {
    lock_if(1);
    p = leases[TO].plane;
    s = leases[TO].stream;
    ok = is_done;
    if
    :: ok -> assert(planes[OTHER(p)].has_value); transition_end(TO) /* VALUE */
    :: else -> skip
    fi;
    if
    :: leases[TO].is_open -> transition_abandon(TO)
    :: else -> skip
    fi;
    transition_abandon(FROM);
    assert(planes[OTHER(p)].has_value) /* COPY */
}

/* ---- the threads ----------------------------------------------------------------------------- */

/* tn_plane_require; or tn_lease_begin, which then lets its lease in. */
inline derive() {
    atomic {
        derive_begin();
        if
        :: ok -> skip
        :: else -> goto next
        fi
    };
    atomic {
        touch(leases[FROM].plane, leases[FROM].stream, 0);
        touch(leases[TO].plane, leases[TO].stream, 1)
    };
    atomic {
        if
        :: derive_end(1)
        :: derive_end(0)
        fi;
        if
        :: planes[p].state == VALID && HAS_CLOSED -> pick_closed(); transition_begin(n, p, READ, s)
        :: skip
        fi;
        unlock()
    }
}

proctype thread() {
next:
    do
    :: derive()
    :: atomic { call_begin() }
    :: atomic { work() }
    :: atomic { call_end() }
    :: atomic { call_abandon() }
    :: atomic { call_make() }
    :: atomic { call_drop(MAY_LOSE(p)) }
    :: atomic { call_drop(is_until_last_use && is_2d && planes[OTHER(p)].state == VALID) }
    :: atomic { call_destroy(0) }
    :: atomic { call_destroy(1) }
    :: atomic { call_create() }
    :: is_closed -> break
    od;
stop:
    skip
}

init {
    atomic {
        c_code {
            now.planted = number_from("PLANTED");
            now.may_fail = number_from("FAILURES") == 1;
            now.may_lack_memory = number_from("FAILURES") > 0;
        };
        run thread();
        run thread()
    }
}
