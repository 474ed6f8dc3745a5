#!/bin/sh
# tenure-bench-dist can do all of its steps (small, on ranks of the host driver) and prints its two
# tables; it refuses what it does not know.
# usage: test_bench_dist.sh BUILD SOURCE
set -eu
program=$1/tenure-bench-dist
[ -e "$1/libtenure-mpi.so" ] || exit 77
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Open MPI as root, with more ranks than cores, without a network: see cmake/dist.cmake.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_plm_rsh_agent=sh ASAN_OPTIONS=detect_leaks=0

fail() {
    echo "FAIL: $*"
    exit 1
}

for ranks in 1 2; do
    mpirun -n $ranks "$program" --small --rounds 2 >"$work/out" 2>"$work/err" ||
        fail "$ranks ranks: $(cat "$work/err")"
    python3 - "$work/out" $ranks <<'END' || fail "$ranks ranks: $(cat "$work/out")"
import csv, sys
rows = list(csv.reader(open(sys.argv[1])))
ranks = sys.argv[2]
assert rows[0] == ["prefetch", "ranks", "driver", "step_us", "exposed_us"], rows[0]
assert [row[:3] for row in rows[1:3]] == [["on", ranks, "host"], ["off", ranks, "host"]]
assert all(float(row[3]) > 0 for row in rows[1:3])
assert rows[3] == ["gather", "ranks", "driver", "bytes", "us", "bus_bytes_per_us"], rows[3]
sizes = [int(row[3]) for row in rows[4:]]
assert sizes == [4096 * int(ranks), 32768 * int(ranks)], sizes
END
done

refused() {
    status=0
    "$program" "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = 2 ] || fail "$*: status $status, expected 2"
    [ ! -s "$work/out" ] || fail "$*: something on standard output"
}
refused frobnicate
refused --rounds 0
refused --rounds 100
refused --driver tpu
refused --frobnicate
