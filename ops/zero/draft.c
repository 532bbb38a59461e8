/* Plans of one recording that take different memory: what each would take, and buy. */
#include "ops/zero/compile.h"

typedef struct drafting {
    pst_zero *engine;
    pst_zero_compile_options options;
    pst__knowledge known;
    pst_zero_draft *drafts;
    size_t count;
} drafting;

static pst_status add(drafting *of, uint32_t ahead, size_t keep_bytes) {
    pst__plan *plan = NULL;
    of->options.prefetch_ahead = ahead;
    of->known.words[0] = ~(uint64_t)keep_bytes;
    const pst_status status = pst__plan_by(of->engine, &of->options, &of->known, &plan);
    if (status != PST_OK) return status;
    const pst_zero_forecast *forecast = &plan->forecast;
    of->drafts[of->count++] = (pst_zero_draft){.prefetch_ahead = ahead,
                                               .keep_bytes = forecast->kept_bytes,
                                               .peak_bytes = forecast->peak_bytes,
                                               .step_ns = forecast->step_ns,
                                               .exposed_ns = forecast->exposed_ns};
    pst__plan_destroy(of->engine->carrier.heap, plan);
    return PST_OK;
}

static const uint32_t AHEADS[] = {1, 2, 3, 4, 6, 8};
#define AHEAD_COUNT (sizeof AHEADS / sizeof AHEADS[0])
#define PARTS       8u /* of the room, for groups that stay */
_Static_assert(1 + AHEAD_COUNT + PARTS == PST_ZERO_MOST_DRAFTS, "each has a place");

static int fits(const drafting *of, const pst_zero_draft *draft, size_t room) {
    return draft->peak_bytes <= of->drafts[0].peak_bytes ||
           draft->peak_bytes - of->drafts[0].peak_bytes <= room;
}

/* The first of the fastest ones, which is the smallest. */
static uint32_t fastest_ahead(const drafting *of, size_t room) {
    const pst_zero_draft *best = &of->drafts[0];
    for (size_t i = 1; i < of->count; i++)
        if (fits(of, &of->drafts[i], room) && of->drafts[i].step_ns < best->step_ns)
            best = &of->drafts[i];
    return best->prefetch_ahead;
}

static pst_status add_all(drafting *of) {
    const size_t room = (size_t)~of->known.words[0];
    const uint32_t given = of->options.prefetch_ahead;
    pst_status status = add(of, given, 0);
    if (status != PST_OK || of->drafts[0].step_ns == 0) return status;
    for (size_t i = 0; status == PST_OK && i < AHEAD_COUNT; i++)
        if (AHEADS[i] != given) status = add(of, AHEADS[i], 0);
    const uint32_t ahead = fastest_ahead(of, room);
    for (size_t part = 1; status == PST_OK && part <= PARTS; part++)
        status = add(of, ahead, room / PARTS * part);
    return status;
}

pst_status pst_zero_make_drafts(pst_zero *engine, const pst_zero_compile_options *given,
                                pst_zero_draft *drafts, size_t *count) {
    drafting of = {.engine = engine, .drafts = drafts};
    if (drafts == NULL || count == NULL) return PST_EINVAL;
    pst_status status = pst__compile_options_read(engine, given, &of.options);
    if (status != PST_OK) return status;
    status = pst__knowledge_agree(engine, &of.options, &of.known);
    if (status == PST_OK) status = add_all(&of);
    pst__knowledge_free(engine, &of.known);
    *count = of.count;
    return status;
}
