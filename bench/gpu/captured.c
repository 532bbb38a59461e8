#include "tasks.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

static CUstream stream;
static CUgraphExec executable;

static void check(CUresult result, const char *call) {
    const char *name = "";
    if (result == CUDA_SUCCESS) return;
    (void)cuGetErrorName(result, &name);
    fprintf(stderr, "%s: %s\n", call, name);
    exit(1);
}

void captured_prepare(const tasks_setting *setting) {
    CUgraph graph;
    check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    check(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
          "cuStreamBeginCapture");
    bench_check(&setting->gpu, pst_graph_capture(setting->graph, setting->gpu.device, stream),
                "pst_graph_capture");
    check(cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
    check(cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiateWithFlags");
    check(cuGraphDestroy(graph), "cuGraphDestroy");
}

void captured_release(void) {
    check(cuGraphExecDestroy(executable), "cuGraphExecDestroy");
    check(cuStreamDestroy(stream), "cuStreamDestroy");
}

void captured_run(const tasks_setting *setting) {
    (void)setting;
    check(cuGraphLaunch(executable, stream), "cuGraphLaunch");
    check(cuStreamSynchronize(stream), "cuStreamSynchronize");
}
