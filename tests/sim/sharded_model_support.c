/* See sharded_model_support.h. */
#include "sharded_model_support.h"

#include "test_support.h"

static tn_tensor initial_of(const tn_sharded_config *model, const tn_sharded_tensor *weight) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    if (weight->format == TN_FORMAT_PLAIN) config.dtype = weight->dtype;
    config.rank = 2, config.shape[0] = weight->rows, config.shape[1] = weight->cols;
    EXPECT_OK(tn_tensor_create(model->scope, &config, &tensor));
    EXPECT_OK(tn_plane_fill(tensor, TN_PLANE_DATA, 0, model->stream));
    return tensor;
}

tn_sharded_model *sharded_model_open(const tn_sharded_config *config, tn_sharded_tensor weight,
                                     int units) {
    tn_sharded_unit_config unit = TN_SHARDED_UNIT_CONFIG_INIT;
    tn_sharded_model *model = NULL;
    EXPECT_OK(tn_sharded_create(config, &model));
    weight.initial = initial_of(config, &weight);
    unit.tensors = &weight, unit.tensor_count = 1;
    for (int i = 0, number; i < units; i++)
        EXPECT_OK(tn_sharded_unit_add(model, &unit, &number));
    EXPECT_OK(tn_tensor_destroy(weight.initial, config->stream));
    EXPECT_OK(tn_sharded_seal(model));
    return model;
}
