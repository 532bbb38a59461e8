/* Calls of CUDA's driver, for benchmarks that are linked with it. */
#ifndef BENCH_GPU_DRIVER_H
#define BENCH_GPU_DRIVER_H

#include <cuda.h>

/* Ends the program with a message where the call has failed. */
void driver_check(CUresult result, const char *call);

#endif
