# A page stays small and says all of a history of a million events: its peak to the byte, too.
. "$2/tests/cli/shell_support.sh"
awk -v events=1000000 -f "$source_dir/tests/cli/long_trace.awk" >"$work_dir/long.csv"
run_tenure report "$work_dir/long.csv" -o "$work_dir/long.html"
expect_status 0
expect_no_error
bytes=$(wc -c <"$work_dir/long.html")
[ "$bytes" -lt 20000000 ] || complain "expected fewer than 20,000,000 bytes, not $bytes"
[ "$bytes" -gt 1000000 ] || complain "expected blocks on the page, not $bytes bytes"
# What is live after each event, by a program of its own.
peak=$(awk -F, 'NR > 1 && $1 == "a" { live += $3; bytes[$2] = $3; if (live > peak) peak = live }
    $1 == "f" { live -= bytes[$2]; delete bytes[$2] }
    END { printf "\"peak\":%.0f,", peak }' "$work_dir/long.csv")
grep -qF "$peak" "$work_dir/long.html" || complain "expected $peak in the page"
grep -qF '"events":1000000,' "$work_dir/long.html" || complain "expected all events"
grep -A 5 "growing list" "$work_dir/long.html" | grep -q 'class="grows"' ||
    complain "expected that the list which only grows is said to"
[ "$(grep -c 'class="grows"' "$work_dir/long.html")" -eq 1 ] || complain "expected no other to grow"
finish
