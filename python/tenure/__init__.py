"""Tenure for Python programs: its memory for PyTorch, CuPy and ONNX Runtime.

    import tenure.pytorch
    tenure.pytorch.install()            before torch's first use of CUDA

    import tenure.cupy_allocator
    tenure.cupy_allocator.install()

The libraries are looked for in $TENURE_LIBRARY_DIR, in the folder of the installed tree that this
package is in, and where the system looks. statistics(), report() and trim() are of the pools that
all frameworks of the process share.
"""
import ctypes
import os

_PLACE = os.path.dirname(os.path.abspath(__file__))
_STATISTICS = ("live_bytes", "cached_bytes", "pending_bytes", "partial_bytes", "driver_held_bytes",
               "reserved_bytes", "address_bytes", "peak_live_bytes", "peak_reserved_bytes",
               "live_blocks", "allocs", "frees", "stream_waits", "out_of_memory")


class Error(RuntimeError):
    """A call of Tenure failed; the words are tn_error_last()."""


def library_path(name):
    """Where the library libNAME.so is; its name alone if only the system can find it."""
    file_name = f"lib{name}.so"
    given = os.environ.get("TENURE_LIBRARY_DIR")
    # Installed as <libraries>/tenure/python/tenure.
    folders = [given] if given else [os.path.join(_PLACE, "..", "..", "..")]
    for folder in folders:
        path = os.path.abspath(os.path.join(folder, file_name))
        if os.path.exists(path):
            return path
    return file_name


def address(library, name):
    """The address of a function of a loaded library, as frameworks take it."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _load():
    core = ctypes.CDLL(library_path("tenure"))
    library = ctypes.CDLL(library_path("tenure-adapters"))
    core.tn_error_last.restype = ctypes.c_char_p
    core.tn_pool_report.restype = ctypes.c_size_t
    core.tn_pool_report.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p,
                                    ctypes.c_size_t]
    library.tn_adapter_pool.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_void_p)]
    library.tn_adapter_stat.argtypes = [ctypes.c_int, ctypes.c_char_p,
                                        ctypes.POINTER(ctypes.c_uint64)]
    library.tn_ort_configure.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    return core, library


core, adapters = _load()


def check(status):
    """Raises Error unless the status is TN_OK."""
    if status != 0:
        raise Error(core.tn_error_last().decode())


def statistic(name, device=0):
    """One statistic of the device, by its name in tenure_alloc.h: "peak_reserved_bytes"."""
    value = ctypes.c_uint64()
    check(adapters.tn_adapter_stat(device, name.encode(), ctypes.byref(value)))
    return value.value


def statistics(device=0):
    """The statistics of the device's pools, by name; zeros before anything asked for memory."""
    return {name: statistic(name, device) for name in _STATISTICS}


def reset_peaks(device=0):
    check(adapters.tn_adapter_reset_peaks(device))


def trim():
    """Gives idle memory of all devices back to the driver."""
    check(adapters.tn_adapters_trim())


def report(device=0, json=False):
    """What the device's pool is and holds, in words or as JSON."""
    pool = ctypes.c_void_p()
    check(adapters.tn_adapter_pool(device, ctypes.byref(pool)))
    size = 1 << 16
    while True:
        text = ctypes.create_string_buffer(size)
        needed = core.tn_pool_report(pool, int(json), text, size)
        if needed < size:
            return text.value.decode()
        size = 2 * needed
