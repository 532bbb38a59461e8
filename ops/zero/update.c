/* Updates in a backward: AdamW behind a group's reduction, so that its reduced gradient need not
 * last.
 *
 * When a reduction has ended, all ranks have given their gradients of the group, and so are done
 * with what they had gathered of it: its shard may change, but for a group that is used again
 * behind the report of its gradients. Compute waits for the updates where it waits for the
 * reductions.
 *
 * One rank alone updates by the gradients that were reported, on the stream that else copies them.
 * Several do so bucket by bucket: sums go on to updates, where the communicator knows them, or to
 * memory of the reduction's own, which is given back behind the update. */
#include "ops/zero/engine.h"

#include <string.h>

/* ---- which groups ---------------------------------------------------------------------------- */

static int is_arithmetic(pst_dtype dtype) {
    return dtype == PST_FLOAT32 || dtype == PST_BFLOAT16 || dtype == PST_FLOAT16;
}

static int has_all_pieces(const pst_zero *engine, const pst__group *group) {
    for (size_t i = 0; i < group->layout.member_count; i++) {
        const pst__member *member = &group->layout.members[i];
        if (member->trainable && engine->updates[member->parameter].coefficients == NULL) return 0;
    }
    return 1;
}

/* Behind how many gathers it is reduced; SIZE_MAX: it is not. */
static size_t reduced_after(const pst__order *order, uint32_t index) {
    for (size_t i = 0; i < order->reduce_count; i++)
        if (order->reduces[i] == index) return order->reduce_after[i];
    return SIZE_MAX;
}

/* One rank alone does, and all of whom it lies within what is gathered. */
static int reads_shard(const pst__layout *layout) {
    return !layout->moves || layout->is_within;
}

/* All gathers of it have their turn before its reduction. In stages 1 and 2 what was gathered stays
 * as it is until the next forward, unless compute reads the shard: then it has to be used once. */
static int is_gathered_before(const pst_zero *engine, uint32_t index) {
    const pst__order *order = &engine->order;
    const size_t after = reduced_after(order, index);
    if (after == SIZE_MAX) return 0;
    if (engine->options.stage < 3)
        return !reads_shard(&engine->groups[index].layout) ||
               order->first_period[index] == order->last_period[index];
    for (size_t i = after; i < order->gathers.count; i++)
        if (order->gathers.turns[i].group == index) return 0;
    return 1;
}

static int has_reports(const pst_zero *engine) {
    for (size_t i = 0; i < engine->group_count; i++)
        if (engine->groups[i].reported || engine->groups[i].reduced) return 1;
    return 0;
}

static int may_update_any(const pst_zero *engine) {
    return engine->pass.kind == PST__BACKWARD && engine->pass.reduce && engine->one_order &&
           !engine->options.shards_on_host && !engine->careful && !has_reports(engine);
}

int pst_zero_may_update(const pst_zero *engine, uint32_t group) {
    return engine != NULL && group < engine->group_count && may_update_any(engine) &&
           is_arithmetic(engine->groups[group].dtype) && is_gathered_before(engine, group);
}

static void choose_groups(pst_zero *engine) {
    for (uint32_t i = 0; i < engine->group_count; i++)
        engine->groups[i].is_updated =
            pst_zero_may_update(engine, i) && has_all_pieces(engine, &engine->groups[i]);
}

/* What a backward that was broken off had not sent is not updated. */
int pst_zero_is_updated(const pst_zero *engine, uint32_t group) {
    return engine != NULL && group < engine->group_count && engine->groups[group].is_updated &&
           engine->groups[group].is_written;
}

static pst_status check_piece(pst_zero *engine, size_t index, const pst_adamw_piece *piece) {
    const pst__parameter *parameter = &engine->parameters[index];
    const pst__carrier *carrier = &engine->carrier;
    if (piece->coefficients == NULL) return PST_OK;
    const size_t count = pst__rows_of(parameter->rows, carrier->world, carrier->rank).count *
                         parameter->row_elements;
    if (piece->count != count)
        return pst__zero_fail(engine, PST_EINVAL,
                              "parameter '%s': its update is of %zu elements, but this rank's rows "
                              "have %zu",
                              parameter->name, piece->count, count);
    if (count == 0) return PST_OK;
    if (piece->parameter == NULL || piece->exp_avg == NULL || piece->exp_avg_sq == NULL)
        return pst__zero_fail(engine, PST_EINVAL,
                              "parameter '%s': its update lacks the parameter or a moment",
                              parameter->name);
    return PST_OK;
}

/* For what comes behind the sums. */
static pst_status create_lane(pst_zero *engine) {
    pst__queue *queue = pst__queue_of(&engine->carrier, PST__REDUCE_LANE);
    if (queue->then_lane != NULL) return PST_OK;
    return pst__carrier_add_then_lane(&engine->carrier, queue, "update");
}

pst_status pst_zero_update(pst_zero *engine, const pst_adamw_piece *pieces, size_t count) {
    pst_status status = pst__zero_check(engine, PST__NO_GROUP);
    if (status != PST_OK) return status;
    if (!may_update_any(engine))
        return pst__zero_fail(engine, PST_ESTATE, "%s",
                              "updates outside of a backward that may have them: see "
                              "pst_zero_may_update");
    if (engine->carrier.device->ops->adamw == NULL)
        return pst__zero_fail(engine, PST_EUNSUPPORTED, "device %s has no AdamW",
                              engine->carrier.device->ops->name);
    if (pieces == NULL || count != engine->parameter_count)
        return pst__zero_fail(engine, PST_EINVAL, "updates of %zu parameters: there are %zu", count,
                              engine->parameter_count);
    for (size_t i = 0; status == PST_OK && i < count; i++)
        status = check_piece(engine, i, &pieces[i]);
    if (status == PST_OK) status = create_lane(engine);
    if (status != PST_OK) return status;
    memcpy(engine->updates, pieces, count * sizeof *pieces);
    choose_groups(engine);
    return PST_OK;
}

/* Its reduction may come right behind a gather that compute has not waited for yet, here or on a
 * rank that reads this one's shard. */
static int is_used_later(const pst_zero *engine, uint32_t index) {
    const pst__backward *order = &engine->order.gathers;
    const uint32_t latest = order->latest[index];
    if (engine->options.stage < 3) return 0;
    return engine->groups[index].more_uses > 0 ||
           (latest == PST__NO_POSITION ? order->position[index] : order->turns[latest].next) !=
               PST__NO_POSITION;
}

void pst__update_reported(pst_zero *engine, uint32_t index) {
    if (is_used_later(engine, index)) engine->groups[index].is_updated = 0;
}

/* ---- pieces ---------------------------------------------------------------------------------- */

static void *moved(void *memory, size_t elements, pst_dtype dtype) {
    return memory == NULL ? NULL : (char *)memory + elements * pst_dtype_size(dtype);
}

/* `count` elements of a parameter's rows, from `first` on. */
static pst_adamw_piece piece_of(const pst_adamw_piece *whole, size_t first, size_t count,
                                const void *gradient, pst_dtype dtype) {
    pst_adamw_piece piece = *whole;
    piece.parameter = moved(whole->parameter, first, whole->parameter_dtype);
    piece.exp_avg = moved(whole->exp_avg, first, whole->moment_dtype);
    piece.exp_avg_sq = moved(whole->exp_avg_sq, first, whole->moment_dtype);
    piece.max_exp_avg_sq = moved(whole->max_exp_avg_sq, first, whole->moment_dtype);
    piece.copy = moved(whole->copy, first, whole->copy_dtype);
    piece.gradient = gradient;
    piece.gradient_dtype = dtype;
    piece.count = count;
    piece.first = whole->first + first;
    return piece;
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/* Where the communicator goes on to the update: see pst_collective.updates. */
static pst_status add_sum(pst__operation *operation, const pst__group *group, size_t offset,
                          size_t first, size_t count) {
    const size_t bytes = pst_dtype_size(group->reduce_dtype);
    const pst_reduce_piece piece = {.offset = offset + first * bytes, .count = count};
    return pst__operation_add_piece(operation, &piece);
}

/* What a part of a group's flat gradient, `offset` bytes into the chunk, has of each member's rows.
 * It lies at `sums`; NULL: nowhere. */
static pst_status add_pieces(const pst_zero *engine, const pst__group *group, pst__part part,
                             size_t offset, const char *sums, pst__operation *operation) {
    const size_t element = group->layout.element_bytes, end = part.first + part.count;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < group->layout.member_count; i++) {
        const pst__member *member = &group->layout.members[i];
        if (!member->trainable) continue;
        const pst_adamw_piece *whole = &engine->updates[member->parameter];
        const size_t begin = member->gradient_element;
        const size_t from = part.first > begin ? part.first : begin;
        const size_t to = smaller(begin + whole->count, end);
        if (from >= to) continue;
        const char *gradient = sums == NULL ? NULL : sums + (from - part.first) * element;
        const pst_adamw_piece piece =
            piece_of(whole, from - begin, to - from, gradient, group->dtype);
        status = pst__updates_add(engine->carrier.heap, &operation->updates, &piece);
        if (status == PST_OK && sums == NULL)
            status = add_sum(operation, group, offset, from - part.first, to - from);
    }
    return status;
}

/* ---- several ranks --------------------------------------------------------------------------- */

static pst_status update(pst__operation *operation, pst_stream *stream) {
    return pst__updates_launch(operation->carrier->device, stream, &operation->updates);
}

static int sums_go_on(const pst__carrier *carrier, const pst__group *group) {
    const pst_comm *comm = carrier->options.reduce_comm;
    return carrier->replicas == 1 && comm->ops->updates &&
           (size_t)comm->size <= PST_ADAMW_MOST_SOURCES && is_arithmetic(group->reduce_dtype);
}

static pst_status add_with_sums(pst_zero *engine, pst__operation *operation,
                                const pst__group *group, pst__part part, size_t offset) {
    void *sums = NULL;
    pst_status status = pst__reduce_to_sums(engine, operation, group, part, offset, 0, &sums);
    if (status == PST_OK) status = add_pieces(engine, group, part, offset, sums, operation);
    operation->then = update;
    return status;
}

pst_status pst__update_add(pst_zero *engine, pst__operation *operation, const pst__group *group,
                           pst__part part, size_t offset) {
    const pst_status status = sums_go_on(&engine->carrier, group)
                                  ? add_pieces(engine, group, part, offset, NULL, operation)
                                  : add_with_sums(engine, operation, group, part, offset);
    if (status == PST_OK) return PST_OK;
    return pst__zero_fail(engine, status, "group '%s': no memory for its update", group->name);
}

/* ---- one rank -------------------------------------------------------------------------------- */

int pst__update_is_alone(const pst_zero *engine, const pst__group *group) {
    if (!pst__carrier_is_alone(&engine->carrier) || !group->is_updated || !group->reported ||
        group->sources_dtype != group->dtype || group->reduce_dtype != group->dtype)
        return 0;
    for (size_t i = 0; i < group->layout.member_count; i++)
        if (group->layout.members[i].trainable && group->sources[i] == NULL) return 0;
    return 1;
}

pst_status pst__update_alone(pst_zero *engine, const pst__group *group) {
    pst__carrier *carrier = &engine->carrier;
    pst__updates *updates = &engine->own_updates;
    pst_status status = pst__fill_begin(carrier);
    for (size_t i = 0; status == PST_OK && i < group->layout.member_count; i++) {
        const pst__member *member = &group->layout.members[i];
        if (!member->trainable) continue;
        const pst_adamw_piece *whole = &engine->updates[member->parameter];
        const pst_adamw_piece piece =
            piece_of(whole, 0, whole->count, group->sources[i], group->dtype);
        status = pst__updates_add(carrier->heap, updates, &piece);
    }
    if (status == PST_OK)
        status = pst__updates_launch(carrier->device, carrier->filling.stream, updates);
    if (status == PST_OK) status = pst__fill_end(carrier);
    updates->count = 0;
    if (status == PST_OK) return PST_OK;
    return pst__carrier_fail_device(carrier, status, "group '%s': its update failed", group->name);
}
