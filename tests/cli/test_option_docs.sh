# docs/tuning.md lists the options that the code has: the same names, defaults and meanings.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

env -i "$1/tenure" options | sed -n 's/^\(TENURE_[A-Z_]*\) .*/\1/p' | sort >"$work/code"
sed -n 's/^| `\(TENURE_[A-Z_]*\)` .*/\1/p' "$2/docs/tuning.md" | sort >"$work/docs"
[ -s "$work/code" ] || { echo "tenure options lists nothing" >&2; exit 1; }
diff "$work/code" "$work/docs" || { echo "docs/tuning.md and the code differ" >&2; exit 1; }
env -i "$1/tenure" options | while read -r name value _; do
    case $name in
    TENURE_*) grep -q "^| \`$name\` | \($value\)\? *|" "$2/docs/tuning.md" || {
        case $value in "(default)") continue ;; esac
        echo "docs/tuning.md gives another default than $value for $name" >&2
        exit 1
    } ;;
    esac
done
