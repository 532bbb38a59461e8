/* A runtime with a graph, and bodies that note what happens to them: what whole programs share. */
#ifndef PST_TESTS_MODEL_WORLD_H
#define PST_TESTS_MODEL_WORLD_H

#include "explorer.h"

#include <penstock/graph.h>

enum { WORLD_TASKS = 4 };

/* What a task notes. */
typedef struct body {
    unsigned started, happened, ended; /* happened: on an asynchronous device, its work */
    unsigned place;                    /* among all bodies that happened, from 1 */
    pst_status status;                 /* of the latest callback */
} body;

/* One at a time; zeroed by open_runtime. */
typedef struct model_world {
    pst_runtime *runtime;
    pst_lane *lane;
    pst_graph *graph;
    pst_launch launch;
    pst_task gate, source;
    body bodies[WORLD_TASKS];
    unsigned order;    /* bodies that have happened */
    int inside;        /* host bodies that run at this moment */
    unsigned launches; /* of the sealed graph */
    pst_status poison; /* the runtime's status in the end */
} model_world;
extern model_world world;

void check_ok(pst_status status, const char *what);

void open_runtime(void);
/* Opens world.lane, on the host. */
void open_lane(pst_lane_mode mode, pst_lane_order order);
void open_graph(pst_graph_kind kind);

/* The options of the task with body `index`; `after` NULL: it is ready at once. */
pst_task_options options_of(unsigned index, const pst_task *after);
void add(unsigned index, const pst_task *after, pst_task *task);
void add_gate(void);
/* Seals the graph, and begins its first launch. */
void seal_and_launch(void);
void begin_launch(void);

void open_gate(void);
void pump_turns(int turns);
void pump_once(void);
void pump_twice(void);

/* It has ended in each of so many launches, well each time. */
void check_ran(unsigned index, unsigned times);
void check_ran_once(unsigned index);
/* Nothing is left to do; destroys the graph, if it is there, and the runtime. */
void check_idle_and_destroy(void);

#endif
