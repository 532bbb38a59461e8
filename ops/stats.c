#include "ops/engine.h"

#include <string.h>

void pst_zero_get_stats(const pst_zero *engine, pst_zero_stats *stats) {
    *stats = engine->stats;
    stats->exposed_ns = stats->exposed_gather_ns + stats->exposed_reduce_ns;
    pst_arena_stats arena;
    pst_arena_get_stats(engine->gathered, &arena);
    stats->arena_peak = arena.peak;
    stats->arena_reserved = arena.reserved;
}

void pst_zero_reset_stats(pst_zero *engine) {
    size_t peak = engine->stats.plan_peak, bound = engine->stats.plan_lower_bound;
    memset(&engine->stats, 0, sizeof engine->stats);
    engine->stats.plan_peak = peak;
    engine->stats.plan_lower_bound = bound;
    pst_arena_reset_peak(engine->gathered);
}
