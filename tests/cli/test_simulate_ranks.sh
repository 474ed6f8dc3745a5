#!/bin/sh
# The simulation against real runs: what is alive after each sub-step by owner, the peak, and the
# bytes on the wire are, to the byte, those of as many ranks of MPI on the host driver.
. "$2/tests/cli/shell_support.sh"
[ -e "$build_dir/libtenure-mpi.so" ] || exit 77

# Open MPI as root, with more ranks than cores, without a network: see cmake/dist.cmake.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_plm_rsh_agent=sh ASAN_OPTIONS=detect_leaks=0
# Where one mpirun removes the folder of all, another can not make its own in it.
export TMPDIR="$work_dir"

cat >"$work_dir/compare.py" <<'END'
import json, sys

def figures(role):
    keys = ("stage", "peak_live_bytes", "resting_bytes", "wire_bytes")
    notes = [(note["after"], note["live_bytes"], note["owners"]) for note in role["notes"]]
    return {key: role[key] for key in keys}, notes

simulated = [figures(role) for role in json.load(open(sys.argv[1]))["roles"]]
for path in sys.argv[2:]:
    role = json.load(open(path))["roles"][0]
    if figures(role) in simulated and role["notes"]:
        continue
    closest = next(s for s in simulated if s[0]["stage"] == role["stage"])
    sys.exit(f"rank {role['rank']} has {figures(role)}\nand none that is simulated, but {closest}")
END

# The workspace of a product is where devices differ: the simulated one is told the host's.
compare() {
    ranks=$1
    shift
    rm -rf "$work_dir/real"
    mkdir "$work_dir/real"
    last_run="mpirun -n $ranks tenure simulate tiny $* --driver host"
    if ! mpirun -n "$ranks" sh -c "'$tenure' simulate tiny $* --driver host --json \
            >'$work_dir/real/'\$OMPI_COMM_WORLD_RANK" >"$work_dir/out" 2>"$work_dir/err"; then
        complain "expected a real run"
        return
    fi
    TENURE_SIM_WORKSPACE=$(sed -n 's/.*gemm_workspace_bytes":[^0-9]*\([0-9]*\).*/\1/p' \
        "$work_dir/real/0")
    export TENURE_SIM_WORKSPACE
    run_tenure simulate tiny "$@" --json
    unset TENURE_SIM_WORKSPACE
    expect_status 0
    cp "$work_dir/out" "$work_dir/simulated"
    checks=$((checks + 1))
    python3 "$work_dir/compare.py" "$work_dir/simulated" "$work_dir"/real/* >"$work_dir/out" 2>&1 ||
        complain "expected the figures of a real run"
}

compare 1 --microbatches 2
compare 1 --recompute 1 --fp8 0
compare 2 --dp 2 --microbatches 2
compare 2 --dp 2 --frozen-layers 1 --recompute 1
compare 2 --tp 2
compare 3 --dp 3 --ffn 200 --lifetimes off
compare 4 --tp 2 --dp 2 --context 40

run_tenure simulate tiny --dp 2 --driver host
expect_status 1
expect_error "and the job has 2"
run_tenure simulate tiny --pp 2 --driver host
expect_refusal "--driver host: pp is 2, and a real run is of one stage"
finish
