/* Text that grows by pieces into bounded memory, as snprintf counts: what reports are written to.
 *
 * Everything is counted, what fits is kept, and kept text always ends with a 0. So a report is
 * measured with no memory at all, or cut where the room ends, by the same code that writes it.
 *
 *     tn__text out = tn__text_begin(buffer, sizeof buffer);
 *     tn__text_add(&out, "%zu blocks", count);
 *     return out.used;                              (the bytes that the whole needs, without the 0)
 */
#ifndef TENURE_TEXT_SINK_H
#define TENURE_TEXT_SINK_H

#include "error.h"

typedef struct tn__text {
    char *text;   /* NULL: it is only counted */
    size_t bytes; /* room at text, the closing 0 included */
    size_t used;  /* of all that was added, whether it fits or not */
} tn__text;

TN_SISTER_API tn__text tn__text_begin(char *text, size_t bytes);
TN_SISTER_API void tn__text_add(tn__text *out, const char *format, ...) TN_PRINTF(2, 3);

/* "1.5 MiB", "512 B". */
TN_SISTER_API void tn__text_add_size(tn__text *out, uint64_t bytes);

/* The text as a JSON string with its quotes, valid whatever bytes it has; null for NULL. */
TN_SISTER_API void tn__text_add_json(tn__text *out, const char *text);

/* Between the items of a JSON list: "," and a line break before all but the first. */
TN_SISTER_API void tn__text_next_item(tn__text *out, int *is_first, const char *indent);

#endif
