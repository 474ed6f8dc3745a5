#!/bin/sh
# What programs on the CUDA runtime, shared and static, do with their memory under the drop-in: each
# case of runtime_program.c, and that it is the drop-in which serves them.
. "$2/tests/preload/preload_support.sh"

cases="reuse planted_race shapes misuse in_order capture threads forked exiting reset
    doomed_streams shared_pool forked_under_threads"
for case in $cases; do
    run_under "" preload_static_program "$case"
    expect_status 0
    run_under "--pool vmm" preload_static_program "$case"
    expect_status 0
done
for case in reuse shapes misuse in_order; do
    run_under "" preload_dynamic_program "$case"
    expect_status 0
done

# A device that is too small: freed memory serves all comers, the driver's own allocations too.
for pool in plain vmm; do
    TENURE_SIM_MEMORY=256MiB run_under "--pool $pool" preload_static_program shortage
    expect_status 0
done

# As the driver counts: 1000 pairs of cudaMalloc and cudaFree.
run_plain preload_static_program counts
expect_output "driver allocs 1000 frees 1000"
for program in preload_static_program preload_dynamic_program; do
    run_under "" $program counts
    expect_status 0
    expect_output "driver allocs 1 frees 0"
done
run_under "--pool vmm" preload_static_program counts
expect_output "driver allocs 0 frees 0"
run_under "--pool none" preload_static_program counts
expect_output "driver allocs 1000 frees 1000"
export TENURE_DISABLE=1
run_under "" preload_static_program counts
expect_output "driver allocs 1000 frees 1000"
unset TENURE_DISABLE

# cudaFree waits for nothing, unless it is told to.
run_under "" preload_static_program no_wait
expect_status 0
expect_output "waited not"
run_under "--free-waits" preload_static_program no_wait
expect_status 1
run_under "--free-waits" preload_static_program reuse
expect_status 0

# Stream-ordered memory: the driver's pools see none of it but the program's own pool.
run_under "" preload_static_program in_order
expect_output "pool calls 0"
finish
