/* Kernels of the gated activations: see cuda_activation.cuh. */
#include "cuda_activation.cuh"

template <typename T> struct activate_gated {
    enum { IS_GRADIENT = 0, IS_GATED = 1, IS_WIDE = sizeof(T) == 4 };
    enum { AT_ONCE = IS_WIDE ? 2 : 8, BLOCKS = TN__PRODUCE_BLOCKS, LESS_IN_2D = IS_WIDE };
    static __device__ __forceinline__ piece_values<T> of(const inputs<T> &in, const points<T> &at,
                                                         bool) {
        return product_of<T>(at.value, in.gate);
    }
};

PRODUCE_ALL(activate_gated)
