#!/bin/sh
# The command line of `tenure run`: what is refused, exit statuses, files, the check.
. "$2/tests/preload/preload_support.sh"

run_tenure run
expect_refusal "no PROGRAM was given"
run_tenure run --
expect_refusal "no PROGRAM was given"
run_tenure run --pool huge true
expect_refusal "--pool huge: expected plain, vmm, async or none"
run_tenure run --pool
expect_refusal "option --pool needs a value"
run_tenure run --frobnicate true
expect_refusal "unknown option --frobnicate"
run_tenure run --traces x true
expect_refusal "unknown option --traces"
for size in 0 -1 lots '' 1.5.2GiB 99999999999999999999; do
    run_tenure run --limit "$size" true
    expect_refusal "--limit $size: expected a size above 0"
done
run_tenure run --check --report x true
expect_refusal "--check: makes reports of its own"

# Files that can not be written; none is left behind, and none that was there is touched.
echo kept >"$work_dir/old"
for file in "$work_dir/none/x" "$work_dir" "" /dev/null/x; do
    for option in --trace --report; do
        run_tenure run $option "$file" true
        expect_refusal "$option $file: can not be written"
    done
done
run_tenure run --trace "$work_dir/trace" --report "$work_dir/none/report" true
expect_refusal "--report $work_dir/none/report: can not be written"
run_tenure run --trace "$work_dir/old" --pool huge true
expect_refusal "--pool huge"
run_tenure run --trace "$work_dir/old" -- no-such-program
expect_status 127
expect_no_output
expect_error "no-such-program: no such program in PATH"
checks=$((checks + 2))
[ "$(cat "$work_dir/old")" = kept ] || complain "the old file was touched"
[ ! -e "$work_dir/trace" ] || complain "a trace was left behind"

# What is no file stays what it is; a link stays one, and what it leads to is written.
mkfifo "$work_dir/pipe"
run_tenure run --report "$work_dir/pipe" true
expect_refusal "--report $work_dir/pipe: can not be written"
ln -s /dev/null "$work_dir/null"
run_under "--trace $work_dir/null --report $work_dir/null" preload_static_program counts
expect_status 0
echo earlier >"$work_dir/real.txt"
ln -s real.txt "$work_dir/link"
run_under "--report $work_dir/link" preload_static_program counts
expect_status 0
checks=$((checks + 5))
[ -c /dev/null ] || complain "the device has gone"
[ -p "$work_dir/pipe" ] || complain "the pipe has gone"
[ "$(readlink "$work_dir/null")" = /dev/null ] || complain "the link to a device has gone"
[ -L "$work_dir/link" ] || complain "the link has gone"
grep -qx "allocations: 1000" "$work_dir/real.txt" || complain "the link is not followed"
run_under "--report /dev/stderr" preload_static_program counts
expect_error "allocations: 1000"

# As env(1) says it.
run_tenure run -- "$work_dir/no/such/program"
expect_status 127
run_tenure run -- ""
expect_status 127
run_tenure run -- "$work_dir"
expect_status 126
run_tenure run -- "$work_dir/old"
expect_status 126
run_tenure run -- sh -c 'exit 41'
expect_status 41
run_tenure run -- sh -c 'kill -9 $$'
expect_status 137
run_tenure run sh -c 'echo "$@"' name --pool -- x
expect_output "--pool -- x"
run_tenure run --help
expect_status 0
expect_output "Usage: tenure run"
run_tenure help run
expect_output "--check"

# The trace has every allocation and free, and can be played; the report adds up.
run_under "--trace $work_dir/t.csv.gz --report $work_dir/report" preload_static_program counts
expect_status 0
checks=$((checks + 3))
grep -qx "allocations: 1000" "$work_dir/report" || complain "1000 allocations are reported"
grep -qx "frees: 1000" "$work_dir/report" || complain "1000 frees are reported"
grep -qx "live_blocks_at_exit: 0" "$work_dir/report" || complain "nothing is live"
run_tenure replay "$work_dir/t.csv.gz" --json
expect_status 0
expect_output '"events":	2000'
expect_output '"leaked_bytes":	0'
# Recording alone: the same events, and the driver serves them.
run_under "--pool none --trace $work_dir/n.csv --report $work_dir/report" \
    preload_static_program counts
expect_output "driver allocs 1000 frees 1000"
checks=$((checks + 3))
grep -qx "allocations: 0" "$work_dir/report" || complain "nothing is taken over"
grep -qx "passed: 1000" "$work_dir/report" || complain "1000 allocations are recorded"
[ "$(grep -c '^[af],' "$work_dir/n.csv")" -eq 2000 ] || complain "2000 lines are recorded"
# A process that is a child of the program has files of its own.
run_words "$tenure" run --trace "$work_dir/c.csv" -- \
    sh -c "'$programs/preload_static_program' counts; '$programs/preload_static_program' shapes"
expect_status 0
checks=$((checks + 2))
[ ! -e "$work_dir/c.csv" ] || complain "the shell itself writes none"
[ "$(find "$work_dir" -name 'c.*.csv' | wc -l)" -eq 2 ] || complain "two children, two traces"
# Without CUDA there is nothing to write.
run_words "$tenure" run --trace "$work_dir/l.csv" --report "$work_dir/l.txt" -- ls /
checks=$((checks + 1))
[ ! -e "$work_dir/l.csv" ] && [ ! -e "$work_dir/l.txt" ] || complain "ls wrote a file"

# A limit is what the program has, and sees.
run_under "--limit 64MiB" preload_lookup_program one_pair
expect_status 0
run_under "--limit 256MiB --trace $work_dir/s.csv" preload_static_program shortage
expect_status 0
checks=$((checks + 1))
[ "$(grep -c '^o,,50331648,,' "$work_dir/s.csv")" -eq 3 ] || complain "three refusals are recorded"
run_tenure report "$work_dir/s.csv"
expect_output "<b>3</b><span>times out of memory"

# The check: by itself, in a program, in one without CUDA, switched off.
run_tenure run --check
expect_status 0
expect_output "the drop-in is active"
expect_output "cuGetProcAddress     taken over"
run_tenure run --check -- "$programs/preload_static_program" counts
expect_status 0
expect_output "preload_static_program): 1000 allocations and 1000 frees taken over"
run_tenure run --check -- ls /
expect_status 1
expect_output "the drop-in is NOT active"
TENURE_DISABLE=1 run_tenure run --check
expect_status 1
expect_output "NOT taken over"

# One line says that it is active, where asked for.
TENURE_VERBOSE=1 run_under "" preload_lookup_program one_pair
checks=$((checks + 1))
[ "$(grep -c 'is active in process' "$work_dir/err")" -eq 1 ] || complain "one banner"
TENURE_RUN_POOL=huge LD_PRELOAD=$drop_in run_plain preload_lookup_program one_pair
expect_status 0
expect_error "TENURE_RUN_POOL=huge is not accepted: it takes plain, vmm, async or none"
TENURE_RUN_TRACE=/no/such/folder/t LD_PRELOAD=$drop_in run_plain preload_lookup_program one_pair
expect_status 0
expect_error "the trace /no/such/folder/t can not be written"
finish
