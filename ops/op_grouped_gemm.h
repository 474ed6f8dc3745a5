/* The steps of products of groups that tn_grouped_gemm and the experts' layer share.
 *
 * Where the groups lie (m rows in group e, which begins at row o):
 *
 *                  data            as an operand                   scales
 *     ROW [m, K]   at o K bytes    m rows, K contracted            after those of the groups before
 *     COL [K, m]   at o K bytes    K rows, m contracted            likewise
 *     PLAIN rows   at row o        either, stored turned for the second
 *
 * Groups begin at any row, so at any byte: operands and outputs that do not begin at a multiple of
 * 16 bytes are said to be unaligned, and the engine copies them. All products of a call share one
 * scratch, as large as the largest one wants.
 */
#ifndef TENURE_OP_GROUPED_GEMM_H
#define TENURE_OP_GROUPED_GEMM_H

#include "op_gemm.h"
#include "op_grouped.h"
#include "tenure_grouped.h"

/* How many groups there are and where they begin, as the host knows it. */
typedef struct tn__group_list {
    int64_t count;
    const int64_t *offsets; /* count + 1 */
    int64_t rows;           /* of all */
} tn__group_list;

static inline int64_t tn__group_rows(const tn__group_list *groups, int64_t e) {
    return groups->offsets[e + 1] - groups->offsets[e];
}

/* Rising from 0, and few and small enough to count with. */
tn_status tn__group_list_check(const tn__op_call *call, int64_t count, const int64_t *offsets,
                               tn__group_list *out);

/* An operand of all groups, taken group by group. */
typedef struct tn__grouped_operand {
    tn_format format;  /* PLAIN, FP8_BLOCK_1D or FP8_TENSOR: then each group has its own scale */
    int is_along_rows; /* rows are contracted: COL, or PLAIN turned */
    tn_dtype dtype;
    int64_t cols; /* of the matrix whose rows are the groups' */
    const unsigned char *data;
    const float *scale; /* of the group that comes next; PLAIN: NULL */
} tn__grouped_operand;

/* Of FP8: whether the plane has enough of both for the groups. PLAIN is checked by its shape. */
tn_status tn__grouped_plane_check(tn__op_call *call, const char *role,
                                  const tn_grouped_plane *plane, const tn__group_list *groups,
                                  const tn__grouped_operand *of);
tn_status tn__grouped_plane_lease(tn__op_call *call, const tn_grouped_plane *plane,
                                  tn_access access, tn__grouped_operand *of);

static inline int tn__grouped_is_plain(const tn__grouped_operand *of) {
    return of->format == TN_FORMAT_PLAIN;
}

/* Scales, with padding, that the groups need exactly. */
int64_t tn__grouped_floats(const tn__group_list *groups, tn_format format, tn_plane plane,
                           int64_t cols);

/* That of group e; each group once, from the first on. */
tn__operand tn__grouped_operand_take(tn__grouped_operand *of, const tn__group_list *groups,
                                     int64_t e);

/* Of rows of a matrix [.., cols] that begin at that of group e: whether they are unaligned. */
int tn__group_is_unaligned(const tn__group_list *groups, int64_t e, int64_t cols, tn_dtype dtype);

/* work->d as the rows of group e in `d`, without an address. */
void tn__grouped_outline_rows(const tn__group_list *groups, int64_t e, const tn_tensor_info *d,
                              tn__gemm_work *work);
/* Its address, in the matrix that `d` is. */
void tn__grouped_address_rows(const tn__group_list *groups, int64_t e, const tn__matrix *d,
                              tn__gemm_work *work);

/* One scratch for all of the works, whose d is outlined. */
tn_status tn__grouped_scratch(tn__op_call *call, tn_scope scope, tn__gemm_work *works,
                              int64_t count);

/* Whether the device takes the addresses of all of the works: asked before the first is launched.
 */
tn_status tn__grouped_require_aligned(const tn__op_call *call, const tn__gemm_work *works,
                                      int64_t count);

#endif
