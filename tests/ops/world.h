/* Ranks as threads, each with a runtime, communicators and an engine: on the host device over the
 * communicator `local`, on asynchronous devices (async_device.h) over two kinds of communicators
 * (async_comm.h), and on the device `sim` over `ce`. */
#ifndef PST_TESTS_OPS_WORLD_H
#define PST_TESTS_OPS_WORLD_H

#include "../sanitizer.h"
#include "rank.h"
#include "sched/runtime.h"

#include <penstock/copy_engine.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>

/* How many ranks most models are tested with. Two have all that a sanitizer looks for. */
#if UNDER_SANITIZER
static const int worlds[] = {2};
#else
static const int worlds[] = {1, 2, 4};
#endif

/* Ranks have more threads than a machine has cores: who spins takes the core from those it waits
 * for. (The Python tests spin as long as the runtime does of itself.) */
#define RANK_SPIN 100u

static inline void free_rank(rank_state *state) {
    pst_zero_destroy(state->engine);
    if (state->gather != NULL) state->gather->ops->destroy(state->gather);
    if (state->reduce != NULL) state->reduce->ops->destroy(state->reduce);
    if (state->replicas != NULL) state->replicas->ops->destroy(state->replicas);
    if (state->host != NULL) {
        pst_comm_exchange_close(&state->exchange);
        state->host->ops->destroy(state->host);
    }
    pst_runtime_destroy(state->runtime);
    async_close(state->async);
    for (size_t g = 0; g < MOST_GROUPS; g++) {
        if (state->hosted != NULL) break;
        if (!state->is_in_place[g]) free(state->shards[g]);
        free(state->targets[g]);
    }
    for (size_t p = 0; p < MOST_PARAMETERS; p++)
        free(state->gradients[p]);
    free(state->hosted);
    free(state->own);
}

static inline pst_status open_compute(rank_state *state) {
    const pst_lane_options compute = {.size = sizeof compute,
                                      .name = "compute",
                                      .device = device_of(state),
                                      .mode = PST_LANE_BORROWED};
    return pst_lane_create(state->runtime, &compute, &state->compute);
}

static inline pst_status open_async(rank_state *state) {
    const model *model = state->model;
    const int one_sided = model->device == ON_ONE_SIDED;
    state->async = async_open(mix((uint64_t)state->rank + model->seed), model->delay_us);
    state->gather =
        async_comm_create(&state->boards[0], state->async, state->part, one_sided, model->start_us);
    state->reduce =
        async_comm_create(&state->boards[1], state->async, state->part, one_sided, model->start_us);
    if (model->replicas > 1)
        state->replicas = async_comm_create(state->board_between, state->async, state->replica, 0,
                                            model->start_us);
    return open_compute(state);
}

/* On the rank's own thread, since the ranks meet here. */
static inline pst_status open_ce(rank_state *state) {
    pst_status status =
        pst_local_comm_create(state->meeting, state->runtime, state->rank, 0, &state->host);
    if (status == PST_OK)
        status = pst_comm_exchange_open(state->runtime, state->host, &state->exchange);
    if (status == PST_OK)
        status = pst_ce_create(state->runtime, state->sim, &state->exchange, NULL, &state->gather);
    return status == PST_OK ? open_compute(state) : status;
}

static inline pst_status open_rank(rank_state *state) {
    pst_runtime_options options = {.size = sizeof options,
                                   .rank = state->rank,
                                   .world_size = state->world,
                                   .deadline_ns = state->model->deadline_ns,
                                   .watchdog_ns = state->model->watchdog_ns,
                                   .spin = RANK_SPIN,
                                   .watchdog_poisons = 1};
    pst_status status = pst_runtime_create(&options, &state->runtime);
    if (status != PST_OK || state->model->device == ON_CE) return status;
    if (state->boards != NULL) return open_async(state);
    if (status == PST_OK)
        status =
            pst_local_comm_create(state->meeting, state->runtime, state->part, 0, &state->gather);
    if (status == PST_OK)
        status =
            pst_local_comm_create(state->meeting, state->runtime, state->part, 1, &state->reduce);
    if (status == PST_OK && state->model->replicas > 1)
        status = pst_local_comm_create(state->between, state->runtime, state->replica, 0,
                                       &state->replicas);
    return status;
}

typedef struct rank_start {
    rank_state *state;
    rank_body body;
} rank_start;

static inline void *run_rank(void *argument) {
    const rank_start *start = argument;
    rank_state *state = start->state;
    if (state->model->device == ON_CE && open_ce(state) != PST_OK)
        fail_at(state, __FILE__, __LINE__, "no communicator ce");
    else
        start->body(state);
    if (state->failure[0] == '\0' && !is_on_host(state) && state->engine != NULL &&
        pst_runtime_status(state->runtime) == PST_OK)
        finish_compute(state);
    free_rank(state);
    return NULL;
}

/* What the device that all ranks share does. */
typedef struct sim_course {
    uint64_t most_ns, dice;  /* how much longer operations take: set before the threads begin */
    uint64_t stopped_at;     /* while nothing moves, else 0; atomic */
    uint64_t fault_in;       /* calls to the one that fails, 0: none; atomic */
    const char *fault_after; /* the next record on the thread of such a call fails, once; atomic */
    int arrived, left;       /* ranks at two places where all meet; atomic */
    int ended;               /* ranks whose training has ended with an error; atomic */
    uint64_t sums;           /* that were asked for */
} sim_course;

static inline uint64_t monotonic_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t sim_now(void *context) {
    const sim_course *course = context;
    const uint64_t stopped = __atomic_load_n(&course->stopped_at, __ATOMIC_ACQUIRE);
    return stopped != 0 ? stopped : monotonic_ns();
}

static inline uint64_t sim_jitter(void *context) {
    sim_course *course = context;
    const uint64_t drawn = __atomic_add_fetch(&course->dice, 1, __ATOMIC_RELAXED);
    return course->most_ns == 0 ? 0 : mix(drawn) % course->most_ns;
}

/* A call that is wanted went well, and the record of its end fails. */
static inline int is_end_at_fault(sim_course *course, const char *call) {
    static _Thread_local int is_behind;
    const char *wanted = __atomic_load_n(&course->fault_after, __ATOMIC_ACQUIRE);
    if (wanted == NULL) return 0;
    if (strcmp(call, wanted) == 0) is_behind = 1;
    if (!is_behind || strcmp(call, "event_record") != 0) return 0;
    is_behind = 0;
    __atomic_store_n(&course->fault_after, NULL, __ATOMIC_RELEASE);
    return 1;
}

static inline pst_status sim_fault(void *context, const char *call) {
    sim_course *course = context;
    if (strcmp(call, "sum") == 0) (void)__atomic_add_fetch(&course->sums, 1, __ATOMIC_RELAXED);
    if (is_end_at_fault(course, call)) return PST_EDEVICE;
    if (__atomic_load_n(&course->fault_in, __ATOMIC_RELAXED) == 0) return PST_OK;
    return __atomic_fetch_sub(&course->fault_in, 1, __ATOMIC_RELAXED) == 1 ? PST_EDEVICE : PST_OK;
}

static inline void meet(int *count, int world) {
    (void)__atomic_add_fetch(count, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < world)
        async_sleep(50);
}

/* Nothing moves any more (1), or again (0). On a device that is shared the ranks do it together. */
static inline void pause_device(rank_state *state, int pause) {
    sim_course *course = state->course;
    if (state->sim == NULL) {
        async_pause(state->async, pause);
        return;
    }
    meet(pause ? &course->arrived : &course->left, state->world);
    uint64_t moving = 0; /* the first one stops it */
    if (pause)
        (void)__atomic_compare_exchange_n(&course->stopped_at, &moving, monotonic_ns(), 0,
                                          __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    else
        __atomic_store_n(&course->stopped_at, 0, __ATOMIC_RELEASE);
}

static inline pst_device *open_sim(pst_runtime *runtime, const model *model, sim_course *course) {
    pst_device *device = NULL;
    *course = (sim_course){.most_ns = model->delay_us * 1000u, .dice = mix(model->seed)};
    const pst__sim_options options = {
        .now = sim_now, .jitter = sim_jitter, .fault = sim_fault, .context = course};
    if (model->device == ON_CE)
        (void)pst__sim_create(pst__runtime_heap(runtime), &options, &device);
    return device;
}

/* Where the ranks of each replica meet, and those of all replicas that have the same part. */
typedef struct places {
    int parts, replicas;
    board boards[MOST_RANKS][2], boards_between[MOST_RANKS];
    pst_local_world *meetings[MOST_RANKS], *between[MOST_RANKS];
} places;

static inline void open_places(places *places, pst_runtime *runtime, int parts, int replicas) {
    *places = (struct places){.parts = parts, .replicas = replicas};
    for (int i = 0; i < replicas; i++) {
        board_open(&places->boards[i][0], parts);
        board_open(&places->boards[i][1], parts);
        assert_int_equal(pst_local_world_create(runtime, parts, &places->meetings[i]), PST_OK);
    }
    for (int i = 0; i < parts; i++) {
        board_open(&places->boards_between[i], replicas);
        assert_int_equal(pst_local_world_create(runtime, replicas, &places->between[i]), PST_OK);
    }
}

static inline void close_places(places *places) {
    for (int i = 0; i < places->replicas; i++) {
        board_close(&places->boards[i][0]);
        board_close(&places->boards[i][1]);
        pst_local_world_destroy(places->meetings[i]);
    }
    for (int i = 0; i < places->parts; i++) {
        board_close(&places->boards_between[i]);
        pst_local_world_destroy(places->between[i]);
    }
}

/* Runs `body` on every rank, on the model's device; it may build the engine itself. */
static inline void run_ranks_on_device(int world, const model *model, rank_body body,
                                       void *argument) {
    static const pst_runtime_options plain = {.size = sizeof plain};
    const int replicas = replicas_of(model), parts = world / replicas;
    pst_runtime *runtime;
    places places;
    rank_state *states = calloc((size_t)world, sizeof *states);
    rank_start starts[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    assert_int_equal(pst_runtime_create(&plain, &runtime), PST_OK);
    open_places(&places, runtime, parts, replicas);
    places.boards[0][model->one_comm ? 0 : 1].fail_at = model->fail_at;
    sim_course course;
    pst_device *sim = open_sim(runtime, model, &course);
    for (int rank = 0; rank < world; rank++) {
        rank_state *state = &states[rank];
        const int part = rank % parts, replica = rank / parts;
        *state = (rank_state){.rank = rank,
                              .world = world,
                              .part = part,
                              .replica = replica,
                              .model = model,
                              .argument = argument,
                              .meeting = places.meetings[replica],
                              .between = places.between[part]};
        state->sim = sim;
        state->course = &course;
        if (model->device == ON_ASYNC || model->device == ON_ONE_SIDED) {
            state->boards = places.boards[replica];
            state->board_between = &places.boards_between[part];
        }
        assert_int_equal(open_rank(state), PST_OK);
        starts[rank] = (rank_start){state, body};
    }
    for (int rank = 0; rank < world; rank++)
        assert_int_equal(pthread_create(&threads[rank], NULL, run_rank, &starts[rank]), 0);
    for (int rank = 0; rank < world; rank++)
        (void)pthread_join(threads[rank], NULL);
    close_places(&places);
    if (sim != NULL) sim->ops->destroy(sim);
    pst_runtime_destroy(runtime);
    char failure[512] = "";
    for (int rank = 0; rank < world && failure[0] == '\0'; rank++)
        memcpy(failure, states[rank].failure, sizeof failure);
    free(states);
    if (failure[0] != '\0') fail_msg("device %d: %s", (int)model->device, failure);
}

/* The same on asynchronous devices, with several kinds of communicators. */
static inline void run_ranks_on_all(int world, const model *given, int last, rank_body body,
                                    void *argument) {
    model model = *given;
    for (int device = ON_ASYNC; device <= last; device++) {
        model.device = device;
        run_ranks_on_device(world, &model, body, argument);
    }
}

static inline void run_ranks_async(int world, const model *model, rank_body body, void *argument) {
    run_ranks_on_all(world, model, ON_CE, body, argument);
}

static inline void run_ranks_on_boards(int world, const model *model, rank_body body,
                                       void *argument) {
    run_ranks_on_all(world, model, ON_ONE_SIDED, body, argument);
}

/* The model over ce, for ranks that may give up. */
static inline model model_with_faults(const model *given) {
    model model = *given;
    if (UNDER_SANITIZER) {
        print_message("skipped: where a rank gives up in mid-flight, memory that peers may still "
                      "touch is left behind, which a sanitizer takes for a fault\n");
        skip();
    }
    model.deadline_ns = 5000000000u;
    model.one_comm = 1;
    model.device = ON_CE;
    model.device_segments = 1;
    return model;
}

/* Over ce, 24 times: the argument of `body` is the number of the device's call that it lets fail.
 */
static inline void run_ranks_with_faults(const model *given, rank_body body) {
    model model = model_with_faults(given);
    const uint64_t seed = random_seed("faults");
    for (int run = 0; run < 24; run++) {
        uint64_t call = 1 + mix(seed + (uint64_t)run) % 600; /* from the beginning of training */
        model.delay_us = run % 2 == 0 ? 0 : 20;
        model.seed = (uint64_t)(run / 2);
        run_ranks_on_device(2 + run % 3, &model, body, &call);
    }
}

static inline void run_ranks(int world, const model *model, rank_body body, void *argument) {
    run_ranks_on_device(world, model, body, argument);
    run_ranks_async(world, model, body, argument);
}

#endif
