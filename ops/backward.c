/* The turns of a backward: its gathers and its reductions.
 *
 * Each has an order of its own that follows from the forward (order.h). Where they share a
 * communicator, or a device on which one collective may wait for another, the two are merged into
 * one: reduction k has its turn behind the first reduce_after[k] gathers, and a gather behind all
 * reductions that come before it. A backward that follows a plan takes these places from what the
 * ranks told each other of an earlier backward: where the last of them reported the group. Without
 * a plan all reductions come behind all gathers.
 *
 * That nothing can wait in a circle: all ranks issue the same collectives in one order. A rank
 * stops before a reduction that is not reported only as long as nothing asks for a gather behind
 * it; then it sends zeros, and what is reported later is reduced at the end. So each rank reaches
 * the end of the order whatever its own backward does, without waiting for a peer. A collective
 * waits for compute, and compute only for collectives that were issued before: take the first one
 * in the order that has not ended; all that its ranks wait for in it has ended, and so it ends.
 */
#include "ops/engine.h"

/* ---- the order ------------------------------------------------------------------------------- */

/* How many gathers are issued when position `position` is in use. */
static size_t limit_of(const pst_zero *engine, size_t position) {
    const pst__path *path = engine->pass.backward_path;
    if (path == NULL) return position + 1;
    const pst__plan *plan = path->plan;
    return pst__backward_limit(&engine->order.gathers, engine->order.bytes, position, plan->ahead,
                               plan->budget);
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

void pst__backward_begin(pst_zero *engine) {
    pst__order *order = &engine->order;
    pst__backward_build(&order->gathers, order->uses, order->group_count, engine->need);
    for (size_t i = 0; i < engine->group_count; i++)
        engine->held[i] = engine->groups[i].state != PST__SHARDED;
    engine->issued = engine->needed = engine->wanted = 0;
    order->reduce_count = 0;
    if (!engine->pass.reduce) return;
    pst__reduce_begin(engine);
    if (engine->one_order) place_reductions(engine);
}

uint64_t pst__backward_order(const pst_zero *engine) {
    const pst__order *order = &engine->order;
    const pst__backward *gathers = &order->gathers;
    const uint64_t hash =
        pst__hash(PST__HASH_SEED, gathers->groups, gathers->count * sizeof *gathers->groups);
    return pst__hash(hash, order->reduces, order->reduce_count * sizeof *order->reduces);
}

uint64_t pst__backward_hash(const pst_zero *engine, uint64_t hash) {
    const pst__order *order = &engine->order;
    if (!engine->one_order) return hash;
    return pst__hash(hash, order->reduce_after, order->reduce_count * sizeof *order->reduce_after);
}

/* ---- turns ----------------------------------------------------------------------------------- */

static pst_status gather_next(pst_zero *engine) {
    const pst__path *path = engine->pass.backward_path;
    uint32_t group = engine->order.gathers.groups[engine->issued];
    size_t offset = path == NULL ? PST__ANYWHERE : path->plan->backward_offsets[group];
    int is_ahead = engine->issued >= engine->needed;
    if (!engine->held[group]) {
        pst_status status = pst__gather_issue(engine, group, offset, is_ahead);
        if (status != PST_OK) return status;
    }
    engine->issued++;
    return PST_OK;
}

/* What is gathered already needs no gather: its turn is over at once. */
static int is_held_next(const pst_zero *engine) {
    const pst__backward *order = &engine->order.gathers;
    return engine->issued < order->count && engine->held[order->groups[engine->issued]];
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
        } else if (engine->issued < engine->wanted || is_held_next(engine)) {
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
    while (status == PST_OK && engine->issued < engine->wanted)
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

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

pst_status pst__backward_gather(pst_zero *engine, uint32_t group) {
    size_t position = engine->order.gathers.position[group];
    engine->needed_here[group] = 1;
    if (position != PST__NO_POSITION) {
        engine->needed = larger(engine->needed, position + 1);
        engine->wanted = larger(engine->wanted, limit_of(engine, position));
        pst_status status =
            engine->one_order ? take_turns(engine, engine->needed) : gather_wanted(engine);
        if (status != PST_OK) return status;
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
    if (engine->one_order) return take_turns(engine, SIZE_MAX);
    pst_status status = gather_wanted(engine);
    return status == PST_OK ? reduce_reported(engine, 1) : status;
}
