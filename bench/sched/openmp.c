/* OpenMP tasks with depend clauses, as the compiler's own runtime schedules them. */
#include "system.h"

#include <stdio.h>
#include <stdlib.h>

/* A depend clause names its places in the source, so there is a task for each number of them. */
static void submit(bench_shape shape, size_t i, char *places) {
    size_t at[BENCH_MAX_PREDECESSORS];
    (void)places; /* gcc does not count a depend clause as a use */
    switch (bench_predecessors(shape, i, at)) {
    case 0:
#pragma omp task depend(out : places[i])
        bench_body();
        break;
    case 1:
#pragma omp task depend(in : places[at[0]]) depend(out : places[i])
        bench_body();
        break;
    case 2:
#pragma omp task depend(in : places[at[0]], places[at[1]]) depend(out : places[i])
        bench_body();
        break;
    default:
#pragma omp task depend(in : places[at[0]], places[at[1]], places[at[2]]) depend(out : places[i])
        bench_body();
        break;
    }
}

static int measure(bench_shape shape, size_t threads, size_t tasks, bench_sample *sample) {
    char *places = calloc(tasks, 1);
    if (places == NULL) {
        fprintf(stderr, "openmp: out of memory\n");
        return -1;
    }
    double begin = bench_now();
#pragma omp parallel num_threads(threads)
#pragma omp single
    for (size_t i = 0; i < tasks; i++)
        submit(shape, i, places);
    sample->nanoseconds[BENCH_BUILD_AND_RUN] = bench_now() - begin;
    free(places);
    return 0;
}

const bench_system bench_openmp = {"OpenMP depend", measure};
