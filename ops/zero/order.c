#include "ops/zero/order.h"

#include <string.h>

/* By insertion: groups come in nearly sorted, and it needs no memory. */
void pst__sort_descending(uint32_t *groups, size_t count, const uint64_t *keys) {
    for (size_t i = 1; i < count; i++) {
        uint32_t moved = groups[i];
        size_t hole = i;
        for (; hole > 0 && keys[groups[hole - 1]] < keys[moved]; hole--)
            groups[hole] = groups[hole - 1];
        groups[hole] = moved;
    }
}

/* ---- the order of gathers -------------------------------------------------------------------- */

pst_status pst__backward_alloc(const pst__heap *heap, pst__backward *backward, size_t group_count) {
    backward->position = pst__heap_alloc(heap, group_count * sizeof *backward->position);
    backward->latest = pst__heap_alloc(heap, group_count * sizeof *backward->latest);
    int complete = backward->position != NULL && backward->latest != NULL;
    if (!complete) pst__backward_free(heap, backward, group_count);
    return complete ? PST_OK : PST_ENOMEM;
}

void pst__backward_free(const pst__heap *heap, pst__backward *backward, size_t group_count) {
    pst__heap_free(heap, backward->turns, backward->capacity * sizeof *backward->turns);
    pst__heap_free(heap, backward->position, group_count * sizeof *backward->position);
    pst__heap_free(heap, backward->latest, group_count * sizeof *backward->latest);
    memset(backward, 0, sizeof *backward);
}

static int comes_before(const pst__turn *a, const pst__turn *b) {
    return a->last > b->last || (a->last == b->last && a->group > b->group);
}

/* By insertion, too. */
static void insert(pst__turn *turns, size_t count, pst__turn turn) {
    size_t hole = count;
    for (; hole > 0 && comes_before(&turn, &turns[hole - 1]); hole--)
        turns[hole] = turns[hole - 1];
    turns[hole] = turn;
}

static void forget_turns(pst__backward *backward, size_t group_count) {
    for (size_t i = 0; i < group_count; i++)
        backward->position[i] = backward->latest[i] = PST__NO_POSITION;
}

/* Turns of a group that are near each other become one; each of the others knows the next. */
static void join_turns(pst__backward *backward, size_t ahead) {
    const size_t all = backward->count;
    backward->count = 0;
    for (size_t i = 0; i < all; i++) {
        const pst__turn turn = backward->turns[i];
        const uint32_t latest = backward->latest[turn.group];
        pst__turn *before = latest == PST__NO_POSITION ? NULL : &backward->turns[latest];
        if (before != NULL && backward->count - latest <= (ahead == 0 ? 1 : ahead)) {
            before->periods++;
            if (turn.first < before->first) before->first = turn.first;
            continue;
        }
        const uint32_t position = (uint32_t)backward->count++;
        *(before == NULL ? &backward->position[turn.group] : &before->next) = position;
        backward->latest[turn.group] = position;
        backward->turns[position] = turn;
    }
}

size_t pst__backward_before(const pst__backward *backward, uint64_t clock) {
    size_t low = 0, high = backward->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (backward->turns[middle].last >= clock)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

pst_status pst__backward_build(const pst__heap *heap, pst__backward *backward,
                               const pst__period *periods, size_t period_count, size_t group_count,
                               const pst__need *need, uint32_t ahead) {
    pst_status status = pst__heap_grow(heap, (void **)&backward->turns, &backward->capacity,
                                       period_count, sizeof *backward->turns);
    if (status != PST_OK) return status;
    backward->count = 0;
    forget_turns(backward, group_count);
    for (size_t i = period_count; i-- > 0;) {
        const pst__period *period = &periods[i];
        if (period->last == 0 || need[period->group] == PST__NEED_NONE) continue;
        insert(backward->turns, backward->count++,
               (pst__turn){period->group, 1, period->first, period->last, PST__NO_POSITION, 0});
    }
    join_turns(backward, ahead);
    for (size_t i = 0; i < group_count; i++)
        backward->latest[i] = PST__NO_POSITION;
    for (size_t i = 0; i < backward->count; i++)
        backward->turns[i].finished = pst__backward_before(backward, backward->turns[i].first) - 1;
    return PST_OK;
}

/* With what the step before has: a budget holds for a caller that releases only behind its next
 * use, too. */
static size_t alive_at(const pst__backward *backward, const size_t *bytes, size_t position) {
    size_t alive = 0;
    for (size_t i = 0; i <= position; i++)
        if (backward->turns[i].finished + 1 >= position) alive += bytes[backward->turns[i].group];
    return alive;
}

size_t pst__backward_limit(const pst__backward *backward, const size_t *bytes, size_t position,
                           uint32_t ahead, size_t budget) {
    size_t limit = position + 1;
    size_t alive = budget == 0 ? 0 : alive_at(backward, bytes, position);
    for (; limit < backward->count && limit - position <= ahead; limit++) {
        size_t more = bytes[backward->turns[limit].group];
        if (budget != 0 && (alive > budget || more > budget - alive)) break;
        alive += more;
    }
    return limit;
}

/* ---- uses ------------------------------------------------------------------------------------ */

pst_status pst__order_alloc(const pst__heap *heap, pst__order *order, size_t group_count) {
    order->group_count = group_count;
    order->bytes = pst__heap_alloc(heap, group_count * sizeof *order->bytes);
    order->first_period = pst__heap_alloc(heap, group_count * sizeof *order->first_period);
    order->last_period = pst__heap_alloc(heap, group_count * sizeof *order->last_period);
    order->first_uses = pst__heap_alloc(heap, group_count * sizeof *order->first_uses);
    order->reduces = pst__heap_alloc(heap, group_count * sizeof *order->reduces);
    order->reduce_after = pst__heap_alloc(heap, group_count * sizeof *order->reduce_after);
    int complete = order->reduce_after != NULL && order->bytes != NULL &&
                   order->first_period != NULL && order->last_period != NULL &&
                   order->first_uses != NULL && order->reduces != NULL &&
                   pst__backward_alloc(heap, &order->gathers, group_count) == PST_OK;
    if (!complete) pst__order_free(heap, order);
    return complete ? PST_OK : PST_ENOMEM;
}

void pst__order_free(const pst__heap *heap, pst__order *order) {
    size_t count = order->group_count;
    pst__heap_free(heap, order->bytes, count * sizeof *order->bytes);
    pst__heap_free(heap, order->periods, order->period_capacity * sizeof *order->periods);
    pst__heap_free(heap, order->first_period, count * sizeof *order->first_period);
    pst__heap_free(heap, order->last_period, count * sizeof *order->last_period);
    pst__heap_free(heap, order->first_uses, count * sizeof *order->first_uses);
    pst__heap_free(heap, order->reduces, count * sizeof *order->reduces);
    pst__heap_free(heap, order->reduce_after, count * sizeof *order->reduce_after);
    pst__backward_free(heap, &order->gathers, count);
    memset(order, 0, sizeof *order);
}

static void note_period(pst__order *order, size_t index) {
    const uint32_t group = order->periods[index].group;
    order->last_period[group] = index + 1;
    if (order->first_period[group] == 0) order->first_period[group] = index + 1;
}

pst_status pst__order_begin_use(const pst__heap *heap, pst__order *order, uint32_t group,
                                uint64_t clock, int is_open) {
    if (is_open && order->last_period[group] != 0) {
        pst__order_end_use(order, group, clock);
        return PST_OK;
    }
    pst_status status = pst__heap_grow(heap, (void **)&order->periods, &order->period_capacity,
                                       order->period_count + 1, sizeof *order->periods);
    if (status != PST_OK) return status;
    order->periods[order->period_count] = (pst__period){group, clock, clock};
    note_period(order, order->period_count++);
    return PST_OK;
}

void pst__order_end_use(pst__order *order, uint32_t group, uint64_t clock) {
    if (order->last_period[group] != 0) order->periods[order->last_period[group] - 1].last = clock;
}

void pst__order_forget_uses(pst__order *order) {
    memset(order->first_period, 0, order->group_count * sizeof *order->first_period);
    memset(order->last_period, 0, order->group_count * sizeof *order->last_period);
    order->period_count = 0;
}

/* The average number of periods a group that are kept at most. */
#define MOST_PERIODS 32u

void pst__order_bound_uses(pst__order *order) {
    const size_t count = order->period_count, kept = count / 2;
    if (count <= MOST_PERIODS * order->group_count) return;
    pst__order_forget_uses(order);
    memmove(order->periods, order->periods + count - kept, kept * sizeof *order->periods);
    order->period_count = kept;
    for (size_t i = 0; i < kept; i++)
        note_period(order, i);
}
