/* What the trainer prints at the end: the ledger, losses and claims; and its CSV. */
#ifndef TENURE_TRAINER_REPORT_H
#define TENURE_TRAINER_REPORT_H

#include "trainer_run.h"

/* What and where, before the first step. */
void trainer_report_heading(const trainer_config *config, const tn_device_info *device,
                            FILE *stream);

/* *all_hold: whether every claim does. 0 if the stream has failed. */
int trainer_report_print(const trainer_config *config, const trainer_result *result, FILE *stream,
                         int *all_hold);

/* step,loss,held_out: the loss of each step before its update; held_out where it was measured. */
int trainer_report_csv(const trainer_config *config, const trainer_result *result, FILE *stream);

#endif
