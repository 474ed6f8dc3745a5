"""PyTorch with Tenure as its allocator, on a real GPU: one process for each case, since a process
has one allocator.

usage: torch_allocator.py BUILD          runs every case; exit status 1 if one fails
       torch_allocator.py BUILD CASE     runs one here

Needs torch and a CUDA device; BUILD is the folder of libtenure-torch.so.
"""
import concurrent.futures
import gc
import hashlib
import os
import subprocess
import sys
import threading

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
GIB, MIB = 1 << 30, 1 << 20


def expect(condition, words):
    if not condition:
        raise AssertionError(words)


def raises_out_of_memory(call):
    import torch
    try:
        call()
    except torch.OutOfMemoryError as error:
        expect("CUDA out of memory" in str(error), f"the words of the error: {error}")
        expect("Tenure" in str(error), f"whose error it is: {error}")
        return True
    return False


# ---- cases ---------------------------------------------------------------------------------------

def train_small():
    """The hash of the losses of a small model whose batches change their size."""
    import torch
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(),
                                torch.nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(60):
        x = torch.randn(64 + 37 * (step % 11), 512, device="cuda")
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expect(losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}")
    return hashlib.sha256(repr(losses).encode()).hexdigest()[:16]


def case_values(install):
    """The same losses as with torch's own allocator, to the bit."""
    native = subprocess.run([sys.executable, __file__, sys.argv[1], "native_values"],
                            capture_output=True, text=True, check=True).stdout.split()[-1]
    install()
    ours = train_small()
    import tenure
    expect(tenure.statistic("allocs") > 1000, "training allocated from Tenure")
    expect(ours == native, f"losses {ours}, with torch's allocator {native}")


def case_native_values(install):
    print(train_small())


def case_out_of_memory(install):
    """torch.OutOfMemoryError, in forward and in backward, and what was asked for before lives."""
    install()
    import torch
    torch.cuda.set_per_process_memory_fraction(4 * GIB / torch.cuda.mem_get_info()[1])
    kept = torch.full((1024,), 3.0, device="cuda")
    expect(raises_out_of_memory(lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda")),
           "1 PiB")
    expect(raises_out_of_memory(lambda: torch.empty(5 * GIB, dtype=torch.uint8, device="cuda")),
           "more than the fraction")
    weight = torch.ones(16384, 16384, device="cuda", requires_grad=True)  # 1 GiB
    other = torch.ones(16384, 16384, device="cuda", requires_grad=True)
    product = (weight * other).sum()                                      # 3 GiB; backward 5
    expect(raises_out_of_memory(product.backward), "a backward pass")
    del product, weight, other
    gc.collect()
    batch, failures = 1 << 17, 0
    while True:  # as training code looks for the largest batch
        try:
            x = torch.empty(batch, 16384, device="cuda")
            break
        except torch.OutOfMemoryError:
            batch, failures = batch // 2, failures + 1
    expect(batch == 1 << 15 and failures == 2, f"batch {batch} after {failures} failures")
    del x
    expect(kept.sum().item() == 3072.0, "older memory is as it was")
    expect(torch.cuda.memory_stats()["num_ooms"] >= 5, "num_ooms")


def case_streams(install):
    """A block that a side stream still reads is not given out, thanks to record_stream."""
    install()
    import torch
    side = torch.cuda.Stream()
    for _ in range(50):
        source = torch.full((4 * MIB,), 1, dtype=torch.int32, device="cuda")
        result = torch.empty_like(source)
        side.wait_stream(torch.cuda.current_stream())
        source.record_stream(side)
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            result.copy_(source)
        del source
        torch.full((4 * MIB,), 2, dtype=torch.int32, device="cuda")  # would be the same memory
        torch.cuda.synchronize()
        expect(bool((result == 1).all()), "the side stream read what was written after the free")


def case_graph(install):
    """Captured graphs: replays, a shared pool, a training step; all memory comes back."""
    install()
    import tenure
    import torch
    x = torch.randn(512, 512, device="cuda")
    weight = torch.randn(512, 512, device="cuda")
    expected = (x @ weight).relu() @ weight
    torch.cuda.synchronize()
    del expected
    torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream, of graphs too
    before = tenure.statistic("live_blocks")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        y = (x @ weight).relu() @ weight
    with torch.cuda.graph(second, pool=first.pool()):
        z = y.sin() + 1
    for step in range(20):
        x.copy_(torch.randn(512, 512, device="cuda"))
        first.replay()
        second.replay()
        expected = (x @ weight).relu() @ weight
        torch.full((64 * MIB,), step, dtype=torch.uint8, device="cuda")
        expect(torch.equal(y, expected) and torch.equal(z, expected.sin() + 1), f"replay {step}")
    del y, z, expected, first, second
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    live = tenure.statistic("live_blocks")
    expect(live == before, f"{live} blocks are live, {before} before the graphs")
    layer = torch.nn.Linear(256, 256).cuda()
    with torch.no_grad():  # no node of autograd's outside of the captures
        plain = layer(x[:, :256])
    graphed = torch.cuda.make_graphed_callables(layer, (torch.randn(512, 256, device="cuda"),))
    expect(torch.equal(graphed(x[:, :256].contiguous()), plain), "a graphed layer")
    graphed(x[:, :256].contiguous()).sum().backward()
    torch.cuda.synchronize()


def case_failed_capture(install):
    """A capture that throws midway: memory works on, and so do later captures."""
    install()
    import torch
    x = torch.randn(1024, device="cuda")
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                y = x * 2
                y.sum().item()  # forbidden in a capture
            raise AssertionError("the capture did not fail")
        except RuntimeError:
            pass
        y = None
        del graph
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = x * 3
    graph.replay()
    expect(torch.equal(z, x * 3), "a capture after three that failed")
    expect(torch.equal(torch.full((8,), 5.0, device="cuda"), torch.tensor([5.0] * 8).cuda()),
           "ordinary memory after captures that failed")


def case_mem_pool(install):
    """torch's own allocator with a MemPool of Tenure's segments; also for a graph."""
    import tenure.pytorch
    import torch
    pool = tenure.pytorch.mem_pool()
    outside = torch.ones(1024, device="cuda")
    with torch.cuda.use_mem_pool(pool):
        x = torch.full((32 * MIB,), 1.0, device="cuda")
    expect(tenure.statistic("live_bytes") >= 128 * MIB, "the pool's segments are Tenure's")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        y = x * 2 + outside[0]
    graph.replay()
    expect(bool((y == 3).all()), "a graph in the pool")
    total = torch.cuda.mem_get_info()[1]
    try:
        with torch.cuda.use_mem_pool(pool):
            torch.empty(2 * total, dtype=torch.uint8, device="cuda")
        raise AssertionError("twice the device's memory")
    except torch.OutOfMemoryError:
        pass
    del x, y, graph, pool
    gc.collect()
    torch.cuda.empty_cache()
    tenure.trim()
    expect(tenure.statistic("live_bytes") == 0, "segments of a pool that has ended are live")


def case_statistics(install):
    install()
    import torch
    x = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    expect(torch.cuda.memory_allocated() == 100 * MIB, f"{torch.cuda.memory_allocated()}")
    expect(torch.cuda.memory_reserved() >= 100 * MIB, "memory_reserved")
    del x
    expect(torch.cuda.max_memory_allocated() == 100 * MIB, "max_memory_allocated")
    torch.cuda.reset_peak_memory_stats()
    expect(torch.cuda.max_memory_allocated() == 0, "after reset_peak_memory_stats")
    torch.cuda.empty_cache()
    expect(torch.cuda.memory_reserved() == 0, f"{torch.cuda.memory_reserved()} after empty_cache")
    expect("Allocated memory" in torch.cuda.memory_summary(), "memory_summary")


def case_threads(install):
    install()
    import torch
    wrong = []

    def work(number):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for step in range(200):
                x = torch.full((1000 + 77 * step,), number, device="cuda")
                if step % 20 == 0 and not bool((x == number).all()):
                    wrong.append((number, step))

    def guarded(number):
        try:
            work(number)
        except Exception as error:  # a thread's own would be lost
            wrong.append((number, error))

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect(not wrong, f"wrong contents: {wrong[:5]}")


def case_two_devices(install):
    install()
    import torch
    if torch.cuda.device_count() < 2:
        print("one device only: nothing to copy to")
        return
    for size in (1000, 64 * MIB):
        x = torch.arange(size, device="cuda:0", dtype=torch.int32)
        y = x.to("cuda:1")
        z = y.to("cuda:0")
        expect(torch.equal(x, z), f"{size} elements to the other device and back")
    x, y = torch.ones(8, device="cuda:0"), torch.ones(8, device="cuda:1")
    expect(torch.equal((x + 1).to("cuda:1"), y + 1), "a sum on each")


def case_dlpack(install):
    """A tensor that the DLPack allocator made is torch's, and its memory comes back."""
    import ctypes
    import tenure
    import torch

    class Prototype(ctypes.Structure):  # DLTensor
        _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                    ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                    ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                    ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                    ("byte_offset", ctypes.c_uint64)]
    name = ctypes.create_string_buffer(b"dltensor_versioned")
    shape = (ctypes.c_int64 * 2)(300, 400)
    cuda, float_code = 2, 2
    prototype = Prototype(None, cuda, 0, 2, float_code, 32, 1, ctypes.addressof(shape), None, 0)
    made = ctypes.c_void_p()
    status = tenure.adapters.tn_dlpack_allocate(ctypes.byref(prototype), ctypes.byref(made), None,
                                                None)
    expect(status == 0, "tn_dlpack_allocate")
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    capsule = new_capsule(made, ctypes.addressof(name), None)
    tensor = torch.from_dlpack(capsule)
    tensor.fill_(2)
    expect(tensor.shape == (300, 400) and tensor.sum().item() == 240000.0, "its values")
    expect(tenure.statistic("live_bytes") == 480000, "its bytes")
    del tensor, capsule
    gc.collect()
    tenure.trim()
    expect(tenure.statistic("live_bytes") == 0, "its memory after the last tensor")


# ---- the runner ----------------------------------------------------------------------------------

CASES = {name[5:]: function for name, function in list(globals().items())
         if name.startswith("case_")}


def run_case(name):
    sys.path.insert(0, os.path.join(ROOT, "python"))
    os.environ["TENURE_LIBRARY_DIR"] = os.path.abspath(sys.argv[1])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def install():
        import tenure.pytorch
        tenure.pytorch.install()

    import torch
    expect(torch.cuda.device_count() > 0, "no CUDA device")
    CASES[name](install)


def main():
    if len(sys.argv) == 3:
        run_case(sys.argv[2])
        return 0
    def run_apart(name):
        return subprocess.run([sys.executable, __file__, sys.argv[1], name], check=False, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    names = [name for name in CASES if name != "native_values"]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(4) as workers:  # most of it is importing torch
        for name, done in zip(names, workers.map(run_apart, names)):
            failed += done.returncode != 0
            print(f"torch_allocator: {name}: {'FAILED' if done.returncode else 'ok'}", flush=True)
            if done.returncode or "nothing to" in done.stdout:
                print(done.stdout, flush=True)
    print(f"torch_allocator: {len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
