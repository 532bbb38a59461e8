// Activations and parameters that leave the device and come back; activations freed early.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace penstock::dc {

class Context;

class Offload {
  public:
    explicit Offload(Context &context) : context_(context) {}

    // Activations: `id` is unique within its graph.
    at::Tensor offload(const at::Tensor &tensor, int64_t graph, int64_t id);
    at::Tensor wait_offload(const at::Tensor &tensor, int64_t graph, int64_t id);
    at::Tensor reload(const at::Tensor &tensor, int64_t graph, int64_t id);
    at::Tensor wait_reload(const at::Tensor &tensor, int64_t graph, int64_t id);
    void offload_parameter(const at::Tensor &tensor, int64_t graph, int64_t id);
    void reload_parameter(const at::Tensor &tensor, int64_t graph, int64_t id);
    // Those above the threshold lose their memory behind the compute stream's work so far.
    void free_tensors(const std::vector<at::Tensor> &tensors);

  private:
    Context &context_;
};

} // namespace penstock::dc
