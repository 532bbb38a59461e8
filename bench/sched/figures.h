/* What is printed of many measurements. */
#ifndef BENCH_SCHED_FIGURES_H
#define BENCH_SCHED_FIGURES_H

#include <stddef.h>

/* Sorts in place, ascending. */
void bench_sort(double *values, size_t count);

/* The value at `quantile` (0 to 1) of sorted values; NAN when there is none. */
double bench_quantile(const double *sorted, size_t count, double quantile);

/* Sorts in place and returns the middle one; NAN when there is none. */
double bench_median(double *values, size_t count);

#endif
