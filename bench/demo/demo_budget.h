/* What a byte budget for columnwise planes buys: the demo's training run under TN_POLICY_BUDGET at
 * several budgets, from none to all planes, beside the run that keeps them all.
 */
#ifndef TENURE_DEMO_BUDGET_H
#define TENURE_DEMO_BUDGET_H

#include <stdio.h>

#include "demo_train.h"

enum { DEMO_BUDGET_POINTS_MAX = 64 };

/* Trains at points + 1 budgets, each beside a run that keeps all planes, and prints the curve: CSV,
 * or one JSON array. *holds is 1 if every run kept exactly its budget after backward, had the
 * gradients of the run beside it to the bit, and its books balanced. TN_IO if the output could not
 * be written. */
TN_MUST_USE tn_status demo_budget_curve(tn_device *device, const demo_train_config *base,
                                        int points, int json, FILE *stream, int *holds);

#endif
