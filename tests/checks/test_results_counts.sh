# The counts of a test run, and that a failure, an unlisted skip or an empty run fails it.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

printf 'gpu/* no GPU here\nunit/abi no toolkit\n' > "$work/listed.txt"

# judged EXPECTED_STATUS EXPECTED_LAST_LINE [NAME=STATUS...]
judged() {
    expected_status=$1
    expected_line=$2
    shift 2
    for case in "$@"; do
        echo "<testcase name=\"${case%=*}\" classname=\"x\" time=\"0\" status=\"${case#*=}\">"
    done > "$work/results.xml"
    status=0
    python3 "$source/tests/checks/test_results.py" "$work/results.xml" "$work/listed.txt" \
        > "$work/out" || status=$?
    line=$(tail -n 1 "$work/out")
    if [ "$status" != "$expected_status" ] || [ "$line" != "$expected_line" ]; then
        echo "FAIL: $*: status $status, '$line'; expected $expected_status, '$expected_line'"
        exit 1
    fi
}

source=$2
judged 0 "2 passed, 0 failed" unit/a=run unit/b=run
judged 0 "1 passed, 0 failed, 2 skipped" unit/a=run unit/abi=notrun gpu/cast=notrun
judged 1 "1 passed, 1 failed" unit/a=run unit/b=fail
if ! grep -qx "failed: unit/b" "$work/out"; then
    echo "FAIL: the failed test is not named"
    exit 1
fi
judged 1 "1 passed, 1 failed" unit/a=run unit/b=notrun
judged 1 "0 passed, 1 failed"
printf 'unit/abi\n' > "$work/listed.txt"
judged 1 "1 passed, 1 failed, 1 skipped" unit/a=run unit/abi=notrun
echo ok
