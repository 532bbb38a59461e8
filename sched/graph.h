/* Graphs: what both kinds share, and the arrays of the sealed kind. */
#ifndef PST_SCHED_GRAPH_H
#define PST_SCHED_GRAPH_H

#include "sched/lane.h"
#include "sched/share.h"
#include "sched/slab.h"

typedef struct pst__pair {
    uint32_t from, to;
} pst__pair;

/* A line of the outer thread's program. */
typedef struct pst__outer {
    uint32_t task;
    uint32_t is_wait;
} pst__outer;

typedef struct pst__grown pst__grown;

struct pst_graph {
    pst_runtime *runtime;
    char *name;
    pst_graph_kind kind;
    uint64_t id;
    pst_graph *previous, *next; /* of the runtime */

    ck_spinlock_t lock; /* orders the begin of a launch, a cancel, and the list of grown gates */
    int stop;           /* tasks that are not launched end with this status */
    uint64_t number;    /* of the latest launch */

    /* sealed: built by pst_graph_add and pst_graph_add_edge, frozen by pst_graph_seal */
    int sealed;
    int disordered;   /* an edge leads back in the order of adding, or there is an outer program */
    pst__node *nodes; /* one more than there are tasks: the end of the last one's edges */
    size_t node_count, node_capacity;
    pst__slab details;
    pst__pair *pairs;
    size_t pair_count, pair_capacity;
    pst__outer *outer;
    size_t outer_count, outer_capacity;
    uint32_t *gates;
    size_t gate_count, gate_capacity;
    uint32_t *edges; /* successors, node by node */
    /* predecessors on other lanes, node by node: cross[cross_first[i], cross_first[i + 1]); NULL
     * when there are none */
    uint32_t *cross_first, *cross;
    size_t cross_count;
    uint32_t *batch_indices; /* of all shares */
    size_t batch_index_count;
    uint32_t parts; /* shares with tasks, and gates: what a run counts down */
    int is_ordered; /* several queues launch in the order of adding */

    pst__share *shares; /* newest first; published by the thread that builds or adds */
    /* The same by lane->index, for that thread, and of a sealed graph for the lanes' owners. */
    pst__share **share_of;
    size_t share_room;

    /* growing */
    pst__slab tasks;
    pst__grown *spare; /* blocks to use again; the adding thread's */
    uint32_t added;    /* tasks and gates so far; the adding thread's */
    pst__grown *open_gates;

    /* what lanes write, apart from what every task reads */
    _Alignas(PST__CACHE_LINE) pst__run runs[2];
    uint32_t passing;    /* threads that are in a gate's end */
    ck_stack_t released; /* blocks of a growing graph that any thread has given back */
};

/* The launch that un-launched nodes of this graph belong to, or the one that `number` names. */
static inline pst__run *pst__graph_run(pst_graph *graph, uint64_t number) {
    return &graph->runs[number & 1];
}

/* The latest launch's number. Acquire: pairs with the release in pst_graph_launch, so that the run
 * of that number is found set up. */
static inline uint64_t pst__graph_number(const pst_graph *graph) {
    return pst__load_acquire(&graph->number);
}

/* Of a growing graph what is added, gates too, less the tasks that have ended, or are left. */
uint32_t pst__grown_unended(const pst_graph *graph);
uint32_t pst__grown_unleft(const pst_graph *graph);

/* 0 when all of the run has ended: of a sealed graph, its parts that have not, of a growing one,
 * its tasks and gates. Acquire: pairs with the counting in share.h and advance.c. */
static inline uint32_t pst__run_unended(const pst_graph *graph, const pst__run *run) {
    const uint32_t unended = (uint32_t)pst__load_acquire(&run->open);
    return graph->kind == PST_GRAPH_SEALED ? unended : unended + pst__grown_unended(graph);
}

/* 0 when no lane touches anything of the run any more, and so every callback has returned. */
static inline uint32_t pst__run_unleft(const pst_graph *graph, const pst__run *run) {
    if (graph->kind == PST_GRAPH_SEALED) return pst__load_acquire(&run->unleft);
    return (uint32_t)pst__load_acquire(&run->open) + pst__grown_unleft(graph);
}

/* Of a growing graph what is left has ended, and its gates are counted with both. */
static inline int pst__run_is_over(const pst_graph *graph, const pst__run *run) {
    return (graph->kind == PST_GRAPH_GROWING || (uint32_t)pst__load_acquire(&run->open) == 0) &&
           pst__run_unleft(graph, run) == 0;
}

/* The same for all runs that can be in flight. */
static inline int pst__graph_has_ended(const pst_graph *graph) {
    return pst__run_unended(graph, &graph->runs[0]) == 0 &&
           (graph->kind == PST_GRAPH_GROWING || pst__run_unended(graph, &graph->runs[1]) == 0);
}

static inline int pst__graph_is_over(const pst_graph *graph) {
    return pst__run_is_over(graph, &graph->runs[0]) &&
           (graph->kind == PST_GRAPH_GROWING || pst__run_is_over(graph, &graph->runs[1]));
}

static inline uint32_t pst__node_index(const pst__node *node) {
    return (uint32_t)(node - node->graph->nodes);
}

/* The graph's share on that lane, made when it is not there, as is its leader's; NULL without
 * memory. For the thread that builds the graph or adds to it. */
pst__share *pst__graph_make_share(pst_graph *graph, pst_lane *lane);

static inline pst__share *pst__graph_share(pst_graph *graph, pst_lane *lane) {
    pst__share *share = lane->index < graph->share_room ? graph->share_of[lane->index] : NULL;
    return share != NULL ? share : pst__graph_make_share(graph, lane);
}

/* Tasks and gates that have not ended, for a text. */
uint32_t pst__graph_count_unfinished(pst_graph *graph);

/* PST_ESTATE, naming `task`, unless the graph is one that is built and not sealed yet. */
pst_status pst__graph_check_building(pst_graph *graph, const char *task);

/* Frees what sealing has made. */
void pst__graph_free_sealed_arrays(pst_graph *graph);

/* Frees a graph whatever its state; no lane may know its tasks any more. */
void pst__graph_free(pst_graph *graph);

/* The node of a handle, or NULL when the handle is none of this graph's. */
pst__node *pst__graph_node(pst_graph *graph, pst_task task);

/* The options of a task (NULL: they could not be read), checked; the error text says which graph
 * and task. */
pst_status pst__task_options_check(pst_graph *graph, const pst_task_options *options);
void pst__detail_fill(pst__detail *detail, const pst_task_options *options);

/* Ends what is not launched of the current launch with `status`. Any thread. */
void pst__graph_cancel(pst_graph *graph, pst_status status);

/* Its part of the gates: those that are closed end with `status`. The caller holds the graph's
 * lock. */
void pst__gates_cancel(pst_graph *graph, pst_status status);

/* ---- sealing ---------------------------------------------------------------------------- */

/* PST_ECYCLE with the cycle's names in the error text. */
pst_status pst__graph_check_cycles(pst_graph *graph);

/* ---- growing graphs --------------------------------------------------------------------- */

void pst__grown_init_tasks(pst_graph *graph);
pst_status pst__grown_add(pst_graph *graph, const pst_task_options *options, pst_task *task);
pst_status pst__grown_add_gate(pst_graph *graph, const char *name, pst_task *gate);
void pst__grown_free_all(pst_graph *graph);

#endif
