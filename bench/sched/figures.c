#include "figures.h"

#include <math.h>
#include <stdlib.h>

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

void bench_sort(double *values, size_t count) {
    qsort(values, count, sizeof(*values), compare);
}

double bench_quantile(const double *sorted, size_t count, double quantile) {
    if (count == 0) return NAN;
    return sorted[(size_t)(quantile * (double)(count - 1) + 0.5)];
}

double bench_median(double *values, size_t count) {
    bench_sort(values, count);
    return bench_quantile(values, count, 0.5);
}
