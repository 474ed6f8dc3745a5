# Completion of `tenure` for bash. Commands and options are those of its own help.
_tenure() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    local program=${COMP_WORDS[0]} command=${COMP_WORDS[1]} words=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ] || { [ "$COMP_CWORD" -eq 2 ] && [ "$command" = help ]; }; then
        words=$("$program" help 2>/dev/null | sed -n 's/^  \([a-z][a-z-]*\)  .*/\1/p')
        [ "$COMP_CWORD" -eq 1 ] && words="$words --version --help"
    elif [ "$before" = --driver ]; then
        words=$("$program" help "$command" 2>/dev/null |
            sed -n 's/.*--driver \([a-z|]*\) .*/\1/p' | tr '|' ' ')
    elif [ "$before" = --to ]; then
        words=$("$program" help "$command" 2>/dev/null | sed -n 's/^  \([a-z]*\)  *\..*/\1/p')
    elif [ "${current#-}" != "$current" ]; then
        words=$("$program" help "$command" 2>/dev/null |
            sed -n 's/^  \(-[a-zA-Z], \)\{0,1\}\(--[a-z-]*\).*/\2/p')
    fi
    if [ -n "$words" ]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    fi
}
complete -o default -F _tenure tenure
