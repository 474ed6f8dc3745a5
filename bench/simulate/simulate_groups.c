/* Groups of ranks: see simulate_groups.h. */
#include "simulate_groups.h"

#include <string.h>

static const char *const names[SIMULATE_GROUP_COUNT] = {"tensor", "data", "experts", "expert data"};

const char *simulate_group_name(simulate_group group) { return names[group]; }

/* Neighbours are together, `each` of them; or those that are `each` apart. */
static int is_of_neighbours(simulate_group group) {
    return group == SIMULATE_GROUP_TENSOR || group == SIMULATE_GROUP_EXPERTS;
}

static int64_t each_of(const simulate_model *model, simulate_group group) {
    const int is_of_layers = group == SIMULATE_GROUP_TENSOR || group == SIMULATE_GROUP_DATA;
    return is_of_layers ? model->tp : model->ep;
}

int simulate_group_size(const simulate_model *model, simulate_group group) {
    const int64_t each = each_of(model, group);
    return (int)(is_of_neighbours(group) ? each : simulate_ranks_of_stage(model) / each);
}

int simulate_group_rank(const simulate_model *model, simulate_group group, int within) {
    const int64_t each = each_of(model, group);
    return (int)(is_of_neighbours(group) ? within % each : within / each);
}

void simulate_group_color(const simulate_model *model, simulate_group group, int64_t rank,
                          int *color, int *key) {
    const int64_t in_stage = simulate_ranks_of_stage(model), each = each_of(model, group);
    const int64_t stage = rank / in_stage, within = rank % in_stage;
    const int64_t groups = is_of_neighbours(group) ? in_stage / each : each;
    *color = (int)(stage * groups + (is_of_neighbours(group) ? within / each : within % each));
    *key = simulate_group_rank(model, group, (int)within);
}

void simulate_group_split(void *context, const char *name, int rank, int *color, int *key) {
    for (int i = 0; i < SIMULATE_GROUP_COUNT; i++) {
        if (strcmp(names[i], name) == 0)
            simulate_group_color(context, (simulate_group)i, rank, color, key);
    }
}
