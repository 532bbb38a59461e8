#include "sched/flight.h"

#include "base/clock.h"
#include "sched/order.h"
#include "sched/report.h"
#include "tracing/json.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_BYTES    1000000u /* about: of records */
#define AGAIN_NS      1000000000u
#define TRIES         100u /* to own a lane whose worker asks its device all the time */
#define PATH_BYTES    1024
#define LAUNCHES      128u
#define TASKS         96u
#define TASKS_A_LANE  8u
#define GATES         32u
#define GATES_A_GRAPH 4u
#define WAITS         8u

/* ---- pages of ranks ----------------------------------------------------------------------- */

struct pst__followed {
    pst__followed *next;
    int rank;
    const pst_page *page;
};

static pst_status follow(pst_runtime *runtime, int rank, const pst_page *page) {
    pst__flight *flight = &runtime->flight;
    pst__followed *followed = pst__heap_alloc(&runtime->heap, sizeof *followed);
    if (followed == NULL) return PST_ENOMEM;
    *followed = (pst__followed){NULL, rank, page};
    ck_spinlock_lock(&flight->lock);
    pst__followed **end = &flight->followed;
    while (*end != NULL)
        end = &(*end)->next;
    pst__store_release(end, followed); /* pairs with the acquires in put_places */
    ck_spinlock_unlock(&flight->lock);
    return PST_OK;
}

pst_status pst_runtime_follow(pst_runtime *runtime, int rank, const pst_page *page) {
    if (runtime == NULL || page == NULL || rank < 0 || rank >= runtime->flight.world_size)
        return PST_EINVAL;
    return follow(runtime, rank, page);
}

/* ---- waits ------------------------------------------------------------------------------- */

void pst__flight_enter(pst__long_wait *wait) {
    pst__flight *flight = &wait->runtime->flight;
    if (wait->begin != 0) return;
    wait->begin = pst__now() - wait->what.waited_ns;
    ck_spinlock_lock(&flight->lock);
    wait->next = flight->waits;
    if (wait->next != NULL) wait->next->previous = wait;
    flight->waits = wait;
    ck_spinlock_unlock(&flight->lock);
}

void pst__flight_leave(pst__long_wait *wait) {
    pst__flight *flight = &wait->runtime->flight;
    if (wait->begin == 0) return;
    ck_spinlock_lock(&flight->lock);
    if (wait->previous != NULL)
        wait->previous->next = wait->next;
    else
        flight->waits = wait->next;
    if (wait->next != NULL) wait->next->previous = wait->previous;
    ck_spinlock_unlock(&flight->lock);
}

/* ---- what is under way: copied first, and written when nobody's lock is held -------------- */

typedef struct open_task {
    char task[64], lane[32], graph[32];
    uint64_t ticket, since; /* pst__now(); 0: not known */
    const char *state;
} open_task;

typedef struct open_wait {
    char task[64], lane[32], graph[32], cause[PST__CAUSE_BYTES];
    uint64_t ticket, since;
} open_wait;

typedef struct closed_gate {
    char gate[64], graph[32];
} closed_gate;

typedef struct view {
    pst_runtime *runtime;
    pst_dump_cause cause;
    pst_status status;
    const char *reason;
    uint64_t now;
    size_t launch_count, task_count, gate_count, wait_count;
    pst_recent launches[LAUNCHES];
    open_task tasks[TASKS];
    closed_gate gates[GATES];
    open_wait waits[WAITS];
} view;

#define COPY(field, text) ((void)snprintf(field, sizeof(field), "%s", text))

static void add_task(view *view, const pst_lane *lane, const pst__node *node, const char *state) {
    if (view->task_count == TASKS) return;
    open_task *task = &view->tasks[view->task_count++];
    COPY(task->task, node == NULL ? "" : pst__node_name(node));
    COPY(task->graph, node == NULL ? "" : node->graph->name);
    COPY(task->lane, lane->name);
    task->ticket = node == NULL ? 0 : pst__node_ticket(node);
    task->since = node == NULL || node->detail == NULL ? 0 : node->detail->launched_at;
    task->state = state;
}

static int own(pst_lane *leader) {
    for (unsigned i = 0; i < TRIES; i++) {
        if (pst__lane_try_own(leader)) return 1;
        (void)sched_yield();
    }
    return 0;
}

/* What a thread serves that does not come back, or this very thread, only has its last launches. */
static void take_lane(view *view, pst_lane *lane) {
    if (pst__lane_is_gone(lane)) return;
    if (!own(lane->leader)) {
        ck_spinlock_lock(&view->runtime->lock); /* keeps its name, unless the lane is gone */
        if (!pst__lane_is_gone(lane)) add_task(view, lane, NULL, "a thread serves the lane");
        ck_spinlock_unlock(&view->runtime->lock);
        return;
    }
    const pst__node *node = lane->in_flight.first;
    if (lane->current != NULL) add_task(view, lane, lane->current, "launched");
    for (unsigned i = 0; i < TASKS_A_LANE && node != NULL; i++, node = node->detail->flight_next)
        add_task(view, lane, node, "launched");
    node = pst__lane_oldest(lane);
    if (node != NULL) add_task(view, lane, node, "queued");
    pst__lane_disown(lane->leader, 0, NULL);
}

static void add_gate(view *view, const pst__node *gate) {
    if (view->gate_count == GATES) return;
    closed_gate *closed = &view->gates[view->gate_count++];
    COPY(closed->gate, pst__node_name(gate));
    COPY(closed->graph, gate->graph->name);
}

/* Of the latest launch, the gates that were added first. */
static void take_sealed_gates(view *view, pst_graph *graph) {
    const uint64_t number = pst__graph_number(graph);
    if (number == 0 || pst__run_unended(graph, pst__graph_run(graph, number)) == 0) return;
    for (size_t i = 0, found = 0; i < graph->gate_count && found < GATES_A_GRAPH; i++) {
        pst_status status;
        pst__node *gate = &graph->nodes[graph->gates[i]];
        if (pst__look(&(pst__question){graph, gate, number, 0}, &status) != PST__TASK_PENDING)
            continue;
        add_gate(view, gate);
        found++;
    }
}

static void take_grown_gates(view *view, pst_graph *graph) {
    ck_spinlock_lock(&graph->lock);
    const pst__grown *gate = graph->closed_gates;
    for (unsigned i = 0; i < GATES_A_GRAPH && gate != NULL; i++, gate = gate->next)
        add_gate(view, &gate->node);
    ck_spinlock_unlock(&graph->lock);
}

/* The runtime's lock keeps the graphs. */
static void take_gates(view *view) {
    pst_runtime *runtime = view->runtime;
    ck_spinlock_lock(&runtime->lock);
    for (pst_graph *graph = runtime->graphs; graph != NULL; graph = graph->next)
        if (graph->kind == PST_GRAPH_SEALED)
            take_sealed_gates(view, graph);
        else
            take_grown_gates(view, graph);
    ck_spinlock_unlock(&runtime->lock);
}

/* The lock keeps the waits, and these their graphs. */
static void take_waits(view *view) {
    pst__flight *flight = &view->runtime->flight;
    ck_spinlock_lock(&flight->lock);
    for (pst__long_wait *wait = flight->waits; wait != NULL && view->wait_count < WAITS;
         wait = wait->next) {
        open_wait *open = &view->waits[view->wait_count++];
        COPY(open->task, wait->what.task);
        COPY(open->lane, wait->what.lane);
        COPY(open->graph, wait->asked.graph->name);
        open->ticket = wait->what.ticket;
        open->since = wait->begin;
        pst__report_cause(&wait->asked, open->cause);
    }
    ck_spinlock_unlock(&flight->lock);
}

static void take(view *view) {
    pst_runtime *runtime = view->runtime;
    view->now = pst__now();
    take_waits(view);
    for (pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next)
        take_lane(view, lane);
    take_gates(view);
    view->launch_count = pst_runtime_recent(runtime, view->launches, LAUNCHES);
}

/* ---- as JSON ------------------------------------------------------------------------------ */

static void key(pst__json *json, const char *before, const char *name) {
    pst__json_raw(json, before);
    pst__json_string(json, name);
    pst__json_raw(json, ":");
}

static void text(pst__json *json, const char *before, const char *name, const char *value) {
    key(json, before, name);
    pst__json_string(json, value);
}

static void number(pst__json *json, const char *before, const char *name, uint64_t value) {
    key(json, before, name);
    pst__json_unsigned(json, value);
}

/* How long ago it was, if that is known. */
static void put_age(pst__json *json, const view *view, uint64_t since) {
    if (since != 0) number(json, ",", "age_ns", since < view->now ? view->now - since : 0);
}

static void put_launches(pst__json *json, const view *view) {
    for (size_t i = 0; i < view->launch_count; i++) {
        const pst_recent *launch = &view->launches[i];
        text(json, i == 0 ? "{" : ",\n{", "task", launch->task);
        text(json, ",", "lane", launch->lane);
        number(json, ",", "ticket", launch->ticket);
        pst__json_raw(json, "}");
    }
}

static void put_tasks(pst__json *json, const view *view) {
    for (size_t i = 0; i < view->task_count; i++) {
        const open_task *task = &view->tasks[i];
        text(json, i == 0 ? "{" : ",\n{", "task", task->task);
        text(json, ",", "lane", task->lane);
        text(json, ",", "graph", task->graph);
        number(json, ",", "ticket", task->ticket);
        text(json, ",", "state", task->state);
        put_age(json, view, task->since);
        pst__json_raw(json, "}");
    }
}

static void put_waits(pst__json *json, const view *view) {
    for (size_t i = 0; i < view->wait_count; i++) {
        const open_wait *wait = &view->waits[i];
        text(json, i == 0 ? "{" : ",\n{", "task", wait->task);
        text(json, ",", "lane", wait->lane);
        text(json, ",", "graph", wait->graph);
        number(json, ",", "ticket", wait->ticket);
        text(json, ",", "for", wait->cause);
        put_age(json, view, wait->since);
        pst__json_raw(json, "}");
    }
}

static void put_gates(pst__json *json, const view *view) {
    for (size_t i = 0; i < view->gate_count; i++) {
        text(json, i == 0 ? "{" : ",\n{", "gate", view->gates[i].gate);
        text(json, ",", "graph", view->gates[i].graph);
        pst__json_raw(json, "}");
    }
}

static void put_place(pst__json *json, const view *view, const pst_page *page) {
    char place[256];
    uint64_t since;
    pst_page_describe(page, place, sizeof place, &since);
    const char *fault = pst__page_fault(page);
    const size_t used = strlen(place);
    if (fault != NULL)
        (void)snprintf(place + used, sizeof place - used, "; its process %" PRId64 " %s", page->pid,
                       fault);
    text(json, ",", "place", place);
    put_age(json, view, since);
}

static void put_places(pst__json *json, const view *view) {
    const char *before = "{";
    /* Acquire, as the next one: pairs with the release in follow. */
    const pst__followed *followed = pst__load_acquire(&view->runtime->flight.followed);
    for (; followed != NULL; followed = pst__load_acquire(&followed->next)) {
        number(json, before, "rank", (uint64_t)followed->rank);
        put_place(json, view, followed->page);
        pst__json_raw(json, "}");
        before = ",\n{";
    }
}

typedef void (*put_function)(pst__json *json, const view *view);

static void put_list(pst__json *json, const view *view, const char *name, put_function put) {
    key(json, ",\n", name);
    pst__json_raw(json, "[");
    put(json, view);
    pst__json_raw(json, "]");
}

static void put_head(const void *context, pst__json *json) {
    static const char *const causes[] = {"request", "signal", "deadline", "failure"};
    const view *view = context;
    const pst_runtime *runtime = view->runtime;
    char host[65] = "";
    (void)gethostname(host, sizeof host - 1);
    text(json, ",\n\"dump\":{", "name", runtime->flight.name);
    text(json, ",", "host", host);
    number(json, ",", "pid", (uint64_t)getpid());
    number(json, ",", "written", pst__clock_read(CLOCK_REALTIME));
    text(json, ",", "cause", causes[view->cause]);
    text(json, ",", "status", pst_status_name(view->status));
    text(json, ",", "reason", view->reason);
    put_list(json, view, "places", put_places);
    put_list(json, view, "waits", put_waits);
    put_list(json, view, "tasks", put_tasks);
    put_list(json, view, "gates", put_gates);
    put_list(json, view, "launches", put_launches);
    pst__json_raw(json, "}");
}

/* ---- the file ----------------------------------------------------------------------------- */

static int path_of(const pst_runtime *runtime, const char *folder, const char *end, char *path) {
    const int bytes = snprintf(path, PATH_BYTES, "%s/%s-rank%d.json%s", folder,
                               runtime->flight.name, runtime->rank, end);
    return bytes >= 0 && bytes < PATH_BYTES;
}

/* Whole or not at all, as far as readers see. `error`: an errno with PST_EIO. */
static pst_status write_view(const view *view, const char *folder, const char *path, int *error) {
    const pst__trace_head head = {put_head, view};
    char part[PATH_BYTES];
    *error = ENAMETOOLONG;
    if (!path_of(view->runtime, folder, ".part", part)) return PST_EIO;
    *error = 0;
    (void)mkdir(folder, 0777); /* it is there, or the file cannot be opened */
    pst_status status = pst__trace_dump(view->runtime->trace, part, FILE_BYTES, &head, error);
    if (status == PST_OK && rename(part, path) != 0) {
        *error = errno;
        status = PST_EIO;
    }
    if (status != PST_OK) (void)unlink(part);
    return status;
}

static pst_status dump(pst_runtime *runtime, const char *folder, pst_dump_cause cause,
                       pst_status status, const char *reason, char *path, int *error) {
    *error = ENAMETOOLONG;
    if (!path_of(runtime, folder, "", path)) return PST_EIO;
    view *view = pst__heap_alloc(&runtime->heap, sizeof *view);
    if (view == NULL) return PST_ENOMEM;
    view->runtime = runtime;
    view->cause = cause;
    view->status = status;
    view->reason = reason;
    take(view);
    const pst_status written = write_view(view, folder, path, error);
    pst__heap_free(&runtime->heap, view, sizeof *view);
    return written;
}

/* One thread at a time writes. Waits for another one, so that whoever fails beside it goes on when
 * there is a file. */
static void begin_writing(pst__flight *flight) {
    /* Acquires what the one before has released in end_writing. */
    for (uint32_t nobody = 0; !pst__cas_acq_rel(&flight->is_writing, &nobody, 1); nobody = 0)
        (void)sched_yield();
}

static void end_writing(pst__flight *flight) {
    pst__store_release(&flight->is_writing, 0); /* pairs with the exchange in begin_writing */
}

void pst__flight_failed(pst_runtime *runtime, pst_dump_cause cause, pst_status status,
                        const char *reason) {
    pst__flight *flight = &runtime->flight;
    if (flight->folder == NULL) return;
    char path[PATH_BYTES], why[128];
    int error = 0;
    begin_writing(flight);
    const int is_due = flight->written == 0 || pst__now() - flight->written > AGAIN_NS;
    const pst_status written =
        is_due ? dump(runtime, flight->folder, cause, status, reason, path, &error) : PST_PENDING;
    if (is_due) flight->written = pst__now();
    end_writing(flight);
    if (written == PST_OK)
        pst__log(&runtime->error, PST_LOG_WARNING, "rank %d: the flight record is in %s",
                 runtime->rank, path);
    else if (written < 0)
        pst__log(&runtime->error, PST_LOG_WARNING,
                 "rank %d: the flight record could not be written to %s: %s", runtime->rank, path,
                 written == PST_EIO ? strerror_r(error, why, sizeof why)
                                    : pst_status_text(written));
}

pst_status pst_trace_dump(pst_runtime *runtime, const char *folder, pst_dump_cause cause,
                          const char *reason, char *path, size_t size) {
    if (runtime == NULL || cause < PST_DUMP_REQUEST || cause > PST_DUMP_FAILURE) return PST_EINVAL;
    pst__flight *flight = &runtime->flight;
    if (folder == NULL) folder = flight->folder;
    if (folder == NULL)
        return pst__runtime_fail(runtime, PST_EINVAL,
                                 "no folder for the flight record: give one, or set PENSTOCK_DUMP");
    char own_path[PATH_BYTES], why[128];
    int error = 0;
    begin_writing(flight);
    const pst_status status = dump(runtime, folder, cause, pst_runtime_status(runtime),
                                   reason == NULL ? "" : reason, own_path, &error);
    end_writing(flight);
    if (status == PST_OK && path != NULL) (void)snprintf(path, size, "%s", own_path);
    if (status == PST_OK) return PST_OK;
    return pst__runtime_fail(
        runtime, status, "the flight record cannot be written to %s: %s", folder,
        status == PST_EIO ? strerror_r(error, why, sizeof why) : pst_status_text(status));
}

/* ---- life --------------------------------------------------------------------------------- */

pst_status pst__flight_init(pst_runtime *runtime, const pst_runtime_options *options) {
    pst__flight *flight = &runtime->flight;
    ck_spinlock_init(&flight->lock);
    flight->world_size = options->world_size == 0 ? 1 : options->world_size;
    if (options->page != NULL && follow(runtime, options->rank, options->page) != PST_OK)
        return PST_ENOMEM;
    const char *folder =
        options->dump_folder == NULL ? getenv("PENSTOCK_DUMP") : options->dump_folder;
    flight->name = pst__heap_text(&runtime->heap,
                                  options->dump_name == NULL ? "penstock" : options->dump_name);
    if (flight->name == NULL) return PST_ENOMEM;
    for (char *at = flight->name; *at != '\0'; at++)
        if (*at == '/') *at = '-';
    if (folder == NULL || folder[0] == '\0') return PST_OK;
    flight->folder = pst__heap_text(&runtime->heap, folder);
    return flight->folder == NULL ? PST_ENOMEM : PST_OK;
}

void pst__flight_free(pst_runtime *runtime) {
    pst__heap_free_text(&runtime->heap, runtime->flight.folder);
    pst__heap_free_text(&runtime->heap, runtime->flight.name);
    for (pst__followed *followed = runtime->flight.followed, *next; followed != NULL;
         followed = next) {
        next = followed->next;
        pst__heap_free(&runtime->heap, followed, sizeof *followed);
    }
}
