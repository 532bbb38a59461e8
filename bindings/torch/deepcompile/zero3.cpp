#include "zero3.hpp"

#include "dtype.hpp"
#include "job.hpp"
#include "offload.hpp"
#include "outside_python.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>

namespace penstock::dc {
namespace {

constexpr size_t mebibyte = size_t{1} << 20;
constexpr size_t ahead_bytes = 512 * mebibyte, fuse_bytes = 256 * mebibyte;
constexpr size_t most_bucket_bytes = 128 * mebibyte;
constexpr size_t least_moved_bytes = 16 * mebibyte;

std::string name_of(int64_t id) {
    return "parameter " + std::to_string(id);
}

[[noreturn]] void refuse(int64_t id, const std::string &why) {
    throw StatusError{PST_EINVAL, name_of(id) + ": " + why};
}

char *begin_of(const at::Tensor &tensor) {
    return static_cast<char *>(tensor.storage().mutable_data());
}

uint32_t version_of(const at::Tensor &tensor) {
    return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

} // namespace

// ---- life ---------------------------------------------------------------------------------------

Zero3::Zero3(Job &job, Offload &offload) : job_(job), offload_(offload) {}

Zero3::~Zero3() {
    pst_flat_destroy(flat_);
}

void Zero3::check(pst_status status) const {
    job_.ranks->check(status);
}

// The first parameter makes the engine: all ranks are here.
void Zero3::open() {
    Ranks &ranks = *job_.ranks;
    const Config &config = job_.config;
    const Comms &comms = ranks.comms(config.symmetric_memory ? "ce" : "auto");
    pst_flat_options options{};
    options.size = sizeof options;
    options.name = "deepcompile";
    options.gather_comm = comms.gather();
    options.reduce_comm = comms.reduce();
    options.device = ranks.runtime->device();
    options.compute = ranks.runtime->compute();
    options.ahead_bytes = ahead_bytes;
    options.fuse_bytes = fuse_bytes;
    options.bucket_bytes =
        std::clamp<size_t>(static_cast<size_t>(std::max<int64_t>(config.bucket_elements, 1)) * 2,
                           512, most_bucket_bytes);
    options.single_buffer = !config.double_buffer;
    options.consumed = drop_tensor;
    segments_ = std::make_unique<Segments>(ranks.segments);
    if (*segments_) {
        options.segment_alloc = Segments::alloc;
        options.segment_free = Segments::free;
        options.segment_context = segments_.get();
    }
    check(pst_flat_create(ranks.runtime->get(), &options, &flat_));
}

pst_flat *Zero3::flat() {
    if (flat_ == nullptr)
        throw StatusError{PST_ESTATE, "no ZeRO-3 parameters: call register_z3_param first"};
    if (!bound_) bind_all();
    return flat_;
}

pst_flat_stats Zero3::stats() const {
    pst_flat_stats stats{};
    stats.size = sizeof stats;
    if (flat_ != nullptr) pst_flat_get_stats(flat_, &stats);
    return stats;
}

// ---- parameters ---------------------------------------------------------------------------------

void Zero3::check_grad_buffer(int64_t id, const at::Tensor &grad_buffer, int64_t chunk) const {
    const at::Device where = job_.ranks->runtime->where();
    if (grad_buffer.numel() != chunk || !grad_buffer.is_contiguous())
        refuse(id, "its grad_buffer has " + std::to_string(grad_buffer.numel()) +
                       " elements instead of " + std::to_string(chunk) + ", or is not contiguous");
    if (grad_buffer.device() != where)
        refuse(id, "its grad_buffer is on " + grad_buffer.device().str() + " instead of " +
                       where.str());
}

void Zero3::set_grad_buffer(Parameter &parameter, const at::Tensor &grad_buffer) {
    parameter.grad_buffer = grad_buffer.detach();
    check(pst_flat_bind_gradient(flat_, parameter.index, parameter.grad_buffer.mutable_data_ptr(),
                                 dtype_of(parameter.grad_buffer.scalar_type())));
}

void Zero3::register_parameter(int64_t id, std::vector<int64_t> shape, at::Tensor shard,
                               at::Tensor grad_buffer, bool persistent,
                               std::optional<at::ScalarType> expected_grad_dtype) {
    const auto elements = static_cast<size_t>(c10::multiply_integers(shape));
    const auto ranks = static_cast<size_t>(job_.ranks->size);
    const auto chunk = static_cast<int64_t>((elements + ranks - 1) / ranks);
    if (shard.numel() != chunk || !shard.is_contiguous())
        refuse(id, "its shard has " + std::to_string(shard.numel()) + " elements instead of " +
                       std::to_string(chunk) + ", or is not contiguous");
    const bool is_trainable = grad_buffer.defined() && grad_buffer.numel() != 0;
    if (is_trainable) check_grad_buffer(id, grad_buffer, chunk);
    const at::Device where = job_.ranks->runtime->where();
    if (shard.device() != where && !shard.is_cpu())
        refuse(id, "its shard is on " + shard.device().str() + ", neither on the host nor on " +
                       where.str());
    if (by_id_.count(id) != 0) refuse(id, "is registered already");
    if (flat_ == nullptr) open();
    auto parameter = std::make_unique<Parameter>();
    parameter->id = id;
    parameter->shape = std::move(shape);
    parameter->elements = elements;
    parameter->registered = std::move(shard);
    if (!is_away(*parameter)) parameter->shard = parameter->registered;
    parameter->persistent = persistent;
    parameter->grad_dtype = expected_grad_dtype;
    check(pst_flat_add(flat_, name_of(id).c_str(), elements, &parameter->index));
    if (is_trainable) {
        set_grad_buffer(*parameter, grad_buffer);
        parameter->grad_buffer.zero_();
    }
    by_id_[id] = parameter.get();
    parameters_.push_back(std::move(parameter));
    bound_ = false;
}

void Zero3::update_grad_buffer(int64_t id, const at::Tensor &grad_buffer) {
    Parameter &parameter = parameter_of(id);
    const at::Tensor &before = parameter.grad_buffer;
    if (before.defined() && before.data_ptr() == grad_buffer.data_ptr()) return;
    check_grad_buffer(id, grad_buffer, parameter.registered.numel());
    set_grad_buffer(parameter, grad_buffer);
}

void Zero3::bind(Parameter &parameter, bool has_home) {
    const at::Tensor &shard = parameter.shard;
    parameter.address = shard.mutable_data_ptr();
    parameter.version = version_of(shard);
    check(pst_flat_bind(flat_, parameter.index, parameter.address,
                        has_home ? begin_of(shard) : parameter.address,
                        dtype_of(shard.scalar_type())));
}

// Shards are pieces of larger memory, and what lies there alike on all ranks can be gathered
// together.
bool Zero3::homes_are_alike() const {
    uint64_t hash = parameters_.size();
    const auto add = [&hash](uint64_t value) {
        hash = (hash ^ (value + 0x9e3779b97f4a7c15u)) * 1099511628211u;
    };
    std::map<const void *, uint64_t> homes; // numbered as they come
    for (const auto &parameter : parameters_) {
        const c10::Storage &home = parameter->registered.storage();
        add(homes.emplace(home.unsafeGetStorageImpl(), homes.size()).first->second);
        add(home.nbytes());
        add(static_cast<uint64_t>(parameter->registered.storage_offset()));
    }
    return job_.ranks->is_equal_everywhere(hash);
}

// Where peers read memory by themselves, the shards are to lie where peers can: then no copy of
// them is needed for it. Small ones are not worth a piece of mapped memory, nor is what somebody
// moves again.
void Zero3::move_homes() {
    Ranks &ranks = *job_.ranks;
    if (!ranks.segments || !ranks.are_read_by_peers() || !homes_.empty()) return;
    std::set<const void *> seen;
    for (const auto &parameter : parameters_) {
        if (is_away(*parameter)) continue;
        c10::Storage home = parameter->registered.storage();
        const size_t bytes = home.nbytes();
        if (bytes < least_moved_bytes || !seen.insert(home.unsafeGetStorageImpl()).second) continue;
        move_memory(home, ranks.segments);
        check(pst_flat_open_memory(flat_, home.mutable_data(), bytes));
        homes_.push_back(std::move(home));
    }
}

void Zero3::bind_all() {
    const RealTensors real_tensors;
    const bool are_alike = homes_are_alike();
    if (are_alike) move_homes();
    for (const auto &parameter : parameters_)
        if (can_be_bound(*parameter)) bind(*parameter, are_alike);
    bound_ = true;
}

// Notices shards that torch has counted as changed, or that have moved; the ranks' programs are the
// same.
void Zero3::look_at(Parameter &parameter) {
    if (!is_whole(parameter))
        refuse(parameter.id, "its shard has " + std::to_string(parameter.registered.numel()) +
                                 " elements by now: it was registered with more");
    if (!parameter.registered.is_cpu())
        drop(parameter.id);
    else if (is_away(parameter) || parameter.is_copied)
        bring(parameter);
    if (parameter.is_coming) offload_.wait_for(parameter.key);
    parameter.is_coming = false;
    if (parameter.shard.data_ptr() != parameter.address)
        bind(parameter, false);
    else if (version_of(parameter.shard) != parameter.version)
        check(pst_flat_touched(flat_, parameter.index));
    parameter.version = version_of(parameter.shard);
}

Zero3::Parameter &Zero3::parameter_of(int64_t id) {
    const auto found = by_id_.find(id);
    if (found == by_id_.end()) refuse(id, "is not registered: call register_z3_param");
    return *found->second;
}

const Zero3::Parameter &Zero3::parameter_of(int64_t id) const {
    return const_cast<Zero3 *>(this)->parameter_of(id);
}

Zero3::Copy &Zero3::copy_of(Parameter &parameter, at::ScalarType dtype) {
    const auto found = parameter.copies.find(dtype);
    if (found != parameter.copies.end()) return found->second;
    uint32_t index = 0;
    check(pst_flat_copy(flat(), parameter.index, dtype_of(dtype), &index));
    const at::Device where = job_.ranks->runtime->where();
    Copy copy{index, Gathered(where, dtype), false, at::Tensor()};
    return parameter.copies.emplace(dtype, std::move(copy)).first->second;
}

size_t Zero3::bytes_of(const Parameter &parameter, at::ScalarType dtype) const {
    return static_cast<size_t>(parameter.registered.numel()) *
           static_cast<size_t>(job_.ranks->size) * c10::elementSize(dtype);
}

at::TensorOptions Zero3::options_of(at::ScalarType dtype) const {
    return at::TensorOptions().dtype(dtype).device(job_.ranks->runtime->where());
}

at::Tensor Zero3::describe(int64_t id, std::optional<at::ScalarType> dtype) const {
    const Parameter &parameter = parameter_of(id);
    const at::ScalarType wanted = dtype.value_or(parameter.registered.scalar_type());
    return at::empty(parameter.shape, options_of(wanted).device(at::kMeta));
}

// ---- shards on the host -------------------------------------------------------------------------

// Its owner may have taken its memory.
bool Zero3::is_whole(const Parameter &parameter) const {
    const auto elements = static_cast<int64_t>(parameter.elements);
    return parameter.registered.numel() * job_.ranks->size >= elements;
}

bool Zero3::is_away(const Parameter &parameter) const {
    return parameter.registered.device() != job_.ranks->runtime->where();
}

bool Zero3::can_be_bound(const Parameter &parameter) const {
    return parameter.shard.defined() && is_whole(parameter) &&
           (parameter.is_copied || !is_away(parameter));
}

// What the optimizer has written since the copy was made, or may have, is copied again.
void Zero3::bring(Parameter &parameter) {
    const uint32_t version = version_of(parameter.registered);
    if (parameter.is_copied && !parameter.is_newer && version == parameter.copied_version) return;
    drop(parameter.id);
    if (parameter.key == 0) parameter.key = offload_.new_key();
    parameter.shard = offload_.bring(parameter.key, parameter.registered);
    parameter.is_copied = parameter.is_coming = true;
    parameter.is_newer = false;
    parameter.copied_version = version;
}

void Zero3::reload(int64_t id) {
    Parameter &parameter = parameter_of(id);
    if (parameter.registered.is_cpu() && parameter.elements != 0) bring(parameter);
}

void Zero3::drop(int64_t id) {
    Parameter &parameter = parameter_of(id);
    if (!parameter.is_copied) return;
    if (parameter.is_coming) offload_.wait_for(parameter.key);
    check(pst_flat_unbind(flat(), parameter.index));
    parameter.is_copied = parameter.is_coming = false;
    parameter.address = nullptr;
    parameter.shard = is_away(parameter) ? at::Tensor() : parameter.registered;
}

// ---- gathering ----------------------------------------------------------------------------------

at::Tensor Zero3::gather(int64_t graph, int64_t id, std::optional<at::ScalarType> wanted) {
    Parameter &parameter = parameter_of(id);
    const at::ScalarType dtype = wanted.value_or(parameter.registered.scalar_type());
    if (parameter.elements == 0) return at::empty(parameter.shape, options_of(dtype));
    pst_flat *engine = flat();
    look_at(parameter);
    Copy &copy = copy_of(parameter, dtype);
    if (job_.profiling) {
        profiled_uses_[graph][id].users_left = 0;
        return gather_profiled(parameter, copy, dtype);
    }
    Use &use = uses_[graph][id];
    const bool is_again =
        std::find(use.copies.begin(), use.copies.end(), &copy) != use.copies.end();
    if (use.copies.empty() || is_again) use.users_left = 0; // whatever was broken off before
    if (is_again)
        check(pst_flat_release(engine, copy.index));
    else
        use.copies.push_back(&copy);
    if (parameter.persistent) make_resident(parameter, copy);
    void *memory = nullptr;
    const pst_status status = pst_flat_gather(engine, copy.index, &memory);
    if (status != PST_OK) use.copies.erase(std::find(use.copies.begin(), use.copies.end(), &copy));
    check(status);
    copy.was_used = true;
    parameter.last_used = dtype;
    copy.gathered.bind(memory, bytes_of(parameter, dtype));
    return copy.gathered.view(parameter.shape);
}

// Into ordinary memory of torch's, each time anew, so that its statistics and clocks see it.
at::Tensor Zero3::gather_profiled(Parameter &parameter, Copy &copy, at::ScalarType dtype) {
    const auto padded = parameter.registered.numel() * job_.ranks->size;
    copy.profiled = at::Tensor();
    at::Tensor whole = at::empty({padded}, options_of(dtype));
    if (!job_.dry) check(pst_flat_gather_to(flat(), copy.index, whole.mutable_data_ptr()));
    copy.profiled = whole;
    return whole.narrow(0, 0, static_cast<int64_t>(parameter.elements)).view(parameter.shape);
}

void Zero3::prefetch(int64_t, const std::vector<int64_t> &ids,
                     const std::optional<std::vector<at::ScalarType>> &dtypes) {
    if (job_.profiling) return;
    std::vector<uint32_t> copies;
    for (size_t i = 0; i < ids.size(); i++) {
        Parameter &parameter = parameter_of(ids[i]);
        if (parameter.elements == 0) continue;
        flat();
        look_at(parameter);
        // What a graph will ask for is what it asked for the last time.
        const at::ScalarType usual =
            parameter.last_used.value_or(parameter.registered.scalar_type());
        copies.push_back(copy_of(parameter, dtypes ? dtypes->at(i) : usual).index);
    }
    check(pst_flat_prefetch(flat(), copies.data(), copies.size()));
}

void Zero3::wait(int64_t graph, int64_t id) {
    if (job_.profiling) return; // it has waited
    const Parameter &parameter = parameter_of(id);
    if (parameter.elements == 0) return;
    const std::vector<Copy *> &copies = uses_[graph][id].copies;
    if (copies.empty())
        throw StatusError{PST_ESTATE, name_of(id) + " is waited for in graph " +
                                          std::to_string(graph) + ", which has not gathered it"};
    for (const Copy *copy : copies)
        check(pst_flat_wait(flat(), copy->index));
}

void Zero3::release(int64_t graph, int64_t id, int64_t users) {
    Parameter &parameter = parameter_of(id);
    Use &use = (job_.profiling ? profiled_uses_ : uses_)[graph][id];
    if (use.users_left <= 0) use.users_left = users;
    if (--use.users_left > 0) return;
    if (job_.profiling) return release_profiled(parameter);
    const std::vector<Copy *> copies = std::move(use.copies);
    use.copies.clear();
    for (Copy *copy : copies)
        end_use(parameter, *copy);
}

void Zero3::release_profiled(Parameter &parameter) {
    for (auto &[dtype, copy] : parameter.copies) {
        if (copy.profiled.defined() && !parameter.persistent)
            free_storage(*copy.profiled.storage().unsafeGetStorageImpl());
        copy.profiled = at::Tensor();
    }
}

void Zero3::end_use(const Parameter &parameter, Copy &copy) {
    check(pst_flat_release(flat(), copy.index));
    if (pst_flat_uses(flat(), copy.index) == 0 && !parameter.persistent) copy.gathered.clear();
}

// ---- persistent parameters ----------------------------------------------------------------------

// The copies that graphs use stay, and not the one that was only guessed at.
void Zero3::make_resident(Parameter &parameter, Copy &copy) {
    for (auto &[dtype, other] : parameter.copies)
        if (&other != &copy && !other.was_used) {
            check(pst_flat_set_resident(flat(), other.index, 0));
            other.gathered.clear();
        }
    check(pst_flat_set_resident(flat(), copy.index, 1));
}

void Zero3::set_persistent(int64_t id) {
    Parameter &parameter = parameter_of(id);
    parameter.persistent = true;
    if (parameter.elements == 0) return;
    flat();
    look_at(parameter);
    const at::ScalarType dtype = parameter.last_used.value_or(parameter.registered.scalar_type());
    Copy &copy = copy_of(parameter, dtype);
    check(pst_flat_set_resident(flat(), copy.index, 1));
    check(pst_flat_prefetch(flat(), &copy.index, 1));
}

void Zero3::invalidate(int64_t id) {
    Parameter &parameter = parameter_of(id);
    if (parameter.persistent) return;
    for (auto &[dtype, copy] : parameter.copies) {
        copy.profiled = at::Tensor();
        if (!job_.profiling) check(pst_flat_invalidate(flat(), copy.index));
    }
}

void Zero3::clear_gathered() {
    for (const auto &parameter : parameters_)
        invalidate(parameter->id);
}

// No use is meant to last beyond a step: its graph was broken off, and may never run again.
void Zero3::end_uses(std::unordered_map<int64_t, Use> &uses) {
    for (auto &[id, use] : uses)
        for (Copy *copy : std::exchange(use.copies, {}))
            end_use(parameter_of(id), *copy);
}

void Zero3::step_ends() {
    if (flat_ == nullptr || !update_) return;
    for (auto &[graph, uses] : uses_)
        end_uses(uses);
    check(pst_flat_updated(flat()));
    for (const auto &parameter : parameters_) {
        parameter->is_newer = true;
        if (parameter->shard.defined() && !parameter->is_copied && is_whole(*parameter))
            look_at(*parameter);
    }
}

// A rank may have had nothing to write, or may have got the same addresses again.
void Zero3::shards_written() {
    bool are_moved = false;
    for (const auto &parameter : parameters_) {
        parameter->is_newer = true;
        if (!bound_ || !can_be_bound(*parameter)) continue;
        are_moved |= parameter->shard.data_ptr() != parameter->address;
        parameter->version = version_of(parameter->shard);
        check(pst_flat_touched(flat_, parameter->index));
    }
    if (bound_) bound_ = job_.ranks->is_equal_everywhere(are_moved) && !are_moved;
}

// ---- graphs and backwards -----------------------------------------------------------------------

void Zero3::register_graph(int64_t graph, const std::vector<int64_t> &ids) {
    for (int64_t id : ids)
        parameter_of(id);
    end_uses(uses_[graph]);
    uses_[graph].clear();
}

void Zero3::forget_graphs() {
    uses_.clear();
    profiled_uses_.clear();
    if (flat_ == nullptr) return;
    check(pst_flat_end_uses(flat()));
    for (const auto &parameter : parameters_)
        for (auto &[dtype, copy] : parameter->copies)
            if (!parameter->persistent) copy.gathered.clear();
}

void Zero3::start_backward(bool update) {
    update_ = update;
    if (flat_ != nullptr) check(pst_flat_begin_backward(flat(), update));
}

void Zero3::reduce_grad(const at::Tensor &grad, int64_t, int64_t id) {
    const Parameter &parameter = parameter_of(id);
    if (static_cast<size_t>(grad.numel()) != parameter.elements)
        refuse(id, "its gradient has " + std::to_string(grad.numel()) + " elements instead of " +
                       std::to_string(parameter.elements));
    if (parameter.elements == 0) return;
    const at::ScalarType travels = parameter.grad_dtype.value_or(grad.scalar_type());
    auto source = std::make_unique<at::Tensor>(grad.detach().contiguous());
    pst_flat *engine = flat();
    const pst_dtype dtype = dtype_of(source->scalar_type()), sent = dtype_of(travels);
    const void *memory = source->const_data_ptr();
    check(pst_flat_reduce(engine, parameter.index, memory, dtype, sent, source.release()));
}

void Zero3::end_backward(int64_t, bool release_reduce_buckets) {
    for (const auto &parameter : parameters_)
        parameter->is_newer |= update_;
    if (!job_.profiling) check(pst_flat_end_backward(flat(), release_reduce_buckets));
}

} // namespace penstock::dc
