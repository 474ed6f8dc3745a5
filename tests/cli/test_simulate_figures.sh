#!/bin/sh
# What `tenure simulate` says of large models: closed forms, and the four lifetimes to the byte.
. "$2/tests/cli/shell_support.sh"

simulate_to() {
    output=$1
    shift
    run_tenure simulate "$@" --json
    expect_status 0
    expect_no_error
    cp "$work_dir/out" "$work_dir/$output"
}

# L3: DeepSeek-V3 at 64K context, of which 18 gathered tensors stay of a dense layer and 6 of one
# with experts. One micro-batch in one chunk a stage: what stays is the same in each.
simulate_to v3_on deepseek-v3 --vpp 1 --microbatches 1
simulate_to v3_off deepseek-v3 --vpp 1 --microbatches 1 --lifetimes L3=off
# L1: the columnwise planes of 16 frozen layers. L2: rows and columns of all layers. L4: what is
# gathered of a unit.
simulate_to all_on llama3-8b --context 1024 --layers 16 --frozen-layers 16 --dp 1
simulate_to l1_off llama3-8b --context 1024 --layers 16 --frozen-layers 16 --dp 1 --lifetimes L1=off
simulate_to l2_on llama3-8b --context 1024 --layers 4 --dp 1
simulate_to l2_off llama3-8b --context 1024 --layers 4 --dp 1 --lifetimes L2=off
simulate_to l4_on llama3-8b --context 1024 --layers 4 --dp 8
simulate_to l4_off llama3-8b --context 1024 --layers 4 --dp 8 --lifetimes L4=off

python3 - "$work_dir" <<'END' || complain "expected other figures"
import json, sys

def read(name):
    return json.load(open(f"{sys.argv[1]}/{name}"))

def planes(rows, cols):
    """Bytes of one plane of a 2D-scaled weight: elements, scales in rows of 4."""
    up4 = lambda n: (n + 3) // 4 * 4
    down, across = (rows + 127) // 128, (cols + 127) // 128
    return rows * cols + 4 * down * up4(across), rows * cols + 4 * across * up4(down)

def most(result, owner):
    return max(note["owners"].get(owner, 0) for role in result["roles"] for note in role["notes"])

# DeepSeek-V3.
gathered = 65536 * 7168
assert 18 * gathered == 8455716864 == 7.875 * 2**30
on, off = read("v3_on"), read("v3_off")
assert on["ranks"] == 256 and sum(role["ranks"] for role in on["roles"]) == 256
assert {role["stage"] for role in on["roles"]} == set(range(8))
assert most(on, "kept: L3 gathered activations") == 0
first_layers = {0, 8, 16, 24, 32, 40, 47, 54}  # of the stages: five of 8 layers, three of 7
seen = set()
for role in off["roles"]:
    expected = 0
    for note in role["notes"]:
        if not note["after"].startswith("backward layer "):
            continue
        layer = int(note["after"].split()[-1])
        expected += (18 if layer < 3 else 6) * gathered
        seen.add(layer)
        kept = note["owners"].get("kept: L3 gathered activations", 0)
        assert kept == expected, (layer, kept, expected)
        if layer in first_layers:
            expected = 0
assert seen == set(range(61)), seen
for a, b in zip(on["roles"], off["roles"]):
    assert a["resting_bytes"] == b["resting_bytes"] and a["wire_bytes"] == b["wire_bytes"]
    assert b["peak_live_bytes"] > a["peak_live_bytes"]

# L1: all columnwise planes of the frozen layers stay.
layer = [(4096 + 2 * 1024, 4096), (4096, 4096), (2 * 14336, 4096), (4096, 14336)]
columns = sum(planes(*weight)[1] for weight in layer)
rows = sum(planes(*weight)[0] for weight in layer)
on, off = read("all_on")["roles"][0], read("l1_off")["roles"][0]
assert off["resting_bytes"] - on["resting_bytes"] == 16 * columns
# L2: at rest the columns, after the last forward the rows too.
on, off = read("l2_on"), read("l2_off")
assert off["roles"][0]["resting_bytes"] - on["roles"][0]["resting_bytes"] == 4 * columns
kept = [note["owners"].get("kept: L2 planes of each layer", 0)
        for note in off["roles"][0]["notes"] if note["after"] == "loss"]
assert kept == [4 * rows], kept
# L4: half of what goes over the wire in gathers of layers, and the memory of one unit.
on, off = read("l4_on"), read("l4_off")
assert most(off, "kept: L4 gathered columns") == (columns + 7) // 8 * 8
more, less = (result["roles"][0]["wire_bytes"].get("all_gather", 0) for result in (off, on))
more -= less
assert more == 2 * 4 * 7 * ((columns + 7) // 8), more
END
finish
