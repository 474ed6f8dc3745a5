"""What tenure.pytorch uses of torch, for a machine without it: the allocator functions are called
through ctypes, by the addresses that torch would be given."""
import ctypes
import types

_TYPES = {"set_reset_fn": ctypes.CFUNCTYPE(None),
          "set_record_stream_fn": ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p),
          "set_memory_fraction_fn": ctypes.CFUNCTYPE(None, ctypes.c_double, ctypes.c_int),
          "set_base_alloc_fn": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p,
                                                ctypes.POINTER(ctypes.c_size_t)),
          "set_begin_allocate_to_pool": ctypes.CFUNCTYPE(None),
          "set_end_allocate_to_pool_fn": ctypes.CFUNCTYPE(None),
          "set_release_pool": ctypes.CFUNCTYPE(None)}
_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class _CUDAAllocator:
    def __init__(self, alloc, free):
        self.malloc, self.free, self.hooks = _MALLOC(alloc), _FREE(free), {}

    def __getattr__(self, name):
        kind = _TYPES[name]
        return lambda address: self.hooks.__setitem__(name, kind(address))


class CUDAPluggableAllocator:
    def __init__(self, path, alloc_name, free_name):
        library = ctypes.CDLL(path)
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value
                     for name in (alloc_name, free_name)]
        self._allocator = _CUDAAllocator(*addresses)

    def allocator(self):
        return self._allocator


def change_current_allocator(allocator):
    if current:
        raise RuntimeError("Can't swap an already initialized allocator")
    current.append(allocator.allocator())


class MemPool:
    def __init__(self, allocator, use_on_oom=False):
        self.allocator, self.use_on_oom = allocator, use_on_oom


current = []
cuda = types.SimpleNamespace(
    MemPool=MemPool, memory=types.SimpleNamespace(
        CUDAPluggableAllocator=CUDAPluggableAllocator,
        change_current_allocator=change_current_allocator))
_C = types.SimpleNamespace(_cuda_memoryStats=None, _cuda_resetPeakMemoryStats=None,
                           _cuda_resetAccumulatedMemoryStats=None)
