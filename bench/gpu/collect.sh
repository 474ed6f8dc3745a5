#!/bin/sh
# Runs on a GPU machine what bench/results/ is made of: the GPU tests, the main job, the
# benchmarks, the soak, and the checks of compute-sanitizer.
#
# usage: bench/gpu/collect.sh BUILD OUT [PART...]
#
# BUILD is a release build two folders below this tree, made there or elsewhere, OUT the folder
# for the results, a PART one of tests, battery, demo, tensor, dlpack, float8, bench, layer,
# train, recipes, castpeers, peers, replay, sanitizer, soak, dist (default: all). dlpack needs
# PyTorch, CuPy and JAX, float8 and castpeers PyTorch with Triton. bench makes casts.csv beside its
# own file, a line for each cast and size; the lines of cast_peers.csv can be held to them.
# PLUGINS in the environment is the folder of the peers' plug-ins (bench/peers/build_plugins.sh),
# TRACES that of the traces to replay (default: bench/traces). Each file begins with its command
# and the machine. The exit status is 1 if anything failed.
set -u
[ $# -ge 2 ] || { sed -n '2,15p' "$0" >&2; exit 2; }
build=$(cd "$1" && pwd) || exit 2
out=$2
shift 2
all="tests battery demo tensor dlpack float8 bench layer train recipes castpeers peers \
replay sanitizer soak dist"
parts=${*:-$all}
root=$(cd "$(dirname "$0")/../.." && pwd)
traces=${TRACES:-$root/bench/traces}
plugins=${PLUGINS:-$build/plugins}
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
failed=0
mkdir -p "$out" || exit 1

# record FILE COMMAND...: the command's output with what made it on top.
record() {
    file=$1
    shift
    { echo "# $*" | sed "s|$build/|build/release/|g; s|$plugins/|plugins/|g; s|$traces/|traces/|g
                         s|$out/||g; s|$root/||g"; echo "# on $gpu"; } >"$out/$file"
    "$@" >>"$out/$file" 2>&1
    status=$?
    [ "$status" = 0 ] || failed=1
    echo "$file: exit status $status"
}

for part in $parts; do
    case $part in
    tests)
        for test in "$build"/tests/gpu_test_*; do
            name=${test##*/gpu_test_}
            case $name in op_battery*) continue ;; esac
            record "test_$name.txt" "$test"
        done
        ;;
    battery)
        record test_op_battery.txt "$build/tests/gpu_test_op_battery"
        record test_op_battery_large.txt "$build/tests/gpu_test_op_battery_large"
        ;;
    demo)
        record demo.txt "$build/tenure-demo"
        record demo_40_steps.txt "$build/tenure-demo" --steps 40
        record budget_curve.csv "$build/tenure-demo" --budget-curve 8 --steps 30
        ;;
    tensor) record bench_tensor.txt "$build/tenure-bench-tensor" --driver cuda ;;
    dlpack)
        record dlpack.txt python3 "$root/tests/gpu/dlpack_round_trips.py" --driver cuda \
            --libraries "$build" --need torch,cupy,jax
        ;;
    float8)
        record float8.txt python3 "$root/tests/gpu/float8_conversions.py" --libraries "$build"
        ;;
    bench) record bench_gpu.txt "$build/tenure-bench-gpu" --csv "$out/casts.csv" ;;
    layer) record bench_layer.txt "$build/tenure-bench-layer" ;;
    castpeers) record cast_peers.csv python3 "$root/bench/peers/cast_peers.py" ;;
    peers)
        set -- "$build/tenure-bench-peers"
        for plugin in "$plugins"/peer_*.so; do
            [ -e "$plugin" ] && set -- "$@" "$plugin"
        done
        record peers.csv "$@"
        ;;
    replay)
        for trace in "$traces"/*.csv.gz; do
            name=$(basename "$trace" .csv.gz)
            record "replay_$name.txt" "$build/tenure" replay "$trace" --driver cuda
        done
        ;;
    train)
        for recipe in fp8 bf16; do
            for mode in "" --graph; do
                name=train_$recipe${mode:+_graph}
                # shellcheck disable=SC2086
                record "$name.txt" "$build/tenure-train" --driver cuda --recipe $recipe $mode \
                    --csv "$out/$name.csv" --bytes "$out/${name}_bytes.csv"
            done
            record "train_${recipe}_same.txt" cmp "$out/train_$recipe.csv" \
                "$out/train_${recipe}_graph.csv"
        done
        python3 "$root/bench/trainer/plot_loss.py" "fp8=$out/train_fp8.csv" \
            "bf16=$out/train_bf16.csv" >"$out/train.svg" 2>"$out/train_compared.txt" || failed=1
        ;;
    recipes)
        runs=$(mktemp -d) || exit 1
        record train_recipes.txt python3 "$root/bench/trainer/compare_recipes.py" \
            "$build/tenure-train" "$runs" --seeds 6 -- --driver cuda --graph
        rm -r "$runs"
        ;;
    sanitizer)
        for tool in memcheck racecheck; do
            for name in op_battery small_ops frozen_stack; do
                record "${tool}_$name.txt" compute-sanitizer --tool $tool --error-exitcode 9 \
                    "$build/tests/gpu_test_$name" --small
            done
        done
        record initcheck_op_battery.txt compute-sanitizer --tool initcheck --error-exitcode 9 \
            "$build/tests/gpu_test_op_battery" --small
        ;;
    soak) record soak.txt "$build/tenure-soak" --seconds 300 --threads 8 --percent 95 ;;
    dist)
        # Over NCCL with a rank for each GPU; with two ranks on one GPU over MPI, where it is there.
        record bench_dist_nccl.txt "$build/tenure-bench-dist" --engine nccl --ranks "$gpus" \
            --csv "$out/bench_dist_nccl.csv"
        [ -z "$(command -v mpirun)" ] || record bench_dist_mpi.txt mpirun -n 2 \
            "$build/tenure-bench-dist" --driver cuda --csv "$out/bench_dist_mpi.csv"
        ;;
    *)
        echo "there is no part '$part'" >&2
        exit 2
        ;;
    esac
done
exit $failed
