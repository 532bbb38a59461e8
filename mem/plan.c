#include "mem/arena.h"
#include "sched/runtime.h"

#include <stdlib.h>

/* An interval with its size rounded up and its place in the caller's array. */
typedef struct item {
    uint64_t first, last;
    size_t bytes, offset, index;
} item;

typedef struct planner {
    const pst__heap *heap;
    item *items;   /* in the order of placing; `count` of them */
    item **placed; /* sorted by offset */
    item **ends;   /* scratch of the lower bound */
    size_t count, placed_count;
} planner;

static int compare(uint64_t a, uint64_t b) {
    return a < b ? -1 : a > b;
}

/* Largest first; the index makes the order total, so that it is the same everywhere. */
static int by_size(const void *left, const void *right) {
    const item *a = left, *b = right;
    if (a->bytes != b->bytes) return compare(b->bytes, a->bytes);
    if (a->first != b->first) return compare(a->first, b->first);
    return compare(a->index, b->index);
}

static int by_first(const void *left, const void *right) {
    return compare((*(item *const *)left)->first, (*(item *const *)right)->first);
}

static int by_last(const void *left, const void *right) {
    return compare((*(item *const *)left)->last, (*(item *const *)right)->last);
}

/* The largest sum of sizes alive in one step: a sweep over beginnings and ends. */
static size_t lower_bound(planner *plan) {
    item **starts = plan->placed, **ends = plan->ends;
    for (size_t i = 0; i < plan->count; i++)
        starts[i] = ends[i] = &plan->items[i];
    qsort(starts, plan->count, sizeof(item *), by_first);
    qsort(ends, plan->count, sizeof(item *), by_last);
    size_t alive = 0, most = 0, ended = 0;
    for (size_t i = 0; i < plan->count; i++) {
        for (; ends[ended]->last < starts[i]->first; ended++)
            alive -= ends[ended]->bytes;
        alive += starts[i]->bytes;
        if (alive > most) most = alive;
    }
    return most;
}

static int alive_together(const item *a, const item *b) {
    return a->first <= b->last && b->first <= a->last;
}

/* The smallest gap between placed items that live at the same time, or the place above them. */
static size_t best_offset(const planner *plan, const item *next) {
    size_t top = 0, best = SIZE_MAX, best_gap = SIZE_MAX;
    for (size_t i = 0; i < plan->placed_count; i++) {
        const item *other = plan->placed[i];
        if (!alive_together(other, next)) continue;
        if (other->offset > top && other->offset - top >= next->bytes &&
            other->offset - top < best_gap) {
            best_gap = other->offset - top;
            best = top;
        }
        size_t end = other->offset + other->bytes;
        if (end > top) top = end;
    }
    return best != SIZE_MAX ? best : top;
}

static void insert_by_offset(planner *plan, item *next) {
    size_t at = plan->placed_count++;
    for (; at > 0 && plan->placed[at - 1]->offset > next->offset; at--)
        plan->placed[at] = plan->placed[at - 1];
    plan->placed[at] = next;
}

/* Returns the peak. */
static size_t place_all(planner *plan) {
    size_t peak = 0;
    qsort(plan->items, plan->count, sizeof(item), by_size);
    for (size_t i = 0; i < plan->count; i++) {
        item *next = &plan->items[i];
        next->offset = best_offset(plan, next);
        insert_by_offset(plan, next);
        if (next->offset + next->bytes > peak) peak = next->offset + next->bytes;
    }
    return peak;
}

/* Copies the intervals that need memory. */
static pst_status read_intervals(planner *plan, pst__error *error, const pst_interval *intervals,
                                 size_t count) {
    size_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        const pst_interval *from = &intervals[i];
        if (from->last < from->first)
            return pst__fail(error, PST_EINVAL, "plan: interval %zu ends before it begins", i);
        size_t bytes = pst__round_up(from->bytes, PST_ARENA_ALIGNMENT);
        if (bytes == PST__ROUND_FAILED || bytes > SIZE_MAX - sum)
            return pst__fail(error, PST_EINVAL,
                             "plan: the sizes up to interval %zu (%zu bytes) overflow", i,
                             from->bytes);
        sum += bytes;
        if (bytes == 0) continue;
        plan->items[plan->count++] =
            (item){.first = from->first, .last = from->last, .bytes = bytes, .index = i};
    }
    return PST_OK;
}

static void write_offsets(const planner *plan, pst_interval *intervals, size_t count) {
    for (size_t i = 0; i < count; i++)
        intervals[i].offset = 0;
    for (size_t i = 0; i < plan->count; i++)
        intervals[plan->items[i].index].offset = plan->items[i].offset;
}

pst_status pst_plan_offsets(pst_runtime *runtime, pst_interval *intervals, size_t count,
                            pst_plan_result *result) {
    if (runtime == NULL) return PST_EINVAL;
    pst__error *error = pst__runtime_error(runtime);
    if ((intervals == NULL && count > 0) || result == NULL)
        return pst__fail(error, PST_EINVAL, "plan: intervals and result must not be NULL");
    if (count > SIZE_MAX / sizeof(item))
        return pst__fail(error, PST_EINVAL, "plan: %zu intervals are too many", count);
    planner plan = {.heap = pst__runtime_heap(runtime)};
    size_t list_bytes = count * sizeof(item *);
    plan.items = pst__heap_alloc(plan.heap, count * sizeof(item));
    plan.placed = pst__heap_alloc(plan.heap, list_bytes);
    plan.ends = pst__heap_alloc(plan.heap, list_bytes);
    pst_status status;
    if (plan.items == NULL || plan.placed == NULL || plan.ends == NULL)
        status = pst__fail(error, PST_ENOMEM, "plan: no memory for %zu intervals", count);
    else
        status = read_intervals(&plan, error, intervals, count);
    if (status == PST_OK) {
        result->lower_bound = lower_bound(&plan);
        result->peak = place_all(&plan);
        write_offsets(&plan, intervals, count);
    }
    pst__heap_free(plan.heap, plan.ends, list_bytes);
    pst__heap_free(plan.heap, plan.placed, list_bytes);
    pst__heap_free(plan.heap, plan.items, count * sizeof(item));
    return status;
}
