/* The options: one table makes the struct, the TENURE_ variables, the help and the docs table.
 *
 * Read once from the environment at first use; a bad value warns on stderr with name, value and
 * the accepted form and keeps the default, or with TENURE_STRICT=1 ends the process (exit 2).
 */
#ifndef TENURE_OPTIONS_H
#define TENURE_OPTIONS_H

#include "error.h"

/* X(kind, field, "VARIABLE", "alias" or NULL, default as text, "meaning") */
#define TN_OPTION_TABLE(X)                                                                         \
    X(BOOL, strict, "TENURE_STRICT", NULL, "0", "a bad option value ends the process")             \
    X(BOOL, verbose, "TENURE_VERBOSE", NULL, "0",                                                  \
      "print version, driver, options, and what pools leave")                                      \
    X(CHOICE, driver, "TENURE_DRIVER", NULL, "auto", "auto, cuda or host")                         \
    X(TEXT, cuda_library, "TENURE_CUDA_LIBRARY", NULL, "libcuda.so.1", "the CUDA driver to load")  \
    X(SIZE, page_bytes, "TENURE_PAGE_BYTES", NULL, "4MiB", "physical handle size of VMM pools")    \
    X(SIZE, host_memory_bytes, "TENURE_HOST_MEMORY", NULL, "16GiB",                                \
      "device memory that the host driver offers")                                                 \
    X(TEXT, nccl_library, "TENURE_NCCL_LIBRARY", NULL, "libnccl.so.2", "the NCCL to load")         \
    X(TEXT, mpi_library, "TENURE_MPI_LIBRARY", NULL, "libtenure-mpi.so", "the MPI engine to load") \
    X(NUMBER, rendezvous_port, "TENURE_RENDEZVOUS_PORT", NULL, "0",                                \
      "TCP port on which the ranks meet; 0: the one after MASTER_PORT")                            \
    X(BOOL, check_collectives, "TENURE_CHECK_COLLECTIVES", NULL, "0",                              \
      "ranks compare every collective and registration on the host before NCCL gets it (slow)")    \
    X(TEXT, trace, "TENURE_TRACE", NULL, "", "write the first pool's trace to this file")          \
    X(LIMIT, limit_bytes, "TENURE_LIMIT", NULL, "none", "most that all pools together may hold")   \
    X(LIMIT, soft_limit_bytes, "TENURE_SOFT_LIMIT", NULL, "none",                                  \
      "above it all pools use up idle memory before they grow")                                    \
    X(NUMBER, handle_cache, "TENURE_HANDLE_CACHE", NULL, "0",                                      \
      "keep up to N handles that pools of a device give up for its other pools")                   \
    X(NUMBER, decay_ms, "TENURE_DECAY_MS", NULL, "0",                                              \
      "give memory back that was idle for so long, when a pool grows; 0: never")                   \
    X(NUMBER, events, "TENURE_EVENTS", NULL, "0", "keep the last N events of every pool")          \
    X(BOOL, nvtx, "TENURE_NVTX", NULL, "0", "tell NVTX tools of blocks even if none is injected")  \
    X(BOOL, check_leases, "TENURE_CHECK_LEASES", NULL, "0",                                        \
      "find who writes planes under READ leases (copies each plane to host memory: slow)")         \
    X(BOOL, release_frozen_columnwise, "TENURE_RELEASE_FROZEN_COLUMNWISE",                         \
      "NVTE_RELEASE_FROZEN_WEIGHT_COLUMNWISE", "0",                                                \
      "drop the columnwise plane of frozen 2D weights after dgrad")                                \
    X(LIMIT, offload_limit_bytes, "TENURE_OFFLOAD_LIMIT", NULL, "none",                            \
      "most pinned host memory that a pool's offloaded planes may take")                           \
    X(POLICY, plane_policy, "TENURE_PLANE_POLICY", NULL, "default",                                \
      "how long derived planes live where no tensor or scope says")                                \
    X(LIMIT, plane_budget_bytes, "TENURE_PLANE_BUDGET", NULL, "none",                              \
      "derived planes that a root scope keeps under the policy budget")                            \
    X(ENGINE, gemm_engine, "TENURE_GEMM_ENGINE", NULL, "auto",                                     \
      "what multiplies where no call says")                                                        \
    X(BOOL, disable, "TENURE_DISABLE", NULL, "0", "the drop-in takes nothing over")                \
    X(BACKING, run_pool, "TENURE_RUN_POOL", NULL, "plain",                                         \
      "where the drop-in's memory comes from")                                                     \
    X(TEXT, run_trace, "TENURE_RUN_TRACE", NULL, "",                                               \
      "write what a program allocates to this file")                                               \
    X(TEXT, run_report, "TENURE_RUN_REPORT", NULL, "",                                             \
      "write the drop-in's figures to this file at exit")                                          \
    X(BOOL, run_free_waits, "TENURE_RUN_FREE_WAITS", NULL, "0",                                    \
      "cuMemFree waits for the whole device, as the driver's does")                                \
    X(LIMIT, sim_workspace_bytes, "TENURE_SIM_WORKSPACE", NULL, "none",                            \
      "workspace of a GEMM on a simulated device; none: the most that one may want on a GPU")

typedef enum tn__driver_choice {
    TN__DRIVER_CHOICE_AUTO,
    TN__DRIVER_CHOICE_CUDA,
    TN__DRIVER_CHOICE_HOST
} tn__driver_choice;

typedef enum tn__run_pool {
    TN__RUN_POOL_PLAIN,
    TN__RUN_POOL_VMM,
    TN__RUN_POOL_ASYNC,
    TN__RUN_POOL_NONE, /* nothing is taken over, all is recorded */
} tn__run_pool;

typedef struct tn__options {
    int strict;
    int verbose;
    int driver; /* tn__driver_choice */
    const char *cuda_library;
    size_t page_bytes;
    size_t host_memory_bytes;
    const char *nccl_library;
    const char *mpi_library;
    size_t rendezvous_port; /* 0: not said */
    int check_collectives;
    const char *trace;
    size_t limit_bytes;      /* 0: none */
    size_t soft_limit_bytes; /* 0: none */
    size_t handle_cache;
    size_t decay_ms;
    size_t events;
    int nvtx;
    int check_leases;
    int release_frozen_columnwise;
    int plane_policy;          /* place in tn__policy_choices: the tensor layer's tn_plane_policy */
    size_t plane_budget_bytes; /* 0: none is kept */
    size_t offload_limit_bytes; /* 0: none */
    int gemm_engine;            /* the op layer's tn_gemm_engine */
    int disable;
    int run_pool; /* tn__run_pool */
    const char *run_trace;
    const char *run_report;
    int run_free_waits;
    size_t sim_workspace_bytes; /* 0: what a GPU may want */
} tn__options;

/* What TENURE_PLANE_POLICY takes, ending with NULL. */
extern const char *const tn__policy_choices[];

/* The names of tn__run_pool, ending with NULL. */
TN_SISTER_API extern const char *const tn__run_pool_choices[];

TN_SISTER_API const tn__options *tn__options_get(void);

/* Reads the environment again; for tests, while nothing else runs. */
TN_SISTER_API void tn__options_reload(void);

/* "2MiB", "512", "1.5GiB": 1 and *bytes on success, 0 if the text is no size. */
TN_SISTER_API int tn__parse_size(const char *text, size_t *bytes);

#endif
