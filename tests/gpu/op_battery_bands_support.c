/* Matrices with bands: what a large one must become, told by a compact one.
 *
 * Blocks do not cross tiles of 128 rows, so a tile of a result depends on that tile of the source
 * (and on an amax that all tensors share). The compact matrix has the bands in tiles of its own,
 * and something between them, which every other tile of the large one has. Sums over tiles run in
 * an order that depends on a tile's number mod 8 (tn_bias_gradient): both have the bands at the
 * same.
 *
 *     large     0        1 ... 255     256      257 ... 511     512
 *     compact   0        1 ... 7       8        9 ... 15        16
 *
 * A plane is one or two regions, each of lines, in which a tile has so many bytes: 128 rows, where
 * the rows of the matrix are stored one after the other (then all is one line), or 128 elements of
 * each stored row, where it is stored transposed.
 */
#include "op_battery_bands_support.h"

#include <stdio.h>
#include <string.h>

enum { TILE = 128, REGIONS = 2, CHUNK_BYTES = 64 << 20 };

battery_bands battery_bands_of(int64_t rows) {
    const int64_t last = (rows - 1) / TILE, middle = last / 2 / 8 * 8;
    const int64_t compact_last = 16 + last % 8;
    battery_bands bands = {
        {0, middle, last}, {0, 8, compact_last}, rows, compact_last * TILE + rows - last * TILE};
    return bands;
}

/* Of the compact case, or of what pads the plane behind its last tile. */
static int64_t compact_tile(const battery_bands *bands, int64_t tile) {
    const int64_t tiles = (bands->rows + TILE - 1) / TILE;
    const int64_t compact_tiles = (bands->compact_rows + TILE - 1) / TILE;
    if (tile >= tiles) return compact_tiles + tile - tiles;
    for (int band = 0; band < BATTERY_BANDS; band++)
        if (bands->tile[band] == tile) return bands->compact[band];
    return 1;
}

/* ---- regions -------------------------------------------------------------------------------- */

typedef struct region {
    size_t first, bytes;
    size_t line_bytes, tile_bytes; /* tile_bytes 0: the same in both matrices */
} region;

static region same_in_both(size_t first, size_t bytes) { return (region){first, bytes, bytes, 0}; }

static region by_rows(size_t bytes, size_t tile_bytes) {
    return (region){0, bytes, bytes, tile_bytes};
}

static int is_transposed(tn_format format, tn_plane plane) {
    return plane == TN_PLANE_COL && format != TN_FORMAT_MXFP8;
}

static region data_region(const tn_tensor_info *info, tn_plane plane, int64_t rows,
                          const tn_plane_layout *layout) {
    const size_t element_bits = info->dtype == TN_E2M1 ? 4 : 8;
    if (layout->data_bytes == 0) return same_in_both(0, 0);
    if (info->rows == (rows + TILE - 1) / TILE && info->format == TN_FORMAT_PLAIN)
        return by_rows(layout->data_bytes, layout->row_bytes); /* a row for each tile */
    if (info->rows != rows) return same_in_both(0, layout->data_bytes);
    if (is_transposed(info->format, plane))
        return (region){0, layout->data_bytes, layout->row_bytes, TILE * element_bits / 8};
    return by_rows(layout->data_bytes, TILE * layout->row_bytes);
}

/* Scales of a tile in a stored row of scales that runs along the matrix's rows. */
static size_t scales_along(tn_format format) {
    return format == TN_FORMAT_NVFP4 ? TILE / 16 : format == TN_FORMAT_FP8_BLOCK_1D ? TILE : 1;
}

/* Stored rows of scales that a tile has, where these run along its columns. */
static size_t scale_rows_of_tile(tn_format format, tn_plane plane) {
    if (format == TN_FORMAT_NVFP4) return TILE;
    if (format == TN_FORMAT_MXFP8) return plane == TN_PLANE_ROW ? TILE : TILE / 32;
    return 1;
}

static region scale_region(const tn_tensor_info *info, tn_plane plane, int64_t rows,
                           const tn_plane_layout *layout) {
    const size_t bytes =
        layout->global_scale_offset < 0 ? layout->scale_bytes : (size_t)layout->global_scale_offset;
    const size_t line_bytes = (size_t)layout->scale_stride * tn_dtype_bytes(layout->scale_dtype);
    const int is_1d = info->format == TN_FORMAT_FP8_BLOCK_1D;
    if (info->rows != rows || bytes == 0) return same_in_both(0, bytes);
    if (is_1d ? plane == TN_PLANE_ROW : is_transposed(info->format, plane))
        return (region){0, bytes, line_bytes,
                        scales_along(info->format) * tn_dtype_bytes(layout->scale_dtype)};
    return by_rows(bytes, scale_rows_of_tile(info->format, plane) * line_bytes);
}

/* The data, or the scales and behind them the tensor's own. */
static void regions_of(tn_tensor tensor, tn_plane plane, int64_t rows, int is_scales,
                       region regions[REGIONS]) {
    tn_tensor_info info = TN_TENSOR_INFO_INIT;
    tn_plane_layout layout;
    EXPECT_OK(tn_tensor_info_get(tensor, &info));
    EXPECT_OK(tn_plane_layout_get(tensor, plane, &layout));
    regions[0] = is_scales ? scale_region(&info, plane, rows, &layout)
                           : data_region(&info, plane, rows, &layout);
    const size_t bytes = is_scales ? layout.scale_bytes : layout.data_bytes;
    regions[1] = same_in_both(regions[0].bytes, bytes - regions[0].bytes);
}

/* How many bytes from `at` on in the large region lie together in the compact one, and where. */
static size_t run_at(const battery_bands *bands, const region *large, const region *compact,
                     size_t at, size_t *compact_at) {
    *compact_at = compact->first + at;
    if (large->tile_bytes == 0) return large->bytes - at;
    const size_t line = at / large->line_bytes, in_line = at % large->line_bytes;
    const size_t tile = in_line / large->tile_bytes, in_tile = in_line % large->tile_bytes;
    const size_t to_tile_end = large->tile_bytes - in_tile,
                 to_line_end = large->line_bytes - in_line;
    *compact_at = compact->first + line * compact->line_bytes +
                  (size_t)compact_tile(bands, (int64_t)tile) * large->tile_bytes + in_tile;
    return to_tile_end < to_line_end ? to_tile_end : to_line_end;
}

/* ---- from compact to large ------------------------------------------------------------------ */

void battery_expand(const battery_bands *bands, tn_tensor large, tn_tensor compact, tn_plane plane,
                    int is_scales, const unsigned char *from, unsigned char *to) {
    region of_large[REGIONS], of_compact[REGIONS];
    regions_of(large, plane, bands->rows, is_scales, of_large);
    regions_of(compact, plane, bands->compact_rows, is_scales, of_compact);
    for (int r = 0; r < REGIONS; r++) {
        size_t at = 0, compact_at;
        while (at < of_large[r].bytes) {
            const size_t run = run_at(bands, &of_large[r], &of_compact[r], at, &compact_at);
            memcpy(to + of_large[r].first + at, from + compact_at, run);
            at += run;
        }
    }
}

/* ---- a large result ------------------------------------------------------------------------- */

/* The bytes [at, at + count) of a region, which are in `bytes`, against the compact ones. */
static int chunk_equal(const battery_bands *bands, const region *large, const region *compact,
                       size_t at, size_t count, const unsigned char *bytes,
                       const unsigned char *expected) {
    size_t done = 0, compact_at;
    while (done < count) {
        size_t run = run_at(bands, large, compact, at + done, &compact_at);
        if (run > count - done) run = count - done;
        if (memcmp(bytes + done, expected + compact_at, run) != 0) return 0;
        done += run;
    }
    return 1;
}

static int region_equal(gpu_side *side, const battery_bands *bands, const region *large,
                        const region *compact, const unsigned char *device,
                        const unsigned char *expected) {
    static unsigned char chunk[CHUNK_BYTES];
    if (large->tile_bytes == 0 && large->bytes != compact->bytes) return 0;
    for (size_t at = 0; at < large->bytes; at += CHUNK_BYTES) {
        const size_t left = large->bytes - at, count = left < CHUNK_BYTES ? left : CHUNK_BYTES;
        EXPECT_OK(tn_copy(side->device, chunk, device + large->first + at, count, side->stream));
        EXPECT_OK(tn_stream_synchronize(side->device, side->stream));
        if (!chunk_equal(bands, large, compact, at, count, chunk, expected)) {
            printf("  differs in bytes %zu to %zu of %zu\n", at, at + count, large->bytes);
            return 0;
        }
    }
    return 1;
}

static int part_equal(gpu_side *side, const battery_bands *bands, tn_tensor large,
                      tn_tensor compact, tn_plane plane, int is_scales, const void *device,
                      const void *expected) {
    region of_large[REGIONS], of_compact[REGIONS];
    int equal = 1;
    regions_of(large, plane, bands->rows, is_scales, of_large);
    regions_of(compact, plane, bands->compact_rows, is_scales, of_compact);
    for (int r = 0; r < REGIONS; r++)
        equal = equal && region_equal(side, bands, &of_large[r], &of_compact[r], device, expected);
    return equal;
}

int battery_large_equal(gpu_side *side, const battery_bands *bands, const battery_output *large,
                        const battery_output *compact, const gpu_copy *expected) {
    tn_lease lease;
    tn_plane_view view;
    int equal;
    EXPECT_OK(tn_lease_begin(large->tensor, large->plane, TN_READ, side->stream, &lease, &view));
    if (large->likeness == BATTERY_LIKE_ITSELF) {
        equal = part_equal(side, bands, large->tensor, compact->tensor, large->plane, 0, view.data,
                           expected->data) &&
                part_equal(side, bands, large->tensor, compact->tensor, large->plane, 1, view.scale,
                           expected->scale);
    } else {
        equal = part_equal(side, bands, large->like, compact->like, large->like_plane,
                           large->likeness == BATTERY_LIKE_SCALES, view.data, expected->data);
    }
    EXPECT_OK(tn_lease_end(lease));
    return equal;
}
