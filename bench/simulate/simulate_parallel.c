/* Layers over a tensor-parallel group: see simulate_parallel.h. */
#include "simulate_parallel.h"

#include "tenure_parallel.h"

static tn_comm *group_of(const simulate_rank *rank) { return rank->groups[SIMULATE_GROUP_TENSOR]; }

static tn_parallel parallel_of(const simulate_rank *rank) {
    tn_parallel parallel = TN_PARALLEL_INIT;
    parallel.sequence.comm = group_of(rank);
    parallel.partial_dtype = simulate_dtype();
    return parallel;
}

tn_status simulate_linear_forward(const simulate_rank *rank, simulate_cut cut,
                                  const tn_linear_forward_args *args, tn_linear_saved *saved) {
    const tn_parallel parallel = parallel_of(rank);
    if (!group_of(rank)) return tn_linear_forward(args, saved, rank->stream);
    if (cut == SIMULATE_CUT_ROWS)
        return tn_row_linear_forward(&parallel, args, saved, rank->stream);
    return tn_column_linear_forward(&parallel, args, saved, rank->stream);
}

tn_status simulate_linear_backward(const simulate_rank *rank, simulate_cut cut,
                                   const tn_linear_backward_args *args, tn_linear_saved *saved) {
    const tn_parallel parallel = parallel_of(rank);
    if (!group_of(rank)) return tn_linear_backward(args, saved, NULL, rank->stream);
    if (cut == SIMULATE_CUT_ROWS)
        return tn_row_linear_backward(&parallel, args, saved, NULL, rank->stream);
    return tn_column_linear_backward(&parallel, args, saved, NULL, rank->stream);
}

tn_status simulate_norm_linear_forward(const simulate_rank *rank,
                                       const tn_norm_linear_forward_args *args,
                                       tn_norm_linear_saved *saved) {
    const tn_parallel parallel = parallel_of(rank);
    if (!group_of(rank)) return tn_norm_linear_forward(args, saved, rank->stream);
    return tn_column_norm_linear_forward(&parallel, args, saved, rank->stream);
}

tn_status simulate_norm_linear_backward(const simulate_rank *rank,
                                        const tn_norm_linear_backward_args *args,
                                        tn_norm_linear_saved *saved) {
    const tn_parallel parallel = parallel_of(rank);
    if (!group_of(rank)) return tn_norm_linear_backward(args, saved, NULL, rank->stream);
    return tn_column_norm_linear_backward(&parallel, args, saved, NULL, rank->stream);
}

tn_status simulate_norm_mlp_forward(const simulate_rank *rank, const tn_norm_mlp_forward_args *args,
                                    tn_norm_mlp_saved *saved) {
    const tn_parallel parallel = parallel_of(rank);
    if (!group_of(rank)) return tn_norm_mlp_forward(args, saved, rank->stream);
    return tn_parallel_norm_mlp_forward(&parallel, args, saved, rank->stream);
}

tn_status simulate_norm_mlp_backward(const simulate_rank *rank,
                                     const tn_norm_mlp_backward_args *args,
                                     tn_norm_mlp_saved *saved) {
    const tn_parallel parallel = parallel_of(rank);
    if (!group_of(rank)) return tn_norm_mlp_backward(args, saved, NULL, rank->stream);
    return tn_parallel_norm_mlp_backward(&parallel, args, saved, NULL, rank->stream);
}

tn_status simulate_rows_reduce(const simulate_rank *rank, tn_tensor *all, tn_tensor own) {
    tn_sequence_reduce_args args = TN_SEQUENCE_REDUCE_ARGS_INIT;
    args.sequence.comm = group_of(rank);
    args.src = *all;
    args.dst = own;
    args.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    SIMULATE_TRY(tn_sequence_reduce(&args, rank->stream));
    return simulate_drop(rank, all);
}

tn_status simulate_rows_gather(const simulate_rank *rank, tn_tensor own, tn_tensor *all) {
    tn_sequence_gather_args args = TN_SEQUENCE_GATHER_ARGS_INIT;
    SIMULATE_TRY(simulate_make(rank, SIMULATE_OWNER_ACTIVATIONS, simulate_dtype(), rank->tokens,
                               rank->model->hidden, "all rows", all));
    args.sequence.comm = group_of(rank);
    args.src = own;
    args.plane = TN_PLANE_DATA;
    args.dst = *all;
    args.scope = rank->owners[SIMULATE_OWNER_ACTIVATIONS];
    return tn_sequence_gather(&args, rank->stream);
}

tn_status simulate_sum_gradient(const simulate_rank *rank, tn_tensor gradient) {
    tn_lease lease;
    tn_plane_view view;
    if (!group_of(rank) || !gradient.value) return TN_OK;
    SIMULATE_TRY(tn_lease_begin(gradient, TN_PLANE_DATA, TN_UPDATE, rank->stream, &lease, &view));
    SIMULATE_TRY(tn_all_reduce(group_of(rank), view.data, view.data,
                               view.layout.data_bytes / sizeof(float), TN_FP32, TN_REDUCE_SUM,
                               rank->stream));
    return tn_lease_end(lease);
}
