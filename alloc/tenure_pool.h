/* Tenure: what a pool can do beyond giving out blocks (tenure_alloc.h has that).
 *
 *     limits and shortage   how much may be held, and what happens when that is not enough
 *     graph pools           memory of captured CUDA graphs
 *     pause and resume      a pool's physical memory given back and taken again
 *     sharing               peers, and other processes
 *     insight               reports, leaks, events, the map of a pool
 *
 * The rules of tenure_alloc.h hold here too: sizes in bytes, times in microseconds, thread-safe
 * unless a function says otherwise, and a call that fails leaves all state as it was.
 */
#ifndef TENURE_POOL_H
#define TENURE_POOL_H

#include "tenure_alloc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- limits and shortage ------------------------------------------------------------------ */

/* ---- graph pools -------------------------------------------------------------------------- */

/* ---- pause and resume --------------------------------------------------------------------- */

/* ---- sharing ------------------------------------------------------------------------------ */

/* ---- insight ------------------------------------------------------------------------------ */

#ifdef __cplusplus
}
#endif
#endif
