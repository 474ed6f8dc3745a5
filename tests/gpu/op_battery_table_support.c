/* The table that the battery ends with: for each op, the cases of each kind, and the failures. */
#include "op_battery_support.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { OPS_MAX = 64 };

typedef struct op_tally {
    const battery_op *op;
    long cases[BATTERY_COLUMNS], failures[BATTERY_COLUMNS];
} op_tally;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static op_tally tallies[OPS_MAX];
static int tally_count;

static op_tally *tally_of(const battery_op *op) {
    int at = 0;
    while (at < tally_count && tallies[at].op != op)
        at++;
    assert_true(at < OPS_MAX);
    if (at == tally_count) tallies[tally_count++].op = op;
    return &tallies[at];
}

void battery_count(const battery_op *op, battery_column column, int passed) {
    pthread_mutex_lock(&lock);
    op_tally *tally = tally_of(op);
    tally->cases[column]++;
    tally->failures[column] += !passed;
    pthread_mutex_unlock(&lock);
}

static op_tally total(void) {
    op_tally sum = {NULL, {0}, {0}};
    for (int i = 0; i < tally_count; i++) {
        for (int column = 0; column < BATTERY_COLUMNS; column++) {
            sum.cases[column] += tallies[i].cases[column];
            sum.failures[column] += tallies[i].failures[column];
        }
    }
    return sum;
}

long battery_failures(battery_column column) { return total().failures[column]; }

static void print_row(const char *name, const op_tally *row, const op_tally *sum) {
    long failures = 0;
    printf("%-26s", name);
    for (int column = 0; column < BATTERY_COLUMNS; column++) {
        failures += row->failures[column];
        if (sum->cases[column] > 0) printf(" %10ld", row->cases[column]);
    }
    printf(" %10ld\n", failures);
}

/* In the order of the tables, whichever thread counted first. */
static void print_op(const battery_op *op) {
    const op_tally sum = total();
    for (int i = 0; i < tally_count; i++)
        if (tallies[i].op == op) print_row(op->name, &tallies[i], &sum);
}

void battery_print_table(const char *title) {
    static const char *const names[BATTERY_COLUMNS] = {"cases", "skipped", "replays", "reordered",
                                                       "large"};
    const op_tally sum = total();
    printf("\n%-26s", title);
    for (int column = 0; column < BATTERY_COLUMNS; column++)
        if (sum.cases[column] > 0) printf(" %10s", names[column]);
    printf(" %10s\n", "failures");
    battery_each_op(NULL, print_op);
    print_row("total", &sum, &sum);
}
