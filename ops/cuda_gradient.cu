/* Kernels of the gradients of activations without gates: see cuda_activation.cuh. */
#include "cuda_activation.cuh"

template <typename T> struct differentiate {
    enum { IS_GRADIENT = 1, IS_GATED = 0, IS_WIDE = sizeof(T) == 4 };
    enum { AT_ONCE = IS_WIDE ? 2 : 8, BLOCKS = TN__PRODUCE_BLOCKS, LESS_IN_2D = IS_WIDE };
    static __device__ __forceinline__ piece_values<T> of(const inputs<T> &in, const points<T> &at,
                                                         bool) {
        return product_of<T>(at.slope, in.dy);
    }
};

PRODUCE_ALL(differentiate)
