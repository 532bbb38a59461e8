#include "storage.hpp"

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>
#include <torch/version.h>

// What is used below is not all public in torch; look at c10/core/StorageImpl.h before you allow
// another version.
static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11,
              "the penstock binding is written for torch 2.11: install that version, or check "
              "bindings/torch/storage.cpp against the new c10/core/StorageImpl.h");

namespace penstock {
namespace {

// torch can set "reading the pointer is an error" on a storage and has no call that takes it back.
// An explicit instantiation may name a private member; this one hands out its address.
struct ThrowFlag {
    using type = bool c10::StorageImpl::*;
    friend type member(ThrowFlag);
};
template <ThrowFlag::type pointer> struct Reveal {
    friend ThrowFlag::type member(ThrowFlag) {
        return pointer;
    }
};
template struct Reveal<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

c10::StorageImpl &storage_of(const at::Tensor &tensor) {
    return *tensor.storage().unsafeGetStorageImpl();
}

} // namespace

at::Tensor make_released_tensor(at::IntArrayRef shape, at::ScalarType dtype, at::Device device,
                                const std::string &message) {
    const auto bytes =
        static_cast<int64_t>(c10::elementSize(dtype)) * c10::multiply_integers(shape);
    c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), c10::SymInt(bytes), at::DataPtr(nullptr, device),
        /*allocator=*/nullptr, /*resizable=*/false));
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage),
        c10::DispatchKeySet(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
    release_storage(tensor, message);
    return tensor;
}

at::Tensor make_view(const at::Tensor &whole, int64_t first, at::IntArrayRef shape) {
    char *memory = static_cast<char *>(whole.mutable_data_ptr()) + first * whole.element_size();
    return at::from_blob(
        memory, shape, [whole](void *) {}, whole.options(), whole.device());
}

void bind_storage(const at::Tensor &tensor, void *memory) {
    c10::StorageImpl &storage = storage_of(tensor);
    storage.*member(ThrowFlag{}) = false;
    // Also recomputes the summary flag that guards the fast path.
    storage.set_data_ptr_noswap(at::DataPtr(memory, storage.device()));
}

void release_storage(const at::Tensor &tensor, const std::string &message) {
    c10::StorageImpl &storage = storage_of(tensor);
    storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

} // namespace penstock
