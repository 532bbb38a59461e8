#include "offload.hpp"

#include "outside_python.hpp"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/StreamGuard.h>

#include <utility>

namespace penstock {
namespace {

void drop_storage(void *, void *storage) {
    delete static_cast<c10::Storage *>(storage);
}

} // namespace

// ---- life ---------------------------------------------------------------------------------------

Offload::Offload(std::shared_ptr<Runtime> runtime, size_t most_bytes)
    : runtime_(std::move(runtime)), most_bytes_(most_bytes) {
    runtime_->check_process("this sharded model");
    const c10::Device where = runtime_->where();
    if (where.is_cuda()) compute_ = c10::impl::VirtualGuardImpl(where.type()).getStream(where);
    pst_offload_options options{};
    options.size = sizeof options;
    options.name = "activations";
    options.device = runtime_->device();
    options.compute = runtime_->compute();
    options.released = drop_storage;
    runtime_->check(pst_offload_create(runtime_->get(), &options, &offload_));
}

Offload::~Offload() {
    close();
}

void Offload::close() {
    if (!home_.is_this()) return;
    const WithoutInterpreter without;
    const std::lock_guard<std::mutex> guard(lock_);
    pst_offload_destroy(std::exchange(offload_, nullptr));
}

pst_offload *Offload::open() {
    runtime_->check_process("this sharded model");
    if (offload_ == nullptr)
        throw StatusError{PST_ESTATE,
                          "activations that were offloaded are lost, as their sharded model was "
                          "closed, or parameters of it were unfrozen: run the backward before"};
    return offload_;
}

// ---- storing ------------------------------------------------------------------------------------

void Offload::forget_returned() {
    std::vector<uint64_t> returned;
    {
        const std::lock_guard<std::mutex> guard(returned_lock_);
        returned.swap(returned_);
    }
    for (const uint64_t key : returned)
        pst_offload_drop(offload_, key);
}

std::shared_ptr<Stored> Offload::store(const at::Tensor &tensor) {
    const WithoutInterpreter without;
    const std::lock_guard<std::mutex> guard(lock_);
    pst_offload *offload = open();
    forget_returned();
    const c10::Storage &storage = tensor.storage();
    pst_offload_stats now{};
    now.size = sizeof now;
    pst_offload_get_stats(offload, &now);
    if (storage.nbytes() > most_bytes_ || now.host_bytes > most_bytes_ - storage.nbytes())
        return nullptr;
    auto owner = std::make_unique<c10::Storage>(storage);
    const uint64_t key = ++last_key_;
    const pst_status status =
        pst_offload_store(offload, key, storage.data(), storage.nbytes(), owner.get());
    if (status == PST_ENOMEM) return nullptr;
    runtime_->check(status);
    (void)owner.release(); // `released` has it
    return std::make_shared<Stored>(shared_from_this(), key, storage.nbytes());
}

pst_offload_stats Offload::stats() {
    const WithoutInterpreter without;
    const std::lock_guard<std::mutex> guard(lock_);
    pst_offload_stats now{};
    now.size = sizeof now;
    if (offload_ != nullptr && home_.is_this()) {
        forget_returned();
        pst_offload_get_stats(offload_, &now);
    }
    return now;
}

// ---- what is stored -----------------------------------------------------------------------------

Stored::~Stored() {
    if (!offload_->home_.is_this()) return;
    const std::lock_guard<std::mutex> guard(offload_->returned_lock_);
    offload_->returned_.push_back(key_);
}

void Stored::wait_store() {
    const WithoutInterpreter without;
    const std::lock_guard<std::mutex> guard(offload_->lock_);
    offload_->runtime_->check(pst_offload_wait_store(offload_->open(), key_));
}

at::Tensor Stored::load() {
    const WithoutInterpreter without;
    const RealTensors real;
    const std::lock_guard<std::mutex> guard(offload_->lock_);
    pst_offload *offload = offload_->open();
    offload_->forget_returned();
    const c10::OptionalStreamGuard on(offload_->compute_);
    at::Tensor tensor =
        at::empty({static_cast<int64_t>(bytes_)},
                  at::TensorOptions().dtype(at::kByte).device(offload_->runtime_->where()));
    auto owner = std::make_unique<c10::Storage>(tensor.storage());
    offload_->runtime_->check(pst_offload_load(offload, key_, tensor.mutable_data_ptr(), bytes_,
                                               nullptr, 0, owner.get()));
    (void)owner.release(); // `released` has it
    return tensor;
}

void Stored::wait_load() {
    const WithoutInterpreter without;
    const std::lock_guard<std::mutex> guard(offload_->lock_);
    offload_->runtime_->check(pst_offload_wait_load(offload_->open(), key_));
}

} // namespace penstock
