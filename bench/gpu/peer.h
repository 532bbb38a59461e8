/* CUDASTF's own benchmark of tasks, where it has been built (build_cudastf.sh). */
#ifndef BENCH_GPU_PEER_H
#define BENCH_GPU_PEER_H

#include "pattern.h"

/* Microseconds a task as this program in `folder` says; 0: it could not be run. */
double peer_measure(const char *folder, const char *program, pattern_kind kind);

#endif
