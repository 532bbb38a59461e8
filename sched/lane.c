/* A lane's creation, and whose turn it is. */
#include "base/options.h"
#include "sched/device/needs.h"
#include "sched/wait.h"
#include "sched/worker.h"

/* ---- creation --------------------------------------------------------------------------- */

static pst_status check_options(pst_runtime *runtime, const pst_lane_options *options) {
    const char *name = options->name;
    if (name == NULL || name[0] == '\0')
        return pst__runtime_fail(runtime, PST_EINVAL, "pst_lane_create: %s",
                                 "give the lane a name");
    if ((unsigned)options->mode > PST_LANE_BORROWED ||
        (unsigned)options->order > PST_LANE_BY_PRIORITY)
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
    if (options->order != PST_LANE_BY_SUBMISSION || leader->order != PST_LANE_BY_SUBMISSION ||
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
    if (lane->asynchronous) status = ops->event_create(lane->device, 0, &lane->tail_event);
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

void pst__lane_adopt_borrowed(pst_runtime *runtime) {
    pst__worker *worker = runtime->workers;
    while (worker != NULL && pst__load_relaxed(&worker->stop))
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
    /* Release: a turn that walks along the followers finds the lane complete (turn.c, order.c). */
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
        pst__lane_adopt_borrowed(runtime);
    } else if (lane->mode == PST_LANE_SHARED) {
        pst__worker_adopt(options->share_with->worker, lane);
    } else if (lane->mode == PST_LANE_BORROWED) {
        pst__lane_adopt_borrowed(runtime);
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
        if (lane->mode == PST_LANE_BORROWED) pst__lane_adopt_borrowed(runtime);
        lane->is_taken = 0;
        pst__store_release(&lane->owned, 0); /* pairs with the acquire in pst__lane_is_gone */
        pst__lane_notify(lane);
    }
    ck_spinlock_unlock(&runtime->lock);
}

static pst_lane *take_place(pst_runtime *runtime, const pst_lane_options *options) {
    pst_lane *lane = pst__place_take(runtime, options);
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
            pst__place_give_back(lane);
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
        return pst__runtime_fail(runtime, PST_EINVAL, "pst_lane_create: %s",
                                 "options are missing or their `size` is not "
                                 "sizeof(pst_lane_options)");
    return create(runtime, &options, created);
}

void pst__lane_close(pst_lane *lane) {
    pst_runtime *runtime = lane->runtime;
    if (lane->device != NULL) {
        const pst_device_ops *ops = lane->device->ops;
        if (lane->tail_event != NULL) ops->event_destroy(lane->device, lane->tail_event);
        if (lane->owns_stream && lane->stream != NULL)
            ops->stream_destroy(lane->device, lane->stream);
    }
    pst__heap_free_text(&runtime->heap, lane->name);
    lane->tail_event = NULL;
    lane->stream = NULL;
    lane->owns_stream = 0;
    lane->name = NULL;
}

void pst__lane_free(pst_lane *lane) {
    pst__lane_close(lane);
    pst__heap_free(&lane->runtime->heap, lane, sizeof *lane);
}

pst_stream *pst_lane_stream(const pst_lane *lane) {
    return lane == NULL ? NULL : lane->stream;
}

const char *pst_lane_name(const pst_lane *lane) {
    return lane == NULL ? "" : lane->name;
}

/* ---- whose turn ------------------------------------------------------------------------- */

void pst__lane_notify(pst_lane *lane) {
    /* Acquire: pairs with the release in pst__worker_adopt, which may come late for a borrowed
     * lane. */
    pst__worker *worker = pst__load_acquire(&lane->worker);
    if (worker != NULL) {
        pst__park_wake(&worker->park);
        return;
    }
    /* Its fence is the signal's, too. */
    pst__runtime_wake_waiters(lane->runtime);
    pst__pump_signal(&lane->runtime->pump);
}

void pst_lane_wake(pst_lane *lane) {
    if (lane != NULL) pst__lane_notify(lane);
}

void pst__lane_disown(pst_lane *lane, int changed, const pst__worker *self) {
    /* Release: pairs with the acquire in pst__lane_try_own. */
    pst__store_release(&lane->owned, 0);
    /* Relaxed: it is the worker that asks, and a lane keeps its worker. */
    if (self != NULL && self == pst__load_relaxed(&lane->worker)) return;
    /* Orders the store above with the looks below: the worker that found the lane owned has asked
     * to be told before it looked again, and whoever woke it has pushed before that. Pairs with the
     * fence in worker.c, try_own. */
    pst__fence_store_load();
    const uint32_t missed = pst__load_relaxed(&lane->missed);
    if (missed) pst__store_relaxed(&lane->missed, 0);
    if (changed || missed || !pst__arrivals_empty(&lane->arrivals)) pst__lane_notify(lane);
}

/* ---- a task's event --------------------------------------------------------------------- */

/* The caller owns the lane. */
static pst_event *owned_event_of(const pst_lane *lane, const pst__node *node) {
    const pst_device_ops *ops = lane->device->ops;
    pst__detail *detail = node->detail;
    /* Relaxed: the lane's owners alone change it from launched on, and hand it over with the lane.
     */
    const int in_flight = pst__word_state(pst__load_relaxed(&node->word)) == PST__TASK_LAUNCHED;
    if (!lane->asynchronous && !in_flight) return lane->runtime->done_event;
    /* Those behind a task that has its event already may be looking at it, unowned. */
    if (detail->event == NULL) {
        if (ops->event_create(lane->device, 0, &detail->event) != PST_OK) return NULL;
        detail->event_device = lane->device;
    }
    if (in_flight && !detail->event_recorded) {
        if (ops->event_record(lane->device, detail->event, lane->stream) != PST_OK) return NULL;
        detail->event_recorded = 1;
    }
    return detail->event;
}

static int try_to_own(const void *leader) {
    return pst__lane_try_own((pst_lane *)(uintptr_t)leader);
}

pst_status pst__lane_event_of(pst_lane *lane, pst__node *node, pst_event **event) {
    *event = NULL;
    /* Acquire: pairs with the release in pst__node_become. */
    const pst__task_state state = pst__word_state(pst__load_acquire(&node->word));
    if (!lane->asynchronous && pst__task_has_ended(state)) {
        *event = lane->runtime->done_event;
        return PST_OK;
    }
    if (node->flags & PST__NODE_EVENT) { /* recorded with the launch */
        *event = node->detail->event;
        return PST_OK;
    }
    if (pst__lane_is_gone(lane)) return PST_OK; /* all its tasks have ended */
    /* The lane's owner may be in a task, which may take its time. */
    const pst_status status = pst__wait_aside(lane->runtime, try_to_own, lane->leader);
    if (status != PST_OK) return status;
    *event = owned_event_of(lane, node);
    pst__lane_disown(lane->leader, 0, NULL);
    return *event == NULL ? PST_EDEVICE : PST_OK;
}
