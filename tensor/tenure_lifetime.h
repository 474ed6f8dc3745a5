/* Tenure: how long planes live, and how tensors change hands.
 *
 * tenure_tensor.h is what every user of tensors needs; this header is what else they can do. The
 * same rules hold: handles with generations, one tensor by one thread at a time, everything in
 * stream order, and a call that fails has changed nothing.
 */
#ifndef TENURE_LIFETIME_H
#define TENURE_LIFETIME_H

#include "tenure_tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- replacing, saving, cloning, viewing --------------------------------------------------- */

/* ---- policies and phases ------------------------------------------------------------------- */

/* ---- saved sets and recomputation ---------------------------------------------------------- */

/* ---- offloading to host memory ------------------------------------------------------------- */

/* ---- foreign memory and DLPack ------------------------------------------------------------- */

/* ---- reports, differences, expectations ---------------------------------------------------- */

#ifdef __cplusplus
}
#endif
#endif
