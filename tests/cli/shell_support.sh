# What the shell tests of the tenure command share: run it, then say what must have come out.
#
#     . "$2/tests/cli/shell_support.sh"      with the test's own arguments: build and source folder
#     run_tenure replay "$inputs/good_small.csv"
#     expect_status 0
#     finish
#
# Each expectation that fails prints what was run and what came out; finish then exits 1.

build_dir=$1
source_dir=$2
tenure=$build_dir/tenure
inputs=$source_dir/tests/cli/inputs
work_dir=$(mktemp -d) || exit 1
trap 'rm -rf "$work_dir"' EXIT
failures=0
checks=0
: >"$work_dir/in"

# Runs the command with what feed_tenure gave, or nothing, on standard input.
run_tenure() {
    last_run="tenure $*"
    "$tenure" "$@" <"$work_dir/in" >"$work_dir/out" 2>"$work_dir/err"
    last_status=$?
    : >"$work_dir/in"
}

feed_tenure() {
    cat >"$work_dir/in"
}

complain() {
    failures=$((failures + 1))
    printf 'FAILED: %s\n  %s\n  status %s, standard output:\n' "$last_run" "$1" "$last_status"
    head -c 2000 "$work_dir/out"
    printf '  standard error:\n'
    head -c 2000 "$work_dir/err"
}

expect_status() {
    checks=$((checks + 1))
    [ "$last_status" -eq "$1" ] || complain "expected exit status $1"
}

expect_no_output() {
    checks=$((checks + 1))
    [ ! -s "$work_dir/out" ] || complain "expected nothing on standard output"
}

expect_no_error() {
    checks=$((checks + 1))
    [ ! -s "$work_dir/err" ] || complain "expected nothing on standard error"
}

expect_output() {
    checks=$((checks + 1))
    grep -qF -e "$1" "$work_dir/out" || complain "expected on standard output: $1"
}

expect_error() {
    checks=$((checks + 1))
    grep -qF -e "$1" "$work_dir/err" || complain "expected on standard error: $1"
}

# Bad usage or input: status 2, a message, and nothing written.
expect_refusal() {
    expect_status 2
    expect_no_output
    expect_error "$1"
}

finish() {
    printf '%s checks, %s failed\n' "$checks" "$failures"
    [ "$failures" -eq 0 ]
    exit
}
