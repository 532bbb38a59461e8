/* Replay: a pass that follows a planned path is a launch of the program that the first such pass
 * has left. What a hook submits is then the program's next step, whose gate it opens; what is
 * submitted, and in which order, decides the plan as ever, so it does not matter to other ranks
 * whether this one replays. A pass that submits something else has left its program, whose other
 * steps then do nothing, and goes on in the growing graph. */
#include "ops/zero/engine.h"

#include <stdio.h>

static const char *const kinds[PST__PROGRAMS] = {
    [PST__PROGRAM_FORWARD] = "forward",
    [PST__PROGRAM_BACKWARD] = "backward",
    [PST__PROGRAM_ACCUMULATION] = "backward without reductions",
};

/* ---- programs that are of no use any more ---------------------------------------------------- */

/* In flight it stays until it is not, or the engine ends. */
static void retire(pst_zero *engine, pst__program **program) {
    if (*program == NULL) return;
    const pst_status status =
        pst__heap_grow(engine->carrier.heap, (void **)&engine->retired, &engine->retired_capacity,
                       engine->retired_count + 1, sizeof *engine->retired);
    if (status == PST_OK)
        engine->retired[engine->retired_count++] = *program;
    else
        pst__program_destroy(*program);
    *program = NULL;
}

static void free_retired(pst_zero *engine) {
    size_t kept = 0;
    for (size_t i = 0; i < engine->retired_count; i++) {
        pst__program *program = engine->retired[i];
        if (pst__program_is_idle(program))
            pst__program_destroy(program);
        else
            engine->retired[kept++] = program;
    }
    engine->retired_count = kept;
}

void pst__replay_forget(pst_zero *engine, pst__path *path) {
    for (int kind = 0; kind < PST__PROGRAMS; kind++)
        retire(engine, &path->programs[kind]);
}

void pst__replay_free(pst_zero *engine) {
    for (size_t i = 0; i < engine->retired_count; i++)
        pst__program_destroy(engine->retired[i]);
    pst__heap_free(engine->carrier.heap, engine->retired,
                   engine->retired_capacity * sizeof *engine->retired);
}

/* ---- a pass ---------------------------------------------------------------------------------- */

void pst__replay_begin(pst_zero *engine, pst__path *path, pst__program_kind kind) {
    pst__carrier *carrier = &engine->carrier;
    free_retired(engine);
    engine->replayed = NULL;
    if (path == NULL || !engine->replay || engine->is_timed || carrier->outside != NULL) return;
    pst__program *program = path->programs[kind];
    if (program == NULL) {
        carrier->script.count = 0;
        carrier->script.is_open = 1;
    } else if (pst__program_launch(program)) {
        carrier->program = program;
        engine->replayed = &path->programs[kind];
    }
}

void pst__replay_leave(pst_zero *engine) {
    pst__operation_leave_program(&engine->carrier);
    engine->replayed = NULL;
}

static void create_program(pst_zero *engine, pst__path *path, pst__program_kind kind) {
    pst__carrier *carrier = &engine->carrier;
    char name[128];
    if (!carrier->script.is_open || carrier->script.count == 0) return;
    (void)snprintf(name, sizeof name, "%s %s", carrier->name, kinds[kind]);
    /* Without one passes go on as before. */
    (void)pst__program_create(carrier->runtime, carrier->heap, name, &carrier->script,
                              pst__operation_calls_of(carrier), &path->programs[kind]);
}

void pst__replay_end(pst_zero *engine, pst__path *path, pst__program_kind kind) {
    pst__carrier *carrier = &engine->carrier;
    const int is_whole = carrier->program != NULL && pst__program_is_whole(carrier->program);
    pst__program **replayed = engine->replayed;
    create_program(engine, path, kind);
    pst__replay_leave(engine);
    if (is_whole)
        engine->stats.replayed_passes++;
    else if (replayed != NULL)
        retire(engine, replayed); /* the path is the same, but what it submits has changed */
}
