#!/bin/sh
# The libraries need what they should and no more: libtenure neither CUDA, MPI nor NCCL, and no
# static TLS, so that a program can load it at any time; jemalloc's names stay its own.
# Usage: test_needed_libraries.sh BUILD_DIRECTORY SOURCE_DIRECTORY
set -eu
build=$1
failures=0

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

needed() {
    LC_ALL=C readelf -dW "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\].*/\1/p'
}

command -v readelf > /dev/null || { echo "skipped: readelf is missing (binutils)"; exit 77; }
[ -f "$build/libtenure.so" ] || { echo "FAIL: no $build/libtenure.so"; exit 1; }

for library in libtenure.so libtenure-simcuda.so libtenure-adapters.so libtenure-torch.so; do
    [ -f "$build/$library" ] || continue
    found=$(needed "$build/$library")
    echo "$library needs:" $found
    for name in $found; do
        case $name in
            libc.so.* | libm.so.* | libz.so.* | libpthread.so.* | libdl.so.* | ld-linux*) ;;
            libtenure.so.* | libtenure-adapters.so.*)
                case $library in
                    libtenure-adapters.so | libtenure-torch.so) ;;
                    *) fail "$library needs $name" ;;
                esac ;;
            libstdc++.so.*) # torch itself needs it
                [ "$library" = libtenure-torch.so ] || fail "$library needs $name" ;;
            libgcc_s.so.* | libasan.so.* | libubsan.so.* | libtsan.so.* | libgcov*) ;;
            *) fail "$library needs $name" ;;
        esac
    done
done

if LC_ALL=C readelf -dW "$build/libtenure.so" | grep -q STATIC_TLS; then
    fail "libtenure.so uses static TLS: a program that loads it later may have no room for it"
fi

# Undefined names would be bound to whatever the program has.
if LC_ALL=C nm -D --undefined-only "$build/libtenure.so" | grep -E ' (cu|nccl|MPI_)[A-Z]'; then
    fail "libtenure.so has undefined names of CUDA, NCCL or MPI"
fi

# NCCL and MPI are loaded when they are first used; only the plug-in is linked with MPI.
if [ -f "$build/libtenure-dist.so" ]; then
    if needed "$build/libtenure-dist.so" | grep -Ei 'mpi|nccl|cuda'; then
        fail "libtenure-dist.so needs the above"
    fi
    if LC_ALL=C nm -D --undefined-only "$build/libtenure-dist.so" | grep -E ' (cu|nccl|MPI_)[A-Z]'
    then
        fail "libtenure-dist.so has undefined names of CUDA, NCCL or MPI"
    fi
fi
if [ -f "$build/libtenure-mpi.so" ] && ! needed "$build/libtenure-mpi.so" | grep -q '^libmpi'; then
    fail "libtenure-mpi.so is not linked with MPI"
fi

exports=$(LC_ALL=C nm -D --defined-only "$build/libtenure-jemalloc.so" | awk '{print $3}' | sort)
expected="tn__je_dallocx
tn__je_mallctl
tn__je_mallocx"
[ "$exports" = "$expected" ] || fail "libtenure-jemalloc.so exports:" $exports
if LC_ALL=C nm -D --undefined-only "$build/libtenure-jemalloc.so" | grep -q atfork; then
    fail "libtenure-jemalloc.so registers fork handlers"
fi

[ "$failures" -eq 0 ] && echo "ok"
[ "$failures" -eq 0 ]
