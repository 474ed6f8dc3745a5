# `tenure report`: traces from files and standard input, and what it refuses.
. "$2/tests/cli/shell_support.sh"
good=$inputs/good_small.csv

for request in "help report" "report --help" "report -h"; do
    run_tenure $request
    expect_status 0
    expect_no_error
    expect_output "Usage: tenure report FILE"
done

for name in good_small.csv good_small.csv.gz good_crlf.csv; do
    run_tenure report "$inputs/$name"
    expect_status 0
    expect_no_error
    expect_output "<!DOCTYPE html>"
    expect_output "1,052,672"
    expect_output "<polyline points="
    expect_output "</html>"
done
feed_tenure <"$good"
run_tenure report -
expect_status 0
expect_output "standard input"

for name in good_owned.csv good_rmm.csv good_header_only.csv; do
    run_tenure report "$inputs/$name"
    expect_status 0
    expect_no_error
    expect_output "</html>"
done

# A pipe is a trace, and all of it is read.
last_run="cat TRACE | tenure report /dev/stdin"
cat "$good" | "$tenure" report /dev/stdin >"$work_dir/out" 2>"$work_dir/err"
last_status=$?
expect_status 0
expect_output "1,052,672"

# A page appears whole or not at all.
run_tenure report "$good" -o "$work_dir/page.html"
expect_status 0
expect_no_output
expect_no_error
run_tenure report "$good"
cmp -s "$work_dir/out" "$work_dir/page.html" || complain "expected the same page in the file"
echo before >"$work_dir/kept.html"
run_tenure report "$inputs/bad_op.csv" --output "$work_dir/kept.html"
expect_refusal "bad_op.csv:"
run_tenure report "$good" -o "$work_dir/none/page.html"
expect_refusal "none/page.html can not be written: No such file or directory"
run_tenure report "$good" -o "$work_dir"
expect_refusal "can not be written: Is a directory"
run_tenure report "$good" -o /dev/full
expect_refusal "/dev/full can not be written: No space left on device"
[ "$(cat "$work_dir/kept.html")" = before ] || complain "expected kept.html as it was"
[ -z "$(find "$work_dir" -name '*.part')" ] || complain "expected nothing half-written"

# Blocks that lie nowhere: without bytes, and beyond the last address. A page without a map then.
echo 'op,id,bytes,stream,time_us,address,owner
a,1,0,0,0,0x1000,a
a,2,100,0,1,0xffffffffffffffff,</script><script>alert(1)</script>' >"$work_dir/nowhere.csv"
run_tenure report "$work_dir/nowhere.csv"
expect_status 0
expect_output '"hasAddresses":false'
expect_output "This trace has no addresses"
! grep -q "<script>alert" "$work_dir/out" || complain "expected names that end no script"

refused() {
    message=$1
    shift
    run_tenure report "$@"
    expect_status 2
    expect_no_output
    expect_error "$message"
}
refused "no file; see \`tenure help report\`"
refused "unknown option --json" --json
refused "unexpected argument more" "$good" more
refused "no_such_file" "$work_dir/no_such_file"
echo '{"format": "tenure pool map 1"}' >"$work_dir/odd.json"
refused 'its format is "tenure pool map 1"' "$work_dir/odd.json"
echo '{"format": ' >"$work_dir/cut.json"
refused "it is no JSON object" "$work_dir/cut.json"
echo 'op,id,size' >"$work_dir/odd.csv"
refused "odd.csv:1:" "$work_dir/odd.csv"
refused "--ordinal x: expected a number from 0 to 1023" "$good" --ordinal x
refused "option -o needs a value" "$good" -o
finish
