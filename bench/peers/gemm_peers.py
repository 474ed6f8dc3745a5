#!/usr/bin/env python3
"""tn_gemm and PyTorch's scaled_mm (and its bf16 product) on the same shapes, in turns.

usage: gemm_peers.py [--libraries FOLDER] [--seconds N] [--only OP] [--rehearse]

Prints CSV: who, op, m, n, k, microseconds, TFLOP/s, percent, note. fprop is 1x128 scales by 128x128
ones to bf16, wgrad 1x128 by 1x128 to bf16, bf16 the plain product. `tuned` is tn_gemm after
tn_gemm_tune, `first` its call with the algorithm pinned that cuBLASLt's heuristic offers first,
`torch` PyTorch. Data are normal, scales powers of two. In each round each has a batch of launches
there and one back, behind a kernel that holds the GPU until all are queued; a time is the median of
the rounds, percent that of `tuned` against it within a round: 100 and more where tuned is no
slower. FOLDER has libtenure.so and libtenure-ops.so (default: $TENURE_LIBRARIES); without it
PyTorch is timed alone. --rehearse: one small product of each against fp64.
"""
import argparse
import ctypes
import os
import statistics
import sys
import time

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/gpu"))
import tenure_dlpack as tenure  # noqa: E402

try:
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm
except ImportError:
    scaled_mm = None

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 7168, 2048), (4096, 2112, 7168),
          (4096, 24576, 1536), (4096, 7168, 16384), (4096, 4096, 7168), (2048, 7168, 2304))
OPS = ("fprop", "wgrad", "bf16")
ROUNDS, BATCH_SECONDS, TURNS = 9, 0.002, (2, 100)
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
    codes = (tile * scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(-1, cols)[:rows]
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


class Ours:
    """tn_gemm on the stream that PyTorch works on."""

    def __init__(self, folder):
        self.ops = ctypes.CDLL(os.path.join(folder, "libtenure-ops.so"))
        self.device = tenure.Device(tenure.Library(folder), "TN_DRIVER_CUDA")
        self.scope = tenure.Scope(self.device)
        self.stream = torch.cuda.ExternalStream(self.device.stream.value)

    def call(self, name, arguments, *more):
        status = getattr(self.ops, name)(ctypes.byref(arguments), *more)
        if status != 0:
            library = self.device.library.c
            raise tenure.Error(library.tn_status_name(status).decode(),
                               library.tn_error_last().decode())

    def operand(self, source, tensor_format, plane):
        """A tensor of ours with source's values: as they are, or quantized."""
        theirs, _ = self.scope.import_dlpack(source.contiguous(), self.device.stream.value)
        if tensor_format == "TN_FORMAT_PLAIN":
            return theirs
        made = self.scope.tensor("TN_E4M3", source.shape, tensor_format)
        quantize = tenure.new("tn_quantize_args", src=theirs.handle, dst=made.handle,
                              planes=tenure.VALUES[plane])
        self.call("tn_quantize", quantize, self.device.stream)
        theirs.destroy()
        return made

    def product(self, op, a, b):
        """The arguments of a [m, k] by b [n, k] transposed, tuned, and its operands."""
        vectors, tiles, row = "TN_FORMAT_FP8_BLOCK_1D", "TN_FORMAT_FP8_BLOCK_2D", "TN_QUANTIZE_ROW"
        form = "TN_GEMM_WGRAD" if op == "wgrad" else "TN_GEMM_FPROP"
        if op == "wgrad":
            operands = [self.operand(x.t(), vectors, "TN_QUANTIZE_COL") for x in (a, b)]
        elif op == "fprop":
            operands = [self.operand(a, vectors, row), self.operand(b, tiles, row)]
        else:
            operands = [self.operand(x, "TN_FORMAT_PLAIN", row) for x in (a, b)]
        operands.append(self.scope.tensor("TN_BF16", (a.shape[0], b.shape[0])))
        arguments = tenure.new("tn_gemm_args", form=tenure.VALUES[form], a=operands[0].handle,
                               b=operands[1].handle, d=operands[2].handle, scope=self.scope.handle)
        self.call("tn_gemm_tune", arguments, self.device.stream)
        return arguments, operands

    def runner(self, arguments, algorithm):
        pinned = type(arguments).from_buffer_copy(arguments)
        pinned.algorithm = algorithm
        return lambda: self.call("tn_gemm", pinned, self.device.stream)

    def choice(self, arguments):
        choice = tenure.new("tn_gemm_choice")
        self.call("tn_gemm_choice_get", arguments, ctypes.byref(choice))
        return f"{choice.algorithm} of {choice.algorithms}: {choice.description.decode()}"


# ---- times ---------------------------------------------------------------------------------------

def queue(run, turns):
    """Host's seconds to put them on the stream."""
    begin = time.perf_counter()
    for _ in range(turns):
        run()
    return time.perf_counter() - begin


def batch_seconds(run, turns, hold_cycles):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(hold_cycles)
    start.record()
    queue(run, turns)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / turns


def compare(runs):
    """{who: [seconds of each round]}."""
    everyone = list(runs)
    turns, cycles = {}, {}
    for who in everyone:
        queue(runs[who], 3)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        queue(runs[who], 4)
        torch.cuda.synchronize()
        once = (time.perf_counter() - begin) / 4
        turns[who] = max(TURNS[0], min(TURNS[1], int(BATCH_SECONDS / once)))
        cycles[who] = int(3 * queue(runs[who], turns[who]) * 2e9) + 100000
        torch.cuda.synchronize()
    times = {who: [] for who in everyone}
    for number in range(ROUNDS + 1):
        both = dict.fromkeys(everyone, 0.0)
        for who in everyone + everyone[::-1]:
            both[who] += batch_seconds(runs[who], turns[who], cycles[who]) / 2
        for who in everyone:
            if number > 0:
                times[who].append(both[who])
    return times


def report(op, shape, times, notes):
    m, n, k = shape
    for who, seconds in times.items():
        time_us = statistics.median(seconds) * 1e6
        ratio = ""
        if "tuned" in times:
            ratio = "%.1f" % (100 * statistics.median(
                theirs / ours for theirs, ours in zip(seconds, times["tuned"])))
        print(f"{who},{op},{m},{n},{k},{time_us:.2f},{2e-6 * m * n * k / time_us:.1f},{ratio},"
              f"{notes[who]}", flush=True)


def measure(op, shape, ours):
    a, b = operands(*shape)
    notes = {"torch": f"PyTorch {torch.__version__}", "first": "cuBLASLt's first offer"}
    runs, kept = {}, []
    if ours:
        arguments, kept = ours.product(op, a, b)
        runs = {"tuned": ours.runner(arguments, 0), "first": ours.runner(arguments, 1)}
        notes["tuned"] = ours.choice(arguments)
    try:
        theirs = product(op, a, b)
        theirs()
        runs["torch"] = theirs
    except (RuntimeError, ValueError, TypeError) as failure:
        print(f"torch,{op},{shape[0]},{shape[1]},{shape[2]},,,,"
              f"{str(failure).splitlines()[0]!r}", flush=True)
    report(op, shape, compare(runs), notes)
    for tensor in kept:
        tensor.destroy()


def rehearse(ours):
    a, b = operands(256, 384, 640)
    expected = a.double() @ b.double().t()
    for op in OPS:
        results = {"torch": product(op, a, b)()}
        if ours:
            arguments, kept = ours.product(op, a, b)
            ours.runner(arguments, 0)()
            data, _ = kept[2].read(data_bytes=256 * 384 * 2)
            results["ours"] = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(
                256, 384).to(a.device)
        for who, result in results.items():
            error = ((result.double() - expected).norm() / expected.norm()).item()
            print(f"{who} {op}: relative error {error:.4f}")
            if not error < 0.05:
                sys.exit(f"gemm_peers.py: {op} of {who} is not the product")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--libraries", default=os.environ.get("TENURE_LIBRARIES"))
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--only", choices=OPS)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gemm_peers.py: no GPU")
    torch.zeros(1, device="cuda")  # the context that both work in
    ours = Ours(options.libraries) if options.libraries else None
    with torch.cuda.stream(ours.stream if ours else torch.cuda.current_stream()):
        if options.rehearse:
            return rehearse(ours)
        end = time.monotonic() + options.seconds
        print("who,op,m,n,k,microseconds,tflop_per_s,percent,note", flush=True)
        for shape in SHAPES:
            for op in OPS:
                if options.only in (None, op):
                    if time.monotonic() > end:
                        return print(f"out of time before {op} of {shape}")
                    measure(op, shape, ours)
    return None


if __name__ == "__main__":
    main()
