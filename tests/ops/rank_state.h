/* What a rank of a test has; how it fails, and what its compute stream does. On an asynchronous
 * device all that reads or writes the model's memory is done by that. Failures are collected by
 * rank, because a test's own asserts belong to its thread. */
#ifndef PST_TESTS_OPS_RANK_STATE_H
#define PST_TESTS_OPS_RANK_STATE_H

#include "../cmocka_all.h"
#include "async_comm.h"
#include "model.h"
#include "tests/device/sim.h"

#include <penstock/penstock.h>
#include <stdio.h>
#include <stdlib.h>

struct sim_course; /* world.h */

typedef struct rank_state {
    int rank, world;   /* of all replicas */
    int part, replica; /* of this rank */
    const model *model;
    void *argument;
    pst_local_world *meeting, *between; /* of its replica; of those that have its part */
    board *boards, *board_between;      /* of gathers and of reductions; the same */
    async_device *async;
    pst_device *sim; /* all ranks' */
    struct sim_course *course;
    pst_comm *host; /* for setting up */
    pst_exchange exchange;
    pst_runtime *runtime;
    pst_comm *gather, *reduce, *replicas;
    pst_lane *compute;
    pst_zero *engine;
    uint32_t parameters[MOST_PARAMETERS], groups[MOST_GROUPS];
    char group_names[MOST_GROUPS][24];
    pst_group_layout layouts[MOST_GROUPS];
    float *shards[MOST_GROUPS], *targets[MOST_GROUPS];
    int is_in_place[MOST_GROUPS];
    char *hosted; /* both, where they are on the host; and how much of that is taken */
    size_t hosted_bytes;
    int has_target[MOST_GROUPS];           /* gradients of earlier backwards are in it */
    pst_status target_status[MOST_GROUPS]; /* what asking for it answers */
    int consumed[MOST_GROUPS], kept[MOST_GROUPS];
    int keeps;              /* what one rank alone reports is kept as it is */
    int fills;              /* how often what is gathered was asked for */
    pst_status fill_status; /* what that answers */
    int spoils_consumed;    /* gradients are overwritten, on compute, as soon as they are */
    float *gradients[MOST_PARAMETERS];        /* whole, of the current backward */
    uint64_t version;                         /* of the parameters' values */
    uint64_t passes;                          /* forwards so far */
    int64_t named[MOST_GROUPS][2][MOST_ROWS]; /* in forwards with gradients and without */
    uint64_t named_in[MOST_GROUPS]; /* the last one with gradients that did, or 0: all were used */
    void *own; /* (optional) a test's block of memory, freed once its streams have ended */
    char failure[512];
    int is_wrong;    /* compute saw a wrong value; atomic, `wrong` is written before */
    char wrong[256]; /* which */
} rank_state;

typedef void (*rank_body)(rank_state *state);

/* ---- failing, from any thread ---------------------------------------------------------------- */

static inline void fail_at(rank_state *state, const char *file, int line, const char *what) {
    char text[256] = "";
    if (state->failure[0] != '\0') return;
    if (state->runtime != NULL) (void)pst_runtime_error(state->runtime, text, sizeof text);
    (void)snprintf(state->failure, sizeof state->failure, "%s:%d: rank %d: %.120s [%s]", file, line,
                   state->rank, what, text);
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fail_at(state, __FILE__, __LINE__, #condition);                                        \
            return;                                                                                \
        }                                                                                          \
    } while (0)
#define CHECK_OK(call) CHECK((call) == PST_OK)
/* After a call that may have failed inside; and with that call. */
#define CHECK_FINE() CHECK(state->failure[0] == '\0')
#define DO(call)                                                                                   \
    do {                                                                                           \
        call;                                                                                      \
        CHECK_FINE();                                                                              \
    } while (0)

/* Whether that is part of what the runtime says of its failure. */
static inline int text_has(const rank_state *state, const char *part) {
    char text[1024];
    (void)pst_runtime_error(state->runtime, text, sizeof text);
    return strstr(text, part) != NULL;
}

/* ---- what compute does ----------------------------------------------------------------------- */

typedef struct sim_call {
    async_run run;
    char argument[256];
} sim_call;

static inline void run_sim_call(void *argument) {
    sim_call *call = argument;
    (void)call->run(call->argument);
    free(call);
}

static inline int is_on_host(const rank_state *state) {
    return state->model->device == ON_HOST;
}

/* run(copy of the argument), on the compute stream; on the host device at once. */
static inline void on_compute(rank_state *state, async_run run, const void *argument,
                              size_t bytes) {
    char copy[256];
    if (state->sim != NULL) {
        sim_call *call = calloc(1, sizeof *call);
        call->run = run;
        memcpy(call->argument, argument, bytes);
        (void)pst__sim_call(state->sim, pst_lane_stream(state->compute), 0, run_sim_call, call);
        return;
    }
    if (state->async != NULL) {
        async_call(state->async, pst_lane_stream(state->compute), run, argument, bytes);
        return;
    }
    memcpy(copy, argument, bytes);
    (void)run(copy);
}

/* From there. */
static inline void note_wrong(rank_state *state, const char *what, size_t which, size_t element,
                              float found, float expected) {
    if (__atomic_load_n(&state->is_wrong, __ATOMIC_RELAXED)) return;
    (void)snprintf(state->wrong, sizeof state->wrong, "%s %zu, element %zu: %g instead of %g", what,
                   which, element, (double)found, (double)expected);
    __atomic_store_n(&state->is_wrong, 1,
                     __ATOMIC_RELEASE); /* pairs with the one in finish_compute */
}

static inline pst_device *device_of(const rank_state *state) {
    return state->sim != NULL ? state->sim : state->async != NULL ? &state->async->device : NULL;
}

/* 0: not within ten seconds. */
static inline int drain_compute(const rank_state *state) {
    pst_device *device = device_of(state);
    pst_event *event;
    (void)device->ops->event_create(device, 0, &event);
    (void)device->ops->event_record(device, event, pst_lane_stream(state->compute));
    pst_status status = PST_PENDING;
    for (int i = 0; i < 200000 && status == PST_PENDING; i++) {
        status = device->ops->event_query(device, event);
        if (status == PST_PENDING) async_sleep(50);
    }
    device->ops->event_destroy(device, event);
    return status == PST_OK;
}

/* Waits until compute has done all, and looks what it has found. */
static inline void finish_compute(rank_state *state) {
    if (!is_on_host(state) && !drain_compute(state))
        fail_at(state, __FILE__, __LINE__, "the compute stream hangs");
    if (__atomic_load_n(&state->is_wrong, __ATOMIC_ACQUIRE))
        fail_at(state, __FILE__, __LINE__, state->wrong);
}

#endif
