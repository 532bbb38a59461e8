#include "ops/zero/clock.h"

/* Once. */
static void read_one(pst__clock *clock, pst__timing *timing) {
    if (timing == NULL || !timing->is_noted[PST__ENDED]) return;
    const uint64_t began = pst__timing_read(timing, PST__BEGAN);
    const uint64_t ended = pst__timing_read(timing, PST__ENDED);
    if (began == 0 || ended < began) return;
    timing->is_noted[PST__ENDED] = 0;
    clock->total_ns += ended - began;
    clock->count++;
}

void pst__clock_begin(pst__clock *clock, pst_stream *compute) {
    pst__timing **timing = &clock->passes[clock->running];
    read_one(clock, *timing);
    if (*timing == NULL)
        *timing = pst__timings_take(&clock->timings);
    else
        pst__timing_forget(*timing);
    clock->is_running = 1;
    pst__timing_note(*timing, PST__BEGAN, compute);
}

void pst__clock_end(pst__clock *clock, pst_stream *compute) {
    if (!clock->is_running) return;
    clock->is_running = 0;
    pst__timing_note(clock->passes[clock->running], PST__ENDED, compute);
    clock->running = (clock->running + 1) % PST__CLOCK_PASSES;
}

void pst__clock_collect(pst__clock *clock) {
    for (size_t i = 0; i < PST__CLOCK_PASSES; i++)
        read_one(clock, clock->passes[i]);
}

void pst__clock_reset(pst__clock *clock) {
    for (size_t i = 0; i < PST__CLOCK_PASSES; i++)
        if (clock->passes[i] != NULL) clock->passes[i]->is_noted[PST__ENDED] = 0;
    clock->total_ns = clock->count = 0;
}
