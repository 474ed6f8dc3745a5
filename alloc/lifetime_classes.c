/* Lifetimes of blocks by class: see lifetime_classes.h. */
#include "lifetime_classes.h"

#define FREED_WEIGHT_MAX 8

static uint64_t mix(uint64_t value) {
    value *= 0x9E3779B97F4A7C15u;
    return value ^ (value >> 29);
}

uint32_t tn__lifetime_slot(size_t bytes, const char *owner, const char *site) {
    uint64_t hash = mix(mix(mix(bytes) ^ (uintptr_t)owner) ^ (uintptr_t)site);
    return (uint32_t)(mix(hash) >> 32) % TN__LIFETIME_SLOTS;
}

static double expected_lifetime(const tn__lifetimes *lifetimes, const tn__lifetime_class *class) {
    uint64_t ages = class->live_count * lifetimes->clock - class->born_sum;
    uint32_t count = class->live_count + class->freed_count;
    if (count == 0) return 0.0;
    return ((double)ages + class->freed_mean * class->freed_count) / count;
}

int tn__lifetime_is_long(tn__lifetimes *lifetimes, uint32_t slot, uint64_t bound_bytes) {
    tn__lifetime_class *class = &lifetimes->classes[slot];
    double bound = (double)bound_bytes;
    class->is_long = expected_lifetime(lifetimes, class) >= (class->is_long ? bound / 2 : bound);
    return class->is_long;
}

uint64_t tn__lifetime_begin(tn__lifetimes *lifetimes, uint32_t slot, size_t bytes) {
    tn__lifetime_class *class = &lifetimes->classes[slot];
    lifetimes->clock += bytes;
    class->live_count++;
    class->born_sum += lifetimes->clock;
    return lifetimes->clock;
}

void tn__lifetime_end(tn__lifetimes *lifetimes, uint32_t slot, uint64_t born) {
    tn__lifetime_class *class = &lifetimes->classes[slot];
    double lifetime = (double)(lifetimes->clock - born);
    class->live_count--;
    class->born_sum -= born;
    if (class->freed_count < FREED_WEIGHT_MAX) class->freed_count++;
    class->freed_mean += (lifetime - class->freed_mean) / class->freed_count;
}
