/* Graphs: what both kinds share, and the arrays of the sealed kind. */
#ifndef PST_SCHED_GRAPH_H
#define PST_SCHED_GRAPH_H

#include "sched/lane.h"
#include "sched/slab.h"

/* One launch of a graph. Two are kept: launch k+1 may begin while tasks of k are launched and not
 * done. A growing graph uses the first. */
struct pst__run {
    uint64_t number;
    uint32_t unlaunched; /* sealed graphs only */
    uint32_t unfinished; /* without the tasks that graph->added counts: see pst__run_unfinished */
    int status;          /* the first error */
};

/* What a lane gets of a launch: the tasks that it can start with (BY_READINESS), or all its tasks
 * in the order in which they were added (BY_SUBMISSION). Queued like a node. */
typedef struct pst__batch {
    pst__node item;
    const uint32_t *indices;
    uint32_t count, cursor;
} pst__batch;

typedef struct pst__pair {
    uint32_t from, to;
} pst__pair;

/* A line of the outer thread's program. */
typedef struct pst__outer {
    uint32_t task;
    uint32_t is_wait;
} pst__outer;

typedef struct pst__grown pst__grown;

#define PST__LAST_TASKS 16u

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
    /* tasks without successors; none when they are too many to look at */
    uint32_t last[PST__LAST_TASKS], last_count;
    pst__batch *batches;
    size_t batch_count;
    uint32_t *batch_indices;
    size_t batch_index_count;

    /* growing */
    pst__slab tasks;
    pst__grown *spare; /* blocks to use again; the adding thread's */
    uint32_t added;    /* tasks and gates so far; the adding thread's */
    pst__grown *open_gates;

    /* what lanes write, apart from what every task reads */
    _Alignas(PST__CACHE_LINE) pst__run runs[2];
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

/* Tasks and gates of the run that have not ended. Of a growing graph `unfinished` counts down from
 * 0 and `added` up, so that the adding thread and the lanes write to different lines. Acquire:
 * pairs with pst__run_count. `added` is looked at later, and so includes whatever has ended by
 * then. */
static inline uint32_t pst__run_unfinished(const pst_graph *graph, const pst__run *run) {
    const uint32_t unfinished = pst__load_acquire(&run->unfinished);
    return unfinished + pst__load_relaxed(&graph->added);
}

/* The same of both runs. */
static inline uint32_t pst__graph_unfinished(const pst_graph *graph) {
    const uint32_t second = pst__load_acquire(&graph->runs[1].unfinished); /* of sealed graphs */
    return second + pst__run_unfinished(graph, &graph->runs[0]);
}

static inline uint32_t pst__node_index(const pst__node *node) {
    return (uint32_t)(node - node->graph->nodes);
}

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
