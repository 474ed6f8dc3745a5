#!/bin/sh
# How programs come by the driver's calls, and who gets them: each case of lookup_program.c, other
# preloaded libraries, and what happens where the drop-in can not work.
. "$2/tests/preload/preload_support.sh"

for case in by_dlsym of_another_library by_get_proc_address pointers share no_context_event \
    failing_driver each_failure host_shortage \
    reset_after_an_error; do
    run_under "" preload_lookup_program "$case"
    expect_status 0
done
for pool in plain vmm; do
    TENURE_SIM_DEVICES=2 run_under "--pool $pool" preload_lookup_program two_devices
    expect_status 0
done
TENURE_SIM_DEVICES=2 run_under "--pool vmm" preload_lookup_program mapped_peers
expect_status 0
run_under "--pool vmm" preload_lookup_program each_failure
expect_status 0
run_under "" preload_lookup_program no_driver
expect_status 0

# Nothing is taken over.
run_plain preload_lookup_program untouched
expect_status 0
export TENURE_DISABLE=1
run_under "" preload_lookup_program untouched
expect_status 0
unset TENURE_DISABLE
run_plain preload_linked_program
expect_output "driver allocs 100"

# Linked with the driver; found by name; other libraries before and after the drop-in.
run_under "" preload_linked_program
expect_status 0
expect_output "driver allocs 1"
other=$programs/libpreload_other_preload.so
for order in "$other:$drop_in" "$drop_in:$other"; do
    for program in "preload_linked_program" "preload_lookup_program one_pair"; do
        # shellcheck disable=SC2086
        LD_PRELOAD=$order run_plain $program
        expect_status 0
        expect_output "driver allocs 1"
        expect_output "lookups seen, reallocarray seen"
    done
done
LD_PRELOAD=$other run_under "" preload_linked_program
expect_status 0
expect_output "driver allocs 1"
expect_output "other preload: cuMemAlloc seen"
LD_PRELOAD=$other run_words "$tenure" run -- sh -c 'echo "$LD_PRELOAD"'
expect_output "$other:$drop_in"

# Without the rest of itself the drop-in says so once and leaves all to the driver.
mkdir "$work_dir/alone"
cp "$drop_in" "$work_dir/alone"
LD_PRELOAD=$work_dir/alone/libtenure-preload.so run_plain preload_static_program counts
expect_status 0
expect_output "driver allocs 1000 frees 1000"
expect_error "tenure: not active in process: "
checks=$((checks + 1))
[ "$(grep -c "not active" "$work_dir/err")" -eq 1 ] || complain "it is said once"
finish
