# tenure-soak runs on the host driver, whose words it checks, and on the simulated one.
# usage: test_soak.sh BUILD SOURCE
set -eu
build=$1
soak() { TENURE_HOST_MEMORY=512MiB TENURE_CUDA_LIBRARY="$build/libtenure-simcuda.so" \
    "$build/tenure-soak" --seconds 2 --threads 3 "$@"; }
for driver in host cuda; do
    soak --driver $driver --seed 7 > soak_$driver.txt || { cat soak_$driver.txt; exit 1; }
    grep -q "^wrong words 0, live blocks at the end 0, books off by 0$" soak_$driver.txt ||
        { echo "FAIL: the report of $driver:"; cat soak_$driver.txt; exit 1; }
    rm soak_$driver.txt
done
for wrong in "--seconds 0" "--threads 65" "--percent 100" "--driver sim" "--seed x" "--seed"; do
    status=0
    # shellcheck disable=SC2086
    "$build/tenure-soak" $wrong > /dev/null 2>&1 || status=$?
    [ "$status" = 2 ] || { echo "FAIL: '$wrong' gave exit status $status"; exit 1; }
done
echo "tenure-soak finds every word as it was written, and refuses what is wrong"
