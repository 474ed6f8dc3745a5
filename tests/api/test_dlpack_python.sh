#!/bin/sh
# DLPack round trips with NumPy on the host driver. usage: test_dlpack_python.sh BUILD SOURCE
# Under a sanitizer its runtime must be the first library that Python loads.
set -eu
python=python3
if ! "$python" -c 'import numpy' 2>/dev/null; then
    python=/usr/bin/python3 # where Debian's python3-numpy is, whatever comes first in PATH
    if ! "$python" -c 'import numpy' 2>/dev/null; then
        echo "no NumPy: install python3-numpy"
        exit 1
    fi
fi
runtime=$(ldd "$1/libtenure.so" | awk '/lib[at]san\.so/ {print $3; exit}')
export ASAN_OPTIONS="${ASAN_OPTIONS:-}${ASAN_OPTIONS:+:}detect_leaks=0" # Python keeps what it made
LD_PRELOAD=$runtime exec "$python" "$2/tests/gpu/dlpack_round_trips.py" --driver host \
    --libraries "$1" --need numpy
