#!/usr/bin/env python3
"""Round trips through DLPack with libraries that people use: NumPy, PyTorch, CuPy, JAX.

usage: dlpack_round_trips.py [--driver host|cuda] [--libraries FOLDER] [--need NAME,NAME...]

They read our tensors and we read theirs: no copy (the same address), the right bytes, the order of
streams (a slow piece of work on one side before the other reads, neither on a default stream),
every deleter called exactly once, and nothing left in our ledger. FOLDER has libtenure.so; it is
$TENURE_LIBRARIES otherwise. What is named by --need must be there; of the rest, what is there is
tried. The last line counts; exit status 1 if anything failed.
"""
import argparse
import ctypes
import gc
import importlib
import os
import sys
import time
import traceback

import tenure_dlpack as tenure

COUNT = 1 << 20
SLOW_BYTES = 1 << 30
DELETER_SECONDS = 10
ITEM_BYTES = {"TN_FP32": 4, "TN_BF16": 2, "TN_FP16": 2, "TN_BYTE": 1}


def pattern(size, seed):
    """Bytes that are nowhere a NaN of any element type, and different for each seed."""
    return bytes((i * 7 + seed * 31 + (i >> 8)) & 0x37 for i in range(4096)) * (size // 4096)


def check(condition, text):
    if not condition:
        raise AssertionError(text)


# ---- the libraries -------------------------------------------------------------------------------

class Peer:
    """One library. dtypes: what it has of ours; is_cuda: which devices it can do."""
    dtypes = ("TN_FP32", "TN_FP16", "TN_BYTE")
    stream = None  # a stream of its own, as a number, where it has any
    gives_back = True  # what it has taken it can hand on

    def __init__(self, device):
        self.device = device
        self.module = importlib.import_module(self.name)

    def with_stream(self):
        """A context in which the library works on self.stream."""
        return _Nothing()

    def settle(self):
        """Waits for all of the library's work, and lets go of what it holds on to."""
        gc.collect()


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Numpy(Peer):
    name = "numpy"

    def __init__(self, device):
        super().__init__(device)
        self.gives_back = int(self.module.__version__.split(".")[0]) >= 2

    def take(self, producer):
        return self.module.from_dlpack(producer)

    def address(self, array):
        return array.ctypes.data

    def raw(self, array):
        return array.tobytes()

    def make(self, dtype, data):
        names = {"TN_FP32": "float32", "TN_FP16": "float16", "TN_BYTE": "uint8"}
        return self.module.frombuffer(data, dtype=names[dtype]).copy()


class Torch(Peer):
    name = "torch"
    dtypes = ("TN_FP32", "TN_BF16", "TN_FP16", "TN_BYTE")

    def __init__(self, device):
        super().__init__(device)
        self.at = f"cuda:{device.dlpack_device[1]}" if device.is_cuda else "cpu"
        self.types = {"TN_FP32": self.module.float32, "TN_BF16": self.module.bfloat16,
                      "TN_FP16": self.module.float16, "TN_BYTE": self.module.uint8}
        if device.is_cuda:
            self.side = self.module.cuda.Stream(device=self.at)
            self.stream = self.side.cuda_stream

    def with_stream(self):
        return self.module.cuda.stream(self.side) if self.device.is_cuda else _Nothing()

    def settle(self):
        super().settle()
        if self.device.is_cuda:
            self.module.cuda.synchronize()

    def take(self, producer):
        return self.module.from_dlpack(producer)

    def address(self, array):
        return array.data_ptr()

    def raw(self, array):
        return bytes(array.contiguous().view(self.module.uint8).cpu().numpy())

    def make(self, dtype, data):
        host = self.module.frombuffer(bytearray(data), dtype=self.types[dtype])
        return host.to(self.at, copy=True)

    def slow(self):
        """Some tenths of a second of work on the current stream."""
        self.module.cuda._sleep(500_000_000)

    def copy_into(self, target, data):
        target.copy_(data)

    def clone(self, array):
        return array.clone()


class Cupy(Peer):
    name = "cupy"

    def __init__(self, device):
        super().__init__(device)
        self.side = self.module.cuda.Stream(non_blocking=True)
        self.stream = self.side.ptr
        self.module.cuda.set_allocator(self.module.cuda.MemoryPool().malloc)

    def with_stream(self):
        return self.side

    def new_stream(self):
        """One that is destroyed as soon as nobody has it any more."""
        return self.module.cuda.Stream(non_blocking=True)

    def settle(self):
        super().settle()
        self.module.cuda.Device().synchronize()

    def take(self, producer):
        return self.module.from_dlpack(producer)

    def address(self, array):
        return array.data.ptr

    def raw(self, array):
        return self.module.asnumpy(array).tobytes()

    def make(self, dtype, data):
        names = {"TN_FP32": "float32", "TN_FP16": "float16", "TN_BYTE": "uint8"}
        numpy = importlib.import_module("numpy")
        return self.module.asarray(numpy.frombuffer(data, dtype=names[dtype]))

    def slow(self):
        spin = self.module.RawKernel(
            'extern "C" __global__ void spin() { long long t = clock64(); '
            'while (clock64() - t < 500000000ll) {} }', "spin")
        spin((1,), (1,), ())

    def copy_into(self, target, data):
        target[...] = data

    def clone(self, array):
        return array.copy()


class Jax(Peer):
    name = "jax"
    dtypes = ("TN_FP32", "TN_BF16", "TN_FP16", "TN_BYTE")

    def __init__(self, device):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        super().__init__(device)
        if not device.is_cuda:
            self.module.config.update("jax_platforms", "cpu")
        self.numpy = importlib.import_module("jax.numpy")
        self.dlpack = importlib.import_module("jax.dlpack")
        self.types = {"TN_FP32": self.numpy.float32, "TN_BF16": self.numpy.bfloat16,
                      "TN_FP16": self.numpy.float16, "TN_BYTE": self.numpy.uint8}

    def take(self, producer):
        return self.dlpack.from_dlpack(producer, copy=False)

    def address(self, array):
        return array.unsafe_buffer_pointer()

    def raw(self, array):
        return importlib.import_module("numpy").asarray(array).tobytes()

    def make(self, dtype, data):
        numpy = importlib.import_module("numpy")
        host = numpy.frombuffer(data, dtype=numpy.uint8).view(self.types[dtype])
        return self.numpy.array(host, copy=True).block_until_ready()

    def clone(self, array):
        return self.numpy.array(array, copy=True)

    def settle(self):
        super().settle()
        self.numpy.zeros(1).block_until_ready()


PEERS = {"host": (Numpy, Torch, Jax), "cuda": (Torch, Cupy, Jax)}


# ---- the round trips -----------------------------------------------------------------------------

def once(counted):
    """A library may let go on a thread of its own (JAX does), some time after it was told to."""
    end = time.monotonic() + DELETER_SECONDS
    while any(each.calls == 0 for each in counted) and time.monotonic() < end:
        time.sleep(0.001)
    calls = [each.calls for each in counted]
    check(calls == [1] * len(calls), f"deleters were called {calls} times")


def expect_nothing_left(scope):
    ledger = scope.ledger()
    check((ledger.total_bytes, ledger.foreign_bytes, ledger.leases) == (0, 0, 0),
          f"left: {ledger.total_bytes} bytes, {ledger.foreign_bytes} of others, "
          f"{ledger.leases} leases")
    scope.close()


def they_read_ours(peer, device, dtype):
    scope = tenure.Scope(device)
    data = pattern(COUNT, 1)
    ours = scope.tensor(dtype, [64, COUNT // 64 // ITEM_BYTES[dtype]])
    ours.write(data)
    export = ours.export()
    with peer.with_stream():
        theirs = peer.take(export)
        check(peer.address(theirs) == ours.address(), "a copy was made")
        check(tuple(theirs.shape) == (64, COUNT // 64 // ITEM_BYTES[dtype]), "another shape")
        check(peer.raw(theirs) == data, "other bytes")
    try:
        scope.close()
        check(False, "the scope closed under an export")
    except tenure.Error as error:
        check(error.status == "TN_IN_USE" and "exported through DLPack" in str(error), str(error))
    check(export.counted[0].calls == 0, "the deleter was called early")
    del theirs
    peer.settle()
    once(export.counted)
    ours.destroy()
    expect_nothing_left(scope)


def we_read_theirs(peer, device, dtype):
    scope = tenure.Scope(device)
    data = pattern(COUNT, 2)
    with peer.with_stream():
        theirs = peer.make(dtype, data)
        ours, counted = scope.import_dlpack(theirs, peer.stream or device.stream.value)
    check(ours.address() == peer.address(theirs), "a copy was made")
    check(scope.ledger().foreign_bytes == COUNT, "foreign bytes are not in the ledger")
    del theirs
    gc.collect()
    check(ours.read(data_bytes=COUNT)[0] == data, "other bytes")
    check(counted[0].calls == 0, "the deleter was called early")
    ours.destroy()
    once(counted)
    expect_nothing_left(scope)


def nobody_takes_an_export(peer, device, _):
    """A capsule that no library consumes ends its export by itself."""
    scope = tenure.Scope(device)
    ours = scope.tensor("TN_FP32", [1024])
    ours.write(pattern(4096, 3))
    for version in (None, (1, 0)):
        export = ours.export()
        capsule = export.__dlpack__(max_version=version)
        check(scope.ledger().leases == 1, "the export holds no lease")
        del capsule
        gc.collect()
        once(export.counted)
    ours.destroy()
    expect_nothing_left(scope)


def our_tensor_comes_back(peer, device, dtype):
    """Ours to them to us: the memory stays one, and every deleter is called once."""
    scope = tenure.Scope(device)
    data = pattern(COUNT, 4)
    ours = scope.tensor(dtype, [COUNT // ITEM_BYTES[dtype]])
    ours.write(data)
    export = ours.export(access="TN_UPDATE")
    address = export.tensor.address()
    with peer.with_stream():
        theirs = peer.take(export)
        back, counted = scope.import_dlpack(theirs, peer.stream or device.stream.value)
    del theirs
    gc.collect()
    check(back.address() == address, "a copy was made")
    check(back.read(data_bytes=COUNT)[0] == data, "other bytes")
    back.destroy()
    peer.settle()
    once(counted + export.counted)
    ours.destroy()
    expect_nothing_left(scope)


# ---- the order of streams, on a GPU --------------------------------------------------------------

class Slow:
    """Some tenths of a second of copies on our stream."""

    def __init__(self, device):
        self.device, self.blocks = device, [ctypes.c_void_p(), ctypes.c_void_p()]
        for block in self.blocks:
            device.library.call("tn_alloc", device.pool, ctypes.c_size_t(SLOW_BYTES),
                                device.stream, None, ctypes.byref(block))

    def run(self):
        for _ in range(400):
            self.device.library.call("tn_copy", self.device.device, self.blocks[0], self.blocks[1],
                                     ctypes.c_size_t(SLOW_BYTES), self.device.stream)

    def close(self):
        for block in self.blocks:
            self.device.library.call("tn_free", block, self.device.stream)


def warm_up(peer):
    """What a library compiles and loads for its first copy would outlast what is slow here."""
    with peer.with_stream():
        peer.clone(peer.make("TN_BYTE", pattern(COUNT, 0)))
    peer.settle()


def is_busy(device, peer):
    """Whether work that was just put on a stream is still to be done: else nothing was shown."""
    cuda = ctypes.CDLL("libcuda.so.1")
    stream = device.stream if peer is None else ctypes.c_void_p(peer.stream)
    return cuda.cuStreamQuery(stream) == 600  # CUDA_ERROR_NOT_READY


def they_wait_for_our_write(peer, device, _):
    warm_up(peer)
    scope, slow = tenure.Scope(device), Slow(device)
    old, data = pattern(COUNT, 5), pattern(COUNT, 6)
    source, ours = (scope.tensor("TN_BYTE", [COUNT]) for _ in range(2))
    source.write(data)
    ours.write(old)
    with ours.lease("TN_WRITE") as view, source.lease("TN_READ") as from_view:
        slow.run()
        device.library.call("tn_copy", device.device, ctypes.c_void_p(view.data),
                            ctypes.c_void_p(from_view.data), ctypes.c_size_t(COUNT), device.stream)
    export = ours.export()
    with peer.with_stream():
        theirs = peer.take(export)
        result = peer.clone(theirs)
        check(is_busy(device, None), "our stream was done before they began: nothing is shown")
        check(peer.raw(result) == data, "they did not wait for our write")
    del theirs, result
    peer.settle()
    once(export.counted)
    slow.close()
    ours.destroy()
    source.destroy()
    expect_nothing_left(scope)


def we_wait_for_their_read(peer, device, _):
    """They read slowly and let go at once; we write right after."""
    scope = tenure.Scope(device)
    data = pattern(COUNT, 7)
    ours = scope.tensor("TN_BYTE", [COUNT])
    ours.write(data)
    export = ours.export()
    with peer.with_stream():
        theirs = peer.take(export)
        peer.slow()
        result = peer.clone(theirs)
        del theirs
    gc.collect()
    once(export.counted)
    device.library.call("tn_plane_fill", ours.handle, 0, 0xEE, device.stream)
    check(is_busy(device, peer), "their stream was done before we wrote: nothing is shown")
    device.synchronize()
    with peer.with_stream():
        check(peer.raw(result) == data, "we did not wait for their read")
    del result
    peer.settle()
    ours.destroy()
    expect_nothing_left(scope)


def we_wait_for_their_write(peer, device, _):
    scope = tenure.Scope(device)
    data = pattern(COUNT, 8)
    with peer.with_stream():
        theirs = peer.make("TN_BYTE", pattern(COUNT, 9))
        new = peer.make("TN_BYTE", data)
        peer.slow()
        peer.copy_into(theirs, new)
        ours, counted = scope.import_dlpack(theirs, peer.stream)
    check(is_busy(device, peer), "their stream was done before we read: nothing is shown")
    check(ours.read(data_bytes=COUNT)[0] == data, "we did not wait for their write")
    del theirs, new
    ours.destroy()
    once(counted)
    expect_nothing_left(scope)


def they_reuse_memory_behind_our_read(peer, device, _):
    """We read slowly and let go at once; they give the memory out again and write it."""
    scope, slow = tenure.Scope(device), Slow(device)
    data = pattern(COUNT, 10)
    target = scope.tensor("TN_BYTE", [COUNT])
    with peer.with_stream():
        theirs = peer.make("TN_BYTE", data)
        garbage = peer.make("TN_BYTE", pattern(COUNT, 11))
        address = peer.address(theirs)
        ours, counted = scope.import_dlpack(theirs, peer.stream)
        del theirs
        gc.collect()
        with ours.lease("TN_READ") as view, target.lease("TN_WRITE") as to_view:
            slow.run()
            device.library.call("tn_copy", device.device, ctypes.c_void_p(to_view.data),
                                ctypes.c_void_p(view.data), ctypes.c_size_t(COUNT), device.stream)
        ours.destroy()
        once(counted)
        again = peer.clone(garbage)
        check(peer.address(again) == address, "the memory was not given out again")
    check(is_busy(device, None), "our stream was done before they wrote: nothing is shown")
    check(target.read(data_bytes=COUNT)[0] == data, "they did not wait for our read")
    del again, garbage
    peer.settle()
    slow.close()
    target.destroy()
    expect_nothing_left(scope)


def their_stream_ends(peer, device, _):
    """They destroy each stream that they read on; the next one may have its handle."""
    scope = tenure.Scope(device)
    data = pattern(COUNT, 13)
    ours = scope.tensor("TN_BYTE", [COUNT])
    for _ in range(20):
        ours.write(data)
        export, side = ours.export(), peer.new_stream()
        with side:
            theirs = peer.take(export)
            peer.slow()
            result = peer.clone(theirs)
            del theirs
        gc.collect()
        once(export.counted)
        del side
        gc.collect()
        device.library.call("tn_plane_fill", ours.handle, 0, 0xEE, device.stream)
        peer.settle()
        check(peer.raw(result) == data, "we did not wait for their read")
        del result
    ours.destroy()
    expect_nothing_left(scope)


# ---- quantized formats ---------------------------------------------------------------------------

QUANTIZED = (("TN_FORMAT_FP8_BLOCK_2D", "TN_E4M3", "TN_PLANE_ROW"),
             ("TN_FORMAT_FP8_BLOCK_2D", "TN_E5M2", "TN_PLANE_COL"),
             ("TN_FORMAT_MXFP8", "TN_E4M3", "TN_PLANE_ROW"),
             ("TN_FORMAT_NVFP4", "TN_E2M1", "TN_PLANE_ROW"))


def quantized_planes(peer, device, case):
    """Data and scales to them, with their types; and back as the plane of a tensor again."""
    tensor_format, dtype, plane = case
    scope = tenure.Scope(device)
    ours = scope.tensor(dtype, [512, 512], tensor_format)
    layout = ours.layout(plane)
    data, scale = pattern(layout.data_bytes, 12), bytes(range(1, 17)) * (layout.scale_bytes // 16)
    ours.write(data, scale, plane)
    exports = [ours.export(plane, "TN_DLPACK_DATA", pairs=int(dtype == "TN_E2M1")),
               ours.export(plane, "TN_DLPACK_SCALE"), ours.export(plane, "TN_DLPACK_SCALE_BLOCK")]
    with peer.with_stream():
        theirs = [peer.take(export) for export in exports]
        names = [str(each.dtype).rsplit(".", maxsplit=1)[-1] for each in theirs]
        print(f"         {tensor_format} {plane}: data {names[0]} {tuple(theirs[0].shape)}, "
              f"scales {names[1]} {tuple(theirs[1].shape)}")
        check(peer.raw(theirs[0]) == data, "other bytes of data")
        check(peer.raw(theirs[2]) == scale, "other bytes of scales")
        stream = peer.stream or device.stream.value
        back, counted = scope.import_dlpack(theirs[0], stream, scale=theirs[2],
                                            format=tenure.VALUES[tensor_format],
                                            plane=tenure.VALUES[plane])
    check(back.address(plane) == ours.address(plane), "a copy was made")
    check(back.read(layout.scale_bytes, layout.data_bytes, plane) == (data, scale), "other bytes")
    del theirs
    back.destroy()
    peer.settle()
    once(counted)
    for export in exports:
        once(export.counted)
    ours.destroy()
    expect_nothing_left(scope)


# ---- running them --------------------------------------------------------------------------------

def cases_of(peer, device):
    for dtype in peer.dtypes:
        yield they_read_ours, dtype
        yield we_read_theirs, dtype
        if peer.gives_back:
            yield our_tensor_comes_back, dtype
    yield nobody_takes_an_export, ""
    if isinstance(peer, (Torch, Jax)):
        for case in QUANTIZED:
            if isinstance(peer, Torch) or case[1] != "TN_E2M1":
                yield quantized_planes, case
    if not device.is_cuda:
        return
    yield they_wait_for_our_write, ""
    if hasattr(peer, "slow"):  # JAX has no streams to name: what is here is its whole protocol
        yield we_wait_for_their_read, ""
        yield we_wait_for_their_write, ""
        yield they_reuse_memory_behind_our_read, ""
    if hasattr(peer, "new_stream"):
        yield their_stream_ends, ""


def run(peer, device):
    passed = failed = 0
    print(f"{peer.name} {peer.module.__version__}")
    for test, argument in cases_of(peer, device):
        title = f"{test.__name__} {argument if isinstance(argument, str) else argument[0]}".strip()
        try:
            test(peer, device, argument)
            print(f"  ok     {title}")
            passed += 1
        except Exception:  # whatever a library throws is a failure of this case only
            print(f"  FAILED {title}")
            traceback.print_exc(file=sys.stdout)
            failed += 1
    return passed, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--driver", choices=("host", "cuda"), default="cuda")
    parser.add_argument("--libraries", default=os.environ.get("TENURE_LIBRARIES", "."))
    parser.add_argument("--need", default="")
    options = parser.parse_args()
    needed = set(filter(None, options.need.split(",")))
    library = tenure.Library(options.libraries)
    device = tenure.Device(library, "TN_DRIVER_" + options.driver.upper())
    print(f"on {device.name}")
    passed = failed = 0
    for kind in PEERS[options.driver]:
        try:
            peer = kind(device)
        except ImportError as error:
            if kind.name in needed:
                print(f"{kind.name}: {error}")
                failed += 1
            continue
        counts = run(peer, device)
        del peer  # and its stream with it, while the next library's memory comes from our pool
        gc.collect()
        passed, failed = passed + counts[0], failed + counts[1]
    if not failed:
        device.close()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
