#include "programs.h"
#include "tests/cmocka_all.h"

#include <stdio.h>

static void report(const char *name, const model_outcome *outcome) {
    printf("%s: %lu runs of up to %u steps: %s%s%s\n", name, outcome->runs, outcome->steps,
           outcome->failed == NULL ? "nothing failed" : outcome->failed,
           outcome->failed == NULL ? "" : ", schedule ",
           outcome->failed == NULL ? "" : outcome->schedule);
}

/* Nothing fails as the code stands, and something does with the bug beneath it. */
static void explore(const char *name, const model_program *program, model_plant plant) {
    const model_outcome sound = model_explore(program, MODEL_NO_PLANT);
    report(name, &sound);
    if (sound.failed != NULL) fail_msg("%s: %s", name, sound.failed);
    if (plant == MODEL_NO_PLANT) return;
    const model_outcome planted = model_explore(program, plant);
    report("  with a bug planted", &planted);
    if (planted.failed == NULL) fail_msg("%s: the planted bug was not found", name);
}

#define MODEL_TEST(test, program, plant)                                                           \
    static void test(void **state) {                                                               \
        (void)state;                                                                               \
        explore(#program, &(program), (plant));                                                    \
    }

MODEL_TEST(one_predecessor_is_the_last_to_come, fan_in, MODEL_SPLIT_MODIFY)
MODEL_TEST(a_failure_is_inherited_from_a_predecessor, fan_in_of_failures, MODEL_SPLIT_CAS)
MODEL_TEST(every_node_arrives_once_and_in_its_producers_order, arrivals, MODEL_SPLIT_EXCHANGE)
MODEL_TEST(a_late_edge_meets_the_list_or_the_launch, late_edge, MODEL_SPLIT_EXCHANGE)
MODEL_TEST(late_edges_hold_behind_a_gate_that_opens, late_edge_of_three, MODEL_SPLIT_EXCHANGE)
MODEL_TEST(a_gate_is_opened_or_canceled, gate_and_cancel, MODEL_SPLIT_CAS)
MODEL_TEST(one_thread_at_a_time_serves_a_lane, two_helpers, MODEL_SPLIT_CAS)
MODEL_TEST(a_helper_hands_what_arrived_to_the_worker, helper_and_worker, MODEL_NO_FENCE)
MODEL_TEST(a_helper_hands_what_became_ready_to_the_worker, helper_in_order, MODEL_NO_FENCE)
MODEL_TEST(a_worker_that_parks_hears_of_a_task, park_and_submit, MODEL_LATE_COUNT)
MODEL_TEST(a_thread_that_waits_hears_of_the_end, wait_and_end, MODEL_LATE_COUNT)
MODEL_TEST(a_gate_of_a_sealed_graph_is_opened_or_canceled, sealed_gate_and_cancel, MODEL_SPLIT_CAS)
MODEL_TEST(an_opening_of_the_last_launch_opens_nothing_in_the_next, gate_of_last_launch,
           MODEL_SPLIT_CAS)
MODEL_TEST(a_cancel_of_the_last_launch_cancels_nothing_of_the_next, cancel_of_last_launch,
           MODEL_NO_PLANT)
MODEL_TEST(a_growing_graph_may_go_while_its_gates_opener_returns, growing_gate_and_destroy,
           MODEL_NO_PLANT)
MODEL_TEST(a_sealed_graph_may_go_while_its_gates_opener_returns, sealed_gate_and_destroy,
           MODEL_SPLIT_MODIFY)
MODEL_TEST(a_launch_begins_when_all_of_the_one_before_is_launched, launch_over_launch,
           MODEL_NO_PLANT)
MODEL_TEST(a_launch_can_follow_when_the_wait_for_the_one_before_ends, launch_after_launch,
           MODEL_LATE_COUNT)
MODEL_TEST(launches_of_two_threads_come_to_all_lanes_in_one_order, two_launchers,
           MODEL_SPLIT_EXCHANGE)
MODEL_TEST(a_callback_may_launch_its_graph_again, launch_in_callback, MODEL_SPLIT_CAS)
MODEL_TEST(a_graph_may_go_when_the_wait_for_it_ends, destroy_after_wait, MODEL_LATE_COUNT)
MODEL_TEST(a_launch_comes_before_the_poison_or_is_refused, poison_and_launch, MODEL_NO_PLANT)
MODEL_TEST(what_a_poison_has_stopped_no_added_task_starts_again, poison_and_add, MODEL_NO_PLANT)
MODEL_TEST(a_gate_that_is_added_beside_a_poison_ends_with_it, poison_and_add_gate, MODEL_NO_PLANT)
MODEL_TEST(a_poison_hook_is_called_once, hook_and_poison, MODEL_NO_PLANT)
MODEL_TEST(two_poisons_call_a_hook_once, hook_and_two_poisons, MODEL_NO_PLANT)
MODEL_TEST(a_hook_that_is_removed_does_not_run, hook_removed, MODEL_NO_PLANT)
MODEL_TEST(a_stream_waits_for_a_predecessor_in_flight, flight_behind_flight, MODEL_SPLIT_CAS)
MODEL_TEST(a_late_edge_meets_the_list_or_the_flight, late_edge_behind_flight, MODEL_SPLIT_EXCHANGE)
MODEL_TEST(a_wait_that_nobody_foresaw_holds, late_wait, MODEL_SPLIT_CAS)
MODEL_TEST(a_loop_comes_back_while_a_task_is_in_flight, loop_and_helper, MODEL_NO_PLANT)
MODEL_TEST(a_task_in_flight_is_not_launched_again, flight_over_flight, MODEL_SPLIT_CAS)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_predecessor_is_the_last_to_come),
        cmocka_unit_test(a_failure_is_inherited_from_a_predecessor),
        cmocka_unit_test(every_node_arrives_once_and_in_its_producers_order),
        cmocka_unit_test(a_late_edge_meets_the_list_or_the_launch),
        cmocka_unit_test(late_edges_hold_behind_a_gate_that_opens),
        cmocka_unit_test(a_gate_is_opened_or_canceled),
        cmocka_unit_test(one_thread_at_a_time_serves_a_lane),
        cmocka_unit_test(a_helper_hands_what_arrived_to_the_worker),
        cmocka_unit_test(a_helper_hands_what_became_ready_to_the_worker),
        cmocka_unit_test(a_worker_that_parks_hears_of_a_task),
        cmocka_unit_test(a_thread_that_waits_hears_of_the_end),
        cmocka_unit_test(a_gate_of_a_sealed_graph_is_opened_or_canceled),
        cmocka_unit_test(an_opening_of_the_last_launch_opens_nothing_in_the_next),
        cmocka_unit_test(a_cancel_of_the_last_launch_cancels_nothing_of_the_next),
        cmocka_unit_test(a_growing_graph_may_go_while_its_gates_opener_returns),
        cmocka_unit_test(a_sealed_graph_may_go_while_its_gates_opener_returns),
        cmocka_unit_test(a_launch_begins_when_all_of_the_one_before_is_launched),
        cmocka_unit_test(a_launch_can_follow_when_the_wait_for_the_one_before_ends),
        cmocka_unit_test(launches_of_two_threads_come_to_all_lanes_in_one_order),
        cmocka_unit_test(a_callback_may_launch_its_graph_again),
        cmocka_unit_test(a_graph_may_go_when_the_wait_for_it_ends),
        cmocka_unit_test(a_launch_comes_before_the_poison_or_is_refused),
        cmocka_unit_test(what_a_poison_has_stopped_no_added_task_starts_again),
        cmocka_unit_test(a_gate_that_is_added_beside_a_poison_ends_with_it),
        cmocka_unit_test(a_poison_hook_is_called_once),
        cmocka_unit_test(two_poisons_call_a_hook_once),
        cmocka_unit_test(a_hook_that_is_removed_does_not_run),
        cmocka_unit_test(a_stream_waits_for_a_predecessor_in_flight),
        cmocka_unit_test(a_late_edge_meets_the_list_or_the_flight),
        cmocka_unit_test(a_wait_that_nobody_foresaw_holds),
        cmocka_unit_test(a_loop_comes_back_while_a_task_is_in_flight),
        cmocka_unit_test(a_task_in_flight_is_not_launched_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
