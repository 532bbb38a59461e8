#include "launchers.h"

#include "memory.h"
#include "system.h"
#include "tests/random.h"
#include "threads.h"

#include <penstock/graph.h>
#include <string.h>

#define LANES       5u
#define THREADS     3u
#define TASKS       6u
#define ADDED       2u /* to a canceled graph */
#define LAUNCHES    4u
#define DEADLINE_NS 30000000000u
#define PATIENCE    20000u /* pauses */

typedef struct launcher launcher;

typedef struct task {
    launcher *of;
    uint32_t index, asks_first, asks;
    uint64_t sleeps_ns;
    uint32_t before[TASKS], before_count;
    int is_last;                        /* nothing follows */
    int lasts;                          /* until its launcher lets it end */
    int cancels;                        /* its launch, while others may be pushed */
    uint32_t started, finished, called; /* the launch in which that was, from 1 */
    pst_task handle;
} task;

typedef struct world {
    pst_runtime *runtime;
    pst_lane *lanes[LANES];
    uint32_t lane_count;
    int is_held; /* a lane, by a closed gate: all launches are canceled, and end behind it */
    pst_launch held;
    pst_task gate;
} world;

/* A thread, and its graph at the moment. */
struct launcher {
    world *world;
    uint64_t random;
    pthread_t thread;
    pst_graph *graph;
    pst_launch launch;
    task tasks[TASKS + ADDED];
    uint32_t count, begun, relaunches;
    uint32_t left;            /* callbacks of this launch still to come */
    uint32_t added;           /* the first one */
    int is_canceled, may_end; /* may_end: the task that lasts */
};

static void must(const world *self, pst_status status, const char *call) {
    char text[512] = "";
    if (status == PST_OK) return;
    (void)pst_runtime_error(self->runtime, text, sizeof text);
    sim_fail("%s returned %d: %s", call, (int)status, text);
}

static pst_lane *draw_lane(const world *self, uint64_t *random) {
    return self->lanes[random_below(random, self->lane_count)];
}

/* ---- what tasks do ---------------------------------------------------------------------- */

static pst_status finish(task *self) {
    self->finished = self->of->begun;
    return PST_OK;
}

static void cancel(launcher *self) {
    self->is_canceled = 1;
    must(self->world, pst_launch_cancel(self->launch), "pst_launch_cancel");
}

static pst_status start(void *argument, pst_stream *stream) {
    task *self = argument;
    const uint32_t launch = self->of->begun;
    (void)stream;
    if (self->started == launch) sim_fail("task %u ran twice in a launch", self->index);
    for (uint32_t i = 0; i < self->before_count; i++)
        if (self->of->tasks[self->before[i]].finished != launch)
            sim_fail("task %u ran before its predecessor", self->index);
    self->started = launch;
    self->asks = self->asks_first;
    sim_point();
    if (self->cancels) cancel(self->of);
    const struct timespec pause = {0, (long)self->sleeps_ns};
    if (self->sleeps_ns > 0) (void)nanosleep(&pause, NULL);
    return self->asks > 0 || self->lasts ? PST_PENDING : finish(self);
}

static pst_status test(void *argument) {
    task *self = argument;
    sim_point();
    if (self->lasts) return self->of->may_end ? finish(self) : PST_PENDING;
    return self->asks-- > 0 ? PST_PENDING : finish(self);
}

static void begin(launcher *self) {
    self->begun++;
    self->left = self->count;
    must(self->world, pst_graph_launch(self->graph, &self->launch), "pst_graph_launch");
}

/* The last one of a launch may begin the next. */
static void done(void *argument, pst_status status) {
    task *self = argument;
    launcher *of = self->of;
    if (self->called == of->begun) sim_fail("task %u called back twice in a launch", self->index);
    if (status != PST_OK && !(of->is_canceled && status == PST_ECANCELED))
        sim_fail("task %u ended with %d", self->index, (int)status);
    self->called = of->begun;
    sim_point();
    sim_flush(); /* whoever sees the count below sees what was stored before, as with a release */
    if (--of->left > 0 || of->relaunches == 0) return;
    of->relaunches--;
    begin(of);
}

/* ---- a graph ---------------------------------------------------------------------------- */

/* `befores`: one more than it has at most. */
static void draw_task(launcher *self, uint32_t index, uint32_t befores) {
    task *drawn = &self->tasks[index];
    *drawn = (task){.of = self, .index = index, .is_last = 1};
    drawn->cancels = random_once_in(&self->random, self->world->is_held ? 2 : 16);
    if (random_once_in(&self->random, 4)) drawn->asks_first = 1 + random_below(&self->random, 2);
    if (random_once_in(&self->random, 6))
        drawn->sleeps_ns = 10000u << random_below(&self->random, 8);
    drawn->before_count = random_below(&self->random, befores);
    for (uint32_t i = 0; i < drawn->before_count; i++) {
        drawn->before[i] = random_below(&self->random, index);
        self->tasks[drawn->before[i]].is_last = 0;
    }
}

static void add(launcher *self, uint32_t index, pst_lane *lane) {
    task *added = &self->tasks[index];
    pst_task after[TASKS];
    const pst_task_options options = {.size = sizeof options,
                                      .name = "task",
                                      .lane = lane,
                                      .work = {start, test, added},
                                      .done = done,
                                      .done_argument = added,
                                      .after = after,
                                      .after_count = added->before_count};
    for (uint32_t i = 0; i < added->before_count; i++)
        after[i] = self->tasks[added->before[i]].handle;
    must(self->world, pst_graph_add(self->graph, &options, &added->handle), "pst_graph_add");
}

static void build(launcher *self, pst_graph_kind kind) {
    self->begun = self->relaunches = 0;
    self->is_canceled = self->may_end = 0;
    self->count = 1 + random_below(&self->random, TASKS);
    must(self->world, pst_graph_create(self->world->runtime, kind, "graph", &self->graph),
         "pst_graph_create");
    for (uint32_t i = 0; i < self->count; i++)
        draw_task(self, i, i == 0 ? 1 : 3);
    self->tasks[0].lasts = kind == PST_GRAPH_GROWING && random_once_in(&self->random, 2);
    if (kind == PST_GRAPH_GROWING) {
        self->launch = (pst_launch){self->graph, 0};
        self->begun = 1;
        self->left = self->count;
    }
    for (uint32_t i = 0; i < self->count; i++)
        add(self, i, draw_lane(self->world, &self->random));
    if (kind == PST_GRAPH_SEALED) must(self->world, pst_graph_seal(self->graph), "pst_graph_seal");
}

static void check_called(const launcher *self) {
    for (uint32_t i = 0; i < self->count; i++)
        if (self->tasks[i].called != self->begun)
            sim_fail("a wait has ended before the callback of task %u", i);
}

/* ---- ways to see the end ---------------------------------------------------------------- */

static void must_end(const launcher *self, pst_status status, const char *call) {
    if (!(self->is_canceled && status == PST_ECANCELED)) must(self->world, status, call);
}

static void wait_for_all(launcher *self) {
    must_end(self, pst_launch_wait(self->launch), "pst_launch_wait");
    check_called(self);
}

static void wait_for_each_last(launcher *self) {
    for (uint32_t i = 0; i < self->count; i++)
        if (self->tasks[i].is_last)
            must_end(self, pst_task_wait(self->launch, self->tasks[i].handle, NULL),
                     "pst_task_wait");
    check_called(self);
}

static int pump_while(const launcher *self, int (*holds)(const launcher *), uint32_t times) {
    const struct timespec pause = {0, 50000};
    for (; times > 0 && holds(self); times--) {
        (void)pst_run_once(self->world->runtime, NULL);
        (void)nanosleep(&pause, NULL);
    }
    return !holds(self);
}

static int some_are_left(const launcher *self) {
    return self->left > 0 || self->relaunches > 0;
}

/* The callbacks tell, which launch again for some times. */
static void await_callbacks(launcher *self) {
    if (!pump_while(self, some_are_left, PATIENCE)) sim_fail("a launch does not end");
}

static int has_not_begun(const launcher *self) {
    return !self->tasks[0].started;
}

static int added_ones_are_left(const launcher *self) {
    for (uint32_t i = self->added; i < self->count; i++)
        if (!self->tasks[i].called) return 1;
    return 0;
}

/* While one task is in flight the graph stays canceled: what is added then ends, whatever stands
 * before it in the queue of a lane BY_SUBMISSION, as the first one is. */
static void cancel_and_add(launcher *self) {
    const int is_lasting = self->tasks[0].lasts && pump_while(self, has_not_begun, 20);
    if (!self->is_canceled || self->launch.number == 0) cancel(self); /* a task may have */
    if (is_lasting) {
        for (self->added = self->count; self->count < self->added + ADDED; self->count++) {
            draw_task(self, self->count, 1);
            self->left++;
            add(self, self->count, self->world->lanes[0]);
        }
        if (!pump_while(self, added_ones_are_left, PATIENCE))
            sim_fail("what is canceled does not end");
    }
    self->may_end = 1;
    wait_for_all(self);
}

static void see_the_end(launcher *self) {
    if (self->world->is_held || random_once_in(&self->random, 4)) {
        cancel_and_add(self);
        return;
    }
    self->may_end = 1;
    switch (random_below(&self->random, 3)) {
    case 0:
        wait_for_all(self);
        break;
    case 1:
        wait_for_each_last(self);
        break;
    default:
        await_callbacks(self);
    }
}

static void run_sealed(launcher *self) {
    build(self, PST_GRAPH_SEALED);
    for (uint32_t i = random_below(&self->random, LAUNCHES); i > 0; i--) {
        self->is_canceled = 0;
        begin(self);
        see_the_end(self);
        if (self->left > 0) wait_for_all(self); /* callbacks have told, and may still run */
    }
    if (self->world->is_held) return;
    self->is_canceled = 0;
    self->relaunches = random_below(&self->random, LAUNCHES);
    begin(self);
    await_callbacks(self);
}

static void run_growing(launcher *self) {
    build(self, PST_GRAPH_GROWING);
    see_the_end(self);
    for (uint32_t i = 0; i < self->count; i++)
        pst_task_release(self->tasks[i].handle);
}

static void *launch_some(void *argument) {
    launcher *self = argument;
    for (uint32_t i = 1 + random_below(&self->random, 3); i > 0; i--) {
        if (random_once_in(&self->random, 3))
            run_growing(self);
        else
            run_sealed(self);
        must(self->world, pst_graph_destroy(self->graph), "pst_graph_destroy");
    }
    return NULL;
}

/* ---- lanes ------------------------------------------------------------------------------ */

static void open_lane(world *self, uint64_t *random) {
    pst_lane_options options = {.size = sizeof options, .name = "lane"};
    pst_lane *first = self->lane_count == 0 ? NULL : self->lanes[0];
    options.mode = random_below(random, 2) ? PST_LANE_WORKER : PST_LANE_PUMPED;
    options.takes_help = (int)random_below(random, 2);
    options.order = (pst_lane_order)random_below(random, 2);
    if (first == NULL) {
        options.mode = PST_LANE_WORKER;
        options.order = PST_LANE_BY_SUBMISSION;
    } else if (options.order == PST_LANE_BY_SUBMISSION && random_once_in(random, 3)) {
        options.order_with = first;
        options.mode = PST_LANE_WORKER;
    } else if (random_once_in(random, 3)) {
        options.mode = PST_LANE_SHARED;
        options.share_with = first;
    }
    must(self, pst_lane_create(self->runtime, &options, &self->lanes[self->lane_count]),
         "pst_lane_create");
    self->lane_count++;
}

/* Those that are served with the first go before it. */
static void close_lanes(world *self, uint32_t count) {
    for (; count > 0; count--)
        must(self, pst_lane_destroy(self->lanes[--self->lane_count]), "pst_lane_destroy");
}

/* Of a queue in order all that comes behind the gate's task waits for it. */
static void hold_lane(world *self, uint64_t *random) {
    const pst_task_options options = {.size = sizeof options,
                                      .name = "held",
                                      .lane = draw_lane(self, random),
                                      .after = &self->gate,
                                      .after_count = 1};
    pst_graph *graph = NULL;
    must(self, pst_graph_create(self->runtime, PST_GRAPH_SEALED, "held", &graph),
         "pst_graph_create");
    must(self, pst_graph_add_gate(graph, "gate", &self->gate), "pst_graph_add_gate");
    must(self, pst_graph_add(graph, &options, NULL), "pst_graph_add");
    must(self, pst_graph_seal(graph), "pst_graph_seal");
    must(self, pst_graph_launch(graph, &self->held), "pst_graph_launch");
    self->is_held = 1;
}

static void release_lane(world *self) {
    must(self, pst_gate_open(self->held, self->gate, NULL), "pst_gate_open");
    must(self, pst_launch_wait(self->held), "pst_launch_wait");
    must(self, pst_graph_destroy(self->held.graph), "pst_graph_destroy");
    self->is_held = 0;
}

/* ---- the program ------------------------------------------------------------------------ */

static void run_threads(world *self, uint64_t *random) {
    static launcher launchers[THREADS];
    const uint32_t count = 2 + random_below(random, THREADS - 1);
    if (random_once_in(random, 4)) hold_lane(self, random);
    memset(launchers, 0, sizeof launchers);
    for (uint32_t i = 0; i < count; i++) {
        launchers[i].world = self;
        launchers[i].random = random_next(random);
        if (i > 0 && pthread_create(&launchers[i].thread, NULL, launch_some, &launchers[i]) != 0)
            sim_fail("no thread");
    }
    (void)launch_some(&launchers[0]);
    for (uint32_t i = 1; i < count; i++)
        (void)pthread_join(launchers[i].thread, NULL);
    if (self->is_held) release_lane(self);
}

void launchers_run(void *argument) {
    world self = {0};
    uint64_t random = *(const uint64_t *)argument;
    memory_begin(0);
    system_begin(random_once_in(&random, 2) ? 8 : 0, 0);
    const pst_runtime_options options = {.size = sizeof options,
                                         .allocator = memory_allocator(),
                                         .spin = 1 + random_below(&random, 8),
                                         .deadline_ns = DEADLINE_NS,
                                         .trace_records = 64,
                                         .flight_records = 64,
                                         .task_capacity = 1 + random_below(&random, 8)};
    must(&self, pst_runtime_create(&options, &self.runtime), "pst_runtime_create");
    for (uint32_t i = 1 + random_below(&random, LANES); i > 0; i--)
        open_lane(&self, &random);
    run_threads(&self, &random);
    if (random_once_in(&random, 2)) {
        close_lanes(&self, random_below(&random, self.lane_count + 1));
        while (self.lane_count < 2)
            open_lane(&self, &random);
        run_threads(&self, &random);
    }
    must(&self, pst_runtime_destroy(self.runtime), "pst_runtime_destroy");
    memory_end();
}
