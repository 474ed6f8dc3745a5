#!/usr/bin/env python3
"""Peers of the casts: Triton kernels of the same ops, torch.compile of their plain formulation.

usage: cast_peers.py [--seconds N] [--size MxK] [--rehearse] [WORD...]

Prints CSV with the columns of `tenure-bench-gpu --csv` and the same names of ops, so that lines can
be held side by side: bf16 in, E4M3 with power-of-two scales out, the layouts of docs/formats.md.
The Triton kernels are ours, plain ones, each with the best of a few launch parameters. As there,
buffers rotate so that nothing is found in the L2 cache, a time is the median of a few batches of
launches that do not wait for the host (here: of a CUDA graph), and the copies of the same size
that are measured between the others are what shares are of. Compiling is not measured.

Each op is checked first on a small input: "equal" in the note says that codes and scales are those
of the definition, bit for bit; where exp or the order of a sum is the peer's own, how many codes
are. After --seconds (115) no further measurement is begun: a line says so. With words, only ops
with one of them in their name. --rehearse: the checks alone, on the CPU, with Triton's interpreter.
"""
import argparse
import os
import statistics
import sys
import time

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import torch._inductor.config  # noqa: E402
import torch.nn.functional as F  # noqa: E402

try:
    import triton
    import triton.language as tl
except ImportError as missing:
    sys.exit(f"cast_peers.py: {missing}")

SIZES = ((65536, 7168), (8192, 8192), (15872, 16384), (16384, 7168), (4096, 4096))
COMPILED_SIZES = SIZES[:2]  # each size is compiled by itself, which takes seconds
SMALL = (128, 256)
ROTATED_BYTES = 512e6
SETS_MAX, BATCHES, BATCH_SECONDS, TURNS = 8, 5, 0.004, (12, 200)
WANTED_SHARE, WANTED_FROM_BYTES = 0.90, 64 * 2 ** 20
LEAST_EQUAL = 0.995  # of the codes, where bits are the peer's own
LEAST_ROUGH = 0.9  # torch.compile may leave out a rounding; Triton's interpreter has its own
BLOCK = 128
EPSILON = 1e-5


# ---- the definition, and what torch.compile is given ---------------------------------------------

def pow2_scale(amax):
    scale = torch.where(amax == 0, torch.ones_like(amax), 448.0 / amax)
    return (scale.view(torch.int32) & -0x800000).view(torch.float32)


def quantize_1d_row(x):
    rows, cols = x.shape
    blocks = x.float().view(rows, cols // BLOCK, BLOCK)
    scale = pow2_scale(blocks.abs().amax(-1))
    codes = (blocks * scale[:, :, None]).to(torch.float8_e4m3fn).view(rows, cols)
    return codes, (1.0 / scale).t().contiguous()


def quantize_1d_both(x):
    rows, cols = x.shape
    blocks = x.float().view(rows // BLOCK, BLOCK, cols)
    scale = pow2_scale(blocks.abs().amax(1))
    codes = (blocks * scale[:, None, :]).to(torch.float8_e4m3fn).view(rows, cols)
    return quantize_1d_row(x) + (codes.t().contiguous(), 1.0 / scale)


def quantize_2d_row(x):
    rows, cols = x.shape
    tiles = x.float().view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
    scale = pow2_scale(tiles.abs().amax((1, 3)))
    codes = (tiles * scale[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, cols)
    return codes, 1.0 / scale


def quantize_2d_both(x):
    codes, scale = quantize_2d_row(x)
    return codes, scale, codes.t().contiguous(), scale.t().contiguous()


def dequantize_1d_row(codes, scale):
    rows, cols = codes.shape
    blocks = codes.float().view(rows, cols // BLOCK, BLOCK)
    return ((blocks * scale.t()[:, :, None]).to(torch.bfloat16).view(rows, cols),)


def transpose_2d(codes, scale):
    return codes.t().contiguous(), scale.t().contiguous()


def swiglu(x):
    half = x.shape[1] // 2
    return (F.silu(x[:, :half].float()) * x[:, half:].float()).to(torch.bfloat16)


def swiglu_1d_row(x):
    return quantize_1d_row(swiglu(x))


def swiglu_1d_both(x):
    return quantize_1d_both(swiglu(x))


def rmsnorm_1d_row(x, gamma):
    wide = x.float()
    rstd = torch.rsqrt((wide * wide).mean(1, keepdim=True) + EPSILON)
    y = (wide * rstd * gamma.float()).to(torch.bfloat16)
    return quantize_1d_row(y) + (rstd,)


# ---- Triton kernels ------------------------------------------------------------------------------

@triton.jit
def scale_of(amax):
    scale = tl.where(amax == 0.0, 1.0, tl.div_rn(448.0, amax))
    return (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)


@triton.jit
def cast_rows(value, q, s, row, rows, block, cols):
    """Quantizes blocks of 1x128 of [ROWS, 128] values: the scales go to [cols / 128, rows]."""
    scale = scale_of(tl.max(tl.abs(value), axis=1))
    codes = (value * scale[:, None]).to(tl.float8e4nv)
    at = row[:, None].to(tl.int64) * cols + block * 128 + tl.arange(0, 128)[None, :]
    tl.store(q + at, codes)
    tl.store(s + block.to(tl.int64) * rows + row, tl.div_rn(1.0, scale))


@triton.jit
def cast_columns(value, q, s, row, rows, block, cols):
    """Blocks of 128x1 of [128, 128] values, stored turned: the scales go to [rows / 128, cols]."""
    scale = scale_of(tl.max(tl.abs(value), axis=0))
    codes = tl.trans((value * scale[None, :]).to(tl.float8e4nv))
    col = block * 128 + tl.arange(0, 128)
    tl.store(q + col[:, None].to(tl.int64) * rows + row[None, :], codes)
    tl.store(s + (tl.min(row, axis=0) // 128).to(tl.int64) * cols + col, tl.div_rn(1.0, scale))


@triton.jit
def quantize_rows_kernel(x, q, s, rows, cols, ROWS: tl.constexpr):
    row, block = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0)
    at = row[:, None].to(tl.int64) * cols + block * 128 + tl.arange(0, 128)[None, :]
    cast_rows(tl.load(x + at).to(tl.float32), q, s, row, rows, block, cols)


@triton.jit
def quantize_tile_kernel(x, q, s, q_col, s_col, rows, cols):
    row, block = tl.program_id(1) * 128 + tl.arange(0, 128), tl.program_id(0)
    at = row[:, None].to(tl.int64) * cols + block * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(x + at).to(tl.float32)
    cast_rows(value, q, s, row, rows, block, cols)
    cast_columns(value, q_col, s_col, row, rows, block, cols)


@triton.jit
def quantize_square_kernel(x, q, s, q_col, s_col, rows, cols, HAS_COL: tl.constexpr):
    across, down = tl.program_id(0), tl.program_id(1)
    row, col = down * 128 + tl.arange(0, 128), across * 128 + tl.arange(0, 128)
    at = row[:, None].to(tl.int64) * cols + col[None, :]
    value = tl.load(x + at).to(tl.float32)
    scale = scale_of(tl.max(tl.max(tl.abs(value), axis=1), axis=0))
    codes = (value * scale).to(tl.float8e4nv)
    tl.store(q + at, codes)
    tl.store(s + down * (cols // 128) + across, tl.div_rn(1.0, scale))
    if HAS_COL:
        tl.store(q_col + col[:, None].to(tl.int64) * rows + row[None, :], tl.trans(codes))
        tl.store(s_col + across * (rows // 128) + down, tl.div_rn(1.0, scale))


@triton.jit
def transpose_kernel(q, s, q_col, s_col, rows, cols):
    across, down = tl.program_id(0), tl.program_id(1)
    row, col = down * 128 + tl.arange(0, 128), across * 128 + tl.arange(0, 128)
    codes = tl.load(q + row[:, None].to(tl.int64) * cols + col[None, :])
    tl.store(q_col + col[:, None].to(tl.int64) * rows + row[None, :], tl.trans(codes))
    scale = tl.load(s + down * (cols // 128) + across)
    tl.store(s_col + across * (rows // 128) + down, scale)


@triton.jit
def dequantize_kernel(q, s, y, rows, cols, ROWS: tl.constexpr):
    row, block = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0)
    at = row[:, None].to(tl.int64) * cols + block * 128 + tl.arange(0, 128)[None, :]
    scale = tl.load(s + block.to(tl.int64) * rows + row)
    tl.store(y + at, (tl.load(q + at).to(tl.float32) * scale[:, None]).to(tl.bfloat16))


@triton.jit
def swiglu_of(x, row, block, cols):
    at = row[:, None].to(tl.int64) * (2 * cols) + block * 128 + tl.arange(0, 128)[None, :]
    gate, up = tl.load(x + at).to(tl.float32), tl.load(x + at + cols).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(tl.bfloat16).to(tl.float32)


@triton.jit
def swiglu_rows_kernel(x, q, s, rows, cols, ROWS: tl.constexpr):
    row, block = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0)
    cast_rows(swiglu_of(x, row, block, cols), q, s, row, rows, block, cols)


@triton.jit
def swiglu_tile_kernel(x, q, s, q_col, s_col, rows, cols):
    row, block = tl.program_id(1) * 128 + tl.arange(0, 128), tl.program_id(0)
    value = swiglu_of(x, row, block, cols)
    cast_rows(value, q, s, row, rows, block, cols)
    cast_columns(value, q_col, s_col, row, rows, block, cols)


@triton.jit
def rmsnorm_kernel(x, gamma, q, s, rstd_out, rows, cols, epsilon, WIDTH: tl.constexpr):
    """A row each: WIDTH, a power of two, holds it whole."""
    row = tl.program_id(0)
    col = tl.arange(0, WIDTH)
    value = tl.load(x + row.to(tl.int64) * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, axis=0) / cols + epsilon)
    weight = tl.load(gamma + col, mask=col < cols, other=0.0).to(tl.float32)
    y = (value * rstd * weight).to(tl.bfloat16).to(tl.float32)
    blocks = tl.reshape(y, (WIDTH // 128, 128))
    scale = scale_of(tl.max(tl.abs(blocks), axis=1))
    codes = tl.reshape((blocks * scale[:, None]).to(tl.float8e4nv), (WIDTH,))
    tl.store(q + row.to(tl.int64) * cols + col, codes, mask=col < cols)
    block = tl.arange(0, WIDTH // 128)
    tl.store(s + block.to(tl.int64) * rows + row, tl.div_rn(1.0, scale), mask=block < cols // 128)
    tl.store(rstd_out + row, rstd)


# ---- ops -----------------------------------------------------------------------------------------

def empty(device, dtype, *shape):
    return torch.empty(shape, dtype=dtype, device=device)


def row_plane(device, rows, cols):
    return (empty(device, torch.float8_e4m3fn, rows, cols),
            empty(device, torch.float32, cols // BLOCK, rows))


def both_planes(device, rows, cols):
    return row_plane(device, rows, cols) + (empty(device, torch.float8_e4m3fn, cols, rows),
                                            empty(device, torch.float32, rows // BLOCK, cols))


def square_planes(device, rows, cols):
    return (empty(device, torch.float8_e4m3fn, rows, cols),
            empty(device, torch.float32, rows // BLOCK, cols // BLOCK),
            empty(device, torch.float8_e4m3fn, cols, rows),
            empty(device, torch.float32, cols // BLOCK, rows // BLOCK))


def random(device, rows, cols):
    return torch.randn(rows, cols, device=device, dtype=torch.bfloat16)


class Op:
    """plain: the definition, of `inputs` (made for a size). outputs: what a kernel writes, of which
    the first `compared` are compared. launch: puts the kernel on the stream, with each of `tries`
    as parameters. exact: the bits are to be those of the definition."""

    def __init__(self, name, plain, outputs, launch, tries, inputs=None, exact=True, compared=None):
        self.name, self.plain, self.outputs, self.launch = name, plain, outputs, launch
        self.tries, self.exact, self.compared = tries, exact, compared
        self.inputs = inputs or (lambda device, rows, cols: (random(device, rows, cols),))


def up4(number):
    return (number + 3) // 4 * 4


def square_scale_bytes(rows, cols):
    return 4 * (rows // BLOCK) * up4(cols // BLOCK) + 4 * (cols // BLOCK) * up4(rows // BLOCK)


def bytes_of(name, rows, cols):
    """What must move, by the rules of bench/gpu/gpu_bench_cast.h."""
    elements, half = rows * cols, cols // 2
    row_scales, col_scales = 4 * (cols // BLOCK) * up4(rows), 4 * (rows // BLOCK) * up4(cols)
    square_row = 4 * (rows // BLOCK) * up4(cols // BLOCK)
    return {
        "copy bf16": 4 * elements,
        "quantize 1D row": 3 * elements + row_scales,
        "quantize 1D both": 4 * elements + row_scales + col_scales,
        "quantize 2D row": 3 * elements + square_row,
        "quantize 2D both": 4 * elements + square_scale_bytes(rows, cols),
        "dequantize 1D row": 3 * elements + row_scales,
        "transpose 2D row to column": 2 * elements + square_scale_bytes(rows, cols),
        "SwiGLU 1D row": 2 * elements + rows * half + 4 * (half // BLOCK) * up4(rows),
        "SwiGLU 1D both": 2 * elements + 2 * rows * half + 4 * (half // BLOCK) * up4(rows) +
                          4 * (rows // BLOCK) * up4(half),
        "RMSNorm 1D row": 3 * elements + row_scales + 2 * cols + 4 * rows,
    }[name]


def by_rows(kernel):
    """Launches of a kernel whose programs have `lines` rows and 128 columns of its outputs."""
    def launch(inputs, outputs, lines, warps):
        rows, cols = outputs[0].shape
        kernel[(cols // BLOCK, rows // lines)](*inputs, *outputs, rows, cols, ROWS=lines,
                                               num_warps=warps)
    return launch


def by_tiles(kernel, **constants):
    def launch(inputs, outputs, warps):
        rows, cols = outputs[0].shape
        kernel[(cols // BLOCK, rows // BLOCK)](*inputs, *outputs, rows, cols, num_warps=warps,
                                               **constants)
    return launch


def transpose_by_tiles(inputs, outputs, warps):
    rows, cols = inputs[0].shape
    transpose_kernel[(cols // BLOCK, rows // BLOCK)](*inputs, *outputs, rows, cols,
                                                     num_warps=warps)


def rmsnorm_by_rows(inputs, outputs, warps):
    rows, cols = inputs[0].shape
    rmsnorm_kernel[(rows,)](*inputs, *outputs, rows, cols, EPSILON,
                            WIDTH=triton.next_power_of_2(cols), num_warps=warps)


def half_of(planes):
    return lambda device, rows, cols: planes(device, rows, cols // 2)


def quantized_inputs(quantize):
    return lambda device, rows, cols: quantize(random(device, rows, cols))


ROW_TRIES = ((16, 4), (32, 4), (64, 8), (128, 8))
TILE_TRIES = ((4,), (8,), (16,))
OPS = (
    Op("quantize 1D row", quantize_1d_row, row_plane, by_rows(quantize_rows_kernel), ROW_TRIES),
    Op("quantize 1D both", quantize_1d_both, both_planes, by_tiles(quantize_tile_kernel),
       TILE_TRIES),
    Op("quantize 2D row", quantize_2d_row, square_planes,
       by_tiles(quantize_square_kernel, HAS_COL=False), TILE_TRIES, compared=2),
    Op("quantize 2D both", quantize_2d_both, square_planes,
       by_tiles(quantize_square_kernel, HAS_COL=True), TILE_TRIES),
    Op("dequantize 1D row", dequantize_1d_row,
       lambda device, rows, cols: (random(device, rows, cols),), by_rows(dequantize_kernel),
       ROW_TRIES, inputs=quantized_inputs(quantize_1d_row)),
    Op("transpose 2D row to column", transpose_2d,
       lambda device, rows, cols: square_planes(device, rows, cols)[2:], transpose_by_tiles,
       TILE_TRIES, inputs=quantized_inputs(quantize_2d_row)),
    Op("SwiGLU 1D row", swiglu_1d_row, half_of(row_plane), by_rows(swiglu_rows_kernel), ROW_TRIES,
       exact=False),
    Op("SwiGLU 1D both", swiglu_1d_both, half_of(both_planes), by_tiles(swiglu_tile_kernel),
       TILE_TRIES, exact=False),
    Op("RMSNorm 1D row", rmsnorm_1d_row,
       lambda device, rows, cols: row_plane(device, rows, cols) +
       (empty(device, torch.float32, rows, 1),),
       rmsnorm_by_rows, TILE_TRIES, exact=False, compared=2,
       inputs=lambda device, rows, cols: (random(device, rows, cols), random(device, 1, cols)[0])),
)


# ---- checking ------------------------------------------------------------------------------------

def raw(tensor):
    """Its bits as integers, with -0 as it is."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[
        tensor.element_size()])


def small_inputs(op, device):
    torch.manual_seed(1)
    inputs = op.inputs(device, *SMALL)
    if inputs[0].dtype == torch.bfloat16:
        inputs[0][3, :BLOCK] = 0  # a block of zeros has scale 1
        inputs[0][5] *= 1000.0
    return inputs


def verdict(op, results, expected, least):
    """A note, or an exception where less than that of a part of the result is equal."""
    shares = [1.0 - (raw(got) != raw(wanted)).count_nonzero().item() / got.numel()
              for got, wanted in zip(results, expected)][:op.compared]
    if min(shares) < least:
        raise RuntimeError(f"wrong: of the parts of the result are equal: {shares}")
    return "equal" if min(shares) == 1.0 else f"{100 * min(shares):.3f} % equal"


def check_triton(op, device, parameters, least):
    inputs = small_inputs(op, device)
    outputs = op.outputs(device, *SMALL)
    op.launch(inputs, outputs, *parameters)
    return verdict(op, outputs, op.plain(*inputs), least)


# ---- measuring -----------------------------------------------------------------------------------

def sets_for(rows, cols):
    return min(SETS_MAX, -(-int(ROTATED_BYTES) // (rows * cols * 4)))


def seconds_between_events(turns, work):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / turns


def run_turns(work, turns):
    for turn in range(turns):
        work(turn)


def seconds_of(work):
    """The median of batches, each one launch of a graph; of a loop where work can not be caught."""
    run_turns(work, 5)
    once = seconds_between_events(10, lambda: run_turns(work, 10))
    turns = max(TURNS[0], min(TURNS[1], int(BATCH_SECONDS / once)))
    batch = lambda: run_turns(work, turns)  # noqa: E731
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_turns(work, turns)
        batch = graph.replay
    except RuntimeError as error:
        print(f"# no graph: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
    batch()
    return statistics.median(seconds_between_events(turns, batch) for _ in range(BATCHES))


class Bench:
    """Rows are kept until the copies of their size are known."""

    def __init__(self, device, seconds, words):
        self.device, self.words = device, words
        self.end = time.monotonic() + seconds
        self.copy_rates, self.rows = [], []
        self.tries = {op.name: list(op.tries) for op in OPS}
        self.notes = {}

    def copy(self, size):
        sets = [(random(self.device, *size), empty(self.device, torch.bfloat16, *size))
                for _ in range(sets_for(*size))]

        def work(turn):
            source, target = sets[turn % len(sets)]
            target.copy_(source)

        seconds = seconds_of(work)
        self.copy_rates.append(bytes_of("copy bf16", *size) / seconds)

    def row(self, peer, name, size, seconds, note):
        self.rows.append((peer, name, size, seconds, note))

    def error(self, peer, op, size, error):
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.row(peer, op.name, size, None, "error: " + text.replace(",", ";").replace('"', "'"))

    def print_rows(self):
        copy = statistics.median(self.copy_rates)
        for peer, name, (rows, cols), seconds, note in self.rows:
            moved = bytes_of(name, rows, cols)
            start = f'{peer},"{name}",{rows},{cols},{moved}'
            if seconds is None:
                print(f"{start},,,{copy * 1e-9:.1f},,{note}", flush=True)
                continue
            share = moved / seconds / copy
            is_low = moved >= WANTED_FROM_BYTES and share < WANTED_SHARE
            note = " ".join(part for part in (note, "low" if is_low else "") if part)
            print(f"{start},{seconds * 1e6:.2f},{moved / seconds * 1e-9:.1f},{copy * 1e-9:.1f},"
                  f"{share:.4f},{note}", flush=True)
        self.rows = []

    def triton(self, op, size):
        """Launch parameters that fail, or are not among the best two, are not tried again."""
        sets = [(op.inputs(self.device, *size), op.outputs(self.device, *size))
                for _ in range(sets_for(*size))]
        times = {}
        for parameters in self.tries[op.name]:
            key = (op.name, parameters)
            try:
                if key not in self.notes:
                    least = 1.0 if op.exact else LEAST_EQUAL
                    self.notes[key] = check_triton(op, self.device, parameters, least)
                times[parameters] = seconds_of(
                    lambda turn, p=parameters: op.launch(*sets[turn % len(sets)], *p))
            except Exception as error:  # the other parameters, and the other ops, go on
                self.error("triton", op, size, error)
        self.tries[op.name] = sorted(times, key=times.get)[:2]
        if times:
            best = self.tries[op.name][0]
            note = f"{self.notes[op.name, best]} {best}".replace(",", "")
            self.row("triton", op.name, size, times[best], note)

    def torch_compile(self, op, size):
        """What it makes is new each time; as much of that is kept as there are inputs. It may
        leave out the rounding of a value to bf16, and divide in a way of its own."""
        compiled = torch.compile(op.plain, dynamic=False)
        sets = [op.inputs(self.device, *size) for _ in range(sets_for(*size))]
        kept = [None] * len(sets)
        note = verdict(op, compiled(*sets[0]), op.plain(*sets[0]), LEAST_ROUGH)

        def work(turn):
            kept[turn % len(sets)] = compiled(*sets[turn % len(sets)])

        self.row("torch.compile", op.name, size, seconds_of(work), note)

    def measure(self, peer, size):
        """All chosen ops of a peer at a size, between copies."""
        self.copy(size)
        for op in OPS:
            if not is_chosen(op, self.words):
                continue
            try:
                if time.monotonic() > self.end:
                    raise RuntimeError("not measured: out of time")
                (self.triton if peer == "triton" else self.torch_compile)(op, size)
            except Exception as error:  # the other ops go on
                self.error(peer, op, size, error)
            torch.cuda.empty_cache()
        self.copy(size)
        self.print_rows()

    def measure_size(self, size):
        self.copy_rates = []
        self.measure("triton", size)
        if size in COMPILED_SIZES:
            self.measure("torch.compile", size)
        copy = statistics.median(self.copy_rates)
        self.row("torch", "copy bf16", size, bytes_of("copy bf16", *size) / copy, "")
        self.print_rows()


# ---- running -------------------------------------------------------------------------------------

def is_chosen(op, words):
    return not words or any(word in op.name for word in words)


def rehearse(words):
    failed = 0
    device = torch.device("cpu")
    for op in OPS:
        if not is_chosen(op, words):
            continue
        try:
            notes = [check_triton(op, device, parameters, LEAST_ROUGH)
                     for parameters in op.tries[:2]]
            compiled = torch.compile(op.plain, dynamic=False, backend="aot_eager")
            inputs = small_inputs(op, device)
            notes.append("torch.compile " +
                         verdict(op, compiled(*inputs), op.plain(*inputs), LEAST_ROUGH))
            print(f"{op.name}: {bytes_of(op.name, *SMALL)} bytes at {SMALL[0]} x {SMALL[1]}, "
                  f"{', '.join(notes)}", flush=True)
        except Exception as error:  # the other ops go on
            failed += 1
            print(f"{op.name}: FAILED: {type(error).__name__}: {error}", flush=True)
    return 1 if failed else 0


def size_of(text):
    rows, cols = (int(part) for part in text.split("x"))
    return rows, cols


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=115.0)
    parser.add_argument("--size", type=size_of, choices=SIZES)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.rehearse:
        return rehearse(options.words)
    if not torch.cuda.is_available():
        print("cast_peers.py: no GPU", file=sys.stderr)
        return 77
    # Asked for, but not always done: not to leave out the rounding of a value to bf16.
    torch._inductor.config.emulate_precision_casts = True
    bench = Bench(torch.device("cuda"), options.seconds, options.words)
    print(f"# PyTorch {torch.__version__}, Triton {triton.__version__}, "
          f"{torch.cuda.get_device_name()}")
    print("peer,op,rows,cols,bytes,microseconds,gb_per_s,copy_gb_per_s,copy_share,note")
    for size in SIZES:
        if options.size not in (None, size):
            continue
        try:
            bench.measure_size(size)
        except Exception as error:  # the other sizes go on
            print(f"# {size}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            bench.rows = []
    return 0


if __name__ == "__main__":
    sys.exit(main())
