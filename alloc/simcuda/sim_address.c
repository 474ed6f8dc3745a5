/* Address regions and mappings: see sim_memory.h.
 *
 * Every region is really reserved in this process (PROT_NONE, no memory committed), so that its
 * addresses are unique and a touch traps, and has a guard of one granule on either side, so that
 * no two regions touch and an overrun traps as well. In backed mode a mapping that some device
 * may access is the handle's stretch of the device's memory file, mapped there with MAP_SHARED:
 * the same handle at two addresses is the same memory to the host too. Pinned host memory is
 * private memory of the process in either mode.
 *
 *     guarded -> | guard | (alignment) | region: granules ... | guard |
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim_memory.h"

#define POISON        0xA5
#define CHUNK_ENTRIES ((size_t)512)
#define PAGE_BYTES    ((size_t)4096)

/* Sorted by base. */
static sim_region **regions;
static size_t region_count;
static size_t region_capacity;
static size_t reserved_bytes;

/* ---- the sorted list of regions -------------------------------------------------------------- */

/* Index of the first region whose base is above the address. */
static size_t index_above(CUdeviceptr address) {
    size_t low = 0;
    size_t high = region_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (regions[middle]->base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

sim_region *tn__sim_region_find(CUdeviceptr address) {
    size_t above = index_above(address);
    sim_region *region = above ? regions[above - 1] : NULL;
    return region && address - region->base < region->bytes ? region : NULL;
}

sim_region *tn__sim_region_containing(CUdeviceptr address, size_t bytes) {
    sim_region *region = tn__sim_region_find(address);
    if (!region) return NULL;
    return bytes <= region->bytes - (size_t)(address - region->base) ? region : NULL;
}

static void insert_region(sim_region *region) {
    size_t at = index_above(region->base);
    if (region_count == region_capacity) {
        region_capacity = region_capacity ? 2 * region_capacity : 16;
        regions = tn__sim_grow(regions, region_capacity, sizeof *regions);
    }
    memmove(regions + at + 1, regions + at, (region_count - at) * sizeof *regions);
    regions[at] = region;
    region_count++;
}

static void remove_region(const sim_region *region) {
    size_t at = index_above(region->base) - 1;
    memmove(regions + at, regions + at + 1, (region_count - at - 1) * sizeof *regions);
    region_count--;
}

/* ---- a region -------------------------------------------------------------------------------- */

sim_region *tn__sim_region_create(size_t bytes, size_t alignment, int is_plain) {
    size_t granularity = tn__sim.config.granularity_bytes;
    size_t align = alignment > granularity ? alignment : granularity;
    size_t span = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    size_t guarded_bytes = span + align + 2 * granularity;
    size_t granules;
    sim_region *region;
    void *guarded;
    if (bytes > tn__sim.config.address_space_bytes - reserved_bytes) return NULL;
    guarded =
        mmap(NULL, guarded_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (guarded == MAP_FAILED) return NULL;
    region = tn__sim_alloc(1, sizeof *region);
    region->guarded = guarded;
    region->guarded_bytes = guarded_bytes;
    region->base = ((uintptr_t)guarded + granularity + align - 1) / align * align;
    region->bytes = bytes;
    region->is_plain = is_plain;
    /* Plain memory ends at its guard. */
    if (is_plain) region->base += span - bytes;
    region->granule_bytes = is_plain ? bytes : granularity;
    granules = bytes / region->granule_bytes;
    region->table_chunks = (granules + CHUNK_ENTRIES - 1) / CHUNK_ENTRIES;
    region->table = tn__sim_alloc(region->table_chunks, sizeof *region->table);
    insert_region(region);
    reserved_bytes += bytes;
    return region;
}

void tn__sim_region_destroy(sim_region *region) {
    remove_region(region);
    reserved_bytes -= region->bytes;
    munmap(region->guarded, region->guarded_bytes);
    for (size_t i = 0; i < region->table_chunks; i++)
        tn__sim_free(region->table[i]);
    tn__sim_free(region->table);
    tn__sim_free(region);
}

/* ---- mappings -------------------------------------------------------------------------------- */

static size_t granule_of(const sim_region *region, CUdeviceptr address) {
    return (size_t)(address - region->base) / region->granule_bytes;
}

sim_mapping *tn__sim_mapping_at(const sim_region *region, CUdeviceptr address) {
    size_t granule = granule_of(region, address);
    sim_mapping **chunk = region->table[granule / CHUNK_ENTRIES];
    return chunk ? chunk[granule % CHUNK_ENTRIES] : NULL;
}

static void set_granules(sim_region *region, const sim_mapping *mapping, sim_mapping *value) {
    size_t first = granule_of(region, mapping->base);
    size_t end = first + mapping->handle->bytes / region->granule_bytes;
    for (size_t granule = first; granule < end; granule++) {
        sim_mapping ***chunk = &region->table[granule / CHUNK_ENTRIES];
        if (!*chunk) *chunk = tn__sim_alloc(CHUNK_ENTRIES, sizeof **chunk);
        (*chunk)[granule % CHUNK_ENTRIES] = value;
    }
}

sim_mapping *tn__sim_mapping_create(sim_region *region, CUdeviceptr address, sim_handle *handle) {
    sim_mapping *mapping = tn__sim_alloc(1, sizeof *mapping);
    mapping->base = address;
    mapping->handle = handle;
    handle->mapped++;
    set_granules(region, mapping, mapping);
    region->mapped++;
    return mapping;
}

static size_t pages_of(size_t bytes) { return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

static void *first_page(const sim_mapping *mapping) {
    return (void *)(uintptr_t)(mapping->base / PAGE_BYTES * PAGE_BYTES);
}

/* The addresses go back to being reserved only. */
static void hide(const sim_mapping *mapping) {
    if (!tn__sim.config.backed && mapping->handle->device != SIM_HOST) return;
    if (mmap(first_page(mapping), pages_of(mapping->handle->bytes), PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
        fputs("tenure-simcuda: the host does not take back the addresses of a mapping\n", stderr);
        abort();
    }
}

int tn__sim_mapping_expose(sim_mapping *mapping) {
    sim_handle *handle = mapping->handle;
    size_t bytes = pages_of(handle->bytes);
    int is_host = handle->device == SIM_HOST;
    int file = is_host ? -1 : tn__sim_handle_file(handle);
    int flags = is_host ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED : MAP_SHARED | MAP_FIXED;
    void *memory;
    if (file < 0 && !is_host) return 0;
    memory = mmap(first_page(mapping), bytes, PROT_READ | PROT_WRITE, flags, file,
                  (off_t)handle->file_offset);
    if (memory == MAP_FAILED) return 0;
    if (is_host) return 1;
    if (!handle->is_poisoned) memset(memory, POISON, bytes);
    handle->is_poisoned = 1;
    if (mapping->writable) return 1;
    return mprotect(memory, bytes, mapping->readable ? PROT_READ : PROT_NONE) == 0;
}

void tn__sim_mapping_destroy(sim_region *region, sim_mapping *mapping) {
    hide(mapping);
    set_granules(region, mapping, NULL);
    region->mapped--;
    tn__sim_handle_unmapped(mapping->handle);
    tn__sim_use_list_clear(&mapping->uses);
    tn__sim_free(mapping);
}

int tn__sim_range_is_mapped_whole(const sim_region *region, CUdeviceptr address, size_t bytes) {
    CUdeviceptr end = address + bytes;
    while (address < end) {
        const sim_mapping *mapping = tn__sim_mapping_at(region, address);
        if (!mapping || mapping->base != address) return 0;
        if (mapping->handle->bytes > end - address) return 0;
        address += mapping->handle->bytes;
    }
    return 1;
}

/* ---- walking --------------------------------------------------------------------------------- */

int tn__sim_span_next(const sim_region *region, CUdeviceptr *address, CUdeviceptr end,
                      sim_span *span) {
    size_t rest;
    span->mapping = tn__sim_mapping_at(region, *address);
    if (!span->mapping) return 0;
    span->offset = (size_t)(*address - span->mapping->base);
    rest = span->mapping->handle->bytes - span->offset;
    span->bytes = rest < end - *address ? rest : (size_t)(end - *address);
    *address += span->bytes;
    return 1;
}

int tn__sim_range_is_accessible(CUdeviceptr address, size_t bytes, int device, int is_write) {
    const sim_region *region = tn__sim_region_containing(address, bytes);
    CUdeviceptr end = address + bytes;
    sim_span span;
    if (!region) return 0;
    while (address < end) {
        if (!tn__sim_span_next(region, &address, end, &span)) return 0;
        uint32_t allowed = is_write ? span.mapping->writable : span.mapping->readable;
        if (!(allowed >> device & 1)) return 0;
    }
    return 1;
}

/* ---- reset, leftovers ------------------------------------------------------------------------ */

/* Calls visit for each mapping of the region. */
static void for_each_mapping(sim_region *region, void (*visit)(sim_region *, sim_mapping *)) {
    CUdeviceptr address = region->base;
    CUdeviceptr end = region->base + region->bytes;
    while (region->mapped && address < end) {
        size_t granule = granule_of(region, address);
        sim_mapping *mapping = tn__sim_mapping_at(region, address);
        size_t step = region->granule_bytes;
        if (mapping)
            step = mapping->handle->bytes;
        else if (!region->table[granule / CHUNK_ENTRIES]) {
            step *= CHUNK_ENTRIES - granule % CHUNK_ENTRIES;
        }
        if (mapping) visit(region, mapping);
        address += step;
    }
}

void tn__sim_memory_reset(void) {
    tn__sim_mempools_reset();
    while (region_count) {
        sim_region *region = regions[region_count - 1];
        for_each_mapping(region, tn__sim_mapping_destroy);
        tn__sim_region_destroy(region);
    }
    tn__sim_free(regions);
    regions = NULL;
    region_capacity = 0;
    tn__sim_handles_reset();
}

#define LISTED_MAX 8

static void report_regions(sim_report *report, int is_plain, int is_host, const char *what) {
    int listed = 0;
    for (size_t i = 0; i < region_count && listed < LISTED_MAX; i++) {
        const sim_region *region = regions[i];
        if (region->is_plain != is_plain || region->is_host != is_host || region->chunk) continue;
        listed++;
        tn__sim_report_line(report, "    %s at 0x%llx, %zu bytes", what, region->base,
                            region->bytes);
        if (!is_plain) tn__sim_report_line(report, ", %zu mapped in it", region->mapped);
        tn__sim_report_line(report, "\n");
    }
}

typedef struct region_sum {
    size_t count;
    size_t bytes;
} region_sum;

static void add_region(region_sum *sum, const sim_region *region) {
    sum->count++;
    sum->bytes += region->bytes;
}

static void report_plain(sim_report *report, const region_sum *sum, int is_host) {
    if (!sum->count) return;
    tn__sim_report_line(report, "  %s memory: %zu (%zu bytes)\n", is_host ? "pinned host" : "plain",
                        sum->count, sum->bytes);
    report_regions(report, 1, is_host, "allocated");
}

/* Chunks of memory pools are told with their pool. */
int tn__sim_memory_leftovers(sim_report *report) {
    size_t handles, handle_bytes, mappings = 0;
    region_sum plain = {0, 0}, host = {0, 0}, reserved = {0, 0};
    for (size_t i = 0; i < region_count; i++) {
        const sim_region *region = regions[i];
        if (region->chunk) continue;
        add_region(region->is_host ? &host : region->is_plain ? &plain : &reserved, region);
        mappings += region->is_plain ? 0 : region->mapped;
    }
    tn__sim_handles_count(&handles, &handle_bytes);
    if (handles) tn__sim_report_line(report, "  handles: %zu (%zu bytes)\n", handles, handle_bytes);
    if (mappings) tn__sim_report_line(report, "  mappings: %zu\n", mappings);
    if (reserved.count) {
        tn__sim_report_line(report, "  reservations: %zu\n", reserved.count);
        report_regions(report, 0, 0, "reserved");
    }
    report_plain(report, &plain, 0);
    report_plain(report, &host, 1);
    return (int)(handles + mappings + reserved.count + plain.count + host.count) +
           tn__sim_mempool_leftovers(report);
}
