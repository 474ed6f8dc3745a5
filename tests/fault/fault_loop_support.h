/* The loop of the fault batteries: the N-th driver call or host allocation of a call fails, for
 * every N there is, each time in a scenario that is set up anew.
 */
#ifndef TENURE_FAULT_LOOP_SUPPORT_H
#define TENURE_FAULT_LOOP_SUPPORT_H

#include <stddef.h>

typedef struct fault_point {
    int is_host;    /* host allocations fail, else calls of the simulated driver */
    int and_after;  /* and all later ones, too */
    int code;       /* what the driver's calls give */
    long nth;       /* set by fault_each */
    int is_reached; /* set by fault_end: there was such a call; host: there may be a later one */
    unsigned long long calls_before;
} fault_point;

/* Around the call that is to fail. */
void fault_begin(fault_point *fault);
void fault_end(fault_point *fault);

/* Runs the scenario with N = 1, 2, ... as long as there is an N-th: 1 if its call failed. The count
 * of those. */
int fault_each(fault_point fault, int (*run)(const void *scenario, fault_point *fault),
               const void *scenario);

/* A battery's scenarios begin with this. */
typedef struct fault_scenario {
    const char *name;
    int least_faults;      /* at least so many N of driver calls make the run fail */
    int least_host_faults; /* the same for host allocations */
} fault_scenario;

/* Each of them with each N, failing once and from then on. */
void fault_everywhere(int is_host, int code, int (*run)(const void *scenario, fault_point *fault),
                      const void *scenarios, size_t each_bytes, size_t count);

#endif
