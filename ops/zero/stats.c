#include "ops/zero/engine.h"

#include "base/options.h"

#include <string.h>

static size_t reserved_by(const pst_arena *arena) {
    pst_arena_stats stats = {.size = sizeof stats};
    pst_arena_get_stats(arena, &stats);
    return stats.reserved;
}

void pst_zero_get_stats(pst_zero *engine, pst_zero_stats *given) {
    pst__stalls_collect(&engine->carrier.stalls);
    pst_zero_stats stats = engine->stats;
    stats.timed_waits = engine->carrier.stalls.measured;
    stats.untimed_waits = engine->carrier.stalls.missed;
    const pst__waits *waits = &engine->carrier.waits;
    stats.exposed_gather_ns = waits->exposed_gather_ns;
    stats.exposed_reduce_ns = waits->exposed_reduce_ns;
    stats.exposed_ns = stats.exposed_gather_ns + stats.exposed_reduce_ns;
    stats.device_gather_ns = waits->device_gather_ns;
    stats.device_reduce_ns = waits->device_reduce_ns;
    stats.late_launches = waits->late_launches;
    pst_arena_stats arena = {.size = sizeof arena};
    pst_arena_get_stats(engine->carrier.gathered, &arena);
    stats.arena_peak = arena.peak;
    stats.arena_reserved = arena.reserved;
    stats.places_reserved = reserved_by(engine->places);
    stats.sources_reserved = reserved_by(engine->carrier.sources);
    stats.staging_reserved = reserved_by(engine->carrier.staging);
    pst__write_sized(given, &stats, sizeof stats);
}

void pst_zero_reset_stats(pst_zero *engine) {
    size_t peak = engine->stats.plan_peak, bound = engine->stats.plan_lower_bound;
    memset(&engine->stats, 0, sizeof engine->stats);
    engine->stats.plan_peak = peak;
    engine->stats.plan_lower_bound = bound;
    engine->carrier.waits = (pst__waits){0};
    engine->carrier.stalls.measured = engine->carrier.stalls.missed = 0;
    pst_arena_reset_peak(engine->carrier.gathered);
}
