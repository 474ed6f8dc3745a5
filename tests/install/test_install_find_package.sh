# A project outside the tree finds an installed Tenure with find_package, links tenure::tenure,
# tenure::tenure-ops and tenure::tenure-dist, and runs.
# usage: test_install_find_package.sh BUILD SOURCE
set -eu
build=$1
source=$2
. "$source/tests/install/install_support.sh"

headers=$(cd "$source" && ls alloc/tenure_*.h tensor/tenure_*.h ops/tenure_*.h dist/tenure_*.h)
for header in $headers; do
    file=include/tenure/${header#*/}
    [ -e "$prefix/$file" ] || { echo "FAIL: $file is not installed"; exit 1; }
done
[ -e "$prefix/bin/tenure" ] || { echo "FAIL: bin/tenure is not installed"; exit 1; }
for library in tenure tenure-ops tenure-dist tenure-simcuda tenure-jemalloc; do
    find "$prefix" -name "lib$library.so" | grep -q . ||
        { echo "FAIL: lib$library.so is not installed"; exit 1; }
done
if grep -rlF -e "$source/" -e "$build/" "$prefix" --include='*.cmake' --include='*.pc'; then
    echo "FAIL: the files above name the folder where Tenure was built"
    exit 1
fi

cmake -S "$source/tests/install/outside_project" -B "$work/outside" -G Ninja \
    -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" \
    > "$work/log" 2>&1 && cmake --build "$work/outside" >> "$work/log" 2>&1 ||
    { cat "$work/log"; exit 1; }
runs_installed "$work/outside/outside_alloc"
runs_installed "$work/outside/outside_ops"
runs_installed "$work/outside/outside_dist"

# A version or a component that is not installed is refused.
cp "$source"/tests/install/outside_project/outside_* "$work"
refuses() { # SED_EXPRESSION WORDS
    sed "$1" "$source/tests/install/outside_project/CMakeLists.txt" > "$work/CMakeLists.txt"
    rm -rf "$work/other"
    if cmake -S "$work" -B "$work/other" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" \
        > "$work/log" 2>&1 || ! grep -qF "$2" "$work/log"; then
        cat "$work/log"
        echo "FAIL: $1 was found, or refused in other words than: $2"
        exit 1
    fi
}
refuses 's/tenure 0\.1 /tenure 9.0 /' 'requested version "9.0"'
refuses 's/tenure-dist)/tenure-none)/' 'tenure-none'
echo "ok: find_package"
