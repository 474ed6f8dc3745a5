# The example of a framework in docs/examples is built with an installed Tenure, trains, and frees
# all that it took. usage: test_example.sh BUILD SOURCE
set -eu
build=$1
source=$2
. "$source/tests/install/install_support.sh"

folder=$(dirname "$(find "$prefix" -name tenure.pc)")
export PKG_CONFIG_PATH="$folder"
rpath=-Wl,-rpath,$(cd "$(pkg-config --variable=libdir tenure)" && pwd)
# shellcheck disable=SC2046,SC2086
"${CC:-gcc}" -std=c17 -O2 -Wall -Wextra -Werror $flags "$source/docs/examples/train_small.c" \
    -o "$work/train_small" $(pkg-config --cflags --libs tenure) -lm $rpath
words=$("$work/train_small")
echo "$words"
# 16 x 64 and 64 x 4 weights of 4 bytes; each step makes 6 tensors, and all weights 2.
echo "$words" | grep -q '1802 allocations, live 5120 bytes$' || { echo "FAIL: $words"; exit 1; }
