/* Layouts of planes that no tensor has, apart: format_table.h and the host kernels' header name
 * the same constant. */
#include "twin_layout_support.h"

#include "format_table.h"
#include "test_support.h"

tn_plane_layout twin_layout(tn_format format, tn_plane plane, tn_dtype dtype, int64_t m,
                            int64_t k) {
    tn_plane_layout layout;
    EXPECT_OK(tn__format_layout(format, dtype, m, k, plane, &layout));
    return layout;
}
