/* Tenure: how ranks that were started by anything find each other.
 *
 *     tn_rendezvous *ranks;
 *     tn_rendezvous_config how = TN_RENDEZVOUS_CONFIG_INIT;     (torchrun's environment)
 *     if (tn_rendezvous_create(&how, &ranks) != TN_OK) puts(tn_error_last());
 *     config.rendezvous = ranks;
 *     tn_comm_create(&config, &comm);       (host device: TCP; GPU: NCCL, whose id it passes on)
 *     ...
 *     tn_comm_destroy(comm);
 *     tn_rendezvous_destroy(ranks);
 *
 * Rank 0 serves a small store of its own on a TCP port, to which the others connect. Who does not
 * come, who dies and who is of another job is told by rank within the timeout. The port is not
 * MASTER_PORT, which under torchrun is its agent's (TORCHELASTIC_USE_AGENT_STORE=True) and
 * otherwise torch.distributed's: it is the one after it, or what TENURE_RENDEZVOUS_PORT says. The
 * port is open to whoever reaches the machine: what does not talk like a rank of this job is
 * closed, but that is no protection against somebody who wants in.
 *
 * Or the program brings a function that gathers from all ranks (over MPI, files, anything).
 *
 * From the environment come rank and count (RANK and WORLD_SIZE; or, where those are not set, what
 * all of OMPI_COMM_WORLD_RANK/_SIZE, PMI_RANK/PMI_SIZE and SLURM_PROCID/SLURM_NTASKS that are set
 * agree on), LOCAL_RANK (or OMPI_COMM_WORLD_LOCAL_RANK, SLURM_LOCALID), MASTER_ADDR, MASTER_PORT,
 * and the job's name (TORCHELASTIC_RUN_ID, SLURM_JOB_ID).
 *
 * Threads: any; the calls of one rendezvous take turns, in the same order on all ranks.
 */
#ifndef TENURE_RENDEZVOUS_H
#define TENURE_RENDEZVOUS_H

#include "tenure_dist.h"

#ifdef __cplusplus
extern "C" {
#endif

/* all = the `bytes` of every rank in the order of ranks. 0, or what it failed with. Must end within
 * bounded time on all ranks: nothing here can end it. */
typedef int (*tn_rendezvous_all_gather)(void *context, const void *mine, size_t bytes, void *all);

typedef struct tn_rendezvous_config {
    size_t size;
    int rank;         /* with rank_count 0, both come from the environment */
    int rank_count;   /* at most 8192 */
    const char *host; /* where rank 0 is; NULL: MASTER_ADDR */
    int port;         /* of the store; 0: TENURE_RENDEZVOUS_PORT, or MASTER_PORT + 1 */
    int listen_file;  /* rank 0: a listening socket to serve on, owned from then on; -1: none */
    const char *job;  /* ranks of another name are refused; NULL: the environment's, or none */
    tn_rendezvous_all_gather all_gather; /* instead of the store: host to job are not asked for */
    void *context;                       /* all_gather's */
    uint64_t timeout_us;                 /* of create and of each meeting; 0: ten minutes */
} tn_rendezvous_config;
#define TN_RENDEZVOUS_CONFIG_INIT                                                                  \
    { sizeof(tn_rendezvous_config), 0, 0, NULL, 0, -1, NULL, NULL, NULL, 0 }

/* Every rank calls. TN_OK once all have come. Errors: TN_COMM_TIMEOUT (who has not come),
 * TN_COMM_ERROR (another job, count, version, or the port is taken: the text says which),
 * TN_INVALID_ARGUMENT (an argument or a variable of the environment), out of memory. */
TN_API TN_MUST_USE tn_status tn_rendezvous_create(const tn_rendezvous_config *config,
                                                  tn_rendezvous **out);

/* Leaves. Rank 0 serves on until the others have left, for five seconds at most. Communicators that
 * were made with it go on without it. NULL is a no-op. */
TN_API void tn_rendezvous_destroy(tn_rendezvous *ranks);

/* Of NULL: -1 and 0. */
TN_API int tn_rendezvous_rank(const tn_rendezvous *ranks);
TN_API int tn_rendezvous_size(const tn_rendezvous *ranks); /* count of ranks */

/* Place among the ranks of this machine, from the environment: which of its GPUs to open. -1 if it
 * does not say, and of NULL. */
TN_API int tn_rendezvous_local_rank(const tn_rendezvous *ranks);

/* A meeting of all ranks on the host: all = the `bytes` (at most 4096) of every rank in the order
 * of ranks; 0 bytes make it a barrier. TN_COMM_TIMEOUT and TN_COMM_ERROR name ranks. */
TN_API TN_MUST_USE tn_status tn_rendezvous_gather(tn_rendezvous *ranks, const void *mine,
                                                  size_t bytes, void *all);

/* TN_OK if all ranks call it with the same value (the hash of a plan, say); else TN_COMM_ERROR with
 * `what` it is of and the first rank that differs from rank 0. */
TN_API TN_MUST_USE tn_status tn_rendezvous_agree(tn_rendezvous *ranks, const char *what,
                                                 uint64_t value);

#ifdef __cplusplus
}
#endif
#endif
