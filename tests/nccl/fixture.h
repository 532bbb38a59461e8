/* Ranks of one communicator over the stand-ins. They are created by threads, since that blocks;
 * afterwards one thread drives them all, since starting does not. */
#ifndef PST_TESTS_NCCL_FIXTURE_H
#define PST_TESTS_NCCL_FIXTURE_H

#include "../cmocka_all.h"
#include "base/clock.h"

#include <fake_driver.h>
#include <fake_nccl.h>
#include <penstock/cuda.h>
#include <penstock/penstock.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RANKS        2
#define AREA         65536 /* bytes of a rank's memory */
#define MILLISECONDS 1000000ull
#define PATIENCE     (30000 * MILLISECONDS) /* for what has to come, on a machine that is busy */

typedef struct nccl_rank {
    int rank;
    pst_page *page;
    pst_runtime *runtime;
    pst_comm *host; /* the exchange goes over it */
    pst_exchange exchange;
    pst_comm *over; /* NULL, or where the ranks compare what they start */
    pst_device *device;
    pst_stream *stream;
    pst_event *event;
    char *memory;
    pst_nccl_options options;
    pst_comm *comm;
    pst_status status;
    char text[512], warning[512]; /* of the runtime: its error, the last warning in its log */
    pst_collective_work work;
} nccl_rank;

typedef struct nccl_world {
    pst_runtime *runtime;
    pst_local_world *meeting;
    uint64_t watchdog_ns; /* 0: none */
    nccl_rank ranks[RANKS];
} nccl_world;

static inline void note_warning(void *context, pst_log_level level, const char *text) {
    nccl_rank *rank = context;
    if (level == PST_LOG_WARNING) (void)snprintf(rank->warning, sizeof rank->warning, "%s", text);
}

static inline int open_nccl_rank(nccl_world *world, int number) {
    nccl_rank *rank = &world->ranks[number];
    if (pst_page_create(&rank->page) != PST_OK) return -1;
    const pst_runtime_options options = {.size = sizeof options,
                                         .dump_name = "tests of nccl",
                                         .page = rank->page,
                                         .log = note_warning,
                                         .log_context = rank,
                                         .rank = number,
                                         .world_size = RANKS,
                                         .spin = 100, /* who spins keeps others from the core */
                                         .deadline_ns = PATIENCE,
                                         .watchdog_ns = world->watchdog_ns,
                                         .watchdog_poisons = 1};
    const pst_cuda_options cuda = {.size = sizeof cuda,
                                   .ordinal = number,
                                   .driver = FAKE_CUDA_PATH,
                                   .nvrtc = FAKE_CUDA_PATH,
                                   .cache = FAKE_CUDA_CACHE};
    void *memory = NULL;
    rank->rank = number;
    rank->options = (pst_nccl_options){.size = sizeof rank->options, .library = FAKE_NCCL_PATH};
    if (pst_runtime_create(&options, &rank->runtime) != PST_OK ||
        pst_local_comm_create(world->meeting, rank->runtime, number, 0, &rank->host) != PST_OK ||
        pst_comm_exchange_open(rank->runtime, rank->host, &rank->exchange) != PST_OK ||
        pst_cuda_device_create(rank->runtime, &cuda, &rank->device) != PST_OK)
        return -1;
    const pst_device_ops *ops = rank->device->ops;
    if (ops->stream_create(rank->device, 0, &rank->stream) != PST_OK ||
        ops->event_create(rank->device, 0, &rank->event) != PST_OK ||
        ops->alloc(rank->device, PST_MEMORY_DEVICE, AREA, &memory) != PST_OK)
        return -1;
    rank->memory = memory;
    memset(memory, 0, AREA);
    return 0;
}

static inline int set_up_watched(void **state, uint64_t watchdog_ns) {
    nccl_world *world = calloc(1, sizeof *world);
    *state = world;
    world->watchdog_ns = watchdog_ns;
    fake_cuda_reset();
    fake_nccl_reset();
    if (pst_runtime_create(NULL, &world->runtime) != PST_OK) return -1;
    if (pst_local_world_create(world->runtime, RANKS, &world->meeting) != PST_OK) return -1;
    for (int i = 0; i < RANKS; i++)
        if (open_nccl_rank(world, i) != 0) return -1;
    return 0;
}

static inline int set_up(void **state) {
    return set_up_watched(state, 0);
}

static inline void close_nccl_rank(nccl_rank *rank) {
    const pst_device_ops *ops = rank->device->ops;
    if (rank->comm != NULL) rank->comm->ops->destroy(rank->comm);
    if (rank->over != NULL) rank->over->ops->destroy(rank->over);
    ops->free(rank->device, PST_MEMORY_DEVICE, rank->memory, AREA);
    ops->event_destroy(rank->device, rank->event);
    ops->stream_destroy(rank->device, rank->stream);
    pst_comm_exchange_close(&rank->exchange);
    rank->host->ops->destroy(rank->host);
    pst_runtime_destroy(rank->runtime);
    pst_page_destroy(rank->page);
    ops->destroy(rank->device); /* lanes of the runtime may use it */
}

/* Nothing of NCCL or of the driver is left. */
static inline int tear_down(void **state) {
    nccl_world *world = *state;
    fake_nccl_reset();
    for (int i = 0; i < RANKS; i++)
        close_nccl_rank(&world->ranks[i]);
    pst_local_world_destroy(world->meeting);
    pst_runtime_destroy(world->runtime);
    free(world);
    return fake_nccl_live() == 0 && fake_cuda_live() == 0 ? 0 : -1;
}

/* ---- creating -------------------------------------------------------------------------------- */

static inline void *create_comm(void *argument) {
    nccl_rank *rank = argument;
    rank->status = pst_nccl_comm_create(rank->runtime, rank->device, &rank->exchange,
                                        &rank->options, &rank->comm);
    (void)pst_runtime_error(rank->runtime, rank->text, sizeof rank->text);
    return NULL;
}

static inline void on_ranks(nccl_world *world, int count, void *(*body)(void *)) {
    pthread_t threads[RANKS];
    for (int i = 0; i < count; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, body, &world->ranks[i]), 0);
    for (int i = 0; i < count; i++)
        (void)pthread_join(threads[i], NULL);
}

static inline void create_comms(nccl_world *world) {
    on_ranks(world, RANKS, create_comm);
    for (int i = 0; i < RANKS; i++) {
        if (world->ranks[i].status != PST_OK) fail_msg("%s", world->ranks[i].text);
        assert_non_null(world->ranks[i].comm);
    }
    fake_nccl_forget(); /* what creating them has called */
}

/* ---- using ----------------------------------------------------------------------------------- */

static inline pst_status start(nccl_rank *rank, const pst_collective *collective) {
    rank->work = (pst_collective_work){.comm = rank->comm, .collective = *collective};
    const pst_work work = pst_collective_as_work(&rank->work);
    pst_status status = rank->device->ops->launch(rank->device, rank->stream, &work);
    (void)pst_runtime_error(rank->runtime, rank->text, sizeof rank->text);
    return status;
}

/* PST_PENDING while the stream has not come to its end. */
static inline pst_status query(nccl_rank *rank) {
    const pst_device_ops *ops = rank->device->ops;
    pst_status status = ops->event_record(rank->device, rank->event, rank->stream);
    return status == PST_OK ? ops->event_query(rank->device, rank->event) : status;
}

/* Asks again while the answer is `unfinished` and the patience lasts. */
static inline pst_status ask_until(nccl_rank *rank, pst_status (*ask)(nccl_rank *),
                                   pst_status unfinished) {
    const uint64_t end = pst__now() + PATIENCE;
    pst_status status = ask(rank);
    while (status == unfinished && pst__now() < end) {
        (void)nanosleep(&(struct timespec){0, 100000}, NULL);
        status = ask(rank);
    }
    return status;
}

static inline pst_status until_over(nccl_rank *rank) {
    return ask_until(rank, query, PST_PENDING);
}

#endif
