/* What a runtime shows of its lanes on a page, and when. */
#include "tests/sched/harness.h"

#include <penstock/page.h>

#define WATCHDOG_NS 40000000u /* a look in 5 ms, and a post */

typedef struct posted {
    pst_page *page;
    pst_runtime *runtime;
} posted;

static posted open_posted_by(uint64_t watchdog_ns, size_t flight_records) {
    posted posted = {NULL, NULL};
    assert_ok(pst_page_create(&posted.page));
    const pst_runtime_options options = {.size = sizeof options,
                                         .spin = 50,
                                         .watchdog_ns = watchdog_ns,
                                         .flight_records = flight_records,
                                         .page = posted.page};
    assert_ok(pst_runtime_create(&options, &posted.runtime));
    return posted;
}

static posted open_posted(void) {
    return open_posted_by(WATCHDOG_NS, 0);
}

static void close_posted(posted *posted) {
    assert_int_equal(posted->page->magic, PST_PAGE_MAGIC);
    assert_ok(pst_runtime_destroy(posted->runtime));
    assert_int_equal(posted->page->magic, 0);
    pst_page_destroy(posted->page);
}

/* Others write the page meanwhile. */
static uint64_t word(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* The lanes as a reader copies them. */
typedef struct seen {
    uint64_t count, looked;
    pst_page_lane lanes[PST_PAGE_LANES];
} seen;

static seen look(const posted *posted) {
    const pst_page *page = posted->page;
    seen seen;
    uint64_t sequence;
    do {
        sequence = word(&page->sequence);
        const uint64_t *from = (const uint64_t *)(const void *)page->lanes;
        uint64_t *to = (uint64_t *)(void *)seen.lanes;
        for (size_t i = 0; i < PST_PAGE_LANES * sizeof(pst_page_lane) / sizeof *to; i++)
            to[i] = word(&from[i]);
        seen.count = word(&page->lane_count);
        seen.looked = word(&page->looked);
    } while (sequence % 2 != 0 || word(&page->sequence) != sequence);
    return seen;
}

/* Until the lanes are written once more, from a moment behind this call on. */
static seen await_post(const posted *posted) {
    const uint64_t sequence = word(&posted->page->sequence) & ~UINT64_C(1);
    while (word(&posted->page->sequence) < sequence + 4)
        (void)pst_run_once(posted->runtime, NULL);
    return look(posted);
}

static void add_moving(pst_graph *graph, pst_lane *lane, step *self, uint64_t bytes) {
    pst_task_options options = step_options(self, lane);
    options.bytes = bytes;
    options.ticket = 41;
    assert_ok(pst_graph_add(graph, &options, NULL));
}

/* A lane "gather", and this task on it. */
static pst_graph *begin_moving(const posted *posted, step *self) {
    pst_lane *lane = open_lane(posted->runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(posted->runtime, PST_GRAPH_GROWING, "g");
    add_moving(graph, lane, self, 1000);
    return graph;
}

static void end_moving(posted *posted, pst_graph *graph, step *self) {
    __atomic_store_n(&self->asks, 0, __ATOMIC_RELEASE);
    pump(posted->runtime);
    assert_ok(pst_graph_destroy(graph));
    close_posted(posted);
}

static void the_oldest_unfinished_task_is_there_until_it_ends(void **state) {
    (void)state;
    posted posted = open_posted();
    pst_lane *lane = open_lane(posted.runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(posted.runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "layer 7", .asks = -1}, b = {.name = "layer 8"};
    add_moving(graph, lane, &a, 1000);
    add_moving(graph, lane, &b, 500);
    const seen first = await_post(&posted);
    assert_int_equal(first.count, 1);
    assert_string_equal(first.lanes[0].name, "gather");
    assert_string_equal(first.lanes[0].task, "layer 7");
    assert_int_equal(first.lanes[0].ticket, 41);
    assert_int_equal(first.lanes[0].ended, 0);
    assert_true(first.lanes[0].since != 0 && first.lanes[0].since < first.looked);
    assert_int_equal(await_post(&posted).lanes[0].since, first.lanes[0].since);
    const char *command = getenv("PST_TOP"); /* a program that looks at this one meanwhile */
    if (command != NULL) assert_int_equal(system(command), 0);
    __atomic_store_n(&a.asks, 0, __ATOMIC_RELEASE);
    pump(posted.runtime);
    const seen last = await_post(&posted);
    assert_string_equal(last.lanes[0].task, "");
    assert_int_equal(last.lanes[0].since, 0);
    assert_int_equal(last.lanes[0].ended, 2);
    assert_int_equal(last.lanes[0].bytes, 1500);
    assert_true(last.lanes[0].busy_ns > 0);
    assert_ok(pst_graph_destroy(graph));
    close_posted(&posted);
}

static void without_a_record_a_task_is_as_old_as_it_was_seen(void **state) {
    (void)state;
    posted posted = open_posted_by(WATCHDOG_NS, PST_NO_FLIGHT_RECORD);
    step a = {.name = "layer 7", .asks = -1};
    pst_graph *graph = begin_moving(&posted, &a);
    const uint64_t since = await_post(&posted).lanes[0].since;
    assert_true(since != 0);
    assert_int_equal(await_post(&posted).lanes[0].since, since);
    end_moving(&posted, graph, &a);
}

static pst_status block(void *argument, pst_stream *stream) {
    (void)stream;
    while (!__atomic_load_n((int *)argument, __ATOMIC_ACQUIRE))
        (void)sched_yield();
    return PST_OK;
}

static const pst_page_lane *lane_called(const seen *seen, const char *name) {
    for (size_t i = 0; i < seen->count; i++)
        if (strcmp(seen->lanes[i].name, name) == 0) return &seen->lanes[i];
    fail_msg("lane %s is not posted", name);
    return NULL;
}

/* A thread of the runtime's own posts, and finds the worker of two lanes in a task of one. */
static void a_task_that_blocks_its_worker_is_named(void **state) {
    (void)state;
    posted posted = open_posted();
    pst_lane *gather = open_lane_in_order(posted.runtime, "gather", PST_LANE_WORKER), *reduce;
    const pst_lane_options with_it = {.size = sizeof with_it,
                                      .name = "reduce",
                                      .order = PST_LANE_BY_SUBMISSION,
                                      .order_with = gather};
    assert_ok(pst_lane_create(posted.runtime, &with_it, &reduce));
    pst_graph *graph = open_graph(posted.runtime, PST_GRAPH_GROWING, "g");
    step before = {.name = "layer 7"};
    pst_task_release(add_with_ticket(graph, gather, &before, 8, NO_TASK));
    int may_end = 0;
    pst_task task;
    const pst_task_options options = {.size = sizeof options,
                                      .name = "stuck",
                                      .ticket = 9,
                                      .lane = reduce,
                                      .work = {block, NULL, &may_end}};
    assert_ok(pst_graph_add(graph, &options, &task));
    seen found;
    do
        found = await_post(&posted);
    while (found.count < 2 || lane_called(&found, "reduce")->since == 0);
    found = await_post(&posted);
    assert_string_equal(lane_called(&found, "reduce")->task, "stuck");
    assert_int_equal(lane_called(&found, "reduce")->ticket, 9);
    assert_string_equal(lane_called(&found, "gather")->task, ""); /* that has ended */
    assert_int_equal(lane_called(&found, "gather")->since, 0);
    __atomic_store_n(&may_end, 1, __ATOMIC_RELEASE);
    assert_ok(pst_task_wait((pst_launch){graph, 0}, task, NULL));
    do
        found = await_post(&posted);
    while (lane_called(&found, "reduce")->since != 0);
    pst_task_release(task);
    assert_ok(pst_graph_destroy(graph));
    close_posted(&posted);
}

static void lanes_that_have_gone_are_not_there(void **state) {
    (void)state;
    posted posted = open_posted();
    (void)open_lane(posted.runtime, "gather", PST_LANE_PUMPED);
    pst_lane *passing = open_lane(posted.runtime, "passing", PST_LANE_PUMPED);
    assert_int_equal(await_post(&posted).count, 2);
    assert_ok(pst_lane_destroy(passing));
    for (int i = 0; i < 20; i++)
        (void)open_lane(posted.runtime, "one of many", PST_LANE_PUMPED);
    const seen many = await_post(&posted);
    assert_int_equal(many.count, PST_PAGE_LANES);
    for (size_t i = 0; i < PST_PAGE_LANES; i++)
        assert_string_not_equal(many.lanes[i].name, "passing");
    close_posted(&posted);
}

static void a_page_does_not_make_the_watchdog_impatient(void **state) {
    (void)state;
    posted posted = open_posted_by(UINT64_C(3600000000000), 0);
    step a = {.name = "layer 7", .asks = -1};
    pst_graph *graph = begin_moving(&posted, &a);
    (void)await_post(&posted);
    pst_runtime_stats stats = {.size = sizeof stats};
    pst_runtime_get_stats(posted.runtime, &stats);
    assert_int_equal(stats.watchdog_reports, 0);
    end_moving(&posted, graph, &a);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oldest_unfinished_task_is_there_until_it_ends),
        cmocka_unit_test(without_a_record_a_task_is_as_old_as_it_was_seen),
        cmocka_unit_test(a_task_that_blocks_its_worker_is_named),
        cmocka_unit_test(lanes_that_have_gone_are_not_there),
        cmocka_unit_test(a_page_does_not_make_the_watchdog_impatient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
