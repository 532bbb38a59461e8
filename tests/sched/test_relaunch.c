/* What one thread still reads of a launch while another begins the next one. */
#include "tests/sched/queue_device.h"

#include <time.h>

#define EARLY  100
#define ROUNDS 1000

typedef struct fixture {
    queue_device queue;
    pst_runtime *runtime;
    pst_lane *poller, *compute, *early, *host, *other;
} fixture;

/* The worker of `poller` polls the borrowed lanes, and has no tasks of its own. */
static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    queue_open(&f->queue);
    f->runtime = open_runtime(20000);
    f->poller = open_queue_lane(f->runtime, &f->queue, "poller", PST_LANE_WORKER);
    f->compute = open_queue_lane(f->runtime, &f->queue, "compute", PST_LANE_BORROWED);
    f->other = open_queue_lane(f->runtime, &f->queue, "other", PST_LANE_BORROWED);
    f->early = open_queue_lane(f->runtime, &f->queue, "early", PST_LANE_WORKER);
    f->host = open_lane(f->runtime, "host", PST_LANE_WORKER);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    queue_end(&f->queue, f->runtime);
    free(f);
    return 0;
}

static pst_task add(pst_graph *graph, pst_lane *lane, step *self, const pst_task *after,
                    size_t count) {
    pst_task_options options = step_options(self, lane);
    pst_task task;
    options.done = NULL;
    options.after = after;
    options.after_count = count;
    assert_ok(pst_graph_add(graph, &options, &task));
    return task;
}

/* ---- a gate's end beside the next launch's opening ---------------------------------------- */

/* Every second opening records nothing if `alternate`: then what still looks for the event of the
 * launch before finds none, for longer. */
static void open_beside_ends(fixture *f, int alternate) {
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_SEALED, "step");
    step late = {.name = "late"}, last = {.name = "last"};
    static step early[EARLY];
    pst_task gate, behind[EARLY];
    pst_launch launch;
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    const pst_task tl = add(graph, f->host, &late, &gate, 1);
    for (int i = 0; i < EARLY; i++) {
        early[i] = (step){.name = "early"};
        behind[i] = add(graph, f->early, &early[i], &gate, 1);
    }
    (void)add(graph, f->early, &last, behind, EARLY);
    assert_ok(pst_graph_seal(graph));
    for (int round = 0; round < ROUNDS; round++) {
        pst_status status;
        while ((status = pst_graph_launch(graph, &launch)) == PST_EBUSY)
            ;
        assert_ok(status);
        for (int i = 0; i < EARLY; i++) /* nothing of this launch before its gate is open */
            if (runs_of(&early[i]) != round)
                fail_msg("round %d: its gate is closed, and early %d has run %d times", round, i,
                         runs_of(&early[i]));
        assert_ok(pst_gate_open(launch, gate, alternate && round % 2 ? NULL : f->compute));
        /* Tasks in flight from the launch before have to end; where what ends them stands behind
         * this gate's event, that has to come. */
        const time_t begin = time(NULL);
        for (int vain = 1; runs_of(&last) <= round; vain++) {
            if (queue_step(&f->queue, pst_lane_stream(f->early))) continue;
            yield_briefly();
            if (vain % 1000 == 0) queue_drain(&f->queue);
            if (time(NULL) < begin + 20) continue;
            char text[1024];
            (void)pst_runtime_error(f->runtime, text, sizeof text);
            fail_msg("round %d: nothing goes on; runtime %d: %s", round,
                     (int)pst_runtime_status(f->runtime), text);
        }
        queue_drain(&f->queue);
        while (pst_task_test(launch, tl) == PST_PENDING)
            ;
        assert_ok(pst_task_test(launch, tl));
    }
    for (int idle = 0; !idle; (void)pst_run_once(f->runtime, &idle))
        queue_drain(&f->queue);
    assert_ok(pst_launch_wait(launch));
}

static void a_gates_end_comes_beside_its_next_opening(void **state) {
    open_beside_ends(*state, 0);
}

static void a_gates_end_comes_beside_an_opening_without_event(void **state) {
    open_beside_ends(*state, 1);
}

/* ---- a gate is asked about beside its next opening ---------------------------------------- */

typedef struct asker {
    fixture *f;
    pst_graph *graph;
    pst_task gate;
    uint64_t asked;    /* the launch to ask about; 0: none, UINT64_MAX: the end */
    uint64_t answered; /* the last one asked about */
    int by_wait;
} asker;

/* Only this thread makes streams wait. */
static void wait_or_be_refused(const asker *self, pst_launch launch) {
    const size_t waits = self->f->queue.waits;
    const pst_status status = pst_task_wait(launch, self->gate, self->f->other);
    if (status == PST_ESTATE) return; /* opened again since then */
    assert_ok(status);
    assert_int_equal(self->f->queue.waits, waits + 1);
}

static void *ask(void *argument) {
    asker *self = argument;
    uint64_t number;
    while ((number = __atomic_load_n(&self->asked, __ATOMIC_ACQUIRE)) != UINT64_MAX) {
        if (number == self->answered) continue;
        const pst_launch launch = {self->graph, number};
        if (self->by_wait)
            wait_or_be_refused(self, launch);
        else
            (void)pst_task_event(launch, self->gate);
        __atomic_store_n(&self->answered, number, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void ask_beside_openings(fixture *f, int by_wait) {
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_SEALED, "step");
    asker self = {.f = f, .graph = graph, .by_wait = by_wait};
    pst_launch launch;
    pthread_t thread;
    assert_ok(pst_graph_add_gate(graph, "gate", &self.gate));
    assert_ok(pst_graph_seal(graph));
    assert_int_equal(pthread_create(&thread, NULL, ask, &self), 0);
    for (int round = 0; round < ROUNDS; round++) {
        /* What is asked about is the latest launch or the one before. */
        const uint64_t before = round < 1 ? 0 : (uint64_t)round - 1;
        while (__atomic_load_n(&self.answered, __ATOMIC_ACQUIRE) < before)
            ;
        assert_ok(pst_graph_launch(graph, &launch));
        assert_ok(pst_gate_open(launch, self.gate, f->compute));
        __atomic_store_n(&self.asked, launch.number, __ATOMIC_RELEASE);
        queue_drain(&f->queue);
    }
    while (__atomic_load_n(&self.answered, __ATOMIC_ACQUIRE) != launch.number)
        yield_briefly();
    __atomic_store_n(&self.asked, UINT64_MAX, __ATOMIC_RELEASE);
    assert_int_equal(pthread_join(thread, NULL), 0);
    queue_drain(&f->queue);
    assert_ok(pst_launch_wait(launch));
}

static void a_gates_event_is_asked_for_beside_its_next_opening(void **state) {
    ask_beside_openings(*state, 0);
}

static void a_wait_for_a_gate_comes_beside_its_next_opening(void **state) {
    ask_beside_openings(*state, 1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_gates_end_comes_beside_its_next_opening),
        TEST(a_gates_end_comes_beside_an_opening_without_event),
        TEST(a_gates_event_is_asked_for_beside_its_next_opening),
        TEST(a_wait_for_a_gate_comes_beside_its_next_opening),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
