#include "runtime.hpp"

#include "outside_python.hpp"

#include <penstock/cuda.h>

namespace penstock {

Runtime::Runtime(int rank, int world_size, double deadline_seconds, c10::Device device,
                 uintptr_t stream)
    : where_(device) {
    pst_runtime_options options{};
    options.size = sizeof options;
    options.rank = rank;
    options.world_size = world_size;
    options.deadline_ns = static_cast<uint64_t>(deadline_seconds * 1e9);
    pst_status status = pst_runtime_create(&options, &runtime_);
    if (status != PST_OK)
        throw StatusError{status, std::string("no runtime: ") + pst_status_text(status)};
    if (!device.is_cuda()) return;
    try {
        open_gpu(stream);
    } catch (...) {
        destroy();
        throw;
    }
}

void Runtime::open_gpu(uintptr_t stream) {
    pst_cuda_options options{};
    options.size = sizeof options;
    options.ordinal = where_.index();
    check(runtime_, pst_cuda_device_create(runtime_, &options, &device_));
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python hands over native streams as numbers
    check(runtime_, device_->ops->stream_wrap(device_, reinterpret_cast<void *>(stream), &stream_));
    pst_lane_options lane{};
    lane.size = sizeof lane;
    lane.name = "compute";
    lane.device = device_;
    lane.stream = stream_;
    lane.mode = PST_LANE_BORROWED;
    check(runtime_, pst_lane_create(runtime_, &lane, &compute_));
}

// The device comes last: lanes of the runtime use it to the end.
void Runtime::destroy() {
    pst_runtime_destroy(runtime_);
    if (stream_ != nullptr) device_->ops->stream_destroy(device_, stream_);
    if (device_ != nullptr) device_->ops->destroy(device_);
}

Runtime::~Runtime() {
    const WithoutInterpreter without; // a worker that is to end may be waiting for it
    destroy();
}

void Runtime::trace_start() const {
    check(runtime_, pst_trace_start(runtime_));
}

void Runtime::trace_stop() const {
    check(runtime_, pst_trace_stop(runtime_));
}

void Runtime::trace_write(const std::string &path) const {
    if (path.find('\0') != std::string::npos)
        throw StatusError{PST_EINVAL, "trace: the path has a NUL in it: give another one"};
    check(runtime_, pst_trace_write(runtime_, path.c_str()));
}

} // namespace penstock
