/* What a pass by a plan takes: compute as it was measured, and one link that has one collective at
 * a time, in the plan's order. Where gathers are copies within the device, compute stands still
 * while one runs, as that is what it loses by it, and reductions are beside them. */
#include "ops/zero/plan.h"

typedef struct course {
    const pst__plan_input *input;
    const pst__backward *backward;
    pst__plan *plan;
    uint64_t now;     /* compute */
    uint64_t gathers; /* the link is free for them from then on */
    uint64_t reduces; /* and for reductions: the same, but for a device's own copies */
    uint64_t exposed; /* compute has waited */
    uint64_t *lands;  /* by group: its latest gather */
    uint32_t *uses;   /* by group, in the forward: of all, and behind them those that have been */
} course;

static uint64_t send(course *course, uint64_t *free_from, uint64_t ns) {
    const uint64_t start = *free_from > course->now ? *free_from : course->now;
    *free_from = start + ns;
    if (!course->input->costs->is_local) course->gathers = course->reduces = *free_from;
    return start;
}

static void run(course *course, uint64_t ns) {
    if (course->input->costs->is_local && course->gathers > course->now)
        course->now = course->gathers;
    course->now += ns;
}

/* Without what compute has lost to gathers beside it, which `run` has it lose anew. */
static uint64_t alone(const course *course, uint32_t group, uint64_t ns, uint64_t hidden_gathers) {
    if (!course->input->costs->is_local) return ns;
    const uint64_t lost = hidden_gathers * course->plan->group_forecasts[group].gather_ns;
    return ns > lost ? ns - lost : 0;
}

static uint64_t backward_of(const course *course, uint32_t group) {
    const pst__measured *measured = &course->input->costs->measured[group];
    return alone(course, group, measured->backward, measured->hidden_backward);
}

static void wait_until(course *course, uint64_t lands) {
    if (lands <= course->now) return;
    course->exposed += lands - course->now;
    course->now = lands;
}

static void gather(course *course, uint32_t group, pst_zero_gather_forecast *forecast) {
    const uint64_t ns = course->plan->group_forecasts[group].gather_ns;
    const uint64_t start = send(course, &course->gathers, ns);
    course->lands[group] = course->gathers;
    if (forecast->lands_ns != 0) return; /* of several the first one */
    forecast->start_ns = start;
    forecast->lands_ns = course->gathers;
}

static void use(course *course, uint32_t group, pst_zero_gather_forecast *forecast) {
    if (forecast->lands_ns != 0 && forecast->used_ns == 0) forecast->used_ns = course->now;
    wait_until(course, course->lands[group]);
}

static void reduce(course *course, uint32_t group) {
    const uint64_t ns = course->plan->group_forecasts[group].reduce_ns;
    if (ns > 0) (void)send(course, &course->reduces, ns);
}

/* ---- forward --------------------------------------------------------------------------------- */

static uint32_t *behind_uses(const course *course) {
    return course->uses + course->input->group_count;
}

static void count_uses(course *course) {
    for (size_t i = 0; i < course->plan->step_count; i++)
        course->uses[course->plan->steps[i].group] += (uint32_t)course->plan->steps[i].is_use;
}

/* A group's compute is spread evenly over its uses. */
static void compute(course *course, uint32_t group) {
    const pst__measured *measured = &course->input->costs->measured[group];
    const uint64_t all = alone(course, group, measured->forward, measured->hidden_forward),
                   done = behind_uses(course)[group]++;
    const uint64_t uses = course->uses[group];
    run(course, pst__scale(all, done + 1, uses) - pst__scale(all, done, uses));
}

/* Stages 1 and 2 gather all that an update has made stale when the forward begins. */
static void gather_all(course *course) {
    const pst__plan *plan = course->plan;
    for (size_t i = 0; i < plan->step_count; i++) {
        const uint32_t group = plan->steps[i].group;
        if (course->lands[group] == 0) gather(course, group, &plan->group_forecasts[group].forward);
    }
}

static void go_forward(course *course) {
    const pst__plan *plan = course->plan;
    if (!course->input->window) gather_all(course);
    for (size_t i = 0; i < plan->step_count; i++) {
        const pst__plan_step *step = &plan->steps[i];
        if (!step->is_use) continue;
        for (size_t k = 0; k < step->issues; k++) {
            const uint32_t group = plan->issues[step->first_issue + k].group;
            gather(course, group, &plan->group_forecasts[group].forward);
        }
        use(course, step->group, &plan->group_forecasts[step->group].forward);
        compute(course, step->group);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

static void gather_until(course *course, size_t from, size_t limit) {
    const pst__plan *plan = course->plan;
    for (size_t i = from; i < limit; i++) {
        const uint32_t group = course->backward->turns[i].group;
        if (plan->backward_offsets[group] != PST__ANYWHERE)
            gather(course, group, &plan->group_forecasts[group].backward);
    }
}

/* Gradients are complete behind the first use. */
static void reduce_finished(course *course, size_t position) {
    for (size_t i = position + 1; i-- > 0;)
        if (course->backward->turns[i].finished == position)
            reduce(course, course->backward->turns[i].group);
}

/* Those that no backward gathers have gradients all the same. */
static void go_without_values(course *course) {
    const pst__plan_input *input = course->input;
    for (uint32_t i = (uint32_t)input->group_count; i-- > 0;) {
        const int has_turn =
            course->backward->count > 0 && course->backward->position[i] != PST__NO_POSITION;
        if (course->uses[i] == 0 || has_turn) continue;
        run(course, backward_of(course, i));
        reduce(course, i);
    }
}

static void go_backward(course *course) {
    const pst__plan_input *input = course->input;
    const pst__backward *backward = course->backward;
    size_t issued = 0;
    for (size_t i = 0; i < backward->count; i++) {
        const size_t limit =
            pst__backward_limit(backward, input->bytes, i, input->ahead, input->budget);
        const uint32_t group = backward->turns[i].group;
        gather_until(course, issued, limit);
        if (limit > issued) issued = limit;
        use(course, group, &course->plan->group_forecasts[group].backward);
        run(course, backward_of(course, group));
        reduce_finished(course, i);
    }
    go_without_values(course);
    wait_until(course, course->gathers);
    wait_until(course, course->reduces);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static int is_timed(const pst__plan_input *input) {
    for (size_t i = 0; i < input->group_count; i++)
        if (input->costs->measured[i].forward != 0) return 1;
    return 0;
}

static void describe(const pst__plan_input *input, pst__plan *plan) {
    for (size_t i = 0; i < input->group_count; i++) {
        pst_zero_group_forecast *group = &plan->group_forecasts[i];
        group->bytes = input->bytes[i];
        group->gather_ns = pst__plan_is_looked_up(input, i)
                               ? input->costs->measured[i].gather
                               : pst__curve_at(&input->costs->gather, input->bytes[i]);
        group->reduce_ns = pst__curve_at(&input->costs->reduce, input->reduce_bytes[i]);
    }
    plan->forecast.peak_bytes = plan->summary.peak_bytes;
    plan->forecast.keep_bytes = input->keep_bytes;
}

pst_status pst__forecast(const pst__plan_input *input, const pst__backward *backward,
                         pst__plan *plan) {
    const pst__heap *heap = input->heap;
    const size_t lands = input->group_count * sizeof(uint64_t);
    const size_t uses = 2 * input->group_count * sizeof(uint32_t);
    course course = {.input = input, .backward = backward, .plan = plan};
    describe(input, plan);
    if (!is_timed(input)) return PST_OK;
    course.lands = pst__heap_alloc(heap, lands);
    course.uses = pst__heap_alloc(heap, uses);
    const pst_status status = course.lands == NULL || course.uses == NULL ? PST_ENOMEM : PST_OK;
    if (status == PST_OK) {
        count_uses(&course);
        go_forward(&course);
        if (input->grad) go_backward(&course);
        plan->forecast.step_ns = course.now;
        plan->forecast.exposed_ns = course.exposed;
    }
    pst__heap_free(heap, course.lands, lands);
    pst__heap_free(heap, course.uses, uses);
    return status;
}
