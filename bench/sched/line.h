/* How far apart the two cores are at the moment. */
#ifndef BENCH_SCHED_LINE_H
#define BENCH_SCHED_LINE_H

/* Nanoseconds in which a cache line goes to another thread and comes back, the clock's reading
 * included: the median of some hundred times. 0 when no thread can be started. */
double bench_line_round_trip(void);

#endif
