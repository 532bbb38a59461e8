#include "home.hpp"

#include "gathered.hpp"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>

namespace penstock::dc {

void move_memory(c10::Storage &home, const SegmentMaker &make) {
    const at::Device device = home.device();
    const at::Tensor before = tensor_on(home, at::kByte, {static_cast<int64_t>(home.nbytes())});
    const at::Tensor segment = make(home.nbytes());
    segment.copy_(before);
    // Whatever stream has work on the old memory.
    if (device.is_cuda()) at::accelerator::synchronizeDevice(device.index());
    c10::StorageImpl &made = *segment.storage().unsafeGetStorageImpl();
    home.unsafeGetStorageImpl()->set_data_ptr(made.set_data_ptr(at::DataPtr(nullptr, device)));
    made.set_nbytes(0);
}

} // namespace penstock::dc
