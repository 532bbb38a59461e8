// A step of AdamW over tensors.
#pragma once

#include "status.hpp"

#include <penstock/optim.h>

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace penstock {

// What the tensors of a step share, as Python has it.
struct AdamWSettings {
    double lr, beta1, beta2, eps, weight_decay;
    bool maximize;
    uint64_t seed;
    std::optional<at::Tensor> lr_at, gradient_scale, gradient_factor, found_inf; // on the device
};

// A parameter each; `largest` (of AMSGrad) and `copies` are empty or as long as the others.
struct AdamWTensors {
    std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, largest, copies, steps;
    std::vector<uint64_t> firsts; // the number of each one's first element
    bool rounds_randomly;
};

// What a backward updates its engine's parameters by.
struct AdamWUpdates {
    std::vector<uint32_t> parameters; // the engine's numbers
    std::vector<pst_adamw_piece> pieces;
    AdamWTensors tensors; // that the pieces point to
    at::Tensor coefficients;
};

// Updates tensors of one device. On the CPU by as many threads as torch uses, done on return; on a
// GPU on torch's current stream, which may be under capture. Any thread, one at a time.
class AdamW {
  public:
    explicit AdamW(at::Device device);
    ~AdamW();
    AdamW(const AdamW &) = delete;
    AdamW &operator=(const AdamW &) = delete;

    // `stream`: the native handle of the one that is current on a GPU.
    void step(uintptr_t stream, const AdamWSettings &settings, AdamWTensors tensors);
    // The same for a backward, which brings the gradients: counts the steps.
    std::shared_ptr<AdamWUpdates> prepare_updates(uintptr_t stream, const AdamWSettings &settings,
                                                  AdamWTensors tensors,
                                                  std::vector<uint32_t> parameters);

  private:
    void check(pst_status status) const;
    pst_stream *stream_of(uintptr_t native);
    at::Tensor prepare(pst_stream *stream, const AdamWSettings &settings,
                       const AdamWTensors &tensors, std::vector<pst_adamw_piece> &pieces);
    void update_on_cpu(const std::vector<pst_adamw_piece> &pieces);

    at::Device where_;
    pst_runtime *runtime_ = nullptr;
    pst_device *device_ = nullptr;              // NULL: the host's
    std::map<uintptr_t, pst_stream *> streams_; // borrowed ones, by native handle
};

} // namespace penstock
