#include "adamw.hpp"

#include "dtype.hpp"
#include "outside_python.hpp"

#include <penstock/cuda.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <system_error>
#include <thread>

namespace penstock {
namespace {

// Elements that a thread takes at a time.
constexpr size_t part_elements = 32768;
constexpr size_t parts_worth_a_thread = 16;

[[noreturn]] void refuse(pst_status status, size_t index, const std::string &what) {
    throw StatusError{status,
                      "AdamW: parameter " + std::to_string(index) + " of its group " + what};
}

void check_like(const at::Tensor &tensor, const at::Tensor &parameter, size_t index,
                const char *name) {
    if (tensor.device() != parameter.device() || tensor.sizes() != parameter.sizes() ||
        tensor.strides() != parameter.strides())
        refuse(PST_EINVAL, index,
               std::string("has ") + name +
                   " of another shape, layout or device: make it by torch.zeros_like(parameter)");
}

// As the parameter lies in memory; a gradient may lie otherwise.
at::Tensor laid_out(const at::Tensor &gradient, const at::Tensor &parameter, size_t index) {
    if (gradient.layout() != at::kStrided)
        refuse(PST_EUNSUPPORTED, index, "has a sparse gradient: use torch.optim.SparseAdam");
    if (gradient.strides() == parameter.strides()) return gradient;
    return at::empty_like(parameter, gradient.options()).copy_(gradient);
}

const float *address_of(const std::optional<at::Tensor> &tensor, const at::Device &device,
                        const char *name) {
    if (!tensor) return nullptr;
    if (tensor->device() != device || tensor->scalar_type() != at::kFloat || tensor->numel() != 1)
        throw StatusError{PST_EINVAL, std::string("AdamW: ") + name +
                                          " has to be one float32 number on " + device.str()};
    return tensor->const_data_ptr<float>();
}

void *written(const at::Tensor &tensor) {
    tensor.unsafeGetTensorImpl()->bump_version();
    return tensor.mutable_data_ptr();
}

pst_adamw_piece piece_of(AdamWTensors &from, size_t i) {
    const at::Tensor &parameter = from.parameters[i];
    if (!parameter.is_non_overlapping_and_dense())
        refuse(PST_EUNSUPPORTED, i, "has elements apart from each other: make it contiguous");
    check_like(from.exp_avgs[i], parameter, i, "exp_avg");
    check_like(from.exp_avg_sqs[i], parameter, i, "exp_avg_sq");
    if (from.exp_avgs[i].scalar_type() != from.exp_avg_sqs[i].scalar_type())
        refuse(PST_EINVAL, i, "has exp_avg and exp_avg_sq of two dtypes: give them one");
    pst_adamw_piece piece{};
    piece.parameter = written(parameter);
    piece.exp_avg = written(from.exp_avgs[i]);
    piece.exp_avg_sq = written(from.exp_avg_sqs[i]);
    piece.count = static_cast<size_t>(parameter.numel());
    piece.first = from.firsts[i];
    piece.parameter_dtype = dtype_of(parameter.scalar_type());
    piece.moment_dtype = dtype_of(from.exp_avgs[i].scalar_type());
    piece.rounds_randomly = from.rounds_randomly ? 1 : 0;
    if (!from.gradients.empty()) {
        from.gradients[i] = laid_out(from.gradients[i], parameter, i);
        piece.gradient = from.gradients[i].const_data_ptr();
        piece.gradient_dtype = dtype_of(from.gradients[i].scalar_type());
    }
    if (!from.largest.empty()) {
        check_like(from.largest[i], parameter, i, "max_exp_avg_sq");
        if (from.largest[i].scalar_type() != from.exp_avgs[i].scalar_type())
            refuse(PST_EINVAL, i,
                   "has max_exp_avg_sq of another dtype than exp_avg: give them one");
        piece.max_exp_avg_sq = written(from.largest[i]);
    }
    if (!from.copies.empty()) {
        check_like(from.copies[i], parameter, i, "the parameter of a master");
        piece.copy = written(from.copies[i]);
        piece.copy_dtype = dtype_of(from.copies[i].scalar_type());
    }
    return piece;
}

std::vector<pst_adamw_piece> pieces_of(AdamWTensors &from) {
    std::vector<pst_adamw_piece> pieces;
    for (size_t i = 0; i < from.parameters.size(); i++)
        pieces.push_back(piece_of(from, i));
    return pieces;
}

// Parts that threads may take, none of them large.
std::vector<pst_adamw_piece> divided(const std::vector<pst_adamw_piece> &pieces) {
    std::vector<pst_adamw_piece> parts;
    for (const pst_adamw_piece &piece : pieces) {
        for (size_t begin = 0; begin < piece.count; begin += part_elements) {
            pst_adamw_piece part = piece;
            const auto moved = [begin](auto *memory, pst_dtype dtype) {
                using Byte =
                    std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(memory)>>,
                                       const char, char>;
                return memory == nullptr
                           ? memory
                           : static_cast<Byte *>(memory) + begin * pst_dtype_size(dtype);
            };
            part.parameter = moved(piece.parameter, piece.parameter_dtype);
            part.gradient = moved(piece.gradient, piece.gradient_dtype);
            part.exp_avg = moved(piece.exp_avg, piece.moment_dtype);
            part.exp_avg_sq = moved(piece.exp_avg_sq, piece.moment_dtype);
            part.max_exp_avg_sq = moved(piece.max_exp_avg_sq, piece.moment_dtype);
            part.copy = moved(piece.copy, piece.copy_dtype);
            part.count = std::min(part_elements, piece.count - begin);
            part.first = piece.first + begin;
            parts.push_back(part);
        }
    }
    return parts;
}

} // namespace

// ---- life -------------------------------------------------------------------------------------

AdamW::AdamW(at::Device device) : where_(device) {
    const pst_status status = pst_runtime_create(nullptr, &runtime_);
    if (status != PST_OK)
        throw StatusError{status, std::string("no runtime: ") + pst_status_text(status)};
    if (!device.is_cuda()) return;
    pst_cuda_options options{};
    options.size = sizeof options;
    options.ordinal = device.index();
    const pst_status opened = pst_cuda_device_create(runtime_, &options, &device_);
    if (opened == PST_OK) return;
    const std::string text = runtime_error_text(runtime_);
    pst_runtime_destroy(runtime_);
    throw StatusError{opened, text};
}

AdamW::~AdamW() {
    for (const auto &[native, stream] : streams_)
        device_->ops->stream_destroy(device_, stream);
    pst_runtime_destroy(runtime_);
    if (device_ != nullptr) device_->ops->destroy(device_);
}

void AdamW::check(pst_status status) const {
    if (status != PST_OK) throw StatusError{status, runtime_error_text(runtime_)};
}

pst_stream *AdamW::stream_of(uintptr_t native) {
    if (device_ == nullptr) return nullptr;
    pst_stream *&found = streams_[native];
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python hands over native streams as numbers
    if (found == nullptr)
        check(device_->ops->stream_wrap(device_, reinterpret_cast<void *>(native), &found));
    return found;
}

// ---- a step -----------------------------------------------------------------------------------

at::Tensor AdamW::prepare(pst_stream *stream, const AdamWSettings &given,
                          const AdamWTensors &tensors, std::vector<pst_adamw_piece> &pieces) {
    pst_adamw_settings settings{};
    settings.lr = given.lr;
    settings.beta1 = given.beta1;
    settings.beta2 = given.beta2;
    settings.eps = given.eps;
    settings.weight_decay = given.weight_decay;
    settings.maximize = given.maximize ? 1 : 0;
    settings.seed = given.seed;
    settings.lr_at = address_of(given.lr_at, where_, "the learning rate");
    settings.gradient_scale = address_of(given.gradient_scale, where_, "grad_scale");
    settings.gradient_factor = address_of(given.gradient_factor, where_, "the clipping's factor");
    settings.found_inf = address_of(given.found_inf, where_, "found_inf");
    std::vector<float *> steps;
    for (const at::Tensor &step : tensors.steps) {
        (void)address_of(step, where_, "a parameter's step");
        steps.push_back(static_cast<float *>(written(step)));
    }
    const auto bytes = static_cast<int64_t>(steps.size() * PST_ADAMW_COEFFICIENTS_BYTES);
    at::Tensor coefficients = at::empty({bytes}, at::TensorOptions(where_).dtype(at::kByte));
    check(pst_adamw_prepare(runtime_, device_, stream, &settings, steps.data(), steps.size(),
                            coefficients.mutable_data_ptr()));
    for (size_t i = 0; i < pieces.size(); i++)
        pieces[i].coefficients = static_cast<const char *>(coefficients.const_data_ptr()) +
                                 i * PST_ADAMW_COEFFICIENTS_BYTES;
    return coefficients;
}

// Torch's own threads are OpenMP's, which only code that is compiled for it can use, and a second
// copy of its library would be in their way. Starting some costs little beside a large update.
void AdamW::update_on_cpu(const std::vector<pst_adamw_piece> &pieces) {
    const std::vector<pst_adamw_piece> parts = divided(pieces);
    const auto wanted = static_cast<size_t>(std::max(at::get_num_threads(), 1));
    const size_t count = std::min(wanted, parts.size() / parts_worth_a_thread + 1);
    std::atomic<size_t> next{0};
    std::atomic<pst_status> worst{PST_OK};
    const auto work = [&] {
        for (size_t i = next++; i < parts.size(); i = next++) {
            const pst_status status = pst_adamw(runtime_, nullptr, nullptr, &parts[i], 1);
            if (status != PST_OK) worst = status;
        }
    };
    std::vector<std::thread> threads;
    try {
        while (threads.size() + 1 < count)
            threads.emplace_back(work);
    } catch (const std::system_error &) { // there are no more: those that are there do it
    }
    work();
    for (std::thread &thread : threads)
        thread.join();
    check(worst);
}

void AdamW::step(uintptr_t native, const AdamWSettings &settings, AdamWTensors tensors) {
    const RealTensors real;
    std::vector<pst_adamw_piece> pieces = pieces_of(tensors);
    pst_stream *stream = stream_of(native);
    const at::Tensor coefficients = prepare(stream, settings, tensors, pieces);
    if (device_ == nullptr)
        update_on_cpu(pieces);
    else
        check(pst_adamw(runtime_, device_, stream, pieces.data(), pieces.size()));
}

std::shared_ptr<AdamWUpdates> AdamW::prepare_updates(uintptr_t native,
                                                     const AdamWSettings &settings,
                                                     AdamWTensors tensors,
                                                     std::vector<uint32_t> parameters) {
    const RealTensors real;
    auto updates = std::make_shared<AdamWUpdates>();
    updates->pieces = pieces_of(tensors);
    updates->coefficients = prepare(stream_of(native), settings, tensors, updates->pieces);
    updates->tensors = std::move(tensors);
    updates->parameters = std::move(parameters);
    return updates;
}

} // namespace penstock
