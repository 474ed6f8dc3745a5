# Completion of `tenure` for fish. Commands and options are those of its own help.
function __tenure_commands
    tenure help 2>/dev/null | string replace -rf '^  ([a-z][a-z-]*)  +(.*)' '$1\t$2'
end
function __tenure_options
    set -l words (commandline -opc)
    tenure help $words[2] 2>/dev/null |
        string replace -rf '^  (?:-[a-zA-Z], )?(--[a-z-]*).*?  +(.*)' '$1\t$2'
end
complete -c tenure -n __fish_use_subcommand -f -a '(__tenure_commands)'
complete -c tenure -n '__fish_seen_subcommand_from help' -f -a '(__tenure_commands)'
complete -c tenure -n 'not __fish_use_subcommand; and string match -q -- "-*" (commandline -ct)' \
    -f -a '(__tenure_options)'
