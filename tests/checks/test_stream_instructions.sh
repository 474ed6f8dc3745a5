# What two streams cost, in driver calls and in instructions of the library, which no other load of
# the machine changes: a block that one allocates and frees and the other uses, and a wait of one
# for the other, with pools that know both streams and with pools that do not.
set -eu
build=$1
most_block=4050 most_stranger=450 most_known=1010 most_pool=12

command -v valgrind >/dev/null || { echo "skipped: no valgrind"; exit 77; }
if nm "$build/libtenure.so" | grep -q -E '__(asan|tsan)_init|__gcov_init'; then
    echo "skipped: a sanitizer or coverage: its instructions would be counted, too"
    exit 77
fi

# A build with assertions looks at its structures more often.
if grep -q 'tn__tensor_is_valid(tensor)' "$build/libtenure.so"; then
    most_block=4750 most_known=1180
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/streams.c" <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tenure_alloc.h"
enum { POOLS_MAX = 9, MIB = 1 << 20, WARM_UP = 500 };
static tn_device *device;
static tn_pool *pools[POOLS_MAX];
static tn_stream streams[2];

static void check(tn_status status) {
    if (status == TN_OK) return;
    fprintf(stderr, "%s\n", tn_error_last());
    exit(1);
}

/* The owner allocates it and frees it, and the other uses it in between. */
static void use_block(tn_stream owner, tn_stream user) {
    void *block;
    check(tn_alloc(pools[0], MIB, owner, NULL, &block));
    check(tn_record_use(block, user));
    check(tn_free(block, owner));
}

static void do_round(const char *what, long round) {
    tn_stream one = streams[round % 2], other = streams[1 - round % 2];
    if (!strcmp(what, "block")) use_block(one, other);
    else check(tn_stream_wait(device, one, other));
}

/* WHAT POOLS ROUNDS: the driver's calls in the rounds; the first pool knows the streams. */
int main(int count, char **arguments) {
    const char *what = arguments[count - 3];
    long pool_count = atol(arguments[count - 2]), rounds = atol(arguments[count - 1]);
    tn_device_config config = TN_DEVICE_CONFIG_INIT;
    tn_driver_stats before = TN_DRIVER_STATS_INIT, after = TN_DRIVER_STATS_INIT;
    config.driver = TN_DRIVER_CUDA;
    check(tn_device_create(&config, &device));
    for (long i = 0; i < pool_count; i++) check(tn_pool_create(device, NULL, &pools[i]));
    for (int i = 0; i < 2; i++) check(tn_stream_create(device, &streams[i]));
    if (strcmp(what, "stranger")) use_block(streams[0], streams[1]);
    for (long i = 0; i < WARM_UP; i++) do_round(what, i);
    check(tn_device_driver_stats(device, &before));
    for (long i = 0; i < rounds; i++) do_round(what, i);
    check(tn_device_driver_stats(device, &after));
    for (int call = 0; call < TN_CALL_COUNT; call++) {
        if (after.calls[call] == before.calls[call]) continue;
        printf(" %s %llu", tn_driver_call_name((tn_driver_call)call),
               (unsigned long long)(after.calls[call] - before.calls[call]));
    }
    printf("\n");
    for (long i = 0; i < pool_count; i++) check(tn_pool_destroy(pools[i]));
    for (int i = 0; i < 2; i++) check(tn_stream_destroy(device, streams[i]));
    check(tn_device_destroy(device));
    return 0;
}
END
cc -I"$2/alloc" "$work/streams.c" -L"$build" -ltenure -Wl,-rpath,"$build" \
    -Wl,-rpath-link,"$build" -o "$work/streams"
export TENURE_CUDA_LIBRARY="$build/libtenure-simcuda.so"

# Instructions in libtenure itself: neither in the simulated device nor in the C library.
count() {
    valgrind --tool=callgrind --dump-line=no --callgrind-out-file="$work/out" "$work/streams" \
        "$1" "$2" "$3" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    awk '/^c?ob=/ { id = $1; sub(/^c?ob=/, "", id); if (NF > 1) object[id] = $2
                    if ($1 ~ /^ob=/) is_ours = object[id] ~ /\/libtenure\.so/ }
         /^calls=/ { is_call = 1; next }
         /^[0-9+*-]/ { if (!is_call && is_ours) sum += $2; is_call = 0 }
         END { print sum }' "$work/out"
}

fail() { echo "FAIL: $1"; exit 1; }

# expect WHAT POOLS MOST CALLS: the calls of 1000 rounds, and at most so many instructions each.
expect() {
    calls=$("$work/streams" "$1" "$2" 1000)
    [ "$calls" = "$4" ] || fail "$1: 1000 rounds make the calls$calls, not$4"
    few=$(count "$1" "$2" 4500)
    many=$(count "$1" "$2" 6500)
    each=$(((many - few) / 2000))
    echo "$1, $2 pools: $each instructions,$calls a thousand"
    [ "$each" -gt 0 ] && [ "$each" -le "$3" ] || fail "$1 takes $each instructions, at most $3"
}

# Four of ten rounds find memory that their stream has not waited for yet: one event and one wait,
# and the question whether either stream captures.
expect block 1 $most_block " stream 800 stream_wait 400 event_record 400"

# A wait costs what it costs without pools, and one question more if a pool learns of it.
expect stranger 1 $most_stranger " stream_wait 1000 event_record 1000"
expect stranger 9 $((most_stranger + 8 * most_pool)) " stream_wait 1000 event_record 1000"
expect known 1 $most_known " stream 1000 stream_wait 1000 event_record 1000"
one=$each
expect known 9 $((one + 8 * most_pool)) " stream 1000 stream_wait 1000 event_record 1000"
