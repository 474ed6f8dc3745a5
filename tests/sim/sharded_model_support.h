/* Sharded models of equal units with one weight each, whose values nobody looks at. */
#ifndef TENURE_SHARDED_MODEL_SUPPORT_H
#define TENURE_SHARDED_MODEL_SUPPORT_H

#include "tenure_sharded.h"

/* Sealed. `weight` lacks its initial values, which are 0. */
tn_sharded_model *sharded_model_open(const tn_sharded_config *config, tn_sharded_tensor weight,
                                     int units);

#endif
