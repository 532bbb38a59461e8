/* Graphs: what both kinds share, and the arrays of the sealed kind. */
#ifndef PST_SCHED_GRAPH_H
#define PST_SCHED_GRAPH_H

#include "sched/lane.h"

typedef struct pst__share pst__share;

/* A graph's tasks on one lane: what a launch hands to the lane, and how many of the tasks are
 * launched, have ended, and are left (the lane touches nothing of them any more).
 *
 * The lane's owner counts, in a line of its own and before anybody can see what is counted: a
 * launch before a callback, an end before a callback, a wait's end or a wake-up. So whoever learns
 * of a task's end in whatever way finds it counted. Of a sealed graph's run only the last task of a
 * share is counted in the run (pst__run); of a growing graph, whoever asks adds up the shares. */
struct pst__share {
    /* Sealed graphs, in the share of a queue's lane (a leader's): what a launch pushes: the tasks
     * that can start at once (BY_READINESS), or all in the order of adding (BY_SUBMISSION), those
     * of followers too. First, as it is queued like a node. */
    pst__node item;
    const uint32_t *indices;
    uint32_t count, cursor;
    uint32_t tasks; /* in all; of a growing graph, so far */
    pst_lane *lane;
    pst__share *next; /* of the graph; shares are only added */

    /* The owner's. Sealed graphs: of `tasks`, by the run's number & 1, as two runs can be in
     * flight; whoever counts the last one begins anew. It leaves one task after the other, and so
     * has left all when it leaves the last that ends. */
    _Alignas(PST__CACHE_LINE) uint32_t unlaunched;
    uint32_t unended[2];
    uint32_t ended, left; /* growing graphs */
};

/* One launch of a graph. Two are kept: launch k+1 may begin while tasks of k are launched and not
 * done. A growing graph uses the first. */
typedef struct pst__run {
    uint64_t number;
    /* Sealed graphs: shares and gates of which something has not ended (the low half), is not
     * launched (the high half); shares of which something is not left. A growing graph's low half
     * counts ended gates, down from 0. One word, as a gate is launched and ends at once: whoever
     * finds the one may rely on the other. */
    uint64_t open;
    uint32_t unleft;
    int status; /* the first error */
} pst__run;

#define PST__RUN_UNENDED    ((uint64_t)1)
#define PST__RUN_UNLAUNCHED ((uint64_t)1 << 32)

/* Counts a task; 1 for the last of the share, which is to be counted in the run. */
static inline int pst__share_is_last(uint32_t *count, const pst__share *share) {
    if (--*count != 0) return 0;
    *count = share->tasks;
    return 1;
}

/* Growing graphs. Release: pairs with the acquire of whoever adds up. */
static inline void pst__share_count_grown(uint32_t *counted) {
    pst__store_release(counted, *counted + 1);
}

/* ---- graphs --------------------------------------------------------------------------- */

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
    int is_launchable; /* pst_graph_seal has checked it */
    int disordered;    /* an edge leads back in the order of adding, or there is an outer program */
    pst__node *nodes;  /* one more than there are tasks: the end of the last one's edges */
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
    pst__grown *closed_gates;

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

/* What was added to a growing graph, gates too, less the tasks that have ended, or are left. */
uint32_t pst__grown_unended(const pst_graph *graph);
uint32_t pst__grown_unleft(const pst_graph *graph);

/* 0 when all of the run has ended: of a sealed graph, its parts that have not, of a growing one,
 * its tasks and gates. Acquire: pairs with pst__share_count_grown and the counting in advance.c. */
static inline uint32_t pst__run_unended(const pst_graph *graph, const pst__run *run) {
    const uint32_t unended = (uint32_t)pst__load_acquire(&run->open);
    return graph->kind == PST_GRAPH_SEALED ? unended : unended + pst__grown_unended(graph);
}

/* 0 when no lane touches anything of the run any more, and so every callback has returned. */
static inline uint32_t pst__run_unleft(const pst_graph *graph, const pst__run *run) {
    if (graph->kind == PST_GRAPH_SEALED) return pst__load_acquire(&run->unleft);
    return (uint32_t)pst__load_acquire(&run->open) + pst__grown_unleft(graph);
}

/* What is left of a growing graph has ended, and its gates are counted with both. */
static inline int pst__run_is_done(const pst_graph *graph, const pst__run *run) {
    return (graph->kind == PST_GRAPH_GROWING || (uint32_t)pst__load_acquire(&run->open) == 0) &&
           pst__run_unleft(graph, run) == 0;
}

/* The same for all runs that can be in flight. */
static inline int pst__graph_has_ended(const pst_graph *graph) {
    return pst__run_unended(graph, &graph->runs[0]) == 0 &&
           (graph->kind == PST_GRAPH_GROWING || pst__run_unended(graph, &graph->runs[1]) == 0);
}

static inline int pst__graph_is_done(const pst_graph *graph) {
    return pst__run_is_done(graph, &graph->runs[0]) &&
           (graph->kind == PST_GRAPH_GROWING || pst__run_is_done(graph, &graph->runs[1]));
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

void pst__detail_fill(pst__detail *detail, const pst_task_options *options);
/* Sees to it that the task's event, which is kept from launch to launch, is of this device. */
pst_status pst__detail_make_event(pst__detail *detail, pst_device *device);
void pst__detail_drop_event(pst__detail *detail);

/* Ends what is not launched of the current launch with `status`. Any thread. */
void pst__graph_cancel(pst_graph *graph, pst_status status);

/* ---- sealing ---------------------------------------------------------------------------- */

/* PST_ECYCLE with the cycle's names in the error text. */
pst_status pst__graph_check_cycles(pst_graph *graph);

/* ---- growing graphs --------------------------------------------------------------------- */

pst_status pst__grown_add(pst_graph *graph, const pst_task_options *options, pst_task *task);
pst_status pst__grown_add_gate(pst_graph *graph, const char *name, pst_task *gate);
void pst__grown_free_all(pst_graph *graph);

#endif
