#!/bin/sh
# Every bad trace ends the command with status 2, its message with file and line, and no output.
. "$2/tests/cli/shell_support.sh"

cd "$inputs" || exit 1
listed=0
while IFS= read -r message; do
    run_tenure replay "${message%%:*}" --device-memory 1GiB --json
    expect_refusal "tenure replay: $message"
    listed=$((listed + 1))
done <expected_errors.txt
last_run="the list of bad inputs"
[ "$listed" -eq 45 ] || complain "expected 45 inputs in the list, not $listed"

for name in bad_truncated.csv.gz bad_no_trailer.csv.gz; do
    run_tenure replay "$name"
    expect_refusal ": the compressed data ends early; expected a whole gzip file"
done
for name in bad_damaged.csv.gz bad_checksum.csv.gz; do
    run_tenure replay "$name"
    expect_refusal ": damaged compressed data ("
done

# A real trace that lost its second half is refused, however much of it could be played.
head -c 150000 "$source_dir/bench/traces/lora.csv.gz" >"$work_dir/half.csv.gz"
run_tenure replay "$work_dir/half.csv.gz" --json
expect_refusal "half.csv.gz:"
expect_error ": the compressed data ends early"

run_tenure replay no_such_file.csv
expect_refusal "no_such_file.csv: cannot open: No such file or directory"
run_tenure replay .
expect_refusal ".: cannot open: it is a directory; expected a trace"

printf 'op,id,bytes,stream\na,1,4096,0\nf,9,,\n' | feed_tenure
run_tenure replay -
expect_refusal "standard input:3: free of id \"9\", which is not alive"
run_tenure replay -
expect_refusal "standard input:1: the trace is empty"

# The default device has 139 GiB: one byte more in one allocation is the trace's fault.
printf 'op,id,bytes,stream\na,1,149250113537,0\n' | feed_tenure
run_tenure replay -
expect_refusal "standard input:2: 149250113537 bytes are more than the whole device"
finish
