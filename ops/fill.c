/* Where gradients are copied into buckets. On an asynchronous device that is a stream of its own:
 * compute goes on beside the copies, and waits for those of one group when the next one is
 * reported. On others it is compute's. */
#include "ops/operation.h"

pst_status pst__fill_create(pst_zero *engine) {
    const pst_device_ops *ops = engine->device->ops;
    pst__filling *filling = &engine->filling;
    filling->stream = engine->compute;
    filling->pending = PST__NO_GROUP;
    if (!engine->asynchronous) return PST_OK;
    pst_status status = ops->event_create(engine->device, 0, &filling->reached);
    if (status == PST_OK) status = ops->event_create(engine->device, 0, &filling->filled);
    if (status == PST_OK) status = ops->stream_create(engine->device, 0, &filling->own);
    if (status == PST_OK) filling->stream = filling->own;
    return status;
}

void pst__fill_destroy(pst_zero *engine) {
    const pst__filling *filling = &engine->filling;
    pst_device *device = engine->device;
    if (filling->own != NULL) device->ops->stream_destroy(device, filling->own);
    if (filling->filled != NULL) device->ops->event_destroy(device, filling->filled);
    if (filling->reached != NULL) device->ops->event_destroy(device, filling->reached);
}

pst_status pst__fill_begin(pst_zero *engine) {
    pst__filling *filling = &engine->filling;
    if (filling->own == NULL) return PST_OK;
    pst_status status = pst__fill_join(engine);
    if (status == PST_OK) status = pst__zero_record(engine, filling->reached);
    if (status != PST_OK) return status;
    return engine->device->ops->stream_wait(engine->device, filling->own, filling->reached);
}

pst_status pst__fill_end(pst_zero *engine) {
    pst__filling *filling = &engine->filling;
    if (filling->own == NULL) return PST_OK;
    filling->is_apart = 1;
    return engine->device->ops->event_record(engine->device, filling->filled, filling->own);
}

void pst__fill_tell(const pst_zero *engine, uint32_t group) {
    if (engine->options.gradients_consumed != NULL)
        engine->options.gradients_consumed(engine->options.callback_context, group);
}

pst_status pst__fill_join(pst_zero *engine) {
    pst__filling *filling = &engine->filling;
    const uint32_t pending = filling->pending;
    pst_status status = PST_OK;
    if (filling->is_apart)
        status = engine->device->ops->stream_wait(engine->device, engine->compute, filling->filled);
    filling->is_apart = 0;
    filling->pending = PST__NO_GROUP;
    if (pending != PST__NO_GROUP) pst__fill_tell(engine, pending);
    return status;
}

void pst__fill_consumed(pst_zero *engine, uint32_t group) {
    if (engine->filling.is_apart)
        engine->filling.pending = group;
    else
        pst__fill_tell(engine, group);
}
