#!/bin/sh
# The simulated driver exports exactly what its symbol map lists, and needs nothing but libc.
# usage: test_simcuda_exports.sh BUILD SOURCE
set -eu
library=$1/libtenure-simcuda.so
listed=$(sed -n 's/^ *\([A-Za-z_0-9]*\);$/\1/p' "$2/alloc/simcuda/simcuda.map" | sort)
exported=$(nm -D --defined-only "$library" | awk '{print $3}' | sort)
if [ "$listed" != "$exported" ]; then
    echo "listed:" $listed
    echo "exported:" $exported
    exit 1
fi
declared=$(sed -n 's/.*\(tnsim_[a-z_]*\)(.*/\1/p' "$2/alloc/simcuda/simcuda.h" | sort -u)
for name in $declared; do
    echo "$listed" | grep -qx "$name" || { echo "simcuda.h declares $name: not exported"; exit 1; }
done
needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
for name in $needed; do
    case $name in
    libc.so.* | libm.so.* | libgcc_s.so.* | ld-linux* | libasan.* | libubsan.* | libtsan.*) ;;
    *) echo "needs $name"; exit 1 ;;
    esac
done
