/* The table of task states: every way through it ends, and what has ended stays so. */
#include "sched/node.h"
#include "tests/cmocka_all.h"

static int can_end_from(int state, int steps_left) {
    if (pst__task_has_ended((pst__task_state)state)) return 1;
    for (int next = 0; next < PST__TASK_STATES && steps_left > 0; next++)
        if (pst__task_may_become((pst__task_state)state, (pst__task_state)next) &&
            can_end_from(next, steps_left - 1))
            return 1;
    return 0;
}

static void every_state_leads_to_an_end(void **state) {
    (void)state;
    for (int s = 0; s < PST__TASK_STATES; s++)
        assert_true(can_end_from(s, PST__TASK_STATES));
}

static void states_are_never_taken_back(void **state) {
    (void)state;
    for (int from = 0; from < PST__TASK_STATES; from++)
        for (int to = 0; to < PST__TASK_STATES; to++)
            if (pst__task_may_become((pst__task_state)from, (pst__task_state)to))
                assert_true(to > from && !pst__task_has_ended((pst__task_state)from));
}

static void what_is_launched_is_not_canceled(void **state) {
    (void)state;
    assert_false(pst__task_may_become(PST__TASK_LAUNCHED, PST__TASK_CANCELED));
    assert_true(pst__task_may_become(PST__TASK_LAUNCHED, PST__TASK_FAILED));
}

static void a_word_holds_number_state_and_status(void **state) {
    (void)state;
#define CHECK_STATUS(name, value, text)                                                            \
    if ((value) <= 0) {                                                                            \
        const uint32_t word = pst__word(0x1abcdefu, PST__TASK_FAILED, PST_##name);                 \
        assert_int_equal(pst__word_number(word), 0xabcdefu);                                       \
        assert_int_equal(pst__word_state(word), PST__TASK_FAILED);                                 \
        assert_int_equal(pst__word_status(word), PST_##name);                                      \
    }
    PST_STATUS_MAP(CHECK_STATUS)
#undef CHECK_STATUS
}

static void the_first_failure_stays_with_a_node(void **state) {
    (void)state;
    pst__node node = {.pending = 3};
    pst__node_inherit(&node, PST_EPEER);
    pst__node_inherit(&node, PST_EIO);
    assert_int_equal(pst__pending_status(node.pending), PST_EPEER);
    assert_false(pst__node_arrive(&node, 1));
    assert_false(pst__node_is_ready(&node));
    assert_true(pst__node_arrive(&node, 2));
    assert_true(pst__node_is_ready(&node));
    assert_int_equal(pst__pending_status(node.pending), PST_EPEER);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_state_leads_to_an_end),
        cmocka_unit_test(states_are_never_taken_back),
        cmocka_unit_test(what_is_launched_is_not_canceled),
        cmocka_unit_test(a_word_holds_number_state_and_status),
        cmocka_unit_test(the_first_failure_stays_with_a_node),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
