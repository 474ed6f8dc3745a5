"""What tenure.cupy_allocator uses of CuPy, for a machine without it."""
import ctypes
import types

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__(f"Out of memory allocating {size} bytes (allocated so far: {total})")


class Pointer:
    def __init__(self, allocator, size):
        self._allocator = allocator
        self.ptr = allocator.malloc_function(allocator.param, size, 0) or 0

    def __del__(self):
        if self.ptr:
            self._allocator.free_function(self._allocator.param, self.ptr, 0)


class CFunctionAllocator:
    def __init__(self, param, malloc_function, free_function, owner):
        self.param, self.owner = param, owner
        self.malloc_function, self.free_function = _MALLOC(malloc_function), _FREE(free_function)

    def malloc(self, size):
        return Pointer(self, size)


current_stream = [types.SimpleNamespace(ptr=0)]
installed = []
cuda = types.SimpleNamespace(
    CFunctionAllocator=CFunctionAllocator, set_allocator=installed.append,
    get_current_stream=lambda: current_stream[0],
    runtime=types.SimpleNamespace(getDevice=lambda: 0),
    memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError))
