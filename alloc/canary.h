/* Faults planted on purpose, to see that the simulation finds them: a build with -DTENURE_CANARY=n
 * leaves out the one wait or check of that number. Every other build has all of them, and no trace
 * of this.
 * cmake/simulation.cmake builds the variants; each must be found within 10^6 operations.
 */
#ifndef TENURE_CANARY_H
#define TENURE_CANARY_H

#define TN__CANARY_DEVICE_WAIT  1 /* memory goes to another stream without a wait for its uses */
#define TN__CANARY_UNMAP        2 /* memory is unmapped while work may use it through the address */
#define TN__CANARY_RECORDED_USE 3 /* a recorded use is forgotten */
#define TN__CANARY_CACHE        4 /* a thread's cache keeps what another stream has freed */
#define TN__CANARY_USER_WAIT    5 /* a user's wait is taken to cover what was put there after it */

#define TN__CANARY_PLANE_WAIT      11 /* a lease does not wait for uses on other streams */
#define TN__CANARY_PLANE_USE       12 /* the pool is not told of a lease's use */
#define TN__CANARY_PLANE_LAST_COPY 13 /* the last copy of a tensor's contents can be dropped */
#define TN__CANARY_PLANE_REPLACED  14 /* the memory that a REPLACE leaves is forgotten */
#define TN__CANARY_PLANE_SLOT      15 /* a derivation does not wait for who used the slot before */
#define TN__CANARY_PLANE_FETCHED   16 /* the copy that fetched a plane is not waited for */
#define TN__CANARY_PLANE_KEPT      17 /* a plane that is dropped stays on a budget's account */

#define TN__CANARY_RING_REUSE    21 /* a gather does not wait for who used the place before */
#define TN__CANARY_RING_GATHER   22 /* a unit's users do not wait for its gather */
#define TN__CANARY_RING_OUTDATED 23 /* what was gathered before its shard was written passes */

#ifdef TENURE_CANARY
#define TN__CANARY(fault) (TENURE_CANARY == (fault))
#else
#define TN__CANARY(fault) 0
#endif

#endif
