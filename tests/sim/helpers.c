/* The threads of a launch: they open gates, look, serve lanes, cancel and poison. */
#include "program.h"
#include "system.h"
#include "tests/random.h"
#include "threads.h"

static void open_gate(program *self, plan_task *gate) {
    pst_lane *borrowed = gate->lane % 2 == 0 ? self->plan.borrowed : NULL;
    if (gate->handle.graph == NULL) return;
    plan_open(gate, self->launch_index, borrowed != NULL);
    program_must(self, pst_gate_open(self->launch, gate->handle, borrowed), "pst_gate_open");
}

void helpers_open_share(program *self, uint32_t number) {
    for (uint32_t i = 0; i < self->plan.count; i++) {
        plan_task *task = &self->plan.tasks[i];
        if (task->is_gate && i % (self->helpers + 1) == number) open_gate(self, task);
    }
}

void helpers_stop(program *self) {
    if (self->plan.kind == PLAN_CANCELED)
        program_must(self, pst_launch_cancel(self->launch), "pst_launch_cancel");
    if (self->plan.kind == PLAN_POISONED) pst_runtime_poison(self->runtime, PST_EIO, "by plan");
}

/* Looks at some task that nobody releases meanwhile. */
static void look(program *self, uint64_t *random) {
    const plan_task *task = &self->plan.tasks[random_below(random, self->plan.count)];
    if (task->handle.graph == NULL || self->plan.is_growing) return;
    switch (random_below(random, 3)) {
    case 0:
        (void)pst_task_test(self->launch, task->handle);
        break;
    case 1:
        (void)pst_task_event(self->launch, task->handle);
        break;
    default:
        (void)pst_run_once(self->runtime, NULL);
    }
}

static void *help(void *argument) {
    helper *self = argument;
    for (uint32_t i = random_below(&self->random, 6); i > 0; i--)
        look(self->program, &self->random);
    helpers_open_share(self->program, self->number);
    if (self->number == 1) helpers_stop(self->program);
    for (uint32_t i = random_below(&self->random, 6); i > 0; i--)
        (void)pst_run_once(self->program->runtime, NULL);
    return NULL;
}

/* What a helper would have done is done by this thread when there is no thread for it. */
void helpers_begin(program *self) {
    for (uint32_t i = 0; i < self->helpers; i++) {
        helper *made = &self->threads[i];
        *made = (helper){self, random_next(&self->random), i + 1, 0};
        if (pthread_create(&made->thread, NULL, help, made) == 0) continue;
        made->thread = 0;
        (void)help(made);
    }
}

void helpers_end(program *self) {
    for (uint32_t i = 0; i < self->helpers; i++)
        if (self->threads[i].thread != 0) (void)pthread_join(self->threads[i].thread, NULL);
}
