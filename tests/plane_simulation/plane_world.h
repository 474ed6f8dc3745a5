/* The real tensors beside a model: operations on both, and what must hold after each.
 *
 * One simulated device, one pool, two streams, a root scope with two scopes in it; and a pool whose
 * blocks are memory of others, lent for planes. Under each lease a kernel is put on its stream that
 * reads or writes all that the lease gives, and owners write what they lend before and after, so
 * that a missing wait is a race.
 */
#ifndef TENURE_PLANE_WORLD_H
#define TENURE_PLANE_WORLD_H

#include "plane_model_parts.h"
#include "simcuda.h"

enum { WORLD_PATH_MAX = 32, WORLD_LOANS = 16, WORLD_TEXT = 160 };

typedef struct plane_driver {
    int (*configure)(const tnsim_config *config);
    int (*fault)(const char *call, long nth, int and_after, int code);
    uint64_t (*call_count)(const char *call);
    uint64_t (*race_count)(void);
    const char *(*race_text)(uint64_t index);
    int (*leftovers)(char *text, size_t text_bytes);
} plane_driver;

typedef struct plane_fault {
    int is_host; /* of host memory, else of the driver */
    int and_after;
    long nth;
} plane_fault;

typedef struct plane_world plane_world;

/* A block of others' that is a plane's memory; NULL: none. */
typedef struct world_loan {
    plane_world *w;
    void *block;
    size_t bytes, data_bytes, scale_offset, scale_bytes;
    int stream; /* of the owner, */
    uint64_t generation;
} world_loan;

struct plane_world {
    plane_driver driver;
    tn_device *device;
    tn_pool *pool, *others;
    tn_stream streams[MODEL_STREAMS];
    uint64_t generations[MODEL_STREAMS]; /* how often each was made anew */
    tn_scope root, scopes[2];            /* both in the root; tensors begin in the first */
    tn_tensor tensors[MODEL_TENSORS + 1];
    tn_lease leases[MODEL_LEASES];
    world_loan loans[WORLD_LOANS];
    int lent;
    model m;
    uint64_t steps, races;
    model_operation path[WORLD_PATH_MAX]; /* the last steps, for the report of a failure */
    int path_length;
    plane_fault fault;
    int is_armed;
    size_t remains; /* memory that could not be given back when a call failed: the ledger's still */
    uint64_t calls; /* of the driver, under the fault */
    char label[96]; /* how to run it again */
};

/* ---- plane_world.c --------------------------------------------------------------------------- */

extern const tn_plane world_planes[MODEL_PLANES];

/* Opens the device on the library, or with NULL on that of the build. */
void plane_world_open(plane_world *w, const char *library);

/* Ends everything; fails unless all is given back. */
void plane_world_close(plane_world *w);

/* Tensors without planes, of the format and policy. */
void plane_world_begin(plane_world *w, tn_format format, tn_plane_policy policy);
tn_tensor_config plane_world_tensor_config(const plane_world *w, int tensor);

/* Ends leases and tensors; fails unless the scope is then at 0 bytes. */
void plane_world_end(plane_world *w);

/* So that work does not pile up on the simulated streams. */
void plane_world_synchronize(const plane_world *w);

/* Memory of others for a plane, and what tells of it; its owner has it again when it is released,
 * or takes it back if it was not adopted. */
world_loan *plane_world_lend(plane_world *w, int plane, int stream);
tn_foreign_memory plane_world_memory_of(const plane_world *w, world_loan *loan, int plane);
void plane_world_take_back(world_loan *loan);

/* What can be seen of all planes, from outside. */
typedef struct world_sight {
    unsigned char states[MODEL_TENSORS + 1][MODEL_PLANES];
    size_t slot_bytes, kept_bytes, budget_bytes;
    tn_ledger ledger;
} world_sight;

void plane_world_see(const plane_world *w, const model *m, world_sight *sight);

/* 1 if that is what the model says, but for at most so many bytes that remain; else text says what
 * differs. */
int plane_world_agrees(const world_sight *sight, const model *m, size_t remains, char *text);

/* What must hold whatever the model says: books, loans, races. */
void plane_world_check(const plane_world *w, const world_sight *sight);

_Noreturn void plane_world_fail(const plane_world *w, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#define EXPECT_OK(w, call)                                                                         \
    do {                                                                                           \
        if ((call) != TN_OK) plane_world_fail((w), "%s: %s", #call, tn_error_last());              \
    } while (0)

/* ---- plane_world_steps.c --------------------------------------------------------------------- */

/* Does the operation on both sides; fails unless they agree on status, states and bytes. */
void plane_world_step(plane_world *w, model_operation operation);

/* The same under a fault. 1 if it was met; a failure must have changed nothing. */
int plane_world_step_faulted(plane_world *w, model_operation operation, plane_fault fault);

/* Ends the fault: the call is over. */
void plane_world_disarm(plane_world *w);

#endif
