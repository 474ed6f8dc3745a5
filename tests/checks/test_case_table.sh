#!/bin/sh
# Each test that docs/cases.md names exists: `kind/name` as a program of tests/, and every name of a
# test that follows it, up to the next program, in that program's source.
# Usage: test_case_table.sh BUILD_DIRECTORY SOURCE_DIRECTORY
set -eu
source=$2
failures=0
named=0
program=

for word in $(sed -n 's/^|[^|]*|[^|]*|\(.*\)|$/\1/p' "$source/docs/cases.md" | tr ';,()' '    '); do
    case $word in
        *\`*) ;; # the name of something else
        */*)
            kind=${word%%/*}
            name=${word#*/}
            program=
            for file in "$source/tests/$kind/test_$name.c" \
                "$source/tests/$kind/test_$name.cpp" "$source/tests/$kind/test_$name.sh"; do
                [ -f "$file" ] && program=$file
            done
            named=$((named + 1))
            if [ -z "$program" ]; then
                echo "FAIL: there is no test $word"
                failures=$((failures + 1))
            fi
            ;;
        *_*_*)
            named=$((named + 1))
            if [ -z "$program" ] || ! grep -q "$word" "$program"; then
                echo "FAIL: ${program:-no program} has no $word"
                failures=$((failures + 1))
            fi
            ;;
    esac
done
[ "$named" -ge 40 ] || { echo "FAIL: only $named tests were found in the table"; failures=1; }
echo "docs/cases.md names $named programs and tests, $failures missing"
[ "$failures" -eq 0 ]
