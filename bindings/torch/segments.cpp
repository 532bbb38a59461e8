#include "segments.hpp"

#include <penstock/cuda.h>

#include <ATen/detail/CUDAHooksInterface.h>

#include <map>
#include <mutex>
#include <new>
#include <utility>

namespace penstock {

Segments::~Segments() {
    if (held_.empty()) return;
    new (std::nothrow) std::pair<SegmentMaker, decltype(held_)>(std::move(make_), std::move(held_));
}

at::Tensor Segments::find(const void *memory) const {
    const auto wanted = reinterpret_cast<uintptr_t>(memory);
    for (const auto &[begin, segment] : held_)
        if (wanted - reinterpret_cast<uintptr_t>(begin) < segment.nbytes()) return segment;
    return {};
}

pst_status Segments::alloc(void *context, size_t bytes, void **memory) {
    auto &self = *static_cast<Segments *>(context);
    try {
        at::Tensor made = self.make_(bytes);
        *memory = made.mutable_data_ptr();
        // An alias that Python does not know of, so that it may go on any thread.
        self.held_.emplace(*memory, made.alias());
        return PST_OK;
    } catch (const std::exception &) {
        return PST_ENOMEM;
    }
}

void Segments::free(void *context, void *memory, size_t) {
    static_cast<Segments *>(context)->held_.erase(memory);
}

namespace {

// torch gives segments back whenever it likes, after the last engine and at the process's end: a
// device a GPU, made at its first segment, which nobody destroys.
struct Gpus {
    std::mutex lock;
    std::map<int, pst_device *> devices;
};

Gpus &gpus() {
    static Gpus *all = new Gpus;
    return *all;
}

pst_device *open(int ordinal) {
    pst_runtime *runtime = nullptr;
    pst_device *device = nullptr;
    pst_cuda_options options{};
    options.size = sizeof options;
    options.ordinal = ordinal;
    if (pst_runtime_create(nullptr, &runtime) != PST_OK) return nullptr;
    if (pst_cuda_device_create(runtime, &options, &device) == PST_OK) return device;
    pst_runtime_destroy(runtime);
    return nullptr;
}

pst_device *device_of(int ordinal) {
    Gpus &all = gpus();
    const std::lock_guard<std::mutex> guard(all.lock);
    pst_device *&device = all.devices[ordinal];
    if (device == nullptr) device = open(ordinal);
    return device;
}

} // namespace
} // namespace penstock

void *penstock_segment_alloc(ssize_t bytes, int ordinal, void *) {
    pst_device *device = penstock::device_of(ordinal);
    void *memory = nullptr;
    if (device == nullptr || device->ops->alloc(device, PST_MEMORY_DEVICE,
                                                static_cast<size_t>(bytes), &memory) != PST_OK)
        return nullptr; // torch raises an OutOfMemoryError
    return memory;
}

void penstock_segment_free(void *memory, size_t bytes, int ordinal, void *) {
    pst_device *device = penstock::device_of(ordinal);
    // As cudaFree does: shards outlive their engine, and what still uses them may not be through.
    try {
        at::detail::getCUDAHooks().deviceSynchronize(static_cast<c10::DeviceIndex>(ordinal));
    } catch (const std::exception &) {
        return; // the device is lost, or the process ends
    }
    if (device != nullptr) device->ops->free(device, PST_MEMORY_DEVICE, memory, bytes);
}
