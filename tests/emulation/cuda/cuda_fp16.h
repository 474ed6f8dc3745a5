/* In the place of CUDA's header of this name. */
#include "emulated_cuda.h"
