/* What the demo says: one table or one JSON object, and whether all of its claims hold. */
#ifndef TENURE_DEMO_REPORT_H
#define TENURE_DEMO_REPORT_H

#include <stdio.h>

#include "demo_train.h"
#include "replay_engine.h"

typedef struct demo_report {
    tn_device_info device;
    demo_shape shape;
    int steps;
    const char *text_name;
    const char *trace_name;
    int is_shipped_trace; /* 1: the one that PyTorch's figures are known of */
    replay_result replay;
    demo_train_result keep;    /* columnwise planes kept */
    demo_train_result release; /* released after dgrad */
    double step_time_ratio;    /* of the second to the first, the median over the steps */
} demo_report;

/* Every claim of the demo by name, in order; returns how many there are. `holds` is 0 or 1. */
typedef struct demo_claim {
    const char *words;
    int holds;
} demo_claim;
enum { DEMO_CLAIM_MAX = 12 };
int demo_report_claims(const demo_report *report, demo_claim claims[DEMO_CLAIM_MAX]);

/* 1 if the output was written whole. */
int demo_report_print(const demo_report *report, FILE *stream);
int demo_report_print_json(const demo_report *report, FILE *stream);

#endif
