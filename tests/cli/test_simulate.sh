#!/bin/sh
# `tenure simulate`: what it prints, that it repeats itself, and what it refuses.
. "$2/tests/cli/shell_support.sh"

for request in "help simulate" "simulate --help" "simulate -h"; do
    run_tenure $request
    expect_status 0
    expect_no_error
    expect_output "Usage: tenure simulate [MODEL] [options]"
    expect_output "--frozen-layers"
done

# Every figure is the same in every run: table, JSON, trace and page.
for options in "tiny" "tiny --dp 3" "tiny --pp 2 --microbatches 4 --tp 2 --lifetimes off"; do
    for kind in json html; do
        run_tenure simulate $options --json --timeline "$work_dir/first.$kind"
        expect_status 0
        expect_no_error
        cp "$work_dir/out" "$work_dir/first.out"
        run_tenure simulate $options --json --timeline "$work_dir/second.$kind"
        checks=$((checks + 1))
        cmp -s "$work_dir/first.out" "$work_dir/out" || complain "expected the same output again"
        checks=$((checks + 1))
        cmp -s "$work_dir/first.$kind" "$work_dir/second.$kind" ||
            complain "expected the same timeline again"
    done
done
python3 - "$work_dir" <<'END' || complain "expected a trace of events"
import json, sys
trace = json.load(open(sys.argv[1] + "/first.json"))
events = trace["traceEvents"]
kinds = {event["ph"] for event in events}
assert kinds == {"M", "X", "C"}, kinds
names = {event["name"] for event in events}
assert "gemm" in names and "reduce_scatter_uneven" in names and "alive" in names, names
assert any(name.startswith("backward of chunk 1") for name in names)
assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
page = open(sys.argv[1] + "/first.html").read()
assert page.startswith("<!DOCTYPE html>") and page.rstrip().endswith("</html>")
assert "kept: L2 planes of each layer" in page
END

run_tenure simulate tiny --ranks 2 --device-memory 4MiB
expect_status 1
expect_no_output
expect_error "tenure simulate: rank 0: "
expect_error "OUT_OF_DEVICE_MEMORY"

run_tenure simulate
expect_refusal "no MODEL was given"
run_tenure simulate tiny llama3-8b
expect_refusal "one model was expected, but there are tiny and llama3-8b"
run_tenure simulate tiny --model tiny
expect_refusal "one model was expected"
run_tenure simulate no-such-model
expect_refusal "no-such-model: no model of that name comes with tenure"
run_tenure simulate ./no-such-file.json
expect_refusal "no-such-file.json: it can not be read"
run_tenure simulate "$inputs/good_small.csv"
expect_refusal "it is no JSON object"
run_tenure simulate tiny --frobnicate 1
expect_refusal "unknown option --frobnicate"
run_tenure simulate tiny -x
expect_refusal "unknown option -x"
run_tenure simulate tiny --json=1
expect_refusal "--json=1: it takes no value"
run_tenure simulate tiny --tp
expect_refusal "option --tp needs a value"
run_tenure simulate tiny --driver cuda
expect_refusal "--driver cuda: expected sim or host"
run_tenure simulate tiny --timeline trace.txt
expect_refusal "--timeline trace.txt: expected a name that ends in .json or .html"
run_tenure simulate tiny --timeline /no/such/folder/trace.json
expect_status 2
expect_error "/no/such/folder/trace.json can not be written: No such file or directory"
for value in x '' 1.5 -1 99999999999999999999; do
    run_tenure simulate tiny --tp "$value"
    expect_refusal "--tp $value: expected a number"
done
run_tenure simulate tiny --tp 0
expect_refusal "--tp: tp: expected a number from 1 to 1024"
run_tenure simulate tiny --tp 3
expect_refusal "heads_kv is 4, no multiple of tp, which is 3"
for value in 0 x 100000; do
    run_tenure simulate tiny --ranks "$value"
    expect_refusal "--ranks $value: expected a number from 1 to 65536"
done
run_tenure simulate tiny --ranks 3 --tp 2
expect_refusal "--ranks 3: no multiple of tp x pp, which is 2"
run_tenure simulate tiny --ranks 2048
expect_refusal "--ranks 2048: dp would be 2048"
for list in '' L5=on L3 L3= on,maybe L1=on, off,; do
    run_tenure simulate tiny --lifetimes "$list"
    expect_refusal "--lifetimes $list: expected on, off, or a list"
done
for option in --device-memory --node-rate --network-rate; do
    run_tenure simulate tiny $option 0
    expect_refusal "$option 0: expected a size above 0"
done
finish
