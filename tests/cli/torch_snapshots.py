"""Memory snapshots as PyTorch writes them, made without PyTorch, and what must hold of any.

A toy allocator plays a training job and keeps what torch.cuda.memory._snapshot() returns: segments
with their blocks, device_traces, allocator_settings, external_annotations, with the same keys.
"""
import random

MIB = 1 << 20
SEGMENT_BYTES = 20 * MIB


def frames(path, line, name):
    """A stack as PyTorch records it: the innermost frame first, its own frames among them."""
    return [
        {"name": "empty", "filename": "/usr/lib/python3/site-packages/torch/nn/functional.py",
         "line": 7},
        {"name": name, "filename": path, "line": line},
        {"name": "<module>", "filename": "/job/main.py", "line": 1},
    ]


STACKS = [frames("/job/train.py", 42, "forward"), frames("/job/train.py", 57, "loss"),
          frames("/job/model/layers.py", 9, "weights, biases"), []]


class Allocator:
    """Segments of 20 MiB cut first fit in 512-byte units, as simply as may be."""

    def __init__(self, seed, base=0x7F0000000000, device=0):
        self.random = random.Random(seed)
        self.base = base
        self.device = device
        self.segments = []  # of [address, list of [size, requested, state, frames]]
        self.events = []
        self.time_us = 1_700_000_000_000_000
        self.peak = self.live = 0

    def note(self, action, address, size, stack, **more):
        self.time_us += self.random.randrange(1, 50)
        entry = {"action": action, "addr": address, "size": size, "stream": 0,
                 "compile_context": "N/A", "user_metadata": "", "time_us": self.time_us}
        entry.update(more)
        if stack is not None:
            entry["frames"] = stack
        self.events.append(entry)

    def grow(self, size):
        total = max(SEGMENT_BYTES, (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB)
        address = self.base + (len(self.segments) << 32)
        self.segments.append([address, [[total, 0, "inactive", []]]])
        self.note("segment_alloc", address, total, None)

    def alloc(self, requested, stack):
        size = max(512, (requested + 511) // 512 * 512)
        for address, blocks in self.segments:
            at = address
            for i, block in enumerate(blocks):
                if block[2] == "inactive" and block[0] >= size:
                    rest = block[0] - size
                    blocks[i] = [size, requested, "active_allocated", stack]
                    if rest:
                        blocks.insert(i + 1, [rest, 0, "inactive", []])
                    self.note("alloc", at, requested, stack)
                    self.live += requested
                    self.peak = max(self.peak, self.live)
                    return at
                at += block[0]
        self.grow(size)
        return self.alloc(requested, stack)

    def free(self, address, completes=True):
        for start, blocks in self.segments:
            at = start
            for i, block in enumerate(blocks):
                if at == address:
                    self.note("free_requested", at, block[1], block[3])
                    if not completes:
                        block[2] = "active_pending_free"
                        return
                    self.note("free_completed", at, block[1], block[3])
                    self.live -= block[1]
                    blocks[i] = [block[0], 0, "inactive", []]
                    if i + 1 < len(blocks) and blocks[i + 1][2] == "inactive":
                        blocks[i][0] += blocks.pop(i + 1)[0]
                    if i and blocks[i - 1][2] == "inactive":
                        blocks[i - 1][0] += blocks.pop(i)[0]
                    return
                at += block[0]
        raise KeyError(address)

    def oom(self, size, free):
        self.note("oom", 0, size, STACKS[0])
        entry = self.events[-1]
        del entry["addr"]
        entry["device_free"] = free

    def play(self, events, most=40 * MIB):
        alive = []
        for _ in range(events):
            if alive and self.random.random() < 0.48:
                self.free(alive.pop(self.random.randrange(len(alive))))
            else:
                size = min(most, int(2 ** self.random.uniform(4, 25)))
                alive.append(self.alloc(size, self.random.choice(STACKS)))
        return alive

    def segment_dicts(self):
        return [{
            "device": self.device, "address": address,
            "total_size": sum(b[0] for b in blocks),
            "allocated_size": sum(b[0] for b in blocks if b[2] == "active_allocated"),
            "active_size": sum(b[0] for b in blocks if b[2] != "inactive"),
            "requested_size": sum(b[1] for b in blocks), "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "blocks": [{"address": address + sum(b[0] for b in blocks[:i]), "size": block[0],
                        "requested_size": block[1], "state": block[2], "frames": block[3]}
                       for i, block in enumerate(blocks)],
        } for address, blocks in self.segments]


def snapshot(*allocators):
    traces = [[] for _ in range(max(a.device for a in allocators) + 1)]
    for allocator in allocators:
        traces[allocator.device] = allocator.events
    return {
        "segments": [s for a in allocators for s in a.segment_dicts()],
        "device_traces": traces,
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1,
                               "garbage_collection_threshold": 0.0, "expandable_segments": False,
                               "roundup_power2_divisions": {"1": 0, "2": 0}},
        "external_annotations": [],
    }


def check_sums(data):
    """What torch.cuda._memory_viz relies on; the bytes reserved, allocated and requested."""
    sums = [0, 0, 0]
    for segment in data["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at, (block, hex(at))
            assert 0 <= block["requested_size"] <= block["size"], block
            assert block["state"] in ("active_allocated", "active_pending_free", "inactive"), block
            assert isinstance(block["frames"], list)
            at += block["size"]
        assert at - segment["address"] == segment["total_size"], segment["address"]
        for key, states in (("allocated_size", ("active_allocated",)),
                            ("active_size", ("active_allocated", "active_pending_free"))):
            expected = sum(b["size"] for b in segment["blocks"] if b["state"] in states)
            assert segment[key] == expected, (key, segment[key], expected)
        for key in ("device", "stream", "segment_type", "segment_pool_id", "is_expandable"):
            assert key in segment, key
        sums[0] += segment["total_size"]
        sums[1] += segment["allocated_size"]
        sums[2] += segment["requested_size"]
    return sums


def check_backwards(data, device=0):
    """Plays the events from the last to the first, as PyTorch's viewer does: every block that is
    then alive lies in a segment. The count of blocks that were alive before the first event."""
    segments = {s["address"]: s["total_size"] for s in data["segments"] if s["device"] == device}
    blocks = {b["address"]: b["size"] for s in data["segments"] if s["device"] == device
              for b in s["blocks"] if b["state"] != "inactive"}

    def check():
        for address in blocks:
            assert any(s <= address < s + n for s, n in segments.items()), hex(address)

    check()
    for entry in reversed(data["device_traces"][device]):
        action, address = entry["action"], entry.get("addr")
        if action == "free_completed":
            assert address not in blocks, hex(address)
            blocks[address] = entry["size"]
        elif action == "alloc":
            del blocks[address]
        elif action in ("segment_free", "segment_unmap"):
            segments[address] = entry["size"]
        elif action in ("segment_alloc", "segment_map"):
            holder = next(s for s, n in segments.items()
                          if s <= address and address + entry["size"] <= s + n)
            end = holder + segments.pop(holder)
            if holder < address:
                segments[holder] = address - holder
            if address + entry["size"] < end:
                segments[address + entry["size"]] = end - address - entry["size"]
        check()
    return len(blocks)
