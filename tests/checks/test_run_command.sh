#!/bin/sh
# ./run says what it does: usage and exit statuses, and what it installs on a machine that lacks
# everything, with the tools of that machine played by small scripts.
# usage: test_run_command.sh BUILD SOURCE
set -eu
source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$source/run" "$work/run"
mkdir "$work/bin" "$work/tests"
unset CMAKE_PREFIX_PATH TENURE_CMAKE_ARGS 2>/dev/null || true

# A folder with these commands of the machine and no others.
for name in sh cat dirname grep mkdir mktemp rm tail; do
    ln -s "$(command -v $name)" "$work/bin/$name"
done

play() { # NAME SCRIPT: the command NAME is this script
    printf '#!/bin/sh\n%s\n' "$2" >"$work/bin/$1"
    chmod +x "$work/bin/$1"
}

# expect STATUS WORDS ARGUMENTS...: ./run ARGUMENTS ends so, and says the words.
expect() {
    status=0
    words=$2
    wanted=$1
    shift 2
    PATH=$work/bin "$work/run" "$@" >"$work/out" 2>&1 || status=$?
    if [ "$status" != "$wanted" ] || ! grep -qF -- "$words" "$work/out"; then
        echo "FAIL: ./run $*: status $status, expected $wanted and the words: $words"
        cat "$work/out"
        exit 1
    fi
}

play id 'echo 0'
expect 0 "usage: ./run COMMAND" help
expect 2 "usage: ./run COMMAND"
expect 2 "there is no command 'tset'" tset

# Without apt-get nothing is done and every package is named.
packages="cmake ninja-build gcc libc6-dev g++ binutils zlib1g-dev libjemalloc-dev libcjson-dev"
expect 1 "$packages" build

# With it, but neither root nor sudo, the same.
play apt-get 'echo "$@" >>'"$work"'/apt.log'
play id 'echo 1000'
expect 1 "Install: cmake" test
if grep -qF installing "$work/out" || [ -e "$work/apt.log" ]; then
    echo "FAIL: apt-get was called without being root"
    exit 1
fi

# As root: lists first, then the packages; if that brought nothing, they are named.
play id 'echo 0'
play env 'shift; exec "$@"'
expect 1 "installing from Debian's packages: cmake ninja-build" test
head -n 1 "$work/apt.log" | grep -q ' update$' || { echo "FAIL: no apt-get update"; exit 1; }
for name in libcmocka-dev libdlpack-dev libopenmpi-dev openmpi-bin g++ python3 pkg-config \
    valgrind spin; do
    expect 1 "missing, and not to be installed" test
    tail -n 1 "$work/apt.log" | grep -qF " $name" ||
        { echo "FAIL: $name is not asked for"; exit 1; }
done

# A package that is only wished for and can not be had keeps none of the others out.
play apt-get 'echo "$@" >>'"$work"'/apt.log
case "$*" in *openmpi*) exit 100 ;; esac'
expect 1 "trying without what is only wished for" test
tail -n 1 "$work/apt.log" | grep -qF " cmake" || { echo "FAIL: cmake is not asked for"; exit 1; }
if tail -n 1 "$work/apt.log" | grep -qF openmpi; then echo "FAIL: a wish is asked for"; exit 1; fi

# What is there is not installed again, and a machine without the tests' needs builds without them.
for name in cmake ninja gcc objcopy g++ python3 mpicc mpirun valgrind spin; do
    play $name 'exit 0'
done
rm "$work/apt.log"
play apt-get 'echo "$@" >>'"$work"'/apt.log; exit 100'
play cmake 'echo "$@" >>'"$work"'/cmake.log'
expect 0 "building without the tests, which need: pkg-config" build debug
tail -n 1 "$work/apt.log" | grep -q ' update$' || { echo "FAIL: went on after a failure"; exit 1; }
grep -qF -- "--preset debug -DBUILD_TESTING=OFF" "$work/cmake.log" ||
    { echo "FAIL: configured with tests"; exit 1; }
expect 1 "the tests need" test

play pkg-config 'exit 0'
expect 0 "built in build/release" build
grep -qF -- "--preset release -DBUILD_TESTING=ON" "$work/cmake.log" ||
    { echo "FAIL: configured without tests"; exit 1; }
expect 2 "there is no preset 'nope'" build nope
expect 2 "there is no benchmark 'nope'" bench nope
expect 0 "none in this build" bench
expect 1 "has no tenure-demo" demo
play cmake 'case $1 in --build) exit 1 ;; esac'
expect 1 "building preset release failed" demo
play cmake 'exit 1'
expect 1 "configuring preset debug failed" test
echo "ok"
