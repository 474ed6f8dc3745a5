"""CuPy with Tenure as its allocator, on a real GPU.

usage: cupy_memory.py BUILD      exit status 1 if something is wrong
"""
import os
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "python"))
os.environ["TENURE_LIBRARY_DIR"] = os.path.abspath(sys.argv[1])

import cupy  # noqa: E402
import tenure.cupy_allocator  # noqa: E402


def work():
    """Numbers of a job with arrays of changing sizes: elementwise work, scans, sorts and products
    that give the same bits each time."""
    x = (cupy.arange(512 * 512, dtype=cupy.int64) * 7919 % 10007).reshape(512, 512)
    numbers = []
    for step in range(40):
        y = x[:, :64 + 11 * step] * (1 + step)
        numbers.append(int(cupy.cumsum(y.ravel())[-1]))
        numbers.append(int(cupy.sort(y.ravel())[1000 + step]))
        numbers.append(float(cupy.tanh(y / 5000).max()))
        numbers.append(int((y @ y.T)[step, 2 * step]))
    return numbers


def check_streams():
    """Each stream has its own order; arrays of several at once keep their contents."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    kept = []
    for step in range(25):
        for number, stream in enumerate(streams):
            with stream:
                kept.append((number, cupy.full(1 << 18, number, dtype=cupy.int32)))
        if len(kept) > 40:
            kept = kept[30:]
    cupy.cuda.runtime.deviceSynchronize()
    assert all(bool((array == number).all()) for number, array in kept)


def check_out_of_memory():
    free, total = cupy.cuda.runtime.memGetInfo()
    try:
        cupy.empty(2 * total, dtype=cupy.uint8)
    except cupy.cuda.memory.OutOfMemoryError as error:
        assert "Tenure" in str(error.__cause__) or "pool" in str(error.__cause__), error.__cause__
    else:
        raise AssertionError("twice the device's memory was given")
    assert int(cupy.arange(10).sum()) == 45


def main():
    native = work()
    tenure.cupy_allocator.install()
    before = tenure.statistic("allocs")
    ours = work()
    assert ours == native, "results differ from those with CuPy's pool"
    assert tenure.statistic("allocs") > before + 100, "arrays came from Tenure"
    check_streams()
    check_out_of_memory()
    cupy.cuda.runtime.deviceSynchronize()
    print(f"cupy_memory: ok, {tenure.statistic('allocs')} allocations, "
          f"{tenure.statistic('live_bytes')} bytes live")


main()
