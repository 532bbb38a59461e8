/* The programs that are explored. */
#ifndef PST_TESTS_MODEL_PROGRAMS_H
#define PST_TESTS_MODEL_PROGRAMS_H

#include "explorer.h"

extern const model_program fan_in, fan_in_of_failures, arrivals;
extern const model_program late_edge, late_edge_of_three;
extern const model_program two_helpers, helper_and_worker, helper_in_order;
extern const model_program park_and_submit, wait_and_end, gate_and_cancel;

#endif
