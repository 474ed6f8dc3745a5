#!/usr/bin/env python3
"""Snapshots of memory between Tenure and a real PyTorch on a GPU, both ways.

    python3 tests/gpu/torch_snapshots_real.py build/release/tenure FOLDER

PyTorch trains a little, runs out of memory once and dumps its history; `tenure` reads it, replays
it, and writes it again; every function of torch.cuda._memory_viz takes what `tenure` wrote, and the
sums hold. The same for a trace that a pool of Tenure's wrote on this GPU. FOLDER gets real.pickle,
the snapshot as PyTorch wrote it, and the pages. A line for each check; status 1 if one fails.
"""
import json
import os
import pickle
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import torch_snapshots  # noqa: E402

import torch  # noqa: E402
from torch.cuda import _memory_viz  # noqa: E402

TENURE = sys.argv[1]
FOLDER = sys.argv[2]
SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
failures = 0


def check(what, holds, detail=""):
    global failures
    failures += not holds
    print(f"{'ok  ' if holds else 'FAIL'} {what} {detail}", flush=True)


def path(name):
    return os.path.join(FOLDER, name)


def tenure(*arguments):
    done = subprocess.run([TENURE, *arguments], capture_output=True, text=True)
    check("tenure " + " ".join(os.path.basename(a) for a in arguments), done.returncode == 0,
          done.stderr.strip())
    return done.stdout


def train_step(model, optimizer, rows):
    torch.cuda.memory._set_memory_metadata(f"batch of {rows}")
    batch = torch.randn(rows, 512, device="cuda")
    torch.cuda.memory._set_memory_metadata("")
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def record():
    before = torch.randn(1 << 20, device="cuda")  # alive before the recording
    torch.cuda.memory._record_memory_history(max_entries=300, stacks="python")
    layers = [torch.nn.Linear(512, 512) for _ in range(2)]
    model = torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (64, 300, 17):
        train_step(model, optimizer, rows)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        other = torch.ones(1 << 18, device="cuda")
        (other * 2).sum()
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(path("real.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    return before, model, other


def viewer_takes(name, data):
    """Every function of the module, without the Perl script that draws flame graphs."""
    def as_text(lines):
        return lines

    try:
        torch_snapshots.check_sums(data)
        text = _memory_viz.segsum(data)
        check(f"segsum of {name}", f"segments: {len(data['segments'])}" in text)
        text = _memory_viz.trace(data)
        check(f"trace of {name}", "entries" in text)
        check(f"segments of {name}", _memory_viz.segments(data, format_flamegraph=as_text) != "")
        check(f"memory of {name}", _memory_viz.memory(data, format_flamegraph=as_text) != "")
        _memory_viz.compare(data["segments"], data["segments"], format_flamegraph=as_text)
        check(f"trace_plot of {name}", "MemoryViz" in _memory_viz.trace_plot(data))
        check(f"segment_plot of {name}", "MemoryViz" in _memory_viz.segment_plot(data))
    except Exception as error:  # noqa: BLE001: whatever it is, the check has failed
        check(f"_memory_viz takes {name}", False, repr(error))


def totals(data):
    return [(s["address"], s["total_size"], s["allocated_size"], s["active_size"])
            for s in sorted(data["segments"], key=lambda s: s["address"])]


def real_snapshot():
    kept = record()
    size = os.path.getsize(path("real.pickle"))
    check("the snapshot is small", size < 200_000, f"{size} bytes")
    with open(path("real.pickle"), "rb") as file:
        real = pickle.load(file)
    events = [e["action"] for e in real["device_traces"][0]]
    print("     actions:", {a: events.count(a) for a in sorted(set(events))})
    for entry in (real, real["segments"][0], real["device_traces"][0][0]):
        print("     keys:", *sorted(entry))
    result = json.loads(tenure("replay", path("real.pickle"), "--json"))
    alive = sum(b["requested_size"] for s in real["segments"] for b in s["blocks"]
                if b["state"] != "inactive")
    check("what is alive at the end", result["alive_at_end_bytes"] == alive,
          f"{result['alive_at_end_bytes']} {alive}")
    tenure("convert", path("real.pickle"), path("real.csv"))
    tenure("convert", path("real.pickle"), path("real.json"))
    with open(path("real.json"), encoding="utf-8") as file:
        check("the Chrome trace is JSON", len(json.load(file)["traceEvents"]) > 0)
    tenure("convert", path("real.pickle"), path("again.pickle"))
    with open(path("again.pickle"), "rb") as file:
        again = pickle.load(file)
    check("segments are the same again", totals(again) == totals(real))
    ours = [e["action"] for e in again["device_traces"][0]]
    for action in ("alloc", "free_completed", "oom"):
        check(f"as many of {action}", ours.count(action) == events.count(action))
    viewer_takes("the real snapshot", real)
    viewer_takes("the same, written by tenure", again)
    with open(path("real.html"), "w", encoding="utf-8") as file:
        file.write(tenure("report", path("real.pickle")))
    del kept


def own_history():
    os.environ["TENURE_EVENTS"] = "2000"
    tenure("replay", os.path.join(SOURCE, "bench", "traces", "lora.csv.gz"), "--driver", "cuda",
           "--trace", path("own.csv.gz"), "--snapshot", path("own_pool.json"))
    del os.environ["TENURE_EVENTS"]
    for name in ("own.csv.gz", "own_pool.json"):
        tenure("convert", path(name), path("own.pickle"))
        with open(path("own.pickle"), "rb") as file:
            viewer_takes(name, pickle.load(file))
        os.unlink(path("own.pickle"))
    os.unlink(path("own.csv.gz"))


print("PyTorch", torch.__version__, "on", torch.cuda.get_device_name())
real_snapshot()
torch.cuda.empty_cache()
own_history()
print("FAILED" if failures else "all hold", failures)
sys.exit(failures > 0)
