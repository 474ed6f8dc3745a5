/* All ranks against this one alone: see sharded_bench.h. */
#include <stdlib.h>
#include <string.h>

#include "sharded_bench.h"

enum { CHECK_STEPS = 3 };

/* The two jobs, and what the stack has made in their last step. */
typedef struct rivals {
    sharded_job all, alone;
    tn_comm *comm; /* of this rank alone */
    tn_tensor value;
    tn_tensor values[SHARDED_RANKS_MAX];
} rivals;

static tn_status run_steps(sharded_job *job, tn_tensor *values) {
    for (int i = 0; i + 1 < CHECK_STEPS; i++)
        SHARDED_TRY(sharded_step(job));
    SHARDED_TRY(sharded_step_passes(job, values));
    return sharded_step_update(job);
}

/* ---- compared -------------------------------------------------------------------------------- */

/* A plain tensor's bytes, the caller's to free. */
static tn_status read_all(const sharded_place *place, tn_tensor tensor, char **out) {
    tn_plane_layout layout;
    SHARDED_TRY(tn_plane_layout_get(tensor, TN_PLANE_DATA, &layout));
    char *bytes = malloc(layout.data_bytes + 1);
    if (!bytes) return TN_OUT_OF_HOST_MEMORY;
    tn_status status =
        tn_plane_read(tensor, TN_PLANE_DATA, bytes, layout.data_bytes, NULL, 0, place->stream);
    if (status == TN_OK) status = tn_stream_synchronize(place->device, place->stream);
    if (status == TN_OK)
        *out = bytes;
    else
        free(bytes);
    return status;
}

static uint64_t count_differences(const char *a, const char *b, size_t count,
                                  size_t element_bytes) {
    uint64_t differences = 0;
    for (size_t i = 0; i < count; i++)
        differences += memcmp(a + i * element_bytes, b + i * element_bytes, element_bytes) != 0;
    return differences;
}

/* The rank's elements of each tensor, as both have packed them. */
static tn_status compare_pieces(const tn_sharded_unit_info *all, const tn_sharded_unit_info *alone,
                                int rank, const char *a, const char *b, uint64_t *differences) {
    for (int i = 0; i < SHARDED_PARTS; i++) {
        tn_shard_piece mine = TN_SHARD_PIECE_INIT, whole = TN_SHARD_PIECE_INIT;
        SHARDED_TRY(tn_shard_piece_get(all->plan, rank, i, &mine));
        SHARDED_TRY(tn_shard_piece_get(alone->plan, 0, i, &whole));
        const size_t in_a = (size_t)mine.packed_first * sizeof(float);
        const size_t in_b = (size_t)(whole.packed_first + mine.first) * sizeof(float);
        *differences += count_differences(a + in_a, b + in_b, (size_t)mine.count, sizeof(float));
    }
    return TN_OK;
}

static tn_status compare_unit(const rivals *r, int layer, uint64_t *differences) {
    tn_sharded_unit_info all = TN_SHARDED_UNIT_INFO_INIT, alone = TN_SHARDED_UNIT_INFO_INIT;
    char *a = NULL, *b = NULL;
    SHARDED_TRY(tn_sharded_unit_info_get(r->all.model, r->all.units[layer], &all));
    SHARDED_TRY(tn_sharded_unit_info_get(r->alone.model, r->alone.units[layer], &alone));
    if (all.master.value == 0) return TN_OK;
    tn_status status = read_all(r->all.place, all.master, &a);
    if (status == TN_OK) status = read_all(r->all.place, alone.master, &b);
    if (status == TN_OK)
        status = compare_pieces(&all, &alone, tn_comm_rank(r->all.comm), a, b, differences);
    free(a);
    free(b);
    return status;
}

static tn_status compare_values(const rivals *r, uint64_t *differences) {
    const size_t count = (size_t)(r->all.shape->tokens * r->all.shape->hidden);
    char *a = NULL, *b = NULL;
    tn_status status = read_all(r->all.place, r->value, &a);
    if (status == TN_OK) status = read_all(r->all.place, r->values[tn_comm_rank(r->all.comm)], &b);
    if (status == TN_OK) *differences += count_differences(a, b, count, sizeof(uint16_t));
    free(a);
    free(b);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static tn_status run(rivals *r, const sharded_place *place, const sharded_shape *shape,
                     uint64_t *differences) {
    const int rank = tn_comm_rank(place->comm), ranks = tn_comm_size(place->comm);
    SHARDED_TRY(tn_comm_split(place->comm, rank, 0, "alone", &r->comm));
    SHARDED_TRY(sharded_job_open(&r->all, place, place->comm, shape, rank, 1));
    SHARDED_TRY(run_steps(&r->all, &r->value));
    SHARDED_TRY(sharded_job_open(&r->alone, place, r->comm, shape, 0, ranks));
    SHARDED_TRY(run_steps(&r->alone, r->values));
    for (int i = 0; i < shape->layers; i++)
        SHARDED_TRY(compare_unit(r, i, differences));
    return compare_values(r, differences);
}

tn_status sharded_check(const sharded_place *place, const sharded_shape *shape,
                        uint64_t *differences) {
    sharded_shape exact = *shape;
    rivals *r = calloc(1, sizeof *r);
    if (!r) return TN_OUT_OF_HOST_MEMORY;
    exact.gradient_dtype = TN_FP32;
    *differences = 0;
    tn_status status = run(r, place, &exact, differences);
    const tn_status closed[] = {sharded_job_close(&r->alone), sharded_job_close(&r->all),
                                tn_comm_destroy(r->comm)};
    for (int i = 0; i < 3; i++)
        if (status == TN_OK) status = closed[i];
    free(r);
    return status;
}
