"""Random snapshots of PyTorch's shape through `tenure convert` and back; see torch_snapshots.py.

    python3 torch_snapshot_checks.py TENURE

Every protocol that PyTorch may write; blocks from before the recording; pending frees; memory that
was given back; owners. Exact equalities on the bytes of segments, blocks and the peak.
"""
import json
import os
import pickle
import subprocess
import sys
import tempfile

import torch_snapshots as snapshots

TENURE = sys.argv[1]
folder = tempfile.TemporaryDirectory()


def path(name):
    return os.path.join(folder.name, name)


def tenure(*arguments):
    return subprocess.run([TENURE, *arguments], check=True, capture_output=True, text=True).stdout


def load(name):
    with open(path(name), "rb") as file:
        return pickle.load(file)


def save(name, data, protocol):
    with open(path(name), "wb") as file:
        pickle.dump(data, file, protocol)


def blocks_of(data):
    """What nobody has any more keeps the size of its last owner in PyTorch's."""
    return [(b["address"], b["size"], b["state"] != "inactive" and b["requested_size"], b["state"])
            for s in data["segments"] for b in s["blocks"]]


def stack_of(frames):
    """What tenure names an owner of these frames."""
    for frame in frames:
        if frame["filename"].endswith(".py") and "/torch/" not in frame["filename"]:
            return f"{os.path.basename(frame['filename'])}:{frame['line']} {frame['name']}"
    return ""


def check_round_trip(data, protocol):
    save("given.pickle", data, protocol)
    tenure("convert", path("given.pickle"), path("made.pickle"))
    made = load("made.pickle")
    assert snapshots.check_sums(made) == snapshots.check_sums(data)
    assert blocks_of(made) == blocks_of(data)
    before = snapshots.check_backwards(made)
    assert before == snapshots.check_backwards(data)
    for given, again in zip(data["segments"], made["segments"]):
        for a, b in zip(given["blocks"], again["blocks"]):
            names = [f["name"] for f in b["frames"]]
            assert names == ([stack_of(a["frames"])] if stack_of(a["frames"]) else []), (a, b)
    kinds = ("alloc", "free_completed", "oom", "segment_map", "segment_alloc")
    for kind in kinds[:3]:
        assert sum(e["action"] == kind for e in made["device_traces"][0]) == \
            sum(e["action"] == kind for e in data["device_traces"][0]), kind
    return before


def check_job(seed, protocol):
    allocator = snapshots.Allocator(seed)
    alive = allocator.play(300)
    allocator.oom(1 << 45, 12345)
    for _ in range(3):
        allocator.free(alive.pop(), completes=False)
    data = snapshots.snapshot(allocator)
    assert check_round_trip(data, protocol) == 0
    result = json.loads(tenure("replay", path("given.pickle"), "--json"))
    assert result["peak_live_bytes"] == allocator.peak, (result, allocator.peak)
    assert result["alive_at_end_bytes"] == allocator.live
    # The ring has lost its oldest events: the blocks of those are there before the first.
    data["device_traces"][0] = data["device_traces"][0][150:]
    assert check_round_trip(data, protocol) > 0
    lost = json.loads(tenure("replay", path("given.pickle"), "--json"))
    assert lost["alive_at_end_bytes"] == allocator.live
    page = tenure("report", path("given.pickle"))
    assert "there before the recording began" in page
    assert "Out of memory" in page and "train.py:42 forward" in page


def check_own(seed):
    """A pool's trace and its snapshot, placed by a replay, as snapshots of PyTorch."""
    allocator = snapshots.Allocator(seed)
    allocator.play(400)
    save("given.pickle", snapshots.snapshot(allocator), 4)
    os.environ["TENURE_EVENTS"] = "300"
    tenure("replay", path("given.pickle"), "--trace", path("own.csv"), "--snapshot",
           path("own.json"))
    del os.environ["TENURE_EVENTS"]
    with open(path("own.json"), encoding="utf-8") as file:
        statistics = json.load(file)["statistics"]
    for name in ("own.csv", "own.json"):
        tenure("convert", path(name), path("own.pickle"))
        own = load("own.pickle")
        reserved, _, requested = snapshots.check_sums(own)
        assert requested == allocator.live, (requested, allocator.live)
        snapshots.check_backwards(own)
        if name == "own.json":
            assert reserved == statistics["reserved_bytes"]


def check_real():
    """What PyTorch 2.11 wrote on an H200 (tests/gpu/torch_snapshots_real.py): three steps of
    training, a block from before the recording, memory given back, an out of memory."""
    with open(os.path.join(os.path.dirname(__file__), "inputs", "torch_real.pickle"), "rb") as file:
        real = pickle.load(file)
    assert check_round_trip(real, 4) == 1
    result = json.loads(tenure("replay", path("given.pickle"), "--json"))
    alive = sum(b["requested_size"] for s in real["segments"] for b in s["blocks"]
                if b["state"] != "inactive")
    assert result["alive_at_end_bytes"] == alive == 75501568, result
    assert result["events"] == 1 + 65 + 57, result
    page = tenure("report", path("given.pickle"))
    for words in ("batch of 300", "torch_snapshots_real.py:50 train_step", "1.0 PiB",
                  "1 block was there before"):
        assert words in page, words


def check_metadata():
    allocator = snapshots.Allocator(5)
    allocator.play(3)
    for entry in allocator.events:
        entry["user_metadata"] = "step 1 \udcff".encode("utf-8", "replace").decode()
    save("given.pickle", snapshots.snapshot(allocator), 2)
    assert ",step 1 ?" in tenure("convert", path("given.pickle"), "-", "--to", "trace")


for number, version in enumerate((2, 3, 4, 5)):
    check_job(number, version)
check_own(11)
check_metadata()
check_real()
print("every snapshot is the same again")
