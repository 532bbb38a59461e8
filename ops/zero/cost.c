#include "ops/zero/cost.h"

#include <string.h>

/* ---- curves ---------------------------------------------------------------------------------- */

/* By bytes, and those of equal bytes by time. */
static int comes_behind(const pst__curve_point *point, uint64_t bytes, uint64_t ns) {
    return point->bytes > bytes || (point->bytes == bytes && point->ns > ns);
}

pst_status pst__curve_add(const pst__heap *heap, pst__curve *curve, uint64_t bytes, uint64_t ns) {
    if (ns == 0 || bytes == 0) return PST_OK;
    pst_status status = pst__heap_grow(heap, (void **)&curve->points, &curve->capacity,
                                       curve->count + 1, sizeof *curve->points);
    if (status != PST_OK) return status;
    size_t hole = curve->count++;
    for (; hole > 0 && comes_behind(&curve->points[hole - 1], bytes, ns); hole--)
        curve->points[hole] = curve->points[hole - 1];
    curve->points[hole] = (pst__curve_point){bytes, ns, 1};
    return PST_OK;
}

static void take_one_a_size(pst__curve *curve, int takes_shortest) {
    size_t kept = 0;
    for (size_t first = 0, next = 0; first < curve->count; first = next) {
        while (next < curve->count && curve->points[next].bytes == curve->points[first].bytes)
            next++;
        curve->points[kept] = curve->points[first + (takes_shortest ? 0 : (next - first - 1) / 2)];
        curve->points[kept++].count = next - first;
    }
    curve->count = kept;
}

/* The point and those before it that took longer: all of them take their mean. */
static void pool(pst__curve_point *points, size_t last) {
    uint64_t count = points[last].count, sum = points[last].ns * count, mean = points[last].ns;
    size_t first = last;
    for (; first > 0 && points[first - 1].ns > mean; first--) {
        count += points[first - 1].count;
        sum += points[first - 1].ns * points[first - 1].count;
        mean = sum / count;
    }
    for (size_t i = first; i <= last; i++)
        points[i].ns = mean;
}

/* Isotonic regression by pooling adjacent violators. */
void pst__curve_fit(pst__curve *curve, int takes_shortest) {
    take_one_a_size(curve, takes_shortest);
    for (size_t i = 1; i < curve->count; i++)
        pool(curve->points, i);
}

uint64_t pst__curve_at(const pst__curve *curve, uint64_t bytes) {
    if (curve->count == 0 || bytes == 0) return 0;
    const pst__curve_point *first = curve->points, *last = first + curve->count - 1;
    if (bytes <= first->bytes) return first->ns;
    if (bytes >= last->bytes) return pst__scale(bytes, last->ns, last->bytes);
    const pst__curve_point *above = first + 1;
    while (above->bytes < bytes)
        above++;
    const pst__curve_point *below = above - 1;
    return below->ns +
           pst__scale(above->ns - below->ns, bytes - below->bytes, above->bytes - below->bytes);
}

void pst__curve_free(const pst__heap *heap, pst__curve *curve) {
    pst__heap_free(heap, curve->points, curve->capacity * sizeof *curve->points);
    *curve = (pst__curve){0};
}

/* ---- from a recording ------------------------------------------------------------------------ */

static void measure_collective(const pst_zero_op *operation, const pst_zero_op_time *time,
                               pst__measured *measured) {
    const uint64_t ns = time->collective_ns;
    if (operation->kind == PST_ZERO_REDUCE) {
        measured->reduce += ns;
    } else if (ns != 0) {
        if (measured->gather == 0 || ns < measured->gather) measured->gather = ns;
        if (time->waited_ns < ns / 2)
            ++*(operation->backward ? &measured->hidden_backward : &measured->hidden_forward);
    }
}

/* From where compute has what an operation waits for to where it gets to the next one. Several
 * operations may be waited for at once: then it counts from the last one on. */
void pst__measure(const pst_zero_op *operations, const pst_zero_op_time *times, size_t count,
                  size_t group_count, pst__measured *measured) {
    uint64_t behind = 0;
    memset(measured, 0, group_count * sizeof *measured);
    for (size_t i = 0; times != NULL && i < count; i++) {
        const pst_zero_op_time *time = &times[i];
        if (operations[i].group >= group_count) continue;
        pst__measured *group = &measured[operations[i].group];
        measure_collective(&operations[i], time, group);
        const uint64_t ready = time->reached_ns + time->waited_ns;
        if (ready > behind) behind = ready;
        if (i + 1 == count || times[i + 1].reached_ns <= behind || time->reached_ns == 0) continue;
        *(operations[i].backward ? &group->backward : &group->forward) +=
            times[i + 1].reached_ns - behind;
    }
}

pst_status pst__costs_create(const pst__heap *heap, const pst__measured *measured,
                             size_t group_count, const size_t *gather_bytes,
                             const size_t *reduce_bytes, const unsigned char *is_looked_up,
                             int is_local, pst__costs *costs) {
    pst_status status = PST_OK;
    *costs = (pst__costs){.measured = measured, .is_local = is_local};
    for (size_t i = 0; status == PST_OK && i < group_count; i++) {
        if (is_looked_up == NULL || !is_looked_up[i])
            status = pst__curve_add(heap, &costs->gather, gather_bytes[i], measured[i].gather);
        if (status == PST_OK)
            status = pst__curve_add(heap, &costs->reduce, reduce_bytes[i], measured[i].reduce);
    }
    pst__curve_fit(&costs->gather, is_local);
    pst__curve_fit(&costs->reduce, 0);
    return status;
}

void pst__costs_free(const pst__heap *heap, pst__costs *costs) {
    pst__curve_free(heap, &costs->gather);
    pst__curve_free(heap, &costs->reduce);
}
