// One ZeRO engine as Python sees it: a thin layer over pst_zero that knows tensors.
#pragma once

#include "adamw.hpp"
#include "comms.hpp"
#include "segments.hpp"

#include <penstock/zero.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
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
    bool shards_on_host = false;
    bool transient_copies = false;
    bool in_callers_order = false;
};

// Kind, group, in backward, bytes; nanoseconds: reached, waited, collective.
using Operation = std::tuple<int, uint32_t, bool, size_t, uint64_t, uint64_t, uint64_t>;

using Reduced = std::pair<std::optional<at::Tensor>, std::vector<at::Tensor>>;

// What a plan may take: prefetch_ahead, prefetch_bytes, keep_bytes.
using Budgets = std::tuple<uint32_t, size_t, size_t>;

// Operations that a plan is made of.
class Recording {
  public:
    explicit Recording(const std::vector<Operation> &taken);
    pst_zero_compile_options options(bool grad, const Budgets &budgets) const; // while this lives

  private:
    std::vector<pst_zero_op> operations_;
    std::vector<pst_zero_op_time> times_;
};

// What a recorded pass would take if its collectives took the times that they have in the
// recording: for that many bytes of each group, gathered and reduced, and whether a backward needs
// its values.
using GroupBytes = std::tuple<size_t, size_t, bool, bool>;
pst_zero_forecast predict(bool grad, int stage, const Recording &recording,
                          const std::vector<GroupBytes> &groups, const Budgets &budgets);

// Methods may be called without the interpreter's lock; one thread at a time.
class Engine {
  public:
    // Both groups, for this engine alone, or neither: then the world is this one process. Nodes and
    // replicas as Comms takes them.
    Engine(std::shared_ptr<Runtime> runtime, const EngineOptions &options,
           const std::optional<ProcessGroup> &gather, const std::optional<ProcessGroup> &reduce,
           const std::optional<Nodes> &nodes, const std::optional<ProcessGroup> &replicas,
           SegmentMaker segments);
    ~Engine();
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;
    std::string communicator() const; // which kind serves
    std::string why_not_ce() const;   // as Comms has it
    Runtime &runtime() const {
        return *runtime_;
    }
    // Calls a function of <penstock/zero.h> that takes numbers beside the engine.
    template <auto Function, typename... Numbers> auto call(Numbers... numbers) {
        using Result = decltype(Function(engine(), numbers...));
        if constexpr (std::is_same_v<Result, pst_status>)
            check(Function(engine(), numbers...));
        else if constexpr (std::is_same_v<Result, int>)
            return Function(engine(), numbers...) != 0;
        else
            Function(engine(), numbers...);
    }
    // Waits at most the deadline. A second call does nothing, and so does one in a child of fork.
    void destroy();

    uint32_t add_parameter(const std::string &name, size_t rows, size_t row_elements,
                           bool trainable);
    uint32_t add_group(const std::string &name, const std::vector<uint32_t> &parameters,
                       at::ScalarType dtype, at::ScalarType gather_dtype,
                       at::ScalarType reduce_dtype, bool forward_only, bool looked_up,
                       std::optional<at::ScalarType> used_dtype);
    pst_group_layout group_layout(uint32_t group) const;
    pst_parameter_layout parameter_layout(uint32_t group, uint32_t parameter) const;
    // Memory for a flat shard of this group, not written yet: on the host, if it is to be there; or
    // where peers read it, if there is such a place. It outlives the engine.
    at::Tensor make_shard(uint32_t group);
    void bind_shard(uint32_t group, const at::Tensor &shard);
    // The tensors (one for each of the group's parameters, made by make_released_tensor) that show
    // the group while it is gathered, whose .grad theirs are, and what touching each raises while
    // it is not gathered. Writes count to the wrappers, too, which wrap some of them.
    void attach(uint32_t group, const std::vector<at::Tensor> &tensors,
                const std::vector<at::Tensor> &leaves, const std::vector<std::string> &messages,
                std::vector<at::Tensor> wrappers);
    // Writes what is gathered of groups with a used_dtype: called with a group and the flat memory
    // for it, in its gather_dtype, in `begin_forward` or `use`, which throw what it throws.
    using Filler = std::function<void(uint32_t group, const at::Tensor &copy)>;
    void set_filler(Filler filler) {
        filler_ = std::move(filler);
    }
    // Groups that are used together: before a pass. The name is for errors.
    uint32_t add_unit(std::string name, std::vector<uint32_t> groups);

    void begin_forward(bool grad);

    // pst_zero_drain; what the latest backward has updated by is let go.
    void drain();
    // A use of a unit begins: all its groups are gathered, then waited for. True: it is the first
    // one, and the attached tensors have their memory from now on.
    // `rows`: of a unit whose only group is looked up, the numbers of those that this use reads, of
    // 64 bits and contiguous; left out: all of them.
    bool use(uint32_t unit, std::optional<at::Tensor> rows);
    // A use ends. True: it was the last one, and the tensors' memory is gone. Throws PST_ESTATE,
    // behind all of this, where refuse_written would.
    bool done(uint32_t unit);
    // Throws PST_ESTATE for the first unit whose attached tensors were written since its use began,
    // or have got another storage, as by `.data = ...`: shards know of neither.
    void refuse_written();
    // Has the backward, which has begun, update behind their reductions groups that it may, and all
    // of whose parameters are among the updates.
    void update(std::vector<std::shared_ptr<AdamWUpdates>> updates);
    // Takes what the attached tensors of the group have as .grad, which may be nothing, and keeps
    // it until it is read. It counts in the widest of the dtypes.
    void gradients(uint32_t group);
    // The groups some of whose attached tensors have a .grad.
    std::vector<uint32_t> unreported() const;
    // The flat gradient to add to in this backward; without it the backward makes a new one.
    void set_gradient(uint32_t group, at::Tensor flat);
    // By group: the flat gradient that the last backward wrote, if any; of one rank alone the
    // gradients of the group's parameters, where it has left them as they were. The engine lets go
    // of them.
    std::vector<Reduced> take_gradients();
    std::vector<bool> have_gradients() const; // by parameter

    // Of passes as a CUDA graph: see <penstock/zero.h>. The stream is a cudaStream_t.
    void begin_capture(uintptr_t stream);

    std::vector<Operation> recorded(bool grad) const;
    pst_zero_plan compile(bool grad, const Recording &recording, const Budgets &budgets);
    std::vector<pst_zero_draft> make_drafts(bool grad, const Recording &recording,
                                            const Budgets &budgets);
    pst_zero_forecast forecast(bool grad) const;
    pst_zero_group_forecast group_forecast(bool grad, uint32_t group) const;
    pst_zero_stats stats() const;

  private:
    struct Whole {
        at::Tensor tensor;   // as Python has it
        at::Tensor leaf;     // whose .grad is its gradient
        at::Tensor memory;   // an alias on the storage that it was made with
        size_t offset;       // in the gathered group
        std::string message; // what touching it raises while it is not gathered
    };
    struct Group {
        std::vector<Whole> wholes;
        std::vector<at::Tensor> wrappers;
        int64_t version = 0; // of all of these, when the latest use of the unit began
        std::vector<uint32_t> parameters;
        at::Tensor shard;
        at::ScalarType dtype, gather_dtype, used_dtype;
        // Rows that uses have named, in passes without and with gradients: until the next one does.
        std::array<at::Tensor, 2> rows;
        at::Tensor gradient;
        std::vector<at::Tensor> kept;
        // By report, kept until the engine has read them.
        std::deque<std::vector<at::Tensor>> sources;
    };
    struct Unit {
        std::string name;
        std::vector<uint32_t> groups;
        bool is_whole = false; // the tensors have memory
    };

    void name_rows(uint32_t group, at::Tensor rows);
    pst_zero *engine() const;
    void check(pst_status status) const {
        if (fill_failure_) std::rethrow_exception(std::exchange(fill_failure_, nullptr));
        runtime_->check(status);
    }
    // On the host, pinned where the device is a GPU, or on the device: as shards_on_host says.
    at::Tensor make_rows(size_t bytes, at::ScalarType dtype) const;
    static int64_t version_of(const Group &group);
    void bind(Group &group, void *memory);
    void unbind(Unit &unit);
    void refuse_written(const Unit &unit);
    static pst_status gradient_target(void *context, uint32_t group, void **memory,
                                      int *accumulate);
    void flatten_kept(uint32_t group);
    static int gradients_kept(void *context, uint32_t group);
    static pst_status fill_copy(void *context, uint32_t group, void *copy);
    static void gradients_consumed(void *context, uint32_t group);

    std::shared_ptr<Runtime> runtime_;
    const std::string name_;
    const bool shards_on_host_;
    bool trains_ = false;            // the latest forward has gradients
    std::vector<ProcessGroup> held_; // in a child of fork, too, where their ends would wait
    std::unique_ptr<Comms> comms_;
    std::unique_ptr<Segments> segments_;
    pst_zero *engine_ = nullptr;
    std::vector<Group> groups_;
    std::vector<Unit> units_;
    size_t parameter_count_ = 0;
    std::vector<std::shared_ptr<AdamWUpdates>> updates_; // of the latest backward
    Filler filler_;
    mutable std::exception_ptr fill_failure_; // until it is thrown
};

} // namespace penstock
