/* The progress line; see progress.h. It only ever overwrites its own line. */
#include "progress.h"

#include <time.h>
#include <unistd.h>

#define QUIET_S  2.0 /* quick work shows nothing */
#define REDRAW_S 0.1

enum { BAR_CELLS = 30 };

static double clock_now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void progress_begin_on(progress *bar, const char *label, FILE *stream, double (*now_s)(void)) {
    *bar = (progress){label, stream, now_s, now_s(), 0.0, 0};
}

void progress_begin(progress *bar, const char *label) {
    progress_begin_on(bar, label, isatty(STDERR_FILENO) ? stderr : NULL, clock_now_s);
}

static void draw(const progress *bar, double share, double elapsed_s) {
    char cells[BAR_CELLS + 1];
    int full = (int)(share * BAR_CELLS);
    for (int i = 0; i < BAR_CELLS; i++)
        cells[i] = i < full ? '#' : '.';
    cells[BAR_CELLS] = 0;
    fprintf(bar->stream, "\r\033[K%s  [%s] %3.0f %%  %.0f s", bar->label, cells, share * 100.0,
            elapsed_s);
}

void progress_update(progress *bar, double done, double total) {
    if (!bar->stream) return;
    double now_s = bar->now_s();
    double elapsed_s = now_s - bar->begin_s;
    if (elapsed_s < QUIET_S) return;
    if (bar->is_drawn && now_s - bar->drawn_s < REDRAW_S) return;
    double share = total > 0.0 ? done / total : 0.0;
    if (share > 1.0) share = 1.0;
    if (share < 0.0) share = 0.0;
    if (total > 0.0)
        draw(bar, share, elapsed_s);
    else
        fprintf(bar->stream, "\r\033[K%s  %.0f s", bar->label, elapsed_s);
    fflush(bar->stream);
    bar->drawn_s = now_s;
    bar->is_drawn = 1;
}

void progress_end(progress *bar) {
    if (!bar->stream || !bar->is_drawn) return;
    fputs("\r\033[K", bar->stream);
    fflush(bar->stream);
    bar->is_drawn = 0;
}
