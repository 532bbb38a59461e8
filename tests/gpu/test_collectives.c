/* Random collectives of a communicator on GPUs, one process a GPU, against a reference:
 *
 *   test_collectives --comm nccl|ce|crossover|hierarchy [--ranks 4]
 *                    [--small BYTES] [--nodes 2] [--relay BYTES]
 *                    [--mode random|large|killed|absent]
 *                    [--count 1000] [--seed S] [--largest BYTES]
 *                    [--driver PATH] [--nccl PATH] [--cache FOLDER] [--threads]
 *
 * crossover: ce, and nccl below --small bytes.
 * hierarchy: ce within --nodes nodes, as if they were apart, and nccl between them. random: --count
 * collectives of up to --largest bytes. large: a few beyond 4 GiB. killed: a rank ends in
 * mid-collective, and the others have to learn it. absent: it goes away in order. The paths and
 * --threads are for the stand-ins of driver and NCCL that need no GPU. */
#include "collectives.h"

#include <penstock/copy_engine.h>
#include <penstock/cuda.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct settings {
    const char *comm, *mode, *driver, *nccl, *cache;
    int ranks, threads, nodes;
    size_t relay, small;
    collectives_options collectives;
} settings;

/* ---- a rank's things ------------------------------------------------------------------------- */

static void complain(collectives_rank *rank, int line, const char *call, pst_status status) {
    char text[512] = "";
    if (rank->runtime != NULL) (void)pst_runtime_error(rank->runtime, text, sizeof text);
    rank_fail(rank->context, __FILE__, line, "%s: %s [%s]", call, pst_status_text(status), text);
}

#define TRY(rank, call)                                                                            \
    do {                                                                                           \
        pst_status tried = (call);                                                                 \
        if (tried != PST_OK) {                                                                     \
            complain((rank), __LINE__, #call, tried);                                              \
            return;                                                                                \
        }                                                                                          \
    } while (0)

static pst_status create_nccl(collectives_rank *rank, const settings *settings,
                              const pst_exchange *exchange, pst_comm **comm) {
    const pst_nccl_options options = {.size = sizeof options,
                                      .name = settings->comm,
                                      .library = settings->nccl,
                                      .deadline_ns = 60000000000u};
    return pst_nccl_comm_create(rank->runtime, rank->device, exchange, &options, comm);
}

static pst_status create_ce(collectives_rank *rank, const pst_exchange *exchange, pst_comm **comm) {
    return pst_ce_create(rank->runtime, rank->device, exchange, NULL, comm);
}

static pst_status create_hierarchy(collectives_rank *rank, const settings *settings) {
    const int places = rank->context->size / settings->nodes, mine = rank->context->rank;
    pst_comm *inner = NULL, *outer = NULL;
    rank_group node, place;
    const pst_hierarchy_options options = {.size = sizeof options, .relay_bytes = settings->relay};
    const pst_exchange within =
        rank_group_exchange(rank->context, &node, mine / places * places, 1, places);
    const pst_exchange between =
        rank_group_exchange(rank->context, &place, mine % places, places, settings->nodes);
    pst_status status = create_ce(rank, &within, &inner);
    if (status == PST_OK) status = create_nccl(rank, settings, &between, &outer);
    if (status != PST_OK) return status;
    return pst_hierarchy_create(rank->runtime, rank->device, inner, outer, &rank->context->exchange,
                                &options, &rank->comm);
}

static pst_status create_crossover(collectives_rank *rank, const settings *settings) {
    const pst_exchange *exchange = &rank->context->exchange;
    pst_comm *large = NULL, *small = NULL;
    pst_crossover_options options = {.size = sizeof options};
    for (int kind = 0; kind < PST_COLLECTIVE_KIND_COUNT; kind++)
        options.small_below[kind] = settings->small;
    pst_status status = create_ce(rank, exchange, &large);
    if (status == PST_OK) status = create_nccl(rank, settings, exchange, &small);
    if (status != PST_OK) return status;
    return pst_crossover_create(rank->runtime, large, small, exchange, &options, &rank->comm);
}

static pst_status create_comm(collectives_rank *rank, const settings *settings) {
    const pst_exchange *exchange = &rank->context->exchange;
    if (strcmp(settings->comm, "ce") == 0) return create_ce(rank, exchange, &rank->comm);
    if (strcmp(settings->comm, "crossover") == 0) return create_crossover(rank, settings);
    if (strcmp(settings->comm, "hierarchy") == 0) return create_hierarchy(rank, settings);
    return create_nccl(rank, settings, exchange, &rank->comm);
}

static void log_line(void *context, pst_log_level level, const char *text) {
    const collectives_rank *rank = context;
    if (level == PST_LOG_INFO && rank->context->rank == 0) (void)printf("# %s\n", text);
}

static void open_rank(collectives_rank *rank, const settings *settings) {
    pst_runtime_options options = {.size = sizeof options,
                                   .log = log_line,
                                   .log_context = rank,
                                   .rank = rank->context->rank,
                                   .world_size = rank->context->size};
    pst_cuda_options cuda = {.size = sizeof cuda,
                             .ordinal = rank->context->rank,
                             .driver = settings->driver,
                             .nvrtc = settings->driver,
                             .cache = settings->cache};
    TRY(rank, pst_runtime_create(&options, &rank->runtime));
    TRY(rank, pst_cuda_device_create(rank->runtime, &cuda, &rank->device));
    TRY(rank, create_comm(rank, settings));
    TRY(rank, rank->device->ops->stream_create(rank->device, 0, &rank->stream));
    TRY(rank, rank->device->ops->event_create(rank->device, 0, &rank->event));
}

static void open_region(collectives_rank *rank, size_t bytes) {
    void *memory = NULL;
    TRY(rank, rank->device->ops->alloc(rank->device, PST_MEMORY_DEVICE, bytes, &memory));
    rank->region = memory;
    rank->region_bytes = bytes;
    if (rank->comm->ops->open_memory != NULL)
        TRY(rank, rank->comm->ops->open_memory(rank->comm, memory, bytes));
}

static void close_rank(collectives_rank *rank) {
    pst_device *device = rank->device;
    if (rank->comm != NULL) rank->comm->ops->destroy(rank->comm);
    if (rank->region != NULL)
        device->ops->free(device, PST_MEMORY_DEVICE, rank->region, rank->region_bytes);
    if (rank->event != NULL) device->ops->event_destroy(device, rank->event);
    if (rank->stream != NULL) device->ops->stream_destroy(device, rank->stream);
    if (rank->device != NULL) device->ops->destroy(device);
    pst_runtime_destroy(rank->runtime);
}

/* ---- modes ----------------------------------------------------------------------------------- */

static void run_random(collectives_rank *rank, const settings *settings) {
    open_region(rank, collectives_region_bytes(&settings->collectives));
    if (rank->context->failure[0] == '\0') collectives_run(rank, &settings->collectives);
}

static void run_large(collectives_rank *rank) {
    open_region(rank, collectives_large_bytes());
    if (rank->context->failure[0] == '\0') collectives_run_large(rank);
}

static double now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* What has to be so within ten seconds, or it is a failure that says `what`. */
static void await(collectives_rank *rank, int (*holds)(collectives_rank *rank), const char *what) {
    double until = now() + 10;
    while (!holds(rank)) {
        RANK_CHECK(rank->context, now() < until, "%s: not within 10 s", what);
        (void)nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}

static int is_aborted(collectives_rank *rank) {
    return rank->comm->ops->abort(rank->comm, PST_ETIMEDOUT) == PST_OK;
}

static int stream_has_ended(collectives_rank *rank) {
    return rank->device->ops->event_query(rank->device, rank->event) != PST_PENDING;
}

/* Rank 1 is killed in the middle, or goes away; the others abort when it does not go on, and
 * everything ends. */
static void run_without_one(collectives_rank *rank, const settings *settings) {
    enum { ROUNDS = 20 };
    const size_t bytes = settings->collectives.largest_bytes / sizeof(float) * sizeof(float);
    open_region(rank, 2 * bytes);
    if (rank->context->failure[0] != '\0') return;
    for (int round = 0; round <= ROUNDS; round++) {
        pst_collective_work work = {.collective = {.kind = PST_ALL_REDUCE,
                                                   .name = "endless",
                                                   .dtype = PST_FLOAT32,
                                                   .destination = rank->region,
                                                   .count = bytes / sizeof(float)}};
        if (round == ROUNDS && rank->context->rank == 1) {
            if (strcmp(settings->mode, "killed") == 0) (void)raise(SIGKILL);
            return;
        }
        TRY(rank, collectives_launch(rank, &work));
        if (round < ROUNDS) TRY(rank, collectives_finish(rank, 30));
        if (round == ROUNDS) {
            double begin = now();
            pst_status status = collectives_finish(rank, 2);
            RANK_CHECK(rank->context, status != PST_OK, "it ended well without rank 1");
            await(rank, is_aborted, "abort");
            await(rank, stream_has_ended, "the end of the stream");
            RANK_CHECK(rank->context, rank->comm->ops->status(rank->comm) != PST_OK,
                       "the communicator says that all is well");
            (void)printf("# rank %d: rank 1 is gone; over after %.2f s: %s\n", rank->context->rank,
                         now() - begin, rank->comm->ops->error_text(rank->comm));
        } else {
            collectives_free_staging(rank, &work);
        }
    }
}

static void run_rank(rank_context *context) {
    const settings *settings = context->argument;
    collectives_rank rank = {.context = context};
    open_rank(&rank, settings);
    if (context->failure[0] == '\0') {
        if (strcmp(settings->mode, "large") == 0)
            run_large(&rank);
        else if (strcmp(settings->mode, "random") != 0)
            run_without_one(&rank, settings);
        else
            run_random(&rank, settings);
    }
    /* After a failure nobody knows what is still in flight: the process's end tidies up. */
    double begin = now();
    if (context->failure[0] == '\0') close_rank(&rank);
    if (now() - begin > 5)
        (void)printf("# rank %d: closing took %.1f s\n", rank.context->rank, now() - begin);
}

/* ---- main ------------------------------------------------------------------------------------ */

static int set(settings *settings, const char *name, const char *value) {
    collectives_options *collectives = &settings->collectives;
    if (strcmp(name, "--comm") == 0)
        settings->comm = value;
    else if (strcmp(name, "--mode") == 0)
        settings->mode = value;
    else if (strcmp(name, "--driver") == 0)
        settings->driver = value;
    else if (strcmp(name, "--nccl") == 0)
        settings->nccl = value;
    else if (strcmp(name, "--cache") == 0)
        settings->cache = value;
    else if (strcmp(name, "--ranks") == 0)
        settings->ranks = atoi(value);
    else if (strcmp(name, "--nodes") == 0)
        settings->nodes = atoi(value);
    else if (strcmp(name, "--small") == 0)
        settings->small = strtoull(value, NULL, 0);
    else if (strcmp(name, "--relay") == 0)
        settings->relay = strtoull(value, NULL, 0);
    else if (strcmp(name, "--count") == 0)
        collectives->count = strtoull(value, NULL, 0);
    else if (strcmp(name, "--seed") == 0)
        collectives->seed = strtoull(value, NULL, 0);
    else if (strcmp(name, "--largest") == 0)
        collectives->largest_bytes = strtoull(value, NULL, 0);
    else
        return 0;
    return 1;
}

static unsigned exact_kinds(const char *comm) {
    if (strcmp(comm, "ce") == 0) return 1u << PST_REDUCE_SCATTER | 1u << PST_ALL_REDUCE;
    return strcmp(comm, "nccl") == 0 ? 1u << PST_REDUCE_SCATTER : 0;
}

int main(int argc, char **argv) {
    settings settings = {.comm = "nccl", .mode = "random", .ranks = 2, .nodes = 2};
    settings.collectives = (collectives_options){.seed = (uint64_t)time(NULL),
                                                 .count = 1000,
                                                 .largest_bytes = (size_t)4 << 20,
                                                 .kinds = (1u << PST_COLLECTIVE_KIND_COUNT) - 1,
                                                 .seconds = 20};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--threads") == 0)
            settings.threads = 1;
        else if (i + 1 < argc && set(&settings, argv[i], argv[i + 1]))
            i++;
        else {
            (void)fprintf(stderr, "%s: what is %s? The file's head has the usage.\n", argv[0],
                          argv[i]);
            return 2;
        }
    }
    settings.collectives.exact = exact_kinds(settings.comm);
    int killed = strcmp(settings.mode, "killed") == 0;
    ranks_options options = {.count = settings.ranks,
                             .threads = settings.threads,
                             .seconds = 280,
                             .may_die = killed ? 1u << 1 : 0};
    double begin = now();
    int failures = ranks_run(&options, run_rank, &settings);
    (void)printf("%s %s: %s, %d ranks, %zu collectives of up to %zu bytes, seed %llu, %.1f s\n",
                 failures == 0 ? "ok" : "FAILED", settings.comm, settings.mode, settings.ranks,
                 settings.collectives.count, settings.collectives.largest_bytes,
                 (unsigned long long)settings.collectives.seed, now() - begin);
    return failures != 0;
}
