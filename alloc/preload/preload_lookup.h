/* What the files of libtenure-preload share. */
#ifndef TENURE_PRELOAD_LOOKUP_H
#define TENURE_PRELOAD_LOOKUP_H

#include "dropin_calls.h"

typedef void *tn__dlsym_function(void *handle, const char *name);

/* The next dlsym after ours: the C library's, or that of a library preloaded after this one. */
tn__dlsym_function *tn__preload_dlsym(void);

/* The driver that the process has loaded; NULL: none. Leaves dlerror as if nothing had failed. */
void *tn__preload_driver(void);

/* The driver's own function of that name, or a later preloaded library's; NULL: there is none. */
void *tn__preload_find(const char *name);

/* The address that programs get for the call in place of `found`, the driver's own, from which on
 * that is what the drop-in passes on to. */
void *tn__preload_take(int call, void *found);

/* The number of the call with that exported name; -1: it is not taken over. */
int tn__preload_number(const char *name);

/* The same for what cuGetProcAddress was asked. */
int tn__preload_number_of(const char *base, int version, uint64_t flags);

/* What the exported cuGetProcAddress and cuGetProcAddress_v2 are; is_newer: the second. */
void *tn__preload_entry(int is_newer);

/* 1 if nothing is taken over: TENURE_DISABLE=1, or this thread is in the drop-in's own code. */
int tn__preload_stands_aside(void);

#endif
