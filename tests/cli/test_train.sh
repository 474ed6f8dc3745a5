# The trainer at a small size: it learns, repeats itself bit for bit, has the bytes that the shapes
# ask for and none at the end; the simulated device has the same list of live bytes, captured or
# not; bad usage is refused.
set -eu
build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
size="--layers 2 --hidden 64 --heads 2 --ffn 160 --sequence 24 --batch 5"
train="$build/tenure-train --text $2/LICENSE $size --validate-every 4"

fail() {
    echo "$1" >&2
    exit 1
}

refused() {
    words=$1
    shift
    status=0
    "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = 2 ] || fail "exit status $status, expected 2: $*"
    [ ! -s "$work/out" ] || fail "output in spite of bad usage: $*"
    grep -qF -- "$words" "$work/err" || fail "no '$words' in: $(cat "$work/err")"
}

# learns NAME ARGS...: on the host; leaves NAME.txt, NAME.csv and NAME.bytes.
learns() {
    name=$1
    shift
    $train --driver host "$@" --csv "$work/$name.csv" --bytes "$work/$name.bytes" \
        >"$work/$name.txt" 2>"$work/$name.err" ||
        fail "$name failed: $(cat "$work/$name.txt" "$work/$name.err")"
    ! grep -q FAIL "$work/$name.txt" || fail "$name: $(cat "$work/$name.txt")"
    [ ! -s "$work/$name.err" ] || fail "$name: $(cat "$work/$name.err")"
}

# counts NAME ARGS...: on the simulated device, where only memory counts.
counts() {
    name=$1
    shift
    TENURE_CUDA_LIBRARY="$build/libtenure-simcuda.so" $train --driver cuda "$@" \
        --bytes "$work/$name.bytes" >"$work/$name.txt" 2>"$work/$name.err" ||
        fail "$name failed: $(cat "$work/$name.txt" "$work/$name.err")"
    [ ! -s "$work/$name.err" ] || fail "$name: $(cat "$work/$name.err")"
}

same() {
    cmp "$work/$1" "$work/$2" || fail "$1 and $2 differ"
}

learns fp8 --recipe fp8 --steps 6
learns again --recipe fp8 --steps 6
same fp8.csv again.csv
learns tensor --recipe fp8-tensor --steps 4
learns delayed --recipe fp8-delayed --steps 6
! cmp -s "$work/tensor.csv" "$work/delayed.csv" || fail "delayed scaling changes nothing"
learns bf16 --recipe bf16 --steps 6
learns fp32 --recipe fp32 --steps 6
learns parts --recipe fp8 --steps 4 --accumulate 2
learns recomputed --recipe fp8 --steps 4 --recompute
learns unclipped --recipe fp8 --steps 6 --clip inf
! cmp -s "$work/fp8.csv" "$work/unclipped.csv" || fail "clipping changes nothing"
[ "$(wc -l <"$work/fp8.csv")" = 8 ] || fail "not a line for each step: $(cat "$work/fp8.csv")"

counts ghost_fp8 --recipe fp8 --steps 4
counts ghost_tensor --recipe fp8-tensor --steps 4
counts ghost_delayed --recipe fp8-delayed --steps 4
counts ghost_bf16 --recipe bf16 --steps 4
counts ghost_parts --recipe fp8 --steps 4 --accumulate 2
counts ghost_recomputed --recipe fp8 --steps 4 --recompute
counts graph_fp8 --recipe fp8 --steps 6 --graph
counts graph_delayed --recipe fp8-delayed --steps 6 --graph
counts graph_parts --recipe fp8 --steps 6 --graph --accumulate 2
for name in fp8 tensor delayed bf16 parts recomputed; do
    same $name.bytes ghost_$name.bytes
done
same fp8.bytes graph_fp8.bytes
same delayed.bytes graph_delayed.bytes
same parts.bytes graph_parts.bytes
grep -q '^5 launches of one graph$' "$work/graph_fp8.txt" || fail "the graph was not launched"

# A capture that runs out of memory ends with the words of it and nothing left behind.
status=0
TENURE_LIMIT=12MiB TENURE_CUDA_LIBRARY="$build/libtenure-simcuda.so" \
    $train --driver cuda --steps 3 --graph >"$work/out" 2>"$work/err" || status=$?
[ "$status" = 1 ] || fail "exit status $status, expected 1, of a capture without memory"
[ "$(wc -l <"$work/err")" = 1 ] || fail "more than the reason: $(cat "$work/err")"
grep -q "pool captured steps has no" "$work/err" || fail "not the reason: $(cat "$work/err")"

python3 - "$work" <<'PYTHON' || fail "the bytes are not those of the shapes"
import csv, math, sys

HIDDEN, HEADS, FFN, LAYERS, TOKENS = 64, 2, 160, 2, 5 * 24
WEIGHTS = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))
blocks = lambda n: (n + 127) // 128
up = lambda n, to: (n + to - 1) // to * to
scales = lambda rows, cols: blocks(rows) * up(blocks(cols), 4) * 4
is_fp8 = lambda recipe: recipe.startswith("fp8")

def of_model(recipe, parts):
    gains = (2 * LAYERS + 1) * HIDDEN
    outer = 3 * 256 * HIDDEN
    inner = LAYERS * sum(rows * cols for rows, cols in WEIGHTS)
    elements = gains + outer + inner
    element_bytes = 4 if recipe == "fp32" else 2
    values, slot, masters = 4 * gains + element_bytes * (outer + inner), 0, outer + inner
    of = scales if recipe == "fp8" else lambda rows, cols: 16
    if is_fp8(recipe):
        values = 4 * gains + 2 * outer + LAYERS * sum(r * c + of(r, c) for r, c in WEIGHTS)
        slot = max(up(r * c, 256) + max(of(r, c), of(c, r)) for r, c in WEIGHTS)
    # Factors and the amaxes of 16 steps, of a weight, its x and its dy.
    delayed = 4 * 17 * 3 * (4 + 6 * LAYERS) if recipe == "fp8-delayed" else 0
    if recipe == "fp32":
        masters = 0
    return {"parameters": values, "transposed weights, one at a time": slot,
            "gradients": 4 * elements,
            "optimizer state":
                8 * elements + 4 * masters + 4 * (3 + 1 + 256 + 1 + 1) + delayed,
            "batches": TOKENS + parts * 6 * TOKENS}

def of_step(recipe):
    """(saved, activations) after each sub-step of a step with one micro-batch."""
    a = 4 if recipe == "fp32" else 2
    wide = lambda cols: TOKENS * cols * a
    # The COL plane of a quantized copy, or the PLAIN tensor that stands for it.
    of = lambda cols: blocks(TOKENS) * up(cols, 4) * 4 if recipe == "fp8" else 16
    operand = lambda cols: TOKENS * cols + of(cols) if is_fp8(recipe) else wide(cols)
    statistics = 4 * TOKENS
    forward = [("embedding", 0, 2 * wide(HIDDEN))]
    for layer in range(LAYERS):
        forward += [
            (f"qkv {layer}", wide(HIDDEN) + statistics + operand(HIDDEN) + wide(3 * HIDDEN), 0),
            (f"attention {layer}", wide(HIDDEN) + 4 * TOKENS * HEADS, 0),
            (f"projection {layer}", operand(HIDDEN) if is_fp8(recipe) else 0, wide(HIDDEN)),
            (f"mlp {layer}", wide(HIDDEN) + statistics + operand(HIDDEN) + wide(2 * FFN)
             + operand(FFN), wide(HIDDEN))]
    forward += [("head", 2 * wide(HIDDEN) + statistics, 4 * TOKENS * 256)]
    rows, saved = [], 0
    for name, size, activations in forward:
        saved += size
        rows.append((f"forward {name}", saved, activations))
    rows.append(("loss", saved, wide(256)))
    held = dict((name, size) for name, size, _ in forward)
    for name, _, _ in reversed(forward):
        saved -= held[name]
        activations = wide(HIDDEN)
        if name.startswith("projection"):  # the gradient of the sum, and that of the product's x
            activations = 2 * wide(HIDDEN)
        if name.startswith("attention"):
            activations = wide(HIDDEN) + wide(3 * HIDDEN)
            saved -= wide(3 * HIDDEN)      # qkv itself is gone as well
            held[name.replace("attention", "qkv")] -= wide(3 * HIDDEN)
        if name == "embedding":
            activations = 0
        rows.append((f"backward {name}", saved, activations))
    return rows + [("update", 0, 0)]

def of_norms(name):
    """The norms of all gradients, and the line that is said of those above a limit."""
    rows = csv.DictReader(open(f"{sys.argv[1]}/{name}.csv", encoding="utf-8"))
    norms = [float(row["norm"]) for row in rows if row["norm"]]
    limit = math.inf if name == "unclipped" else 1.0
    above = f"{sum(norm > limit for norm in norms)} steps had a norm above {limit:g}"
    return norms, f"gradients of {above}, the most {max(norms):.4g}"

for name in ("fp8", "tensor", "delayed", "bf16", "fp32", "parts", "unclipped"):
    norms, line = of_norms(name)
    assert line in open(f"{sys.argv[1]}/{name}.txt", encoding="utf-8").read(), (name, line)
# The first update is the same whatever the gradients are multiplied with, but for rounding.
clipped, unclipped = of_norms("fp8")[0], of_norms("unclipped")[0]
assert clipped[0] == unclipped[0] > 1.0 and clipped[2:] != unclipped[2:], (clipped, unclipped)

def of_table(name):
    rows = {}
    for line in open(f"{sys.argv[1]}/{name}.txt", encoding="utf-8"):
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if len(cells) >= 2 and cells[1].replace(",", "").isdigit():
            rows[cells[0]] = int(cells[1].replace(",", ""))
    return rows

for name, recipe, parts in (("fp8", "fp8", 1), ("tensor", "fp8-tensor", 1),
                            ("delayed", "fp8-delayed", 1), ("bf16", "bf16", 1),
                            ("fp32", "fp32", 1), ("parts", "fp8", 2), ("graph_fp8", "fp8", 1)):
    table, expected = of_table(name), of_model(recipe, parts)
    for owner, size in expected.items():
        assert table[owner] == size, (name, owner, table[owner], size)
    assert table["all"] == sum(expected.values()), (name, table["all"])
    assert table["after the model is gone"] == 0
    if name.startswith("graph"):
        continue
    rows = list(csv.DictReader(open(f"{sys.argv[1]}/{name}.bytes", encoding="utf-8")))
    assert rows[-1]["after"] == "update" and int(rows[-1]["live_bytes"]) == table["all"]
    assert all(int(row["model_bytes"]) == table["all"] for row in rows)
    if parts == 1:
        found = [(row["after"], int(row["saved_bytes"]), int(row["activation_bytes"]))
                 for row in rows]
        for one, other in zip(found, of_step(recipe)):
            assert one == other, (name, one, other)
        assert len(found) == len(of_step(recipe))
    losses = [row["loss"] for row in csv.DictReader(open(f"{sys.argv[1]}/{name}.csv"))]
    assert float(losses[-2]) < float(losses[0]), (name, losses)
PYTHON

# A recipe that is compared with itself is at no distance; with another one, somewhere.
compare="$2/bench/trainer/compare_recipes.py"
for recipe in fp32 fp8; do
    python3 "$compare" "$build/tenure-train" "$work/compared" --recipe $recipe --against fp32 \
        --seeds 2 --at-once 2 -- --driver host --text "$2/LICENSE" $size --steps 3 \
        >"$work/$recipe.compared" 2>&1 || fail "not compared: $(cat "$work/$recipe.compared")"
    [ "$(wc -l <"$work/$recipe.compared")" = 6 ] || fail "not six lines"
done
grep -q "^fp32  *last steps  *+0.000  *0.000  *0.000  *+0.00 +0.00$" "$work/fp32.compared" ||
    fail "a recipe is not itself: $(cat "$work/fp32.compared")"
grep -q "^fp8  *held out" "$work/fp8.compared" || fail "not told: $(cat "$work/fp8.compared")"
! grep -q "^fp8  *held out  *+0.000  *0.000" "$work/fp8.compared" || fail "FP8 is fp32"
status=0
python3 "$compare" "$build/tenure-train" "$work/compared" --seeds 1 >"$work/out" 2>&1 || status=$?
[ "$status" = 2 ] || fail "exit status $status, expected 2, of one seed"

refused "unrecognized option" $train --colour
refused "recipe: fp16" $train --recipe fp16
refused "driver: gpu" $train --driver gpu
refused "layers: 0" $train --layers 0
refused "hidden: 12x" $train --hidden 12x
refused "sequence: 257" $train --sequence 257
refused "steps: 1" $train --steps 1
refused "rate: 0" $train --rate 0
refused "rate: nan" $train --rate nan
refused "clip: 0" $train --clip 0
refused "clip: nan" $train --clip nan
refused "clip: 1x" $train --clip 1x
refused "accumulate: -1" $train --accumulate -1
refused "unexpected argument: x" $train x
refused "5 heads of hidden 64" $train --driver host --heads 5
refused "1 heads of hidden 256" $train --driver host --hidden 256 --heads 1
refused "more than 1048576 tokens" $train --driver host --batch 100000
refused "only a CUDA device captures" $train --driver host --graph
refused "can not be read" $train --driver host --text "$work/missing"
printf 'short' >"$work/short"
refused "5 bytes, expected at least 250" $build/tenure-train --driver host --sequence 24 \
    --hidden 64 --text "$work/short"
status=0
$train --driver host --steps 2 --csv "$work/missing/x" >"$work/out" 2>"$work/err" || status=$?
[ "$status" = 1 ] || fail "exit status $status, expected 1, of a file that can not be written"
grep -q "can not be written" "$work/err" || fail "not told: $(cat "$work/err")"
$build/tenure-train --help | grep -q '^usage: tenure-train' || fail "no help"
