/* The formats, one row each: which planes exist, their layouts, what derives from what.
 *
 * Everything that differs between formats is answered here; no other file compares a tn_format.
 */
#ifndef TENURE_FORMAT_TABLE_H
#define TENURE_FORMAT_TABLE_H

#include "error.h"
#include "tenure_lifetime.h"

/* Elements that share a scale, along each scaled dimension; and what a tensor's one scale takes. */
enum { TN__BLOCK = 128, TN__MXFP8_BLOCK = 32, TN__NVFP4_BLOCK = 16, TN__GLOBAL_SCALE_BYTES = 16 };

/* Most elements of a tensor: keeps every product of the layouts below inside 64 bits. */
#define TN__ELEMENTS_MAX (INT64_C(1) << 62)

int tn__dtype_is_known(tn_dtype dtype);
TN_SISTER_API int tn__format_is_known(tn_format format);
int tn__plane_is_known(tn_plane plane);
TN_SISTER_API int tn__format_has_plane(tn_format format, tn_plane plane);
TN_SISTER_API int tn__format_takes_dtype(tn_format format, tn_dtype dtype);

/* The plane that `plane` can be made from with nothing but its values: 1 and *source, else 0 and
 * *why in words that complete "it can not be derived: ". */
TN_SISTER_API int tn__format_source(tn_format format, tn_plane plane, tn_plane *source,
                                    const char **why);

/* Whether UNTIL_LAST_USE, the rule of frozen weights, applies to it: 2D. */
int tn__format_has_frozen_rule(tn_format format);

/* Layout of a plane of an M x K tensor. TN_INVALID_ARGUMENT if the format has no such plane or a
 * size does not fit 63 bits. A tensor without elements has neither data nor scales. */
TN_SISTER_API tn_status tn__format_layout(tn_format format, tn_dtype dtype, int64_t m, int64_t k,
                                          tn_plane plane, tn_plane_layout *out);

/* Where some rows of an M x K tensor are in a plane. */
typedef struct tn__slice {
    tn_plane_layout layout; /* of them alone, in place: strides are the plane's */
    size_t data_offset, scale_offset;
    int is_contiguous;        /* the elements; else there is a piece of them in every stored row */
    int is_scale_interleaved; /* there is a piece of the scales in every row of scales */
} tn__slice;

/* Fails with 0, and *why in words that follow "because", if the rows share scales with others. */
TN_SISTER_API int tn__format_slice(tn_format format, tn_dtype dtype, int64_t m, int64_t k,
                                   tn_plane plane, int64_t first, int64_t rows, tn__slice *out,
                                   const char **why);

/* What tn_format_set_derive has set; NULL before. */
tn_derive_function tn__format_derive(tn_format format);

#endif
