/* The oracle of live blocks: see interval_oracle.h. */
#include "interval_oracle.h"

#include <string.h>

/* How many blocks begin at or below the address. */
static size_t count_up_to(const interval_oracle *oracle, uintptr_t address) {
    size_t low = 0;
    size_t high = oracle->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (oracle->blocks[oracle->order[middle]].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int overlaps(const oracle_block *a, const oracle_block *b) {
    return a->address < b->address + b->bytes && b->address < a->address + a->bytes;
}

int oracle_add(interval_oracle *oracle, const oracle_block *block) {
    size_t at = count_up_to(oracle, block->address);
    for (size_t near = at ? at - 1 : 0; near < at + 1 && near < oracle->count; near++) {
        uint32_t index = oracle->order[near];
        if (overlaps(&oracle->blocks[index], block)) return (int)index;
    }
    memmove(&oracle->order[at + 1], &oracle->order[at],
            (oracle->count - at) * sizeof oracle->order[0]);
    oracle->order[at] = (uint32_t)oracle->count;
    oracle->blocks[oracle->count++] = *block;
    return -1;
}

static size_t place_of(const interval_oracle *oracle, size_t index) {
    return count_up_to(oracle, oracle->blocks[index].address) - 1;
}

void oracle_remove(interval_oracle *oracle, size_t index) {
    size_t last = oracle->count - 1;
    size_t at = place_of(oracle, index);
    if (index != last) oracle->order[place_of(oracle, last)] = (uint32_t)index;
    memmove(&oracle->order[at], &oracle->order[at + 1], (last - at) * sizeof oracle->order[0]);
    oracle->blocks[index] = oracle->blocks[last];
    oracle->count = last;
}

int oracle_find(const interval_oracle *oracle, uintptr_t address) {
    size_t at = count_up_to(oracle, address);
    const oracle_block *block;
    if (at == 0) return -1;
    block = &oracle->blocks[oracle->order[at - 1]];
    return address < block->address + block->bytes ? (int)oracle->order[at - 1] : -1;
}

uint32_t oracle_touch(oracle_block *block, int stream, int is_write) {
    uint32_t self = UINT32_C(1) << stream;
    uint32_t before = is_write ? block->users : 0;
    if (!is_write && block->writer != ORACLE_NO_STREAM) before = UINT32_C(1) << block->writer;
    if (is_write) {
        block->users = self;
        block->writer = stream;
    } else {
        block->users |= self;
    }
    return before & ~self;
}

void oracle_stream_done(interval_oracle *oracle, int stream) {
    for (size_t i = 0; i < oracle->count; i++) {
        oracle->blocks[i].users &= ~(UINT32_C(1) << stream);
        if (oracle->blocks[i].writer == stream) oracle->blocks[i].writer = ORACLE_NO_STREAM;
    }
}

void oracle_stream_moved(interval_oracle *oracle, int from, int to) {
    for (size_t i = 0; i < oracle->count; i++) {
        oracle_block *block = &oracle->blocks[i];
        if (!(block->users & UINT32_C(1) << from)) continue;
        block->users = (block->users & ~(UINT32_C(1) << from)) | UINT32_C(1) << to;
        if (block->writer == from) block->writer = to;
    }
}

void oracle_stream_ended(interval_oracle *oracle, int stream) {
    for (size_t i = 0; i < oracle->count; i++) {
        if (oracle->blocks[i].own == stream) oracle->blocks[i].own = ORACLE_NO_STREAM;
    }
}
