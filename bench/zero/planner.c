/* bench_planner: plans beside what they predict, over links of different speed.
 *
 * Ranks are threads. Compute sleeps, and so does a link that all collectives of a rank pass one at
 * a time, a latency and so long a byte: many ranks fit on few cores, and what is measured is when
 * things happen. For each link a step runs by the fixed lookahead of two groups, by the fastest
 * draft of the same memory, and by those that may take more: a quarter, or all, of what is
 * gathered. Then how long it takes to plan steps of many groups. */
#include "../sched/figures.h"

#include <penstock/penstock.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    MOST_RANKS = 4,
    GROUPS = 24,
    MOST_GROUPS = 1000,
    ELEMENTS = 16384, /* of a group */
    GROUP_BYTES = ELEMENTS * (int)sizeof(float),
    WARM = 3,
    STEPS = 15,
    FORWARD_NS = 1000000,
    BACKWARD_NS = 2000000,
    LATENCY_NS = 100000,
    MOST_OPERATIONS = 8 * MOST_GROUPS
};

typedef struct link {
    pthread_mutex_t mutex;
    uint64_t group_ns; /* for the bytes of a group */
} link;

typedef struct slow_comm {
    pst_comm comm;
    pst_comm *inner;
    link *link;
} slow_comm;

typedef struct figures {
    uint32_t ahead;
    size_t keep_bytes;
    double predicted, predicted_exposed, step, exposed; /* ms */
} figures;

enum { PLANS = 4 };
static const struct {
    const char *name;
    int is_fixed;
    size_t room;
} plans[PLANS] = {
    {"two ahead", 1, 0},
    {"no memory", 0, 0},
    {"a quarter", 0, (size_t)GROUPS / 4 * GROUP_BYTES},
    {"all", 0, (size_t)GROUPS *GROUP_BYTES},
};

typedef struct rank {
    int index, size;
    uint32_t groups;
    pst_local_world *world;
    pst_zero *engine;
    link link;
    slow_comm comms[2];
    float *shards[MOST_GROUPS], *gradient, *reduced;
    pst_zero_op operations[MOST_OPERATIONS];
    pst_zero_op_time times[MOST_OPERATIONS];
    figures figures[PLANS];
    double drafts_ms, compile_ms;
    int failed;
} rank;

static uint64_t now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void sleep_for(uint64_t ns) {
    const struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    (void)nanosleep(&time, NULL);
}

static void check(rank *self, pst_status status) {
    if (status != PST_OK && !self->failed)
        fprintf(stderr, "bench_planner: rank %d: %s\n", self->index, pst_status_text(status));
    self->failed |= status != PST_OK;
}

/* ---- a communicator over the link ------------------------------------------------------------ */

static slow_comm *slow(pst_comm *comm) {
    return comm->context;
}

static size_t slow_staging(pst_comm *comm, const pst_collective *collective) {
    pst_comm *inner = slow(comm)->inner;
    return inner->ops->staging_bytes == NULL ? 0 : inner->ops->staging_bytes(inner, collective);
}

static uint64_t bytes_of(const pst_comm *comm, const pst_collective *collective) {
    const int is_data =
        collective->kind == PST_ALL_GATHER || collective->kind == PST_REDUCE_SCATTER;
    return is_data ? collective->source_bytes * (uint64_t)comm->size : 0;
}

/* The lane's own thread sleeps: it has one collective at a time anyway. */
static pst_status slow_start(pst_comm *comm, const pst_collective *collective, pst_stream *stream,
                             void **request) {
    link *link = slow(comm)->link;
    (void)pthread_mutex_lock(&link->mutex);
    sleep_for(LATENCY_NS + link->group_ns * bytes_of(comm, collective) / GROUP_BYTES);
    (void)pthread_mutex_unlock(&link->mutex);
    return slow(comm)->inner->ops->start(slow(comm)->inner, collective, stream, request);
}

static pst_status slow_test(pst_comm *comm, void *request) {
    return slow(comm)->inner->ops->test(slow(comm)->inner, request);
}

static pst_status slow_abort(pst_comm *comm, pst_status status) {
    return slow(comm)->inner->ops->abort(slow(comm)->inner, status);
}

static pst_status slow_status(pst_comm *comm) {
    return slow(comm)->inner->ops->status(slow(comm)->inner);
}

static const char *slow_error(pst_comm *comm) {
    return slow(comm)->inner->ops->error_text(slow(comm)->inner);
}

static void slow_destroy(pst_comm *comm) {
    slow(comm)->inner->ops->destroy(slow(comm)->inner);
}

static const pst_comm_ops slow_ops = {.api_version = PST_COMM_API_VERSION,
                                      .kinds = (1u << PST_COLLECTIVE_KIND_COUNT) - 1,
                                      .name = "slow",
                                      .staging_bytes = slow_staging,
                                      .start = slow_start,
                                      .test = slow_test,
                                      .abort = slow_abort,
                                      .status = slow_status,
                                      .error_text = slow_error,
                                      .destroy = slow_destroy};

/* ---- a training step ------------------------------------------------------------------------- */

static void use(rank *self, uint32_t group, uint64_t compute_ns) {
    void *memory;
    check(self, pst_zero_gather(self->engine, group));
    check(self, pst_zero_wait(self->engine, group, &memory));
    if (self->groups == GROUPS) sleep_for(compute_ns);
}

static void step(rank *self) {
    const void *sources[1] = {self->gradient};
    check(self, pst_zero_begin_forward(self->engine, 1));
    for (uint32_t g = 0; g < self->groups && !self->failed; g++) {
        use(self, g, FORWARD_NS);
        check(self, pst_zero_release(self->engine, g));
    }
    check(self, pst_zero_end_forward(self->engine));
    check(self, pst_zero_begin_backward(self->engine, 1));
    for (uint32_t g = self->groups; g-- > 0 && !self->failed;) {
        use(self, g, BACKWARD_NS);
        check(self, pst_zero_gradients(self->engine, g, sources, PST_FLOAT32));
        check(self, pst_zero_release(self->engine, g));
    }
    check(self, pst_zero_end_backward(self->engine));
    check(self, pst_zero_updated(self->engine));
}

static void steps(rank *self, figures *figures) {
    double ms[STEPS], exposed[STEPS];
    for (int i = 0; i < WARM + STEPS && !self->failed; i++) {
        pst_zero_stats stats = {.size = sizeof stats};
        pst_zero_reset_stats(self->engine);
        const uint64_t begin = now();
        step(self);
        pst_zero_get_stats(self->engine, &stats);
        if (i < WARM) continue;
        ms[i - WARM] = (double)(now() - begin) / 1e6;
        exposed[i - WARM] = (double)stats.exposed_ns / 1e6;
    }
    if (self->failed) return;
    figures->step = bench_median(ms, STEPS);
    figures->exposed = bench_median(exposed, STEPS);
}

/* ---- plans ----------------------------------------------------------------------------------- */

static int is_better(const pst_zero_draft *draft, const pst_zero_draft *best,
                     const pst_zero_draft *first, size_t room) {
    return draft->peak_bytes <= first->peak_bytes + room && draft->step_ns < best->step_ns;
}

static pst_zero_draft choose(rank *self, const pst_zero_compile_options *options, int is_fixed) {
    pst_zero_draft drafts[PST_ZERO_MOST_DRAFTS] = {{0}};
    size_t count = 0, best = 0;
    check(self, pst_zero_make_drafts(self->engine, options, drafts, &count));
    for (size_t i = 1; i < count && !is_fixed; i++)
        if (is_better(&drafts[i], &drafts[best], &drafts[0], options->keep_bytes)) best = i;
    return drafts[best];
}

/* The first pass runs eagerly; the one that is timed follows the plan of it. */
static pst_zero_compile_options record(rank *self) {
    pst_zero_compile_options options = {.size = sizeof options,
                                        .grad = 1,
                                        .operations = self->operations,
                                        .times = self->times,
                                        .prefetch_ahead = 2};
    pst_zero_set_timing(self->engine, 1);
    step(self);
    step(self);
    pst_zero_set_timing(self->engine, 0);
    check(self,
          pst_zero_recorded(self->engine, 1, self->operations, MOST_OPERATIONS, &options.count));
    check(self,
          pst_zero_recorded_times(self->engine, 1, self->times, MOST_OPERATIONS, &options.count));
    return options;
}

static void plan(rank *self, size_t index) {
    pst_zero_compile_options options = record(self);
    if (self->failed) return;
    options.keep_bytes = plans[index].room;
    const pst_zero_draft draft = choose(self, &options, plans[index].is_fixed);
    options.prefetch_ahead = draft.prefetch_ahead;
    options.keep_bytes = draft.keep_bytes;
    check(self, pst_zero_compile(self->engine, &options, NULL));
    self->figures[index] = (figures){.ahead = draft.prefetch_ahead,
                                     .keep_bytes = draft.keep_bytes,
                                     .predicted = (double)draft.step_ns / 1e6,
                                     .predicted_exposed = (double)draft.exposed_ns / 1e6};
    steps(self, &self->figures[index]);
}

/* How long the ranks take to plan. */
static void time_plans(rank *self) {
    pst_zero_compile_options options = record(self);
    options.keep_bytes = (size_t)self->groups / 2 * GROUP_BYTES;
    if (self->failed) return;
    const uint64_t begin = now();
    (void)choose(self, &options, 0);
    const uint64_t drafted = now();
    check(self, pst_zero_compile(self->engine, &options, NULL));
    self->drafts_ms = (double)(drafted - begin) / 1e6;
    self->compile_ms = (double)(now() - drafted) / 1e6;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static pst_status give_target(void *context, uint32_t group, void **memory, int *accumulate) {
    rank *self = context;
    (void)group;
    *memory = self->reduced;
    *accumulate = 0;
    return PST_OK;
}

static void add_group(rank *self, uint32_t g) {
    const pst_parameter_options parameter = {.size = sizeof parameter,
                                             .name = "weight",
                                             .rows = (size_t)self->size,
                                             .row_elements = ELEMENTS / (size_t)self->size,
                                             .trainable = 1};
    const pst_group_options group = {.size = sizeof group,
                                     .name = "block",
                                     .parameters = &g,
                                     .parameter_count = 1,
                                     .dtype = PST_FLOAT32,
                                     .gather_dtype = PST_FLOAT32,
                                     .reduce_dtype = PST_FLOAT32};
    uint32_t index;
    check(self, pst_zero_add_parameter(self->engine, &parameter, &index));
    check(self, pst_zero_add_group(self->engine, &group, &index));
}

static void build(rank *self, pst_runtime *runtime) {
    const pst_zero_options options = {.size = sizeof options,
                                      .stage = 3,
                                      .gather_comm = &self->comms[0].comm,
                                      .reduce_comm = &self->comms[1].comm,
                                      .prefetch_ahead = 2,
                                      .bucket_bytes = 1,
                                      .gradient_target = give_target,
                                      .callback_context = self};
    check(self, pst_zero_create(runtime, &options, &self->engine));
    for (uint32_t g = 0; g < self->groups && !self->failed; g++)
        add_group(self, g);
    if (!self->failed) check(self, pst_zero_seal(self->engine));
    for (uint32_t g = 0; g < self->groups && !self->failed; g++) {
        self->shards[g] = calloc(ELEMENTS, sizeof(float));
        check(self, pst_zero_bind_shard(self->engine, g, self->shards[g]));
    }
}

static void open_comms(rank *self, pst_runtime *runtime) {
    for (int i = 0; i < 2 && !self->failed; i++) {
        slow_comm *one = &self->comms[i];
        check(self, pst_local_comm_create(self->world, runtime, self->index, i, &one->inner));
        one->link = &self->link;
        one->comm = (pst_comm){&slow_ops, one, self->index, self->size};
    }
}

static void train(rank *self, pst_runtime *runtime) {
    self->gradient = calloc(ELEMENTS, sizeof(float));
    self->reduced = calloc(ELEMENTS, sizeof(float));
    open_comms(self, runtime);
    if (!self->failed) build(self, runtime);
    for (size_t i = 0; i < PLANS && !self->failed && self->groups == GROUPS; i++)
        plan(self, i);
    if (!self->failed && self->groups != GROUPS) time_plans(self);
    pst_zero_destroy(self->engine);
    for (int i = 0; i < 2; i++)
        if (self->comms[i].inner != NULL) slow_destroy(&self->comms[i].comm);
    for (uint32_t g = 0; g < self->groups; g++)
        free(self->shards[g]);
    free(self->gradient);
    free(self->reduced);
}

static void *run(void *argument) {
    rank *self = argument;
    const pst_runtime_options options = {
        .size = sizeof options, .rank = self->index, .world_size = self->size};
    pst_runtime *runtime;
    check(self, pst_runtime_create(&options, &runtime));
    if (self->failed) return NULL;
    train(self, runtime);
    pst_runtime_destroy(runtime);
    return NULL;
}

static void print(int size, uint64_t group_ns, const rank *self) {
    for (size_t i = 0; i < PLANS; i++) {
        const figures *found = &self->figures[i];
        printf("%5d %8.2f  %-10s %5u %5zu %10.1f %8.1f %+6.1f%% %10.1f %8.1f\n", size,
               (double)group_ns / 1e6, plans[i].name, found->ahead, found->keep_bytes / GROUP_BYTES,
               found->predicted, found->step, (found->predicted / found->step - 1) * 100,
               found->predicted_exposed, found->exposed);
    }
}

static rank ranks[MOST_RANKS];

static int run_ranks(int size, uint32_t groups, uint64_t group_ns) {
    pthread_t threads[MOST_RANKS];
    pst_runtime *runtime;
    pst_local_world *world;
    int failed = 0;
    if (pst_runtime_create(NULL, &runtime) != PST_OK) return 1;
    if (pst_local_world_create(runtime, size, &world) != PST_OK) return 1;
    for (int i = 0; i < size; i++) {
        memset(&ranks[i], 0, sizeof ranks[i]);
        ranks[i].index = i;
        ranks[i].size = size;
        ranks[i].groups = groups;
        ranks[i].world = world;
        ranks[i].link = (link){.mutex = PTHREAD_MUTEX_INITIALIZER, .group_ns = group_ns};
        failed |= pthread_create(&threads[i], NULL, run, &ranks[i]) != 0;
    }
    for (int i = 0; i < size; i++)
        failed |= pthread_join(threads[i], NULL) != 0 || ranks[i].failed;
    pst_local_world_destroy(world);
    pst_runtime_destroy(runtime);
    return failed;
}

static int predict(int size, uint64_t group_ns) {
    const int failed = run_ranks(size, GROUPS, group_ns);
    if (!failed) print(size, group_ns, &ranks[0]);
    return failed;
}

static int plan_many(uint32_t groups) {
    const int failed = run_ranks(2, groups, 0);
    if (!failed)
        printf("%u groups: drafts %.1f ms, plan %.1f ms\n", groups, ranks[0].drafts_ms,
               ranks[0].compile_ms);
    return failed;
}

int main(void) {
    static const uint64_t links[] = {400000, 900000, 1800000};
    static const uint32_t many[] = {125, 250, 500, 1000};
    int failed = 0;
    printf("%d groups, compute %.0f ms forward and %.0f ms backward a group; steps in ms\n", GROUPS,
           FORWARD_NS / 1e6, BACKWARD_NS / 1e6);
    printf("ranks  ms/group more for  ahead  kept  predicted measured         exposed: predicted, "
           "measured\n");
    for (int size = 2; size <= MOST_RANKS; size += 2)
        for (size_t i = 0; i < sizeof links / sizeof links[0]; i++)
            failed |= predict(size, links[i]);
    for (size_t i = 0; i < sizeof many / sizeof many[0]; i++)
        failed |= plan_many(many[i]);
    return failed;
}
