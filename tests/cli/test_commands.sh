#!/bin/sh
# What the commands print when all is well.
. "$2/tests/cli/shell_support.sh"
good=$inputs/good_small.csv

run_tenure --version
expect_status 0
expect_no_error
last_version=$(cat "$work_dir/out")
[ "$last_version" = "tenure 0.1.0" ] || complain "expected tenure 0.1.0"

for request in help --help -h "help help"; do
    run_tenure $request
    expect_status 0
    expect_no_error
    expect_output "Usage: tenure COMMAND"
    expect_output "replay"
done
for request in "help replay" "replay --help" "replay -h"; do
    run_tenure $request
    expect_status 0
    expect_no_error
    expect_output "Usage: tenure replay TRACE [options]"
    expect_output "--device-memory SIZE"
done
# What is not there is not advertised.
checks=$((checks + 1))
! grep -qE -e '--plan' "$work_dir/out" || complain "expected no word of --plan"

export TENURE_PAGE_BYTES=4MiB
run_tenure options
expect_status 0
expect_no_error
expect_output "4MiB"
expect_output "(TENURE_PAGE_BYTES)"
checks=$((checks + 1))
[ "$(grep -c '^TENURE_' "$work_dir/out")" -ge 8 ] || complain "expected a line per option"
unset TENURE_PAGE_BYTES
run_tenure options --help
expect_status 0
expect_output "Usage: tenure options"

# The table, and a trace from standard input, plain and gzip.
run_tenure replay "$good"
expect_status 0
expect_no_error
expect_output "peak live"
expect_output "1,052,672"
for name in good_small.csv good_small.csv.gz good_crlf.csv; do
    feed_tenure <"$inputs/$name"
    run_tenure replay - --json
    expect_status 0
    expect_no_error
    expect_output '"peak_live_bytes":	1052672'
done

# The job fails if an allocation does, and says which; the figures are printed all the same.
run_tenure replay "$inputs/oom.csv" --device-memory 1GiB --json
expect_status 1
expect_output '"oom_count":	1'
expect_error "tenure replay: line 3: "

# With --driver cuda the size is a limit of the pool, and the device must have it.
export TENURE_CUDA_LIBRARY=$build_dir/libtenure-simcuda.so
run_tenure replay "$inputs/oom.csv" --driver cuda --json
expect_status 0
expect_output '"driver":	"cuda"'
run_tenure replay "$inputs/oom.csv" --driver cuda --device-memory 1GiB --json
expect_status 1
expect_output '"oom_count":	1'
run_tenure replay "$inputs/bad_above_device.csv" --driver cuda --device-memory 1GiB
expect_refusal "bad_above_device.csv:4: 1073741825 bytes are more than the whole device"
run_tenure replay "$good" --driver cuda --device-memory 140GiB
expect_refusal "--device-memory asks for 150323855360 bytes, but"
unset TENURE_CUDA_LIBRARY

# Where the output goes is the caller's mistake.
checks=$((checks + 1))
if [ -w /dev/full ]; then
    "$tenure" replay "$good" --json >/dev/full 2>"$work_dir/err"
    last_status=$?
    last_run="tenure replay > /dev/full"
    expect_status 2
    expect_error "cannot write to standard output"
fi
finish
