/* Each lock-free structure under more threads than cores, for a bounded number of rounds. */
#include "sched/queue.h"
#include "sched/thread.h"
#include "tests/random.h"
#include "tests/sched/harness.h"

#include <pthread.h>

#define THREADS 4

static void run_threads(void *(*body)(void *), void *arguments, size_t bytes, size_t count) {
    pthread_t threads[16];
    for (size_t i = 0; i < count; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, body, (char *)arguments + i * bytes), 0);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
}

/* ---- the arrivals of a lane: several push, one moves ------------------------------------ */

#define PUSHES 20000

typedef struct numbered {
    pst__node node;
    size_t thread, number;
} numbered;

typedef struct producer {
    pst__arrivals *arrivals;
    numbered *items;
} producer;

static void *push_all(void *argument) {
    producer *self = argument;
    for (size_t i = 0; i < PUSHES; i++) {
        pst__arrivals_push(self->arrivals, &self->items[i].node);
        if (i % 64 == 0) yield_briefly();
    }
    return NULL;
}

typedef struct consumer {
    producer producers[THREADS];
    pst__arrivals arrivals;
} consumer;

static void arrivals_lose_nothing_and_keep_each_threads_order(void **state) {
    (void)state;
    consumer all = {.arrivals = {{NULL, NULL}}};
    pthread_t threads[THREADS];
    for (size_t t = 0; t < THREADS; t++) {
        numbered *items = calloc(PUSHES, sizeof *items);
        for (size_t i = 0; i < PUSHES; i++) {
            items[i].thread = t;
            items[i].number = i;
        }
        all.producers[t] = (producer){&all.arrivals, items};
        assert_int_equal(pthread_create(&threads[t], NULL, push_all, &all.producers[t]), 0);
    }
    size_t next[THREADS] = {0}, got = 0;
    pst__fifo fifo = {NULL, NULL};
    while (got < (size_t)THREADS * PUSHES) {
        if (pst__arrivals_empty(&all.arrivals))
            yield_briefly();
        else
            pst__arrivals_move(&all.arrivals, &fifo);
        for (; fifo.first != NULL; got++) {
            const numbered *item = (const numbered *)(const void *)fifo.first;
            assert_int_equal(item->number, next[item->thread]++);
            pst__fifo_remove_first(&fifo);
        }
    }
    for (size_t t = 0; t < THREADS; t++) {
        assert_int_equal(pthread_join(threads[t], NULL), 0);
        free(all.producers[t].items);
    }
}

/* ---- parking: every raise of the count ends a sleep ------------------------------------- */

#define ROUNDS 20000

typedef struct ping {
    pst__park park;
    uint64_t value; /* published before the count is raised */
} ping;

typedef struct player {
    ping *mine, *other;
    int begins;
} player;

static void await(ping *mine, uint64_t value) {
    for (;;) {
        const uint32_t seen = pst__park_count(&mine->park);
        if (pst__load_acquire(&mine->value) == value) return;
        pst__park_wait(&mine->park, seen, PST__FOREVER);
    }
}

static void *play(void *argument) {
    player *self = argument;
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        if (!self->begins) await(self->mine, round);
        pst__store_release(&self->other->value, round);
        pst__park_wake(&self->other->park);
        if (self->begins) await(self->mine, round);
    }
    return NULL;
}

static void no_wake_is_lost_between_the_look_and_the_sleep(void **state) {
    (void)state;
    ping pings[THREADS] = {0};
    player players[THREADS];
    for (size_t i = 0; i < THREADS; i += 2) {
        players[i] = (player){&pings[i], &pings[i + 1], 1};
        players[i + 1] = (player){&pings[i + 1], &pings[i], 0};
    }
    run_threads(play, players, sizeof players[0], THREADS);
    for (size_t i = 0; i < THREADS; i++)
        assert_int_equal(pings[i].value, ROUNDS);
}

/* ---- ownership: helpers and workers serve the same lanes -------------------------------- */

#define HELPED_TASKS 20000

typedef struct counter {
    long value; /* plain: the lane's owner is the only one to touch it */
    long inside;
} counter;

static pst_status count_alone(void *argument, pst_stream *stream) {
    counter *self = argument;
    (void)stream;
    if (self->inside != 0) return PST_EBUSY;
    self->inside = 1;
    self->value++;
    self->inside = 0;
    return PST_OK;
}

typedef struct helper {
    pst_runtime *runtime;
    int *stop;
} helper;

static void *help(void *argument) {
    helper *self = argument;
    while (!__atomic_load_n(self->stop, __ATOMIC_ACQUIRE)) {
        (void)pst_run_once(self->runtime, NULL);
        yield_briefly();
    }
    return NULL;
}

static void a_lane_has_one_owner_at_a_time(void **state) {
    (void)state;
    for (int mode = PST_LANE_WORKER; mode <= PST_LANE_PUMPED; mode += PST_LANE_PUMPED) {
        pst_runtime *runtime = open_runtime(60000);
        pst_lane *lane = open_lane(runtime, "lane", (pst_lane_mode)mode);
        pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
        counter count = {0, 0};
        int stop = 0;
        helper helpers[THREADS];
        pthread_t threads[THREADS];
        for (size_t i = 0; i < THREADS; i++) {
            helpers[i] = (helper){runtime, &stop};
            assert_int_equal(pthread_create(&threads[i], NULL, help, &helpers[i]), 0);
        }
        const pst_task_options options = {.size = sizeof options,
                                          .name = "count",
                                          .lane = lane,
                                          .work = {count_alone, NULL, &count}};
        for (int i = 0; i < HELPED_TASKS; i++)
            assert_ok(pst_graph_add(graph, &options, NULL));
        assert_ok(pst_launch_wait((pst_launch){graph, 0}));
        __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
        for (size_t i = 0; i < THREADS; i++)
            assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(count.value, HELPED_TASKS);
        pst_runtime_destroy(runtime);
    }
}

/* ---- the successor list: edges are added while their sources end ------------------------ */

#define RACES 20000
#define WIDTH 4

typedef struct raced {
    long value; /* plain: written by the task, read by its successors */
    struct raced *before[WIDTH];
    int before_count;
} raced;

static pst_status take_next_number(void *argument, pst_stream *stream) {
    raced *self = argument;
    (void)stream;
    long largest = 0;
    for (int i = 0; i < self->before_count; i++) {
        if (self->before[i]->value == 0) return PST_ESTATE; /* it has not run */
        if (self->before[i]->value > largest) largest = self->before[i]->value;
    }
    self->value = largest + 1;
    return PST_OK;
}

static void an_edge_finds_the_list_or_the_end(void **state) {
    (void)state;
    uint64_t random = random_seed("an_edge_finds_the_list_or_the_end");
    pst_runtime *runtime = open_runtime(60000);
    pst_lane *lanes[] = {open_lane(runtime, "a", PST_LANE_WORKER),
                         open_lane(runtime, "b", PST_LANE_WORKER),
                         open_lane(runtime, "c", PST_LANE_WORKER)};
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    raced *tasks = calloc(RACES, sizeof *tasks);
    pst_task handles[WIDTH] = {0}; /* the latest WIDTH tasks */
    for (size_t i = 0; i < RACES; i++) {
        pst_task after[WIDTH];
        pst_task_options options = {.size = sizeof options,
                                    .name = "raced",
                                    .lane = lanes[random_below(&random, 3)],
                                    .work = {take_next_number, NULL, &tasks[i]},
                                    .after = after};
        for (size_t w = 1; w <= WIDTH && w <= i; w++) {
            if (random_below(&random, 2)) continue;
            after[options.after_count++] = handles[(i - w) % WIDTH];
            tasks[i].before[tasks[i].before_count++] = &tasks[i - w];
        }
        pst_task handle;
        assert_ok(pst_graph_add(graph, &options, &handle));
        pst_task_release(handles[i % WIDTH]);
        handles[i % WIDTH] = handle;
    }
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    for (size_t i = 0; i < WIDTH; i++)
        pst_task_release(handles[i]);
    pst_runtime_destroy(runtime);
    free(tasks);
}

/* ---- sealed graphs replayed across workers ---------------------------------------------- */

#define REPLAYS 2000
#define ROWS    8
#define COLUMNS 4

typedef struct cell {
    long value; /* plain */
    const struct cell *before[3];
} cell;

static pst_status advance_cell(void *argument, pst_stream *stream) {
    cell *self = argument;
    (void)stream;
    for (size_t i = 0; i < 3; i++)
        if (self->before[i] != NULL && self->before[i]->value != self->value + 1) return PST_ESTATE;
    self->value++;
    return PST_OK;
}

static void a_stencil_over_workers_is_in_order_in_every_launch(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(60000);
    pst_lane *lanes[COLUMNS];
    for (size_t c = 0; c < COLUMNS; c++)
        lanes[c] = open_lane(runtime, "column", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "stencil");
    static cell cells[ROWS][COLUMNS];
    pst_task tasks[ROWS][COLUMNS];
    memset(cells, 0, sizeof cells);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t c = 0; c < COLUMNS; c++) {
            pst_task after[3];
            pst_task_options options = {.size = sizeof options,
                                        .lane = lanes[c],
                                        .work = {advance_cell, NULL, &cells[r][c]},
                                        .after = after};
            for (size_t n = c == 0 ? 0 : c - 1; r > 0 && n <= c + 1 && n < COLUMNS; n++) {
                cells[r][c].before[options.after_count] = &cells[r - 1][n];
                after[options.after_count++] = tasks[r - 1][n];
            }
            assert_ok(pst_graph_add(graph, &options, &tasks[r][c]));
        }
    assert_ok(pst_graph_seal(graph));
    for (int k = 1; k <= REPLAYS; k++) {
        pst_launch launch;
        assert_ok(pst_graph_launch(graph, &launch));
        assert_ok(pst_launch_wait(launch));
    }
    assert_int_equal(cells[ROWS - 1][COLUMNS - 1].value, REPLAYS);
    pst_runtime_destroy(runtime);
}

/* ---- a host event: one thread records it on two streams in turn, others ask ------------- */

#define RECORDINGS 20000

typedef struct recorded_event {
    pst_device *device;
    pst_event *event;
    uint64_t recorded, finished; /* rounds */
    int stop;
    int is_early; /* somebody found a recording done before its launch was */
} recorded_event;

static pst_status begin_only(void *argument, pst_stream *stream) {
    (void)argument, (void)stream;
    return PST_PENDING;
}

static pst_status finish_round(void *argument) {
    recorded_event *shared = argument;
    /* Release, partner: the acquire in ask_event. */
    pst__store_release(&shared->finished, pst__load_relaxed(&shared->recorded));
    return PST_OK;
}

static void *ask_event(void *argument) {
    recorded_event *shared = argument;
    while (!pst__load_acquire(&shared->stop)) {
        /* Acquire, partner: the release after the recording: it is this one or a later one. */
        const uint64_t round = pst__load_acquire(&shared->recorded);
        pst_status status = shared->device->ops->event_query(shared->device, shared->event);
        if (status == PST_OK && pst__load_acquire(&shared->finished) < round)
            pst__store_relaxed(&shared->is_early, 1);
    }
    return NULL;
}

static void record_rounds(recorded_event *shared, pst_stream *const *streams) {
    const pst_device_ops *ops = shared->device->ops;
    const pst_work work = {begin_only, finish_round, shared};
    for (uint64_t round = 1; round <= RECORDINGS; round++) {
        pst_stream *stream = streams[round % 3 == 0];
        assert_int_equal(ops->launch(shared->device, stream, &work), PST_PENDING);
        assert_int_equal(ops->event_record(shared->device, shared->event, stream), PST_OK);
        pst__store_release(&shared->recorded, round); /* partner: the acquire in ask_event */
        if (round % 64 == 0) yield_briefly();
        assert_int_equal(ops->progress(shared->device, stream), PST_OK);
    }
}

static void an_event_is_recorded_while_others_ask_for_it(void **state) {
    (void)state;
    pst_runtime *runtime;
    assert_int_equal(pst_runtime_create(NULL, &runtime), PST_OK);
    recorded_event shared = {.device = pst_runtime_host(runtime)};
    const pst_device_ops *ops = shared.device->ops;
    pst_stream *streams[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(ops->stream_create(shared.device, 0, &streams[i]), PST_OK);
    assert_int_equal(ops->event_create(shared.device, 0, &shared.event), PST_OK);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ask_event, &shared), 0);
    record_rounds(&shared, streams);
    pst__store_release(&shared.stop, 1); /* partner: the acquire in ask_event */
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_false(shared.is_early);
    ops->event_destroy(shared.device, shared.event);
    for (int i = 0; i < 2; i++)
        ops->stream_destroy(shared.device, streams[i]);
    pst_runtime_destroy(runtime);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arrivals_lose_nothing_and_keep_each_threads_order),
        cmocka_unit_test(no_wake_is_lost_between_the_look_and_the_sleep),
        cmocka_unit_test(a_lane_has_one_owner_at_a_time),
        cmocka_unit_test(an_edge_finds_the_list_or_the_end),
        cmocka_unit_test(an_event_is_recorded_while_others_ask_for_it),
        cmocka_unit_test(a_stencil_over_workers_is_in_order_in_every_launch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
