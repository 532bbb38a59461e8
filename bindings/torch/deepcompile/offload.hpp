// Activations that leave the device and come back, or are freed early; shards that lie on the host.
#pragma once

#include "runtime.hpp"

#include <penstock/offload.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace penstock::dc {

class Context;

// Host memory stays with an activation's (graph, id) until the graphs are forgotten, so that each
// step finds it again.
class Offload {
  public:
    explicit Offload(Context &context) : context_(context) {}

    // Returns the host memory as a tensor; its contents are there behind the copy. `id` is unique
    // within its graph.
    at::Tensor offload(const at::Tensor &tensor, int64_t graph, int64_t id);
    // The compute stream waits: after this the activation's memory may be written again, as
    // Inductor does at once.
    at::Tensor wait_offload(const at::Tensor &host, int64_t graph, int64_t id);
    // The copy back is like any tensor: its memory goes back after its last use.
    at::Tensor reload(const at::Tensor &host, int64_t graph, int64_t id);
    at::Tensor wait_reload(const at::Tensor &tensor, int64_t graph, int64_t id);
    // Copies a tensor on the host, which keeps its contents until `wait_for`, to where the ranks
    // train; after that compute may read the copy.
    at::Tensor bring(uint64_t key, const at::Tensor &host);
    void wait_for(uint64_t key);
    uint64_t new_key() {
        return ++last_key_;
    }
    // Those above the threshold lose their memory behind the compute stream's work so far.
    void free_tensors(const std::vector<at::Tensor> &tensors) const;
    void forget_graphs();

  private:
    // What copies. Tensors on its host memory keep it alive.
    struct Store {
        explicit Store(std::shared_ptr<Runtime> runtime);
        ~Store();
        Store(const Store &) = delete;
        Store &operator=(const Store &) = delete;

        const std::shared_ptr<Runtime> runtime;
        pst_offload *offload = nullptr;
    };
    struct Activation {
        uint64_t key = 0;
        at::Tensor host;
        bool is_reloaded = false; // in this step
    };

    Store &store();
    Activation &activation(int64_t graph, int64_t id);
    at::Tensor host_view(uint64_t key, const at::Tensor &like);
    void check(pst_status status) const;
    bool is_pinned() const;

    Context &context_;
    std::shared_ptr<Store> store_;
    std::map<std::pair<int64_t, int64_t>, Activation> activations_; // by graph and id
    uint64_t last_key_ = 0;
};

} // namespace penstock::dc
