/* The trainer's command line. */
#ifndef TENURE_TRAINER_OPTIONS_H
#define TENURE_TRAINER_OPTIONS_H

#include "trainer_run.h"

typedef struct trainer_options {
    tn_driver_kind driver;
    trainer_config config; /* sizes that were not given are 0 */
    const char *csv_path;  /* NULL: not wanted */
    const char *bytes_path;
    const char *texts[TRAINER_FILES_MAX];
    int text_count;
} trainer_options;

/* 0 to go on, else the exit status less one: after --help, and after bad usage, which it tells. */
int trainer_options_parse(int argc, char **argv, trainer_options *options);

/* Sizes that were not given, by device; then what does not fit together is told: 1, or 0. */
int trainer_options_complete(trainer_options *options, const tn_device_info *device);

int trainer_bad_usage(const char *what, const char *value); /* returns 2, the exit status */

#endif
