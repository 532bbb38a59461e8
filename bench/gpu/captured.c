#include "driver.h"
#include "tasks.h"

static CUstream stream;
static CUgraphExec executable;

void captured_prepare(const tasks_setting *setting) {
    CUgraph graph;
    driver_check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    driver_check(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                 "cuStreamBeginCapture");
    bench_check(&setting->gpu, pst_graph_capture(setting->graph, setting->gpu.device, stream),
                "pst_graph_capture");
    driver_check(cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
    driver_check(cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiateWithFlags");
    driver_check(cuGraphDestroy(graph), "cuGraphDestroy");
}

void captured_release(void) {
    driver_check(cuGraphExecDestroy(executable), "cuGraphExecDestroy");
    driver_check(cuStreamDestroy(stream), "cuStreamDestroy");
}

void captured_run(const tasks_setting *setting) {
    (void)setting;
    driver_check(cuGraphLaunch(executable, stream), "cuGraphLaunch");
    driver_check(cuStreamSynchronize(stream), "cuStreamSynchronize");
}
