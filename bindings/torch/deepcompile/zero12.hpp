// ZeRO-1 and 2: parameters are whole, their gradients reduced into flat partitions.
#pragma once

#include "stage.hpp"

#include <vector>

namespace penstock::dc {

class Context;

class Zero12 : public Stage {
  public:
    explicit Zero12(Context &context) : context_(context) {}

    // Of the graphs registered from now on; one stage a context.
    void set_stage(int stage);
    void register_parameter(int64_t id, std::vector<int64_t> shape, at::Tensor parameter,
                            at::Tensor grad_buffer, int64_t offset);
    void update_grad_buffer(int64_t id, at::Tensor grad_buffer, int64_t offset);

    void register_graph(int64_t graph, const std::vector<int64_t> &ids) override;
    void forget_graphs() override;
    void start_backward(bool update) override;
    void reduce_grad(const at::Tensor &grad, int64_t graph, int64_t id) override;
    void end_backward(int64_t graph, bool release_reduce_buckets) override;

  private:
    Context &context_;
};

} // namespace penstock::dc
