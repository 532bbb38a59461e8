#include "ranks.h"

#include "comms.h"
#include "leases.h"
#include "memory.h"
#include "system.h"
#include "tests/ops/flat_rank.h"
#include "tests/ops/world.h"
#include "tests/random.h"
#include "threads.h"

#define DEADLINE_NS 200000000u

typedef enum fault_kind {
    FAULT_NONE,
    FAULT_SLOW, /* a rank is late, within the deadline */
    FAULT_MEMORY,
    FAULT_COMM,
    FAULT_STALL,  /* a rank is late by more than the deadline */
    FAULT_DEATH,  /* a rank leaves in the middle */
    FAULT_TARGET, /* a rank has no memory for a group's reduced gradient */
    FAULT_KINDS
} fault_kind;

#define MOST_STEPS 6

/* Whether a step leaves the path of the others, or is broken off: so planned passes are replayed,
 * and leave their programs at any place. All ranks do alike. */
typedef enum course { WHOLE, LEAVES_OUT, FORWARD_BROKEN, BACKWARD_BROKEN, COURSES } course;

typedef struct program {
    model model;
    fault_kind fault;
    int world, steps, at_rank, at_step, at_group; /* the fault is there */
    uint32_t spin;
    course courses[MOST_STEPS];
    size_t course_groups[MOST_STEPS]; /* that is left out, or the last one before the break */
    int silent_rank, silent_group;    /* -1: none; this rank has no gradients for this group */
    int is_flat;                      /* flat shards in place of an engine */
    int is_traced, has_watchdog;
    int kept_memory; /* an engine said that it could not free all */
    rank_state states[COMMS_RANKS];
    pthread_t threads[COMMS_RANKS];
} program;

static int may_fail(const program *self) {
    return self->fault > FAULT_SLOW;
}

/* ---- drawing ---------------------------------------------------------------------------- */

static model draw_model(uint64_t *random) {
    model made = empty_model(1 + (int)random_below(random, 3));
    const size_t groups = 1 + random_below(random, 4);
    for (size_t g = 0; g < groups; g++) {
        for (size_t p = 1 + random_below(random, 2); p > 0; p--)
            add_shape(&made, random_below(random, 6), 1 + random_below(random, 6),
                      random_below(random, 5) != 0);
        close_group(&made);
    }
    made.prefetch_ahead = random_below(random, 4);
    made.bucket_bytes = random_below(random, 2) * 128 * (1 + random_below(random, 4));
    made.part_bytes = random_below(random, 2) * 128;
    made.one_comm = random_once_in(random, 4);
    made.pumped = random_once_in(random, 4);
    made.deadline_ns = DEADLINE_NS;
    return made;
}

static void draw_program(program *self, uint64_t seed, int is_flat) {
    uint64_t random = seed;
    *self = (program){.model = draw_model(&random), .is_flat = is_flat};
    for (size_t p = 0; is_flat && p < self->model.parameter_count; p++)
        self->model.shapes[p].trainable = 1; /* all shards change */
    self->fault = (fault_kind)random_below(&random, FAULT_KINDS);
    self->world = 2 + (int)random_below(&random, COMMS_RANKS - 1);
    self->steps = 1 + (int)random_below(&random, MOST_STEPS);
    self->at_rank = (int)random_below(&random, (uint32_t)self->world);
    self->at_step = (int)random_below(&random, (uint32_t)self->steps);
    self->at_group = (int)random_below(&random, (uint32_t)self->model.group_count);
    self->spin = 1 + random_below(&random, 6);
    self->is_traced = random_once_in(&random, 4);
    self->has_watchdog = random_once_in(&random, 3);
    memory_begin(self->fault == FAULT_MEMORY ? 1 + random_below(&random, 400) : 0);
    comms_begin(random_next(&random), self->fault == FAULT_COMM);
    system_begin(random_once_in(&random, 2) ? 8 : 0, 0);
    leases_begin();
    self->silent_rank =
        random_once_in(&random, 2) ? (int)random_below(&random, (uint32_t)self->world) : -1;
    self->silent_group = (int)random_below(&random, (uint32_t)self->model.group_count);
    for (int step = 0; step < MOST_STEPS; step++) {
        const int is_whole = random_below(&random, 3) != 0;
        self->courses[step] = is_whole ? WHOLE : (course)random_below(&random, COURSES);
        self->course_groups[step] = random_below(&random, (uint32_t)self->model.group_count);
    }
    /* A rank that broke its last pass off would leave in the middle of the others' one. */
    self->courses[self->steps - 1] = WHOLE;
}

/* ---- a rank ----------------------------------------------------------------------------- */

static void note_warning(void *context, pst_log_level level, const char *text) {
    program *self = context;
    if (level == PST_LOG_WARNING && strstr(text, "not freed") != NULL) self->kept_memory = 1;
}

static pst_status open_comm(rank_state *state, int channel, pst_comm **comm) {
    const pst_status status =
        pst_local_comm_create(state->meeting, state->runtime, state->rank, channel, comm);
    if (status == PST_OK) *comm = comms_wrap(*comm, channel);
    return status;
}

static void open_all(rank_state *state) {
    program *self = state->argument;
    pst_runtime_options options = {.size = sizeof options,
                                   .allocator = memory_allocator(),
                                   .log = note_warning,
                                   .log_context = self,
                                   .rank = state->rank,
                                   .world_size = state->world,
                                   .spin = self->spin,
                                   .deadline_ns = DEADLINE_NS,
                                   .trace_records = 64,
                                   .flight_records = 64,
                                   .task_capacity = 4};
    if (self->has_watchdog) options.watchdog_ns = DEADLINE_NS / 2;
    options.watchdog_poisons = may_fail(self);
    CHECK_OK(pst_runtime_create(&options, &state->runtime));
    if (self->is_traced) CHECK_OK(pst_trace_start(state->runtime));
    CHECK_OK(open_comm(state, 0, &state->gather));
    CHECK_OK(open_comm(state, 1, &state->reduce));
}

static void sleep_for(uint64_t nanoseconds) {
    const struct timespec length = {(time_t)(nanoseconds / 1000000000u),
                                    (long)(nanoseconds % 1000000000u)};
    (void)nanosleep(&length, NULL);
}

static int is_at_fault(const rank_state *state, int step) {
    const program *self = state->argument;
    return state->rank == self->at_rank && step == self->at_step;
}

/* What befalls this rank here. 0: it is dead. */
static int meet_fault(rank_state *state, int step, int group) {
    const program *self = state->argument;
    if (!is_at_fault(state, step) || group != self->at_group) return 1;
    if (self->fault == FAULT_SLOW) sleep_for(DEADLINE_NS / 4);
    if (self->fault == FAULT_STALL) sleep_for(DEADLINE_NS * 3);
    return self->fault != FAULT_DEATH;
}

static float mean(const rank_state *state, size_t parameter, size_t element) {
    const program *self = state->argument;
    const size_t *first = state->model->first + self->silent_group;
    unsigned have = 15;
    if (self->silent_rank >= 0 && parameter >= first[0] && parameter < first[1])
        have &= ~(1u << self->silent_rank);
    return mean_gradient(state->world, have, state->version, parameter, element);
}

/* What this step does otherwise than the others, and at which group. */
static course course_of(const rank_state *state, int step, size_t *group) {
    const program *self = state->argument;
    *group = self->course_groups[step];
    return self->courses[step];
}

static void forward_of(rank_state *state, int step) {
    size_t at;
    const course course = course_of(state, step, &at);
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    for (size_t g = 0; g < state->model->group_count; g++) {
        CHECK(meet_fault(state, step, (int)g));
        if (course == LEAVES_OUT && g == at) continue;
        use(state, g);
        CHECK_FINE();
        if (course == FORWARD_BROKEN && g == at) return;
    }
    CHECK_OK(pst_zero_end_forward(state->engine));
}

/* What follows a group that is not reported is reduced by end_backward. */
static void backward_of(rank_state *state, int step) {
    const program *self = state->argument;
    size_t at;
    const course course = course_of(state, step, &at);
    make_gradients(state, state->version);
    if (is_at_fault(state, step) && self->fault == FAULT_TARGET)
        state->target_status[self->at_group] = PST_ENOMEM;
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    for (size_t g = state->model->group_count; g-- > 0;) {
        if (course == LEAVES_OUT && g == at) continue;
        begin_use(state, g);
        CHECK_FINE();
        if (state->rank != self->silent_rank || (int)g != self->silent_group) report(state, g);
        CHECK_FINE();
        end_use(state, g);
        CHECK_FINE();
        if (course == BACKWARD_BROKEN && g == at) return;
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
}

static void check_sums(rank_state *state, int step) {
    size_t at;
    const course course = course_of(state, step, &at);
    for (size_t g = 0; g < state->model->group_count; g++)
        for (size_t p = state->model->first[g]; p < state->model->first[g + 1]; p++)
            if (course != LEAVES_OUT || g != at) check_gradient(state, g, p, mean);
}

static void train_by_course(rank_state *state, int step) {
    size_t at;
    const course course = course_of(state, step, &at);
    forward_of(state, step);
    CHECK_FINE();
    if (course == FORWARD_BROKEN) return;
    fresh_targets(state);
    backward_of(state, step);
    CHECK_FINE();
    if (course == BACKWARD_BROKEN) return;
    if (state->world != 3) check_sums(state, step); /* a third is not exact */
    CHECK_FINE();
    update(state);
}

/* ---- a rank with flat shards ------------------------------------------------------------ */

static void flat_forward(flat_rank *rank, int step) {
    rank_state *state = rank->state;
    for (size_t p = 0; p < state->model->parameter_count; p++) {
        CHECK(meet_fault(state, step, (int)(p % state->model->group_count)));
        flat_use(rank, p, p % 3 == 0 ? PST_BFLOAT16 : PST_FLOAT32);
        CHECK_FINE();
    }
}

static void flat_backward(flat_rank *rank, int is_last) {
    rank_state *state = rank->state;
    CHECK_OK(pst_flat_begin_backward(rank->flat, is_last));
    for (size_t p = state->model->parameter_count; p-- > 0;) {
        flat_use(rank, p, PST_FLOAT32);
        CHECK_FINE();
        flat_report(rank, p);
        CHECK_FINE();
    }
    CHECK_OK(pst_flat_end_backward(rank->flat, 1));
}

static void train_flat(rank_state *state) {
    const program *self = state->argument;
    flat_rank rank;
    open_flat(&rank, state);
    for (int step = 0; step < self->steps && state->failure[0] == '\0'; step++) {
        flat_forward(&rank, step);
        if (state->failure[0] == '\0' && step % 2 == 1) flat_backward(&rank, 0);
        if (state->failure[0] == '\0') flat_backward(&rank, 1);
        if (state->failure[0] == '\0') flat_step(&rank);
    }
    close_flat(&rank);
    if (rank.freed != rank.reports && !self->kept_memory)
        sim_fail("rank %d: %llu gradients were reported, %llu consumed", state->rank,
                 (unsigned long long)rank.reports, (unsigned long long)rank.freed);
}

/* ---- a rank with an engine -------------------------------------------------------------- */

static void train(rank_state *state) {
    const program *self = state->argument;
    build_engine(state);
    for (int step = 0; step < self->steps && state->failure[0] == '\0'; step++)
        train_by_course(state, step);
}

static void *run_one(void *argument) {
    rank_state *state = argument;
    const program *self = state->argument;
    if (state->failure[0] == '\0') (self->is_flat ? train_flat : train)(state);
    free_rank(state);
    return NULL;
}

/* ---- the program ------------------------------------------------------------------------ */

static void train_all(program *self, pst_local_world *meeting) {
    for (int rank = 0; rank < self->world; rank++) {
        self->states[rank] = (rank_state){.rank = rank,
                                          .world = self->world,
                                          .model = &self->model,
                                          .argument = self,
                                          .meeting = meeting};
        open_all(&self->states[rank]);
    }
    for (int rank = 0; rank < self->world; rank++)
        (void)pthread_create(&self->threads[rank], NULL, run_one, &self->states[rank]);
    for (int rank = 0; rank < self->world; rank++)
        (void)pthread_join(self->threads[rank], NULL);
}

static void check_all(const program *self) {
    comms_check();
    for (int rank = 0; rank < self->world && !may_fail(self); rank++)
        if (self->states[rank].failure[0] != '\0') sim_fail("%s", self->states[rank].failure);
    if (!self->kept_memory) memory_end();
    if (self->kept_memory && !may_fail(self)) sim_fail("an engine could not free its memory");
}

static void run(uint64_t seed, int is_flat) {
    static program self;
    pst_runtime *runtime = NULL;
    pst_local_world *meeting = NULL;
    draw_program(&self, seed, is_flat);
    const pst_runtime_options options = {.size = sizeof options,
                                         .allocator = memory_allocator(),
                                         .trace_records = 64,
                                         .flight_records = 64};
    if (pst_runtime_create(&options, &runtime) == PST_OK &&
        pst_local_world_create(runtime, self.world, &meeting) == PST_OK)
        train_all(&self, meeting);
    pst_local_world_destroy(meeting);
    pst_runtime_destroy(runtime);
    check_all(&self);
}

void ranks_run(void *argument) {
    run(*(const uint64_t *)argument, 0);
}

void flat_run(void *argument) {
    run(*(const uint64_t *)argument, 1);
}
