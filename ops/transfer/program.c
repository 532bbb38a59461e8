#include "ops/transfer/program.h"

#include "base/atomic.h"
#include "base/clock.h"

#include <penstock/runtime.h>
#include <time.h>

#define PATIENCE_NS 2000000000u

typedef struct pst__step {
    pst__program *program;
    /* Atomic. NULL: the pass has not come here, or has left before. It is set once a launch, by who
     * gives it or, as GONE, by a task that ended before. */
    void *operation;
    pst__submission line;
    pst_task gate, first, last; /* of two parts; the same if there is one */
} pst__step;

struct pst__program {
    pst_runtime *runtime;
    const pst__heap *heap;
    const pst__operation_calls *calls;
    pst_graph *graph;
    pst_launch launch;
    pst__step *steps;
    size_t count;
    size_t next;    /* the step that the pass comes to next */
    size_t tasks;   /* of all steps */
    size_t unended; /* atomic: of the latest launch, whose callbacks have not run */
};

static char gone;
#define GONE ((void *)&gone)

/* ---- scripts --------------------------------------------------------------------------------- */

void pst__script_note(const pst__heap *heap, pst__script *script, const pst__submission *line) {
    if (!script->is_open) return;
    script->is_open = pst__heap_grow(heap, (void **)&script->lines, &script->capacity,
                                     script->count + 1, sizeof *line) == PST_OK;
    if (script->is_open) script->lines[script->count++] = *line;
}

void pst__script_free(const pst__heap *heap, pst__script *script) {
    pst__heap_free(heap, script->lines, script->capacity * sizeof *script->lines);
    *script = (pst__script){0};
}

/* ---- tasks ----------------------------------------------------------------------------------- */

/* Behind its gate, and so behind whoever gave it. Acquire: pairs with the exchange in give. */
static void *operation_of(const pst__step *step) {
    return pst__load_acquire(&step->operation);
}

static pst_status start(void *argument, pst_stream *stream) {
    const pst__step *step = argument;
    void *operation = operation_of(step);
    return operation == NULL ? PST_OK : step->program->calls->start(operation, stream);
}

static pst_status start_second(void *argument, pst_stream *stream) {
    const pst__step *step = argument;
    void *operation = operation_of(step);
    return operation == NULL || operation == GONE
               ? PST_OK
               : step->program->calls->start_second(operation, stream);
}

static pst_status test(void *argument) {
    const pst__step *step = argument;
    void *operation = operation_of(step);
    return operation == NULL ? PST_OK : step->program->calls->test(operation);
}

/* A task that never ran, or had nothing to do, may end before its operation is given. */
static void ended(void *argument, pst_status status) {
    pst__step *step = argument;
    pst__program *program = step->program;
    void *operation = NULL;
    /* Acquire-release: against the exchange in give, whose operation is then seen here. */
    if (!pst__cas_acq_rel(&step->operation, &operation, GONE) && operation != GONE)
        program->calls->ended(operation, status);
    /* Acquire-release: pairs with the acquire in is_idle, behind all that the callbacks did. */
    (void)pst__sub_acq_rel(&program->unended, 1);
}

/* ---- making one ------------------------------------------------------------------------------ */

/* Behind the first task, and the second if it is one. */
static pst_status add_task(const pst__program *program, pst__step *step, pst_lane *lane,
                           pst_work work, const pst_task after[2], pst_task *task) {
    const pst__submission *line = &step->line;
    return pst_graph_add(program->graph,
                         &(pst_task_options){.size = sizeof(pst_task_options),
                                             .name = line->name,
                                             .lane = lane,
                                             .work = work,
                                             .after = after,
                                             .after_count = after[1].graph == NULL ? 1 : 2,
                                             .done = ended,
                                             .done_argument = step,
                                             .ticket = 1, /* of each launch: see give */
                                             .bytes = line->bytes,
                                             .path = line->path},
                         task);
}

static pst_status add_step(pst__program *program, pst__step *step) {
    const pst__submission *line = &step->line;
    const pst_work first = {
        .start = start, .test = program->calls->test == NULL ? NULL : test, .argument = step};
    const pst_work second = {.start = start_second, .argument = step};
    pst_task before[2] = {{NULL, 0}, {NULL, 0}};
    step->program = program;
    pst_status status = pst_graph_add_gate(program->graph, line->name, &step->gate);
    before[0] = step->gate;
    if (line->is_behind) before[1] = step[-1].last;
    if (status == PST_OK) status = add_task(program, step, line->lane, first, before, &step->first);
    step->last = step->first;
    program->tasks += line->second_lane != NULL ? 2 : 1;
    if (status == PST_OK && line->second_lane != NULL)
        status = add_task(program, step, line->second_lane, second,
                          (pst_task[2]){step->first, {NULL, 0}}, &step->last);
    return status;
}

static pst_status build(pst__program *program, const char *name, const pst__script *script) {
    pst_status status = pst_graph_create(program->runtime, PST_GRAPH_SEALED, name, &program->graph);
    if (status != PST_OK) return status;
    program->steps = pst__heap_alloc(program->heap, script->count * sizeof *program->steps);
    if (program->steps == NULL) return PST_ENOMEM;
    program->count = script->count;
    for (size_t i = 0; status == PST_OK && i < script->count; i++) {
        program->steps[i] = (pst__step){.line = script->lines[i]};
        status = add_step(program, &program->steps[i]);
    }
    return status == PST_OK ? pst_graph_seal(program->graph) : status;
}

static void program_free(pst__program *program) {
    pst__heap_free(program->heap, program->steps, program->count * sizeof *program->steps);
    pst__heap_free(program->heap, program, sizeof *program);
}

pst_status pst__program_create(pst_runtime *runtime, const pst__heap *heap, const char *name,
                               const pst__script *script, const pst__operation_calls *calls,
                               pst__program **program) {
    pst__program *made = pst__heap_alloc(heap, sizeof *made);
    *program = NULL;
    if (made == NULL) return PST_ENOMEM;
    *made = (pst__program){.runtime = runtime, .heap = heap, .calls = calls};
    const pst_status status = build(made, name, script);
    if (status == PST_OK) {
        *program = made;
        return PST_OK;
    }
    (void)pst_graph_destroy(made->graph); /* it was never launched */
    program_free(made);
    return status;
}

int pst__program_is_idle(const pst__program *program) {
    return pst__load_acquire(&program->unended) == 0; /* pairs with the subtraction in ended */
}

/* A poisoned runtime's tasks end, too, and nobody can wait for that. */
static int becomes_idle(const pst__program *program) {
    const struct timespec pause = {0, 50000};
    const uint64_t until = pst__now() + PATIENCE_NS;
    while (!pst__program_is_idle(program)) {
        if (pst__now() > until) return 0;
        (void)pst_run_once(program->runtime, NULL);
        (void)nanosleep(&pause, NULL);
    }
    return 1;
}

void pst__program_destroy(pst__program *program) {
    if (program == NULL) return;
    pst__program_leave(program);
    if (becomes_idle(program) && pst_graph_destroy(program->graph) == PST_OK) program_free(program);
}

/* ---- a pass ---------------------------------------------------------------------------------- */

int pst__program_launch(pst__program *program) {
    if (!pst__program_is_idle(program)) return 0;
    for (size_t i = 0; i < program->count; i++) /* relaxed: the launch publishes them */
        pst__store_relaxed(&program->steps[i].operation, NULL);
    pst__store_relaxed(&program->unended, program->tasks);
    program->next = 0;
    if (pst_graph_launch(program->graph, &program->launch) == PST_OK) return 1;
    pst__store_relaxed(&program->unended, 0);
    program->next = program->count;
    return 0;
}

int pst__program_expects(const pst__program *program, const pst__submission *line) {
    if (program->next == program->count) return 0;
    const pst__submission *next = &program->steps[program->next].line;
    return next->lane == line->lane && next->second_lane == line->second_lane &&
           next->is_behind == line->is_behind && next->name == line->name &&
           next->kind == line->kind && next->bytes == line->bytes;
}

pst_status pst__program_give(pst__program *program, void *operation, uint64_t ticket,
                             pst_launch *launch, pst_task *task) {
    pst__step *step = &program->steps[program->next++];
    void *before = NULL;
    *launch = program->launch;
    *task = step->last;
    (void)pst_task_set_ticket(step->first, ticket);
    (void)pst_task_set_ticket(step->last, ticket);
    /* Acquire-release: who finds the operation finds what it was given; against `ended`. */
    if (!pst__cas_acq_rel(&step->operation, &before, operation))
        return pst_runtime_status(program->runtime);
    /* A runtime that is poisoned ends the tasks with that status, and the operation hears of it. */
    (void)pst_gate_open(program->launch, step->gate, NULL);
    return PST_OK;
}

int pst__program_is_whole(const pst__program *program) {
    return program->next == program->count;
}

void pst__program_leave(pst__program *program) {
    for (; program->next < program->count; program->next++)
        (void)pst_gate_open(program->launch, program->steps[program->next].gate, NULL);
}
