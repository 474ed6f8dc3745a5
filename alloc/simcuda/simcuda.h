/* Control interface of the simulated CUDA driver, libtenure-simcuda.so.
 *
 * The library exports the cu* calls that driver_cuda.c makes and, besides, these. Programs reach
 * them with dlsym on the library that they pass as cuda_library; driver_cuda.c itself looks up
 * tnsim_launch to tell a simulated device from a real one. State is per process and per loaded
 * library. The environment sets the defaults that tnsim_configure overrides:
 * TENURE_SIM_MEMORY, TENURE_SIM_DEVICES, TENURE_SIM_BACKED.
 *
 * Memory that is made for sharing travels to other processes as a file descriptor and is the same
 * memory there (backed mode). Each process has devices and a clock of its own: imported memory is
 * on the account of the process that made it, and races between processes are not seen.
 */
#ifndef TENURE_SIMCUDA_H
#define TENURE_SIMCUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tnsim_config {
    size_t size;
    size_t memory_bytes;        /* of each device; 0: 139 GiB */
    int device_count;           /* 0: 1 */
    int backed;                 /* 1: memory can be touched by the host, poisoned, red zones */
    size_t granularity_bytes;   /* 0: 2 MiB */
    size_t address_space_bytes; /* 0: 128 TiB; reserving beyond it fails */
    uint32_t isolated_devices;  /* bit d: device d is no one's peer */
    uint64_t seed; /* not 0: each piece of work takes up to twice its time, at random from this */
    int stackless; /* 1: races are told without stacks: to take them is most of what work costs */
} tnsim_config;

/* Clears everything (also leaks) and starts again with this configuration. */
int tnsim_configure(const tnsim_config *config);

typedef struct tnsim_range {
    const void *address;
    size_t bytes;
    int is_write;
} tnsim_range;

/* Declares a kernel on a stream: what it reads and writes and how long it runs (virtual time).
 * Touching memory that is not mapped is a CUDA error 700; conflicting unordered touches race. */
int tnsim_launch(void *stream, const char *kernel, const tnsim_range *ranges, size_t range_count,
                 double duration_us);

/* The caller takes [address, +bytes) into use on `stream`: everything that touched it before
 * must happen-before this point, else it is a race. What an allocator hands out is declared so. */
int tnsim_take(void *stream, const void *address, size_t bytes);

/* A number for who wrote the bytes of [address, +bytes) last: another one once work that was given
 * to a stream meanwhile, in a graph that was launched too, writes any of them. Reads, and work that
 * is only captured, leave it as it is. Made where the memory is made: another one, too. */
int tnsim_write_stamp(const void *address, size_t bytes, uint64_t *out);

/* Fails the nth call from now (1 is the next) of `call` ("cuMemMap"; NULL: any call) with
 * `code`; if and_after, all later ones too. nth 0 ends it. */
int tnsim_fault(const char *call, long nth, int and_after, int code);

/* Calls so far of `call`, or of all for NULL. */
uint64_t tnsim_call_count(const char *call);

/* The device shrinks to `bytes`: later creates beyond it fail. */
int tnsim_set_memory(int device, size_t bytes);

/* Why this thread's last call was refused (error 801, or cuGetProcAddress did not find the name);
 * "" if it was not. */
const char *tnsim_refusal(void);

/* The stream does nothing that it is given from now on until released, as if a kernel without
 * end ran on it. Waiting for it gives CUDA_ERROR_LAUNCH_TIMEOUT instead of hanging. */
int tnsim_stall(void *stream, int stalled);

/* Uses of handles of streams that had been destroyed, each of which failed as on a GPU; but there
 * the driver may crash. The handle is given to the next new stream, and then is good again. */
uint64_t tnsim_lost_stream_uses(void);

/* A piece of work that has been given its time: a kernel, copy or fill. */
typedef struct tnsim_interval {
    uint64_t stream; /* never repeats; the streams of a device are numbered as they are made */
    int device;
    const char *what; /* the kernel's name, or the call's */
    double begin_us;
    double end_us;
} tnsim_interval;

/* From now on calls watcher for each, in the order in which they are given their times, by the
 * thread that makes the call and with the library's lock held: it makes no call of this library.
 * NULL ends it; so does tnsim_configure. */
typedef void (*tnsim_watcher)(void *context, const tnsim_interval *interval);
void tnsim_watch(tnsim_watcher watcher, void *context);

uint64_t tnsim_race_count(void);
/* Words and both stacks of race `index`, NULL if there is none such. */
const char *tnsim_race_text(uint64_t index);

/* Virtual clock of the host side, and the part spent in memory calls, microseconds. */
double tnsim_now_us(void);
double tnsim_memory_call_us(void);

/* Physical memory in use and its peak on a device. */
size_t tnsim_physical_bytes(int device);
size_t tnsim_physical_peak_bytes(int device);

/* What an unload now would complain of: handles, mappings, reservations, streams, events and
 * unfinished work that are left. 0 if clean; writes words to text. At unload the same check
 * prints to stderr, and ends the process with status 97 if TENURE_SIM_STRICT_UNLOAD=1. */
int tnsim_leftovers(char *text, size_t text_bytes);

#ifdef __cplusplus
}
#endif
#endif
