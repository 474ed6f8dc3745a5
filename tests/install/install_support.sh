# What the tests of an installed Tenure share: an installation in a temporary folder, moved once so
# that nothing in it can depend on where it was put, and the flags that the build was made with.
# To be sourced, with $build and $source set; sets $work, $prefix and $flags.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset LD_LIBRARY_PATH TENURE_CUDA_LIBRARY TENURE_DRIVER 2> /dev/null || true

sanitizers=$(sed -n 's/^TENURE_SANITIZE:STRING=//p' "$build/CMakeCache.txt")
flags=
[ -z "$sanitizers" ] || flags="-fsanitize=$sanitizers"

cmake --install "$build" --prefix "$work/first" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
prefix=$work/moved
mv "$work/first" "$prefix"

# Fails unless PROGRAM runs, and with the libraries of the installation alone.
runs_installed() { # PROGRAM
    "$1" || { echo "FAIL: $1: exit status $?"; exit 1; }
    loaded=$(ldd "$1" | grep -F libtenure)
    if echo "$loaded" | grep -vqF "$prefix/"; then
        echo "FAIL: $1 loads other libraries than the installed ones: $loaded"
        exit 1
    fi
}
