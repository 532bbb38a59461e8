// A runtime and the device that an engine works on.
#pragma once

#include "status.hpp"

#include <penstock/graph.h>
#include <penstock/trace.h>

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace penstock {

class Runtime {
  public:
    // `stream`: on a GPU the native handle of the stream to train on (0: the default stream).
    Runtime(int rank, int world_size, double deadline_seconds, c10::Device device,
            uintptr_t stream);
    ~Runtime();
    Runtime(const Runtime &) = delete;
    Runtime &operator=(const Runtime &) = delete;

    pst_runtime *get() const {
        return runtime_;
    }
    c10::Device where() const {
        return where_;
    }
    // NULL on the CPU: the runtime's host device, and the calling thread.
    pst_device *device() const {
        return device_;
    }
    pst_lane *compute() const {
        return compute_;
    }
    void trace_start() const;
    void trace_stop() const;
    void trace_write(const std::string &path) const;

  private:
    void open_gpu(uintptr_t stream);
    void destroy();

    pst_runtime *runtime_ = nullptr;
    c10::Device where_;
    pst_device *device_ = nullptr;
    pst_stream *stream_ = nullptr;
    pst_lane *compute_ = nullptr;
};

} // namespace penstock
