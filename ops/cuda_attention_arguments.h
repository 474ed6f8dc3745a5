/* What the kernels of attention take: see cuda_arguments.h. */
#ifndef TENURE_CUDA_ATTENTION_ARGUMENTS_H
#define TENURE_CUDA_ATTENTION_ARGUMENTS_H

#include "cuda_arguments.h"
#include "exact_attention.h"

enum { TN__ATTENTION_THREADS = 256 };

/* A block takes one tile of queries of one head of one sequence, or of keys and values. Blocks are
 * numbered by head first, then by sequence, then by tile. */
typedef struct tn__cuda_attention_arguments {
    const void *qkv;
    void *y;
    float *log_sum; /* NULL: not wanted */
    const void *dy; /* and from here on: gradients only */
    float *dots;
    void *dqkv;
    int64_t tokens, sequence;
    int64_t packed_cols; /* of qkv */
    uint32_t heads;      /* of queries */
    uint32_t heads_kv;
    uint32_t across; /* blocks of one tile: heads (of queries, or of keys) times sequences */
    uint32_t tiles;  /* of a sequence */
    int head_dim;
    int is_causal;
    int vectors; /* all can be moved 16 bytes at a time */
    float scale;
} tn__cuda_attention_arguments;

#endif
