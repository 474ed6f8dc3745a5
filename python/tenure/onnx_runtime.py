"""Tenure as the allocator of ONNX Runtime's CUDA provider.

    options = tenure.onnx_runtime.provider_options()
    onnxruntime.InferenceSession(model, providers=[("CUDAExecutionProvider", options)])

With a stream, which sessions then compute on, memory is reused in its order; without one it waits
until the device was seen idle.
"""
import tenure


def provider_options(device=0, stream=None):
    """Options of CUDAExecutionProvider: device, stream and the three allocator functions."""
    tenure.check(tenure.adapters.tn_ort_configure(device, stream, int(stream is not None)))
    options = {"device_id": str(device)}
    for option, function in (("gpu_external_alloc", "tn_ort_alloc"),
                             ("gpu_external_free", "tn_ort_free"),
                             ("gpu_external_empty_cache", "tn_ort_empty_cache")):
        options[option] = str(tenure.address(tenure.adapters, function))
    if stream is not None:
        options["user_compute_stream"] = str(stream)
    return options
