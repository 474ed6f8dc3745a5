/* Sites: from where the host submitted work, as raw return addresses until somebody asks.
 *
 * A program submits work from few places, many times; equal words and stacks are one site, so that
 * memory does not grow with the number of launches. A stack is taken by unwinding, at each launch,
 * which is most of what a launch costs the host, and is left out where the configuration says so.
 * Site 0 stands for those beyond the limit.
 */
#include <dlfcn.h>
#include <execinfo.h>
#include <stdlib.h>
#include <string.h>

#include "sim_lifecycle.h"
#include "sim_race.h"

#define FRAMES_MAX 16
#define SITES_MAX  ((uint32_t)1 << 16)

typedef struct sim_site {
    char *what;
    uint64_t hash;
    int depth;
    void *frames[FRAMES_MAX];
} sim_site;

static sim_site *sites; /* sites[0] is "beyond the limit" */
static uint32_t site_count;
static uint32_t site_capacity;
static uint32_t *buckets; /* open addressing; 0: empty */
static uint32_t bucket_count;

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    const unsigned char *next = bytes;
    while (count--)
        hash = (hash ^ *next++) * 0x100000001b3u;
    return hash;
}

static int is_same(const sim_site *a, const sim_site *b) {
    return a->hash == b->hash && a->depth == b->depth && strcmp(a->what, b->what) == 0 &&
           memcmp(a->frames, b->frames, (size_t)a->depth * sizeof a->frames[0]) == 0;
}

/* The bucket of the site, or the empty one where it belongs. */
static uint32_t *find_bucket(const sim_site *site) {
    uint32_t at = (uint32_t)site->hash & (bucket_count - 1);
    while (buckets[at] && !is_same(&sites[buckets[at]], site))
        at = (at + 1) & (bucket_count - 1);
    return &buckets[at];
}

static void grow_buckets(void) {
    tn__sim_free(buckets);
    bucket_count = bucket_count ? 2 * bucket_count : 256;
    buckets = tn__sim_alloc(bucket_count, sizeof *buckets);
    for (uint32_t i = 1; i < site_count; i++)
        *find_bucket(&sites[i]) = i;
}

static void add_site(const sim_site *site) {
    size_t bytes = strlen(site->what) + 1;
    if (site_count == site_capacity) {
        site_capacity = site_capacity ? 2 * site_capacity : 64;
        sites = tn__sim_grow(sites, site_capacity, sizeof *sites);
    }
    sites[site_count] = *site;
    sites[site_count].what = tn__sim_alloc(bytes, 1);
    memcpy(sites[site_count].what, site->what, bytes);
    site_count++;
}

uint32_t tn__sim_site_here(const char *what) {
    char words[] = "(one of too many places)";
    sim_site site = {.what = words};
    uint32_t *bucket;
    if (!site_count) add_site(&site);
    if (2 * (site_count + 1) > bucket_count) grow_buckets();
    /* Only read here: add_site copies it. */
    site.what = (char *)(uintptr_t)what;
    site.depth = tn__sim.config.stackless ? 0 : backtrace(site.frames, FRAMES_MAX);
    site.hash = hash_bytes(0xcbf29ce484222325u, what, strlen(what));
    site.hash = hash_bytes(site.hash, site.frames, (size_t)site.depth * sizeof site.frames[0]);
    site.hash ^= site.hash >> 32;
    bucket = find_bucket(&site);
    if (*bucket || site_count == SITES_MAX) return *bucket;
    *bucket = site_count;
    add_site(&site);
    return *bucket;
}

const char *tn__sim_site_what(uint32_t site) { return sites[site].what; }

static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* This library's own frames say nothing about the program. */
static int is_own_frame(const Dl_info *info) {
    Dl_info own;
    if (!dladdr(&site_count, &own)) return 0;
    return own.dli_fbase == info->dli_fbase;
}

void tn__sim_site_describe(uint32_t index, sim_report *report) {
    const sim_site *site = &sites[index];
    int shown = 0;
    for (int i = 0; i < site->depth; i++) {
        Dl_info info = {NULL, NULL, NULL, NULL};
        uintptr_t address = (uintptr_t)site->frames[i];
        int known = dladdr(site->frames[i], &info);
        if (known && is_own_frame(&info)) continue;
        tn__sim_report_line(report, "    #%d 0x%llx", shown++, (unsigned long long)address);
        if (known && info.dli_sname) {
            tn__sim_report_line(report, " %s+0x%llx", info.dli_sname,
                                (unsigned long long)(address - (uintptr_t)info.dli_saddr));
        }
        if (known && info.dli_fname) {
            tn__sim_report_line(report, " (%s+0x%llx)", file_name(info.dli_fname),
                                (unsigned long long)(address - (uintptr_t)info.dli_fbase));
        }
        tn__sim_report_line(report, "\n");
    }
}

/* The first unwinding loads the unwinder: not under a lock, not in the middle of a call. */
void tn__sim_sites_load(void) {
    void *frame[1];
    backtrace(frame, 1);
}

void tn__sim_sites_reset(void) {
    for (uint32_t i = 0; i < site_count; i++)
        tn__sim_free(sites[i].what);
    tn__sim_free(sites);
    tn__sim_free(buckets);
    sites = NULL;
    buckets = NULL;
    site_count = site_capacity = bucket_count = 0;
}
