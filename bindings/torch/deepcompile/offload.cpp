#include "offload.hpp"

#include "job.hpp"

#include <ATen/ATen.h>

namespace penstock::dc {
namespace {

// As the operators' shapes say: dense, in the order of strides that the tensor has.
at::Tensor dense(const at::Tensor &tensor) {
    return tensor.is_non_overlapping_and_dense() ? tensor.detach()
                                                 : at::empty_like(tensor).copy_(tensor.detach());
}

size_t bytes_of(const at::Tensor &tensor) {
    return static_cast<size_t>(tensor.numel()) * tensor.element_size();
}

} // namespace

Offload::Store::Store(std::shared_ptr<Runtime> owner) : runtime(std::move(owner)) {
    pst_offload_options options{};
    options.size = sizeof options;
    options.name = "activations";
    options.device = runtime->device();
    options.compute = runtime->compute();
    options.released = drop_tensor;
    runtime->check(pst_offload_create(runtime->get(), &options, &offload));
}

Offload::Store::~Store() {
    pst_offload_destroy(offload);
}

void Offload::check(pst_status status) const {
    job_.ranks->check(status);
}

bool Offload::is_pinned() const {
    return job_.config.offload_activation_pin_memory;
}

Offload::Store &Offload::store() {
    if (!store_) store_ = make_own<Store>(job_.ranks->runtime);
    return *store_;
}

// ---- activations --------------------------------------------------------------------------------

uint64_t Offload::key_of(const at::Tensor &host, Place place) const {
    const auto found = stored_.find(host.const_data_ptr());
    if (found == stored_.end() || found->second.place != place)
        throw StatusError{PST_ESTATE, "activation " + std::to_string(place.second) + " of graph " +
                                          std::to_string(place.first) +
                                          " was not offloaded to this tensor: call "
                                          "offload_tensor first"};
    return found->second.key;
}

// What was stored before the graphs were forgotten belongs to none of them.
void Offload::take_back() {
    std::vector<Returned> returned;
    {
        const std::lock_guard<std::mutex> guard(store().lock);
        returned.swap(store_->returned);
    }
    for (const Returned &one : returned) {
        const auto found = stored_.find(one.memory);
        if (found != stored_.end() && found->second.key == one.key) {
            unused_[found->second.place].push_back(one.key);
            stored_.erase(found);
        } else {
            pst_offload_drop(store_->offload, one.key);
        }
    }
}

uint64_t Offload::take_key(Place place) {
    take_back();
    std::vector<uint64_t> &unused = unused_[place];
    if (unused.empty()) return new_key();
    const uint64_t key = unused.back();
    unused.pop_back();
    return key;
}

at::Tensor Offload::host_view(uint64_t key, Place place, const at::Tensor &like) {
    void *memory = nullptr;
    size_t bytes = 0;
    check(pst_offload_address(store().offload, key, &memory, &bytes));
    const std::shared_ptr<Store> keeper = store_;
    stored_[memory] = {place, key};
    const auto give_back = [keeper, key](void *given) {
        const std::lock_guard<std::mutex> guard(keeper->lock);
        keeper->returned.push_back({given, key});
    };
    return at::from_blob(memory, like.sizes(), like.strides(), give_back,
                         at::TensorOptions().dtype(like.scalar_type()).device(at::kCPU),
                         at::Device(at::kCPU));
}

at::Tensor Offload::offload(const at::Tensor &tensor, int64_t graph, int64_t id) {
    const at::Tensor source = dense(tensor);
    if (source.numel() == 0 || !is_pinned())
        return at::empty_strided(source.sizes(), source.strides(),
                                 source.options().device(at::kCPU))
            .copy_(source);
    const Place place{graph, id};
    const uint64_t key = take_key(place);
    auto owner = std::make_unique<at::Tensor>(source);
    check(
        pst_offload_store(store().offload, key, source.data_ptr(), bytes_of(source), owner.get()));
    owner.release(); // `released` has it
    return host_view(key, place, source);
}

at::Tensor Offload::wait_offload(const at::Tensor &host, int64_t graph, int64_t id) {
    if (host.numel() != 0 && is_pinned())
        check(pst_offload_wait_store(store().offload, key_of(host, {graph, id})));
    return host;
}

void Offload::load(uint64_t key, const at::Tensor &device) {
    auto owner = std::make_unique<at::Tensor>(device);
    check(pst_offload_load(store().offload, key, device.mutable_data_ptr(), bytes_of(device),
                           nullptr, 0, owner.get()));
    owner.release(); // `released` has it
}

at::Tensor Offload::reload(const at::Tensor &host, int64_t graph, int64_t id) {
    at::Tensor device = at::empty_strided(host.sizes(), host.strides(),
                                          host.options().device(job_.ranks->runtime->where()));
    if (host.numel() == 0 || !is_pinned()) return device.copy_(host);
    const Place place{graph, id};
    const uint64_t key = key_of(host, place);
    load(key, device);
    coming_[place].push_back(key);
    return device;
}

at::Tensor Offload::wait_reload(const at::Tensor &tensor, int64_t graph, int64_t id) {
    for (uint64_t key : std::exchange(coming_[{graph, id}], {}))
        check(pst_offload_wait_load(store().offload, key));
    return tensor;
}

void Offload::forget_graphs() {
    if (!store_) return;
    take_back();
    for (const auto &[place, keys] : unused_)
        for (uint64_t key : keys)
            pst_offload_drop(store_->offload, key);
    unused_.clear();
    coming_.clear();
    stored_.clear();
}

// ---- shards -------------------------------------------------------------------------------------

at::Tensor Offload::bring(uint64_t key, const at::Tensor &host) {
    at::Tensor device = at::empty(
        host.sizes(),
        at::TensorOptions().dtype(host.scalar_type()).device(job_.ranks->runtime->where()));
    check(pst_offload_adopt(store().offload, key, host.const_data_ptr(), bytes_of(host)));
    load(key, device);
    return device;
}

void Offload::wait_for(uint64_t key) {
    check(pst_offload_wait_load(store().offload, key));
}

// ---- freeing ------------------------------------------------------------------------------------

// Their memory is the compute stream's, and so is whoever gets it next.
void Offload::free_tensors(const std::vector<at::Tensor> &tensors) const {
    for (const at::Tensor &tensor : tensors)
        if (tensor.numel() > job_.config.free_activation_threshold)
            tensor.set_data(at::empty({0}, tensor.options()));
}

} // namespace penstock::dc
