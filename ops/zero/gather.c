#include "ops/zero/engine.h"

#include "base/clock.h"
#include "sched/runtime.h"

/* ---- communication copies -------------------------------------------------------------------- */

/* A shard that lies in its place is read there. */
static int has_copy(const pst__group *group) {
    return group->copy.memory != NULL && group->copy.memory != group->shard;
}

/* All gathers so far have what they wait for. */
static pst_status launch_all(pst_zero *engine) {
    pst__carrier *carrier = &engine->carrier;
    pst__operation *operation = pst__queue_of(carrier, PST__GATHER_LANE)->oldest;
    if (!carrier->asynchronous) return PST_OK;
    while (operation != NULL && operation->work.collective.ticket != carrier->gather_ticket)
        operation = operation->next;
    return operation == NULL ? PST_OK : pst__operation_wait_launch(operation);
}

/* A gather waits for what was recorded last when it is launched, not when it was issued. If it were
 * launched only behind this record, it would wait for compute, which waits for its readers. */
pst_status pst__gather_sources_written(pst_zero *engine) {
    pst_status status = launch_all(engine);
    return status == PST_OK ? pst__carrier_record(&engine->carrier, engine->shards_ready) : status;
}

static pst_status cast_copies(pst_zero *engine, size_t count) {
    pst_device *device = engine->carrier.device;
    pst_status status = pst__wait_gather_readers(&engine->carrier);
    if (status != PST_OK) return status;
    status =
        device->ops->cast_scale_copy(device, engine->carrier.compute, engine->casts, count, 1.0);
    if (status != PST_OK)
        return pst__carrier_fail_device(&engine->carrier, status, "%s",
                                        "casting shards for their gathers failed");
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

/* Its values are the caller's to make, behind readers of the old ones. */
static pst_status fill_copy(pst_zero *engine, pst__group *group) {
    const pst_zero_options *options = &engine->options;
    pst_status status = pst__wait_gather_readers(&engine->carrier);
    if (status == PST_OK)
        status = options->fill_copy(options->callback_context, (uint32_t)(group - engine->groups),
                                    group->copy.memory);
    if (status != PST_OK)
        return pst__zero_fail(engine, status, "group '%s': what is to be gathered was not made",
                              group->name);
    group->copy_is_old = 0;
    return PST_OK;
}

static int is_due(const pst__group *group) {
    return has_copy(group) && group->copy_is_old && group->is_bound &&
           group->gathered.state != PST__IN_FLIGHT;
}

static pst_status upload_all(pst_zero *engine) {
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < engine->group_count; i++)
        if (is_due(&engine->groups[i])) status = pst__hosted_upload(engine, &engine->groups[i]);
    return status;
}

pst_status pst__gather_refresh(pst_zero *engine) {
    size_t count = 0;
    if (engine->options.shards_on_host) return upload_all(engine);
    for (size_t i = 0; i < engine->group_count; i++)
        if (is_due(&engine->groups[i]) && !engine->groups[i].is_filled_outside)
            count += copy_piece(&engine->groups[i], &engine->casts[count]);
    return count == 0 ? PST_OK : cast_copies(engine, count);
}

pst_status pst__gather_fill(pst_zero *engine) {
    pst_status status = PST_OK;
    size_t count = 0;
    for (size_t i = 0; status == PST_OK && i < engine->group_count; i++) {
        pst__group *group = &engine->groups[i];
        if (!group->is_filled_outside || !is_due(group)) continue;
        status = fill_copy(engine, group);
        count++;
    }
    return status == PST_OK && count > 0 ? pst__gather_sources_written(engine) : status;
}

/* Outside of a pass, at whose end the host waits, it does so at once. */
static pst_status upload_alone(pst_zero *engine, pst__group *group) {
    const pst_status status = pst__hosted_upload(engine, group);
    if (status != PST_OK || engine->pass.kind != PST__NO_PASS) return status;
    return pst__hosted_wait_uploads(engine);
}

/* Refreshes one group's copy, right before its gather. */
static pst_status refresh_copy(pst_zero *engine, pst__group *group) {
    if (engine->options.shards_on_host) return is_due(group) ? upload_alone(engine, group) : PST_OK;
    if (!is_due(group)) return PST_OK;
    if (group->is_filled_outside) {
        const pst_status status = fill_copy(engine, group);
        return status == PST_OK ? pst__gather_sources_written(engine) : status;
    }
    if (copy_piece(group, engine->casts) == 0) return PST_OK;
    return cast_copies(engine, 1);
}

/* Copies from the host are behind launches of gathers, where they do not stay. */
static pst_status wait_uploads(pst_zero *engine) {
    const pst_status status = engine->options.transient_copies ? launch_all(engine) : PST_OK;
    return status == PST_OK ? pst__hosted_wait_uploads(engine) : status;
}

pst_status pst__gather_guard_shards(pst_zero *engine) {
    if (engine->options.shards_on_host) return wait_uploads(engine);
    for (size_t i = 0; i < engine->group_count; i++) {
        const pst__group *group = &engine->groups[i];
        if (!has_copy(group) && !pst__is_transient(engine, group))
            return pst__wait_gather_readers(&engine->carrier);
    }
    return PST_OK;
}

/* ---- issuing --------------------------------------------------------------------------------- */

static pst_status take_memory(pst_zero *engine, pst__group *group, size_t offset) {
    size_t bytes = group->layout.gathered_bytes;
    pst_status status = PST_EBUSY;
    if (group->layout.is_within) { /* for good */
        group->gathered.lease = (pst_lease){.memory = group->copy.memory};
        return PST_OK;
    }
    if (offset != PST__ANYWHERE)
        status =
            pst_arena_acquire_at(engine->carrier.gathered, offset, bytes, &group->gathered.lease);
    if (status == PST_EBUSY)
        status = pst_arena_acquire(engine->carrier.gathered, bytes, &group->gathered.lease);
    return status;
}

/* What the peers read; of one rank alone, what is gathered. */
static const void *source_of(const pst__group *group) {
    return has_copy(group) ? group->copy.memory : group->shard;
}

/* All but where it goes. */
static void describe(const pst__group *group, pst_collective *collective) {
    collective->kind = PST_ALL_GATHER;
    collective->name = group->name;
    collective->dtype = group->gather_dtype;
    collective->source = source_of(group);
    collective->source_bytes = group->layout.shard_elements * group->layout.gather_element_bytes;
    collective->segments = group->layout.segments;
    collective->segment_count = group->layout.segment_count;
}

/* Behind what wrote its source, and the uses before of where it goes. */
static pst_status send(pst_zero *engine, uint32_t index, pst__operation *operation,
                       pst_event *const *behind, size_t behind_count) {
    const pst__group *group = &engine->groups[index];
    const int is_transient = pst__is_transient(engine, group);
    pst_event *after[PST_LEASE_EVENTS + 3] = {engine->shards_ready};
    size_t count = 1;
    if (is_transient) pst__transient_take(engine, index, operation);
    if (group->uploaded != NULL) after[count++] = group->uploaded;
    if (group->named_at != NULL) after[count++] = group->named_at;
    for (size_t i = 0; i < behind_count; i++)
        after[count++] = behind[i];
    const pst_status status =
        pst__operation_submit(operation, group->layout.gathered_bytes, after, count);
    if (status != PST_OK) return status;
    engine->carrier.gather_ticket = operation->work.collective.ticket;
    if (is_transient) pst__transient_taken(engine, engine->carrier.gather_ticket);
    return is_transient && engine->pass.kind == PST__NO_PASS ? wait_uploads(engine) : PST_OK;
}

static pst_status submit(pst_zero *engine, uint32_t index, int fresh) {
    pst__group *group = &engine->groups[index];
    pst__operation *operation;
    pst_status status = pst__operation_take(&engine->carrier, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    describe(group, &operation->work.collective);
    pst__lookup_gather(group, operation);
    operation->work.collective.destination = group->gathered.lease.memory;
    operation->wait_name = group->wait_name;
    operation->timing = group->gather_timing = pst__record_timing(engine);
    const pst_lease *lease = &group->gathered.lease;
    status = fresh ? send(engine, index, operation, lease->after, lease->after_count)
                   : send(engine, index, operation, &group->gathered.released, 1);
    if (status == PST_OK) pst__gathered_note(&group->gathered, operation);
    return status;
}

/* Old contents: stages 1 and 2 gather into the same memory again, behind compute's uses of it;
 * stage 3 takes new memory. */
static pst_status put_aside(pst_zero *engine, pst__group *group) {
    pst_status status = PST_OK;
    if (group->gathered.state == PST__IN_FLIGHT) status = pst__gather_wait(engine, group);
    if (status != PST_OK || group->gathered.state == PST__SHARDED) return status;
    return engine->options.stage == 3
               ? pst__gather_drop(engine, group)
               : pst__carrier_record(&engine->carrier, group->gathered.released);
}

static pst_status issue(pst_zero *engine, uint32_t index, size_t offset) {
    pst__group *group = &engine->groups[index];
    pst_status status = put_aside(engine, group);
    if (status == PST_OK) status = refresh_copy(engine, group);
    if (status == PST_OK && !group->layout.moves) {
        group->gathered.lease.memory = (void *)(uintptr_t)source_of(group);
        return pst__gather_state_step(&group->gathered.state, PST__STEP_ISSUE);
    }
    int fresh = group->gathered.state == PST__SHARDED;
    if (status == PST_OK && fresh) status = take_memory(engine, group, offset);
    if (status != PST_OK) return status;
    status = submit(engine, index, fresh);
    if (status != PST_OK) {
        if (fresh && !group->layout.is_within)
            pst_arena_release(engine->carrier.gathered, &group->gathered.lease, NULL);
        return status;
    }
    return pst__gather_state_step(&group->gathered.state, PST__STEP_ISSUE);
}

pst_status pst__gather_issue(pst_zero *engine, uint32_t index, size_t offset, int ahead) {
    pst__group *group = &engine->groups[index];
    if (pst__gathered_is_current(&group->gathered)) return PST_OK;
    if (!group->is_bound)
        return pst__zero_fail(engine, PST_ESTATE,
                              "group '%s' has no shard: call pst_zero_bind_shard first",
                              group->name);
    pst_status status = issue(engine, index, offset);
    if (status != PST_OK) return status;
    group->gathered.is_stale = group->is_looked_up;
    engine->stats.gathers++;
    engine->stats.gather_bytes += pst__lookup_bytes(group);
    engine->stats.prefetches += (uint64_t)ahead;
    return PST_OK;
}

void pst__gather_refused(const pst_zero *engine, uint32_t index) {
    const pst__group *group = &engine->groups[index];
    pst__trace *trace = pst__runtime_trace(engine->carrier.runtime);
    if (!pst__trace_on(trace) || pst__gathered_is_current(&group->gathered)) return;
    const uint64_t now = pst__now();
    pst__trace_slice(pst__track_of_thread(trace), group->full_name, now, now, 0,
                     group->layout.gathered_bytes);
}

/* Into memory that nobody looks at. */
static pst_status submit_for_others(pst_zero *engine, uint32_t index) {
    const pst__group *group = &engine->groups[index];
    pst__operation *operation;
    pst_status status = pst__operation_take(&engine->carrier, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    operation->is_for_others = 1;
    status = pst_arena_acquire(engine->carrier.gathered, group->layout.gathered_bytes,
                               &operation->unread);
    if (status != PST_OK) {
        pst__operation_give(&engine->carrier, operation);
        return status;
    }
    describe(group, &operation->work.collective);
    pst__lookup_gather(group, operation);
    operation->work.collective.destination = operation->unread.memory;
    operation->wait_name = group->wait_name;
    return send(engine, index, operation, operation->unread.after, operation->unread.after_count);
}

pst_status pst__gather_for_others(pst_zero *engine, uint32_t index) {
    const pst__group *group = &engine->groups[index];
    const pst_status status = group->layout.moves ? submit_for_others(engine, index) : PST_OK;
    if (status != PST_OK) return status;
    engine->stats.gathers++;
    engine->stats.gather_bytes += group->layout.gathered_bytes;
    return PST_OK;
}

/* ---- waiting, and giving back ---------------------------------------------------------------- */

pst_status pst__gather_wait(pst_zero *engine, pst__group *group) {
    if (group->gathered.state == PST__SHARDED)
        return pst__zero_fail(engine, PST_ESTATE, "group '%s' is %s: call pst_zero_gather first",
                              group->name, pst__gather_state_name(group->gathered.state));
    const pst_status status =
        group->layout.moves ? PST_OK : pst__hosted_follow(engine, group); /* what is gathered */
    return status == PST_OK ? pst__gathered_wait(&engine->carrier, &group->gathered) : status;
}

pst_status pst__gather_drop(pst_zero *engine, pst__group *group) {
    if (!group->layout.moves) {
        group->gathered.lease.memory = NULL;
        return pst__gather_state_step(&group->gathered.state, PST__STEP_DROP);
    }
    return pst__gathered_drop(&engine->carrier, engine->carrier.gathered, &group->gathered);
}

pst_status pst__gather_wait_all(pst_zero *engine) {
    pst_status status = PST_OK;
    for (size_t i = 0; i < engine->group_count && status == PST_OK; i++) {
        pst__group *group = &engine->groups[i];
        if (group->gathered.state != PST__IN_FLIGHT) continue;
        status = pst__gather_wait(engine, group);
        if (status == PST_OK)
            status = pst__gather_state_step(&group->gathered.state, PST__STEP_KEEP);
    }
    return status;
}

static pst_status settle(pst_zero *engine, pst__group *group) {
    pst_status status = PST_OK;
    group->gathered.uses = 0;
    if (group->gathered.state == PST__IN_FLIGHT) status = pst__gather_wait(engine, group);
    if (status != PST_OK || group->gathered.state == PST__SHARDED) return status;
    return engine->options.stage == 3
               ? pst__gather_drop(engine, group)
               : pst__gather_state_step(&group->gathered.state, PST__STEP_KEEP);
}

/* Gathers that this rank has no need of read its shards all the same. */
static pst_status wait_for_others(pst_zero *engine) {
    pst_status status = PST_OK;
    pst__operation *operation = pst__queue_of(&engine->carrier, PST__GATHER_LANE)->oldest;
    for (; operation != NULL && status == PST_OK; operation = operation->next)
        if (operation->is_for_others) status = pst__operation_wait(operation);
    return status;
}

pst_status pst__gather_settle(pst_zero *engine) {
    pst_status status = wait_for_others(engine);
    if (status != PST_OK) return status;
    for (size_t i = 0; i < engine->group_count; i++) {
        status = settle(engine, &engine->groups[i]);
        if (status != PST_OK) return status;
    }
    pst__operation_reap(&engine->carrier);
    return PST_OK;
}
