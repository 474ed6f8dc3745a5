/* Planes of a unit's tensors in host memory, cut into shards and gathered again by what the headers
 * say alone: for tests of plans and casts. */
#ifndef TENURE_TEST_SHARDS_H
#define TENURE_TEST_SHARDS_H

#include "tenure_shard.h"
#include "test_ops.h"

typedef struct shard_plane {
    tn_plane_layout layout;
    uint8_t *data, *scale;
} shard_plane;

/* Of rows of the tensor alone. */
tn_plane_layout shard_plane_layout(const tn_shard_tensor *tensor, tn_plane plane, int64_t rows);

/* Memory of zeros, never NULL; ended by free. */
void *shard_zeros(size_t bytes);

int shard_has_col(const tn_shard_tensor *tensor); /* gathered in backward */
tn_plane shard_forward_plane(const tn_shard_tensor *tensor);

/* Bytes that depend on where they are, none of them 0 but padding. */
shard_plane shard_plane_make(const tn_shard_tensor *tensor, int index, tn_plane plane);
void shard_plane_free(shard_plane *plane);

/* Writes the rank's piece of a whole plane into its shard, element by element and scale by scale.
 * Fails unless pieces are aligned to 16 bytes. */
void shard_put_piece(const tn_shard_plan *plan, int rank, int tensor, const shard_plane *whole,
                     tn_plane plane, uint8_t *shard);

/* As tn_all_gather_uneven does. Fails unless segments are apart, in the buffer, and are all that
 * each rank sends. */
void shard_gather(const tn_shard_plan *plan, uint8_t *const *shards, tn_shard_phase phase,
                  uint8_t *out);

/* Fails unless the tensor's plane of that phase is where the plan says, as it is given, and then
 * sets its bytes in the gathered buffer to 0. */
void shard_take_plane(const tn_shard_plan *plan, tn_shard_phase phase, int tensor,
                      const shard_plane *whole, uint8_t *shard, uint8_t *gathered);

/* ---- units with numbers --------------------------------------------------------------------- */

/* Of the format's usual element type; PLAIN: bf16. */
tn_shard_tensor shard_tensor_of(tn_format format, int64_t rows, int64_t cols);

/* A plan, and of each tensor the whole one: numbers that depend on nothing but where they are, and
 * the planes that tn_quantize (PLAIN: tn_convert) makes of them. */
enum { SHARD_UNIT_TENSORS = 8 };
typedef struct shard_unit {
    int count, ranks;
    tn_shard_tensor tensor[SHARD_UNIT_TENSORS];
    tn_dtype master_dtype;
    float epsilon;
    tn_shard_plan *plan;
    tn_shard_plan_info info;
    tn_scope scope;
    tn_tensor whole[SHARD_UNIT_TENSORS]; /* PLAIN, of master_dtype */
    tn_tensor cast[SHARD_UNIT_TENSORS];  /* what they become; of bytes {0} */
    uint8_t *bytes[SHARD_UNIT_TENSORS];  /* of the whole ones */
    shard_plane row[SHARD_UNIT_TENSORS], col[SHARD_UNIT_TENSORS];
} shard_unit;

/* What is above `plan` is given. */
void shard_unit_open(const test_ops *ops, shard_unit *u, tn_shard_layout layout);
void shard_unit_close(shard_unit *u);

/* A rank's elements as a tensor of one row, as it would have them; {0} for none but in FLAT, where
 * their type counts. */
tn_tensor shard_unit_master(const test_ops *ops, const shard_unit *u, tn_scope scope, int rank,
                            int tensor);

#endif
