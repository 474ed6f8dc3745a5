/* A replay's result as JSON and as a table. */
#ifndef TENURE_REPLAY_OUTPUT_H
#define TENURE_REPLAY_OUTPUT_H

#include <stdio.h>

#include <cjson/cJSON.h>

#include "replay_engine.h"

/* A new object with the keys that docs/design.md promises; the caller deletes it. NULL if there
 * is no memory. */
cJSON *replay_result_to_json(const replay_result *result);

/* 1 on success; 0 if the stream has failed or there is no memory. */
int replay_result_print(const replay_result *result, FILE *stream);

/* Prints a JSON value with a newline. 1 on success. */
int json_print(const cJSON *value, FILE *stream);

#endif
