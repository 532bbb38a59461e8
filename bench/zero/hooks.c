/* bench_hooks: how long the calls of a pass hold the thread that makes them. Between two of them
 * the thread yields for a while, so that what was submitted has ended when it is asked for. */
#include "../sched/figures.h"

#include <penstock/penstock.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS = 2, GROUPS = 36, ROWS = 8, COLUMNS = 16, WARM = 8, STEPS = 40, ROUNDS = 5 };

typedef enum call {
    GATHER,    /* pst_zero_gather: a use begins */
    WAIT,      /* pst_zero_wait: what is gathered has landed */
    RELEASE,   /* pst_zero_release */
    GRADIENTS, /* pst_zero_gradients: the copy into a bucket, too */
    CALLS
} call;

static const char *const names[CALLS] = {"gather", "wait", "release", "gradients"};

enum { MOST = ROUNDS * STEPS * GROUPS * 2 };

typedef struct times {
    double values[CALLS][MOST];
    size_t counts[CALLS];
} times;

typedef struct rank {
    int index;
    pst_local_world *world;
    pst_zero *engine;
    float *shards[GROUPS];
    float gradient[ROWS * COLUMNS], reduced[GROUPS][ROWS * COLUMNS];
    times *times; /* NULL: not this rank's, or warming up */
    int failed;
} rank;

static times eager, replayed;
static pst_local_world *world;
static uint64_t replayed_passes;

static uint64_t now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void compute(void) {
    const uint64_t until = now() + 30000;
    while (now() < until)
        (void)sched_yield();
}

static void check(rank *self, pst_status status) {
    if (status != PST_OK && !self->failed)
        fprintf(stderr, "bench_hooks: rank %d: %s\n", self->index, pst_status_text(status));
    self->failed |= status != PST_OK;
}

static void note(rank *self, call which, uint64_t begin) {
    const uint64_t end = now();
    if (self->times == NULL || self->times->counts[which] == MOST) return;
    self->times->values[which][self->times->counts[which]++] = (double)(end - begin);
}

#define TIMED(self, which, call_)                                                                  \
    do {                                                                                           \
        const uint64_t begin_ = now();                                                             \
        check(self, call_);                                                                        \
        note(self, which, begin_);                                                                 \
    } while (0)

static void begin_use(rank *self, uint32_t group) {
    void *memory;
    TIMED(self, GATHER, pst_zero_gather(self->engine, group));
    if (self->times != NULL) compute(); /* the first one of a pass was not gathered ahead */
    TIMED(self, WAIT, pst_zero_wait(self->engine, group, &memory));
    compute();
}

static void step(rank *self) {
    const void *sources[1] = {self->gradient};
    check(self, pst_zero_begin_forward(self->engine, 1));
    for (uint32_t g = 0; g < GROUPS && !self->failed; g++) {
        begin_use(self, g);
        TIMED(self, RELEASE, pst_zero_release(self->engine, g));
    }
    check(self, pst_zero_end_forward(self->engine));
    check(self, pst_zero_begin_backward(self->engine, 1));
    for (uint32_t g = GROUPS; g-- > 0 && !self->failed;) {
        begin_use(self, g);
        TIMED(self, GRADIENTS, pst_zero_gradients(self->engine, g, sources, PST_FLOAT32));
        TIMED(self, RELEASE, pst_zero_release(self->engine, g));
    }
    check(self, pst_zero_end_backward(self->engine));
    check(self, pst_zero_updated(self->engine));
}

static void steps(rank *self, int replay, times *into) {
    pst_zero_set_replay(self->engine, replay);
    for (int i = 0; i < WARM && !self->failed; i++)
        step(self);
    self->times = self->index == 0 ? into : NULL;
    for (int i = 0; i < STEPS && !self->failed; i++)
        step(self);
    self->times = NULL;
}

static pst_status give_target(void *context, uint32_t group, void **memory, int *accumulate) {
    rank *self = context;
    *memory = self->reduced[group];
    *accumulate = 0;
    return PST_OK;
}

static void add_groups(rank *self) {
    pst_group_layout layout;
    for (uint32_t g = 0; g < GROUPS; g++) {
        const pst_parameter_options parameter = {.size = sizeof parameter,
                                                 .name = "weight",
                                                 .rows = ROWS,
                                                 .row_elements = COLUMNS,
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
    check(self, pst_zero_seal(self->engine));
    for (uint32_t g = 0; g < GROUPS && !self->failed; g++) {
        check(self, pst_zero_group_layout(self->engine, g, &layout));
        self->shards[g] = calloc(1, layout.shard_bytes);
        check(self, pst_zero_bind_shard(self->engine, g, self->shards[g]));
    }
}

static void train(rank *self, pst_runtime *runtime, pst_comm *gather, pst_comm *reduce) {
    const pst_zero_options options = {.size = sizeof options,
                                      .stage = 3,
                                      .gather_comm = gather,
                                      .reduce_comm = reduce,
                                      .prefetch_ahead = 2,
                                      .bucket_bytes = 4096,
                                      .gradient_target = give_target,
                                      .callback_context = self};
    pst_zero_stats stats = {.size = sizeof stats};
    check(self, pst_zero_create(runtime, &options, &self->engine));
    if (!self->failed) add_groups(self);
    for (int i = 0; i < ROUNDS && !self->failed; i++) {
        steps(self, 0, &eager);
        steps(self, 1, &replayed);
    }
    if (self->engine != NULL) pst_zero_get_stats(self->engine, &stats);
    if (self->index == 0) replayed_passes = stats.replayed_passes;
    pst_zero_destroy(self->engine);
    for (int g = 0; g < GROUPS; g++)
        free(self->shards[g]);
}

static void *run(void *argument) {
    rank *self = argument;
    const pst_runtime_options options = {
        .size = sizeof options, .rank = self->index, .world_size = RANKS};
    pst_runtime *runtime;
    pst_comm *gather = NULL, *reduce = NULL;
    check(self, pst_runtime_create(&options, &runtime));
    if (self->failed) return NULL;
    check(self, pst_local_comm_create(self->world, runtime, self->index, 0, &gather));
    check(self, pst_local_comm_create(self->world, runtime, self->index, 1, &reduce));
    if (!self->failed) train(self, runtime, gather, reduce);
    if (gather != NULL) gather->ops->destroy(gather);
    if (reduce != NULL) reduce->ops->destroy(reduce);
    pst_runtime_destroy(runtime);
    return NULL;
}

static void print(const char *how, times *times) {
    for (int i = 0; i < CALLS; i++) {
        double *values = times->values[i];
        bench_sort(values, times->counts[i]);
        printf("%-10s %-10s %8.0f %8.0f %8.0f\n", how, names[i],
               bench_quantile(values, times->counts[i], 0.1),
               bench_quantile(values, times->counts[i], 0.5),
               bench_quantile(values, times->counts[i], 0.9));
    }
}

int main(void) {
    static rank ranks[RANKS];
    pthread_t threads[RANKS];
    pst_runtime *runtime;
    int failed = 0;
    if (pst_runtime_create(NULL, &runtime) != PST_OK) return 1;
    if (pst_local_world_create(runtime, RANKS, &world) != PST_OK) return 1;
    for (int i = 0; i < RANKS; i++) {
        ranks[i].index = i;
        ranks[i].world = world;
        failed |= pthread_create(&threads[i], NULL, run, &ranks[i]) != 0;
    }
    for (int i = 0; i < RANKS; i++)
        failed |= pthread_join(threads[i], NULL) != 0 || ranks[i].failed;
    pst_local_world_destroy(world);
    pst_runtime_destroy(runtime);
    printf("ns a call: 10th percentile, median, 90th, with the two readings of the clock\n");
    print("eager", &eager);
    print("replayed", &replayed);
    printf("%llu of %d passes replayed\n", (unsigned long long)replayed_passes,
           2 * ROUNDS * (WARM + STEPS));
    return failed;
}
