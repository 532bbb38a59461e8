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

/* ---- building ------------------------------------------------------------------------- */

typedef struct pst__pair {
    uint32_t from, to;
} pst__pair;

/* A line of the outer thread's program. */
typedef struct pst__outer {
    uint32_t task;
    uint32_t is_wait;
} pst__outer;

/* ---- tasks of growing graphs --------------------------------------------------------------
 *
 * Their successors are a list, which is closed when the task releases them. */

typedef struct pst__grown pst__grown;

#define PST__LINKS_INLINE 4u

/* An edge: stands in its source's list, lies in its target's block. */
typedef struct pst__link {
    struct pst__link *next;
    pst__grown *target;
    pst__grown *source; /* held while the target's stream may have to wait for its event */
    uint64_t flow;      /* the arrow that the source has begun in the trace; 0: none */
} pst__link;

struct pst__grown {
    pst__node node;
    pst__detail detail;
    pst__link *early; /* successors that the launch releases; closed by then */
    pst__link *late;  /* successors that the end releases; closed by then */
    pst__link *links; /* to the predecessors; own_links or from the heap */
    uint32_t link_count;
    uint32_t references; /* one of the graph until the task has ended, one of the caller's handle */
    pst__share *share;
    pst__grown *next, *previous; /* among spare blocks, or among the graph's closed gates */
    ck_stack_entry_t released;
    pst__link own_links[PST__LINKS_INLINE];
};

static inline pst__grown *pst__grown_of(const pst__node *node) {
    return (pst__grown *)(uintptr_t)node;
}

/* What closes a list: from then on the task's launch or end is known. */
extern pst__link pst__grown_closed;

/* 0 when the list is closed already. Release: the source's thread sees the link's fields (its swap
 * acquires); acquire: a closed list shows what the source did before. */
static inline int pst__grown_push(pst__link **list, pst__link *link) {
    pst__link *head = pst__load_acquire(list);
    do {
        if (head == &pst__grown_closed) return 0;
        link->next = head;
    } while (!pst__cas_acq_rel(list, &head, link));
    return 1;
}

/* ---- the graph -------------------------------------------------------------------------- */

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

/* ---- its launches ----------------------------------------------------------------------- */

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

/* 1 when no graph has unfinished tasks. */
int pst__runtime_is_idle(pst_runtime *runtime);

/* What a thread asks about: a node in one launch of its graph. */
typedef struct pst__question {
    pst_graph *graph;
    pst__node *node;
    uint64_t number;
    int launched_suffices;
} pst__question;

/* The state of the node in the launch asked about. A node that is in a later launch has ended in
 * this one, and only the launch's own status is still known. */
static inline pst__task_state pst__look(const pst__question *asked, pst_status *status) {
    /* Acquire: pairs with the release in pst__node_become; who sees the end sees what the task did.
     */
    const uint32_t word = pst__load_acquire(&asked->node->word);
    const uint32_t ahead =
        (pst__word_number(word) - (uint32_t)(asked->number & PST__NUMBER_MASK)) & PST__NUMBER_MASK;
    if (ahead == 0) {
        *status = pst__word_status(word);
        return pst__word_state(word);
    }
    *status = PST_OK;
    if (ahead > PST__NUMBER_MASK / 2) return PST__TASK_PENDING;
    /* Relaxed: the node's own error comes before its later word, which is acquired above. */
    *status = (pst_status)pst__load_relaxed(&pst__graph_run(asked->graph, asked->number)->status);
    return PST__TASK_DONE;
}

/* Tasks and gates that have not ended, for a text. */
uint32_t pst__graph_count_unfinished(pst_graph *graph);

/* ---- its parts -------------------------------------------------------------------------- */

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

/* Frees what sealing has made. */
void pst__graph_free_sealed_arrays(pst_graph *graph);

/* Frees a graph whatever its state; no lane may know its tasks any more. */
void pst__graph_free(pst_graph *graph);

/* The node of a handle, or NULL when the handle is none of this graph's. */
static inline pst__node *pst__graph_node(pst_graph *graph, pst_task task) {
    if (graph == NULL || task.graph != graph) return NULL;
    if (graph->kind == PST_GRAPH_GROWING) return (pst__node *)(uintptr_t)task.id;
    return task.id < graph->node_count ? &graph->nodes[task.id] : NULL;
}

static inline void pst__detail_fill(pst__detail *detail, const pst_task_options *options) {
    detail->name = options->name;
    detail->test = options->work.test;
    detail->done = options->done;
    detail->done_argument = options->done_argument;
    detail->ticket = options->ticket;
    detail->bytes = options->bytes;
    detail->path = options->path;
    detail->priority = (int16_t)options->priority;
    detail->after_count = (uint16_t)options->after_event_count;
    for (uint32_t i = 0; i < detail->after_count; i++)
        detail->after[i] = options->after_events[i];
}

/* Sees to it that the task's event, which is kept from launch to launch, is of this device. */
pst_status pst__detail_make_event(pst__detail *detail, pst_device *device);

/* PST_EINVAL, with a text, unless `borrowed` is NULL or a borrowed lane of the node's runtime. */
pst_status pst__graph_check_borrowed(const pst_lane *borrowed, const pst__node *node);

/* Makes the lane's stream wait for the events of a growing task's predecessors. */
pst_status pst__grown_wait_events(const pst__node *node, const pst_lane *lane);
/* A growing task is launched or canceled: it needs its predecessors no more. */
void pst__grown_forget_predecessors(pst__node *node);
/* Gives up a reference to a growing task. The graph's own goes when the task has ended. */
void pst__grown_drop(pst__grown *task);
/* Frees those to its predecessors. */
void pst__grown_free_links(const pst_graph *graph, pst__grown *task);
/* Takes a gate that is opened off its graph's list; the caller holds the graph's lock. */
void pst__grown_delist_gate(pst__node *gate);

#endif
