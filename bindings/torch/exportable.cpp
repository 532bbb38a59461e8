#include "exportable.hpp"

#include <penstock/cuda.h>

#include <ATen/detail/CUDAHooksInterface.h>

#include <map>
#include <mutex>

namespace penstock {
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
