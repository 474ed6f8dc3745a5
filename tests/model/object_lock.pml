/* The locks of objects (tensor/object_lock.h) on a machine whose stores are seen late.
 *
 * Each thread's stores wait in a buffer, from which they come to memory at any time, in their order;
 * a load takes the newest one of its own thread's buffer, or what is in memory. A locked instruction
 * and a system call come after what is in the buffer, and membarrier after what is in all of them.
 *
 * Checked in every state: one thread at a time is in; nobody sleeps for ever; a thread that comes
 * the common way is not the one that is favored.
 *
 * PLANTED: 1 no barrier when a favor is taken away, 2 no second look by who is favored, 3 no
 * barrier of a waiter, 4 nobody waits for who is inside.
 */
#ifndef THREADS
#define THREADS 2
#endif
#ifndef ROUNDS
#define ROUNDS 4
#endif
#ifndef PLANTED
#define PLANTED 0
#endif

/* Places in memory. */
#define STATE 0
#define FAVORED 1 /* a thread and 1; 0: none */
#define WAITERS 2
#define INSIDE(t) (3 + (t))

byte memory[3 + THREADS];
byte sleeps_on[THREADS]; /* a place and 1; 0: awake */
byte threads_in = 0;

typedef buffer {
    byte place[4];
    byte value[4];
    byte count
};
buffer stores[THREADS];

#define IS_EMPTY(t) (stores[t].count == 0)
#if THREADS == 2
#define ALL_EMPTY (IS_EMPTY(0) && IS_EMPTY(1))
#else
#define ALL_EMPTY (IS_EMPTY(0) && IS_EMPTY(1) && IS_EMPTY(2))
#endif

inline store(where, what) {
    atomic {
        stores[me].count < 4;
        stores[me].place[stores[me].count] = where;
        stores[me].value[stores[me].count] = what;
        stores[me].count++
    }
}

inline load(where, out) {
    d_step {
        out = memory[where];
        i = 0;
        do
        :: i < stores[me].count ->
            if
            :: stores[me].place[i] == where -> out = stores[me].value[i]
            :: else
            fi;
            i++
        :: else -> break
        od;
        i = 0
    }
}

proctype drain(byte t) {
    byte i;
end:
    do
    :: d_step {
            !IS_EMPTY(t);
            memory[stores[t].place[0]] = stores[t].value[0];
            i = 1;
            do
            :: i < stores[t].count ->
                stores[t].place[i - 1] = stores[t].place[i];
                stores[t].value[i - 1] = stores[t].value[i];
                i++
            :: else -> break
            od;
            stores[t].count--;
            stores[t].place[stores[t].count] = 0;
            stores[t].value[stores[t].count] = 0;
            i = 0
        }
    od
}

/* ---- the system calls ------------------------------------------------------------------------ */

inline sleep_on(where) {
    atomic {
        IS_EMPTY(me);
        if
        :: memory[where] == 1 -> sleeps_on[me] = where + 1
        :: else
        fi
    }
    sleeps_on[me] == 0
}

inline wake_one(where) {
    atomic {
        IS_EMPTY(me);
        i = 0;
        do
        :: i < THREADS && sleeps_on[i] == where + 1 -> sleeps_on[i] = 0; break
        :: i < THREADS && sleeps_on[i] != where + 1 -> i++
        :: i == THREADS -> break
        od;
        i = 0
    }
}

inline barrier() { ALL_EMPTY }

inline add_waiter(change) { atomic { IS_EMPTY(me) -> memory[WAITERS] = memory[WAITERS] + change } }

inline try_state() { atomic { IS_EMPTY(me) && memory[STATE] == 0 -> memory[STATE] = 1 } }

/* ---- the lock ------------------------------------------------------------------------------- */

inline wait_for_state() {
    add_waiter(1);
#if PLANTED != 3
    barrier();
#endif
    do
    :: try_state() -> break
    :: IS_EMPTY(me) && memory[STATE] == 1 -> sleep_on(STATE)
    od;
    add_waiter(-1)
}

inline take_favor_away() {
    assert(favored != me + 1);
    store(FAVORED, 0);
    add_waiter(1);
#if PLANTED != 1
    barrier();
#endif
#if PLANTED != 4
    do
    :: memory[INSIDE(favored - 1)] == 0 -> break
    :: memory[INSIDE(favored - 1)] == 1 -> sleep_on(INSIDE(favored - 1))
    od;
#endif
    add_waiter(-1)
}

inline let_go(where) {
    store(where, 0);
    load(WAITERS, seen);
    if
    :: seen > 0 -> wake_one(where)
    :: else
    fi
}

/* Whom the lock favors after how many times is left open: it may at each. */
proctype thread(byte me) {
    byte round, favored, seen, held, i;
end:
    do
    :: round < ROUNDS ->
        round++;
        load(FAVORED, favored);
        if
        :: favored == me + 1 ->
            store(INSIDE(me), 1);
            load(FAVORED, seen);
            if
            :: seen == favored || PLANTED == 2 ->
                held = INSIDE(me);
                goto in
            :: else -> let_go(INSIDE(me))
            fi
        :: else
        fi;
        if
        :: try_state()
        :: wait_for_state()
        fi;
        load(FAVORED, favored);
        if
        :: favored != 0 -> take_favor_away()
        :: else
        fi;
        held = STATE;
        if
        :: store(FAVORED, me + 1)
        :: skip
        fi;
    in:
        threads_in++;
        assert(threads_in == 1);
        threads_in--;
        let_go(held);
        held = 0;
        favored = 0;
        seen = 0
    :: else -> break
    od
}

init {
    atomic {
        run drain(0);
        run drain(1);
        run thread(0);
        run thread(1);
#if THREADS == 3
        run drain(2);
        run thread(2)
#endif
    }
}
