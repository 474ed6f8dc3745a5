# Each public header compiles alone, as C17 and as C++17, without a warning; and the structs that a
# caller fills or reads start with their size, so that a later version can add to them.
set -eu
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
warnings="-Wall -Wextra -Wpedantic -Werror -fsyntax-only"
folders="-I$source -I$source/alloc -I$source/tensor -I$source/ops -I$source/dist -I$source/adapters"

# The header alone, and each of its initializer macros used once.
compiles() { # HEADER
    {
        echo "#include \"$1\""
        for macro in $(sed -n 's/^#define \(TN_[A-Z_]*_INIT\) .*/\1/p' "$source/$1"); do
            type=$(echo "${macro%_INIT}" | tr '[:upper:]' '[:lower:]')
            echo "extern $type use_of_$type; $type use_of_$type = $macro;"
        done
    } > "$work/alone.c"
    cp "$work/alone.c" "$work/alone.cpp"
    # shellcheck disable=SC2086
    "${CC:-gcc}" -std=c17 $warnings $folders "$work/alone.c" &&
        "${CXX:-g++}" -std=c++17 $warnings $folders "$work/alone.cpp"
}

# The structs of a header with an initializer macro or a name of that kind, without a size in front.
unsized() { # HEADER
    awk '/^typedef struct tn_[a-z_]*(config|info|stats|args|options|ledger) \{/ {
             name = $3; getline; if ($0 !~ /^ *size_t size;/) print FILENAME ": " name
         }' "$1"
}

count=0
for header in $(cd "$source" && ls alloc/tenure_*.h tensor/tenure_*.h ops/tenure_*.h \
    dist/tenure_*.h adapters/tenure_*.h adapters/torch/tenure_*.h); do
    compiles "$header"
    found=$(unsized "$source/$header")
    [ -z "$found" ] || { echo "FAIL: no size in front: $found"; exit 1; }
    count=$((count + 1))
done
[ "$count" -ge 15 ] || { echo "FAIL: only $count public headers"; exit 1; }

# Both checks can fail.
printf 'typedef struct tn_bad_config {\n    int class;\n} tn_bad_config;\n' > "$work/planted.h"
source=$work folders="-I$work"
if compiles planted.h 2> /dev/null; then
    echo "FAIL: a header that is no C++ was taken"
    exit 1
fi
[ -n "$(unsized "$work/planted.h")" ] || { echo "FAIL: a struct without size was taken"; exit 1; }
echo "ok: $count headers"
