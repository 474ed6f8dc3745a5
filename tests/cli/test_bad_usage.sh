#!/bin/sh
# Unknown commands, options and values end with status 2, a message that names them, no output.
. "$2/tests/cli/shell_support.sh"
good=$inputs/good_small.csv

run_tenure
expect_refusal "no command"
run_tenure frobnicate
expect_refusal "unknown command frobnicate; expected replay, report, convert,"
run_tenure --frobnicate
expect_refusal "unknown option --frobnicate"
run_tenure help frobnicate
expect_refusal "unknown command frobnicate"
run_tenure --version now
expect_refusal "unexpected argument now"
run_tenure options all
expect_refusal "unexpected argument all"
run_tenure execute "$good"
expect_refusal "unknown command execute"

run_tenure replay
expect_refusal "no TRACE was given"
run_tenure replay "$good" "$good"
expect_refusal "one TRACE was expected"
run_tenure replay "$good" --plan
expect_refusal "unknown option --plan"
run_tenure replay -x "$good"
expect_refusal "unknown option -x"
run_tenure replay "$good" --json=yes
expect_refusal "--json=yes: it takes no value"
run_tenure replay "$good" --driver
expect_refusal "option --driver needs a value"
run_tenure replay "$good" --driver tpu
expect_refusal "--driver tpu: expected sim, host or cuda"
for count in 0 -1 65 x 2x ''; do
    run_tenure replay "$good" --repeat "$count"
    expect_refusal "--repeat $count: expected a number from 1 to 64"
done

for size in 0 -1 1.5.2GiB 4096GB 12x '' 0x10 99999999999999999999 GiB; do
    run_tenure replay "$good" --device-memory "$size"
    expect_refusal "--device-memory $size: expected a size above 0"
done

# Values of the environment: a warning that says which, what and what is accepted; or an end.
export TENURE_PAGE_BYTES=abc
run_tenure replay "$good" --json
expect_status 0
expect_error "TENURE_PAGE_BYTES=abc is not accepted: it takes a number of bytes"
expect_output '"events":	7'
export TENURE_STRICT=1
run_tenure replay "$good" --json
expect_refusal "TENURE_PAGE_BYTES=abc is not accepted: it takes a number of bytes"
run_tenure options
expect_refusal "TENURE_PAGE_BYTES=abc is not accepted: it takes a number of bytes"
unset TENURE_PAGE_BYTES
export TENURE_SIM_MEMORY=lots
run_tenure replay "$good"
expect_refusal "TENURE_SIM_MEMORY=lots is not accepted: it takes a size"
unset TENURE_STRICT
run_tenure replay "$good"
expect_status 0
expect_error "TENURE_SIM_MEMORY=lots"
export TENURE_SIM_MEMORY=1GiB
run_tenure replay "$inputs/bad_above_device.csv"
expect_refusal "bad_above_device.csv:4: 1073741825 bytes are more than the whole device"
unset TENURE_SIM_MEMORY

# A library that is none, and one that is no simulated driver.
export TENURE_CUDA_LIBRARY=/no/such/library.so
run_tenure replay "$good"
expect_refusal "/no/such/library.so"
run_tenure replay "$good" --driver cuda
expect_refusal "/no/such/library.so"
export TENURE_CUDA_LIBRARY=libm.so.6
run_tenure replay "$good"
expect_refusal "libm.so.6 is no simulated CUDA driver: it lacks tnsim_configure"
finish
