/* The list of live bytes: see trainer_trail.h. */
#include "trainer_trail.h"

#include <stdlib.h>
#include <string.h>

void trainer_trail_begin_step(trainer_trail *trail) {
    trail->position = 0;
    trail->is_first = trail->count == 0;
}

void trainer_trail_end_step(trainer_trail *trail) {
    trail->differences += trail->count - trail->position;
}

static tn_status read_total(tn_scope scope, size_t *out) {
    tn_ledger ledger = TN_LEDGER_INIT;
    TRAINER_TRY(tn_scope_ledger(scope, &ledger));
    *out = ledger.total_bytes;
    return TN_OK;
}

static tn_status append(trainer_trail *trail, const trainer_trail_row *row) {
    if (trail->count == trail->capacity) {
        const int capacity = trail->capacity ? 2 * trail->capacity : 64;
        trainer_trail_row *rows = realloc(trail->rows, (size_t)capacity * sizeof *rows);
        if (!rows) return TN_OUT_OF_HOST_MEMORY;
        trail->rows = rows;
        trail->capacity = capacity;
    }
    trail->rows[trail->count++] = *row;
    return TN_OK;
}

static int rows_equal(const trainer_trail_row *a, const trainer_trail_row *b) {
    return strcmp(a->name, b->name) == 0 && a->model_bytes == b->model_bytes &&
           a->saved_bytes == b->saved_bytes && a->activation_bytes == b->activation_bytes;
}

tn_status trainer_trail_note(trainer_trail *trail, const trainer_model *model, tn_scope saved,
                             tn_scope scratch, const char *name) {
    trainer_trail_row row = {"", 0, 0, 0};
    snprintf(row.name, sizeof row.name, "%s", name);
    TRAINER_TRY(read_total(model->root, &row.model_bytes));
    TRAINER_TRY(read_total(saved, &row.saved_bytes));
    TRAINER_TRY(read_total(scratch, &row.activation_bytes));
    if (trail->is_first) TRAINER_TRY(append(trail, &row));
    if (trail->position >= trail->count || !rows_equal(&trail->rows[trail->position], &row))
        trail->differences++;
    trail->position++;
    return TN_OK;
}

int trainer_trail_print(const trainer_trail *trail, FILE *stream) {
    fprintf(stream, "after,model_bytes,saved_bytes,activation_bytes,live_bytes\n");
    for (int i = 0; i < trail->count; i++) {
        const trainer_trail_row *row = &trail->rows[i];
        fprintf(stream, "%s,%zu,%zu,%zu,%zu\n", row->name, row->model_bytes, row->saved_bytes,
                row->activation_bytes, row->model_bytes + row->saved_bytes + row->activation_bytes);
    }
    return fflush(stream) == 0 && !ferror(stream);
}

void trainer_trail_free(trainer_trail *trail) {
    free(trail->rows);
    *trail = (trainer_trail){0};
}
