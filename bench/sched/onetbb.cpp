// oneTBB's flow graph: a continue_node a task.
#include "system.h"

#include <deque>
#include <exception>
#include <oneapi/tbb/flow_graph.h>
#include <oneapi/tbb/global_control.h>
#include <stdio.h>
#include <vector>

namespace {

namespace flow = oneapi::tbb::flow;
using node = flow::continue_node<flow::continue_msg>;

struct flow_graph {
    flow::graph graph;
    std::deque<node> nodes;
    std::vector<node *> sources;

    flow_graph(bench_shape shape, size_t tasks) {
        for (size_t i = 0; i < tasks; i++)
            add(shape, i);
    }

    void add(bench_shape shape, size_t i) {
        nodes.emplace_back(graph, [](const flow::continue_msg &) { bench_body(); });
        size_t predecessors[BENCH_MAX_PREDECESSORS];
        size_t count = bench_predecessors(shape, i, predecessors);
        if (count == 0) sources.push_back(&nodes.back());
        for (size_t k = 0; k < count; k++)
            flow::make_edge(nodes[predecessors[k]], nodes[i]);
    }

    void run() {
        for (node *source : sources)
            source->try_put(flow::continue_msg());
        graph.wait_for_all();
    }
};

// The limit on threads holds as long as `control` lives: to the end of this process, which measures
// one number of threads only.
void measure_both(bench_shape shape, size_t threads, size_t tasks, bench_sample *sample) {
    using oneapi::tbb::global_control;
    static global_control control(global_control::max_allowed_parallelism, threads);
    double begin = bench_now();
    flow_graph graph(shape, tasks);
    graph.run();
    double built_and_run = bench_now();
    graph.run();
    double replayed = bench_now();
    sample->nanoseconds[BENCH_BUILD_AND_RUN] = built_and_run - begin;
    sample->nanoseconds[BENCH_REPLAY] = replayed - built_and_run;
}

int measure(bench_shape shape, size_t threads, size_t tasks, bench_sample *sample) {
    try {
        measure_both(shape, threads, tasks, sample);
        return 0;
    } catch (const std::exception &error) {
        fprintf(stderr, "oneTBB: %s\n", error.what());
        return -1;
    }
}

} // namespace

extern "C" const bench_system bench_onetbb = {"oneTBB flow graph", measure};
