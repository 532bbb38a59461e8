/* The programs that are explored. */
#ifndef PST_TESTS_MODEL_PROGRAMS_H
#define PST_TESTS_MODEL_PROGRAMS_H

#include "explorer.h"

extern const model_program fan_in, fan_in_of_failures, arrivals;
extern const model_program late_edge, late_edge_of_three;
extern const model_program two_helpers, helper_and_worker, helper_in_order;
extern const model_program park_and_submit, wait_and_end;
extern const model_program gate_and_cancel, sealed_gate_and_cancel;
extern const model_program gate_of_last_launch, cancel_of_last_launch;
extern const model_program growing_gate_and_destroy, sealed_gate_and_destroy;
extern const model_program launch_over_launch, launch_after_launch;
extern const model_program two_launchers, launch_in_callback, destroy_after_wait;
extern const model_program poison_and_launch, poison_and_add, poison_and_add_gate;
extern const model_program flight_behind_flight, late_edge_behind_flight, flight_over_flight;
extern const model_program hook_and_poison, hook_and_two_poisons, hook_removed;
extern const model_program late_wait, loop_and_helper;

#endif
