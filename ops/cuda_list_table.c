/* The CUDA table's ops on many tensors at once: what cuda_list.cu wants to know. */
#include "cuda_list_arguments.h"
#include "cuda_module.h"
#include "op_grouped.h"
#include "tenure_grouped.h"

_Static_assert(sizeof(tn__cuda_list_part) <= 4096, "the argument of a launch");
_Static_assert((int)TN__GROUPS_BAD_OFFSETS == (int)TN_GROUPED_BAD_OFFSETS, "one numbering");
_Static_assert((int)TN__GROUPS_OVER_CAPACITY == (int)TN_GROUPED_OVER_CAPACITY, "one numbering");

/* ---- the list in scratch memory ------------------------------------------------------------- */

static tn__cuda_list list_in(void *scratch, int64_t tensors) {
    tn__cuda_list list = {.first_tile = scratch, .count = tensors};
    char *first = (char *)scratch + tn__cuda_list_numbers_bytes(tensors);
    list.tensor = (tn__cuda_quantize_arguments *)first;
    return list;
}

/* What all tensors of a list have; of groups also where the first one lies. */
static tn__cuda_quantize_arguments argument_of_all(const tn__quantize_work *all,
                                                   const float *skip) {
    tn__cuda_quantize_arguments argument = {
        .src = all->src.data,
        .rows = all->src.rows,
        .cols = all->src.cols,
        .tiles_across = (uint32_t)tn__units_of(all->src.cols, TN__TILE),
        .amax_epsilon = all->amax_epsilon,
        .is_pow2 = all->scale_mode == TN_SCALE_POW2,
        .skip = skip,
    };
    argument.row = (tn__cuda_plane){.data = all->row.data, .scale = all->row.scale};
    argument.col = (tn__cuda_plane){.data = all->col.data, .scale = all->col.scale};
    return argument;
}

static tn__cuda_list_layout layout_of(const tn__quantize_work *work) {
    tn__cuda_list_layout layout = {.element_bytes = (int)tn_dtype_bytes(work->src.dtype),
                                   .is_1d = work->format == TN_FORMAT_FP8_BLOCK_1D,
                                   .has_row = work->has_row,
                                   .has_col = work->has_col};
    return layout;
}

/* ---- tensors -------------------------------------------------------------------------------- */

static tn__cuda_listed listed_of(const tn__quantize_work *work) {
    tn__cuda_listed listed = {.src = work->src.data,
                              .rows = work->src.rows,
                              .cols = work->src.cols,
                              .row_data = work->row.data,
                              .row_scale = work->row.scale,
                              .col_data = work->col.data,
                              .col_scale = work->col.scale};
    return listed;
}

/* Sends the list in parts, and gives the tiles of all. */
static tn_status send_list(tn__cuda_context *context, const tn__quantize_list_work *work,
                           int64_t *tiles, tn_stream stream) {
    tn__cuda_list_part part = {.list = list_in(work->scratch, work->count),
                               .all = argument_of_all(&work->items[0], work->skip),
                               .layout = layout_of(&work->items[0])};
    *tiles = 0;
    for (; part.first < work->count; part.first += part.count) {
        for (part.count = 0; part.count < TN__LIST_PART && part.first + part.count < work->count;
             part.count++) {
            const tn__quantize_work *item = &work->items[part.first + part.count];
            part.tensor[part.count] = listed_of(item);
            part.first_tile[part.count] = (uint32_t)*tiles; /* a launch has less than 2^31 */
            *tiles +=
                tn__units_of(item->src.rows, TN__TILE) * tn__units_of(item->src.cols, TN__TILE);
        }
        part.first_tile[part.count] = (uint32_t)*tiles;
        TN_TRY(tn__kernel_launch(context, TN__KERNEL_LIST_TENSORS, 1, TN__FLAT_THREADS, &part,
                                 stream));
    }
    return TN_OK;
}

tn_status tn__cuda_quantize_list(tn_device *device, const tn__quantize_list_work *work,
                                 tn_stream stream) {
    const tn__quantize_work *any = &work->items[0];
    tn__cuda_list list = list_in(work->scratch, work->count);
    tn__cuda_context *context;
    int64_t tiles;
    int kernel =
        tn__kernel_of_quantize(TN__KERNEL_QUANTIZE_LIST, any->format == TN_FORMAT_FP8_BLOCK_1D,
                               any->has_row, any->has_col, any->src.dtype, any->dtype);
    TN_TRY(tn__cuda_context_of(device, &context));
    TN_TRY(send_list(context, work, &tiles, stream));
    return tn__kernel_launch(context, kernel, tiles, TN__TILE_THREADS, &list, stream);
}

/* ---- groups --------------------------------------------------------------------------------- */

tn_status tn__cuda_grouped_quantize(tn_device *device, const tn__grouped_quantize_work *work,
                                    tn_stream stream) {
    const tn__quantize_work *all = &work->all;
    const int64_t groups = work->groups.count;
    tn__cuda_context *context;
    tn__cuda_group_arguments argument = {
        .list = list_in(work->scratch, groups),
        .all = argument_of_all(all, work->skip),
        .offsets = work->groups.offsets,
        .error = work->groups.error,
        .row_scale_floats = work->row_scale_floats,
        .col_scale_floats = work->col_scale_floats,
        .layout = layout_of(all),
    };
    int kernel = tn__kernel_of_quantize(TN__KERNEL_QUANTIZE_LIST, argument.layout.is_1d,
                                        all->has_row, all->has_col, all->src.dtype, all->dtype);
    int64_t tiles =
        tn__groups_units_max(groups, all->src.rows, TN__TILE) * argument.all.tiles_across;
    TN_TRY(tn__cuda_context_of(device, &context));
    TN_TRY(
        tn__kernel_launch(context, TN__KERNEL_LIST_GROUPS, 1, TN__FLAT_THREADS, &argument, stream));
    if (tiles == 0) return TN_OK;
    return tn__kernel_launch(context, kernel, tiles, TN__TILE_THREADS, &argument.list, stream);
}
