#include "ops/order.h"

#include <string.h>

static uint64_t key_of(const uint64_t *keys, size_t stride, uint32_t group) {
    return keys[group * stride];
}

/* By insertion: groups come in nearly sorted, and it needs no memory. */
void pst__sort_descending(uint32_t *groups, size_t count, const uint64_t *keys, size_t stride) {
    for (size_t i = 1; i < count; i++) {
        uint32_t moved = groups[i];
        size_t hole = i;
        for (; hole > 0 && key_of(keys, stride, groups[hole - 1]) < key_of(keys, stride, moved);
             hole--)
            groups[hole] = groups[hole - 1];
        groups[hole] = moved;
    }
}

pst_status pst__backward_alloc(const pst__heap *heap, pst__backward *backward, size_t group_count) {
    backward->groups = pst__heap_alloc(heap, group_count * sizeof *backward->groups);
    backward->finished = pst__heap_alloc(heap, group_count * sizeof *backward->finished);
    backward->position = pst__heap_alloc(heap, group_count * sizeof *backward->position);
    int complete =
        backward->groups != NULL && backward->finished != NULL && backward->position != NULL;
    if (!complete) pst__backward_free(heap, backward, group_count);
    return complete ? PST_OK : PST_ENOMEM;
}

void pst__backward_free(const pst__heap *heap, pst__backward *backward, size_t group_count) {
    pst__heap_free(heap, backward->groups, group_count * sizeof *backward->groups);
    pst__heap_free(heap, backward->finished, group_count * sizeof *backward->finished);
    pst__heap_free(heap, backward->position, group_count * sizeof *backward->position);
    memset(backward, 0, sizeof *backward);
}

/* How many groups of the order end their last use at `clock` or later: they come first. */
static size_t count_until(const pst__backward *backward, const pst__span *uses, uint64_t clock) {
    size_t low = 0, high = backward->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (uses[backward->groups[middle]].last >= clock)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void pst__backward_build(pst__backward *backward, const pst__span *uses, size_t group_count,
                         const pst__need *need) {
    backward->count = 0;
    for (size_t i = group_count; i-- > 0;) {
        backward->position[i] = PST__NO_POSITION;
        if (uses[i].last != 0 && need[i] != PST__NEED_NONE)
            backward->groups[backward->count++] = (uint32_t)i;
    }
    pst__sort_descending(backward->groups, backward->count, &uses->last,
                         sizeof *uses / sizeof uses->last);
    for (size_t i = 0; i < backward->count; i++) {
        uint32_t group = backward->groups[i];
        backward->position[group] = (uint32_t)i;
        backward->finished[i] = count_until(backward, uses, uses[group].first) - 1;
    }
}

size_t pst__backward_before(const pst__backward *backward, const pst__span *uses, uint32_t group) {
    return uses[group].last == 0 ? 0 : count_until(backward, uses, uses[group].last);
}

/* With what the step before has: a budget holds for a caller that releases late, too. */
static size_t alive_at(const pst__backward *backward, const size_t *bytes, size_t position) {
    size_t alive = 0;
    for (size_t i = 0; i <= position; i++)
        if (backward->finished[i] + 1 >= position) alive += bytes[backward->groups[i]];
    return alive;
}

size_t pst__backward_limit(const pst__backward *backward, const size_t *bytes, size_t position,
                           uint32_t ahead, size_t budget) {
    size_t limit = position + 1;
    size_t alive = budget == 0 ? 0 : alive_at(backward, bytes, position);
    for (; limit < backward->count && limit - position <= ahead; limit++) {
        size_t more = bytes[backward->groups[limit]];
        if (budget != 0 && (alive > budget || more > budget - alive)) break;
        alive += more;
    }
    return limit;
}

pst_status pst__order_alloc(const pst__heap *heap, pst__order *order, size_t group_count) {
    order->group_count = group_count;
    order->bytes = pst__heap_alloc(heap, group_count * sizeof *order->bytes);
    order->uses = pst__heap_alloc(heap, group_count * sizeof *order->uses);
    order->first_uses = pst__heap_alloc(heap, group_count * sizeof *order->first_uses);
    order->reduces = pst__heap_alloc(heap, group_count * sizeof *order->reduces);
    order->reduce_after = pst__heap_alloc(heap, group_count * sizeof *order->reduce_after);
    int complete = order->reduce_after != NULL && order->bytes != NULL && order->uses != NULL &&
                   order->first_uses != NULL && order->reduces != NULL &&
                   pst__backward_alloc(heap, &order->gathers, group_count) == PST_OK;
    if (!complete) pst__order_free(heap, order);
    return complete ? PST_OK : PST_ENOMEM;
}

void pst__order_free(const pst__heap *heap, pst__order *order) {
    size_t count = order->group_count;
    pst__heap_free(heap, order->bytes, count * sizeof *order->bytes);
    pst__heap_free(heap, order->uses, count * sizeof *order->uses);
    pst__heap_free(heap, order->first_uses, count * sizeof *order->first_uses);
    pst__heap_free(heap, order->reduces, count * sizeof *order->reduces);
    pst__heap_free(heap, order->reduce_after, count * sizeof *order->reduce_after);
    pst__backward_free(heap, &order->gathers, count);
    memset(order, 0, sizeof *order);
}
