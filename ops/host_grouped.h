/* The host kernels of grouped operations: plain functions on memory, as in host_kernels.h. */
#ifndef TENURE_HOST_GROUPED_H
#define TENURE_HOST_GROUPED_H

#include "host_kernels.h"
#include "op_grouped.h"

/* TN_GROUPED_OK, or what is wrong with the offsets of groups in `rows` rows. */
uint32_t tn__host_groups_check(const tn__groups *groups, int64_t rows);

/* Notes the error, the first one only; 0 if there is none. */
int tn__host_groups_fail(const tn__groups *groups, uint32_t error);

void tn__host_grouped_quantize(const tn__grouped_quantize_work *work);

/* host_rows.c */
void tn__host_pad_groups(const tn__pad_groups_work *work);
void tn__host_gather_rows(const tn__gather_rows_work *work);
void tn__host_combine_rows(const tn__combine_rows_work *work);

/* host_shard.c */
void tn__host_shard_amax(const tn__shard_amax_work *work);
void tn__host_shard_quantize(const tn__shard_quantize_work *work);

#endif
