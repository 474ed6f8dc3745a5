#!/usr/bin/env python3
"""Reads a checkpoint with nothing but Python's library, and holds it to the rules of safetensors.

usage: safetensors_rules.py CHECKPOINT SEED    the model of tests/unit/checkpoint_support.c, filled
                                               with the seed; exit status 1 and a line a difference
"""
import json
import os
import struct
import sys
import zlib

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}
SCALE = "model.weight \"scale\" \\ \n \u00e9 \U0001f600"
problems = []


def expect(is_so, what):
    if not is_so:
        problems.append(what)


def unique(pairs):
    expect(len(dict(pairs)) == len(pairs), "a key is there twice")
    return dict(pairs)


def read_file(path):
    """The tensors of a file by name: dtype, shape, bytes."""
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    expect(length <= 100_000_000, "the header is too long")
    expect(content[8:9] == b"{", "the header does not begin with {")
    expect((8 + length) % 64 == 0, "the data is not aligned")
    header = json.loads(content[8:8 + length].decode("utf-8"), object_pairs_hook=unique)
    metadata = header.pop("__metadata__")
    expect(all(isinstance(v, str) for v in metadata.values()), "metadata that is no text")
    data = content[8 + length:]
    covered = 0
    tensors = {}
    for name, facts in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = facts["data_offsets"]
        count = 1
        for extent in facts["shape"]:
            count *= extent
        expect(set(facts) == {"dtype", "shape", "data_offsets"}, f"{name!r}: its keys")
        expect(begin == covered, f"{name!r}: a hole or an overlap")
        expect(end - begin == count * SIZES[facts["dtype"]], f"{name!r}: its size")
        covered = end
        tensors[name] = (facts["dtype"], facts["shape"], data[begin:end])
    expect(covered == len(data), "bytes that are no tensor's")
    return content, 8 + length, tensors


def filled(seed, salt, count):
    state = (seed * 2654435761 + salt * 40503 + 1) & 0xFFFFFFFF
    out = bytearray()
    for _ in range(count):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append(state >> 24)
    return bytes(out)


def check_index(root, index, content, data_begin, tensors):
    with open(os.path.join(root, "index.json"), "rb") as file:
        text = file.read()
    expect(int(index["crc32"], 16) == zlib.crc32(text[:-21]), "the index's own checksum")
    (facts,) = index["files"]
    expect(facts["bytes"] == len(content), "the file's size in the index")
    expect(facts["header_bytes"] == data_begin, "the header's size in the index")
    expect(int(facts["header_crc32"], 16) == zlib.crc32(content[:data_begin]), "its checksum")
    expect([t["name"] for t in index["tensors"]] == sorted(tensors, key=lambda n: n.encode()),
           "the names in the index")
    for tensor in index["tensors"]:
        dtype, _, data = tensors[tensor["name"]]
        expect(tensor["dtype"] == dtype, f"{tensor['name']!r}: dtype in the index")
        for part in tensor["parts"]:
            stored = content[part["begin"]:part["begin"] + part["bytes"]]
            expect(stored == data, f"{tensor['name']!r}: its place in the index")
            expect(int(part["crc32"], 16) == zlib.crc32(stored), f"{tensor['name']!r}: checksum")


def main(root, seed):
    with open(os.path.join(root, "index.json"), encoding="utf-8") as file:
        index = json.load(file, object_pairs_hook=unique)
    path = os.path.join(root, f"{index['generation']:08d}", index["files"][0]["name"])
    content, data_begin, tensors = read_file(path)
    check_index(root, index, content, data_begin, tensors)
    facts = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    expect(facts == {"model.master": ("F32", [300, 70]), "model.weight": ("F8_E4M3", [300, 70]),
                     SCALE: ("F32", [3, 4]), "empty": ("BF16", [0, 5]),
                     "blob.late": ("BF16", [1000, 1]), "blob.early": ("U8", [3000]),
                     "A scalar": ("F8_E5M2", [])}, f"the tensors are {facts}")
    blob = filled(seed, 2, 5000)
    expected = {"model.master": filled(seed, 0, 300 * 70 * 4),
                "model.weight": filled(seed, 1, 300 * 70), SCALE: filled(seed, 101, 48),
                "empty": b"", "blob.late": blob[3000:], "A scalar": filled(seed, 0, 1),
                "blob.early": blob[0:1000] + blob[2500:3000] + blob[1000:2500]}
    for name, data in expected.items():
        expect(tensors.get(name, (0, 0, None))[2] == data, f"{name!r}: its bytes")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
