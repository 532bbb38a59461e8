// One ZeRO engine as Python sees it: a thin layer over pst_zero that knows tensors.
#pragma once

#include "comms.hpp"
#include "segments.hpp"

#include <penstock/zero.h>

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace penstock {

struct EngineOptions {
    std::string name;
    std::string communicator; // as Comms takes it
    int stage = 3;
    uint32_t prefetch_ahead = 0;
    size_t prefetch_bytes = 0, bucket_bytes = 0, part_bytes = 0;
    bool verify = true;
    bool time_waits = false;
};

using Operation = std::tuple<int, uint32_t, bool, size_t>; // kind, group, in backward, bytes

// Methods may be called without the interpreter's lock; one thread at a time.
class Engine {
  public:
    // Both groups, for this engine alone, or neither: then the world is this one process. Nodes as
    // Comms takes them.
    Engine(std::shared_ptr<Runtime> runtime, const EngineOptions &options,
           const std::optional<ProcessGroup> &gather, const std::optional<ProcessGroup> &reduce,
           const std::optional<Nodes> &nodes, SegmentMaker segments);
    ~Engine();
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;
    std::string communicator() const; // which kind serves
    std::string why_not_ce() const;   // as Comms has it
    Runtime &runtime() const {
        return *runtime_;
    }
    // Waits at most the deadline. A second call does nothing, and so does one in a child of fork.
    void destroy();

    uint32_t add_parameter(const std::string &name, size_t rows, size_t row_elements,
                           bool trainable);
    uint32_t add_group(const std::string &name, const std::vector<uint32_t> &parameters,
                       at::ScalarType dtype, at::ScalarType gather_dtype,
                       at::ScalarType reduce_dtype, bool forward_only);
    void seal();
    pst_group_layout group_layout(uint32_t group) const;
    pst_parameter_layout parameter_layout(uint32_t group, uint32_t parameter) const;
    // Memory for a flat shard of this group, not written yet: where peers read it, if there is such
    // a place. It outlives the engine.
    at::Tensor make_shard(uint32_t group);
    void bind_shard(uint32_t group, const at::Tensor &shard);
    // The tensors (one for each of the group's parameters, made by make_released_tensor) that show
    // the group while it is gathered, and what touching each raises while it is not.
    void attach(uint32_t group, std::vector<at::Tensor> tensors, std::vector<std::string> messages);

    void begin_forward(bool grad);
    void gather(uint32_t group);
    void wait(uint32_t group); // then the attached tensors have their memory
    void release(uint32_t group);
    void end_forward();
    void begin_backward(bool reduce);
    // The whole gradients of the group's parameters, or nothing; held until they are read. They
    // count in the widest of their dtypes.
    void gradients(uint32_t group, std::vector<std::optional<at::Tensor>> sources);
    // The flat gradient to add to in this backward; without it the backward makes a new one.
    void set_gradient(uint32_t group, at::Tensor flat);
    // The flat gradient that the last backward wrote, if any; the engine lets go of it.
    std::optional<at::Tensor> take_gradient(uint32_t group);
    void end_backward();
    bool has_gradient(uint32_t parameter) const;
    bool has_written(uint32_t group) const;
    void updated();

    std::vector<Operation> recorded(bool grad) const;
    pst_zero_plan compile(bool grad, const std::vector<Operation> &operations,
                          uint32_t prefetch_ahead, size_t prefetch_bytes);
    void set_replay(bool enabled);
    pst_zero_stats stats() const;
    void reset_stats();

  private:
    struct Group {
        std::vector<at::Tensor> tensors;
        std::vector<std::string> messages;
        std::vector<size_t> offsets; // of the tensors in the gathered group
        std::vector<uint32_t> parameters;
        at::Tensor shard;
        at::ScalarType dtype, gather_dtype;
        at::Tensor gradient;
        // By report, kept until the engine has read them.
        std::deque<std::vector<at::Tensor>> sources;
        int uses = 0;
    };

    pst_zero *engine() const;
    void check(pst_status status) const {
        runtime_->check(status);
    }
    void unbind(Group &group);
    static pst_status gradient_target(void *context, uint32_t group, void **memory,
                                      int *accumulate);
    static void gradients_consumed(void *context, uint32_t group);

    std::shared_ptr<Runtime> runtime_;
    const std::string name_;
    std::vector<ProcessGroup> held_; // in a child of fork, too, where their ends would wait
    std::unique_ptr<Comms> comms_;
    std::unique_ptr<Segments> segments_;
    pst_zero *engine_ = nullptr;
    std::vector<Group> groups_;
};

} // namespace penstock
