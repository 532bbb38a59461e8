// ZeRO-3: parameters are flat shards, gathered before use, released after the last one, their
// gradients reduced into flat shards.
#pragma once

#include "stage.hpp"

#include <c10/core/ScalarType.h>

#include <optional>
#include <vector>

namespace penstock::dc {

class Context;

class Zero3 : public Stage {
  public:
    explicit Zero3(Context &context) : context_(context) {}

    // shard: ceil(elements / ranks) elements, padded. grad_buffer: as long, or empty (frozen).
    void register_parameter(int64_t id, std::vector<int64_t> shape, at::Tensor shard,
                            at::Tensor grad_buffer, bool persistent,
                            std::optional<at::ScalarType> expected_grad_dtype);
    void set_persistent(int64_t id);
    void invalidate(int64_t id); // its gathered copy; not a persistent one's
    void clear_gathered();       // as invalidate, for all
    // What a gathered parameter looks like.
    at::Tensor describe(int64_t id, std::optional<at::ScalarType> dtype) const;

    at::Tensor gather(int64_t graph, int64_t id, std::optional<at::ScalarType> dtype);
    void prefetch(int64_t graph, const std::vector<int64_t> &ids,
                  const std::optional<std::vector<at::ScalarType>> &dtypes);
    void wait(int64_t graph, int64_t id);
    void release(int64_t graph, int64_t id, int64_t users);

    void register_graph(int64_t graph, const std::vector<int64_t> &ids) override;
    void forget_graphs() override;
    void start_backward(bool update) override;
    void reduce_grad(const at::Tensor &grad, int64_t graph, int64_t id) override;
    void end_backward(int64_t graph, bool release_reduce_buckets) override;

  private:
    Context &context_;
};

} // namespace penstock::dc
