#include "gathered.hpp"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>

namespace penstock::dc {

Gathered::Gathered(c10::Device device, at::ScalarType dtype)
    : storage_(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                     c10::SymInt(0), at::DataPtr(nullptr, device),
                                                     /*allocator=*/nullptr, /*resizable=*/false)),
      dtype_(dtype) {}

void Gathered::bind(void *memory, size_t bytes) {
    storage_.set_nbytes(bytes);
    storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(memory, storage_.device()));
}

void Gathered::clear() {
    free_storage(*storage_.unsafeGetStorageImpl());
}

at::Tensor Gathered::view(at::IntArrayRef shape) const {
    return tensor_on(storage_, dtype_, shape);
}

at::Tensor tensor_on(c10::Storage storage, at::ScalarType dtype, at::IntArrayRef shape) {
    const auto key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
    return tensor;
}

void free_storage(c10::StorageImpl &storage) {
    storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
    storage.set_nbytes(0);
}

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
