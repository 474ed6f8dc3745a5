#!/bin/sh
# What programs seldom do: each case of edge_program.c; pools of the driver's own.
. "$2/tests/preload/preload_support.sh"

for pool in plain vmm async; do
    TENURE_SIM_DEVICES=2 run_under "--pool $pool" preload_edge_program reset_of_one
    expect_status 0
    TENURE_SIM_MEMORY=256MiB run_under "--pool $pool" preload_edge_program own_context_shortage
    expect_status 0
    run_under "--pool $pool" preload_edge_program free_beside_others
    expect_status 0
done
for case in reset_beside_frees reset_beside_a_wait_for_it reset_beside_a_wait_for_another; do
    TENURE_SIM_DEVICES=2 TENURE_SIM_MEMORY=1GiB run_under "" preload_edge_program "$case"
    expect_status 0
done
TENURE_SIM_DEVICES=2 run_under "" preload_edge_program work_of_another_device
expect_status 0
run_under "" preload_edge_program own_context
expect_status 0
for case in limit_of_two limit_that_comes_back; do
    run_under "--limit 64MiB" preload_edge_program "$case"
    expect_status 0
done
for case in peers_both_ways peers_of_a_new_device peers_of_a_new_stream_pool; do
    TENURE_SIM_DEVICES=2 run_under "--pool vmm" preload_edge_program "$case"
    expect_status 0
done
run_under "" preload_edge_program lost_memory
expect_status 0
run_under "" preload_edge_program ipc_close_again
expect_status 0
for case in no_wait_to_allocate short_beside_a_wait short_beside_a_trim; do
    TENURE_SIM_MEMORY=256MiB run_under "" preload_edge_program "$case"
    expect_status 0
done

# Memory of the driver's pools comes in the order of a stream, and for any other it must be there.
for case in reuse in_order threads capture misuse reset; do
    run_under "--pool async" preload_static_program "$case"
    expect_status 0
done
finish
