# The manual pages and the completion say what the help says: every command and every option, and
# no other.
. "$2/tests/cli/shell_support.sh"
pages=$source_dir/docs/man

# The options that a help text lists: a line each, the long names.
options_of_help() {
    sed -n 's/^  \(-[a-zA-Z], \)\{0,1\}\(--[a-z-]*\).*/\2/p' "$work_dir/out" | sort
}

# Those that a page has after .TP in its OPTIONS.
options_of_page() {
    sed -n '/^\.SH OPTIONS/,/^\.SH [^O]/p' "$1" | sed 's/\\-/-/g' |
        sed -n '/^\.TP/{n;s/.*\(--[a-z][a-z-]*\).*/\1/p;}' | sort
}

expect_same() {
    checks=$((checks + 1))
    [ -s "$1" ] && cmp -s "$1" "$2" && return
    diff "$1" "$2"
    complain "$3"
}

run_tenure help
expect_status 0
sed -n 's/^  \([a-z][a-z-]*\)  .*/\1/p' "$work_dir/out" | sort >"$work_dir/commands"
options_of_help >"$work_dir/help"
options_of_page "$pages/tenure.1" >"$work_dir/page"
expect_same "$work_dir/help" "$work_dir/page" "expected the options of the help in tenure.1"
sed -n '/^\.SH COMMANDS/,/^\.SH OPTIONS/p' "$pages/tenure.1" |
    sed -n '/^\.TP/{n;s/^\.BR* \([a-z]*\).*/\1/p;}' | sort >"$work_dir/page"
expect_same "$work_dir/commands" "$work_dir/page" "expected the commands of the help in tenure.1"

(cd "$pages" && ls) | sed -n 's/^tenure-\(.*\)\.1$/\1/p' | sort >"$work_dir/pages"
grep -vx help "$work_dir/commands" >"$work_dir/subcommands"
expect_same "$work_dir/subcommands" "$work_dir/pages" "expected a page for each command"
while read -r command; do
    run_tenure help "$command"
    expect_status 0
    options_of_help >"$work_dir/help"
    options_of_page "$pages/tenure-$command.1" >"$work_dir/page"
    expect_same "$work_dir/help" "$work_dir/page" "expected its options in tenure-$command.1"
    grep -q "tenure-$command (1)" "$pages/tenure.1" || complain "expected tenure.1 to refer to it"
    command -v mandoc >/dev/null && ! mandoc -T lint -W warning "$pages/tenure-$command.1" &&
        complain "expected no warning of mandoc"
done <"$work_dir/subcommands"

# Completion in bash: what is offered for the last word.
command -v bash >/dev/null || { finish; exit; }
offered() {
    last_run="completion of: tenure $*"
    PATH=$build_dir:$PATH bash -c '. "$1"; shift; COMP_WORDS=(tenure "$@"); COMP_CWORD=$#
        _tenure; printf "%s\n" "${COMPREPLY[@]}"' bash "$source_dir/docs/completion/tenure.bash" \
        "$@" | sort >"$work_dir/offered"
}
offered ""
sort "$work_dir/commands" - >"$work_dir/expected" <<END
--version
--help
END
expect_same "$work_dir/expected" "$work_dir/offered" "expected every command"
offered help ""
expect_same "$work_dir/commands" "$work_dir/offered" "expected every command"
while read -r command; do
    run_tenure help "$command"
    options_of_help >"$work_dir/help"
    offered "$command" --
    expect_same "$work_dir/help" "$work_dir/offered" "expected the options of the help"
done <"$work_dir/subcommands"
offered replay file --driver ""
printf 'cuda\nhost\nsim\n' >"$work_dir/expected"
expect_same "$work_dir/expected" "$work_dir/offered" "expected the drivers"
run_tenure help convert
sed -n 's/^  \([a-z]*\)  *\..*/\1/p' "$work_dir/out" | sort >"$work_dir/kinds"
offered convert a b --to ""
expect_same "$work_dir/kinds" "$work_dir/offered" "expected the kinds of the help"
sed -n '/^\.TP/{n;s/^\.BR \([a-z]*\) " (\..*/\1/p;}' "$pages/tenure-convert.1" |
    sort >"$work_dir/page"
expect_same "$work_dir/kinds" "$work_dir/page" "expected the kinds of the help in tenure-convert.1"
for shell in zsh:_tenure fish:tenure.fish; do
    command -v "${shell%%:*}" >/dev/null || continue
    "${shell%%:*}" -n "$source_dir/docs/completion/${shell#*:}" ||
        complain "expected what ${shell%%:*} understands"
done
finish
