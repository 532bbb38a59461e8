/* gpu_test_ce_abort [--driver PATH] [--cache FOLDER] [--launches N] [--ranks-a-device 2]: two
 * ranks, processes, on a GPU each or both on one. Rank 1 never starts what rank 0 waits for, while
 * rank 0 goes on launching behind that wait until the GPU's queue is full and its thread is held up
 * in the driver. An abort from another thread has to end all of it. */
#include "ranks.h"

#include <penstock/cuda.h>
#include <penstock/penstock.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BYTES ((size_t)1 << 20)

typedef struct settings {
    const char *driver, *cache;
    int launches, ranks_a_device;
} settings;

typedef struct scene {
    rank_context *context;
    pst_runtime *runtime;
    pst_device *device;
    pst_comm *comm;
    pst_stream *pulls, *compute;
    pst_event *event;
    void *memory;
    int launched; /* by the thread that is held up; read by the one that aborts */
    int ended;    /* the abort has returned PST_OK */
    double abort_seconds;
} scene;

#define TRY(scene, call)                                                                           \
    do {                                                                                           \
        pst_status tried = (call);                                                                 \
        if (tried != PST_OK) {                                                                     \
            char text[512] = "";                                                                   \
            (void)pst_runtime_error((scene)->runtime, text, sizeof text);                          \
            rank_fail((scene)->context, __FILE__, __LINE__, "%s: %s (%s)", #call,                  \
                      pst_status_text(tried), text);                                               \
            return;                                                                                \
        }                                                                                          \
    } while (0)

static double now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void pause_for(double seconds) {
    const double until = now() + seconds;
    while (now() < until)
        (void)nanosleep(&(struct timespec){0, 1000000}, NULL);
}

static void open_scene(scene *scene, const settings *settings) {
    const pst_runtime_options options = {
        .size = sizeof options, .rank = scene->context->rank, .world_size = scene->context->size};
    const pst_cuda_options cuda = {.size = sizeof cuda,
                                   .ordinal =
                                       settings->ranks_a_device == 1 ? scene->context->rank : 0,
                                   .driver = settings->driver,
                                   .nvrtc = settings->driver,
                                   .cache = settings->cache};
    TRY(scene, pst_runtime_create(&options, &scene->runtime));
    TRY(scene, pst_cuda_device_create(scene->runtime, &cuda, &scene->device));
    TRY(scene, pst_ce_create(scene->runtime, scene->device, &scene->context->exchange, NULL,
                             &scene->comm));
    const pst_device_ops *ops = scene->device->ops;
    TRY(scene, ops->alloc(scene->device, PST_MEMORY_DEVICE, 4 * BYTES, &scene->memory));
    TRY(scene, pst_ce_register(scene->comm, scene->memory, 4 * BYTES));
    TRY(scene, ops->stream_create(scene->device, 0, &scene->pulls));
    TRY(scene, ops->stream_create(scene->device, 0, &scene->compute));
    TRY(scene, ops->event_create(scene->device, 0, &scene->event));
}

static void close_scene(scene *scene) {
    pst_device *device = scene->device;
    scene->comm->ops->destroy(scene->comm);
    device->ops->event_destroy(device, scene->event);
    device->ops->stream_destroy(device, scene->pulls);
    device->ops->stream_destroy(device, scene->compute);
    device->ops->free(device, PST_MEMORY_DEVICE, scene->memory, 4 * BYTES);
    device->ops->destroy(device);
    pst_runtime_destroy(scene->runtime);
}

/* When the launching thread has not come further for half a second, or is through. */
static void *abort_when_held_up(void *argument) {
    scene *scene = argument;
    int before = -1, after = 0;
    while (before != after) {
        before = after;
        pause_for(0.5);
        after = __atomic_load_n(&scene->launched, __ATOMIC_RELAXED);
    }
    const double begin = now();
    pst_status status = scene->comm->ops->abort(scene->comm, PST_ETIMEDOUT);
    scene->abort_seconds = now() - begin;
    for (int i = 0; i < 5000 && status == PST_EBUSY; i++) {
        pause_for(0.001);
        status = scene->comm->ops->abort(scene->comm, PST_ETIMEDOUT);
    }
    scene->ended = status == PST_OK;
    (void)printf("# abort after %d launches: %.3f s\n", after, scene->abort_seconds);
    return NULL;
}

static void launch_behind_a_gather(scene *scene, int launches) {
    const pst_device_ops *ops = scene->device->ops;
    const pst_segment segments[] = {{0, 0, 2 * BYTES, BYTES}, {1, 0, 3 * BYTES, BYTES}};
    const pst_collective gather = {.kind = PST_ALL_GATHER,
                                   .name = "never",
                                   .ticket = 1,
                                   .dtype = PST_UINT8,
                                   .source = scene->memory,
                                   .source_bytes = BYTES,
                                   .destination = scene->memory,
                                   .segments = segments,
                                   .segment_count = 2};
    void *request;
    TRY(scene, scene->comm->ops->start(scene->comm, &gather, scene->pulls, &request));
    TRY(scene, ops->event_record(scene->device, scene->event, scene->pulls));
    TRY(scene, ops->stream_wait(scene->device, scene->compute, scene->event));
    for (int i = 0; i < launches; i++) {
        TRY(scene, ops->fill(scene->device, scene->compute, (char *)scene->memory + BYTES, 0, 64));
        __atomic_store_n(&scene->launched, i + 1, __ATOMIC_RELAXED); /* a progress bar */
    }
}

static void run_waiting(scene *scene, const settings *settings) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, abort_when_held_up, scene) != 0) return;
    launch_behind_a_gather(scene, settings->launches);
    (void)pthread_join(thread, NULL);
    if (scene->context->failure[0] != '\0') return;
    RANK_CHECK(scene->context, scene->ended, "the pulls did not end");
    TRY(scene, scene->device->ops->event_record(scene->device, scene->event, scene->compute));
    const double until = now() + 20;
    pst_status status = PST_PENDING;
    while (status == PST_PENDING && now() < until)
        status = scene->device->ops->event_query(scene->device, scene->event);
    RANK_CHECK(scene->context, status == PST_OK, "what was behind the gather did not end");
    RANK_CHECK(scene->context, scene->comm->ops->status(scene->comm) == PST_ETIMEDOUT,
               "the communicator does not say that it was aborted");
}

static void run_rank(rank_context *context) {
    scene scene = {.context = context};
    open_scene(&scene, context->argument);
    if (context->failure[0] != '\0') return;
    if (context->rank == 0) run_waiting(&scene, context->argument);
    rank_meet(context);
    if (context->failure[0] != '\0') return;
    if (context->rank == 1)
        RANK_CHECK(context, scene.comm->ops->status(scene.comm) == PST_EPEER,
                   "rank 1 does not know that rank 0 has aborted");
    rank_meet(context);
    close_scene(&scene);
}

int main(int argc, char **argv) {
    settings settings = {.launches = 30000, .ranks_a_device = 1};
    const ranks_options options = {.count = 2, .seconds = 60};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--driver") == 0) settings.driver = argv[i + 1];
        if (strcmp(argv[i], "--cache") == 0) settings.cache = argv[i + 1];
        if (strcmp(argv[i], "--launches") == 0) settings.launches = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--ranks-a-device") == 0) settings.ranks_a_device = atoi(argv[i + 1]);
    }
    const int failures = ranks_run(&options, run_rank, &settings);
    (void)printf("%s: an abort behind %d launches\n", failures == 0 ? "ok" : "FAILED",
                 settings.launches);
    return failures != 0;
}
