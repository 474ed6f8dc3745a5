#!/usr/bin/env python3
"""CuPy as others write it; prints a checksum.

usage: cupy_program.py [default | none | async]     which allocator of CuPy's
"""
import sys
import zlib

import cupy


def main(kind):
    if kind == "none":
        cupy.cuda.set_allocator(None)
    if kind == "async":
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    crc = 0
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for step in range(200):
        with streams[step % 3]:
            x = cupy.arange(1000 + 777 * step, dtype=cupy.float32)
            y = cupy.sqrt(x * 3 + 1) - x[::-1]
            z = cupy.sort(y)
            crc = zlib.crc32(cupy.asnumpy(z[::97]).tobytes(), crc)
    free, total = cupy.cuda.runtime.memGetInfo()
    assert 0 < free <= total
    print(f"checksum {crc:08x}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "default"))
