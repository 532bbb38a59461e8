// ZeRO-1 and 2: parameters are whole, their gradients reduced into flat partitions.
#pragma once

#include "segments.hpp"
#include "stage.hpp"

#include <penstock/partition.h>

#include <memory>
#include <unordered_map>
#include <vector>

namespace penstock::dc {

struct Job;

// What has gradients is known by parameter and not by graph: a parameter may be in several graphs
// of a backward, and a recompile may replace them between two backwards.
class Zero12 : public Stage {
  public:
    explicit Zero12(Job &job) : job_(job) {}
    ~Zero12() override;
    Zero12(const Zero12 &) = delete;
    Zero12 &operator=(const Zero12 &) = delete;

    // The stage of the graphs registered from now on; one a context.
    void set_stage(int stage);
    // grad_buffer: what this rank owns of the gradient, from element `offset` on, becomes zero;
    // empty: nothing is bound.
    void register_parameter(int64_t id, const std::vector<int64_t> &shape, at::Tensor grad_buffer,
                            int64_t offset);
    void update_grad_buffer(int64_t id, at::Tensor grad_buffer, int64_t offset);

    void register_graph(int64_t graph, const std::vector<int64_t> &ids) override;
    void forget_graphs() override {}
    void start_backward(bool update) override;
    void reduce_grad(const at::Tensor &grad, int64_t graph, int64_t id) override;
    void end_backward(int64_t graph, bool release_reduce_buckets) override;

    // Memory that the reductions hold now.
    size_t bucket_bytes() const;

  private:
    struct Parameter {
        uint32_t index = 0; // in the partition
        int64_t elements = 0;
        at::Tensor grad_buffer;
        // Stage 1: the sum of this rank's own gradients since the last update.
        at::Tensor sum;
        bool sum_is_ours = false; // may be added to in place
    };

    void open();
    Parameter &parameter(int64_t id);
    void bind(Parameter &parameter, at::Tensor grad_buffer, int64_t offset);
    at::Tensor add_up(Parameter &parameter, const at::Tensor &grad);
    void send(const Parameter &parameter, const at::Tensor &grad);
    void send_held();
    bool ends_with_autograd();
    void finish(bool release);
    void check(pst_status status) const;

    Job &job_;
    int stage_ = 0;
    bool updates_ = true;                // this backward is the last one before an update
    std::unique_ptr<Segments> segments_; // of buckets; ordinary memory, unless peers read it
    pst_partition *partition_ = nullptr;
    std::unordered_map<int64_t, Parameter> parameters_;
    bool has_reduced_ = false; // since the last finish
    // For autograd's callback, which may come after this is gone: points to this, or to nothing.
    std::shared_ptr<Zero12 *> self_ = std::make_shared<Zero12 *>(this);
    bool is_queued_ = false;
};

} // namespace penstock::dc
