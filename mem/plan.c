#include "mem/arena.h"
#include "sched/runtime.h"

#include <stdlib.h>

/* Sizes that differ by less than 1/share of the larger count as equal in one attempt, and so are
 * placed by time alone: a window that slides over nearly equal layers then reuses their slots. */
static const size_t shares[] = {SIZE_MAX, 32, 8, 4, 2};

typedef struct item {
    uint64_t first, last;
    size_t index; /* in the caller's array */
    size_t bytes; /* rounded up */
    size_t space; /* what it takes while being placed: the largest size that counts as equal */
    size_t offset;
    size_t best; /* its offset in the best attempt */
} item;

/* Placed items, sorted by offset. */
typedef struct shelf {
    item **items;
    size_t count;
} shelf;

typedef struct planner {
    const pst__heap *heap;
    size_t capacity, count;
    item *items;
    shelf placed, dropped;
} planner;

static int compare(uint64_t a, uint64_t b) {
    return a < b ? -1 : a > b;
}

/* Largest first; the index makes the order total, so that it is the same everywhere. */
static int by_space(const void *left, const void *right) {
    const item *a = left, *b = right;
    if (a->space != b->space) return compare(b->space, a->space);
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
    item **starts = plan->placed.items, **ends = plan->dropped.items;
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

/* ---- placing -------------------------------------------------------------------------------- */

static int alive_together(const item *a, const item *b) {
    return a->first <= b->last && b->first <= a->last;
}

/* The smallest gap between items that live at the same time, or the place above them. */
static size_t best_offset(const shelf *shelf, const item *next) {
    size_t top = 0, best = SIZE_MAX, best_gap = SIZE_MAX;
    for (size_t i = 0; i < shelf->count; i++) {
        const item *other = shelf->items[i];
        if (!alive_together(other, next)) continue;
        size_t gap = other->offset > top ? other->offset - top : 0;
        if (gap >= next->space && gap < best_gap) {
            best_gap = gap;
            best = top;
        }
        size_t end = other->offset + other->space;
        if (end > top) top = end;
    }
    return best != SIZE_MAX ? best : top;
}

/* Returns where the item ends. */
static size_t put(shelf *shelf, item *next) {
    next->offset = best_offset(shelf, next);
    size_t at = shelf->count++;
    for (; at > 0 && shelf->items[at - 1]->offset > next->offset; at--)
        shelf->items[at] = shelf->items[at - 1];
    shelf->items[at] = next;
    return next->offset + next->space;
}

/* Gives each item the space of the largest one that counts as equal, and orders them for placing.
 */
static void classify(planner *plan, size_t share) {
    for (size_t i = 0; i < plan->count; i++)
        plan->items[i].space = plan->items[i].bytes;
    qsort(plan->items, plan->count, sizeof(item), by_space);
    size_t space = 0;
    for (size_t i = 0; i < plan->count; i++) {
        item *next = &plan->items[i];
        if (i == 0 || next->bytes < space - space / share) space = next->bytes;
        next->space = space;
    }
    qsort(plan->items, plan->count, sizeof(item), by_space);
}

/* One attempt. What was placed in more space than it needs drops down afterwards, lowest first, in
 * its true size; that never raises it. Returns the peak. */
static size_t place_all(planner *plan, size_t share) {
    classify(plan, share);
    plan->placed.count = plan->dropped.count = 0;
    for (size_t i = 0; i < plan->count; i++)
        (void)put(&plan->placed, &plan->items[i]);
    size_t peak = 0;
    for (size_t i = 0; i < plan->count; i++) {
        item *next = plan->placed.items[i];
        next->space = next->bytes;
        size_t end = put(&plan->dropped, next);
        if (end > peak) peak = end;
    }
    return peak;
}

static void find_best(planner *plan, pst_plan_result *result) {
    result->lower_bound = lower_bound(plan);
    result->peak = SIZE_MAX;
    for (size_t attempt = 0; attempt < sizeof shares / sizeof *shares; attempt++) {
        size_t peak = place_all(plan, shares[attempt]);
        if (peak >= result->peak) continue;
        result->peak = peak;
        for (size_t i = 0; i < plan->count; i++)
            plan->items[i].best = plan->items[i].offset;
        if (peak == result->lower_bound) return;
    }
}

/* ---- in and out ----------------------------------------------------------------------------- */

/* Copies the intervals that need memory. Sizes stay below half of what can be counted, since equal
 * sizes may take up to twice their bytes while being placed. */
static pst_status read_intervals(planner *plan, pst__error *error, const pst_interval *intervals,
                                 size_t count) {
    size_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        const pst_interval *from = &intervals[i];
        if (from->last < from->first)
            return pst__fail(error, PST_EINVAL, "plan: interval %zu ends before it begins", i);
        size_t bytes = pst__round_up(from->bytes, PST_ARENA_ALIGNMENT);
        if (bytes > SIZE_MAX / 2 || bytes > SIZE_MAX / 2 - sum)
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
        intervals[plan->items[i].index].offset = plan->items[i].best;
}

static pst_status open_planner(planner *plan, pst_runtime *runtime, size_t count) {
    *plan = (planner){.heap = pst__runtime_heap(runtime), .capacity = count};
    plan->items = pst__heap_alloc(plan->heap, count * sizeof(item));
    plan->placed.items = pst__heap_alloc(plan->heap, count * sizeof(item *));
    plan->dropped.items = pst__heap_alloc(plan->heap, count * sizeof(item *));
    if (plan->items != NULL && plan->placed.items != NULL && plan->dropped.items != NULL)
        return PST_OK;
    return pst__fail(pst__runtime_error(runtime), PST_ENOMEM, "plan: no memory for %zu intervals",
                     count);
}

static void close_planner(planner *plan) {
    pst__heap_free(plan->heap, plan->dropped.items, plan->capacity * sizeof(item *));
    pst__heap_free(plan->heap, plan->placed.items, plan->capacity * sizeof(item *));
    pst__heap_free(plan->heap, plan->items, plan->capacity * sizeof(item));
}

pst_status pst_plan_offsets(pst_runtime *runtime, pst_interval *intervals, size_t count,
                            pst_plan_result *result) {
    if (runtime == NULL) return PST_EINVAL;
    pst__error *error = pst__runtime_error(runtime);
    if ((intervals == NULL && count > 0) || result == NULL)
        return pst__fail(error, PST_EINVAL, "plan: intervals and result must not be NULL");
    if (count > SIZE_MAX / sizeof(item))
        return pst__fail(error, PST_EINVAL, "plan: %zu intervals are too many", count);
    planner plan;
    pst_status status = open_planner(&plan, runtime, count);
    if (status == PST_OK) status = read_intervals(&plan, error, intervals, count);
    if (status == PST_OK) {
        find_best(&plan, result);
        write_offsets(&plan, intervals, count);
    }
    close_planner(&plan);
    return status;
}
