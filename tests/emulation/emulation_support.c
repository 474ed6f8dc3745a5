/* Twins and the emulated device: see emulation_support.h. */
#include "emulation_support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 512, GUARD_BYTES = 64, GUARD = 0xFF };

emulation_device emulation;

void emulation_begin(void) {
    emulation.device = emulated_open();
    EXPECT_OK(tn_stream_create(emulation.device, &emulation.stream));
}

void emulation_end(void) {
    EXPECT_OK(tn_stream_destroy(emulation.device, emulation.stream));
    EXPECT_OK(tn_device_destroy(emulation.device));
}

int emulation_run_in_orders(int (*run_all)(void)) {
    static const uint64_t orders[] = {0, 1, 20260};
    int failures = 0;
    emulation_begin();
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
        emulated_set_order(orders[i]);
        failures += run_all();
    }
    emulation_end();
    return failures;
}

void emulation_wait(const char *what) {
    char fault[EMULATED_FAULT_BYTES];
    EXPECT_OK(tn_stream_synchronize(emulation.device, emulation.stream));
    emulated_take_fault(fault);
    if (fault[0]) fail_msg("%s: %s", what, fault);
}

/* ---- memory --------------------------------------------------------------------------------- */

/* The end of the block is the end of what is asked for, but for the guard; ASan has its own. */
static size_t guard_bytes(void) {
#if defined(__SANITIZE_ADDRESS__)
    return 0;
#else
    return GUARD_BYTES;
#endif
}

twin twin_make(size_t bytes, size_t offset) {
    twin made = {.bytes = bytes};
    unsigned char **sides[] = {&made.host, &made.emulated};
    for (int side = 0; side < 2; side++) {
        size_t whole = offset + bytes + guard_bytes();
        void *memory = NULL;
        assert_int_equal(posix_memalign(&memory, ALIGNMENT, whole ? whole : 1), 0);
        memset(memory, GUARD, whole);
        made.memory[side] = memory;
        *sides[side] = made.memory[side] + offset;
    }
    return made;
}

void twin_end(twin *of) {
    free(of->memory[0]);
    free(of->memory[1]);
}

static int guard_is_whole(const unsigned char *from, const unsigned char *to) {
    for (; from < to; from++)
        if (*from != GUARD) return 0;
    return 1;
}

void twin_compare(const twin *of, const char *name, const char *what) {
    const unsigned char *end = of->emulated + of->bytes;
    size_t at = 0;
    int is_equal = of->bytes == 0 || memcmp(of->host, of->emulated, of->bytes) == 0;
    int is_guarded =
        guard_is_whole(of->memory[1], of->emulated) && guard_is_whole(end, end + guard_bytes());
    if (!is_equal) {
        while (of->host[at] == of->emulated[at])
            at++;
        print_error("%s, %s: byte %zu of %zu is 0x%02X, the host's 0x%02X\n", name, what, at,
                    of->bytes, of->emulated[at], of->host[at]);
    }
    if (!is_guarded) print_error("%s, %s: writes beyond its operand\n", name, what);
    gpu_count(name, is_equal && is_guarded);
}

/* ---- matrices ------------------------------------------------------------------------------- */

twin_matrix twin_matrix_make(tn_dtype dtype, int64_t rows, int64_t cols) {
    twin_matrix made = {.memory = twin_make((size_t)(rows * cols) * tn_dtype_bytes(dtype), 0)};
    made.host = (tn__matrix){dtype, made.memory.host, rows, cols};
    made.emulated = (tn__matrix){dtype, made.memory.emulated, rows, cols};
    return made;
}

twin_matrix twin_matrix_fill(tn_dtype dtype, int64_t rows, int64_t cols, gpu_fill fill,
                             uint64_t seed) {
    twin_matrix made = twin_matrix_make(dtype, rows, cols);
    gpu_fill_values(fill, dtype, seed, made.memory.host, (size_t)(rows * cols));
    memcpy(made.memory.emulated, made.memory.host, made.memory.bytes);
    return made;
}

void *emulation_parts(int64_t rows, int64_t cols, int numbers) {
    const size_t bytes = tn__norm_parts_bytes(rows, cols, numbers);
    void *parts = malloc(bytes);
    assert_non_null(parts);
    return memset(parts, 0xFF, bytes);
}

void twin_matrix_end(twin_matrix *of) { twin_end(&of->memory); }

void twin_matrix_compare(const twin_matrix *of, const char *name, const char *what) {
    twin_compare(&of->memory, name, what);
}

/* ---- planes --------------------------------------------------------------------------------- */

static float *global_scale_in(unsigned char *scale, const tn_plane_layout *layout) {
    if (!scale || layout->global_scale_offset < 0) return NULL;
    return (float *)(void *)(scale + layout->global_scale_offset);
}

twin_plane twin_plane_make(tn_format format, tn_plane plane, tn_dtype dtype, int64_t m, int64_t k) {
    twin_plane made;
    tn_plane_view view = {.plane = plane, .dtype = dtype};
    EXPECT_OK(tn__format_layout(format, dtype, m, k, plane, &view.layout));
    made.data = twin_make(view.layout.data_bytes, 0);
    made.scale = twin_make(view.layout.scale_bytes, 0);
    made.host = made.emulated = view;
    made.host.data = made.data.host, made.host.scale = made.scale.host;
    made.emulated.data = made.data.emulated, made.emulated.scale = made.scale.emulated;
    made.host.global_scale = global_scale_in(made.scale.host, &view.layout);
    made.emulated.global_scale = global_scale_in(made.scale.emulated, &view.layout);
    return made;
}

void twin_plane_share(twin_plane *of) {
    const tn_plane_layout *layout = &of->host.layout;
    size_t item = tn_dtype_bytes(layout->scale_dtype), valid = (size_t)layout->scale_cols * item;
    size_t row_bytes = (size_t)layout->scale_stride * item;
    for (int64_t row = 0; row < layout->scale_padded_rows; row++) {
        size_t from = row < layout->scale_rows ? valid : 0;
        memset(of->scale.host + (size_t)row * row_bytes + from, 0xFF, row_bytes - from);
    }
    memcpy(of->data.emulated, of->data.host, of->data.bytes);
    memcpy(of->scale.emulated, of->scale.host, of->scale.bytes);
}

void twin_plane_end(twin_plane *of) {
    twin_end(&of->data);
    twin_end(&of->scale);
}

void twin_plane_compare(const twin_plane *of, const char *name, const char *what) {
    char part[192];
    snprintf(part, sizeof part, "%s, %s data", what,
             of->host.plane == TN_PLANE_COL ? "column" : "row");
    twin_compare(&of->data, name, part);
    snprintf(part, sizeof part, "%s, %s scales", what,
             of->host.plane == TN_PLANE_COL ? "column" : "row");
    twin_compare(&of->scale, name, part);
}

/* ---- shapes --------------------------------------------------------------------------------- */

void emulation_each_tail(int step, void (*check)(int64_t rows, int64_t cols, uint64_t seed)) {
    for (int64_t tail = 1; tail <= 129; tail += step) {
        check(tail, 136, (uint64_t)tail);
        check(136, tail, (uint64_t)(200 + tail));
        check(128 + tail, 257 - tail, (uint64_t)(400 + tail));
        check(tail, 130 - tail, (uint64_t)(600 + tail));
    }
}
