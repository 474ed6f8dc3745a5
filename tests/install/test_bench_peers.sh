# tenure-bench-peers runs on the simulated driver, prints every kind of figure, and refuses what it
# does not know.
# usage: test_bench_peers.sh BUILD SOURCE
set -eu
build=$1
lines=$(TENURE_CUDA_LIBRARY="$build/libtenure-simcuda.so" "$build/tenure-bench-peers" --pairs 20)
for what in pair threads throughput "handover alloc" "handover free" "two streams"; do
    echo "$lines" | grep -q "^$what,tenure,[0-9A-Za-z ]*,[0-9]*,[0-9.]*," ||
        { echo "FAIL: no figure for '$what' in:"; echo "$lines"; exit 1; }
done
for wrong in "--pairs 0" "--pairs" "--driver sim" "--nothing 1"; do
    status=0
    # shellcheck disable=SC2086
    "$build/tenure-bench-peers" $wrong > /dev/null 2>&1 || status=$?
    [ "$status" = 2 ] || { echo "FAIL: '$wrong' gave exit status $status"; exit 1; }
done
status=0
"$build/tenure-bench-peers" --driver host /nothing/there.so > /dev/null 2>&1 || status=$?
[ "$status" = 1 ] || { echo "FAIL: a plug-in that is not there gave exit status $status"; exit 1; }
echo "tenure-bench-peers prints its figures and refuses what is wrong"
