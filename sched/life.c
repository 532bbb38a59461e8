/* A runtime's creation and its end. */
#include "base/clock.h"
#include "base/options.h"
#include "sched/calls.h"
#include "sched/device/host.h"
#include "sched/flight.h"
#include "sched/graph.h"
#include "sched/poison.h"
#include "sched/pump.h"
#include "sched/report.h"
#include "sched/watchdog.h"
#include "sched/worker.h"

#include <unistd.h>

#define DEFAULT_SPIN           2000u
#define DEFAULT_TASK_CAPACITY  1024u
#define DEFAULT_FLIGHT_RECORDS 2048u
#define DRAIN_SLEEP_NS         200000u
#define NOTICE_NS              100000000u

/* ---- creation --------------------------------------------------------------------------- */

static size_t flight_records(const pst_runtime_options *options) {
    if (options->flight_records == PST_NO_FLIGHT_RECORD) return 0;
    return options->flight_records == 0 ? DEFAULT_FLIGHT_RECORDS : options->flight_records;
}

static pst_status fill(pst_runtime *runtime, const pst_runtime_options *options) {
    runtime->rank = options->rank;
    runtime->page = options->page;
    runtime->spin = options->spin == 0 ? DEFAULT_SPIN : options->spin;
    runtime->deadline_ns = options->deadline_ns;
    runtime->watchdog_ns = options->watchdog_ns;
    runtime->grace_ns = options->deadline_ns;
    if (runtime->grace_ns == 0 && options->watchdog_poisons)
        runtime->grace_ns = options->watchdog_ns;
    runtime->waiting_hook = options->waiting;
    runtime->waiting_context = options->waiting_context;
    runtime->task_capacity =
        options->task_capacity == 0 ? DEFAULT_TASK_CAPACITY : options->task_capacity;
    ck_spinlock_init(&runtime->lock);
    ck_spinlock_init(&runtime->launching);
    ck_ec_init(&runtime->waiting.count, 0);
    ck_spinlock_init(&runtime->observers.lock);
    runtime->pump.descriptor = -1;
    pst__watchdog_init(runtime, options);
    pst__error_init(&runtime->error, options->log, options->log_context);
    pst_status status = pst__flight_init(runtime, options);
    if (status != PST_OK) return status;
    status = pst__trace_create(&runtime->heap, &runtime->error, runtime->rank, options->world_size,
                               options->trace_records, flight_records(options), &runtime->trace);
    if (status != PST_OK) return status;
    status = pst__host_create(&runtime->heap, &runtime->host);
    if (status != PST_OK) return status;
    return runtime->host->ops->event_create(runtime->host, 0, &runtime->done_event);
}

static void free_runtime(pst_runtime *runtime) {
    if (runtime->pump.descriptor >= 0) (void)close(runtime->pump.descriptor);
    pst__observers_free(runtime);
    if (runtime->done_event != NULL)
        runtime->host->ops->event_destroy(runtime->host, runtime->done_event);
    if (runtime->host != NULL) runtime->host->ops->destroy(runtime->host);
    if (runtime->trace != NULL) pst__trace_destroy(runtime->trace);
    pst__flight_free(runtime);
    const pst__heap heap = runtime->heap;
    pst__heap_free(&heap, runtime, sizeof *runtime);
}

pst_status pst_runtime_create(const pst_runtime_options *given, pst_runtime **created) {
    if (created == NULL) return PST_EINVAL;
    *created = NULL;
    pst_runtime_options options = {0};
    if (given != NULL && !pst__read_options(&options, sizeof options, given)) return PST_EINVAL;
    if (options.rank < 0 || options.world_size < 0) return PST_EINVAL;
    pst__heap heap;
    pst_status status = pst__heap_init(&heap, &options.allocator);
    if (status != PST_OK) return status;
    pst_runtime *runtime = pst__heap_alloc(&heap, sizeof *runtime);
    if (runtime == NULL) return PST_ENOMEM;
    runtime->heap = heap;
    status = fill(runtime, &options);
    if (status != PST_OK) {
        free_runtime(runtime);
        return status;
    }
    pst__page_show(runtime->page, runtime->flight.name, runtime->rank, runtime->flight.world_size);
    *created = runtime;
    return PST_OK;
}

/* ---- the end of all work ---------------------------------------------------------------- */

/* Without the fence of the other waits: a wake-up that is missed costs one short sleep. */
static void help_or_sleep(pst_runtime *runtime) {
    static const pst__budget budget = {.launches = 64, .nanoseconds = PST__TURN_NS};
    const uint32_t count = pst__park_count(&runtime->waiting);
    if (pst__runtime_help(runtime, PST__HELP_ALL, &budget).did) return;
    (void)pst__add_acq_rel(&runtime->waiters, 1);
    if (!pst__runtime_is_idle(runtime)) pst__park_wait(&runtime->waiting, count, DRAIN_SLEEP_NS);
    (void)pst__sub_acq_rel(&runtime->waiters, 1);
}

/* What is in flight is abandoned after the grace, which its lane's thread notices soon, unless it
 * is in a task. */
static pst_status drain(pst_runtime *runtime) {
    const uint64_t begin = pst__now();
    while (!pst__runtime_is_idle(runtime)) {
        help_or_sleep(runtime);
        if (runtime->grace_ns != 0 && pst__now() - begin > runtime->grace_ns + NOTICE_NS)
            return PST_ETIMEDOUT;
    }
    return PST_OK;
}

/* Threads before what they work on. */
static pst_status end_threads(pst_runtime *runtime) {
    pst__loop_stop(&runtime->watchdog.loop);
    pst_status status = pst__loop_join(&runtime->watchdog.loop, runtime);
    for (pst__worker *worker = runtime->workers; worker != NULL; worker = worker->next)
        pst__loop_stop(&worker->loop);
    for (pst__worker *worker = runtime->workers; worker != NULL; worker = worker->next)
        if (status == PST_OK) status = pst__loop_join(&worker->loop, runtime);
    return status;
}

static void destroy_parts(pst_runtime *runtime) {
    while (runtime->workers != NULL) {
        pst__worker *next = runtime->workers->next;
        pst__worker_free(runtime->workers);
        runtime->workers = next;
    }
    while (runtime->graphs != NULL) {
        pst_graph *next = runtime->graphs->next;
        pst__graph_free(runtime->graphs);
        runtime->graphs = next;
    }
    while (runtime->lanes != NULL) {
        pst_lane *next = runtime->lanes->next;
        pst__lane_free(runtime->lanes);
        runtime->lanes = next;
    }
}

pst_status pst_runtime_destroy(pst_runtime *runtime) {
    if (runtime == NULL) return PST_OK;
    pst_status status = pst__calls_refuse(runtime, "pst_runtime_destroy", "");
    if (status != PST_OK) return status;
    (void)pst__runtime_stop(runtime, PST_ECANCELED);
    if (!pst__runtime_is_idle(runtime)) pst__hooks_call(runtime, pst_runtime_status(runtime));
    status = drain(runtime);
    if (status == PST_OK) status = end_threads(runtime);
    if (status != PST_OK) return pst__report_left_behind(runtime);
    pst__page_hide(runtime->page);
    destroy_parts(runtime);
    free_runtime(runtime);
    return PST_OK;
}
