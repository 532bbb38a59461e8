/* A lane's creation and its end. Threads walk along the lanes of a runtime, of a worker and of an
 * order without a lock, so a lane's memory stays where it is, in all these lists, until the runtime
 * goes. What is destroyed is its name, its stream, its events, its worker's thread; the place
 * serves the next lane that is created to be served alike. */
#include "base/options.h"
#include "sched/calls.h"
#include "sched/device/device.h"
#include "sched/graph.h"
#include "sched/worker.h"

#include <stdio.h>

/* ---- places --------------------------------------------------------------------------- */

/* In the lists that the place is in; one that others have followed, gone themselves by now, still
 * leads an order. */
static int is_served_alike(const pst_lane *place, const pst_lane_options *options) {
    if (options->order_with != NULL)
        return place->leader == options->order_with->leader && place != place->leader;
    if (place->leader != place || place->mode != options->mode) return 0;
    if (place->follower != NULL && !pst__order_is_by_adding(options->order)) return 0;
    return place->mode != PST_LANE_SHARED ||
           pst__load_relaxed(&place->worker) == pst__load_relaxed(&options->share_with->worker);
}

/* The place of a lane that was destroyed and was served like the one to be created; owned. NULL:
 * there is none. */
static pst_lane *take_destroyed(pst_runtime *runtime, const pst_lane_options *options) {
    ck_spinlock_lock(&runtime->lock);
    pst_lane *lane = runtime->lanes;
    while (lane != NULL &&
           (!pst__lane_is_gone(lane) || lane->is_taken || !is_served_alike(lane, options)))
        lane = lane->next;
    if (lane != NULL) lane->is_taken = 1;
    ck_spinlock_unlock(&runtime->lock);
    return lane;
}

/* Closes the lane and gives the place back: it could not be created, or is destroyed. */
static void give_back(pst_lane *lane) {
    pst_runtime *runtime = lane->runtime;
    pst__track_end(lane->track);
    lane->track = NULL;
    ck_spinlock_lock(&runtime->lock); /* whoever names lanes that it does not own holds it */
    pst__lane_close(lane);
    lane->is_taken = 0;
    ck_spinlock_unlock(&runtime->lock);
}

/* ---- creation --------------------------------------------------------------------------- */

static pst_status check_options(pst_runtime *runtime, const pst_lane_options *options) {
    const char *name = options->name;
    if (name == NULL || name[0] == '\0')
        return pst__runtime_fail(runtime, PST_EINVAL, "pst_lane_create: give the lane a name");
    if ((unsigned)options->mode > PST_LANE_BORROWED || (unsigned)options->order >= PST__LANE_ORDERS)
        return pst__runtime_fail(runtime, PST_EINVAL, "lane %s: unknown mode %d or order %d", name,
                                 (int)options->mode, (int)options->order);
    const pst_lane *shared = options->share_with;
    if ((options->mode == PST_LANE_SHARED) != (shared != NULL))
        return pst__runtime_fail(runtime, PST_EINVAL,
                                 "lane %s: `share_with` belongs to mode SHARED and to no other",
                                 name);
    if (shared != NULL && (shared->runtime != runtime || shared->mode != PST_LANE_WORKER))
        return pst__runtime_fail(runtime, PST_EINVAL,
                                 "lane %s: cannot share with lane %s, which has no worker of its "
                                 "own or belongs to another runtime",
                                 name, shared->name);
    return PST_OK;
}

static pst_status check_order(pst_runtime *runtime, const pst_lane_options *options) {
    const pst_lane *leader = options->order_with;
    if (leader == NULL) return PST_OK;
    if (!pst__order_is_by_adding(options->order) || !pst__order_is_by_adding(leader->order) ||
        leader->mode == PST_LANE_BORROWED || leader->runtime != runtime)
        return pst__runtime_fail(runtime, PST_EINVAL,
                                 "lane %s: it cannot have one order with lane %s: both must take "
                                 "tasks, be BY_SUBMISSION and of one runtime",
                                 options->name, leader->name);
    if (options->mode != 0 || options->share_with != NULL)
        return pst__runtime_fail(runtime, PST_EINVAL,
                                 "lane %s: `order_with` lane %s says who serves it; leave `mode` "
                                 "and `share_with` zero",
                                 options->name, leader->name);
    return PST_OK;
}

static pst_status lacks(const pst_lane *lane, pst_status status, const char *what) {
    if (status == PST_OK) return PST_OK;
    return pst__runtime_fail(
        lane->runtime, status, "lane %s: device %s: %s could not be created: %s: %s", lane->name,
        lane->device->ops->name, what, pst_status_text(status), pst__device_text(lane->device));
}

static pst_status get_stream(pst_lane *lane, const pst_lane_options *options) {
    const pst_device_ops *ops = lane->device->ops;
    lane->stream = options->stream;
    if (lane->stream != NULL) return PST_OK;
    lane->owns_stream = 1;
    return lane->mode == PST_LANE_BORROWED
               ? ops->stream_wrap(lane->device, NULL, &lane->stream)
               : ops->stream_create(lane->device, options->priority, &lane->stream);
}

static pst_status open_device(pst_lane *lane, const pst_lane_options *options) {
    const pst_device_ops *ops = lane->device->ops;
    if (ops->api_version != PST_DEVICE_API_VERSION)
        return pst__runtime_fail(lane->runtime, PST_EUNSUPPORTED,
                                 "lane %s: device %s has interface version %u, this library %u",
                                 lane->name, ops->name, ops->api_version, PST_DEVICE_API_VERSION);
    const char *slot = pst__device_lacks(lane->device, PST__NEEDS_STREAMS);
    if (slot != NULL)
        return pst__runtime_fail(lane->runtime, PST_EINVAL,
                                 "lane %s: device %s has no '%s', which lanes need", lane->name,
                                 ops->name == NULL ? "" : ops->name, slot);
    lane->asynchronous = !(ops->caps & PST_DEVICE_STREAM_IS_WORKER);
    pst_status status = get_stream(lane, options);
    if (status != PST_OK) return lacks(lane, status, "its stream");
    if (lane->asynchronous)
        status = ops->event_create(lane->device, 0, &lane->in_flight.tail_event);
    return lacks(lane, status, "its event");
}

static pst_status fill(pst_lane *lane, const pst_lane_options *options) {
    pst_runtime *runtime = lane->runtime;
    lane->device = options->device == NULL ? runtime->host : options->device;
    lane->order = options->order;
    lane->name = pst__heap_text(&runtime->heap, options->name);
    if (lane->name == NULL)
        return pst__runtime_fail(runtime, PST_ENOMEM, "lane %s: no memory", options->name);
    pst_status status = open_device(lane, options);
    if (status == PST_OK)
        status = pst__track_create(runtime->trace, PST__TRACK_LANE, lane->name, &lane->track);
    if (status != PST_OK || lane->mode != PST_LANE_WORKER) return status;
    return pst__worker_start(runtime, lane->name, &lane->worker);
}

/* A borrowed lane of an asynchronous device has events to poll: any worker may do it. Gives those
 * that have none to one. The caller holds the runtime's lock. */
static void adopt_borrowed(pst_runtime *runtime) {
    pst__worker *worker = runtime->workers;
    while (worker != NULL && pst__load_relaxed(&worker->loop.stop))
        worker = worker->next;
    for (pst_lane *lane = runtime->lanes; worker != NULL && lane != NULL; lane = lane->next)
        if (lane->mode == PST_LANE_BORROWED && lane->worker == NULL &&
            (pst__load_relaxed(&lane->asked) & PST__ASKED_HAS_TURNS))
            pst__worker_adopt(worker, lane);
}

/* Joins the order, whose turns may go on meanwhile. The caller holds the runtime's lock. */
static void follow(pst_lane *lane) {
    pst_lane *leader = lane->leader;
    lane->worker = pst__load_relaxed(&leader->worker);
    lane->follower = leader->follower;
    /* Release: a turn that walks along the followers finds the lane complete (turn.c). */
    pst__store_release(&leader->follower, lane);
}

/* Puts the lane under the thread that is to serve it, if there is one. The caller holds the
 * runtime's lock. */
static void find_worker(pst_lane *lane, const pst_lane_options *options) {
    pst_runtime *runtime = lane->runtime;
    if (lane->leader != lane) {
        follow(lane);
        return;
    }
    if (lane->mode == PST_LANE_WORKER) {
        pst__worker *worker = lane->worker;
        worker->next = runtime->workers;
        runtime->workers = worker;
        pst__worker_adopt(worker, lane);
        adopt_borrowed(runtime);
    } else if (lane->mode == PST_LANE_SHARED) {
        pst__worker_adopt(options->share_with->worker, lane);
    } else if (lane->mode == PST_LANE_BORROWED) {
        adopt_borrowed(runtime);
    }
}

static uint32_t asked_of(const pst_lane *lane, const pst_lane_options *options) {
    const int has_turns = lane->asynchronous || lane->mode != PST_LANE_BORROWED;
    const int takes_help =
        lane->leader == lane
            ? options->takes_help
            : (pst__load_relaxed(&lane->leader->asked) & PST__ASKED_TAKES_HELP) != 0;
    return (has_turns ? PST__ASKED_HAS_TURNS : 0u) | (takes_help ? PST__ASKED_TAKES_HELP : 0u);
}

static void enlist(pst_lane *lane, const pst_lane_options *options, int is_new) {
    pst_runtime *runtime = lane->runtime;
    ck_spinlock_lock(&runtime->lock);
    pst__store_relaxed(&lane->asked, asked_of(lane, options));
    if (is_new) {
        lane->index = runtime->lane_count++;
        lane->next = runtime->lanes;
        pst__store_release(&runtime->lanes,
                           lane); /* pairs with the acquire in pst__runtime_lanes */
        find_worker(lane, options);
    } else {
        if (lane->mode == PST_LANE_BORROWED) adopt_borrowed(runtime);
        lane->is_taken = 0;
        pst__store_release(&lane->owned, 0); /* pairs with the acquire in pst__lane_is_gone */
        pst__lane_notify(lane);
    }
    ck_spinlock_unlock(&runtime->lock);
}

static pst_lane *take_place(pst_runtime *runtime, const pst_lane_options *options) {
    pst_lane *lane = take_destroyed(runtime, options);
    if (lane != NULL) return lane;
    lane = pst__heap_alloc(&runtime->heap, sizeof *lane);
    if (lane == NULL) {
        (void)pst__runtime_fail(runtime, PST_ENOMEM, "lane %s: no memory", options->name);
        return NULL;
    }
    lane->runtime = runtime;
    lane->leader = lane;
    lane->mode = options->mode;
    if (options->order_with != NULL) {
        lane->leader = options->order_with->leader;
        lane->mode = lane->leader->mode == PST_LANE_PUMPED ? PST_LANE_PUMPED : PST_LANE_SHARED;
    }
    ck_stack_init(&lane->arrivals.stack);
    return lane;
}

static pst_status create(pst_runtime *runtime, const pst_lane_options *options,
                         pst_lane **created) {
    pst_status status = check_options(runtime, options);
    if (status == PST_OK) status = check_order(runtime, options);
    if (status != PST_OK) return status;
    pst_lane *lane = take_place(runtime, options);
    if (lane == NULL) return PST_ENOMEM;
    const int is_new = !pst__lane_is_gone(lane);
    status = fill(lane, options);
    if (status != PST_OK) {
        if (is_new) {
            pst__track_end(lane->track);
            pst__lane_free(lane);
        } else {
            give_back(lane);
        }
        return status;
    }
    enlist(lane, options, is_new);
    *created = lane;
    return PST_OK;
}

pst_status pst_lane_create(pst_runtime *runtime, const pst_lane_options *given,
                           pst_lane **created) {
    pst_lane_options options;
    if (runtime == NULL || created == NULL) return PST_EINVAL;
    *created = NULL;
    if (!pst__read_options(&options, sizeof options, given))
        return pst__runtime_fail(runtime, PST_EINVAL,
                                 "pst_lane_create: "
                                 "options are missing or their `size` is not "
                                 "sizeof(pst_lane_options)");
    return create(runtime, &options, created);
}

/* ---- what holds a lane ------------------------------------------------------------------ */

static pst_status busy(const pst_lane *lane, const char *what, const char *name) {
    return pst__runtime_fail(lane->runtime, PST_EBUSY, "lane %s cannot be destroyed: %s%s",
                             lane->name, what, name);
}

/* A graph that may launch on the lane again, or has something there that has not ended. */
static const pst_graph *find_graph(const pst_lane *lane) {
    for (const pst_graph *graph = lane->runtime->graphs; graph != NULL; graph = graph->next)
        for (const pst__share *share = pst__load_acquire(&graph->shares); share != NULL;
             share = share->next) {
            if (share->lane != lane) continue;
            const uint32_t tasks = pst__load_relaxed(&share->tasks);
            /* Acquire: pairs with the count of those that are left (graph.h). */
            if (graph->kind == PST_GRAPH_SEALED ? tasks != 0
                                                : tasks != pst__load_acquire(&share->left))
                return graph;
        }
    return NULL;
}

/* A lane that is served with this one. */
static const pst_lane *find_lane(const pst_lane *lane) {
    for (const pst_lane *other = lane->runtime->lanes; other != NULL; other = other->next) {
        if (other == lane || pst__lane_is_gone(other)) continue;
        if (other->leader == lane) return other;
        if (lane->mode == PST_LANE_WORKER && other->mode == PST_LANE_SHARED &&
            pst__load_relaxed(&other->worker) == pst__load_relaxed(&lane->worker))
            return other;
    }
    return NULL;
}

static pst_status check_unused(const pst_lane *lane) {
    pst_runtime *runtime = lane->runtime;
    char name[128];
    ck_spinlock_lock(&runtime->lock);
    const pst_graph *graph = find_graph(lane);
    const pst_lane *other = graph == NULL ? find_lane(lane) : NULL;
    if (graph != NULL || other != NULL)
        (void)snprintf(name, sizeof name, "%s", graph != NULL ? graph->name : other->name);
    ck_spinlock_unlock(&runtime->lock);
    if (graph != NULL)
        return busy(lane, "wait for its tasks, and destroy a sealed graph first: graph ", name);
    return other == NULL
               ? PST_OK
               : busy(lane, "another lane is served with it, and is destroyed first: lane ", name);
}

/* The caller owns the lane. On a borrowed one a gate's event may not have come. */
static int has_work(const pst_lane *lane) {
    return lane->current != NULL || lane->in_flight.first != NULL ||
           (lane->leader == lane &&
            (!pst__arrivals_empty(&lane->arrivals) || lane->ready.first != NULL ||
             lane->stopped.first != NULL || lane->levels.occupied != 0));
}

/* ---- the end ---------------------------------------------------------------------------- */

static int nobody_visits(const void *watchdog) {
    /* Acquire: pairs with the release at the end of a visit (watchdog.c). */
    return !pst__load_acquire(&((const pst__watchdog *)watchdog)->is_visiting);
}

/* The owner's last act. */
static void leave(pst_lane *lane) {
    pst_runtime *runtime = lane->runtime;
    ck_spinlock_lock(&runtime->lock);
    lane->is_taken = 1;
    pst__store_relaxed(&lane->asked, 0);
    pst__store_release(&lane->owned, PST__LANE_GONE); /* pairs with pst__lane_is_gone */
    ck_spinlock_unlock(&runtime->lock);
}

/* The worker's lane goes: other workers poll the borrowed lanes that it has polled. */
static void give_borrowed_away(pst__worker *worker) {
    pst_runtime *runtime = worker->runtime;
    ck_spinlock_lock(&runtime->lock);
    for (pst_lane **link = &worker->lanes, *lane; (lane = *link) != NULL;) {
        if (lane->mode != PST_LANE_BORROWED) {
            link = &lane->next_of_worker;
            continue;
        }
        *link = lane->next_of_worker;
        pst__store_release(&lane->worker, NULL); /* pairs with the acquire in pst__lane_notify */
    }
    adopt_borrowed(runtime);
    ck_spinlock_unlock(&runtime->lock);
}

static pst_status end_worker(const pst_lane *lane) {
    if (lane->mode != PST_LANE_WORKER) return PST_OK;
    pst__worker *worker = lane->worker;
    if (worker == NULL) return PST_OK;
    pst__loop_stop(&worker->loop);
    const pst_status status = pst__loop_join(&worker->loop, worker->runtime);
    if (status != PST_OK) return status;
    pst__worker_end_track(worker);
    give_borrowed_away(worker);
    return PST_OK;
}

static pst_status stays(const pst_lane *lane, pst_status status) {
    return pst__runtime_fail(lane->runtime, status,
                             "lane %s is not destroyed: the thread that serves it is in a task; "
                             "try again when that has come back",
                             lane->name);
}

pst_status pst_lane_destroy(pst_lane *lane) {
    if (lane == NULL) return PST_OK;
    pst_runtime *runtime = lane->runtime;
    pst_lane *leader = lane->leader;
    pst_status status = pst__calls_refuse(runtime, "pst_lane_destroy", lane->name);
    if (status == PST_OK) status = check_unused(lane);
    if (status != PST_OK) return status;
    if (pst__lane_await(leader) != PST_OK) return stays(lane, PST_ETIMEDOUT);
    if (has_work(lane)) {
        pst__lane_disown(leader, 0, NULL);
        return busy(lane, "an event of a gate has not come", "");
    }
    status = end_worker(lane);
    if (status != PST_OK) {
        pst__lane_disown(leader, 0, NULL);
        return stays(lane, status);
    }
    leave(lane);
    if (leader != lane) pst__lane_disown(leader, 0, NULL);
    /* The watchdog may have found the lane served, and be about to name it. If that does not end,
     * the place is the runtime's until this goes. */
    if (pst__wait_aside(runtime, nobody_visits, &runtime->watchdog) == PST_OK) give_back(lane);
    return PST_OK;
}
