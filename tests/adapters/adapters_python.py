"""The Python package over the simulated device, with stand-ins for torch and CuPy.

usage: adapters_python.py BUILD SOURCE
"""
import ctypes
import json
import os
import sys

BUILD, SOURCE = (os.path.abspath(path) for path in sys.argv[1:3])
os.environ.update(TENURE_LIBRARY_DIR=BUILD, TENURE_SIM_MEMORY="1GiB",
                  TENURE_CUDA_LIBRARY=os.path.join(BUILD, "libtenure-simcuda.so"))
sys.path[:0] = [os.path.join(SOURCE, "python"), os.path.join(SOURCE, "tests/adapters/stand_ins")]
sys.dont_write_bytecode = True

import cupy  # noqa: E402
import torch  # noqa: E402
import tenure.cupy_allocator  # noqa: E402
import tenure.onnx_runtime  # noqa: E402
import tenure.pytorch  # noqa: E402

MIB = 1 << 20


def expect(condition, words):
    if not condition:
        print(f"FAIL: {words}")
        sys.exit(1)


def raised_by(call, kind):
    try:
        call()
    except kind as error:
        return error
    return None


def check_numbers():
    expect(set(tenure.statistics().values()) == {0}, "zeros before the first allocation")
    error = raised_by(lambda: tenure.statistic("no_such"), tenure.Error)
    expect(error and "no_such" in str(error), f"an unknown statistic: {error}")
    header = open(os.path.join(SOURCE, "alloc/tenure_alloc.h"), encoding="ascii").read()
    for name in tenure.statistics():
        expect(f", {name}, " in header, f"{name} is in TN_POOL_STATS_TABLE")


def check_torch():
    tenure.pytorch.install()
    tenure.pytorch.install()
    expect(len(torch.current) == 1, "installed once")
    allocator = torch.current[0]
    expect(set(allocator.hooks) == set(tenure.pytorch._HOOKS), "every hook is set")
    block = allocator.malloc(3 * MIB, 0, None)
    size = ctypes.c_size_t()
    expect(allocator.hooks["set_base_alloc_fn"](block, ctypes.byref(size)) == block, "its base")
    expect(size.value == 3 * MIB, f"its size {size.value}")
    allocator.hooks["set_record_stream_fn"](block, None)
    stats = torch._C._cuda_memoryStats(0)
    expect(stats["allocated_bytes"]["all"]["current"] == 3 * MIB, f"{stats}")
    expect(stats["reserved_bytes"]["all"]["peak"] >= 3 * MIB, f"{stats}")
    expect(stats["allocation"]["all"]["current"] == 1, f"{stats}")
    expect(stats["num_ooms"] == 0 and stats["active"]["large_pool"]["freed"] == 0, f"{stats}")
    allocator.free(block, 3 * MIB, 0, None)
    torch._C._cuda_resetPeakMemoryStats(0)
    allocator.hooks["set_memory_fraction_fn"](0.5, 0)
    allocator.hooks["set_memory_fraction_fn"](1.0, 0)
    allocator.hooks["set_reset_fn"]()
    expect(tenure.statistic("reserved_bytes") == 0, "empty_cache gives all back")
    expect(tenure.statistic("peak_live_bytes") == 0, "peaks start again")
    pool = tenure.pytorch.mem_pool(use_on_oom=True)
    expect(pool.use_on_oom and pool.allocator.hooks == {}, "options reach MemPool")
    expect(not pool.allocator.malloc(2048 * MIB, 0, None), "a segment too large is NULL")
    segment = pool.allocator.malloc(20 * MIB, 0, None)
    pool.allocator.free(segment, 20 * MIB, 0, None)
    tenure.trim()
    expect(tenure.statistic("live_bytes") == 0, "the segment is back")


def check_cupy():
    tenure.cupy_allocator.install()
    malloc = cupy.installed[0]
    pointer = malloc(5 * MIB)
    expect(tenure.statistic("live_bytes") == 5 * MIB, "CuPy's bytes")
    expect(malloc(0).ptr == 0, "no bytes")
    error = raised_by(lambda: malloc(2048 * MIB), cupy.OutOfMemoryError)
    expect(error and "hint" in str(error.__cause__), f"out of memory: {error}")
    del pointer, error
    expect(tenure.statistic("live_blocks") == 0, "freed with its pointer")
    expect(len(tenure.cupy_allocator._allocators) == 1, "one allocator for each stream")


def check_onnx_runtime():
    options = tenure.onnx_runtime.provider_options()
    expect(options["device_id"] == "0" and "user_compute_stream" not in options, f"{options}")
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(int(options["gpu_external_alloc"]))
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(options["gpu_external_free"]))
    empty = ctypes.CFUNCTYPE(None)(int(options["gpu_external_empty_cache"]))
    block = alloc(7 * MIB)
    expect(tenure.onnx_runtime.provider_options() == options, "for a second session")
    expect(raised_by(lambda: tenure.onnx_runtime.provider_options(0, 4096), tenure.Error),
           "while blocks are live")
    free(block)
    empty()
    expect(tenure.statistic("reserved_bytes") == 0, "ONNX Runtime's cache is empty")
    expect(tenure.onnx_runtime.provider_options(0, 4096)["user_compute_stream"] == "4096", "stream")
    expect(raised_by(lambda: tenure.onnx_runtime.provider_options(9), tenure.Error), "no device 9")


def main():
    check_numbers()
    check_torch()
    check_cupy()
    check_onnx_runtime()
    expect("frameworks" in tenure.report(), "the report in words")
    expect(json.loads(tenure.report(json=True))["pool"] == "frameworks", "the report as JSON")
    tenure.check(tenure.adapters.tn_adapters_close())
    print("ok")


main()
