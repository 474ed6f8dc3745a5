/* The parts of a page that tell a history: curves, map, owners, what is left, shortages. */
#ifndef TENURE_REPORT_HISTORY_H
#define TENURE_REPORT_HISTORY_H

#include <stdio.h>

#include "memory_history.h"

/* Between html_page_begin and html_page_end. Blocks without owners are told apart by size. 0 if
 * there is no memory: then the stream has a part of it. */
int report_history_write(FILE *stream, memory_history *history);

#endif
