#include "ops/engine.h"
#include "ops/operation.h"

#include "sched/runtime.h"

/* ---- communication copies -------------------------------------------------------------------- */

/* A shard that lies in its place is read there. */
static int has_copy(const pst__group *group) {
    return group->copy.memory != NULL && group->copy.memory != group->shard;
}

pst_status pst__gather_guard_sources(pst_zero *engine) {
    pst_comm *comm = engine->queues[PST__GATHER_LANE].comm;
    if (comm->ops->source_wait == NULL || engine->gather_ticket == 0) return PST_OK;
    pst_status status = comm->ops->source_wait(comm, engine->compute, engine->gather_ticket);
    if (status == PST_OK) return PST_OK;
    return pst__zero_fail(engine, status, "waiting for the readers of ticket %llu failed: %s",
                          (unsigned long long)engine->gather_ticket, comm->ops->error_text(comm));
}

/* All gathers so far have what they wait for. */
static pst_status launch_all(pst_zero *engine) {
    pst__operation *newest = NULL;
    if (!engine->asynchronous) return PST_OK;
    for (pst__operation *operation = pst__queue_of(engine, PST__GATHER_LANE)->oldest;
         operation != NULL; operation = operation->next)
        if (operation->group != PST__NO_GROUP) newest = operation;
    return newest == NULL ? PST_OK : pst__operation_wait_launch(newest);
}

/* A gather waits for what was recorded last when it is launched, not when it was issued. If it were
 * launched only behind this record, it would wait for compute, which waits for its readers. */
pst_status pst__gather_sources_written(pst_zero *engine) {
    pst_status status = launch_all(engine);
    return status == PST_OK ? pst__zero_record(engine, engine->shards_ready) : status;
}

static pst_status cast_copies(pst_zero *engine, size_t count) {
    pst_device *device = engine->device;
    pst_status status = pst__gather_guard_sources(engine);
    if (status != PST_OK) return status;
    status = device->ops->cast_scale_copy(device, engine->compute, engine->casts, count, 1.0);
    if (status != PST_OK)
        return pst__zero_fail(engine, status, "%s", "casting shards for their gathers failed");
    return pst__gather_sources_written(engine);
}

/* 1 when there is a piece to cast. Only while no gather of this rank reads the copy. */
static size_t copy_piece(pst__group *group, pst_cast *piece) {
    group->copy_is_old = 0;
    *piece = (pst_cast){.destination = group->copy.memory,
                        .source = group->shard,
                        .count = group->layout.shard_elements,
                        .destination_dtype = group->gather_dtype,
                        .source_dtype = group->dtype};
    return piece->count > 0;
}

static int is_due(const pst__group *group) {
    return has_copy(group) && group->copy_is_old && group->is_bound &&
           group->state != PST__IN_FLIGHT;
}

pst_status pst__gather_refresh(pst_zero *engine) {
    size_t count = 0;
    for (size_t i = 0; i < engine->group_count; i++)
        if (is_due(&engine->groups[i]))
            count += copy_piece(&engine->groups[i], &engine->casts[count]);
    return count == 0 ? PST_OK : cast_copies(engine, count);
}

/* Of one group, right before its gather. */
static pst_status refresh_copy(pst_zero *engine, pst__group *group) {
    if (!is_due(group) || copy_piece(group, engine->casts) == 0) return PST_OK;
    return cast_copies(engine, 1);
}

pst_status pst__gather_guard_shards(pst_zero *engine) {
    for (size_t i = 0; i < engine->group_count; i++)
        if (!has_copy(&engine->groups[i])) return pst__gather_guard_sources(engine);
    return PST_OK;
}

/* ---- issuing --------------------------------------------------------------------------------- */

static pst_status take_memory(pst_zero *engine, pst__group *group, size_t offset) {
    size_t bytes = group->layout.gathered_bytes;
    pst_status status = PST_EBUSY;
    if (offset != PST__ANYWHERE)
        status = pst_arena_acquire_at(engine->gathered, offset, bytes, &group->lease);
    if (status == PST_EBUSY) status = pst_arena_acquire(engine->gathered, bytes, &group->lease);
    return status;
}

/* All but where it goes. */
static void describe(const pst__group *group, pst_collective *collective) {
    collective->kind = PST_ALL_GATHER;
    collective->name = group->name;
    collective->dtype = group->gather_dtype;
    collective->source = has_copy(group) ? group->copy.memory : group->shard;
    collective->source_bytes = group->layout.shard_elements * group->layout.gather_element_bytes;
    collective->segments = group->layout.segments;
    collective->segment_count = group->layout.segment_count;
}

static pst_status submit(pst_zero *engine, uint32_t index, int fresh) {
    pst__group *group = &engine->groups[index];
    pst__operation *operation;
    pst_status status = pst__operation_take(engine, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    pst_collective *collective = &operation->work.collective;
    describe(group, collective);
    collective->destination = group->lease.memory;
    operation->group = index;
    pst_event *after[PST_LEASE_EVENTS + 1] = {engine->shards_ready};
    size_t count = 1;
    if (!fresh) after[count++] = group->released;
    for (size_t i = 0; fresh && i < group->lease.after_count; i++)
        after[count++] = group->lease.after[i];
    status = pst__operation_submit(operation, group->layout.gathered_bytes, after, count);
    if (status != PST_OK) return status;
    group->gather = operation;
    engine->gather_ticket = collective->ticket;
    return PST_OK;
}

/* Old contents: stages 1 and 2 gather into the same memory again, behind compute's uses of it;
 * stage 3 takes new memory. */
static pst_status put_aside(pst_zero *engine, pst__group *group) {
    pst_status status = PST_OK;
    if (group->state == PST__IN_FLIGHT) status = pst__gather_wait(engine, group);
    if (status != PST_OK || group->state == PST__SHARDED) return status;
    return engine->options.stage == 3 ? pst__gather_drop(engine, group)
                                      : pst__zero_record(engine, group->released);
}

static pst_status issue(pst_zero *engine, uint32_t index, size_t offset) {
    pst__group *group = &engine->groups[index];
    pst_status status = put_aside(engine, group);
    if (status == PST_OK) status = refresh_copy(engine, group);
    int fresh = group->state == PST__SHARDED;
    if (status == PST_OK && fresh) status = take_memory(engine, group, offset);
    if (status != PST_OK) return status;
    status = submit(engine, index, fresh);
    if (status != PST_OK) {
        if (fresh) pst_arena_release(engine->gathered, &group->lease, NULL);
        return status;
    }
    return pst__gather_state_step(&group->state, PST__STEP_ISSUE);
}

pst_status pst__gather_issue(pst_zero *engine, uint32_t index, size_t offset, int ahead) {
    pst__group *group = &engine->groups[index];
    int is_current = group->state != PST__SHARDED && (!group->is_stale || group->uses > 0);
    if (is_current) return PST_OK;
    if (!group->is_bound)
        return pst__zero_fail(engine, PST_ESTATE,
                              "group '%s' has no shard: call pst_zero_bind_shard first",
                              group->name);
    pst_status status = issue(engine, index, offset);
    if (status != PST_OK) return status;
    group->is_stale = 0;
    engine->stats.gathers++;
    engine->stats.gather_bytes += group->layout.gathered_bytes;
    engine->stats.prefetches += (uint64_t)ahead;
    return PST_OK;
}

/* Into memory that nobody looks at. */
static pst_status submit_for_others(pst_zero *engine, uint32_t index) {
    const pst__group *group = &engine->groups[index];
    pst__operation *operation;
    pst_status status = pst__operation_take(engine, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    status = pst_arena_acquire(engine->gathered, group->layout.gathered_bytes, &operation->unread);
    if (status != PST_OK) {
        pst__operation_give(engine, operation);
        return status;
    }
    describe(group, &operation->work.collective);
    operation->work.collective.destination = operation->unread.memory;
    operation->group = index;
    pst_event *after[PST_LEASE_EVENTS + 1] = {engine->shards_ready};
    size_t count = 1;
    for (size_t i = 0; i < operation->unread.after_count; i++)
        after[count++] = operation->unread.after[i];
    status = pst__operation_submit(operation, group->layout.gathered_bytes, after, count);
    if (status == PST_OK) engine->gather_ticket = operation->work.collective.ticket;
    return status;
}

pst_status pst__gather_for_others(pst_zero *engine, uint32_t index) {
    const pst__group *group = &engine->groups[index];
    pst_status status = submit_for_others(engine, index);
    if (status != PST_OK) return status;
    engine->stats.gathers++;
    engine->stats.gather_bytes += group->layout.gathered_bytes;
    return PST_OK;
}

/* ---- waiting, and giving back ---------------------------------------------------------------- */

pst_status pst__gather_wait(pst_zero *engine, pst__group *group) {
    pst_status status = PST_OK;
    if (group->gather != NULL)
        status = pst__operation_wait(group->gather, group->wait_name, PST__GATHER_LANE);
    if (status == PST_OK) status = pst_runtime_status(engine->runtime);
    if (status != PST_OK) return status;
    status = pst__gather_state_step(&group->state, PST__STEP_WAIT);
    if (status != PST_OK)
        return pst__zero_fail(engine, status, "group '%s' is %s: call pst_zero_gather first",
                              group->name, pst__gather_state_name(group->state));
    return PST_OK;
}

pst_status pst__gather_drop(pst_zero *engine, pst__group *group) {
    pst_status status = pst__zero_record(engine, group->released);
    if (status == PST_OK) status = pst__gather_state_step(&group->state, PST__STEP_DROP);
    if (status != PST_OK) return status;
    pst_arena_release(engine->gathered, &group->lease, group->released);
    group->lease = (pst_lease){0};
    return PST_OK;
}

pst_status pst__gather_wait_all(pst_zero *engine) {
    pst_status status = PST_OK;
    for (size_t i = 0; i < engine->group_count && status == PST_OK; i++) {
        pst__group *group = &engine->groups[i];
        if (group->state != PST__IN_FLIGHT) continue;
        status = pst__gather_wait(engine, group);
        if (status == PST_OK) status = pst__gather_state_step(&group->state, PST__STEP_KEEP);
    }
    return status;
}

static pst_status settle(pst_zero *engine, pst__group *group) {
    pst_status status = PST_OK;
    group->uses = 0;
    if (group->state == PST__IN_FLIGHT) status = pst__gather_wait(engine, group);
    if (status != PST_OK || group->state == PST__SHARDED) return status;
    return engine->options.stage == 3 ? pst__gather_drop(engine, group)
                                      : pst__gather_state_step(&group->state, PST__STEP_KEEP);
}

/* Gathers that this rank has no need of read its shards all the same. */
static pst_status wait_for_others(pst_zero *engine) {
    pst_status status = PST_OK;
    pst__operation *operation = pst__queue_of(engine, PST__GATHER_LANE)->oldest;
    for (; operation != NULL && status == PST_OK; operation = operation->next) {
        if (operation->group == PST__NO_GROUP) continue;
        const pst__group *group = &engine->groups[operation->group];
        if (group->gather != operation)
            status = pst__operation_wait(operation, group->wait_name, PST__GATHER_LANE);
    }
    return status;
}

pst_status pst__gather_settle(pst_zero *engine) {
    pst_status status = wait_for_others(engine);
    if (status != PST_OK) return status;
    for (size_t i = 0; i < engine->group_count; i++) {
        status = settle(engine, &engine->groups[i]);
        if (status != PST_OK) return status;
    }
    pst__operation_reap(engine);
    return PST_OK;
}
