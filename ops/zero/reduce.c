/* Reductions of a backward: what is reported, whose turn it is, what is reported again. */
#include "ops/zero/engine.h"

#include "sched/runtime.h"

#include <stdio.h>
#include <string.h>

/* ---- into buckets ---------------------------------------------------------------------------- */

/* Of a backward that was broken off nothing is delivered. */
static void note_written(pst_zero *engine, pst_dtype dtype) {
    for (size_t i = 0; i < engine->group_count; i++) {
        pst__group *group = &engine->groups[i];
        if (!group->is_filled || group->reduce_dtype != dtype) continue;
        group->is_filled = 0;
        if (!engine->is_broken) group->is_written = 1;
    }
}

static void note_carried(pst__open_bucket *open, const char *name) {
    if (open->last == name) return; /* another part of it */
    if (open->names++ == 0) open->first = name;
    open->last = name;
}

/* After the groups in it, the same on all ranks. Interned: a trace may be written when the engine
 * is gone, and a program knows its steps by the addresses of their names. NULL: no memory. */
static const char *name_of_bucket(const pst_zero *engine, const pst__open_bucket *open) {
    char name[256];
    if (open->names == 1)
        (void)snprintf(name, sizeof name, "gradients %s", open->first);
    else
        (void)snprintf(name, sizeof name, "gradients %s to %s (%u groups)", open->first, open->last,
                       open->names);
    return pst__trace_intern(pst__runtime_trace(engine->carrier.runtime), name);
}

/* That of the bucket that has just gone out. */
static void note_all_reduce(pst_zero *engine) {
    const pst__operation *latest = engine->carrier.queues[PST__REPLICA_LANE].newest;
    const pst_collective *sums = &latest->work.collective;
    engine->stats.all_reduces++;
    engine->stats.all_reduce_bytes += sums->count * pst_dtype_size(sums->dtype);
}

static pst_status send_bucket(void *context, pst_dtype dtype) {
    pst_zero *engine = context;
    const pst__open_bucket *open = &engine->carrier.open[dtype];
    if (open->operation == NULL) return PST_OK;
    const char *name = name_of_bucket(engine, open);
    if (name == NULL) return pst__zero_fail(engine, PST_ENOMEM, "%s", "no memory to reduce");
    const pst_status status = pst__bucket_send(&engine->carrier, dtype, name);
    if (status != PST_OK) return status;
    note_written(engine, dtype);
    engine->stats.reduces++;
    if (engine->carrier.replicas > 1) note_all_reduce(engine);
    return PST_OK;
}

pst_status pst__reduce_flush(pst_zero *engine) {
    pst_status status = PST_OK;
    for (int dtype = 0; status == PST_OK && dtype < PST_DTYPE_COUNT; dtype++)
        status = send_bucket(engine, (pst_dtype)dtype);
    return status;
}

size_t pst__part_elements(const pst_zero *engine, const pst__group *group) {
    size_t bytes = engine->options.part_bytes / PST_ZERO_ALIGNMENT * PST_ZERO_ALIGNMENT;
    size_t most = bytes / group->layout.reduce_element_bytes;
    return most < group->layout.gradient_elements ? most : group->layout.gradient_elements;
}

/* An element of any dtype takes as much as one of the widest. */
static size_t place_of(const pst_zero *engine, size_t bytes, pst_dtype dtype) {
    return bytes / pst_dtype_size(dtype) * engine->widest_bytes;
}

pst_status pst__reduce_to_sums(pst_zero *engine, pst__operation *operation, const pst__group *group,
                               pst__part part, size_t offset, int accumulate, void **sums) {
    const pst_dtype travels = group->reduce_dtype;
    pst_status status = PST_OK;
    if (operation->sums.memory == NULL)
        status =
            pst_arena_acquire(engine->carrier.staging,
                              place_of(engine, engine->chunk_bytes, travels), &operation->sums);
    if (status != PST_OK) return status;
    *sums = (char *)operation->sums.memory + place_of(engine, offset, travels);
    return pst__operation_add_piece(operation,
                                    &(pst_reduce_piece){.offset = offset,
                                                        .count = part.count,
                                                        .destination = *sums,
                                                        .destination_dtype = group->dtype,
                                                        .accumulate = accumulate});
}

static pst_status add_piece(pst_zero *engine, pst__group *group, pst__part part,
                            const pst_slot *slot, int accumulate) {
    pst__open_bucket *open = &engine->carrier.open[group->reduce_dtype];
    note_carried(open, group->name);
    group->is_filled = group->is_updated || group->target != NULL;
    if (group->is_updated)
        return pst__update_add(engine, open->operation, group, part, slot->offset);
    if (group->target == NULL) return PST_OK;
    if (engine->options.shards_on_host)
        return pst__hosted_download(engine, open->operation, group, part, slot->offset, accumulate);
    return pst__operation_add_piece(
        open->operation,
        &(pst_reduce_piece){.offset = slot->offset,
                            .count = part.count,
                            .destination =
                                (char *)group->target + part.first * group->layout.element_bytes,
                            .destination_dtype = group->dtype,
                            .accumulate = accumulate});
}

pst_status pst__reduce_copy_in(pst_zero *engine, const pst__group *group, pst__part part,
                               void *place, size_t stride, const void *const *sources,
                               pst_dtype dtype, pst_dtype as) {
    pst_device *device = engine->carrier.device;
    size_t count = pst__layout_casts(&group->layout, engine->carrier.world, part, place, stride,
                                     sources, dtype, as, engine->casts);
    pst_status status = device->ops->cast_scale_copy(device, engine->carrier.filling.stream,
                                                     engine->casts, count, 1.0);
    if (status == PST_OK) return PST_OK;
    return pst__carrier_fail_device(&engine->carrier, status,
                                    "group '%s': copying its %s gradients failed", group->name,
                                    pst_dtype_name(dtype));
}

static pst_status fill_part(pst_zero *engine, pst__group *group, pst__part part,
                            const void *const *sources, pst_dtype dtype, int accumulate) {
    pst__carrier *carrier = &engine->carrier;
    const pst_dtype travels = group->reduce_dtype;
    const size_t chunk = part.count * pst_dtype_size(travels);
    pst_slot slot;
    pst_status status = pst__bucket_slot(carrier, travels, chunk, send_bucket, engine, &slot);
    if (status == PST_OK) status = add_piece(engine, group, part, &slot, accumulate);
    if (status != PST_OK) return status;
    carrier->open[travels].whole_bytes += chunk * carrier->world;
    pst__record_reduction(engine, carrier->open[travels].operation, chunk);
    const size_t bytes = pst__bucket_bytes(carrier);
    if (bytes > engine->stats.bucket_peak) engine->stats.bucket_peak = bytes;
    status =
        pst__reduce_copy_in(engine, group, part, slot.memory, slot.stride, sources, dtype, travels);
    if (status != PST_OK || slot.offset + slot.padded_bytes < engine->options.bucket_bytes)
        return status;
    return send_bucket(engine, travels);
}

/* The caller may free this group's gradients. */
static void call_consumed(const pst_zero *engine, uint32_t group) {
    if (engine->options.gradients_consumed != NULL)
        engine->options.gradients_consumed(engine->options.callback_context, group);
}

static pst_status take_back_oldest(pst_zero *engine) {
    const pst__lent oldest = engine->lent[0];
    engine->lent_count--;
    memmove(engine->lent, engine->lent + 1, engine->lent_count * sizeof *engine->lent);
    const pst_status status =
        oldest.pushed == 0 ? PST_OK
                           : pst__operation_follow_reductions(&engine->carrier, oldest.pushed);
    call_consumed(engine, oldest.group);
    return status;
}

/* Compute waits for the copies that have begun, and for what is read without any: but not for what
 * reads gradients of the latest groups, `most` of them. */
static pst_status join_copies(pst_zero *engine, size_t most) {
    pst_status status = pst__fill_join(&engine->carrier);
    pst__record_joining(engine);
    while (engine->lent_count > 0 && (engine->lent_count > most || engine->lent[0].pushed == 0)) {
        const pst_status taken = take_back_oldest(engine);
        if (status == PST_OK) status = taken;
    }
    pst__timing_note(engine->joining, PST__ENDED, engine->carrier.compute);
    return status;
}

/* The same once compute has been made to wait for what reads them: now, or by a later join. */
static void consumed(pst_zero *engine, uint32_t group) {
    if (engine->carrier.filling.is_apart)
        engine->lent[engine->lent_count++] = (pst__lent){group, engine->pushed};
    else
        call_consumed(engine, group);
    engine->pushed = 0;
}

/* One rank alone has the sum: what would be rounded in a bucket as it is, and not added to. */
static int is_sum(const pst_zero *engine, const pst__group *group, pst_dtype dtype,
                  int accumulate) {
    return pst__carrier_is_alone(&engine->carrier) && !engine->options.shards_on_host &&
           group->target != NULL && !accumulate && dtype == group->reduce_dtype;
}

static void note_reduced(pst_zero *engine, const pst__group *group) {
    engine->stats.reduces++;
    engine->stats.reduce_bytes += group->layout.gradient_bytes_whole;
}

static pst_status fill_target(pst_zero *engine, pst__group *group, const void *const *sources,
                              pst_dtype dtype) {
    const pst__part whole = {0, group->layout.gradient_elements};
    engine->stats.reduces++;
    group->is_written = 1;
    return pst__reduce_copy_in(engine, group, whole, group->target, 0, sources, dtype,
                               group->dtype);
}

/* What is larger than part_bytes goes in parts, so that it needs no bucket of its size. */
static pst_status fill_parts(pst_zero *engine, pst__group *group, size_t first, size_t end,
                             const void *const *sources, pst_dtype dtype, int accumulate) {
    const size_t most = pst__part_elements(engine, group);
    pst_status status = PST_OK;
    for (pst__part part = {first, 0}; status == PST_OK && first < end; first += part.count) {
        part.first = first;
        part.count = end - first < most ? end - first : most;
        status = fill_part(engine, group, part, sources, dtype, accumulate);
    }
    return status;
}

/* Members that share buckets go in together where they lie side by side. */
static pst_status fill_members(pst_zero *engine, pst__group *group, const void *const *sources,
                               pst_dtype dtype, int accumulate) {
    const pst__layout *layout = &group->layout;
    size_t first = 0, end = 0;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < layout->member_count; i++) {
        if (!layout->members[i].trainable) continue;
        const size_t next = pst__layout_end(layout, i);
        if (!pst__is_pushed(engine, group, &layout->members[i])) {
            end = next;
            continue;
        }
        status = fill_parts(engine, group, first, end, sources, dtype, accumulate);
        if (status == PST_OK) status = pst__push(engine, group, i, sources, dtype, accumulate);
        first = end = next;
    }
    return status == PST_OK ? fill_parts(engine, group, first, end, sources, dtype, accumulate)
                            : status;
}

/* A group's gradients go into a bucket, which goes out when bucket_bytes are in it; but for those
 * that need none. `sources` NULL: zeros. */
static pst_status fill(pst_zero *engine, uint32_t index, const void *const *sources,
                       pst_dtype dtype, int accumulate) {
    pst__group *group = &engine->groups[index];
    pst_status status = join_copies(engine, PST__MOST_LENT - 1);
    if (status == PST_OK) status = pst__fill_begin(&engine->carrier);
    if (status == PST_OK)
        status = is_sum(engine, group, dtype, accumulate)
                     ? fill_target(engine, group, sources, dtype)
                     : fill_members(engine, group, sources, dtype, accumulate);
    if (status == PST_OK) status = pst__fill_end(&engine->carrier);
    if (status != PST_OK) return status;
    engine->stats.reduce_bytes += group->layout.gradient_bytes_whole;
    return pst__record(engine, PST_ZERO_REDUCE, index, group->layout.gradient_bytes_whole);
}

/* ---- a regular reduction, at its turn -------------------------------------------------------- */

static pst_status ask_target(pst_zero *engine, uint32_t index, int *accumulate) {
    pst__group *group = &engine->groups[index];
    pst_status status = engine->options.gradient_target(engine->options.callback_context, index,
                                                        &group->target, accumulate);
    if (status == PST_OK && group->target != NULL) return PST_OK;
    return pst__zero_fail(engine, status == PST_OK ? PST_EINVAL : status,
                          "group '%s': gradient_target gave no memory", group->name);
}

static int has_all_sources(const pst__group *group) {
    for (size_t i = 0; i < group->layout.member_count; i++)
        if (group->layout.members[i].trainable && group->sources[i] == NULL) return 0;
    return 1;
}

/* One rank alone may keep the gradients that it has reported. */
static int is_kept(const pst_zero *engine, uint32_t index) {
    const pst__group *group = &engine->groups[index];
    return pst__carrier_is_alone(&engine->carrier) && !engine->options.shards_on_host &&
           engine->options.gradients_kept != NULL && group->reported &&
           group->sources_dtype == group->dtype && group->reduce_dtype == group->dtype &&
           has_all_sources(group) &&
           engine->options.gradients_kept(engine->options.callback_context, index);
}

static pst_status keep(pst_zero *engine, uint32_t index) {
    pst__group *group = &engine->groups[index];
    note_reduced(engine, group);
    group->is_written = 1;
    return pst__record(engine, PST_ZERO_REDUCE, index, group->layout.gradient_bytes_whole);
}

static pst_status reduce_nothing(pst_zero *engine, uint32_t index) {
    pst__group *group = &engine->groups[index];
    group->target = NULL;
    group->is_updated = 0;
    pst_status status = fill(engine, index, NULL, group->reduce_dtype, 0);
    if (status == PST_OK && group->reported) consumed(engine, index);
    return status;
}

/* One rank alone, by the gradients that it has. */
static pst_status update_alone(pst_zero *engine, uint32_t index) {
    pst__group *group = &engine->groups[index];
    pst_status status = join_copies(engine, 0);
    if (status == PST_OK) status = pst__update_alone(engine, group);
    if (status != PST_OK) return status;
    group->is_written = 1;
    consumed(engine, index);
    note_reduced(engine, group);
    return pst__record(engine, PST_ZERO_REDUCE, index, group->layout.gradient_bytes_whole);
}

static pst_status reduce_group(pst_zero *engine, uint32_t index) {
    pst__group *group = &engine->groups[index];
    int accumulate = 0, has_sources = group->reported;
    if (engine->is_broken) return reduce_nothing(engine, index);
    engine->stats.updates += (uint64_t)group->is_updated;
    if (pst__update_is_alone(engine, group)) return update_alone(engine, index);
    if (!group->is_updated && is_kept(engine, index)) return keep(engine, index);
    pst_status status = group->is_updated ? PST_OK : ask_target(engine, index, &accumulate);
    if (status == PST_OK)
        status = fill(engine, index, has_sources ? group->sources : NULL,
                      has_sources ? group->sources_dtype : group->reduce_dtype, accumulate);
    if (status == PST_OK && has_sources) consumed(engine, index);
    return status;
}

pst_status pst__reduce_next(pst_zero *engine) {
    uint32_t index = engine->order.reduces[engine->reduced++];
    engine->groups[index].reduced = 1;
    return pst__carrier_give_up(&engine->carrier, reduce_group(engine, index));
}

/* ---- reports --------------------------------------------------------------------------------- */

static void note_presence(pst_zero *engine, const pst__group *group, const void *const *sources) {
    for (size_t i = 0; i < group->layout.member_count; i++) {
        const pst__member *member = &group->layout.members[i];
        if (member->trainable && sources[i] != NULL)
            engine->parameters[member->parameter].has_gradient_here = 1;
    }
}

static pst_status keep_extra(pst_zero *engine, uint32_t index, const void *const *sources,
                             pst_dtype dtype) {
    pst__group *group = &engine->groups[index];
    size_t bytes = group->layout.member_count * sizeof *sources;
    pst_status status =
        pst__heap_grow(engine->carrier.heap, (void **)&engine->extra, &engine->extra_capacity,
                       engine->extra_count + 1, sizeof *engine->extra);
    const void **copy = status == PST_OK ? pst__heap_alloc(engine->carrier.heap, bytes) : NULL;
    if (copy == NULL)
        return pst__zero_fail(engine, PST_ENOMEM, "group '%s': no memory for its gradients",
                              group->name);
    memcpy(copy, sources, bytes);
    engine->extra[engine->extra_count++] =
        (pst__extra){index, group->extra_reports++, copy, group->layout.member_count, dtype};
    return PST_OK;
}

static const char *why_extra(const pst__group *group) {
    if (group->reported) return "twice in one backward";
    if (group->reduced) return "after groups that follow them were needed";
    return "without a use in a forward since they were reduced last";
}

/* It is added at the end. In a careful backward all ranks take part in it; in another one they must
 * all have reported it alike: their hashes tell. */
static pst_status report_extra(pst_zero *engine, uint32_t index, const void *const *sources,
                               pst_dtype dtype) {
    const pst__group *group = &engine->groups[index];
    const int is_captured = engine->carrier.outside != NULL;
    if (!group->is_updated && !is_captured) return keep_extra(engine, index, sources, dtype);
    pst_status status = pst__zero_fail(
        engine, PST_EMISMATCH, "group '%s': its gradients were reported %s, %s", group->name,
        why_extra(group),
        is_captured ? "unlike in the passes before it was captured; capture no step whose passes "
                      "differ"
                    : "behind its update by those before; update it in a step behind the backward");
    return pst__carrier_give_up(&engine->carrier, status);
}

/* Behind the gathers that were needed so far; and behind those that another backward needs first,
 * although this one has left them out: gradients are complete behind the group's first use. */
static size_t place_now(const pst_zero *engine, uint32_t group) {
    const pst__order *order = &engine->order;
    const size_t first = order->first_period[group];
    const size_t before =
        first == 0 ? 0 : pst__backward_before(&order->gathers, order->periods[first - 1].last);
    return before > engine->needed ? before : engine->needed;
}

pst_status pst__reduce_report(pst_zero *engine, uint32_t index, const void *const *sources,
                              pst_dtype dtype) {
    pst__group *group = &engine->groups[index];
    if (group->layout.gradient_elements == 0) { /* nothing to send, but to be known */
        note_presence(engine, group, sources);
        call_consumed(engine, index);
        return PST_OK;
    }
    if (!group->was_used)
        return pst__zero_fail(engine, PST_ESTATE,
                              "group '%s' has gradients but was not used in a forward",
                              group->name);
    note_presence(engine, group, sources);
    if (group->reported_after == PST__NOT_REPORTED)
        group->reported_after = PST__REPORTED_FIRST + (uint32_t)place_now(engine, index);
    /* What only graphs of before the last reduction have used has no place in the order. */
    int has_place = engine->order.first_uses[index] != 0;
    if (!has_place || group->reported || group->reduced)
        return report_extra(engine, index, sources, dtype);
    memcpy(group->sources, sources, group->layout.member_count * sizeof *sources);
    group->sources_dtype = dtype;
    group->reported = 1;
    pst__update_reported(engine, index);
    return PST_OK;
}

void pst__reduce_begin(pst_zero *engine) {
    pst__order *order = &engine->order;
    engine->reduced = 0;
    for (size_t i = engine->group_count; i-- > 0;) {
        pst__group *group = &engine->groups[i];
        group->reported = group->reduced = group->is_filled = group->is_written = 0;
        group->reported_after = PST__NOT_REPORTED;
        group->extra_reports = 0;
        group->target = NULL;
        if (order->first_uses[i] != 0 && group->layout.gradient_elements > 0)
            order->reduces[order->reduce_count++] = (uint32_t)i;
    }
    pst__sort_descending(order->reduces, order->reduce_count, order->first_uses);
    for (size_t i = 0; i < engine->parameter_count; i++)
        engine->parameters[i].has_gradient_here = 0;
    pst__presence_begin(engine);
}

/* ---- further reports ------------------------------------------------------------------------- */

static const pst__extra *find_extra(const pst_zero *engine, uint32_t group, uint32_t round) {
    for (size_t i = 0; i < engine->extra_count; i++)
        if (engine->extra[i].group == group && engine->extra[i].round == round)
            return &engine->extra[i];
    return NULL;
}

static pst_status reduce_extra_group(pst_zero *engine, uint32_t index, const pst__extra *own) {
    const pst__group *group = &engine->groups[index];
    int accumulate = 1;
    pst_status status = PST_OK;
    if (group->target == NULL) status = ask_target(engine, index, &accumulate);
    if (status == PST_OK)
        status = fill(engine, index, own == NULL ? NULL : own->sources,
                      own == NULL ? group->reduce_dtype : own->dtype, accumulate);
    if (status == PST_OK && own != NULL) consumed(engine, index);
    return status;
}

/* Anywhere, where the host has the ranks' answer; here, as everywhere, otherwise. */
static uint32_t rounds_of(const pst_zero *engine, uint32_t group) {
    return engine->careful ? engine->agreed->groups[group].extra
                           : engine->groups[group].extra_reports;
}

/* Every rank takes part for every group that was reported again. */
static pst_status reduce_round(pst_zero *engine, uint32_t round) {
    pst_status status = PST_OK;
    for (uint32_t i = 0; status == PST_OK && i < engine->group_count; i++)
        if (rounds_of(engine, i) > round)
            status = reduce_extra_group(engine, i, find_extra(engine, i, round));
    return status;
}

static uint32_t count_rounds(const pst_zero *engine) {
    uint32_t rounds = 0;
    for (uint32_t i = 0; i < engine->group_count; i++)
        if (rounds_of(engine, i) > rounds) rounds = rounds_of(engine, i);
    return rounds;
}

/* What comes up to be added to has gone down before. */
static pst_status settle_targets(pst_zero *engine) {
    pst_status status = pst__reduce_flush(engine);
    if (status == PST_OK) status = join_copies(engine, 0);
    return status == PST_OK ? pst__operation_wait_reductions(&engine->carrier) : status;
}

static pst_status reduce_extra(pst_zero *engine) {
    pst_status status = PST_OK;
    uint32_t rounds = count_rounds(engine);
    if (rounds == 0) return PST_OK;
    for (uint32_t round = 0; status == PST_OK && round < rounds; round++) {
        if (engine->options.shards_on_host) status = settle_targets(engine);
        if (status == PST_OK) status = reduce_round(engine, round);
    }
    if (status == PST_OK) status = pst__reduce_flush(engine);
    if (status == PST_OK) status = join_copies(engine, 0);
    return pst__carrier_give_up(&engine->carrier, status);
}

static void forget_extra(pst_zero *engine) {
    for (size_t i = 0; i < engine->extra_count; i++)
        pst__heap_free(engine->carrier.heap, engine->extra[i].sources,
                       engine->extra[i].source_count * sizeof(void *));
    engine->extra_count = 0;
}

/* ---- the end --------------------------------------------------------------------------------- */

pst_status pst__reduce_end(pst_zero *engine) {
    pst_status status = pst__carrier_give_up(&engine->carrier, pst__reduce_flush(engine));
    if (status == PST_OK) status = pst__carrier_give_up(&engine->carrier, join_copies(engine, 0));
    if (status == PST_OK)
        status = pst__carrier_give_up(&engine->carrier, pst__presence_exchange(engine));
    if (status == PST_OK && engine->careful)
        status = pst__operation_wait_reductions(&engine->carrier);
    if (status == PST_OK) status = pst__presence_read(engine);
    if (status == PST_OK) status = reduce_extra(engine);
    if (status == PST_OK) status = pst__operation_wait_reductions(&engine->carrier);
    if (status == PST_OK && engine->options.shards_on_host)
        status = pst__operation_wait_reduced(&engine->carrier);
    forget_extra(engine);
    pst__operation_reap(&engine->carrier);
    if (status == PST_OK) pst_buckets_trim(engine->carrier.buckets);
    return status;
}

void pst__reduce_abandon(pst_zero *engine) {
    /* Gradients and their targets may be freed then, where compute does it or at once. */
    if (pst_runtime_status(engine->carrier.runtime) == PST_OK) {
        (void)pst__operation_wait_reductions(&engine->carrier);
        if (engine->options.shards_on_host) (void)pst__operation_wait_reduced(&engine->carrier);
    }
    (void)join_copies(engine, 0);
    pst__bucket_abandon_all(&engine->carrier);
    for (; engine->reduced < engine->order.reduce_count; engine->reduced++) {
        uint32_t index = engine->order.reduces[engine->reduced];
        if (engine->groups[index].reported) consumed(engine, index);
    }
    for (size_t i = 0; i < engine->extra_count; i++)
        consumed(engine, engine->extra[i].group);
    forget_extra(engine);
}
