# `tenure convert`: from every kind of history to every other, and what it refuses. What is in a
# snapshot for PyTorch, and what a real one has, test_torch_snapshots.sh looks at.
. "$2/tests/cli/shell_support.sh"
mkdir "$work_dir/here" && cd "$work_dir/here" || exit 1
good=$inputs/good_owned.csv
small=$inputs/torch_small.pickle

for request in "help convert" "convert --help" "convert -h"; do
    run_tenure $request
    expect_status 0
    expect_no_error
    expect_output "Usage: tenure convert INPUT OUTPUT"
done

# A trace is the same again, ids in order of appearance and times from the first event.
run_tenure convert "$good" - --to trace
expect_status 0
expect_output "op,id,bytes,stream,time_us,address,owner"
expect_output "a,1,4096,0,0,0x7f0000000000,layer 1, weights"
expect_output "a,2,512,0,27.8,,"
expect_output "f,1,,,77.8,,"
expect_output "a,3,64,0,82.8,0x7f0000000000,a ? b"
cp "$work_dir/out" "$work_dir/again.csv"
run_tenure convert "$work_dir/again.csv" "$work_dir/third.csv.gz"
expect_status 0
expect_no_output
gzip -dc "$work_dir/third.csv.gz" | cmp -s - "$work_dir/again.csv" || complain "expected the same"

run_tenure convert "$good" "$work_dir/trace.json"
expect_status 0
python3 - "$work_dir/trace.json" <<'END' || complain "expected events of Chrome"
import json, sys
events = json.load(open(sys.argv[1]))["traceEvents"]
assert [e["ts"] for e in events if e["ph"] == "b"] == [0, 27.8, 82.8], events
assert [e["args"]["all"] for e in events if e.get("name") == "live bytes"] == [4096, 4608, 512, 576]
assert {e["name"] for e in events if e["ph"] == "e"} == {"layer 1, weights"}
assert events[-2]["args"] == {"bytes": 64} and events[-2]["id"] == "a ? b"
END

# A log of RMM, there and back: the same blocks at the same addresses, and the same replay.
run_tenure convert "$inputs/good_rmm.csv" "$work_dir/log.rmm.csv"
expect_status 0
cat >"$work_dir/expected" <<'END'
Thread,Time,Action,Pointer,Size,Stream
1,00:00:00.000000,allocate,0x7f0000000000,1024,0x0
1,00:00:00.000000,allocate,0x7f0000000400,2048,0x1
1,00:00:00.000000,allocate failure,(nil),1099511627776,0x0
1,00:00:00.000000,free,0x7f0000000000,1024,0x0
1,00:00:00.000000,free,0x7f0000000400,2048,0x1
1,00:00:00.000000,allocate,0x7f0000000000,4096,0x1
END
cmp "$work_dir/log.rmm.csv" "$work_dir/expected" || complain "expected this log"
for name in good_timed.csv good_small.csv good_owned.csv; do # with times, and without addresses
    run_tenure convert "$inputs/$name" "$work_dir/log.rmm.csv.gz"
    expect_status 0
    run_tenure replay "$inputs/$name" --json
    expect_status 0
    sed '/host_ns_per_event\|"trace"/d' "$work_dir/out" >"$work_dir/first.json"
    run_tenure replay "$work_dir/log.rmm.csv.gz" --json
    expect_status 0
    sed '/host_ns_per_event\|"trace"/d' "$work_dir/out" >"$work_dir/second.json"
    cmp "$work_dir/first.json" "$work_dir/second.json" || complain "$name: expected the same replay"
done
run_tenure convert "$inputs/good_timed.csv" - --to rmm
expect_output "1,00:00:00."

# Replaying makes addresses for a trace that has none.
run_tenure convert "$inputs/good_small.csv" "$work_dir/small.pickle"
expect_refusal "has no addresses, which PyTorch's viewer needs"
run_tenure replay "$inputs/good_small.csv" --trace "$work_dir/placed.csv.gz" \
    --snapshot "$work_dir/pool.json"
expect_status 0
for name in placed.csv.gz pool.json; do
    run_tenure convert "$work_dir/$name" "$work_dir/small.pickle"
    expect_status 0
    expect_no_error
    run_tenure convert "$work_dir/small.pickle" - --to trace
    expect_status 0
    run_tenure report "$work_dir/$name"
    expect_status 0
done
gzip -dc "$work_dir/placed.csv.gz" >"$work_dir/placed.csv"
run_tenure replay "$work_dir/placed.csv"
expect_status 0

run_tenure replay "$small"
expect_status 0
run_tenure replay "$inputs/torch_two_devices.pickle"
expect_refusal "has devices 0, 1; choose one by \`tenure convert --ordinal N\`"
run_tenure convert "$inputs/torch_two_devices.pickle" - --to trace --ordinal 1
expect_status 0
run_tenure convert "$inputs/torch_two_devices.pickle" - --to trace --ordinal 2
expect_refusal "has nothing of device 2, only of 0, 1"

# What is cut short at any byte is refused, and nothing is written.
length=$(wc -c <"$small")
for bytes in 1 2 17 1000 $((length - 1)); do
    head -c "$bytes" "$small" >"$work_dir/cut.pickle"
    run_tenure convert "$work_dir/cut.pickle" "$work_dir/none.csv"
    expect_refusal "cut.pickle: byte "
    expect_error "ends early"
done
[ ! -e "$work_dir/none.csv" ] || complain "expected no file of what is refused"

# A pickle that would run a command, had it been loaded by Python.
printf '\200\002cposix\nsystem\nX\016\000\000\000touch escaped_\205R.' >"$work_dir/hostile.pickle"
for command in replay report "convert --to trace"; do
    run_tenure $command "$work_dir/hostile.pickle" $([ "${command%% *}" = convert ] && echo -)
    expect_refusal "GLOBAL, which names a Python object (posix.system)"
    expect_error "nothing of this file was run"
done
[ -z "$(find . -name 'escaped_*')" ] || complain "expected that nothing was run"

refused() {
    message=$1
    shift
    run_tenure convert "$@"
    expect_refusal "$message"
}
refused "INPUT and OUTPUT were expected, but there is none"
refused "INPUT and OUTPUT were expected, but there is only one file" "$good"
refused "but there is also more" "$good" "$work_dir/x.csv" more
refused "the name x.bin does not tell what it is to be; name it with --to" "$good" x.bin
refused "does not tell" "$good" -
refused "--to yaml: expected rmm, trace, pytorch or chrome" "$good" x.csv --to yaml
refused "--ordinal -1: expected a number from 0 to 1023" "$good" x.csv --ordinal -1
refused "option --to needs a value" "$good" x.csv --to
refused "unknown option --frob" "$good" x.csv --frob
refused "--help=1: it takes no value" "$good" x.csv --help=1
refused "unknown option -x" "$good" x.csv -x
refused "no_such_file" "$work_dir/no_such_file" x.csv
echo '{"format": "tenure pool snapshot 1"}' >"$work_dir/odd.json"
refused "it has no list of regions" "$work_dir/odd.json" x.csv
echo '{"format": "tenure pool report 1"}' >"$work_dir/odd.json"
refused 'its format is "tenure pool report 1"; expected "tenure pool snapshot 1"' \
    "$work_dir/odd.json" x.csv
echo '{' >"$work_dir/odd.json"
refused "it is no JSON object" "$work_dir/odd.json" x.csv
[ ! -e x.csv ] || complain "expected no file"

# Outputs that can not be written: the file of that name is as it was, and nothing else is left.
echo before >"$work_dir/kept.csv"
refused "none/x.csv can not be written: No such file or directory" "$good" "$work_dir/none/x.csv"
refused "can not be written: Is a directory" "$good" "$work_dir" --to trace
refused "/dev/full can not be written: No space left on device" "$good" /dev/full --to trace
refused "/dev/full can not be written: No space left on device" "$small" /dev/full --to chrome
run_tenure replay "$good" --trace /dev/full
expect_refusal "No space left on device"
run_tenure replay "$good" --trace "$work_dir/none/x.csv"
expect_refusal "none/x.csv"
run_tenure replay "$good" --snapshot "$work_dir/none/x.json"
expect_refusal "none/x.json"
awk 'BEGIN {
    print "op,id,bytes,stream"
    for (i = 0; i < 20000; i++) printf "a,%d,%d,0\n", i, i * 7919 % 65536
}' >"$work_dir/long.csv"
for output in kept.csv kept.csv.gz; do
    # A file may have 1 KiB here: as if the disk were full in the middle of it.
    (
        trap '' XFSZ
        ulimit -f 1
        "$tenure" convert "$work_dir/long.csv" "$work_dir/$output"
    ) >"$work_dir/limited" 2>&1
    last_status=$?
    last_run="tenure convert to $output, of which only 1 KiB may be"
    expect_status 2
    grep -q "can not be written: File too large" "$work_dir/limited" ||
        complain "expected the reason: $(cat "$work_dir/limited")"
done
[ ! -e "$work_dir/kept.csv.gz" ] || complain "expected no half of a file"
[ "$(cat "$work_dir/kept.csv")" = before ] || complain "expected kept.csv as it was"
[ -z "$(find "$work_dir" -name '*.part*')" ] || complain "expected nothing half-written"

# A file of the name that half-written ones have is somebody's, and may be the input.
for ending in csv csv.gz; do
    run_tenure convert "$good" "$work_dir/mine.$ending.part" --to trace
    expect_status 0
    cp "$work_dir/mine.$ending.part" "$work_dir/copy"
    echo before >"$work_dir/mine.$ending"
    chmod 600 "$work_dir/mine.$ending"
    run_tenure convert "$work_dir/mine.$ending.part" "$work_dir/mine.$ending"
    expect_status 0
    cmp "$work_dir/mine.$ending.part" "$work_dir/copy" || complain "expected the input as it was"
    [ "$(stat -c %a "$work_dir/mine.$ending")" = 600 ] || complain "expected it to stay private"
    gzip -dcf "$work_dir/mine.$ending" | cmp - "$work_dir/copy" || complain "expected the trace"
    run_tenure replay "$work_dir/mine.$ending.part" --trace "$work_dir/mine.$ending"
    expect_status 0
    cmp "$work_dir/mine.$ending.part" "$work_dir/copy" || complain "expected the input as it was"
    rm "$work_dir/mine.$ending.part"
done
[ -z "$(find "$work_dir" -name '*.part*')" ] || complain "expected nothing half-written"

# A pool's snapshot with numbers that no pool has, and with more streams than a history tells apart,
# each of them looked for by each piece.
echo '{"format": "tenure pool snapshot 1", "regions": [], "events": [
{"kind": "grow", "bytes": 9223372036854775808, "time_us": 1},
{"kind": "release", "bytes": 9223372036854775808, "time_us": 2},
{"kind": "release", "bytes": 1e300, "time_us": 1e300}]}' >"$work_dir/large.json"
for output in large.csv large.pickle large_chrome.json; do
    run_tenure convert "$work_dir/large.json" "$work_dir/$output"
    expect_status 0
done
python3 - "$work_dir/streams.json" <<'END'
import json, sys
json.dump({"format": "tenure pool snapshot 1", "streams": [{"number": 1, "id": 7}] * 300000,
           "regions": [{"address": "0x10", "pieces": [
               {"kind": "live", "stream": i % 2 + 1} for i in range(300000)]}]},
          open(sys.argv[1], "w"))
END
last_run="tenure convert of a snapshot with many streams"
timeout 300 "$tenure" convert "$work_dir/streams.json" - --to trace >"$work_dir/out" 2>&1
last_status=$?
expect_status 0
finish
