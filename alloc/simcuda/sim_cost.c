/* What calls cost in virtual time.
 *
 * Measured on one H200 (driver 580, CUDA 13.0) for three sizes a call; between and beyond them the
 * logarithm of the cost is linear in the logarithm of the size, so that costs stay positive and
 * grow with the size as measured. Results are whole nanoseconds: sums are exact and repeat.
 *
 * A call that covers several handles costs the sum over its handles. Calls that were not measured
 * (device queries, contexts, stream and event creation, freeing addresses) cost nothing.
 */
#include <math.h>

#include "sim_core.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

typedef struct cost_row {
    size_t bytes[3];
    sim_ns cost[3];
} cost_row;

#define HANDLE_SIZES                                                                               \
    { 2 * MIB, 32 * MIB, 512 * MIB }
#define PLAIN_SIZES                                                                                \
    { 4 * KIB, 64 * MIB, 1024 * MIB }

static const cost_row cost_rows[] = {
    [SIM_COST_CREATE] = {HANDLE_SIZES, {13300, 14900, 29600}},
    [SIM_COST_RESERVE] = {HANDLE_SIZES, {800, 4300, 5700}},
    [SIM_COST_MAP] = {HANDLE_SIZES, {1100, 1300, 2200}},
    [SIM_COST_SET_ACCESS] = {HANDLE_SIZES, {28000, 61000, 90900}},
    [SIM_COST_UNMAP] = {HANDLE_SIZES, {18200, 28600, 38800}},
    [SIM_COST_RELEASE] = {HANDLE_SIZES, {13200, 39900, 279400}},
    [SIM_COST_ALLOC] = {PLAIN_SIZES, {49000, 83500, 155800}},
    [SIM_COST_FREE] = {PLAIN_SIZES, {39100, 84000, 595000}},
};

/* Device memory moves 4,278 GB/s, counting bytes read and bytes written; a copy from or to the
 * host is limited by the link, for which 55 GB/s of a PCIe 5 x16 slot is assumed. */
#define DEVICE_BYTES_PER_NS 4278.0
#define LINK_BYTES_PER_NS   55.0

sim_ns tn__sim_cost(sim_sized_call call, size_t bytes) {
    const cost_row *row = &cost_rows[call];
    int below = bytes >= row->bytes[1] ? 1 : 0;
    double slope;
    for (int i = 0; i < 3; i++) {
        if (row->bytes[i] == bytes) return row->cost[i];
    }
    slope = log((double)row->cost[below + 1] / (double)row->cost[below]) /
            log((double)row->bytes[below + 1] / (double)row->bytes[below]);
    return (sim_ns)llround((double)row->cost[below] *
                           pow((double)bytes / (double)row->bytes[below], slope));
}

sim_ns tn__sim_transfer_time(size_t bytes_on_device, size_t bytes_on_link) {
    double device = (double)bytes_on_device / DEVICE_BYTES_PER_NS;
    double link = (double)bytes_on_link / LINK_BYTES_PER_NS;
    return (sim_ns)llround(device > link ? device : link);
}
