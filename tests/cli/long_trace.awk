# A trace of `events` events of a job that never repeats: blocks of 1 KiB to 64 MiB by 40 owners, up
# to about 3,000 alive, addresses as a simple allocator might give them, one owner that only grows.
#
#     awk -v events=1000000 -f long_trace.awk >trace.csv
function random() {
    state = (state * 16807) % 2147483647
    return state / 2147483647
}
BEGIN {
    state = 42
    print "op,id,bytes,stream,time_us,address,owner"
    alive = 0
    for (i = 1; i <= events; i++) {
        time += 1 + int(random() * 30)
        if (alive > 0 && random() < (alive < 3000 ? 0.49 : 0.6)) {
            at = int(random() * alive)
            printf "f,%d,,,%d,,\n", ids[at], time
            places[free_count++] = held[at]
            ids[at] = ids[--alive]
            held[at] = held[alive]
            continue
        }
        place = free_count > 0 ? places[--free_count] : place_count++
        bytes = int(1024 * exp(random() * 11))
        owner = i % 2000 == 0 ? "growing list" : "layer " int(random() * 39) " activations"
        # In halves: some awks have hexadecimals of 32 bits only.
        printf "a,%d,%d,%d,%d,0x%x%08x,%s\n", i, bytes, i % 3, time, 1 + int(place / 32),
            place % 32 * 67108864, owner
        if (owner == "growing list") continue
        ids[alive] = i
        held[alive++] = place
    }
}
