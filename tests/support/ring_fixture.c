#include "ring_fixture.h"

#include <stdlib.h>
#include <string.h>

/* ---- a unit's bytes: bf16 elements, FP8 elements, scales ------------------------------------- */

static size_t plain_bytes(int rows) { return (size_t)rows * RING_COLS * 2; }

static size_t scale_bytes(int rows) { return (size_t)((rows + 127) / 128) * 4 * sizeof(float); }

static tn_status gather(void *context, const void *shard, void *buffer, tn_stream stream) {
    ring_unit *unit = context;
    ring_fixture *f = unit->fixture;
    if (f->gather_fault > 0 && --f->gather_fault == 0) {
        return TN_FAIL(TN_COMM_ERROR, "a gather that is to fail");
    }
    f->gathers++;
    if (f->on_gather) f->on_gather(f->context, (int)(unit - f->units), buffer);
    return tn_copy(f->t.device, buffer, shard, unit->bytes, stream);
}

static tn_status locate(void *context, int tensor, const void *shard, void *buffer,
                        tn_foreign_memory *out) {
    const ring_unit *unit = context;
    char *at = buffer;
    (void)shard;
    out->plane = tensor == 0 ? TN_PLANE_DATA : TN_PLANE_ROW;
    out->data = tensor == 0 ? at : at + plain_bytes(unit->rows);
    out->data_bytes = tensor == 0 ? plain_bytes(unit->rows) : (size_t)unit->rows * RING_COLS;
    out->scale = tensor == 0 ? NULL : at + unit->scale_offset;
    out->scale_bytes = tensor == 0 ? 0 : scale_bytes(unit->rows);
    return TN_OK;
}

/* ---- making -------------------------------------------------------------------------------- */

void ring_fixture_open(ring_fixture *f, int is_simulated) {
    memset(f, 0, sizeof *f);
    if (is_simulated)
        tensor_fixture_open_sim(&f->t);
    else
        tensor_fixture_open(&f->t);
    f->config = (tn_ring_config)TN_RING_CONFIG_INIT;
    f->config.scope = f->t.scope;
}

static tn_tensor make_weight(const ring_fixture *f, int rows, int is_plain) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.format = is_plain ? TN_FORMAT_PLAIN : TN_FORMAT_FP8_BLOCK_2D;
    config.dtype = is_plain ? TN_BF16 : TN_E4M3;
    config.rank = 2;
    config.shape[0] = rows;
    config.shape[1] = RING_COLS;
    config.name = is_plain ? "plain weight" : "fp8 weight";
    EXPECT_OK(tn_tensor_create(f->t.scope, &config, &tensor));
    return tensor;
}

static tn_tensor make_shard(const ring_fixture *f, size_t bytes) {
    tn_tensor_config config = TN_TENSOR_CONFIG_INIT;
    tn_tensor tensor = {0};
    config.dtype = TN_BYTE;
    config.rank = 1;
    config.shape[0] = (int64_t)bytes;
    config.name = "shard";
    EXPECT_OK(tn_tensor_create(f->t.scope, &config, &tensor));
    return tensor;
}

void ring_fixture_write_shard(ring_fixture *f, int unit, unsigned char contents) {
    f->units[unit].contents = contents;
    EXPECT_OK(tn_plane_fill(f->units[unit].shard, TN_PLANE_DATA, contents, f->t.stream));
}

void ring_fixture_add(ring_fixture *f, int rows, unsigned char contents) {
    assert_true(f->unit_count < RING_UNITS_MAX);
    ring_unit *unit = &f->units[f->unit_count];
    unit->fixture = f;
    unit->rows = rows;
    unit->scale_offset = plain_bytes(rows) + (size_t)rows * RING_COLS;
    unit->bytes = rows == 0 ? 0 : unit->scale_offset + scale_bytes(rows);
    unit->shard = make_shard(f, unit->bytes);
    for (int i = 0; i < RING_WEIGHTS; i++)
        unit->weights[i] = make_weight(f, rows, i == 0);
    ring_fixture_write_shard(f, f->unit_count++, contents);
}

void ring_fixture_make(ring_fixture *f) {
    EXPECT_OK(tn__ring_create(&f->config, &f->ring));
    for (int i = 0; i < f->unit_count; i++) {
        ring_unit *unit = &f->units[i];
        tn__ring_source source = {unit->bytes, (uint64_t)unit->rows, gather, locate, NULL, unit};
        int index = -1;
        EXPECT_OK(tn__ring_unit_add(f->ring, NULL, &source, unit->shard, unit->weights,
                                    RING_WEIGHTS, &index));
        assert_int_equal(index, i);
    }
}

void ring_fixture_start(ring_fixture *f, int count, int rows) {
    for (int i = 0; i < count; i++)
        ring_fixture_add(f, rows, (unsigned char)(i + 1));
    ring_fixture_make(f);
    EXPECT_OK(tn_ring_seal(f->ring));
}

void ring_fixture_close(ring_fixture *f) {
    EXPECT_OK(tn_ring_destroy(f->ring));
    tensor_fixture_close(&f->t);
}

/* ---- looking ------------------------------------------------------------------------------- */

static void expect_full_of(const ring_fixture *f, tn_tensor weight, tn_plane plane,
                           unsigned char contents, tn_stream stream) {
    tn_plane_layout layout;
    EXPECT_OK(tn_plane_layout_get(weight, plane, &layout));
    size_t bytes = layout.data_bytes + layout.scale_bytes;
    unsigned char *read = malloc(bytes + 1);
    assert_non_null(read);
    EXPECT_OK(tn_plane_read(weight, plane, read, layout.data_bytes,
                            layout.scale_bytes ? read + layout.data_bytes : NULL,
                            layout.scale_bytes, stream));
    EXPECT_OK(tn_stream_synchronize(f->t.device, stream));
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(read[i], contents);
    free(read);
}

static int is_simulated(const ring_fixture *f) {
    tn_device_info info = TN_DEVICE_INFO_INIT;
    EXPECT_OK(tn_device_info_get(f->t.device, &info));
    return info.simulated;
}

void ring_fixture_expect_there(ring_fixture *f, int unit, tn_stream stream) {
    ring_unit *of = &f->units[unit];
    assert_int_equal(fixture_state(of->weights[0], TN_PLANE_DATA), TN_PLANE_VALID);
    assert_int_equal(fixture_state(of->weights[1], TN_PLANE_ROW), TN_PLANE_VALID);
    if (is_simulated(f)) return;
    expect_full_of(f, of->weights[0], TN_PLANE_DATA, of->contents, stream);
    expect_full_of(f, of->weights[1], TN_PLANE_ROW, of->contents, stream);
}

void ring_fixture_expect_gone(const ring_fixture *f, int unit) {
    const ring_unit *of = &f->units[unit];
    assert_int_equal(fixture_state(of->weights[0], TN_PLANE_DATA), TN_PLANE_ABSENT);
    fixture_expect_states(of->weights[1], TN_PLANE_ABSENT, TN_PLANE_ABSENT);
}

tn_ring_state ring_fixture_state(const ring_fixture *f, int unit) {
    tn_ring_unit_info info = TN_RING_UNIT_INFO_INIT;
    EXPECT_OK(tn_ring_unit_info_get(f->ring, unit, &info));
    return info.state;
}

size_t ring_fixture_unit_bytes(const ring_fixture *f, int unit) {
    tn_ring_unit_info info = TN_RING_UNIT_INFO_INIT;
    EXPECT_OK(tn_ring_unit_info_get(f->ring, unit, &info));
    return info.bytes;
}

tn_ring_stats ring_fixture_stats(const ring_fixture *f) {
    tn_ring_stats stats = TN_RING_STATS_INIT;
    EXPECT_OK(tn_ring_stats_get(f->ring, &stats));
    return stats;
}
