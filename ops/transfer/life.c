/* A carrier's life: created, quiet, closed, freed. */
#include "ops/transfer/carrier.h"
#include "ops/transfer/operation.h"

#include "base/clock.h"
#include "sched/device/device.h"
#include "sched/runtime.h"

#include <time.h>

#define GLANCE_NS 5000000u

pst_status pst__carrier_record(pst__carrier *carrier, pst_event *event) {
    return carrier->device->ops->event_record(carrier->device, event, carrier->compute);
}

pst_status pst__carrier_give_up(pst__carrier *carrier, pst_status status) {
    char text[PST__ERROR_BYTES];
    if (status == PST_OK) return PST_OK;
    (void)pst_runtime_error(carrier->runtime, text, sizeof text);
    pst_runtime_poison(carrier->runtime, status, text);
    return status;
}

/* ---- copies of gradients into buckets -------------------------------------------------------- */

static pst_status create_filling(pst__carrier *carrier) {
    const pst_device_ops *ops = carrier->device->ops;
    pst__filling *filling = &carrier->filling;
    filling->stream = filling->landing = carrier->compute;
    if (!carrier->asynchronous) return PST_OK;
    pst_status status = ops->event_create(carrier->device, 0, &filling->reached);
    if (status == PST_OK) status = ops->event_create(carrier->device, 0, &filling->filled);
    if (status == PST_OK) status = ops->stream_create(carrier->device, 0, &filling->own);
    if (status == PST_OK) status = ops->stream_create(carrier->device, 0, &filling->own_landing);
    if (status != PST_OK) return status;
    filling->stream = filling->own;
    filling->landing = filling->own_landing;
    return status;
}

static void free_filling(pst__carrier *carrier) {
    const pst__filling *filling = &carrier->filling;
    pst_device *device = carrier->device;
    if (filling->own != NULL) device->ops->stream_destroy(device, filling->own);
    if (filling->own_landing != NULL) device->ops->stream_destroy(device, filling->own_landing);
    if (filling->filled != NULL) device->ops->event_destroy(device, filling->filled);
    if (filling->reached != NULL) device->ops->event_destroy(device, filling->reached);
}

pst_status pst__fill_begin(pst__carrier *carrier) {
    pst__filling *filling = &carrier->filling;
    pst_device *device = carrier->device;
    if (filling->own == NULL) return PST_OK;
    pst_status status = pst__fill_join(carrier);
    if (status == PST_OK) status = pst__carrier_record(carrier, filling->reached);
    filling->is_landing = 0;
    return status == PST_OK ? device->ops->stream_wait(device, filling->own, filling->reached)
                            : status;
}

pst_status pst__fill_land(pst__carrier *carrier) {
    pst__filling *filling = &carrier->filling;
    if (filling->own == NULL || filling->is_landing) return PST_OK;
    filling->is_landing = 1;
    return carrier->device->ops->stream_wait(carrier->device, filling->landing, filling->reached);
}

pst_status pst__fill_land_behind(pst__carrier *carrier) {
    pst__filling *filling = &carrier->filling;
    pst_device *device = carrier->device;
    if (filling->own == NULL) return PST_OK;
    const pst_status status = device->ops->event_record(device, filling->filled, filling->own);
    if (status != PST_OK) return status;
    return device->ops->stream_wait(device, filling->landing, filling->filled);
}

pst_status pst__fill_end(pst__carrier *carrier) {
    pst__filling *filling = &carrier->filling;
    if (filling->own == NULL) return PST_OK;
    filling->is_apart = 1;
    return carrier->device->ops->event_record(carrier->device, filling->filled, filling->own);
}

pst_status pst__fill_join(pst__carrier *carrier) {
    pst__filling *filling = &carrier->filling;
    if (!filling->is_apart) return PST_OK;
    filling->is_apart = 0;
    return carrier->device->ops->stream_wait(carrier->device, carrier->compute, filling->filled);
}

/* ---- communication copies -------------------------------------------------------------------- */

pst_status pst__carrier_add_copying(pst__carrier *carrier) {
    if (!carrier->asynchronous || carrier->copying != NULL) return PST_OK;
    /* Urgent: a gather waits for what is made there, and compute for the gather. */
    return carrier->device->ops->stream_create(carrier->device, -1, &carrier->copying);
}

/* ---- creating -------------------------------------------------------------------------------- */

/* It serves beside the other two, and for memory that is opened to nobody. */
static pst_status check_replicas(pst__error *error, const pst__carrier_options *options) {
    const pst_comm *comm = options->replica_comm;
    const unsigned needed = 1u << PST_ALL_REDUCE | 1u << PST_ALL_GATHER;
    if (comm == NULL) return PST_OK;
    if (comm == options->gather_comm || comm == options->reduce_comm)
        return pst__fail(error, PST_EINVAL,
                         "engine '%s': replica_comm is one of the other two: give it a queue of "
                         "its own",
                         options->name);
    if ((comm->ops->kinds & needed) != needed || comm->ops->open_memory != NULL)
        return pst__fail(error, PST_EINVAL,
                         "engine '%s': replica_comm is '%s', which has no all-reduces and "
                         "all-gathers of any memory",
                         options->name, comm->ops->name);
    return PST_OK;
}

static pst_status check_comms(pst__error *error, const pst__carrier_options *options) {
    const pst_comm *gather = options->gather_comm, *reduce = options->reduce_comm;
    if (gather == NULL || reduce == NULL)
        return pst__fail(error, PST_EINVAL, "engine '%s': gather_comm and reduce_comm must be set",
                         options->name);
    if (gather->size != reduce->size || gather->rank != reduce->rank || gather->size < 1)
        return pst__fail(error, PST_EINVAL,
                         "engine '%s': gather_comm has rank %d of %d, reduce_comm rank %d of %d",
                         options->name, gather->rank, gather->size, reduce->rank, reduce->size);
    return check_replicas(error, options);
}

static pst_status check_options(pst__error *error, const pst__carrier_options *options) {
    const char *slot = pst__device_lacks(options->device, PST__NEEDS_ALL);
    if (slot != NULL)
        return pst__fail(error, PST_EINVAL, "engine '%s': device %s has no '%s', which it needs",
                         options->name, options->device->ops->name, slot);
    unsigned caps = options->device->ops->caps;
    if (options->compute == NULL && !(caps & PST_DEVICE_STREAM_IS_WORKER))
        return pst__fail(error, PST_EINVAL,
                         "engine '%s': device %s needs options.compute, a BORROWED lane",
                         options->name, options->device->ops->name);
    return check_comms(error, options);
}

/* On an asynchronous device the launches of both communicators have one order, so that it is the
 * same on all ranks. On the host, where a launch takes its lane until it is done, each communicator
 * has its own: else one would hold up the other. */
static pst_status create_lane(const pst__carrier *carrier, const char *name, pst_lane *first,
                              pst_lane **lane) {
    int in_one_order = first != NULL && carrier->asynchronous;
    pst_lane_options options = {.size = sizeof options,
                                .name = name,
                                .device = carrier->device,
                                .order = PST_LANE_BY_SUBMISSION,
                                .takes_help = 1};
    if (in_one_order) {
        options.order_with = first;
    } else if (carrier->options.pumped) {
        options.mode = PST_LANE_PUMPED;
    } else if (first != NULL) {
        options.mode = PST_LANE_SHARED;
        options.share_with = first;
    }
    return pst_lane_create(carrier->runtime, &options, lane);
}

pst_status pst__carrier_add_then_lane(const pst__carrier *carrier, pst__queue *queue,
                                      const char *name) {
    queue->then_lane = queue->sum_lane != NULL ? queue->sum_lane : queue->lane;
    if (queue->sum_lane != NULL || !carrier->asynchronous) return PST_OK;
    queue->then_lane = NULL;
    return create_lane(carrier, name, queue->lane, &queue->then_lane);
}

static pst_status create_replica_queue(pst__carrier *carrier) {
    pst__queue *gather = &carrier->queues[PST__GATHER_LANE];
    pst__queue *replicas = &carrier->queues[PST__REPLICA_LANE];
    if (carrier->replicas == 1) return PST_OK;
    replicas->comm = carrier->options.replica_comm;
    const pst_status status =
        create_lane(carrier, "reduce replicas", gather->lane, &replicas->lane);
    return status == PST_OK ? pst__carrier_add_then_lane(carrier, replicas, "sum replicas")
                            : status;
}

/* The same communicator twice is one queue: one lane for both directions. */
static pst_status create_queues(pst__carrier *carrier) {
    pst__queue *gather = &carrier->queues[PST__GATHER_LANE];
    pst__queue *reduce = &carrier->queues[PST__REDUCE_LANE];
    gather->comm = carrier->options.gather_comm;
    reduce->comm = carrier->options.reduce_comm;
    carrier->one_comm = gather->comm == reduce->comm;
    pst_status status = create_lane(carrier, "gather", NULL, &gather->lane);
    if (status == PST_OK && !carrier->one_comm)
        status = create_lane(carrier, "reduce", gather->lane, &reduce->lane);
    if (status != PST_OK || !carrier->asynchronous || reduce->comm->ops->combine == NULL)
        return status;
    return create_lane(carrier, "sum", gather->lane,
                       &pst__queue_of(carrier, PST__REDUCE_LANE)->sum_lane);
}

pst_status pst__carrier_create_arena(const pst__carrier *carrier, const char *name,
                                     size_t segment_bytes, pst_arena **arena) {
    const pst__carrier_options *options = &carrier->options;
    const pst_arena_options wanted = {.size = sizeof wanted,
                                      .name = name,
                                      .device = carrier->device,
                                      .kind = PST_MEMORY_DEVICE,
                                      .segment_bytes = segment_bytes,
                                      .segment_alloc = options->segment_alloc,
                                      .segment_free = options->segment_free,
                                      .segment_context = options->segment_context};
    return pst_arena_create(carrier->runtime, &wanted, arena);
}

static pst_status find_compute(pst__carrier *carrier) {
    if (carrier->options.compute != NULL) {
        carrier->compute = pst_lane_stream(carrier->options.compute);
        return PST_OK;
    }
    return carrier->device->ops->stream_wrap(carrier->device, NULL, &carrier->compute);
}

static int abort_comms(pst__carrier *carrier, pst_status status) {
    int quiet = 1;
    for (int lane = 0; lane < PST__LANE_COUNT; lane++) {
        pst_comm *comm = carrier->queues[lane].comm;
        if (comm != NULL) quiet &= comm->ops->abort(comm, status) == PST_OK;
    }
    return quiet;
}

/* What is in flight ends, here and on the peers, which then do not wait for this rank. */
static void abort_on_poison(void *carrier, pst_status status) {
    (void)abort_comms(carrier, status);
}

/* A peer that has died is noticed here, whatever this rank's threads wait for. */
static void look_at_comms(void *carrier) {
    (void)pst__operation_check_comms(carrier);
}

static pst_status watch(pst__carrier *carrier) {
    pst_status status = pst_runtime_add_poison_hook(carrier->runtime, abort_on_poison, carrier);
    if (status == PST_OK && carrier->asynchronous)
        status = pst_runtime_add_health_check(carrier->runtime, look_at_comms, carrier);
    return status;
}

static void stop_watching(pst__carrier *carrier) {
    pst_runtime_remove_health_check(carrier->runtime, look_at_comms, carrier);
    pst_runtime_remove_poison_hook(carrier->runtime, abort_on_poison, carrier);
}

static pst_status build(pst__carrier *carrier) {
    carrier->asynchronous = !(carrier->device->ops->caps & PST_DEVICE_STREAM_IS_WORKER);
    carrier->world = (size_t)carrier->options.gather_comm->size;
    carrier->rank = (size_t)carrier->options.gather_comm->rank;
    const pst_comm *replicas = carrier->options.replica_comm;
    carrier->replicas = replicas == NULL ? 1 : (size_t)replicas->size;
    carrier->replica = replicas == NULL ? 0 : (size_t)replicas->rank;
    carrier->name = pst__heap_text(carrier->heap, carrier->options.name);
    if (carrier->name == NULL) return PST_ENOMEM;
    carrier->options.name = carrier->name;
    pst_status status = find_compute(carrier);
    carrier->stalls = (pst__stalls){.heap = carrier->heap,
                                    .device = carrier->device,
                                    .compute = carrier->compute,
                                    .trace = pst__runtime_trace(carrier->runtime),
                                    .is_wanted = carrier->options.time_waits};
    if (status == PST_OK)
        status =
            pst_graph_create(carrier->runtime, PST_GRAPH_GROWING, carrier->name, &carrier->graph);
    if (status == PST_OK)
        status = pst__carrier_create_arena(carrier, "gathered", 0, &carrier->gathered);
    if (status == PST_OK)
        status = pst__carrier_create_arena(carrier, "staging", 0, &carrier->staging);
    if (status == PST_OK)
        status = pst__carrier_create_arena(carrier, "sources", 0, &carrier->sources);
    if (status == PST_OK)
        status = carrier->device->ops->event_create(carrier->device, 0, &carrier->reached);
    if (status == PST_OK)
        status = carrier->device->ops->event_create(carrier->device, 0, &carrier->graph_begins);
    if (status == PST_OK) status = create_filling(carrier);
    if (status == PST_OK) status = create_queues(carrier);
    if (status == PST_OK) status = create_replica_queue(carrier);
    return status == PST_OK ? watch(carrier) : status;
}

pst_status pst__carrier_create(pst_runtime *runtime, const pst__carrier_options *options,
                               pst__carrier *carrier) {
    pst__error *error = pst__runtime_error(runtime);
    *carrier = (pst__carrier){.runtime = runtime,
                              .heap = pst__runtime_heap(runtime),
                              .error = error,
                              .options = *options};
    if (options->device == NULL) carrier->options.device = pst_runtime_host(runtime);
    pst_status status = check_options(error, &carrier->options);
    if (status != PST_OK) return status;
    carrier->device = carrier->options.device;
    status = build(carrier);
    return status == PST_ENOMEM ? pst__fail(error, status, "engine: no memory") : status;
}

/* ---- quiet ----------------------------------------------------------------------------------- */

static int all_ended(pst__carrier *carrier) {
    pst__operation_reap(carrier);
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        if (carrier->queues[lane].oldest != NULL) return 0;
    return 1;
}

int pst__carrier_wait_stream(const pst__carrier *carrier, pst_stream *stream,
                             uint64_t patience_ns) {
    return pst__device_wait_stream(carrier->device, stream, carrier->reached,
                                   pst__now() + patience_ns);
}

int pst__carrier_wait_compute(pst__carrier *carrier, uint64_t patience_ns) {
    return !carrier->asynchronous ||
           pst__carrier_wait_stream(carrier, carrier->compute, patience_ns);
}

static int wait_own(const pst__carrier *carrier, pst_stream *stream, uint64_t patience_ns) {
    return stream == NULL || pst__carrier_wait_stream(carrier, stream, patience_ns);
}

static int wait_lane(const pst__carrier *carrier, const pst_lane *lane, uint64_t patience_ns) {
    return lane == NULL || pst__carrier_wait_stream(carrier, pst_lane_stream(lane), patience_ns);
}

/* A task that has failed may still run on the device, if it is its event that has failed: its
 * lane's stream shows that. */
static int wait_streams(pst__carrier *carrier, uint64_t patience_ns) {
    int done = pst__carrier_wait_compute(carrier, patience_ns);
    if (!carrier->asynchronous) return done;
    for (int lane = 0; lane < PST__LANE_COUNT && done; lane++) {
        const pst__queue *queue = &carrier->queues[lane];
        done = wait_lane(carrier, queue->lane, patience_ns) &&
               wait_lane(carrier, queue->sum_lane, patience_ns) &&
               wait_lane(carrier, queue->then_lane, patience_ns);
    }
    return done && wait_own(carrier, carrier->filling.own, patience_ns) &&
           wait_own(carrier, carrier->copying, patience_ns);
}

/* Compute uses the executor's memory, and so may peers that read for themselves: until here. */
static int all_have_read(pst__carrier *carrier) {
    if (carrier->asynchronous && pst__wait_all_readers(carrier) != PST_OK) return 0;
    return pst__carrier_wait_compute(carrier, PST__PATIENCE_NS);
}

/* After an abort collectives end soon or never; it is asked again meanwhile. */
static int abort_in_time(pst__carrier *carrier) {
    uint64_t begin = pst__now();
    const struct timespec pause = {0, 200000};
    for (;;) {
        int quiet = abort_comms(carrier, PST_ECANCELED);
        (void)pst_run_once(carrier->runtime, NULL);
        if (quiet && all_ended(carrier) && wait_streams(carrier, GLANCE_NS)) return 1;
        if (pst__now() - begin > PST__PATIENCE_NS) return 0;
        (void)nanosleep(&pause, NULL);
    }
}

/* A callback may still be on its last lines when its task counts as ended. */
static int drained(pst__carrier *carrier) {
    const struct timespec pause = {0, 50000};
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        for (const pst__operation *operation = carrier->queues[lane].oldest; operation != NULL;
             operation = operation->next)
            if (pst__operation_wait_task(operation, NULL) != PST_OK) return 0;
    for (int i = 0; i < 1000 && !all_ended(carrier); i++)
        (void)nanosleep(&pause, NULL);
    return all_ended(carrier);
}

pst_status pst__carrier_drain(pst__carrier *carrier) {
    const pst_status status = pst_runtime_status(carrier->runtime);
    if (status != PST_OK) return status;
    if ((all_ended(carrier) || drained(carrier)) && wait_streams(carrier, PST__PATIENCE_NS) &&
        all_have_read(carrier)) {
        carrier->is_behind_graph = carrier->is_beside_graph = 0;
        return PST_OK;
    }
    return pst__carrier_fail(carrier, PST_ETIMEDOUT, "what is in flight did not end within %u s",
                             PST__PATIENCE_NS / 1000000000u);
}

/* What is in flight ends by itself. On an asynchronous device the scheduler gives up what it has
 * launched when the runtime is poisoned, and the device goes on with it: that takes an abort. */
static int ends_well(pst__carrier *carrier) {
    if (carrier->asynchronous && pst_runtime_status(carrier->runtime) != PST_OK) return 0;
    return (all_ended(carrier) || drained(carrier)) && all_have_read(carrier);
}

int pst__carrier_quiesce(pst__carrier *carrier) {
    return ends_well(carrier) || abort_in_time(carrier);
}

/* ---- destroying ------------------------------------------------------------------------------ */

/* Those that have joined others go before these. What cannot go now goes with the runtime. */
static void destroy_lanes(pst__carrier *carrier) {
    for (int lane = PST__LANE_COUNT; lane-- > 0;) {
        pst__queue *queue = &carrier->queues[lane];
        if (queue->then_lane != queue->sum_lane && queue->then_lane != queue->lane)
            (void)pst_lane_destroy(queue->then_lane);
        (void)pst_lane_destroy(queue->sum_lane);
        (void)pst_lane_destroy(queue->lane);
    }
}

int pst__carrier_close(pst__carrier *carrier) {
    stop_watching(carrier);
    if (pst__carrier_quiesce(carrier)) return 1;
    pst__operation_abandon_all(carrier);
    if (!carrier->asynchronous) destroy_lanes(carrier); /* on others tasks are still in flight */
    pst__log(carrier->error, PST_LOG_WARNING,
             "rank %zu, engine '%s': a collective may still write to its memory, which is not "
             "freed",
             pst__carrier_number(carrier), carrier->name);
    return 0;
}

/* An abort lets peers go on with what they have begun, and pushes end in this rank's memory. */
static int peers_may_write(const pst__carrier *carrier) {
    pst_comm *comm = carrier->options.reduce_comm;
    return carrier->is_pushed_to && comm->ops->status(comm) != PST_OK;
}

void pst__carrier_free(pst__carrier *carrier) {
    pst_device *device = carrier->device;
    if (device == NULL) return; /* it was refused */
    stop_watching(carrier);
    /* Copies that nobody has waited for end before their memory goes. */
    if (carrier->copying != NULL) {
        (void)pst__carrier_wait_stream(carrier, carrier->copying, PST__PATIENCE_NS);
        device->ops->stream_destroy(device, carrier->copying);
    }
    pst_buckets_destroy(carrier->buckets);
    pst__operation_free_all(carrier);
    pst__script_free(carrier->heap, &carrier->script);
    pst__stalls_free(&carrier->stalls);
    pst_arena_destroy(carrier->gathered);
    pst_arena_destroy(carrier->staging);
    if (peers_may_write(carrier))
        pst__arena_leave(carrier->sources);
    else
        pst_arena_destroy(carrier->sources);
    (void)pst_graph_destroy(carrier->graph);
    destroy_lanes(carrier);
    free_filling(carrier);
    if (carrier->reached != NULL) device->ops->event_destroy(device, carrier->reached);
    if (carrier->graph_begins != NULL) device->ops->event_destroy(device, carrier->graph_begins);
    if (carrier->options.compute == NULL && carrier->compute != NULL)
        device->ops->stream_destroy(device, carrier->compute);
    pst__heap_free_text(carrier->heap, carrier->name);
}
