/* Shards in memory of the host, where an optimizer of the host's works on them.
 *
 * The device has a copy of each shard, in the dtype that it is gathered in: what else is a
 * communication copy. It comes up when a forward begins behind an update, group by group on a
 * stream of its own, so that the first groups are gathered and computed with while others come.
 * Reduced gradients are summed up in memory of the reduction's own and go down behind that, as the
 * second part of its operation. Kernels touch memory of the device alone; what crosses is copied.
 *
 * The host reads and writes what the device copies: it waits for uploads at the end of a forward,
 * for gradients at the end of a backward. */
#include "ops/zero/engine.h"

#include "sched/runtime.h"

#define GLANCE_NS 100000000u /* until a wait looks whether there is something to wait for */

/* ---- life ------------------------------------------------------------------------------------ */

pst_status pst__hosted_create(pst_zero *engine) {
    pst__carrier *carrier = &engine->carrier;
    const pst_device_ops *ops = carrier->device->ops;
    if (!engine->options.shards_on_host) return PST_OK;
    pst_status status = ops->event_create(carrier->device, 0, &engine->uploads.reached);
    if (status == PST_OK) status = pst__carrier_add_copying(carrier);
    if (status != PST_OK) return status;
    return pst__carrier_add_then_lane(carrier, pst__queue_of(carrier, PST__REDUCE_LANE),
                                      "download");
}

void pst__hosted_free(pst_zero *engine) {
    pst_device *device = engine->carrier.device;
    if (engine->uploads.reached != NULL)
        device->ops->event_destroy(device, engine->uploads.reached);
}

/* ---- up -------------------------------------------------------------------------------------- */

/* Behind all that compute was given, and behind peers that read what is written. */
static pst_status begin(pst_zero *engine) {
    pst__carrier *carrier = &engine->carrier;
    pst_stream *copying = carrier->copying;
    if (copying == NULL) return PST_OK;
    pst_status status = pst__carrier_record(carrier, engine->uploads.reached);
    if (status == PST_OK)
        status =
            carrier->device->ops->stream_wait(carrier->device, copying, engine->uploads.reached);
    if (status != PST_OK) return status;
    return pst__wait_readers(carrier, carrier->options.gather_comm, copying,
                             carrier->gather_ticket);
}

static pst_stream *stream_of(const pst_zero *engine) {
    const pst__carrier *carrier = &engine->carrier;
    return carrier->copying != NULL ? carrier->copying : carrier->compute;
}

pst_status pst__hosted_bring_up(const pst_zero *engine, const pst__group *group, void *copy,
                                void *scratch, pst_stream *stream) {
    pst_device *device = engine->carrier.device;
    const size_t elements = group->layout.shard_elements;
    const int is_cast = group->gather_dtype != group->dtype;
    const pst_copy up = {is_cast ? scratch : copy, group->shard,
                         elements * group->layout.element_bytes};
    const pst_status status = device->ops->copy(device, stream, &up, 1);
    if (status != PST_OK || !is_cast) return status;
    const pst_cast cast = {.destination = copy,
                           .source = scratch,
                           .count = elements,
                           .destination_dtype = group->gather_dtype,
                           .source_dtype = group->dtype};
    return device->ops->cast_scale_copy(device, stream, &cast, 1, 1.0);
}

/* By way of scratch, which one group after the other takes. */
static pst_status cast_up(const pst_zero *engine, const pst__group *group) {
    const pst__carrier *carrier = &engine->carrier;
    pst_device *device = carrier->device;
    pst_stream *stream = stream_of(engine);
    pst_lease scratch;
    pst_status status = pst_arena_acquire(
        carrier->staging, group->layout.shard_elements * group->layout.element_bytes, &scratch);
    if (status != PST_OK) return status;
    for (size_t i = 0; status == PST_OK && carrier->asynchronous && i < scratch.after_count; i++)
        status = device->ops->stream_wait(device, stream, scratch.after[i]);
    if (status == PST_OK)
        status = pst__hosted_bring_up(engine, group, group->copy.memory, scratch.memory, stream);
    if (status == PST_OK) status = device->ops->event_record(device, group->uploaded, stream);
    pst_arena_release(carrier->staging, &scratch, carrier->asynchronous ? group->uploaded : NULL);
    return status;
}

pst_status pst__hosted_upload(pst_zero *engine, pst__group *group) {
    pst_device *device = engine->carrier.device;
    pst_stream *stream = stream_of(engine);
    pst_status status = begin(engine);
    if (status == PST_OK)
        status = group->gather_dtype == group->dtype
                     ? pst__hosted_bring_up(engine, group, group->copy.memory, NULL, stream)
                     : cast_up(engine, group);
    if (status == PST_OK) status = device->ops->event_record(device, group->uploaded, stream);
    if (status != PST_OK)
        return pst__zero_fail(
            engine, status, "group '%s': its shard could not be copied to the device", group->name);
    group->copy_is_old = 0;
    engine->uploads.is_running = 1;
    return PST_OK;
}

pst_status pst__hosted_follow(const pst_zero *engine, const pst__group *group) {
    const pst__carrier *carrier = &engine->carrier;
    if (group->uploaded == NULL || !carrier->asynchronous) return PST_OK;
    return carrier->device->ops->stream_wait(carrier->device, carrier->compute, group->uploaded);
}

/* A failed runtime says what they cannot come behind. */
pst_status pst__hosted_wait_uploads(pst_zero *engine) {
    const pst__carrier *carrier = &engine->carrier;
    pst__uploads *uploads = &engine->uploads;
    const uint64_t deadline = pst__runtime_deadline(carrier->runtime);
    if (!uploads->is_running) return PST_OK;
    uploads->is_running = 0;
    if (carrier->copying == NULL) return PST_OK;
    for (uint64_t waited = 0; !pst__carrier_wait_stream(carrier, carrier->copying, GLANCE_NS);
         waited += GLANCE_NS) {
        const pst_status status = pst_runtime_status(carrier->runtime);
        if (status != PST_OK) return status;
        if (deadline != 0 && waited >= deadline)
            return pst__zero_fail(engine, PST_ETIMEDOUT, "%s",
                                  "shards were not copied to the device within the deadline");
    }
    return PST_OK;
}

/* ---- down ------------------------------------------------------------------------------------ */

static pst_status download(pst__operation *operation, pst_stream *stream) {
    return pst__copies_launch(operation->carrier->device, stream, &operation->copies);
}

/* What is added to comes up before, on the stream that fills the bucket: compute, which that is
 * behind, has waited for what has written it. */
static pst_status bring_up(const pst_zero *engine, const pst__operation *operation, pst_copy copy) {
    const pst__carrier *carrier = &engine->carrier;
    pst_device *device = carrier->device;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && carrier->asynchronous && i < operation->sums.after_count;
         i++)
        status =
            device->ops->stream_wait(device, carrier->filling.stream, operation->sums.after[i]);
    return status == PST_OK ? device->ops->copy(device, carrier->filling.stream, &copy, 1) : status;
}

pst_status pst__hosted_download(pst_zero *engine, pst__operation *operation,
                                const pst__group *group, pst__part part, size_t offset,
                                int accumulate) {
    const size_t element = group->layout.element_bytes;
    void *target = (char *)group->target + part.first * element, *sums = NULL;
    pst_status status =
        pst__reduce_to_sums(engine, operation, group, part, offset, accumulate, &sums);
    if (status == PST_OK && accumulate)
        status = bring_up(engine, operation, (pst_copy){sums, target, part.count * element});
    if (status == PST_OK)
        status = pst__copies_add(engine->carrier.heap, &operation->copies,
                                 (pst_copy){target, sums, part.count * element});
    operation->then = download;
    if (status == PST_OK) return PST_OK;
    return pst__zero_fail(engine, status, "group '%s': no memory for its gradients", group->name);
}
