#include "sample.h"

#include "line.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int measure_checked(const bench_case *what, bench_sample *sample) {
    memset(sample, 0, sizeof(*sample));
    bench_body_reset();
    if (what->system->measure(what->shape, what->threads, what->tasks, sample) != 0) return -1;
    size_t runs = sample->nanoseconds[BENCH_REPLAY] > 0 ? 2 : 1;
    if (bench_body_count() == runs * what->tasks) return 0;
    fprintf(stderr, "%s ran %zu task bodies instead of %zu\n", what->system->name,
            bench_body_count(), runs * what->tasks);
    return -1;
}

/* Every shape once: what a system does first in a process can be several times as slow, and with
 * oneTBB independent tasks stay so until something else has run. */
static int warm_up(bench_case what) {
    bench_sample sample;
    for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++) {
        what.shape = (bench_shape)shape;
        if (measure_checked(&what, &sample) != 0) return -1;
    }
    return 0;
}

static int child(const bench_case *what, int out) {
    bench_sample sample;
    if (warm_up(*what) != 0) return 1;
    double line = bench_line_round_trip();
    if (measure_checked(what, &sample) != 0) return 1;
    sample.line[0] = line;
    sample.line[1] = bench_line_round_trip();
    return write(out, &sample, sizeof(sample)) == (ssize_t)sizeof(sample) ? 0 : 1;
}

int bench_sample_take(const bench_case *what, bench_sample *sample) {
    int ends[2];
    if (pipe(ends) != 0) {
        perror("pipe");
        return -1;
    }
    pid_t pid = fork();
    if (pid == 0) _exit(child(what, ends[1]));
    close(ends[1]);
    ssize_t got = pid < 0 ? -1 : read(ends[0], sample, sizeof(*sample));
    close(ends[0]);
    if (pid > 0) waitpid(pid, NULL, 0);
    if (got == (ssize_t)sizeof(*sample)) return 0;
    fprintf(stderr, "no result from %s, %s, %zu threads\n", what->system->name,
            bench_shape_name(what->shape), what->threads);
    return -1;
}
