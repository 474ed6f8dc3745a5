# What the drop-in's shell tests share.
#
#     . "$2/tests/preload/preload_support.sh"    with the test's own arguments: build, source folder
#     run_under "--pool vmm" preload_static_program reuse
#     expect_status 0
#     finish
#
# Memory that the drop-in has at the end of a process stays the driver's to take: the simulated one
# says so at unload, and that is no fault here.

. "$2/tests/cli/shell_support.sh"
programs=$build_dir/tests
drop_in=$build_dir/libtenure-preload.so
plain_library_path=$LD_LIBRARY_PATH
export LD_LIBRARY_PATH="$programs/lookalike${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export OTHER_LIBRARY="$programs/libpreload_other_library.so"
TENURE_LIBRARY=$(readlink -f "$build_dir/libtenure.so")
export TENURE_LIBRARY
export TENURE_SIM_STRICT_UNLOAD=0
# The drop-in is in the list before a sanitizer's own library.
export ASAN_OPTIONS="${ASAN_OPTIONS:+$ASAN_OPTIONS:}verify_asan_link_order=0"

# Whatever is given, with what it prints in out and err.
run_words() {
    last_run="$*"
    "$@" <"$work_dir/in" >"$work_dir/out" 2>"$work_dir/err"
    last_status=$?
    : >"$work_dir/in"
}

# A program of the tests under `tenure run` with options (one word each), or as it is.
run_under() {
    options=$1
    shift
    program=$1
    shift
    # shellcheck disable=SC2086
    run_words "$tenure" run $options -- "$programs/$program" "$@"
}

run_plain() {
    program=$1
    shift
    run_words "$programs/$program" "$@"
}
