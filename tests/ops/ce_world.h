/* Ranks of the communicator `ce` in one process, over one device `sim`, or of nodes of such ranks
 * (hierarchy.h). One thread drives all
 * ranks, a call at a time, so that a seed repeats exactly; only what is collective on the host
 * (creating, registering) runs on a thread a rank. */
#ifndef PST_TESTS_OPS_CE_WORLD_H
#define PST_TESTS_OPS_CE_WORLD_H

#include "../cmocka_all.h"
#include "tests/random.h"

#include "ops/comm/ce/ce.h"
#include "tests/device/sim.h"

#include <penstock/penstock.h>
#include <pthread.h>
#include <string.h>

#define CE_HOME ((size_t)1 << 20) /* bytes of a rank's memory; the first half is registered */

typedef struct ce_world ce_world;

/* A rank's part in a group of ranks: its node, or those of its place in all nodes. */
typedef struct ce_group {
    pst_comm *host;
    pst_exchange exchange;
    pst_comm *comm; /* until a hierarchy owns it */
} ce_group;

typedef struct ce_rank {
    ce_world *world;
    int rank;
    pst_runtime *runtime;
    pst_comm *host; /* for set-up */
    pst_exchange exchange;
    ce_group groups[2]; /* with nodes: inner, outer */
    pst_comm *comm;
    pst_stream *pulls, *compute, *sums;
    char *home;
    uint64_t tickets;
    pst_status status; /* of what a thread did */
} ce_rank;

struct ce_world {
    int size, nodes; /* 0: without */
    size_t relay_bytes;
    size_t small_below; /* with nodes: below that they act, and from there on `ce` of all ranks */
    uint64_t clock, dice;
    uint32_t most_jitter;
    pst__sim_options sim;
    pst_ce_options options;
    pst__heap heap;
    pst_device *device;
    pst_runtime *runtime; /* of the meeting */
    pst_local_world *meeting;
    pst_local_world *group_meetings[2][PST_CE_MAX_RANKS]; /* with nodes: by node, by place */
    ce_rank ranks[PST_CE_MAX_RANKS];
    uint64_t read_until[PST_CE_MAX_RANKS]; /* by source: end of the latest pull */
    int reader[PST_CE_MAX_RANKS];
    uint64_t pulls, collisions; /* two readers of one source at once */
};

static inline uint64_t ce_now(void *context) {
    return ((const ce_world *)context)->clock;
}

static inline uint64_t ce_jitter(void *context) {
    ce_world *world = context;
    return world->most_jitter == 0 ? 0 : random_below(&world->dice, world->most_jitter);
}

/* Whose memory it is; -1: nobody's. */
static inline int ce_owner(const ce_world *world, const char *address) {
    for (int rank = 0; rank < world->size; rank++) {
        const char *home = world->ranks[rank].home;
        if (home != NULL && address >= home && address < home + CE_HOME) return rank;
        if (world->ranks[rank].comm == NULL || world->nodes > 0) continue;
        const pst__ce *ce = world->ranks[rank].comm->context;
        if (address >= ce->bounce && address < ce->bounce + PST_CE_BOUNCE_BYTES) return rank;
    }
    return -1;
}

static inline void ce_copied(void *context, const void *destination, const void *source,
                             uint64_t begin, uint64_t end) {
    ce_world *world = context;
    const int reader = ce_owner(world, destination), read = ce_owner(world, source);
    if (reader < 0 || read < 0 || reader == read) return;
    world->pulls++;
    if (begin < world->read_until[read] && world->reader[read] != reader) world->collisions++;
    world->read_until[read] = end;
    world->reader[read] = reader;
}

typedef void (*ce_body)(ce_rank *rank);

typedef struct ce_thread {
    ce_rank *rank;
    ce_body body;
} ce_thread;

static inline void *ce_run_body(void *argument) {
    const ce_thread *thread = argument;
    thread->body(thread->rank);
    return NULL;
}

/* On all ranks at once. */
static inline void ce_on_all(ce_world *world, ce_body body) {
    pthread_t threads[PST_CE_MAX_RANKS];
    ce_thread starts[PST_CE_MAX_RANKS];
    for (int rank = 0; rank < world->size; rank++) {
        starts[rank] = (ce_thread){&world->ranks[rank], body};
        assert_int_equal(pthread_create(&threads[rank], NULL, ce_run_body, &starts[rank]), 0);
    }
    for (int rank = 0; rank < world->size; rank++)
        (void)pthread_join(threads[rank], NULL);
}

static inline void ce_assert_all(const ce_world *world, pst_status status) {
    char text[512];
    for (int rank = 0; rank < world->size; rank++) {
        if (world->ranks[rank].status == status) continue;
        (void)pst_runtime_error(world->ranks[rank].runtime, text, sizeof text);
        fail_msg("rank %d: %s (%s)", rank, pst_status_text(world->ranks[rank].status), text);
    }
}

/* The parts may be made already. */
static inline void ce_create_hierarchy(ce_rank *rank) {
    ce_world *world = rank->world;
    const pst_hierarchy_options options = {.size = sizeof options,
                                           .relay_bytes = world->relay_bytes};
    for (int side = 0; side < 2; side++) {
        ce_group *group = &rank->groups[side];
        rank->status = group->comm != NULL
                           ? PST_OK
                           : pst_ce_create(rank->runtime, world->device, &group->exchange,
                                           &world->options, &group->comm);
        if (rank->status != PST_OK) return;
    }
    rank->status =
        pst_hierarchy_create(rank->runtime, world->device, rank->groups[0].comm,
                             rank->groups[1].comm, &rank->exchange, &options, &rank->comm);
    if (rank->status == PST_OK) rank->groups[0].comm = rank->groups[1].comm = NULL;
}

/* The hierarchy for what is small. */
static inline void ce_create_crossover(ce_rank *rank) {
    const ce_world *world = rank->world;
    pst_comm *small = rank->comm, *large = NULL;
    pst_crossover_options options = {.size = sizeof options};
    for (int kind = 0; kind < PST_COLLECTIVE_KIND_COUNT; kind++)
        options.small_below[kind] = world->small_below;
    rank->status =
        pst_ce_create(rank->runtime, world->device, &rank->exchange, &world->options, &large);
    if (rank->status != PST_OK) return;
    rank->status =
        pst_crossover_create(rank->runtime, large, small, &rank->exchange, &options, &rank->comm);
}

static inline void ce_create_rank(ce_rank *rank) {
    if (rank->world->nodes > 0) {
        ce_create_hierarchy(rank);
        if (rank->status == PST_OK && rank->world->small_below > 0) ce_create_crossover(rank);
        return;
    }
    rank->status = pst_ce_create(rank->runtime, rank->world->device, &rank->exchange,
                                 &rank->world->options, &rank->comm);
}

static inline void ce_register_home(ce_rank *rank) {
    rank->status = rank->comm->ops->open_memory(rank->comm, rank->home, CE_HOME / 2);
}

static inline void ce_open_group(ce_rank *rank, int side, pst_local_world *meeting, int index) {
    ce_group *group = &rank->groups[side];
    assert_int_equal(pst_local_comm_create(meeting, rank->runtime, index, 0, &group->host), PST_OK);
    assert_int_equal(pst_comm_exchange_open(rank->runtime, group->host, &group->exchange), PST_OK);
}

static inline void ce_open_groups(ce_world *world, ce_rank *rank) {
    const int places = world->size / world->nodes;
    const int node = rank->rank / places, place = rank->rank % places;
    ce_open_group(rank, 0, world->group_meetings[0][node], place);
    ce_open_group(rank, 1, world->group_meetings[1][place], node);
}

static inline void ce_open_meetings(ce_world *world) {
    const int counts[] = {world->nodes, world->nodes > 0 ? world->size / world->nodes : 0};
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < counts[side]; i++)
            assert_int_equal(pst_local_world_create(world->runtime, world->size / counts[side],
                                                    &world->group_meetings[side][i]),
                             PST_OK);
}

static inline void ce_open_rank(ce_world *world, int index) {
    ce_rank *rank = &world->ranks[index];
    const pst_runtime_options options = {.size = sizeof options,
                                         .rank = index,
                                         .world_size = world->size,
                                         .deadline_ns = 20000000000u};
    const pst_device_ops *ops = world->device->ops;
    *rank = (ce_rank){.world = world, .rank = index};
    assert_int_equal(pst_runtime_create(&options, &rank->runtime), PST_OK);
    assert_int_equal(pst_local_comm_create(world->meeting, rank->runtime, index, 0, &rank->host),
                     PST_OK);
    assert_int_equal(pst_comm_exchange_open(rank->runtime, rank->host, &rank->exchange), PST_OK);
    if (world->nodes > 0) ce_open_groups(world, rank);
    assert_int_equal(ops->stream_create(world->device, 0, &rank->pulls), PST_OK);
    assert_int_equal(ops->stream_create(world->device, 0, &rank->compute), PST_OK);
    assert_int_equal(ops->stream_create(world->device, 0, &rank->sums), PST_OK);
}

/* All but the communicators; `size`, `dice`, `sim`, `options` may be set before. */
static inline void ce_prepare(ce_world *world) {
    world->options.size = sizeof world->options;
    world->sim.now = ce_now;
    world->sim.jitter = ce_jitter;
    world->sim.copied = ce_copied;
    world->sim.context = world;
    assert_int_equal(pst__heap_init(&world->heap, NULL), PST_OK);
    assert_int_equal(pst__sim_create(&world->heap, &world->sim, &world->device), PST_OK);
    assert_int_equal(pst_runtime_create(NULL, &world->runtime), PST_OK);
    assert_int_equal(pst_local_world_create(world->runtime, world->size, &world->meeting), PST_OK);
    ce_open_meetings(world);
    for (int rank = 0; rank < world->size; rank++)
        ce_open_rank(world, rank);
}

static inline void ce_open_homes(ce_world *world) {
    for (int rank = 0; rank < world->size; rank++) {
        void *home;
        assert_int_equal(
            world->device->ops->alloc(world->device, PST_MEMORY_DEVICE, CE_HOME, &home), PST_OK);
        world->ranks[rank].home = home;
    }
    ce_on_all(world, ce_register_home);
    ce_assert_all(world, PST_OK);
}

static inline void ce_open(ce_world *world) {
    ce_prepare(world);
    ce_on_all(world, ce_create_rank);
    ce_assert_all(world, PST_OK);
    ce_open_homes(world);
}

static inline void ce_close_group(ce_group *group) {
    if (group->comm != NULL) group->comm->ops->destroy(group->comm);
    if (group->host == NULL) return;
    pst_comm_exchange_close(&group->exchange);
    group->host->ops->destroy(group->host);
}

/* What the streams still have before them happens first, as far as it can. */
static inline void ce_close(ce_world *world) {
    pst_device *device = world->device;
    for (int rank = 0; rank < world->size; rank++) {
        ce_rank *state = &world->ranks[rank];
        if (state->comm != NULL) state->comm->ops->destroy(state->comm);
        state->comm = NULL;
        for (int side = 0; side < 2; side++)
            ce_close_group(&state->groups[side]);
        pst_comm_exchange_close(&state->exchange);
        state->host->ops->destroy(state->host);
        device->ops->stream_destroy(device, state->pulls);
        device->ops->stream_destroy(device, state->compute);
        device->ops->stream_destroy(device, state->sums);
    }
    for (int rank = 0; rank < world->size; rank++) {
        device->ops->free(device, PST_MEMORY_DEVICE, world->ranks[rank].home, CE_HOME);
        pst_runtime_destroy(world->ranks[rank].runtime);
    }
    device->ops->destroy(device);
    for (int i = 0; i < 2 * PST_CE_MAX_RANKS; i++)
        pst_local_world_destroy(world->group_meetings[i / PST_CE_MAX_RANKS][i % PST_CE_MAX_RANKS]);
    pst_local_world_destroy(world->meeting);
    pst_runtime_destroy(world->runtime);
}

/* Lets the clock run; 1 when the event came within `nanoseconds`. */
static inline int ce_run_until(ce_world *world, pst_event *event, uint64_t nanoseconds) {
    const uint64_t end = world->clock + nanoseconds;
    while (world->device->ops->event_query(world->device, event) != PST_OK) {
        if (world->clock >= end) return 0;
        world->clock += 200;
    }
    return 1;
}

/* 1 when all streams of all ranks came to their end. */
static inline int ce_run_all(ce_world *world, uint64_t nanoseconds) {
    pst_device *device = world->device;
    pst_event *event;
    int all = 1;
    assert_int_equal(device->ops->event_create(device, 0, &event), PST_OK);
    for (int rank = 0; rank < world->size; rank++) {
        pst_stream *streams[] = {world->ranks[rank].pulls, world->ranks[rank].compute,
                                 world->ranks[rank].sums};
        for (int i = 0; i < 3; i++) {
            assert_int_equal(device->ops->event_record(device, event, streams[i]), PST_OK);
            all &= ce_run_until(world, event, nanoseconds);
        }
    }
    device->ops->event_destroy(device, event);
    return all;
}

#endif
