/* The real tensors beside a model: operations on both, and what must hold after each.
 *
 * One simulated device, one pool, two streams, a root scope with two scopes in it. Under each lease
 * a kernel is put on its stream that reads or writes all that the lease gives, so that a missing
 * wait is a race.
 */
#ifndef TENURE_PLANE_WORLD_H
#define TENURE_PLANE_WORLD_H

#include "plane_model.h"
#include "simcuda.h"

enum { WORLD_PATH_MAX = 32 };

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

typedef struct plane_world {
    plane_driver driver;
    tn_device *device;
    tn_pool *pool;
    tn_stream streams[MODEL_STREAMS];
    tn_scope root, scopes[2]; /* both in the root; tensors begin in the first */
    tn_tensor tensors[MODEL_TENSORS];
    tn_lease leases[MODEL_LEASES];
    model m;
    uint64_t steps, races;
    model_operation path[WORLD_PATH_MAX]; /* the last steps, for the report of a failure */
    int path_length;
    plane_fault fault;
    int is_armed;
    uint64_t calls; /* of the driver, under the fault */
    char label[96]; /* how to run it again */
} plane_world;

/* Opens the device on the library, or with NULL on that of the build. */
void plane_world_open(plane_world *w, const char *library);

/* Ends everything; fails unless all is given back. */
void plane_world_close(plane_world *w);

/* Tensors without planes, of the format and policy. */
void plane_world_begin(plane_world *w, tn_format format, tn_plane_policy policy);

/* Ends leases and tensors; fails unless the scope is then at 0 bytes. */
void plane_world_end(plane_world *w);

/* So that work does not pile up on the simulated streams. */
void plane_world_synchronize(const plane_world *w);

/* Does the operation on both sides; fails unless they agree on status, states and bytes. */
void plane_world_step(plane_world *w, model_operation operation);

/* The same under a fault. 1 if it was met; a failure must have changed nothing. */
int plane_world_step_faulted(plane_world *w, model_operation operation, plane_fault fault);

_Noreturn void plane_world_fail(const plane_world *w, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
