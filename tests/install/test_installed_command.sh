#!/bin/sh
# An installed tenure finds libtenure and the simulated driver from any folder, with nothing set.
# Usage: test_installed_command.sh BUILD_DIRECTORY SOURCE_DIRECTORY
set -eu
build=$1
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset LD_LIBRARY_PATH TENURE_CUDA_LIBRARY 2> /dev/null || true

cmake --install "$build" --prefix "$work/first" > "$work/log" || { cat "$work/log"; exit 1; }
mv "$work/first" "$work/moved"
cd /
"$work/moved/bin/tenure" --version
"$work/moved/bin/tenure" replay "$source/tests/cli/inputs/good_small.csv" --json > "$work/out"
grep -qF '"events":	7' "$work/out" || { cat "$work/out"; exit 1; }
TENURE_CUDA_LIBRARY=$(find "$work/moved" -name libtenure-simcuda.so) \
    ASAN_OPTIONS="${ASAN_OPTIONS:+$ASAN_OPTIONS:}verify_asan_link_order=0" \
    TENURE_SIM_STRICT_UNLOAD=0 "$work/moved/bin/tenure" run --check 2> "$work/err" ||
    { cat "$work/err"; exit 1; }
for file in man/man1/tenure.1 man/man1/tenure-replay.1 bash-completion/completions/tenure \
    zsh/site-functions/_tenure fish/vendor_completions.d/tenure.fish; do
    [ -s "$work/moved/share/$file" ] || { echo "not installed: share/$file"; exit 1; }
done
loaded=$(ldd "$work/moved/bin/tenure" | grep -F libtenure.so)
case $loaded in
*"$work/moved/"*) echo "ok: $loaded" ;;
*) echo "not the installed library: $loaded"; exit 1 ;;
esac
