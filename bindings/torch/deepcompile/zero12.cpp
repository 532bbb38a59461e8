#include "zero12.hpp"

#include "dtype.hpp"
#include "job.hpp"
#include "outside_python.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

namespace penstock::dc {
namespace {

// NCCL's all-reduce gains bandwidth up to here; more would only hold memory.
constexpr size_t most_all_reduce_bytes = size_t{256} << 20;

size_t bucket_limit(const Config &config) {
    if (config.bucket_elements <= 0) return most_all_reduce_bytes;
    const auto elements = static_cast<size_t>(config.bucket_elements);
    return std::min(elements, most_all_reduce_bytes / sizeof(float)) * sizeof(float);
}

bool is_in_autograd() {
    return torch::autograd::get_current_graph_task_id() != -1;
}

} // namespace

Zero12::~Zero12() {
    *self_ = nullptr;
    pst_partition_destroy(partition_);
}

void Zero12::check(pst_status status) const {
    job_.ranks->check(status);
}

void Zero12::open() {
    if (partition_ != nullptr) return;
    Ranks &ranks = *job_.ranks;
    pst_partition_options options{};
    options.size = sizeof options;
    options.name = "gradients";
    options.comm = ranks.comms(job_.config.symmetric_memory ? "ce" : "nccl").reduce();
    options.device = ranks.runtime->device();
    options.compute = ranks.runtime->compute();
    options.bucket_bytes = bucket_limit(job_.config);
    options.single_buffer = !job_.config.double_buffer;
    if (options.device != nullptr) {
        segments_ = std::make_unique<Segments>(
            ranks.are_read_by_peers() ? ranks.segments : segments_of(ranks.runtime->where()));
        options.segment_alloc = Segments::alloc;
        options.segment_free = Segments::free;
        options.segment_context = segments_.get();
        options.frees_in_compute_order = 1;
    }
    options.consumed = drop_tensor;
    check(pst_partition_create(ranks.runtime->get(), &options, &partition_));
}

void Zero12::set_stage(int stage) {
    if (stage_ != 0 && stage_ != stage)
        throw StatusError{PST_ESTATE, "graphs of ZeRO-" + std::to_string(stage_) +
                                          " are registered: a runtime has one stage"};
    stage_ = stage;
}

// ---- parameters ---------------------------------------------------------------------------------

Zero12::Parameter &Zero12::parameter(int64_t id) {
    const auto found = parameters_.find(id);
    if (found == parameters_.end())
        throw StatusError{PST_EINVAL, "parameter " + std::to_string(id) +
                                          " is not registered: call register_param"};
    return found->second;
}

void Zero12::register_parameter(int64_t id, const std::vector<int64_t> &shape,
                                at::Tensor grad_buffer, int64_t offset) {
    open();
    const int64_t elements = c10::multiply_integers(shape);
    const std::string name = "parameter " + std::to_string(id);
    const auto [entry, is_new] = parameters_.try_emplace(id);
    Parameter &parameter = entry->second;
    if (!is_new && parameter.elements != elements)
        throw StatusError{PST_EINVAL, name + " has " + std::to_string(parameter.elements) +
                                          " elements already and cannot have " +
                                          std::to_string(elements)};
    if (is_new) {
        const pst_status status = pst_partition_add(
            partition_, name.c_str(), static_cast<size_t>(elements), &parameter.index);
        if (status != PST_OK) parameters_.erase(entry);
        check(status);
        parameter.elements = elements;
    }
    bind(parameter, std::move(grad_buffer), offset);
}

void Zero12::update_grad_buffer(int64_t id, at::Tensor grad_buffer, int64_t offset) {
    bind(parameter(id), std::move(grad_buffer), offset);
}

void Zero12::bind(Parameter &parameter, at::Tensor grad_buffer, int64_t offset) {
    const bool is_empty = !grad_buffer.defined() || grad_buffer.numel() == 0;
    if (!is_empty && !grad_buffer.is_contiguous())
        throw StatusError{PST_EINVAL, "a gradient buffer has to be contiguous"};
    if (!is_empty) grad_buffer.zero_();
    check(pst_partition_bind(partition_, parameter.index,
                             is_empty ? nullptr : grad_buffer.data_ptr(),
                             is_empty ? PST_FLOAT32 : dtype_of(grad_buffer.scalar_type()),
                             is_empty ? 0 : static_cast<size_t>(offset),
                             is_empty ? 0 : static_cast<size_t>(grad_buffer.numel())));
    parameter.grad_buffer = is_empty ? at::Tensor() : std::move(grad_buffer);
}

void Zero12::register_graph(int64_t, const std::vector<int64_t> &ids) {
    for (const int64_t id : ids)
        parameter(id);
}

// ---- a backward ---------------------------------------------------------------------------------

void Zero12::start_backward(bool update) {
    if (partition_ == nullptr) return;
    updates_ = update;
    is_queued_ = has_reduced_ = false;
    check(pst_partition_begin_backward(partition_, update));
    if (stage_ == 1 && update) ends_with_autograd(); // graphs that reduce nothing have no end
}

// The first gradient is the graph's own, so the second makes a sum of ours.
at::Tensor Zero12::add_up(Parameter &parameter, const at::Tensor &grad) {
    if (!parameter.sum.defined()) {
        parameter.sum = grad;
        parameter.sum_is_ours = false;
    } else if (!parameter.sum_is_ours) {
        parameter.sum = at::add(parameter.sum, grad);
        parameter.sum_is_ours = true;
    } else {
        parameter.sum.add_(grad);
    }
    return parameter.sum;
}

void Zero12::send(const Parameter &parameter, const at::Tensor &grad) {
    const pst_dtype dtype = dtype_of(grad.scalar_type()); // or throws, while nothing is held
    auto *held = new at::Tensor(grad.contiguous());
    has_reduced_ = true;
    check(pst_partition_reduce(partition_, parameter.index, held->data_ptr(), dtype, held));
}

void Zero12::reduce_grad(const at::Tensor &grad, int64_t, int64_t id) {
    if (!grad.defined()) return;
    Parameter &parameter = this->parameter(id);
    if (grad.numel() != parameter.elements)
        throw StatusError{PST_EINVAL, "parameter " + std::to_string(id) + " has " +
                                          std::to_string(parameter.elements) +
                                          " elements, its gradient " +
                                          std::to_string(grad.numel())};
    if (stage_ == 1) {
        const at::Tensor sum = add_up(parameter, grad.detach());
        if (!updates_) return;
        parameter.sum.reset();
        send(parameter, sum);
    } else {
        send(parameter, grad.detach());
    }
    ends_with_autograd();
}

// Stage 1: what only backwards before the last one had. In one order on all ranks.
void Zero12::send_held() {
    std::vector<Parameter *> held;
    for (auto &[id, parameter] : parameters_)
        if (parameter.sum.defined()) held.push_back(&parameter);
    std::sort(held.begin(), held.end(),
              [](const Parameter *a, const Parameter *b) { return a->index < b->index; });
    for (Parameter *parameter : held) {
        const at::Tensor sum = std::move(parameter->sum);
        parameter->sum.reset();
        send(*parameter, sum);
    }
}

// Autograd's end is the end of the last graph, whichever that is; whether there is an autograd.
bool Zero12::ends_with_autograd() {
    if (!is_in_autograd()) return false;
    if (is_queued_) return true;
    const std::shared_ptr<Zero12 *> self = self_;
    torch::autograd::Engine::get_default_engine().queue_callback([self] {
        if (*self == nullptr) return;
        const WithoutInterpreter without;
        const StreamBridge bridge(*(*self)->job_.ranks);
        (*self)->is_queued_ = false;
        try {
            if ((*self)->updates_) (*self)->send_held();
            (*self)->finish(true);
        } catch (const StatusError &error) {
            TORCH_CHECK(false, "dc::end_backward: ", error.text, " (",
                        pst_status_name(error.status), ")");
        }
    });
    is_queued_ = true;
    return true;
}

void Zero12::finish(bool release) {
    if (!has_reduced_ && !release) return;
    has_reduced_ = false;
    check(pst_partition_end_backward(partition_, release));
}

// Between the graphs of one autograd pass gradients go on filling buckets.
void Zero12::end_backward(int64_t, bool release_reduce_buckets) {
    if (partition_ == nullptr || (stage_ == 1 && !updates_)) return;
    if (stage_ == 1 && !ends_with_autograd() && release_reduce_buckets) send_held();
    if (!release_reduce_buckets && has_reduced_ && ends_with_autograd()) return;
    finish(release_reduce_buckets);
}

size_t Zero12::bucket_bytes() const {
    pst_partition_stats stats{};
    stats.size = sizeof stats;
    if (partition_ != nullptr) pst_partition_get_stats(partition_, &stats);
    return stats.bucket_bytes;
}

} // namespace penstock::dc
