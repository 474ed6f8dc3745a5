/* Races: found by comparing clocks, counted, the first of them kept to be told. See sim_race.h.
 *
 * All races are counted; the first RACES_KEPT are kept with what both operations were, their
 * streams, the bytes, and both sites. Words are made when they are asked for.
 */
#include <string.h>

#include "sim_memory.h"
#include "sim_stream.h"

#define RACES_KEPT 100
#define TEXT_BYTES 8192

typedef struct sim_race {
    uint32_t site;
    uint32_t earlier_site;
    uint64_t stream_id; /* 0: the host */
    uint64_t earlier_stream_id;
    uint64_t begin; /* from the first byte of the first conflict to the last of the last */
    uint64_t end;
    char *text; /* NULL until asked for */
} sim_race;

static sim_race races[RACES_KEPT];
static uint64_t race_count;

/* ---- operations ------------------------------------------------------------------------------ */

void tn__sim_operation_of_stream(sim_operation *operation, struct sim_stream *stream,
                                 const char *what) {
    operation->what = what;
    operation->use.slot = stream->slot;
    operation->use.epoch = stream->epoch;
    operation->use.site = tn__sim_site_here(what);
    operation->known = &stream->clock;
    operation->stream_id = stream->id;
    operation->conflict_count = 0;
}

void tn__sim_operation_of_take(sim_operation *operation, struct sim_stream *stream) {
    operation->what = "taking the memory into use";
    operation->use.slot = stream->slot;
    operation->use.epoch = 0;
    operation->use.site = 0;
    operation->known = tn__sim_stream_peek(stream);
    operation->stream_id = stream->id;
    operation->conflict_count = 0;
}

void tn__sim_operation_of_host(sim_operation *operation, const char *what) {
    operation->what = what;
    operation->use.slot = UINT32_MAX;
    operation->use.epoch = 0;
    operation->use.site = 0;
    operation->known = tn__sim_host_clock();
    operation->stream_id = 0;
    operation->conflict_count = 0;
}

/* ---- conflicts ------------------------------------------------------------------------------- */

static sim_conflict *find_conflict(sim_operation *operation, const sim_use *earlier) {
    for (uint32_t i = 0; i < operation->conflict_count; i++) {
        sim_conflict *conflict = &operation->conflicts[i];
        if (conflict->slot == earlier->slot && conflict->epoch == earlier->epoch) return conflict;
    }
    return NULL;
}

static void widen(uint64_t index, uint64_t begin, uint64_t end) {
    sim_race *race = &races[index < RACES_KEPT ? index : 0];
    if (index >= RACES_KEPT) return;
    if (begin < race->begin) race->begin = begin;
    if (end > race->end) race->end = end;
}

static void keep_race(sim_operation *operation, const sim_use *earlier, uint64_t begin,
                      uint64_t end) {
    sim_race *race = &races[race_count];
    if (!operation->use.site) operation->use.site = tn__sim_site_here(operation->what);
    race->site = operation->use.site;
    race->earlier_site = earlier->site;
    race->stream_id = operation->stream_id;
    race->earlier_stream_id = tn__sim_stream_in_slot(earlier->slot)->id;
    race->begin = begin;
    race->end = end;
}

static void conflict_with(sim_operation *operation, const sim_use *earlier, uint64_t begin,
                          uint64_t end) {
    sim_conflict *known = find_conflict(operation, earlier);
    if (known) {
        widen(known->race, begin, end);
        return;
    }
    if (operation->conflict_count < SIM_CONFLICTS_MAX) {
        sim_conflict conflict = {earlier->slot, earlier->epoch, race_count};
        operation->conflicts[operation->conflict_count++] = conflict;
    }
    if (race_count < RACES_KEPT) keep_race(operation, earlier, begin, end);
    race_count++;
}

void tn__sim_check_order(sim_operation *operation, const sim_use *earlier, uint64_t address,
                         size_t bytes) {
    if (tn__sim_clock_covers(operation->known, earlier->slot, earlier->epoch)) return;
    conflict_with(operation, earlier, address, address + bytes);
}

void tn__sim_check_unused(sim_operation *operation, const struct sim_mapping *mapping) {
    for (uint32_t i = 0; i < mapping->uses.count; i++) {
        tn__sim_check_order(operation, &mapping->uses.items[i], mapping->base,
                            mapping->handle->bytes);
    }
}

/* ---- control --------------------------------------------------------------------------------- */

static void describe_stream(sim_report *report, uint64_t stream_id) {
    if (stream_id)
        tn__sim_report_line(report, "on stream %llu", (unsigned long long)stream_id);
    else
        tn__sim_report_line(report, "by the host");
}

static void describe(const sim_race *race, sim_report *report) {
    const char *what = tn__sim_site_what(race->site);
    const char *earlier = tn__sim_site_what(race->earlier_site);
    tn__sim_report_line(report, "race: %s ", what);
    describe_stream(report, race->stream_id);
    tn__sim_report_line(report, " does not wait for %s ", earlier);
    describe_stream(report, race->earlier_stream_id);
    tn__sim_report_line(report, ", both on [0x%llx, 0x%llx)\n", (unsigned long long)race->begin,
                        (unsigned long long)race->end);
    tn__sim_report_line(report, "  %s was submitted from\n", what);
    tn__sim_site_describe(race->site, report);
    tn__sim_report_line(report, "  %s was submitted from\n", earlier);
    tn__sim_site_describe(race->earlier_site, report);
}

uint64_t tnsim_race_count(void) {
    uint64_t count;
    if (!tn__sim_lock()) return 0;
    count = race_count;
    tn__sim_unlock();
    return count;
}

const char *tnsim_race_text(uint64_t index) {
    const char *text = NULL;
    if (!tn__sim_lock()) return NULL;
    if (index < race_count && index < RACES_KEPT) {
        sim_race *race = &races[index];
        if (!race->text) {
            sim_report report = {tn__sim_alloc(TEXT_BYTES, 1), TEXT_BYTES, 0};
            describe(race, &report);
            race->text = report.text;
        }
        text = race->text;
    }
    tn__sim_unlock();
    return text;
}

void tn__sim_races_load(void) { tn__sim_sites_load(); }

void tn__sim_races_reset(void) {
    for (int i = 0; i < RACES_KEPT; i++)
        tn__sim_free(races[i].text);
    memset(races, 0, sizeof races);
    race_count = 0;
    tn__sim_sites_reset();
}
