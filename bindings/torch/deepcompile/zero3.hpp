// ZeRO-3: parameters are flat shards, gathered before use, released after the last one, their
// gradients reduced into flat shards. A thin layer over pst_flat that knows tensors and graphs.
#pragma once

#include "gathered.hpp"
#include "segments.hpp"
#include "stage.hpp"

#include <penstock/flat.h>

#include <c10/core/ScalarType.h>

#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace penstock::dc {

struct Job;
class Offload;

class Zero3 : public Stage {
  public:
    Zero3(Job &job, Offload &offload);
    ~Zero3() override;

    // shard: ceil(elements / ranks) elements, padded; where the ranks train, or on the host.
    // grad_buffer: as long, or empty (frozen); it is zeroed.
    void register_parameter(int64_t id, std::vector<int64_t> shape, at::Tensor shard,
                            at::Tensor grad_buffer, bool persistent,
                            std::optional<at::ScalarType> expected_grad_dtype);
    bool has(int64_t id) const {
        return by_id_.count(id) != 0;
    }
    // What it held counts no more: the next gradient is written, not added.
    void update_grad_buffer(int64_t id, const at::Tensor &grad_buffer);
    // Gathers it at once.
    void set_persistent(int64_t id);
    void invalidate(int64_t id); // its gathered copies; not a persistent one's
    void clear_gathered();       // as invalidate, for all
    void step_ends();            // if an update was due, the shards have new values
    // All shards may have new values that torch has not counted, and may lie elsewhere. All ranks
    // call it alike, and agree on it.
    void shards_written();
    // A shard on the host is gathered from a copy where the ranks train, until it is dropped: what
    // is newer is always the host's. Without a reload the next gather makes the copy, if need be.
    void reload(int64_t id);
    void drop(int64_t id);
    // What a gathered parameter looks like.
    at::Tensor describe(int64_t id, std::optional<at::ScalarType> dtype) const;
    pst_flat_stats stats() const;

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
    // A parameter gathered in one dtype.
    struct Copy {
        uint32_t index = 0; // in pst_flat
        Gathered gathered;
        bool was_used = false;
        at::Tensor profiled; // gathered while profiling, until it is released or forgotten
    };
    struct Parameter {
        int64_t id = 0;
        uint32_t index = 0; // in pst_flat
        std::vector<int64_t> shape;
        size_t elements = 0;
        at::Tensor registered, grad_buffer;
        at::Tensor shard; // what is gathered: `registered`, or its copy, or nothing
        uint64_t key = 0; // under which it is copied
        bool is_copied = false, is_coming = false; // `shard` is a copy; compute has not waited
        uint32_t copied_version = 0;               // of `registered`
        bool is_newer = false;                     // than the copy, or may be
        void *address = nullptr;                   // of the shard, as it was bound
        uint32_t version = 0;
        bool persistent = false;
        std::optional<at::ScalarType> grad_dtype;
        std::map<at::ScalarType, Copy> copies;
        std::optional<at::ScalarType> last_used;
    };
    // What a graph does with a parameter.
    struct Use {
        std::vector<Copy *> copies; // that it has gathered and not released
        int64_t users_left = 0;     // 0: known from the first release on
    };
    using Uses = std::unordered_map<int64_t, std::unordered_map<int64_t, Use>>;

    pst_flat *flat();
    void open();
    void bind_all();
    void bind(Parameter &parameter, bool has_home);
    void look_at(Parameter &parameter);
    void check_grad_buffer(int64_t id, const at::Tensor &grad_buffer, int64_t chunk) const;
    void set_grad_buffer(Parameter &parameter, const at::Tensor &grad_buffer);
    bool is_whole(const Parameter &parameter) const;
    bool can_be_bound(const Parameter &parameter) const;
    bool is_away(const Parameter &parameter) const; // from where the ranks train
    void bring(Parameter &parameter);
    bool homes_are_alike() const;
    void move_homes();
    at::TensorOptions options_of(at::ScalarType dtype) const;
    Parameter &parameter_of(int64_t id);
    const Parameter &parameter_of(int64_t id) const;
    Copy &copy_of(Parameter &parameter, at::ScalarType dtype);
    size_t bytes_of(const Parameter &parameter, at::ScalarType dtype) const;
    at::Tensor gather_profiled(Parameter &parameter, Copy &copy, at::ScalarType dtype);
    void make_resident(Parameter &parameter, Copy &copy);
    void release_profiled(Parameter &parameter);
    void end_use(const Parameter &parameter, Copy &copy);
    void end_uses(std::unordered_map<int64_t, Use> &uses);
    void check(pst_status status) const;

    Job &job_;
    Offload &offload_;
    std::unique_ptr<Segments> segments_;
    std::vector<c10::Storage> homes_; // opened to the peers: they live as long as `flat_`
    pst_flat *flat_ = nullptr;
    bool bound_ = false;
    std::vector<std::unique_ptr<Parameter>> parameters_; // in the order of registration
    std::unordered_map<int64_t, Parameter *> by_id_;
    Uses uses_, profiled_uses_; // by graph and parameter
    bool update_ = false;       // the optimizer steps after the backward that began last
};

} // namespace penstock::dc
