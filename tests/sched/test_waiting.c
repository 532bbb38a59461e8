/* What a thread that waits does meanwhile: it calls its caller's hook, which may end the wait. */
#include "tests/sched/harness.h"

typedef struct watch {
    pst_runtime *runtime;
    step *ends; /* at the third call; NULL: the runtime is poisoned then */
    int calls;
    uint64_t waited_ns;
    char what[128];
    pst_recent recent[16];
    size_t recent_count;
} watch;

static void look(void *context, const pst_waiting *waiting) {
    watch *self = context;
    assert_true(waiting->waited_ns > self->waited_ns);
    self->waited_ns = waiting->waited_ns;
    (void)snprintf(self->what, sizeof self->what, "%s %s %llu", waiting->lane, waiting->task,
                   (unsigned long long)waiting->ticket);
    self->recent_count = pst_runtime_recent(self->runtime, self->recent, 16);
    if (++self->calls < 3) return;
    if (self->ends != NULL)
        __atomic_store_n(&self->ends->asks, 0, __ATOMIC_RELEASE);
    else
        pst_runtime_poison(self->runtime, PST_ECANCELED, "a signal came");
}

static pst_lane *open_watched(watch *self, pst_lane_mode mode) {
    const pst_runtime_options options = {.size = sizeof options,
                                         .spin = 50,
                                         .deadline_ns = 20000000000u,
                                         .waiting = look,
                                         .waiting_context = self};
    assert_ok(pst_runtime_create(&options, &self->runtime));
    return open_lane_in_order(self->runtime, "gather", mode);
}

/* The first task ends, the second one does not by itself; the second is waited for. */
static pst_status wait_for_second(watch *self, pst_lane *lane, step steps[2]) {
    pst_graph *graph = open_graph(self->runtime, PST_GRAPH_GROWING, "g");
    pst_task first = add_with_ticket(graph, lane, &steps[0], 54, NO_TASK);
    pst_task second = add_with_ticket(graph, lane, &steps[1], 55, NO_TASK);
    const pst_status status = pst_task_wait((pst_launch){graph, 0}, second, NULL);
    pst_task_release(first);
    pst_task_release(second);
    return status;
}

static void a_long_wait_calls_the_hook_and_says_what_it_is_for(void **state) {
    (void)state;
    const pst_lane_mode modes[] = {PST_LANE_WORKER, PST_LANE_PUMPED};
    for (int i = 0; i < 2; i++) {
        step steps[] = {{.name = "blocks.3"}, {.name = "root", .asks = -1}};
        watch self = {.ends = &steps[1]};
        pst_lane *lane = open_watched(&self, modes[i]);
        assert_ok(wait_for_second(&self, lane, steps));
        assert_int_equal(self.calls, 3);
        assert_string_equal(self.what, "gather root 55");
        pst_runtime_destroy(self.runtime);
    }
}

static void the_hook_may_end_the_wait_by_a_poison(void **state) {
    (void)state;
    step steps[] = {{.name = "blocks.3"}, {.name = "root", .asks = -1}};
    watch self = {.ends = NULL};
    pst_lane *lane = open_watched(&self, PST_LANE_WORKER);
    assert_status(wait_for_second(&self, lane, steps), PST_ECANCELED);
    assert_int_equal(self.calls, 3);
    assert_error(self.runtime, "a signal came");
    __atomic_store_n(&steps[1].asks, 0, __ATOMIC_RELEASE);
    pst_runtime_destroy(self.runtime);
}

static void the_last_launches_of_a_lane_can_be_read_while_it_works(void **state) {
    (void)state;
    step steps[] = {{.name = "blocks.3"}, {.name = "root", .asks = -1}};
    watch self = {.ends = &steps[1]};
    pst_lane *lane = open_watched(&self, PST_LANE_WORKER);
    assert_ok(wait_for_second(&self, lane, steps));
    assert_int_equal(self.recent_count, 2);
    for (int i = 0; i < 2; i++) {
        assert_string_equal(self.recent[i].lane, "gather");
        assert_string_equal(self.recent[i].task, steps[1 - i].name);
        assert_int_equal(self.recent[i].ticket, 55 - i);
    }
    assert_int_equal(pst_runtime_recent(self.runtime, self.recent, 1), 1);
    assert_int_equal(pst_runtime_recent(NULL, self.recent, 1), 0);
    pst_runtime_destroy(self.runtime);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_long_wait_calls_the_hook_and_says_what_it_is_for),
        cmocka_unit_test(the_hook_may_end_the_wait_by_a_poison),
        cmocka_unit_test(the_last_launches_of_a_lane_can_be_read_while_it_works),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
