/* Which rank of how many this process is, as its environment says. See tenure_rendezvous.h.
 *
 * RANK and WORLD_SIZE are said for just this purpose and are believed. The variables of launchers
 * are often inherited by what they launch (a launcher within a Slurm step, say): they count only
 * where all that are set agree.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "rendezvous.h"

typedef struct variable_pair {
    const char *rank;
    const char *count;
} variable_pair;

static const variable_pair launchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"PMI_RANK", "PMI_SIZE"},
    {"SLURM_PROCID", "SLURM_NTASKS"},
};

static const char *text_of(const char *name) {
    const char *text = getenv(name);
    return text && *text ? text : NULL;
}

static tn_status number_of(const char *name, long least, long most, int *out) {
    const char *text = text_of(name);
    char *end = NULL;
    errno = 0;
    long number = text ? strtol(text, &end, 10) : 0;
    TN_REQUIRE(text && !*end && !errno && number >= least && number <= most,
               "%s is \"%s\": a number from %ld to %ld is wanted", name, text ? text : "", least,
               most);
    *out = (int)number;
    return TN_OK;
}

static tn_status read_pair(const variable_pair *pair, tn__place *out) {
    TN_TRY(number_of(pair->count, 1, TN__STORE_RANKS_MAX, &out->rank_count));
    return number_of(pair->rank, 0, out->rank_count - 1, &out->rank);
}

static int is_set(const variable_pair *pair) { return text_of(pair->rank) && text_of(pair->count); }

static tn_status read_launchers(tn__place *out) {
    const variable_pair *from = NULL;
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
        const variable_pair *pair = &launchers[i];
        tn__place place = {0};
        if (!is_set(pair)) continue;
        TN_TRY(read_pair(pair, &place));
        TN_REQUIRE(!from || (place.rank == out->rank && place.rank_count == out->rank_count),
                   "%s says rank %d of %d, %s rank %d of %d: set RANK and WORLD_SIZE", from->rank,
                   out->rank, out->rank_count, pair->rank, place.rank, place.rank_count);
        from = pair;
        out->rank = place.rank;
        out->rank_count = place.rank_count;
    }
    return TN_OK;
}

static tn_status read_ranks(tn__place *out) {
    static const variable_pair said = {"RANK", "WORLD_SIZE"};
    if (is_set(&said)) return read_pair(&said, out);
    TN_REQUIRE(!text_of("RANK") == !text_of("WORLD_SIZE"),
               "one of RANK and WORLD_SIZE is set and the other is not");
    return read_launchers(out);
}

static tn_status read_local_rank(tn__place *out) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "SLURM_LOCALID"};
    out->local_rank = -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (text_of(names[i])) return number_of(names[i], 0, TN__STORE_RANKS_MAX, &out->local_rank);
    return TN_OK;
}

static const char *read_job(void) {
    const char *job = text_of("TORCHELASTIC_RUN_ID");
    if (!job) job = text_of("SLURM_JOB_ID");
    return job ? job : "";
}

tn_status tn__place_read(int asks_for_ranks, tn__place *out) {
    tn__place place = {0};
    if (asks_for_ranks) TN_TRY(read_ranks(&place));
    TN_TRY(read_local_rank(&place));
    if (text_of("MASTER_PORT")) TN_TRY(number_of("MASTER_PORT", 1, UINT16_MAX, &place.port));
    place.host = text_of("MASTER_ADDR");
    place.job = read_job();
    *out = place;
    return TN_OK;
}
