/* Collectives as parts of a CUDA graph. The streams of the lanes fork from the captured stream when
 * the capture begins and join it when it ends; between, whoever submits launches (operation.c). The
 * graph is then one work of compute's stream, around which the lanes are put in order. */
#include "ops/transfer/carrier.h"
#include "ops/transfer/operation.h"

/* Calls for each stream but compute's. */
static pst_status each_stream(pst__carrier *carrier,
                              pst_status (*call)(pst__carrier *carrier, pst_stream *stream)) {
    pst_status status = PST_OK;
    for (int lane = 0; lane < PST__LANE_COUNT; lane++) {
        const pst__queue *queue = &carrier->queues[lane];
        const pst_lane *lanes[] = {queue->lane, queue->sum_lane, queue->then_lane};
        for (size_t i = 0; i < sizeof lanes / sizeof lanes[0]; i++)
            if (status == PST_OK && lanes[i] != NULL)
                status = call(carrier, pst_lane_stream(lanes[i]));
    }
    pst_stream *beside[] = {carrier->filling.own, carrier->filling.own_landing, carrier->copying};
    for (size_t i = 0; i < sizeof beside / sizeof beside[0]; i++)
        if (status == PST_OK && beside[i] != NULL) status = call(carrier, beside[i]);
    return status;
}

static pst_status begin_comms(pst__carrier *carrier) {
    pst_status status = PST_OK;
    carrier->captures++;
    for (size_t i = 0; i < PST__LANE_COUNT && status == PST_OK; i++) {
        pst__queue *queue = &carrier->queues[i];
        queue->captured_tickets = 0;
        if (queue->lane != NULL && queue->comm->ops->capture_begin != NULL)
            status = queue->comm->ops->capture_begin(queue->comm);
    }
    return status;
}

/* Behind all that waits within the graph; each of them, whatever the others answer. */
static pst_status end_comms(pst__carrier *carrier) {
    pst_status status = PST_OK;
    for (size_t i = 0; i < PST__LANE_COUNT; i++) {
        const pst__queue *queue = &carrier->queues[i];
        if (queue->lane == NULL || queue->comm->ops->capture_end == NULL) continue;
        const pst_status ended = queue->comm->ops->capture_end(queue->comm, carrier->compute);
        if (status == PST_OK) status = ended;
    }
    return status;
}

static pst_status tell_comms(pst__carrier *carrier) {
    pst_status status = PST_OK;
    for (size_t i = 0; i < PST__LANE_COUNT && status == PST_OK; i++) {
        pst_comm *comm = carrier->queues[i].comm;
        if (carrier->queues[i].lane != NULL && comm->ops->graph_launched != NULL)
            status = comm->ops->graph_launched(comm, carrier->compute);
    }
    return status;
}

static pst_status wait_for_compute(pst__carrier *carrier, pst_stream *stream) {
    return carrier->device->ops->stream_wait(carrier->device, stream, carrier->reached);
}

static pst_status join_compute(pst__carrier *carrier, pst_stream *stream) {
    const pst_device_ops *ops = carrier->device->ops;
    pst_status status = ops->event_record(carrier->device, carrier->reached, stream);
    if (status != PST_OK) return status;
    return ops->stream_wait(carrier->device, carrier->compute, carrier->reached);
}

static pst_status fork_from_compute(pst__carrier *carrier) {
    const pst_status status = pst__carrier_record(carrier, carrier->reached);
    return status == PST_OK ? each_stream(carrier, wait_for_compute) : status;
}

static void use_stream(pst__carrier *carrier, pst_stream *stream) {
    carrier->compute = carrier->stalls.compute = stream;
}

pst_status pst__carrier_begin_capture(pst__carrier *carrier, void *native) {
    pst_device *device = carrier->device;
    pst_stream *stream = NULL;
    if (!carrier->asynchronous || device->ops->capture_begin == NULL)
        return pst__carrier_fail(carrier, PST_EUNSUPPORTED, "device %s captures no graphs",
                                 device->ops->name);
    pst_status status = device->ops->stream_wrap(device, native, &stream);
    if (status == PST_OK) status = device->ops->capture_begin(device, stream);
    if (status != PST_OK) {
        device->ops->stream_destroy(device, stream);
        return pst__carrier_fail_device(carrier, status, "%s", "the capture could not begin");
    }
    carrier->outside = carrier->compute;
    use_stream(carrier, stream);
    status = fork_from_compute(carrier);
    carrier->filling.landing = pst_lane_stream(pst__queue_of(carrier, PST__REDUCE_LANE)->lane);
    if (status == PST_OK) status = begin_comms(carrier);
    if (status == PST_OK) return PST_OK;
    (void)pst__carrier_end_capture(carrier);
    return pst__carrier_fail_device(carrier, status, "%s", "the lanes could not join the capture");
}

pst_status pst__carrier_end_capture(pst__carrier *carrier) {
    pst_device *device = carrier->device;
    pst_stream *captured = carrier->compute;
    if (carrier->outside == NULL) return PST_OK;
    pst_status status = each_stream(carrier, join_compute);
    const pst_status ended = end_comms(carrier);
    if (status == PST_OK) status = ended;
    device->ops->capture_end(device);
    use_stream(carrier, carrier->outside);
    carrier->filling.landing = carrier->filling.own_landing;
    carrier->outside = NULL;
    device->ops->stream_destroy(device, captured);
    pst__operation_end_captured(carrier);
    if (status == PST_OK) return PST_OK;
    return pst__carrier_fail_device(carrier, status, "%s",
                                    "the lanes could not join the end of a capture");
}

/* What lanes have run comes before the graph. */
static pst_status join_lanes(pst__carrier *carrier) {
    if (!carrier->is_beside_graph) return PST_OK;
    carrier->is_beside_graph = 0;
    pst_status status = pst__operation_wait_launches(carrier);
    if (status == PST_OK) status = each_stream(carrier, join_compute);
    return status == PST_OK ? pst__wait_all_readers(carrier) : status;
}

pst_status pst__carrier_before_graph(pst__carrier *carrier) {
    const pst_status status = join_lanes(carrier);
    return status == PST_OK ? pst__carrier_record(carrier, carrier->graph_begins) : status;
}

pst_status pst__carrier_after_graph(pst__carrier *carrier) {
    carrier->is_behind_graph = 1;
    const pst_status status = tell_comms(carrier);
    return status == PST_OK ? pst__operation_follow_graph(carrier) : status;
}

pst_status pst__carrier_join_graph(pst__carrier *carrier) {
    if (!carrier->is_behind_graph || carrier->outside != NULL) return PST_OK;
    carrier->is_behind_graph = 0;
    return fork_from_compute(carrier);
}
