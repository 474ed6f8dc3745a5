#!/bin/sh
# tenure-bench-gpu can do each of its casts (a rehearsal on the host), counts the bytes that each
# must move, measures those that it is asked for, and refuses what it does not know.
# usage: test_bench_casts.sh BUILD SOURCE
set -eu
program=$1/tenure-bench-gpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "FAIL: $*"
    exit 1
}

"$program" --rehearse --csv "$work/all.csv" >"$work/all.txt" 2>/dev/null ||
    fail "a rehearsal of all casts ends with status $?"
lines=$(grep -c '^tenure,"[^"]*",128,256,[1-9][0-9]*,[0-9.]*,[0-9.]*,[0-9.]*,[0-9.]*,$' \
    "$work/all.csv")
[ "$lines" -ge 100 ] || fail "only $lines lines of the CSV are results"
[ "$lines" = $(($(wc -l <"$work/all.csv") - 1)) ] || fail "a line of the CSV is no result"
[ "$(cut -d'"' -f2 "$work/all.csv" | sort | uniq -d)" = "" ] || fail "two casts of one name"

# Of 128 x 256 elements: what is read and written, counted by hand.
while IFS='|' read -r bytes name why; do
    grep -q "^tenure,\"$name\",128,256,$bytes," "$work/all.csv" ||
        fail "$name must move $bytes bytes ($why): $(grep "\"$name\"" "$work/all.csv")"
done <<'END'
131072|copy bf16|2 + 2 each
99328|quantize 1D row|2 + 1 each, 2 x 128 scales
133120|quantize 1D both|2 + 1 + 1 each, 2 x 128 and 1 x 256 scales
131120|quantize 2D both|2 + 1 + 1 each, 1 x 4 and 2 x 4 scales
98320|quantize TENSOR current row|2 + 1 each, 1 scale and 3 words behind it
99328|quantize MXFP8 row|2 + 1 each, 128 x 8 bytes of scales
83984|quantize NVFP4 row|2 + a half each, 128 x 16 bytes of scales, 1 and 3 words
65584|transpose 2D row to column|1 + 1 each, 1 x 4 and 2 x 4 scales
82432|SwiGLU 1D row|2 each, a half of 1 each, 1 x 128 scales
99840|weighted SwiGLU 1D both|2 each, 128 weights, a half of 1 + 1, 1 x 128 and 1 x 128 scales
163840|SwiGLU backward dx|2 + a half of 2 + 2 each
264192|GELU backward 1D both + dx|2 + 2 + 2 + 1 + 1 each, 2 x 128 and 1 x 256 scales
264704|residual + LayerNorm backward dx|2 + 2 + 2 + 2 each, 3 x 256 of 2, 128 means and rstds
100352|RMSNorm 1D row|2 + 1 each, 256 gammas of 2, 128 rstds, 2 x 128 scales
140360|grouped 1D both, 8 experts|2 + 1 + 1 each, 9 offsets, 8 x (2 x 16 + 1 x 256) scales
132096|gather bf16|2 + 2 each, 128 numbers of 8
163864|part of a weight cast, fp32|4 + 1 each, 1 x 2 amaxes, 1 x 4 scales
END

"$program" --rehearse --csv "$work/some.csv" NVFP4 "SwiGLU 1D" >"$work/some.txt" 2>/dev/null ||
    fail "a choice of casts ends with status $?"
some=$(grep '"' "$work/all.csv" | grep -c 'NVFP4\|SwiGLU 1D')
[ "$(grep -c '"' "$work/some.csv")" = "$some" ] ||
    fail "asked for NVFP4 and SwiGLU 1D: $(cat "$work/some.csv")"
"$program" --rehearse --json 'quantize 1D row' 2>/dev/null | grep -q '"op":.*"quantize 1D row"' ||
    fail "no such cast in the JSON"

refused() {
    status=0
    "$program" "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = 2 ] || fail "$*: status $status, expected 2"
    [ ! -s "$work/out" ] || fail "$*: something on standard output"
}
refused frobnicate
refused --size 4096x4097
refused --size 4096
refused --only grouped
echo "$lines casts rehearsed"
