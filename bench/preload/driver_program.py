#!/usr/bin/env python3
"""The CUDA driver by ctypes, as Python programs use it; prints a checksum of all that it is told.

Memory of a context of its own, which the drop-in leaves to the driver, and of the primary one;
ranges and attributes of blocks, a second free, and what cuGetProcAddress gives.
"""
import ctypes
import sys
import zlib

cuda = ctypes.CDLL("libcuda.so.1")
told = []


def call(name, *arguments, expected=0):
    code = getattr(cuda, name)(*arguments)
    assert code == expected, f"{name}: {code}"


def round_trip(data):
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
    call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
    back = ctypes.create_string_buffer(len(data))
    call("cuMemcpyDtoH_v2", back, address, ctypes.c_size_t(len(data)))
    told.append(zlib.crc32(back.raw))
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    inside = ctypes.c_uint64(address.value + len(data) - 1)
    call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), inside)
    told.append((base.value == address.value, size.value >= len(data)))
    kind, ordinal = ctypes.c_uint(), ctypes.c_int()
    call("cuPointerGetAttribute", ctypes.byref(kind), 2, inside)
    call("cuPointerGetAttribute", ctypes.byref(ordinal), 9, inside)
    told.append((kind.value, ordinal.value))
    call("cuMemFree_v2", address)
    call("cuMemFree_v2", address, expected=1)


def by_address_of_the_driver():
    found, status = ctypes.c_void_p(), ctypes.c_int()
    for name, version, flags in (("cuMemAlloc", 13000, 0), ("cuMemAllocAsync", 13000, 2),
                                 ("cuNoSuchCall", 13000, 0), ("cuMemAllocAsync", 11000, 0)):
        code = cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(found), version,
                                        ctypes.c_uint64(flags), ctypes.byref(status))
        told.append((name, code, bool(found.value), status.value))


def main():
    call("cuInit", 0)
    own, primary = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuCtxCreate_v2", ctypes.byref(own), 0, 0)
    for bytes_ in (1, 5000, 3 << 20, 40 << 20):
        round_trip(bytes(range(251)) * (bytes_ // 251 + 1))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), 0)
    call("cuCtxSetCurrent", primary)
    for bytes_ in (1, 5000, 3 << 20, 40 << 20):
        round_trip(bytes(range(251)) * (bytes_ // 251 + 1))
    by_address_of_the_driver()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    told.append((0 < free.value <= total.value, total.value))
    if "-v" in sys.argv:
        print(told)
    print(f"checksum {zlib.crc32(repr(told).encode()):08x}")


if __name__ == "__main__":
    sys.exit(main())
