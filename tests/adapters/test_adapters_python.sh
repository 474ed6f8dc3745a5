#!/bin/sh
# The Python package for frameworks, over the simulated device. usage: test_... BUILD SOURCE
# Under a sanitizer its runtime must be the first library that Python loads.
set -eu
runtime=$(ldd "$1/libtenure.so" | awk '/lib[at]san\.so/ {print $3; exit}')
export ASAN_OPTIONS="${ASAN_OPTIONS:-}${ASAN_OPTIONS:+:}detect_leaks=0" # Python keeps what it made
LD_PRELOAD=$runtime exec python3 "$2/tests/adapters/adapters_python.py" "$1" "$2"
