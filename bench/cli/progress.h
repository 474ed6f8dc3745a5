/* A progress line on a terminal for work that takes longer than two seconds.
 *
 *     progress bar;
 *     progress_begin(&bar, "replay");
 *     while (...) progress_update(&bar, done, total);     "replay  [#####.....]  52 %  4 s"
 *     progress_end(&bar);                                 the line is cleared
 *
 * Nothing is written if standard error is no terminal, or in the first two seconds; the line is
 * drawn anew at most ten times a second. An update costs one read of the clock. Not thread-safe.
 */
#ifndef TENURE_PROGRESS_H
#define TENURE_PROGRESS_H

#include <stdio.h>

typedef struct progress {
    const char *label;
    FILE *stream; /* NULL: nothing is ever written */
    double (*now_s)(void);
    double begin_s;
    double drawn_s;
    int is_drawn;
} progress;

/* label is not copied. */
void progress_begin(progress *bar, const char *label);

/* total <= 0: how much there is to do is not known, and only the time is shown. */
void progress_update(progress *bar, double done, double total);

/* Clears the line if there is one, so that output may follow. */
void progress_end(progress *bar);

/* As progress_begin with another stream, taken for a terminal, and clock. For tests. */
void progress_begin_on(progress *bar, const char *label, FILE *stream, double (*now_s)(void));

#endif
