#!/bin/sh
# Every rank test of the distributed layer over NCCL, one process and one GPU a rank, and NCCL's
# fault tests: on 2 GPUs, and on 4 and 8 where there are so many.
#
# usage: gpu_dist.sh [--check | --stand-in | --one-gpu] BUILD [NAME...]
#
# BUILD is a build folder with its tests; NAMEs are the tests to run, all by default. --check only
# says whether there are GPUs enough. --stand-in runs on the host, by the stand-in for NCCL, which
# shows that the tests themselves are right. --one-gpu has two ranks on one GPU, over NCCL's sockets
# as if they were on two machines, at some 15 ms a collective. A line each, `failed: NAME` with the
# end of its output, which is whole under BUILD/gpu-dist/; last line: the counts. What would take
# more GPUs than there are, and what a test leaves out under NCCL, are skips with their reason.
#
# Exit status: 0 if all passed, 1 if one failed or none ran, 77 with fewer than two GPUs: nothing
# was run, which is no success.
set -u

# L2, L3, L4: sharded training and its checkpoints; sequence parallelism; gathers of rows. Then what
# they stand on. With MPI as launcher.
rank_tests="sharded_lifetimes sharded_training sharded_uneven sharded_experts sharded_arguments
    shard_ranks shard_reshard ring_ranks checkpoints sequence_gather parallel_linear parallel_norm
    parallel_bytes parallel_training expert_exchange expert_training collectives
    collectives_uneven all_to_all comm_groups comm_split graph_ranks collective_order
    collective_arguments"
# Their ranks are processes of their own, which are killed and hung.
fault_tests="nccl_faults comm_shrink"
counts="2 4 8"

usage() {
    sed -n '5s/^# //p' "$0" >&2
    exit 2
}

mode=gpu
case ${1:-} in
--check | --stand-in | --one-gpu)
    mode=${1#--}
    shift
    ;;
esac
[ $# -ge 1 ] || usage
build=$1
shift
wanted=${*:-$rank_tests $fault_tests}

count_gpus() {
    if [ "$mode" = stand-in ] || [ "$mode" = one-gpu ]; then
        echo 2
    elif [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c . || true
    else
        { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
    fi
}

gpus=$(count_gpus)
if [ "$gpus" -lt 2 ]; then
    echo "gpu-dist: these tests take a GPU for each of at least 2 ranks, and here are $gpus:" \
        "nothing was run"
    exit 77
fi
[ "$mode" != check ] || exit 0

logs=$build/gpu-dist
mkdir -p "$logs" || exit 1

# Open MPI as root on one machine; none of this means anything to another MPI.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl=self,vader
export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_plm_rsh_agent=sh
export TENURE_TEST_ENGINE=NCCL
if [ "$mode" = stand-in ]; then
    TENURE_NCCL_LIBRARY=$(cd "$build" && pwd)/tests/libtenure_stand_in_nccl.so
    export TENURE_RANKS_ON=host TENURE_NCCL_LIBRARY
else
    export TENURE_RANKS_ON=cuda
fi
if [ "$mode" = one-gpu ]; then
    export TENURE_RANKS_SHARE_GPU=1 NCCL_NET=Socket
fi

passed=0
failed=0
skipped=0

skip() {
    echo "skipped: $1: $2"
    skipped=$((skipped + 1))
}

# What a test has left out, once for all of its ranks.
note_skips() {
    sed -n 's/^left out: //p' "$2" | sort -u >"$logs/skips"
    while read -r why; do skip "$1" "$why"; done <"$logs/skips"
}

# run_test NAME COMMAND...
run_test() {
    name=$1 start=$(date +%s) status=0
    shift
    timeout 150 "$@" >"$logs/$name.log" 2>&1 </dev/null || status=$?
    if [ "$status" = 0 ]; then
        echo "ok: $name ($(($(date +%s) - start)) s)"
        passed=$((passed + 1))
        note_skips "$name" "$logs/$name.log"
        return
    fi
    tail -n 30 "$logs/$name.log"
    echo "failed: $name (status $status after $(($(date +%s) - start)) s)"
    failed=$((failed + 1))
}

for ranks in $counts; do
    if [ "$ranks" -gt "$gpus" ]; then
        # shellcheck disable=SC2086
        set -- $wanted
        echo "skipped: the $# tests of $ranks ranks: they take $ranks GPUs, and here are $gpus"
        skipped=$((skipped + $#))
        continue
    fi
    for test in $wanted; do
        program=$build/tests/dist_test_$test
        case " $fault_tests " in
        *" $test "*) run_test "${test}_$ranks" env TENURE_TEST_RANKS="$ranks" "$program" ;;
        *) run_test "${test}_$ranks" mpirun -np "$ranks" "$program" ;;
        esac
    done
done

[ "$passed" -gt 0 ] || failed=$((failed + 1))
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
