/* The turns of a backward: its gathers and its reductions.
 *
 * Each has an order of its own that follows from the forward (order.h). Where they share a
 * communicator, or a device on which one collective may wait for another, the two are merged into
 * one: reduction k has its turn behind the first reduce_after[k] gathers, and a gather behind all
 * reductions that come before it. A backward that follows a plan takes these places from what the
 * ranks agreed on in an earlier backward: where the last of them reported the group. Without
 * a plan all reductions come behind all gathers.
 *
 * A group that was used several times is gathered several times, each in its turn, by all ranks:
 * whether a rank still has it does not count, as another one may have released it. Behind the first
 * turn of each group come those that only a backward of several forwards needs. How many forwards
 * that is nobody knows, so the ranks ask each other: one that needs such a turn, and each one that
 * has come to its end. Where nobody needs one the order ends.
 *
 * That nothing can wait in a circle: all ranks issue the same collectives in one order. A rank
 * stops before a reduction that is not reported only as long as nothing asks for a gather behind
 * it; then it sends zeros, and what is reported later is reduced at the end. So each rank reaches
 * the end of the order whatever its own backward does; a question that it waits for is one of its
 * collectives. A collective waits for compute, and compute only for collectives that were issued
 * before: take the first one in the order that has not ended; all that its ranks wait for in it has
 * ended, and so it ends.
 */
#include "ops/zero/engine.h"

/* ---- the order ------------------------------------------------------------------------------- */

/* How many gathers are issued when position `position` is in use. */
static size_t limit_of(const pst_zero *engine, size_t position) {
    const pst__path *path = engine->pass.backward_path;
    if (path == NULL) return position + 1;
    const pst__plan *plan = path->plan;
    return pst__backward_limit(&engine->order.gathers, engine->order.bytes, position, plan->ahead,
                               plan->budget);
}

/* Is it the budget that ends them there? */
static int is_cut(const pst_zero *engine, size_t position, size_t limit) {
    const pst__path *path = engine->pass.backward_path;
    return path != NULL && limit < engine->order.gathers.count &&
           limit - position <= path->plan->ahead;
}

/* Behind how many gathers the group was reported on the last rank. */
static size_t place_of(const pst_zero *engine, uint32_t group) {
    size_t count = engine->order.gathers.count;
    const uint32_t after =
        engine->expected == NULL ? PST__NOT_AGREED : engine->expected->groups[group].after;
    if (after == PST__NOT_AGREED) return count;
    if (after == PST__NOT_REPORTED || count == 0) return 0;
    size_t needed = after - PST__REPORTED_FIRST;
    if (needed == 0) return 0;
    return limit_of(engine, (needed < count ? needed : count) - 1);
}

static void place_reductions(pst_zero *engine) {
    pst__order *order = &engine->order;
    size_t after = 0;
    for (size_t i = 0; i < order->reduce_count; i++) {
        size_t place = place_of(engine, order->reduces[i]);
        if (place > after) after = place;
        order->reduce_after[i] = after;
    }
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* Up to the first turn of each group. Of what comes behind nobody needs anything, unless one
 * backward is for several forwards. */
static size_t count_sure(const pst__backward *order) {
    size_t count = order->count;
    while (count > 0 && order->position[order->turns[count - 1].group] != count - 1)
        count--;
    return count;
}

static pst_status build_order(pst_zero *engine) {
    pst__order *order = &engine->order;
    const pst__path *path = engine->pass.backward_path;
    const pst_status status = pst__backward_build(
        engine->carrier.heap, &order->gathers, order->periods, order->period_count,
        order->group_count, engine->need, path == NULL ? 0 : path->plan->ahead);
    if (status == PST_OK) return PST_OK;
    return pst__zero_fail(engine, status, "%s", "no memory for the order of a backward");
}

static int is_there(const pst__group *group) {
    return group->gathered.state != PST__SHARDED && !pst__lookup_is_over(group);
}

pst_status pst__backward_begin(pst_zero *engine) {
    const pst_status status = build_order(engine);
    if (status != PST_OK) return status;
    for (size_t i = 0; i < engine->group_count; i++) {
        engine->held[i] = is_there(&engine->groups[i]) && !engine->groups[i].is_looked_up;
        engine->groups[i].more_uses = 0;
        engine->groups[i].is_updated = 0;
    }
    engine->issued = engine->needed = engine->wanted = 0;
    engine->is_ending = 0;
    engine->sure = count_sure(&engine->order.gathers);
    engine->order.reduce_count = 0;
    if (!engine->pass.reduce) return PST_OK;
    pst__reduce_begin(engine);
    if (engine->expected != NULL) engine->sure = larger(engine->sure, engine->expected->turns);
    if (engine->one_order) place_reductions(engine);
    return PST_OK;
}

uint64_t pst__backward_order(const pst_zero *engine) {
    const pst__order *order = &engine->order;
    uint64_t hash = PST__HASH_SEED;
    for (size_t i = 0; i < order->gathers.count; i++) {
        const uint32_t turn[] = {order->gathers.turns[i].group, order->gathers.turns[i].periods};
        hash = pst__hash(hash, turn, sizeof turn);
    }
    return pst__hash(hash, order->reduces, order->reduce_count * sizeof *order->reduces);
}

uint64_t pst__backward_hash(const pst_zero *engine, uint64_t hash) {
    const pst__order *order = &engine->order;
    if (!engine->one_order) return hash;
    return pst__hash(hash, order->reduce_after, order->reduce_count * sizeof *order->reduce_after);
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* What was gathered when the backward began needs no gather: the first turn is over at once, and in
 * stages 1 and 2 each of them. The same on all ranks. */
static int is_held(const pst_zero *engine, size_t position) {
    const pst__backward *order = &engine->order.gathers;
    const uint32_t group = order->turns[position].group;
    return engine->held[group] && (order->position[group] == position || engine->options.stage < 3);
}

static int is_held_next(const pst_zero *engine) {
    return engine->issued < engine->order.gathers.count && is_held(engine, engine->issued);
}

/* Behind the sure turns: all ranks go on if one of them asks for it, else the order ends here. */
static pst_status go_on(pst_zero *engine) {
    const int32_t own = engine->is_ending ? 0 : (int32_t)engine->needed;
    int32_t asked = 0;
    const pst_status status = pst__presence_ask(engine, own, &asked);
    if (status != PST_OK) return status;
    if ((size_t)asked > engine->issued)
        engine->sure = (size_t)asked;
    else
        engine->issued = engine->order.gathers.count;
    return PST_OK;
}

/* A rank that still has the group takes part all the same, as another one may have released it; and
 * so does one that needs it no more. */
static pst_status take_turn(pst_zero *engine, uint32_t index) {
    const pst__path *path = engine->pass.backward_path;
    pst__group *group = &engine->groups[index];
    size_t offset = path == NULL ? PST__ANYWHERE : path->plan->backward_offsets[index];
    int is_ahead = engine->issued >= engine->needed;
    if (is_held(engine, engine->issued)) return PST_OK;
    if (!is_there(group) && !engine->is_ending)
        return pst__gather_issue(engine, index, offset, is_ahead);
    group->more_uses++;
    return pst__gather_for_others(engine, index);
}

static pst_status gather_next(pst_zero *engine) {
    pst__backward *order = &engine->order.gathers;
    pst_status status = PST_OK;
    if (engine->issued >= engine->sure && !is_held_next(engine)) {
        status = go_on(engine);
        if (status != PST_OK || engine->issued == order->count) return status;
    }
    const pst__turn *turn = &order->turns[engine->issued];
    status = take_turn(engine, turn->group);
    if (status != PST_OK) return status;
    engine->groups[turn->group].more_uses += turn->periods - 1;
    order->latest[turn->group] = (uint32_t)engine->issued++;
    return PST_OK;
}

int pst__backward_keeps(const pst_zero *engine, pst__group *group) {
    if (engine->pass.kind != PST__BACKWARD || group->more_uses == 0) return 0;
    group->more_uses--;
    return 1;
}

static uint32_t next_reduction(const pst_zero *engine) {
    const pst__order *order = &engine->order;
    return engine->reduced < order->reduce_count ? order->reduces[engine->reduced] : PST__NO_GROUP;
}

/* Reported, or not reported by anybody when this was agreed on: then nobody waits for it. */
static int is_ready(const pst_zero *engine, uint32_t group) {
    return engine->groups[group].reported ||
           (engine->one_order && engine->expected != NULL &&
            engine->expected->groups[group].after == PST__NOT_REPORTED);
}

/* Nothing is gathered ahead that not all ranks may need. */
static int wants_next(const pst_zero *engine) {
    return engine->issued < engine->wanted &&
           (engine->issued < engine->sure || engine->issued < engine->needed);
}

/* All turns up to the gathers that are wanted; those in front of the first `needed` gathers in any
 * case, reported or not. */
static pst_status take_turns(pst_zero *engine, size_t needed) {
    pst_status status = PST_OK;
    while (status == PST_OK) {
        const uint32_t group = next_reduction(engine);
        if (group != PST__NO_GROUP &&
            engine->order.reduce_after[engine->reduced] <= engine->issued) {
            if (!is_ready(engine, group) && engine->issued >= needed) return PST_OK;
            status = pst__reduce_next(engine);
        } else if (wants_next(engine) || is_held_next(engine)) {
            status = gather_next(engine);
        } else {
            return PST_OK;
        }
    }
    return status;
}

/* The two orders side by side. */
static pst_status gather_wanted(pst_zero *engine) {
    pst_status status = PST_OK;
    while (status == PST_OK && wants_next(engine))
        status = gather_next(engine);
    return status;
}

static pst_status reduce_reported(pst_zero *engine, int missing) {
    pst_status status = PST_OK;
    uint32_t group;
    while (status == PST_OK && (group = next_reduction(engine)) != PST__NO_GROUP &&
           (missing || engine->groups[group].reported))
        status = pst__reduce_next(engine);
    return status;
}

/* ---- what moves them on ---------------------------------------------------------------------- */

/* Whose turn a use is: that of what is gathered, or else the group's next one. */
static size_t turn_of(const pst_zero *engine, uint32_t group) {
    const pst__backward *order = &engine->order.gathers;
    const uint32_t latest = order->latest[group];
    if (latest == PST__NO_POSITION) return order->position[group];
    return is_there(&engine->groups[group]) ? latest : order->turns[latest].next;
}

pst_status pst__backward_gather(pst_zero *engine, uint32_t group) {
    size_t position = turn_of(engine, group);
    engine->needed_here[group] = 1;
    if (position != PST__NO_POSITION) {
        engine->needed = larger(engine->needed, position + 1);
        const size_t limit = limit_of(engine, position);
        engine->wanted = larger(engine->wanted, limit);
        pst_status status =
            engine->one_order ? take_turns(engine, engine->needed) : gather_wanted(engine);
        if (status != PST_OK) return status;
        if (is_cut(engine, position, limit))
            pst__gather_refused(engine, engine->order.gathers.turns[limit].group);
    }
    return pst__gather_issue(engine, group, PST__ANYWHERE, 0);
}

pst_status pst__backward_reported(pst_zero *engine) {
    return engine->one_order ? take_turns(engine, 0) : reduce_reported(engine, 0);
}

/* Groups that this rank never reached are gathered all the same, since others may have reached
 * them: the ranks' collectives have to match. */
pst_status pst__backward_finish(pst_zero *engine) {
    engine->needed = engine->wanted = engine->order.gathers.count;
    engine->is_ending = 1;
    pst_status status = engine->one_order ? take_turns(engine, SIZE_MAX) : gather_wanted(engine);
    if (status == PST_OK && !engine->one_order) status = reduce_reported(engine, 1);
    if (engine->pass.reduce) engine->agreed->turns = engine->sure;
    return status;
}

pst_status pst__backward_break_off(pst_zero *engine) {
    engine->is_broken = 1;
    pst__bucket_deliver_nothing(&engine->carrier);
    pst_status status = pst__backward_finish(engine);
    if (status == PST_OK) status = pst__reduce_flush(engine);
    if (status == PST_OK && engine->pass.reduce) status = pst__presence_exchange(engine);
    engine->is_broken = 0;
    return pst__carrier_give_up(&engine->carrier, status);
}
