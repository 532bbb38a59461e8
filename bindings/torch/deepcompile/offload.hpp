// Activations that leave the device and come back, or are freed early; shards that lie on the host.
#pragma once

#include "runtime.hpp"

#include <penstock/offload.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace penstock::dc {

struct Job;

// An activation's host memory is known by its address, since a graph that runs twice before its
// backward has two of each; when the tensor on it dies it waits for the next of its (graph, id),
// until the graphs are forgotten, so that each step finds it again.
class Offload {
  public:
    explicit Offload(Job &job) : job_(job) {}

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
    using Place = std::pair<int64_t, int64_t>; // graph and id
    using Keys = std::map<Place, std::vector<uint64_t>>;
    struct Returned {
        const void *memory;
        uint64_t key;
    };
    struct Stored {
        Place place;
        uint64_t key;
    };
    // What copies. Tensors on its host memory keep it alive, in a child of fork, too.
    struct Store {
        explicit Store(std::shared_ptr<Runtime> runtime);
        ~Store();
        Store(const Store &) = delete;
        Store &operator=(const Store &) = delete;

        const std::shared_ptr<Runtime> runtime;
        pst_offload *offload = nullptr;
        std::mutex lock; // of what follows: tensors die on any thread
        std::vector<Returned> returned;
    };

    Store &store();
    uint64_t key_of(const at::Tensor &host, Place place) const;
    uint64_t take_key(Place place);
    void load(uint64_t key, const at::Tensor &device);
    void take_back();
    at::Tensor host_view(uint64_t key, Place place, const at::Tensor &like);
    void check(pst_status status) const;
    bool is_pinned() const;

    Job &job_;
    std::shared_ptr<Store> store_;
    std::unordered_map<const void *, Stored> stored_; // by address: what tensors are on
    Keys unused_;
    Keys coming_; // reloaded, and not waited for
    uint64_t last_key_ = 0;
};

} // namespace penstock::dc
