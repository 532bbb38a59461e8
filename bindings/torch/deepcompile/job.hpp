// What the parts of a DeepCompile runtime share of the job that they serve.
#pragma once

#include "ranks.hpp"

#include <cstdint>
#include <memory>

namespace penstock::dc {

// What a job configures of its DeepCompile runtime.
struct Config {
    bool double_buffer = true;
    bool symmetric_memory = false;
    int64_t free_activation_threshold = 0; // elements
    bool sync_before_reduce = false, sync_after_reduce = false;
    bool sync_before_allgather = false, sync_after_allgather = false;
    bool offload_activation_pin_memory = true;
    int64_t bucket_elements = 0; // of gradients, of all ranks together
};

struct Job {
    const Config config;
    const std::unique_ptr<Ranks> ranks;
    bool profiling = false, dry = false; // dry: nothing is gathered either
};

} // namespace penstock::dc
