#!/usr/bin/env python3
"""Peers of the GEMMs: PyTorch's scaled_mm with scales of blocks, and its bf16 product.

usage: gemm_peers.py [--seconds N] [--rehearse]

Prints CSV: peer, op, m, n, k, microseconds, TFLOP/s, note. The ops are the columns of
`tenure-bench-gpu --only gemms`: fprop is 1x128 scales by 128x128 ones to bf16, wgrad 1x128 by 1x128
(PyTorch does not add to its output: that is left out here), bf16 the plain product. Data are
normal, scales powers of two. A time is the median of a few batches in a CUDA graph; the products
of a batch follow each other, as there. --rehearse: one small product of each against fp64.
"""
import argparse
import statistics
import sys
import time

import torch

try:
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm
except ImportError:
    scaled_mm = None

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 7168, 2048), (4096, 2112, 7168),
          (4096, 24576, 1536), (4096, 7168, 16384), (4096, 4096, 7168), (2048, 7168, 2304))
BATCHES, BATCH_SECONDS, TURNS = 5, 0.004, (4, 200)
BLOCK = 128


def pow2_scale(amax):
    scale = torch.where(amax == 0, torch.ones_like(amax), 448.0 / amax)
    return (scale.view(torch.int32) & -0x800000).view(torch.float32)


def rows_of_blocks(x):
    """1x128: codes, scales [rows, blocks] with rows next to each other in memory."""
    rows, cols = x.shape
    blocks = x.float().view(rows, cols // BLOCK, BLOCK)
    scale = pow2_scale(blocks.abs().amax(-1))
    codes = (blocks * scale[:, :, None]).to(torch.float8_e4m3fn).view(rows, cols)
    return codes, (1.0 / scale).t().contiguous().t()


def tiles(x):
    """128x128: codes, scales [blocks of cols padded to 4, blocks of rows]."""
    rows, cols = x.shape
    down, across = -(-rows // BLOCK), cols // BLOCK
    whole = torch.zeros(down * BLOCK, cols, device=x.device)
    whole[:rows] = x.float()
    tile = whole.view(down, BLOCK, across, BLOCK)
    scale = pow2_scale(tile.abs().amax((1, 3)))
    codes = (tile * scale[:, None, :, None]).to(torch.float8_e4m3fn).view(-1, cols)[:rows]
    inverse = torch.zeros(down, (across + 3) // 4 * 4, device=x.device)
    inverse[:, :across] = 1.0 / scale
    return codes.contiguous(), inverse.t()


def product(op, a, b):
    """A function that multiplies, and what it should give: a [m, k] by b [n, k] transposed."""
    if op == "bf16":
        return lambda: a @ b.t()
    x, x_scale = rows_of_blocks(a)
    y, y_scale = tiles(b) if op == "fprop" else rows_of_blocks(b)
    if op != "fprop":
        y_scale = y_scale.t()
    if scaled_mm is None:
        return lambda: torch._scaled_mm(x, y.t(), x_scale, y_scale, out_dtype=torch.bfloat16)
    kinds = {True: ScalingType.BlockWise128x128, False: ScalingType.BlockWise1x128}
    other = y_scale if op == "fprop" else y_scale.t()
    return lambda: scaled_mm(x, y.t(), scale_a=x_scale, scale_recipe_a=kinds[False],
                             scale_b=other, scale_recipe_b=kinds[op == "fprop"],
                             swizzle_a=SwizzleType.NO_SWIZZLE, swizzle_b=SwizzleType.NO_SWIZZLE,
                             output_dtype=torch.bfloat16)


def operands(m, n, k):
    torch.manual_seed(1)
    return (torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16))


def seconds_of(run):
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(4):
        run()
    torch.cuda.synchronize()
    once = (time.perf_counter() - begin) / 4
    turns = max(TURNS[0], min(TURNS[1], int(BATCH_SECONDS / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            run()
    times = []
    for _ in range(BATCHES + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / turns)
    return statistics.median(times[1:])


def rehearse():
    a, b = operands(256, 384, 640)
    expected = a.double() @ b.double().t()
    for op in ("fprop", "wgrad", "bf16"):
        error = ((product(op, a, b)().double() - expected).norm() / expected.norm()).item()
        print(f"{op}: relative error {error:.4f}")
        if not error < 0.05:
            sys.exit(f"gemm_peers.py: {op} is not the product")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gemm_peers.py: no GPU")
    if options.rehearse:
        return rehearse()
    end = time.monotonic() + options.seconds
    print("peer,op,m,n,k,microseconds,tflop_per_s,note", flush=True)
    for m, n, k in SHAPES:
        a, b = operands(m, n, k)
        for op in ("fprop", "wgrad", "bf16"):
            if time.monotonic() > end:
                return print(f"torch,,,,,,,out of time before {op} of {m}x{n}x{k}")
            try:
                seconds, note = seconds_of(product(op, a, b)), "cuBLASLt's first offer"
            except (RuntimeError, ValueError, TypeError) as failure:
                print(f"torch,{op},{m},{n},{k},,,{str(failure).splitlines()[0]!r}", flush=True)
                continue
            rate = 2.0 * m * n * k / seconds * 1e-12
            print(f"torch {torch.__version__},{op},{m},{n},{k},{seconds * 1e6:.2f},{rate:.1f},"
                  f"{note}", flush=True)
    return None


if __name__ == "__main__":
    main()
