/* cuBLASLt on the emulated device: offers algorithms as a test says, multiplies by the host's
 * definition, in the order of the stream, and keeps the time that the script gives each of them.
 *
 * It is as strict as the library on a Hopper: FP8 needs A transposed and B not, sizes that are
 * multiples of 16 and 8, addresses of 16, scales of blocks in the one layout, no 128x128 by 128x128
 * and no E5M2 by E5M2, and as much workspace as the algorithm asks for.
 */
#ifndef TENURE_SCRIPTED_CUBLASLT_H
#define TENURE_SCRIPTED_CUBLASLT_H

#include <stddef.h>

enum { SCRIPTED_ALGORITHMS_MAX = 64 };

typedef struct scripted_algorithm {
    double us; /* on the script's clock */
    size_t workspace_bytes;
    int refuses;        /* is offered, and then does not run */
    double swizzled_us; /* with another order of blocks, which nobody offers; 0: there is none */
} scripted_algorithm;

/* What a GPU's clock does to times: a product takes `us` (1 + drift w) (1 + noise r), w a wave from
 * 0 to 1 of so long a period of the device's time, r a random number from 0 to 1. */
typedef struct scripted_weather {
    double drift, period_us, noise;
    unsigned long long seed;
} scripted_weather;

typedef struct scripted_cublaslt {
    scripted_algorithm algorithms[SCRIPTED_ALGORITHMS_MAX];
    int count;
    size_t version;
    double own_us;      /* of a product that is not cuBLASLt's, but ours */
    double plain_share; /* a product of PLAIN operands takes so much of an algorithm's time */
    scripted_weather weather;
    int outruns_host;        /* the device has done what is put on it before the host looks */
    int has_no_bias;         /* no product of it has an epilogue */
    int heuristics;          /* calls so far */
    void (*meanwhile)(void); /* called from within the next of them: as another thread would */
    int lacks_fp8;           /* has nothing for it: an older one */
    int products;
    int descriptors; /* operation descriptors that are alive */
    int made;        /* and that were ever made */
    int last;        /* place of the algorithm that ran last, from 1 on; less than 0: swizzled */
    int tile;        /* that all algorithms say they have, by cuBLASLt's number; 0: the usual one */
    int keeps_all;   /* nothing is offered for a part of the multiprocessors */
    int keeps_varied;    /* what nobody offers is not taken for a part of them */
    int part_checks;     /* algorithms that were asked about for a part of them, so far */
    int last_processors; /* that the product which ran last may take; 0: all */
} scripted_cublaslt;
extern scripted_cublaslt scripted;

/* Puts the script's clock and its events in the place of the emulated driver's: what is timed then
 * is what the script says, whatever the machine does. */
void scripted_cublaslt_begin(void);

#endif
