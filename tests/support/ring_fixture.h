/* A ring on either driver whose units are gathered by a copy from a shard that holds all of them:
 * what a rank of one would see. Each unit has two weights, PLAIN bf16 and FP8 2D, of `rows` rows.
 */
#ifndef TENURE_RING_FIXTURE_H
#define TENURE_RING_FIXTURE_H

#include "ring_slots.h"
#include "tensor_fixture.h"

enum { RING_UNITS_MAX = 16, RING_COLS = 128, RING_WEIGHTS = 2 };

typedef struct ring_fixture ring_fixture;

typedef struct ring_unit {
    ring_fixture *fixture;
    tn_tensor shard;
    tn_tensor weights[RING_WEIGHTS];
    int rows;
    size_t bytes;           /* that are gathered: not rounded */
    size_t scale_offset;    /* of the 2D weight, in the unit; its elements are before it */
    unsigned char contents; /* what the shard is full of */
} ring_unit;

struct ring_fixture {
    tensor_fixture t;
    tn_ring *ring;
    tn_ring_config config; /* for ring_fixture_make; the scope is set */
    ring_unit units[RING_UNITS_MAX];
    int unit_count;
    int gathers;                                              /* copies that were put so far */
    void (*on_gather)(void *context, int unit, void *buffer); /* of each; NULL: nobody looks */
    void *context;
    int gather_fault; /* the nth from now fails; 0: none does */
};

/* The device, and a config with the default values. */
void ring_fixture_open(ring_fixture *f, int is_simulated);

/* A unit with rows x RING_COLS elements of each weight, and a shard full of `contents`. */
void ring_fixture_add(ring_fixture *f, int rows, unsigned char contents);

/* The ring of the config with the units that were added, not sealed. */
void ring_fixture_make(ring_fixture *f);

/* count units of `rows` rows, contents 1, 2, ..., in a sealed ring of the config. */
void ring_fixture_start(ring_fixture *f, int count, int rows);

/* Writes a new byte into all of the shard, on the fixture's stream. */
void ring_fixture_write_shard(ring_fixture *f, int unit, unsigned char contents);

/* The planes are valid and full of the shard's contents; on the simulated device only valid. */
void ring_fixture_expect_there(ring_fixture *f, int unit, tn_stream stream);
void ring_fixture_expect_gone(const ring_fixture *f, int unit);

tn_ring_state ring_fixture_state(const ring_fixture *f, int unit);
tn_ring_stats ring_fixture_stats(const ring_fixture *f);

/* Bytes that the unit has in the buffer. */
size_t ring_fixture_unit_bytes(const ring_fixture *f, int unit);

/* Destroys the ring if a test has not, and everything else; all must balance. */
void ring_fixture_close(ring_fixture *f);

#endif
