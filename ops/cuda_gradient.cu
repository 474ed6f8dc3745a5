/* Kernels of the gradients of activations: see cuda_activation.cuh. */
#include "cuda_activation.cuh"

struct differentiate {
    enum { IS_GRADIENT = 1 };
    static __device__ __forceinline__ float of(const tn__cuda_produce_arguments &a, bool of_gate,
                                               float x, float gate, float dy, float weight) {
        const tn__curve_point at = tn__curve_at(a.curve, x);
        const float value = __fmul_rn(of_gate ? at.value : at.slope, __fmul_rn(dy, weight));
        return a.is_gated && !of_gate ? __fmul_rn(value, gate) : value;
    }
};

PRODUCE_ALL(differentiate, differentiate)
