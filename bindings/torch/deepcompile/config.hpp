// What a job configures of its DeepCompile runtime.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock::dc {

struct Config {
    bool double_buffer = true;
    bool symmetric_memory = false;
    int64_t free_activation_threshold = 0; // elements
    bool sync_before_reduce = false, sync_after_reduce = false;
    bool sync_before_allgather = false, sync_after_allgather = false;
    bool offload_activation_pin_memory = true;
    int64_t bucket_elements = 0; // of gradients, of all ranks together
};

} // namespace penstock::dc
