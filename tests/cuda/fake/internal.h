/* What the fake driver's files share. One lock guards everything. */
#ifndef PST_TESTS_CUDA_FAKE_INTERNAL_H
#define PST_TESTS_CUDA_FAKE_INTERNAL_H

#include "fake_driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* ---- calls.c ------------------------------------------------------------------------ */

/* Begins an entry point: counts it, takes the lock. CUDA_SUCCESS, or the fault that it answers. */
CUresult fake_enter(const char *name, CUstream stream, int needs_context);
void fake_leave(void);
int fake_lacks(const char *name);

/* CALL(cuEventQuery, NULL) ... return fake_end(CUDA_SUCCESS); the NAME is not expanded, although
 * cuda.h has macros for many of them. */
#define CALL(name, stream) CALL_(#name, stream, 1)
#define CALL_GLOBAL(name)  CALL_(#name, NULL, 0)
#define CALL_(text, stream, needs)                                                                 \
    do {                                                                                           \
        const CUresult fault_ = fake_enter(text, stream, needs);                                   \
        if (fault_ != CUDA_SUCCESS) return fault_;                                                 \
    } while (0)

static inline CUresult fake_end(CUresult result) {
    fake_leave();
    return result;
}

/* ---- device.c ----------------------------------------------------------------------- */

#define FAKE_DEVICES 8

int fake_has_context(void);
int fake_is_relaxed(void); /* the thread, for captures */

/* ---- stream.c: under the lock ------------------------------------------------------- */

typedef struct operation {
    struct operation *next;
    int (*run)(struct operation *self); /* 0: it cannot run yet */
    void *owned;                        /* freed with it, or kept in a graph for its launches */
    union {
        struct {
            CUdeviceptr destination, source;
            size_t destination_pitch, source_pitch, bytes, rows;
        } copy;
        struct {
            CUdeviceptr address;
            uint32_t value;
        } flag;
        struct {
            CUevent event;
            uint64_t record;
        } event;
        struct {
            CUhostFn function;
            void *argument;
        } host;
        struct {
            void (*run)(const void *arguments);
        } kernel;
        struct {
            int (*is_over)(void *argument);
            void *argument;
        } foreign;
    } of;
} operation;

int fake_is_captured(CUstream stream);

/* A copy of `made` at the end of the stream's queue. */
CUresult fake_enqueue(CUstream stream, const operation *made);

/* ---- graph.c: under the lock -------------------------------------------------------- */

#define FAKE_PENDING 9 /* more would be edges that say what others say, too */

/* What a stream has in the graph that it is captured into. */
typedef struct fake_branch {
    fake_graph *graph;                        /* NULL: it is not captured */
    int last;                                 /* its latest node; -1: none */
    int pending[FAKE_PENDING], pending_count; /* nodes that its next one comes behind */
} fake_branch;

void fake_branch_begin(fake_branch *branch, fake_graph *graph);
CUresult fake_branch_add(fake_branch *branch, const operation *made);
CUresult fake_branch_wait(fake_branch *branch, int node);
/* With one reference; without any, what was to be called then has been. */
fake_graph *fake_graph_create(void);
void fake_graph_retain(fake_graph *graph);
void fake_graph_release(fake_graph *graph);
void fake_graph_at_destroy(fake_graph *graph, void (*call)(void *argument), void *argument);
/* CUDA_ERROR_STREAM_CAPTURE_UNJOINED: a node is not before the end of this branch. */
CUresult fake_graph_end(const fake_branch *origin);
/* A launch: all nodes, in a random order that their edges and what they wait for allow. */
operation fake_graph_launch(fake_graph *graph, size_t (*random_below)(size_t limit));

/* ---- memory.c: under the lock ------------------------------------------------------- */

/* 1 when a device can reach these bytes: mapped or registered. */
int fake_reaches(CUdeviceptr address, size_t bytes);

#endif
