/* Memory of the simulated devices: physical handles, address regions, and mappings between them.
 *
 *     region   a reserved address range            base ... base + bytes, guards around it
 *       table    granule -> mapping                 which mapping covers an address
 *     mapping  one handle at one address            access per device, last uses per stream
 *     handle   physical memory of one device        shadow of its last reads and writes
 *
 * A handle lives until all its tokens are released and no mapping of it is left. Plain memory
 * (cuMemAlloc) is a region of its own with one handle mapped in it, so that the rest needs no
 * second case; so is a chunk of a memory pool (sim_mempool.c), and pinned host memory, whose handle
 * is of no device.
 */
#ifndef TENURE_SIM_MEMORY_H
#define TENURE_SIM_MEMORY_H

#include "sim_core.h"
#include "sim_lifecycle.h"
#include "sim_race.h"

#define SIM_HOST (-1)

typedef struct sim_handle {
    struct sim_handle *next; /* in the list of all */
    struct sim_handle *previous;
    int device; /* or SIM_HOST */
    size_t bytes;
    unsigned tokens;    /* that the program has of it; plain memory: one, that it does not see */
    unsigned mapped;    /* mappings of it */
    int is_foreign;     /* another process made it, and its device is charged there */
    int file;           /* made for sharing: a file of its own; else -1 */
    size_t file_offset; /* in its own file, or (backed mode) in the device's */
    int is_poisoned;    /* its contents have been filled with the poison */
    sim_shadow shadow;
} sim_handle;

typedef struct sim_mapping {
    CUdeviceptr base;
    sim_handle *handle;
    uint32_t readable; /* bit d: device d may read */
    uint32_t writable;
    sim_use_list uses; /* last use by each stream through this address */
} sim_mapping;

typedef struct sim_region {
    CUdeviceptr base;
    size_t bytes;
    int is_plain;
    int is_host;             /* pinned host memory */
    struct sim_chunk *chunk; /* of a memory pool; else NULL */
    size_t granule_bytes;
    size_t mapped; /* mappings in it */
    sim_mapping ***table;
    size_t table_chunks;
    void *guarded; /* what mmap gave: the region between its guards */
    size_t guarded_bytes;
} sim_region;

/* ---- sim_address.c: regions and what is where ------------------------------------------------ */

/* A new region of addresses; NULL if there are none left. */
sim_region *tn__sim_region_create(size_t bytes, size_t alignment, int is_plain);
void tn__sim_region_destroy(sim_region *region);
/* The region that contains the address, or NULL. */
sim_region *tn__sim_region_find(CUdeviceptr address);
/* The region if all of [address, +bytes) lies in one, else NULL. */
sim_region *tn__sim_region_containing(CUdeviceptr address, size_t bytes);

sim_mapping *tn__sim_mapping_at(const sim_region *region, CUdeviceptr address);
sim_mapping *tn__sim_mapping_create(sim_region *region, CUdeviceptr address, sim_handle *handle);
void tn__sim_mapping_destroy(sim_region *region, sim_mapping *mapping);
/* 1 if the range consists of whole mappings without a hole. */
int tn__sim_range_is_mapped_whole(const sim_region *region, CUdeviceptr address, size_t bytes);
/* Backed mode: makes the host see the memory with the mapping's access. 0: the host refused. */
int tn__sim_mapping_expose(sim_mapping *mapping);

/* ---- sim_vmm.c: plain memory ----------------------------------------------------------------- */

/* A region with memory of the device, or SIM_HOST, mapped in it; NULL if there is none left. */
sim_region *tn__sim_plain_create(int device, size_t bytes);
void tn__sim_plain_destroy(sim_region *region);

/* ---- sim_mempool.c --------------------------------------------------------------------------- */

/* 1 unless it is memory of a pool of which the program has some byte not in its hands. */
int tn__sim_mempool_lends(const sim_region *region, CUdeviceptr address, size_t bytes);
/* The host has synchronised with work: pools above their threshold give memory back. */
void tn__sim_mempools_synchronized(void);
void tn__sim_mempools_reset(void);
int tn__sim_mempool_leftovers(sim_report *report);

/* ---- sim_handle.c: physical memory ----------------------------------------------------------- */

/* Charges the device; NULL if it is out of memory. The caller has one token of it. */
sim_handle *tn__sim_handle_create(int device, size_t bytes, int is_shareable);
/* What the program calls the handle: a new name for one of its tokens. */
CUmemGenericAllocationHandle tn__sim_token_create(sim_handle *handle);
sim_handle *tn__sim_handle_find(CUmemGenericAllocationHandle token);
/* The program gives a token up; the memory goes when neither token nor mapping is left. */
void tn__sim_token_release(CUmemGenericAllocationHandle token);
void tn__sim_handle_release(sim_handle *handle);
void tn__sim_handle_unmapped(sim_handle *handle);
/* The file that the memory is in, or -1. */
int tn__sim_handle_file(const sim_handle *handle);

/* ---- sim_share.c: physical memory that travels between processes ----------------------------- */

/* The file of a handle that is to be shared, with its description at the end; -1 on failure. */
int tn__sim_share_file(int device, size_t bytes);

/* ---- walking over memory --------------------------------------------------------------------- */

/* One stretch of a range: what of which mapping it covers. */
typedef struct sim_span {
    sim_mapping *mapping;
    size_t offset; /* in the handle */
    size_t bytes;
} sim_span;

/* Gives the stretch at *address and moves on; 0 if nothing is mapped there. */
int tn__sim_span_next(const sim_region *region, CUdeviceptr *address, CUdeviceptr end,
                      sim_span *span);

/* 1 if the device may touch all of the range so. */
int tn__sim_range_is_accessible(CUdeviceptr address, size_t bytes, int device, int is_write);

void tn__sim_memory_reset(void);
int tn__sim_memory_leftovers(sim_report *report);
void tn__sim_handles_reset(void);
/* The handle that has this file, NULL: none in this process. */
sim_handle *tn__sim_handle_of_file(unsigned long long file_system, unsigned long long inode);
/* A handle for a file that another process made; takes the file. The caller has one token. */
sim_handle *tn__sim_handle_adopt(int device, size_t bytes, int file);
void tn__sim_handles_count(size_t *count, size_t *bytes);

#endif
