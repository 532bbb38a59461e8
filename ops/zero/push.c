/* Large gradients go out from where they lie. A rank's chunk of a parameter whose rows the ranks
 * share evenly is a range of its gradient as compute made it: each rank writes it into a bucket of
 * its owner by copy engines, and the owner adds its own up where that lies. So the multiprocessors
 * copy nothing, and the gradient stays until the sums have read it.
 *
 * Which ones do is a matter of shapes, the same on all ranks. A gradient that a rank does not have,
 * or has in another dtype, is made for this in scratch. */
#include "ops/zero/engine.h"

#include "sched/runtime.h"

#include <stdio.h>

#define MOST_ROUNDED 256u /* bytes */

static size_t chunk_elements(const pst_zero *engine, const pst__member *member) {
    return member->rows / engine->carrier.world * member->row_elements;
}

/* A bucket has a chunk for each rank, and none lands for its owner: which leaves room for what
 * communicators round the others up to. */
static int has_room(const pst_zero *engine) {
    return engine->chunk_bytes >= MOST_ROUNDED * engine->carrier.world;
}

int pst__is_pushed(const pst_zero *engine, const pst__group *group, const pst__member *member) {
    const size_t bytes = chunk_elements(engine, member) * group->layout.reduce_element_bytes;
    return pst__bucket_pushes(&engine->carrier) && has_room(engine) && member->trainable &&
           member->rows % engine->carrier.world == 0 && bytes >= engine->options.push_bytes &&
           group->reduce_dtype == group->used_dtype;
}

/* Interned, as that of a bucket. */
static const char *name_of(const pst_zero *engine, const pst__member *member) {
    char name[256];
    (void)snprintf(name, sizeof name, "gradient %s", engine->parameters[member->parameter].name);
    return pst__trace_intern(pst__runtime_trace(engine->carrier.runtime), name);
}

/* In scratch, a chunk a rank. */
static pst_status make_source(pst_zero *engine, pst__operation *operation, const pst__group *group,
                              pst__part part, const void *const *sources, pst_dtype dtype) {
    pst__carrier *carrier = &engine->carrier;
    pst_collective *collective = &operation->work.collective;
    pst_lease *made = &operation->staging;
    pst_status status =
        pst_arena_acquire(carrier->staging, collective->source_bytes * carrier->world, made);
    for (size_t i = 0; status == PST_OK && i < made->after_count; i++)
        status = carrier->device->ops->stream_wait(carrier->device, carrier->filling.stream,
                                                   made->after[i]);
    if (status != PST_OK) return status;
    collective->source = made->memory;
    collective->stride = collective->source_bytes;
    return pst__reduce_copy_in(engine, group, part, made->memory, collective->stride, sources,
                               dtype, group->reduce_dtype);
}

static pst_status set_source(pst_zero *engine, pst__operation *operation, const pst__group *group,
                             size_t index, pst__part part, const void *const *sources,
                             pst_dtype dtype) {
    const pst__member *member = &group->layout.members[index];
    const size_t element = group->layout.reduce_element_bytes;
    pst_collective *collective = &operation->work.collective;
    if (sources == NULL || sources[index] == NULL || dtype != group->reduce_dtype)
        return make_source(engine, operation, group, part, sources, dtype);
    collective->source =
        (const char *)sources[index] + (part.first - member->gradient_element) * element;
    collective->stride = chunk_elements(engine, member) * element;
    return PST_OK;
}

static pst_status set_destination(pst_zero *engine, pst__operation *operation, pst__group *group,
                                  pst__part part, int accumulate) {
    group->is_written = group->is_updated || group->target != NULL;
    if (group->is_updated) return pst__update_add(engine, operation, group, part, 0);
    if (group->target == NULL) return PST_OK;
    if (engine->options.shards_on_host)
        return pst__hosted_download(engine, operation, group, part, 0, accumulate);
    return pst__operation_add_piece(
        operation, &(pst_reduce_piece){.count = part.count,
                                       .destination = (char *)group->target +
                                                      part.first * group->layout.element_bytes,
                                       .destination_dtype = group->dtype,
                                       .accumulate = accumulate});
}

/* Its source was made, or what is added to was brought up, on the filling stream. */
static int is_behind_copies(const pst_zero *engine, const pst__operation *operation) {
    return operation->staging.memory != NULL || engine->options.shards_on_host;
}

static pst_status push_part(pst_zero *engine, pst__group *group, size_t index, pst__part part,
                            const void *const *sources, pst_dtype dtype, int accumulate) {
    const size_t bytes = part.count * group->layout.reduce_element_bytes;
    pst__operation *operation;
    pst_status status = pst__operation_take(&engine->carrier, PST__REDUCE_LANE, &operation);
    if (status != PST_OK) return status;
    operation->work.collective.name = name_of(engine, &group->layout.members[index]);
    if (operation->work.collective.name == NULL) status = PST_ENOMEM;
    if (status == PST_OK) status = pst__bucket_land(operation, group->reduce_dtype, bytes);
    if (status == PST_OK)
        status = set_source(engine, operation, group, index, part, sources, dtype);
    pst__lookup_push(group, operation, part.first - group->layout.members[index].gradient_element,
                     operation->staging.memory != NULL);
    if (status == PST_OK) status = set_destination(engine, operation, group, part, accumulate);
    if (status == PST_OK && is_behind_copies(engine, operation))
        status = pst__fill_land_behind(&engine->carrier);
    if (status != PST_OK) {
        pst__operation_give(&engine->carrier, operation);
        return pst__carrier_fail_device(&engine->carrier, status,
                                        "group '%s': its gradients could not go out", group->name);
    }
    pst__record_reduction(engine, operation, bytes);
    status = pst__bucket_push(operation);
    if (status != PST_OK) return status;
    engine->pushed = operation->work.collective.ticket;
    engine->stats.reduces++;
    return PST_OK;
}

pst_status pst__push(pst_zero *engine, pst__group *group, size_t index, const void *const *sources,
                     pst_dtype dtype, int accumulate) {
    const pst__member *member = &group->layout.members[index];
    const size_t most = pst__part_elements(engine, group);
    size_t left = chunk_elements(engine, member);
    pst__part part = {member->gradient_element, 0};
    pst_status status = PST_OK;
    for (; status == PST_OK && left > 0; left -= part.count) {
        part.first += part.count;
        part.count = left < most ? left : most;
        status = push_part(engine, group, index, part, sources, dtype, accumulate);
    }
    return status;
}
