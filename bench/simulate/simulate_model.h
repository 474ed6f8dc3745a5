/* What `tenure simulate` simulates: a model and how it is laid out over ranks, out of a file.
 *
 *     simulate_model model;
 *     char error[SIMULATE_ERROR_BYTES];
 *     if (!simulate_model_read("llama3-8b", &model, error)) ...        (a name, or a path)
 *     simulate_model_set(&model, "tp", 8, error);                      (as the command line has it)
 *     if (!simulate_model_check(&model, error)) ...
 *
 * One table (SIMULATE_FIELDS) makes the struct, what a file may hold and what the command line may
 * set; docs/simulate.md says what each means. A file is one JSON object of these fields, `name`,
 * `source` (where the figures are from) and, if one likes, `remarks`. Every other field, every
 * value that is none, and every combination that does not fit is refused by name.
 */
#ifndef TENURE_SIMULATE_MODEL_H
#define TENURE_SIMULATE_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

enum { SIMULATE_ERROR_BYTES = 512, SIMULATE_NAME_BYTES = 64, SIMULATE_SOURCE_BYTES = 512 };

/* X(field, least, most, what it is if the file does not say: -1 if it must, meaning) */
#define SIMULATE_FIELDS(X)                                                                         \
    X(hidden, 8, 1 << 20, -1, "width of the residual stream")                                      \
    X(layers, 1, 1024, -1, "transformer layers")                                                   \
    X(heads, 1, 1024, -1, "query heads")                                                           \
    X(heads_kv, 1, 1024, -1, "key and value heads")                                                \
    X(head_dim, 8, 128, -1, "elements of a head")                                                  \
    X(ffn, 0, 1 << 22, -1, "width between up and down of a dense layer")                           \
    X(vocabulary, 256, 1 << 22, -1, "rows of the embedding")                                       \
    X(query_rank, 0, 1 << 16, 0, "MLA: queries come out of so many; 0: of hidden")                 \
    X(kv_rank, 0, 1 << 16, 0, "MLA: keys and values come out of so many; 0: of hidden")            \
    X(dense_layers, 0, 1024, 0, "first layers without experts, where there are experts")           \
    X(experts, 0, 4096, 0, "routed experts of a layer; 0: none")                                   \
    X(experts_per_token, 0, 64, 0, "of which each token goes to")                                  \
    X(expert_ffn, 0, 1 << 20, 0, "width of a routed expert")                                       \
    X(shared_ffn, 0, 1 << 20, 0, "width of the experts that every token goes to; 0: none")         \
    X(stranded_dense, 0, 64, 0, "L3: gathered tensors that stay, of a dense layer")                \
    X(stranded_moe, 0, 64, 0, "L3: likewise, of a layer with experts")                             \
    X(fp8, 0, 1, 1, "1: weights of layers in 128x128 blocks of FP8; 0: bf16")                      \
    X(frozen_layers, 0, 1024, 0, "first layers whose weights want no gradient")                    \
    X(recompute, 0, 1, 0, "1: layers save as little as they can")                                  \
    X(tp, 1, 1024, 1, "ranks that share each layer (tensor and sequence parallel)")                \
    X(pp, 1, 1024, 1, "pipeline stages")                                                           \
    X(vpp, 1, 64, 1, "chunks of layers on each stage")                                             \
    X(ep, 1, 4096, 1, "ranks that share the experts")                                              \
    X(dp, 1, 1024, 1, "ranks with other data, over which weights are sharded")                     \
    X(context, 8, 1 << 24, -1, "tokens of a sequence")                                             \
    X(microbatch, 1, 1 << 12, 1, "sequences of a micro-batch")                                     \
    X(microbatches, 1, 1024, 1, "micro-batches of a step")                                         \
    X(ranks_per_node, 1, 1024, 8, "consecutive ranks that share a node")

typedef struct simulate_model {
    char name[SIMULATE_NAME_BYTES];
    char source[SIMULATE_SOURCE_BYTES];
#define SIMULATE_MEMBER(field, least, most, otherwise, meaning) int64_t field;
    SIMULATE_FIELDS(SIMULATE_MEMBER)
#undef SIMULATE_MEMBER
} simulate_model;

/* A file's path, or the name of a description that comes with the project. 1 on success; 0 with
 * the words, and then *model is undefined. */
int simulate_model_read(const char *name, simulate_model *model, char *error);

/* The same from JSON text, which `origin` names in the words. */
int simulate_model_parse(const char *text, size_t bytes, const char *origin, simulate_model *model,
                         char *error);

/* One field by its name, as by the command line: 0 with the words. */
int simulate_model_set(simulate_model *model, const char *field, int64_t value, char *error);

/* Whether the fields fit each other. */
int simulate_model_check(const simulate_model *model, char *error);

/* An object with every field, for reports; NULL without memory. */
cJSON *simulate_model_to_json(const simulate_model *model);

static inline int64_t simulate_model_ranks(const simulate_model *model) {
    return model->tp * model->pp * model->dp;
}

/* Tokens of a micro-batch, all ranks of a tensor-parallel group together. */
static inline int64_t simulate_model_tokens(const simulate_model *model) {
    return model->context * model->microbatch;
}

/* Whether layer `layer` has experts. */
static inline int simulate_model_has_experts(const simulate_model *model, int64_t layer) {
    return model->experts > 0 && layer >= model->dense_layers;
}

#endif
