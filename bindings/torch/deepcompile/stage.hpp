// What the operators of a backward call: each ZeRO stage has its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace penstock::dc {

class Stage {
  public:
    virtual ~Stage() = default;
    // A graph that a recompile replaced may come again under the same id.
    virtual void register_graph(int64_t graph, const std::vector<int64_t> &ids) = 0;
    // Graphs are forgotten; parameters, gathered ones too, stay.
    virtual void forget_graphs() = 0;
    // A backward begins; `update`: the optimizer steps after it.
    virtual void start_backward(bool update) = 0;
    virtual void reduce_grad(const at::Tensor &grad, int64_t graph, int64_t id) = 0;
    virtual void end_backward(int64_t graph, bool release_reduce_buckets) = 0;
};

} // namespace penstock::dc
