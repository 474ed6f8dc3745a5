#!/usr/bin/env python3
"""Runs unmodified programs with and without `tenure run` and compares what they compute.

usage: compare_programs.py BUILD [--jobs N] [--only WORD] [--pool KIND]

For each program: its checksum as it is, once more as it is, under the drop-in, and what the
drop-in's reports say that was taken over. Where a program's own two results differ, that is said,
and the one under the drop-in must be one of them. Exit status 1 if a checksum differs, a program
fails, or nothing was taken over where something must be. A program whose module is not installed,
or that needs more GPUs than there are, is said to be absent.
"""
import argparse
import concurrent.futures
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
CONF = "PYTORCH_CUDA_ALLOC_CONF"

# Name, module that it needs, command, environment, and whether anything must be taken over (memory
# by cuMemCreate is the program's own).
PROGRAMS = [
    ("static cudart", None, ["{build}/tenure-cuda-program", "work"], {}, True),
    ("captures", None, ["{build}/tenure-cuda-program", "graph"], {}, True),
    ("processes", None, ["{build}/tenure-cuda-program", "share"], {}, True),
    ("shapes", None, ["{build}/tenure-cuda-program", "shapes"], {}, True),
    ("ctypes", None, ["{python}", "driver_program.py"], {}, True),
    ("torch native", "torch", ["{python}", "torch_program.py"], {}, True),
    ("torch no caching", "torch", ["{python}", "torch_program.py"],
     {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, True),
    ("torch expandable", "torch", ["{python}", "torch_program.py"],
     {CONF: "expandable_segments:True"}, False),
    ("torch async", "torch", ["{python}", "torch_program.py"],
     {CONF: "backend:cudaMallocAsync"}, True),
    ("torch ranks", "torch", ["{python}", "ranks_program.py"], {"NCCL_NVLS_ENABLE": "0"}, True),
    ("cupy default", "cupy", ["{python}", "cupy_program.py", "default"], {}, True),
    ("cupy none", "cupy", ["{python}", "cupy_program.py", "none"], {}, True),
    ("cupy async", "cupy", ["{python}", "cupy_program.py", "async"], {}, True),
    ("jax platform", "jax", ["{python}", "jax_program.py"],
     {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, True),
    ("jax default", "jax", ["{python}", "jax_program.py"],
     {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}, True),
]


def read_reports(folder):
    sums = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            for line in file:
                found = re.match(r"(\w+): (\d+)$", line)
                if found:
                    sums[found.group(1)] = sums.get(found.group(1), 0) + int(found.group(2))
    return sums


def run(command, environment):
    start = time.time()
    done = subprocess.run(command, cwd=HERE, env={**os.environ, **environment},
                          capture_output=True, text=True, check=False, timeout=300)
    found = re.search(r"^checksum (\w+)$", done.stdout, re.M)
    if done.returncode != 0 or not found:
        return None, (done.stderr + done.stdout).strip()[-1500:], time.time() - start
    return found.group(1), "", time.time() - start


def compare(build, pool, row):
    name, _, words, environment, must_take = row
    command = [word.format(build=build, python=sys.executable) for word in words]
    plain, why, plain_s = run(command, environment)
    again = run(command, environment)[0]
    with tempfile.TemporaryDirectory() as folder:
        tenure = [os.path.join(build, "tenure"), "run", "--pool", pool, "--report",
                  os.path.join(folder, "report"), "--"]
        ours, our_why, our_s = run(tenure + command, environment)
        taken = read_reports(folder)
    is_good = plain is not None and ours in (plain, again) and (
        not must_take or pool == "none" or taken.get("allocations", 0) > 0)
    text = (f"{name:18} {plain} {again} {ours} {plain_s:6.1f} s {our_s:6.1f} s  "
            f"taken {taken.get('allocations', 0)} + {taken.get('frees', 0)}, "
            f"in order {taken.get('stream_allocations', 0)}, passed {taken.get('passed', 0)} + "
            f"{taken.get('creates', 0)}, "
            f"fences {taken.get('fences', 0)}, waits {taken.get('fence_waits', 0)} + "
            f"{taken.get('device_waits', 0)}, lost {taken.get('lost', 0)}  "
            f"{'ok' if is_good else 'FAILED'}"
            f"{'' if plain == again else ': its own results differ'}")
    for side, words_of in (("as it is", why), ("under tenure run", our_why)):
        if words_of:
            text += f"\n--- {name}, {side}:\n{words_of}"
    return is_good, text


def gpu_count():
    """By what the driver lists; this process itself uses none."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def why_absent(row):
    if row[1] and not importlib.util.find_spec(row[1]):
        return f"no module {row[1]}"
    if "ranks" in row[0] and gpu_count() < 2:
        return "it needs two GPUs"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--only", default="")
    parser.add_argument("--pool", default="plain")
    arguments = parser.parse_args()
    build = os.path.abspath(arguments.build)
    good = True
    rows = []
    for row in PROGRAMS:
        if arguments.only not in row[0]:
            continue
        absent = why_absent(row)
        if absent:
            print(f"{row[0]:18} absent: {absent}")
        else:
            rows.append(row)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for is_good, text in pool.map(lambda row: compare(build, arguments.pool, row), rows):
            print(text, flush=True)
            good &= is_good
    print("all compared" if good else "NOT all the same")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
