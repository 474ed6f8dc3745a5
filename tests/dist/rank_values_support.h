/* What ranks put into collectives in tests, and what must come out: every expected value is
 * computed from what all ranks put in, with rounding of its own. */
#ifndef TENURE_RANK_VALUES_SUPPORT_H
#define TENURE_RANK_VALUES_SUPPORT_H

#include "ranks_support.h"

/* Blocks of the fixture's pool on its first stream; get waits for the communicator. */
void *ranks_take(const rank_fixture *ranks, size_t bytes);
void ranks_give(const rank_fixture *ranks, void *block);
void ranks_put(const rank_fixture *ranks, void *block, const void *data, size_t bytes);
void ranks_get(const rank_fixture *ranks, void *data, const void *block, size_t bytes);

/* Byte `at` of what a rank gives. */
unsigned char ranks_byte(int rank, size_t at);
void ranks_fill_bytes(unsigned char *data, int rank, size_t bytes);

/* Element `at` of what a rank gives: magnitudes from 2^-20 to 2^20 in both signs, so that sums in
 * another order have other bits. */
float ranks_number(int rank, size_t at);

float ranks_widen(uint16_t bits);
uint16_t ranks_narrow(float value); /* to nearest even */

/* Of fp32 or bf16. */
void ranks_store(void *data, size_t at, tn_dtype dtype, float value);

/* Elements `at` of all ranks, reduced in the order of ranks. */
float ranks_reduced(const rank_fixture *ranks, tn_dtype dtype, tn_reduce reduce, size_t at);

/* The same, or element `seen_at` of `seen` where the engine sums in an order of its own and that is
 * within its bound: n roundings, each of a unit in the last place of the sum of magnitudes. */
float ranks_reduced_as(const rank_fixture *ranks, tn_dtype dtype, tn_reduce reduce, size_t at,
                       const void *seen, size_t seen_at);

#endif
