"""Tenure as CuPy's allocator.

    import tenure.cupy_allocator
    tenure.cupy_allocator.install()

Arrays are allocated for CuPy's current stream and freed in its order, as CuPy's own pool does.
A stream that arrays were made on is kept as long as the process: a freed array names it.
"""
import cupy

import tenure

_MALLOC = tenure.address(tenure.adapters, "tn_cupy_malloc")
_FREE = tenure.address(tenure.adapters, "tn_cupy_free")
_allocators = {}


def install():
    """Makes malloc CuPy's allocator, for arrays that are made from now on."""
    cupy.cuda.set_allocator(malloc)


def malloc(size):
    """Memory for the current stream, as cupy.cuda.set_allocator wants it.

    Raises cupy.cuda.memory.OutOfMemoryError: CFunctionAllocator by itself would give NULL on."""
    stream = cupy.cuda.get_current_stream()
    allocator = _allocators.get(stream.ptr)
    if allocator is None:
        allocator = cupy.cuda.CFunctionAllocator(stream.ptr, _MALLOC, _FREE,
                                                 (stream, tenure.adapters))
        _allocators[stream.ptr] = allocator
    pointer = allocator.malloc(size)
    if size and not pointer.ptr:
        device = cupy.cuda.runtime.getDevice()
        words = tenure.core.tn_error_last().decode()
        raise cupy.cuda.memory.OutOfMemoryError(
            size, tenure.statistic("live_bytes", device)) from tenure.Error(words)
    return pointer
