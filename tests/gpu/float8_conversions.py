#!/usr/bin/env python3
"""Element rounding of FP8 against PyTorch's own float8 conversions.

usage: float8_conversions.py [--driver host|cuda] [--device cpu|cuda] [--libraries FOLDER]

PyTorch converts on --device (a GPU if there is one), Tenure with the ops of --driver (host: the
definition that all kernels are equal to). Compared bit for bit: to E4M3 and E5M2 all numbers of
bf16 and fp16, and of fp32 every 251st pattern of 2^32 and what lies next to each half-way point;
back from both all 256 codes; and all 256 scales of E8M0. Tenure casts as a tensor with delayed
scaling whose factor is 1.

What differs by intention, and is counted and not compared: beyond the largest number Tenure
saturates, PyTorch makes NaN of it (E4M3) or infinity (E5M2); a NaN keeps its sign in PyTorch and
has none in Tenure. FOLDER has libtenure.so and libtenure-ops.so; it is $TENURE_LIBRARIES otherwise.
The last line counts; exit status 1 if anything failed.
"""
import argparse
import ctypes
import os
import sys

import torch

import tenure_dlpack as tenure

STEP = 251
NEAR = 3  # patterns to either side of a half-way point

# name, PyTorch's type, bits of mantissa, exponent bias, largest code, what PyTorch makes of more
FLOAT8 = (("TN_E4M3", torch.float8_e4m3fn, 3, 7, 0x7E, "NaN"),
          ("TN_E5M2", torch.float8_e5m2, 2, 15, 0x7B, "infinity"))
PLAIN = {"TN_FP32": torch.float32, "TN_BF16": torch.bfloat16, "TN_FP16": torch.float16}


class Failure(Exception):
    pass


def check(condition, text):
    if not condition:
        raise Failure(text)


# ---- Tenure's side -------------------------------------------------------------------------------

class Ops:
    """Tensors go in and come out as PyTorch's, on the host."""

    def __init__(self, library, device, folder):
        self.library, self.device, self.scope = library, device, tenure.Scope(device)
        self.c = ctypes.CDLL(os.path.join(folder, "libtenure-ops.so"))

    def call(self, name, args):
        status = getattr(self.c, name)(ctypes.byref(args), self.device.stream)
        if status != 0:
            raise Failure(f"{name}: {self.library.c.tn_error_last().decode()}")

    def write(self, tensor, plane, data, scale=None):
        parts = [ctypes.c_void_p(part.data_ptr()) if part is not None else None
                 for part in (data, scale)]
        sizes = [ctypes.c_size_t(part.nbytes if part is not None else 0) for part in (data, scale)]
        self.library.call("tn_plane_write", tensor.handle, tenure.VALUES[plane], parts[0], sizes[0],
                          parts[1], sizes[1], self.device.stream)
        self.device.synchronize()

    def read(self, tensor, plane, data):
        layout = tensor.layout(plane)
        scale = torch.empty(layout.scale_bytes, dtype=torch.uint8)
        self.library.call("tn_plane_read", tensor.handle, tenure.VALUES[plane],
                          ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.nbytes),
                          ctypes.c_void_p(scale.data_ptr()) if scale.nbytes else None,
                          ctypes.c_size_t(scale.nbytes), self.device.stream)
        self.device.synchronize()
        return data

    def quantize(self, dtype, values, plain):
        """Codes of the values, with a factor of 1."""
        src = self.scope.tensor(plain, [1, values.numel()])
        dst = self.scope.tensor(dtype, [1, values.numel()], "TN_FORMAT_FP8_TENSOR")
        factor, history = self.scope.tensor("TN_FP32", [1]), self.scope.tensor("TN_FP32", [1])
        self.write(src, "TN_PLANE_DATA", values)
        self.write(factor, "TN_PLANE_DATA", torch.ones(1))
        self.write(history, "TN_PLANE_DATA", torch.zeros(1))
        self.call("tn_quantize", tenure.new("tn_quantize_args", src=src.handle, dst=dst.handle,
                                            scale=factor.handle, amax_history=history.handle))
        codes = self.read(dst, "TN_PLANE_ROW", torch.empty(values.numel(), dtype=torch.uint8))
        for tensor in (src, dst, factor, history):
            tensor.destroy()
        return codes

    def dequantize(self, dtype, codes, scales, shape, plain, tensor_format):
        src = self.scope.tensor(dtype, shape, tensor_format)
        dst = self.scope.tensor(plain, shape)
        self.write(src, "TN_PLANE_ROW", codes, scales)
        self.call("tn_dequantize", tenure.new("tn_dequantize_args", src=src.handle, dst=dst.handle,
                                              plane=tenure.VALUES["TN_PLANE_ROW"]))
        values = self.read(dst, "TN_PLANE_DATA", torch.empty(shape, dtype=PLAIN[plain]))
        src.destroy()
        dst.destroy()
        return values


# ---- numbers -------------------------------------------------------------------------------------

def value_of(code, mantissa_bits, bias):
    """Of a positive code, by its definition."""
    mantissa, exponent = code & ((1 << mantissa_bits) - 1), code >> mantissa_bits
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (1.0 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def every_16_bits(plain):
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(PLAIN[plain])


def of_patterns(patterns):
    """fp32 numbers of bit patterns in int64."""
    return torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).to(
        torch.int32).view(torch.float32)


def sample_of_fp32(mantissa_bits, bias, largest):
    codes = range(largest + 1)  # half way past the largest is among them
    halves = torch.tensor([(value_of(code, mantissa_bits, bias) +
                            value_of(code + 1, mantissa_bits, bias)) / 2 for code in codes])
    bits = halves.view(torch.int32).to(torch.int64)
    near = (bits[:, None] + torch.arange(-NEAR, NEAR + 1)[None, :]).reshape(-1)
    return of_patterns(torch.cat([torch.arange(0, 1 << 32, STEP), near, near + (1 << 31)]))


# ---- the comparisons -----------------------------------------------------------------------------

def narrow(ops, at, kind, plain, values):
    """One type to another: returns how many numbers were compared."""
    dtype, theirs_type, mantissa_bits, bias, largest, beyond_is = kind
    ours = ops.quantize(dtype, values, plain)
    theirs = values.to(at).to(theirs_type).view(torch.uint8).cpu()
    wide = values.to(torch.float64)
    # Ties are to even: half way past E4M3's largest (even) comes back, past E5M2's (odd) does not.
    limit = sum(value_of(code, mantissa_bits, bias) for code in (largest, largest + 1)) / 2
    nan = wide.isnan()
    inside = (wide.abs() <= limit) if largest % 2 == 0 else (wide.abs() < limit)
    beyond = ~nan & ~inside
    wrong = inside & (ours != theirs)
    first = wide[wrong][:1].tolist()
    check(not wrong.any(), f"{int(wrong.sum())} of {int(inside.sum())} differ, first {first}")
    sign = (wide < 0).to(torch.uint8) << 7
    check(bool((ours[beyond] == (sign | largest)[beyond]).all()), "Tenure does not saturate")
    check(bool((ours[nan] == 0x7F).all()), "a NaN is not 0x7F in Tenure")
    theirs_nan = theirs.view(theirs_type).to(torch.float32).isnan()
    check(bool(theirs_nan[nan].all()), "a NaN is a number in PyTorch")
    saturated = int((theirs[beyond] == (sign | largest)[beyond]).sum())
    signed = int((theirs[nan] >= 0x80).sum())
    print(f"         within range: {int(inside.sum())} compared, 0 differ; beyond: "
          f"{int(beyond.sum())}, all saturate in Tenure, {saturated} in PyTorch (else "
          f"{beyond_is}); NaN: {int(nan.sum())}, all NaN in both, with a sign in PyTorch: {signed}")
    return int(inside.sum())


def all_equal(ours, theirs):
    """The same bits, or NaN in both."""
    same = ours.view(torch.int32 if ours.element_size() == 4 else torch.int16) == theirs.view(
        torch.int32 if ours.element_size() == 4 else torch.int16)
    return bool((same | (ours.isnan() & theirs.isnan())).all())


def widen(ops, at, kind, plain):
    dtype, theirs_type = kind[:2]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scales = torch.tensor([1.0, 0.0, 0.0, 0.0])
    ours = ops.dequantize(dtype, codes, scales, [1, 256], plain, "TN_FORMAT_FP8_TENSOR")[0]
    theirs = codes.to(at).view(theirs_type).to(PLAIN[plain]).cpu()
    check(all_equal(ours, theirs), "codes have other values")
    return 256


def scales_of_e8m0(ops, at):
    """Row m of 256, of 32 ones each, has scale m; what pads the scales is 0."""
    one = 0x38
    codes = torch.full((256, 32), one, dtype=torch.uint8)
    scales = torch.zeros((256, 4), dtype=torch.uint8)
    scales[:, 0] = torch.arange(256)
    ours = ops.dequantize("TN_E4M3", codes, scales, [256, 32], "TN_FP32", "TN_FORMAT_MXFP8")
    theirs = scales[:, 0].contiguous().to(at).view(torch.float8_e8m0fnu).to(torch.float32).cpu()
    check(all_equal(ours, theirs[:, None].expand(256, 32).contiguous()), "scales differ")
    return 256


def float4():
    if not hasattr(torch, "float4_e2m1fn_x2"):
        return "PyTorch has no float4_e2m1fn_x2"
    try:
        torch.zeros(2).to(torch.float4_e2m1fn_x2)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return f"PyTorch does not convert to float4_e2m1fn_x2: {str(error).splitlines()[0]}"
    return "PyTorch has come to convert to float4_e2m1fn_x2, which nothing here compares"


# ---- running them --------------------------------------------------------------------------------

def cases(ops, at):
    for kind in FLOAT8:
        name = kind[0][3:]
        for plain in ("TN_BF16", "TN_FP16"):
            yield (f"{plain[3:]} to {name}, every number",
                   lambda k=kind, p=plain: narrow(ops, at, k, p, every_16_bits(p)))
        yield (f"FP32 to {name}, every {STEP}th and half-way points",
               lambda k=kind: narrow(ops, at, k, "TN_FP32", sample_of_fp32(*k[2:5])))
        for plain in PLAIN:
            yield (f"{name} to {plain[3:]}, every code",
                   lambda k=kind, p=plain: widen(ops, at, k, p))
    if hasattr(torch, "float8_e8m0fnu"):
        yield "E8M0 scales to FP32, every code", lambda: scales_of_e8m0(ops, at)


def run(ops, at):
    done = failed = compared = 0
    for title, case in cases(ops, at):
        done += 1
        try:
            count = case()
            compared += count
            print(f"ok       {title}: {count} equal", flush=True)
        except (Failure, tenure.Error) as failure:
            failed += 1
            print(f"FAILED   {title}: {failure}", flush=True)
    print(f"not compared: {float4()}")
    print(f"{done} conversions, {failed} failed, {compared} numbers equal")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--driver", choices=["host", "cuda"], default="host")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--libraries", default=os.environ.get("TENURE_LIBRARIES", "."))
    options = parser.parse_args()
    library = tenure.Library(options.libraries)
    device = tenure.Device(library, f"TN_DRIVER_{options.driver.upper()}")
    at = torch.device(options.device)
    name = torch.cuda.get_device_name(at) if at.type == "cuda" else "CPU"
    print(f"PyTorch {torch.__version__} on {name}, Tenure on {device.name}")
    ops = Ops(library, device, options.libraries)
    failed = run(ops, at)
    ops.scope.close()
    device.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
