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

typedef enum tn_report_format {
    TN_REPORT_TEXT = 0, /* words and tables */
    TN_REPORT_JSON      /* one object: docs/formats.md */
} tn_report_format;

/* What the pool is and holds, at one moment: every statistic, how its free memory is cut up, the
 * owners with most bytes, its streams, and the last request that it could not serve. Writes at
 * most text_bytes bytes with the closing 0 to text; returns the bytes that the whole needs,
 * without the 0 (as snprintf does); text may be NULL if text_bytes is 0. A report that is asked
 * for again may need more: allow some room, or ask until it fits. 0 if pool is NULL or the format
 * is unknown. */
TN_API size_t tn_pool_report(tn_pool *pool, tn_report_format format, char *text, size_t text_bytes);

#ifdef __cplusplus
}
#endif
#endif
