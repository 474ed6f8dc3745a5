/* What happens to the simulated driver as a whole: load, configure, fork, exit, unload. */
#ifndef TENURE_SIM_LIFECYCLE_H
#define TENURE_SIM_LIFECYCLE_H

#include "sim_core.h"

/* 1 once exit() has begun, or the library is being unloaded. */
int tn__sim_is_exiting(void);

/* Text that grows line by line in a buffer of the caller; cut, never overrun. */
typedef struct sim_report {
    char *text; /* NULL: nothing is written */
    size_t bytes;
    size_t used;
} sim_report;

void tn__sim_report_line(sim_report *report, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
