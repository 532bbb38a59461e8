#include "engine.hpp"

#include "dtype.hpp"
#include "outside_python.hpp"
#include "storage.hpp"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

namespace penstock {
// ---- life -------------------------------------------------------------------------------------

Engine::Engine(std::shared_ptr<Runtime> runtime, const EngineOptions &options,
               const std::optional<ProcessGroup> &gather, const std::optional<ProcessGroup> &reduce,
               const std::optional<Nodes> &nodes, const std::optional<ProcessGroup> &replicas,
               SegmentMaker segments)
    : runtime_(std::move(runtime)), name_(options.name), shards_on_host_(options.shards_on_host),
      segments_(std::make_unique<Segments>(std::move(segments))) {
    if (gather) held_.insert(held_.end(), {*gather, *reduce});
    if (nodes) held_.insert(held_.end(), {nodes->first, nodes->second});
    if (replicas) held_.push_back(*replicas);
    try {
        comms_ = std::make_unique<Comms>(*runtime_, gather, reduce, options.communicator,
                                         options.verify, nodes, replicas);
        pst_zero_options zero{};
        zero.size = sizeof zero;
        zero.name = options.name.c_str();
        zero.stage = options.stage;
        zero.gather_comm = comms_->gather();
        zero.reduce_comm = comms_->reduce();
        zero.replica_comm = comms_->replicas();
        zero.device = runtime_->device();
        zero.compute = runtime_->compute();
        zero.prefetch_ahead = options.prefetch_ahead;
        zero.prefetch_bytes = options.prefetch_bytes;
        zero.bucket_bytes = options.bucket_bytes;
        zero.part_bytes = options.part_bytes;
        if (*segments_) {
            zero.segment_alloc = Segments::alloc;
            zero.segment_free = Segments::free;
            zero.segment_context = segments_.get();
        }
        zero.gradient_target = gradient_target;
        zero.gradients_kept = gradients_kept;
        zero.gradients_consumed = gradients_consumed;
        zero.fill_copy = fill_copy;
        zero.callback_context = this;
        zero.time_waits = options.time_waits;
        zero.shards_on_host = options.shards_on_host;
        zero.transient_copies = options.transient_copies;
        zero.in_callers_order = options.in_callers_order;
        check(pst_zero_create(runtime_->get(), &zero, &engine_));
    } catch (...) {
        destroy();
        throw;
    }
}

Engine::~Engine() {
    const WithoutInterpreter without; // torch's gloo takes it in each call, on our workers too
    runtime_->ignore_signals();
    destroy();
}

void Engine::destroy() {
    if (!runtime_->is_here()) return;
    pst_zero_destroy(engine_);
    comms_.reset();
    held_.clear();
    segments_.reset();
    for (Unit &unit : units_)
        unbind(unit);
    engine_ = nullptr;
}

std::string Engine::communicator() const {
    return comms_ ? comms_->name() : "";
}

std::string Engine::why_not_ce() const {
    return comms_ ? comms_->why_not_ce() : "";
}

pst_zero *Engine::engine() const {
    runtime_->check_process(name_);
    if (engine_ == nullptr) throw StatusError{PST_ESTATE, "this sharded model was closed"};
    return engine_;
}

// ---- registration -----------------------------------------------------------------------------

uint32_t Engine::add_parameter(const std::string &name, size_t rows, size_t row_elements,
                               bool trainable) {
    pst_parameter_options options{};
    options.size = sizeof options;
    options.name = name.c_str();
    options.rows = rows;
    options.row_elements = row_elements;
    options.trainable = trainable;
    uint32_t index = 0;
    check(pst_zero_add_parameter(engine(), &options, &index));
    parameter_count_ = std::max<size_t>(parameter_count_, index + 1);
    return index;
}

uint32_t Engine::add_group(const std::string &name, const std::vector<uint32_t> &parameters,
                           at::ScalarType dtype, at::ScalarType gather_dtype,
                           at::ScalarType reduce_dtype, bool forward_only, bool looked_up,
                           std::optional<at::ScalarType> used_dtype) {
    pst_group_options options{};
    options.size = sizeof options;
    options.name = name.c_str();
    options.parameters = parameters.data();
    options.parameter_count = parameters.size();
    options.dtype = dtype_of(dtype);
    options.gather_dtype = dtype_of(gather_dtype);
    options.reduce_dtype = dtype_of(reduce_dtype);
    options.forward_only = forward_only;
    options.looked_up = looked_up;
    options.filled = used_dtype.has_value();
    options.used_dtype = dtype_of(used_dtype.value_or(gather_dtype));
    uint32_t index = 0;
    check(pst_zero_add_group(engine(), &options, &index));
    groups_.resize(std::max<size_t>(groups_.size(), index + 1));
    Group &group = groups_.at(index);
    group.parameters = parameters;
    group.dtype = dtype;
    group.gather_dtype = gather_dtype;
    group.used_dtype = used_dtype.value_or(gather_dtype);
    return index;
}

pst_group_layout Engine::group_layout(uint32_t group) const {
    pst_group_layout layout{};
    check(pst_zero_group_layout(engine(), group, &layout));
    return layout;
}

pst_parameter_layout Engine::parameter_layout(uint32_t group, uint32_t parameter) const {
    pst_parameter_layout layout{};
    check(pst_zero_parameter_layout(engine(), group, parameter, &layout));
    return layout;
}

at::Tensor Engine::make_rows(size_t bytes, at::ScalarType dtype) const {
    const at::Device where = runtime_->where();
    const auto count = static_cast<int64_t>(bytes / c10::elementSize(dtype));
    const at::TensorOptions options = at::TensorOptions(shards_on_host_ ? at::kCPU : where);
    return at::empty({count},
                     options.dtype(dtype).pinned_memory(shards_on_host_ && where.is_cuda()));
}

at::Tensor Engine::make_shard(uint32_t index) {
    const c10::ScalarType dtype = groups_.at(index).dtype;
    const size_t bytes = group_layout(index).shard_bytes;
    void *place = nullptr;
    check(pst_zero_shard_place(engine(), index, &place));
    at::Tensor segment = segments_->find(place);
    if (!segment.defined()) return make_rows(bytes, dtype);
    // A storage of its own: saving a shard does not save the whole segment.
    const auto keep = [segment](void *) {};
    const auto count = static_cast<int64_t>(bytes / c10::elementSize(dtype));
    const at::TensorOptions options = at::TensorOptions(runtime_->where()).dtype(dtype);
    return at::from_blob(place, {count}, keep, options, runtime_->where());
}

void Engine::bind_shard(uint32_t group, const at::Tensor &shard) {
    check(pst_zero_bind_shard(engine(), group, shard.mutable_data_ptr()));
    groups_.at(group).shard = shard;
}

void Engine::attach(uint32_t index, const std::vector<at::Tensor> &tensors,
                    const std::vector<at::Tensor> &leaves, const std::vector<std::string> &messages,
                    std::vector<at::Tensor> wrappers) {
    Group &group = groups_.at(index);
    for (size_t i = 0; i < group.parameters.size(); i++) {
        const size_t offset = parameter_layout(index, group.parameters[i]).gathered_offset;
        const at::Tensor &tensor = tensors.at(i);
        group.wholes.push_back({tensor, leaves.at(i), tensor.detach(), offset, messages.at(i)});
    }
    group.wrappers = std::move(wrappers);
    group.version = version_of(group);
}

uint32_t Engine::add_unit(std::string name, std::vector<uint32_t> groups) {
    units_.push_back({std::move(name), std::move(groups)});
    return static_cast<uint32_t>(units_.size() - 1);
}

// ---- a pass -----------------------------------------------------------------------------------

int64_t Engine::version_of(const Group &group) {
    int64_t version = 0;
    for (const Whole &whole : group.wholes)
        version += whole.tensor._version();
    for (const at::Tensor &wrapper : group.wrappers)
        version += wrapper._version();
    return version;
}

void Engine::bind(Group &group, void *memory) {
    for (const Whole &whole : group.wholes)
        bind_storage(whole.memory, static_cast<char *>(memory) + whole.offset);
    group.version = version_of(group);
}

void Engine::unbind(Unit &unit) {
    if (!std::exchange(unit.is_whole, false)) return;
    for (uint32_t index : unit.groups)
        for (const Whole &whole : groups_[index].wholes)
            release_storage(whole.memory, whole.message);
}

void Engine::refuse_written(const Unit &unit) {
    bool is_written = false;
    for (uint32_t index : unit.groups) {
        Group &group = groups_[index];
        is_written |= group.version != version_of(group);
        for (const Whole &whole : group.wholes)
            is_written |= whole.tensor.storage().unsafeGetStorageImpl() !=
                          whole.memory.storage().unsafeGetStorageImpl();
        group.version = version_of(group);
    }
    if (!is_written) return;
    throw StatusError{PST_ESTATE,
                      "parameters of '" + unit.name +
                          "' were written, or moved to other memory, while they were gathered, "
                          "which their shards do not know: write to them outside of forward and "
                          "backward; after a pass that was broken off, run a forward before"};
}

void Engine::refuse_written() {
    for (const Unit &unit : units_)
        refuse_written(unit);
}

void Engine::begin_forward(bool grad) {
    for (Unit &unit : units_)
        unbind(unit); // left by a pass that was broken off
    check(pst_zero_begin_forward(engine(), grad));
    trains_ = grad;
    for (Group &group : groups_) { // nothing writes there any more
        group.gradient.reset();
        group.kept.clear();
    }
    updates_.clear();
}

void Engine::drain() {
    check(pst_zero_drain(engine()));
    updates_.clear(); // nothing reads these any more
}

void Engine::name_rows(uint32_t index, at::Tensor rows) {
    at::Tensor &named = groups_.at(index).rows.at(trains_);
    named = std::move(rows);
    check(pst_zero_name_rows(engine(), index, named.const_data_ptr<int64_t>(),
                             static_cast<size_t>(named.numel())));
}

bool Engine::use(uint32_t index, std::optional<at::Tensor> rows) {
    Unit &unit = units_.at(index);
    if (rows.has_value()) name_rows(unit.groups.front(), *std::move(rows));
    for (uint32_t group : unit.groups)
        check(pst_zero_gather(engine(), group));
    for (uint32_t group : unit.groups) {
        void *memory = nullptr;
        check(pst_zero_wait(engine(), group, &memory));
        if (!unit.is_whole) bind(groups_[group], memory);
    }
    return !std::exchange(unit.is_whole, true);
}

bool Engine::done(uint32_t index) {
    Unit &unit = units_.at(index);
    const bool is_last = unit.groups.empty() || pst_zero_uses(engine(), unit.groups.front()) == 1;
    if (is_last) unbind(unit);
    for (uint32_t group : unit.groups)
        check(pst_zero_release(engine(), group));
    if (is_last) refuse_written(unit);
    return is_last;
}

void Engine::update(std::vector<std::shared_ptr<AdamWUpdates>> updates) {
    std::vector<pst_adamw_piece> pieces(parameter_count_);
    for (const auto &some : updates)
        for (size_t i = 0; i < some->pieces.size(); i++)
            pieces.at(some->parameters.at(i)) = some->pieces[i];
    updates_ = std::move(updates);
    check(pst_zero_update(engine(), pieces.data(), pieces.size()));
}

void Engine::gradients(uint32_t index) {
    Group &group = groups_.at(index);
    std::vector<const void *> pointers(group.wholes.size(), nullptr);
    std::vector<at::Tensor> taken(group.wholes.size());
    at::ScalarType dtype = group.used_dtype;
    for (size_t i = 0; i < taken.size(); i++) {
        if (!group.wholes[i].leaf.grad().defined()) continue;
        taken[i] = std::exchange(group.wholes[i].leaf.mutable_grad(), at::Tensor());
        if (taken[i].requires_grad()) taken[i] = taken[i].detach();
        if (taken[i].layout() != at::kStrided) taken[i] = taken[i].to_dense();
        dtype = c10::promoteTypes(dtype, taken[i].scalar_type());
    }
    for (size_t i = 0; i < taken.size(); i++) {
        if (!taken[i].defined()) continue;
        if (taken[i].scalar_type() != dtype) taken[i] = taken[i].to(dtype);
        taken[i] = taken[i].contiguous();
        pointers[i] = taken[i].const_data_ptr();
    }
    group.sources.push_back(std::move(taken));
    check(pst_zero_gradients(engine(), index, pointers.data(), dtype_of(dtype)));
}

std::vector<uint32_t> Engine::unreported() const {
    const auto has_gradient = [](const Whole &whole) { return whole.leaf.grad().defined(); };
    std::vector<uint32_t> found;
    for (uint32_t i = 0; i < groups_.size(); i++)
        if (std::any_of(groups_[i].wholes.begin(), groups_[i].wholes.end(), has_gradient))
            found.push_back(i);
    return found;
}

void Engine::set_gradient(uint32_t group, at::Tensor flat) {
    groups_.at(group).gradient = std::move(flat);
}

std::vector<Reduced> Engine::take_gradients() {
    std::vector<Reduced> reduced(groups_.size());
    for (size_t i = 0; i < groups_.size(); i++) {
        if (groups_[i].gradient.defined()) reduced[i].first = std::move(groups_[i].gradient);
        groups_[i].gradient.reset();
        reduced[i].second = std::exchange(groups_[i].kept, {});
    }
    return reduced;
}

// What was kept moves to memory that a further report can be added to.
void Engine::flatten_kept(uint32_t index) {
    Group &group = groups_.at(index);
    if (!group.kept.empty()) group.gradient.zero_();
    for (size_t i = 0; i < group.kept.size(); i++) {
        const at::Tensor &kept = group.kept[i];
        if (!kept.defined()) continue;
        const size_t offset = parameter_layout(index, group.parameters[i]).gradient_offset;
        const auto first = static_cast<int64_t>(offset / c10::elementSize(group.dtype));
        group.gradient.narrow(0, first, kept.numel()).copy_(kept.view(-1));
    }
    group.kept.clear();
}

int Engine::gradients_kept(void *context, uint32_t index) {
    Group &group = static_cast<Engine *>(context)->groups_.at(index);
    if (group.gradient.defined()) return 0;
    group.kept = std::move(group.sources.front());
    group.sources.pop_front();
    return 1;
}

pst_status Engine::gradient_target(void *context, uint32_t index, void **memory, int *accumulate) {
    auto &self = *static_cast<Engine *>(context);
    Group &group = self.groups_.at(index);
    *accumulate = group.gradient.defined() || !group.kept.empty();
    const RealTensors real_tensors;
    try {
        if (!group.gradient.defined()) {
            const size_t bytes = self.group_layout(index).gradient_bytes;
            group.gradient = self.make_rows(bytes, group.dtype); // all of it is written
            self.flatten_kept(index);
        }
        *memory = group.gradient.mutable_data_ptr();
        return PST_OK;
    } catch (const StatusError &error) {
        return error.status;
    } catch (const std::exception &) {
        return PST_ENOMEM;
    }
}

pst_status Engine::fill_copy(void *context, uint32_t index, void *copy) {
    auto &self = *static_cast<Engine *>(context);
    const Group &group = self.groups_.at(index);
    const RealTensors real_tensors;
    const c10::InferenceMode no_inference(false); // later passes read what it makes
    try {
        const size_t count = self.group_layout(index).shard_bytes / c10::elementSize(group.dtype);
        const at::Device where = self.runtime_->where();
        const auto options = at::TensorOptions(where).dtype(group.gather_dtype);
        // With its device, for which torch would ask the driver, under a capture, too.
        self.filler_(index,
                     at::from_blob(
                         copy, {static_cast<int64_t>(count)}, [](void *) {}, options, where));
        return PST_OK;
    } catch (...) {
        self.fill_failure_ = std::current_exception();
        return PST_ECANCELED;
    }
}

void Engine::gradients_consumed(void *context, uint32_t group) {
    auto &sources = static_cast<Engine *>(context)->groups_.at(group).sources;
    if (!sources.empty()) sources.pop_front();
}

std::vector<bool> Engine::have_gradients() const {
    std::vector<bool> have(parameter_count_);
    for (uint32_t i = 0; i < have.size(); i++)
        have[i] = pst_zero_has_gradient(engine(), i) != 0;
    return have;
}

// ---- passes as a CUDA graph ---------------------------------------------------------------------

void Engine::begin_capture(uintptr_t stream) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): torch gives streams to Python as numbers.
    check(pst_zero_begin_capture(engine(), reinterpret_cast<void *>(stream)));
}

// ---- recordings and figures ---------------------------------------------------------------------

std::vector<Operation> Engine::recorded(bool grad) const {
    size_t count = 0, timed = 0;
    check(pst_zero_recorded(engine(), grad, nullptr, 0, &count));
    std::vector<pst_zero_op> found(count);
    std::vector<pst_zero_op_time> times(count); // zero: not known
    check(pst_zero_recorded(engine(), grad, found.data(), found.size(), &count));
    check(pst_zero_recorded_times(engine(), grad, times.data(), times.size(), &timed));
    std::vector<Operation> operations;
    for (size_t i = 0; i < count; i++) {
        const pst_zero_op &op = found[i];
        const pst_zero_op_time &time = times[i];
        operations.emplace_back(static_cast<int>(op.kind), op.group, op.backward != 0, op.bytes,
                                time.reached_ns, time.waited_ns, time.collective_ns);
    }
    return operations;
}

Recording::Recording(const std::vector<Operation> &taken) {
    for (const auto &[kind, group, backward, bytes, reached, waited, collective] : taken) {
        operations_.push_back({static_cast<pst_zero_op_kind>(kind), group, backward, bytes});
        times_.push_back({reached, waited, collective});
    }
}

pst_zero_compile_options Recording::options(bool grad, const Budgets &budgets) const {
    pst_zero_compile_options options{};
    options.size = sizeof options;
    options.grad = grad;
    options.operations = operations_.data();
    options.times = times_.data();
    options.count = operations_.size();
    std::tie(options.prefetch_ahead, options.prefetch_bytes, options.keep_bytes) = budgets;
    return options;
}

pst_zero_forecast predict(bool grad, int stage, const Recording &recording,
                          const std::vector<GroupBytes> &groups, const Budgets &budgets) {
    const pst_zero_compile_options recorded = recording.options(grad, budgets);
    std::vector<size_t> gathered, reduced;
    std::vector<unsigned char> needed, by_rows;
    for (const auto &[gather_bytes, reduce_bytes, is_needed, is_by_rows] : groups) {
        gathered.push_back(gather_bytes);
        reduced.push_back(reduce_bytes);
        needed.push_back(is_needed);
        by_rows.push_back(is_by_rows);
    }
    pst_zero_predict_options options{};
    options.size = sizeof options;
    options.grad = grad;
    options.stage = stage;
    options.operations = recorded.operations;
    options.times = recorded.times;
    options.count = recorded.count;
    options.group_count = groups.size();
    options.gather_bytes = gathered.data();
    options.reduce_bytes = reduced.data();
    options.needed = needed.data();
    options.by_rows = by_rows.data();
    options.prefetch_ahead = recorded.prefetch_ahead;
    options.prefetch_bytes = recorded.prefetch_bytes;
    options.keep_bytes = recorded.keep_bytes;
    pst_runtime *runtime = nullptr;
    pst_zero_forecast forecast{};
    forecast.size = sizeof forecast;
    pst_status status = pst_runtime_create(nullptr, &runtime);
    if (status == PST_OK) status = pst_zero_predict(runtime, &options, &forecast);
    pst_runtime_destroy(runtime);
    if (status != PST_OK)
        throw StatusError{status, std::string("no prediction: ") + pst_status_text(status)};
    return forecast;
}

pst_zero_plan Engine::compile(bool grad, const Recording &recording, const Budgets &budgets) {
    const pst_zero_compile_options options = recording.options(grad, budgets);
    pst_zero_plan plan{};
    check(pst_zero_compile(engine(), &options, &plan));
    return plan;
}

std::vector<pst_zero_draft> Engine::make_drafts(bool grad, const Recording &recording,
                                                const Budgets &budgets) {
    const pst_zero_compile_options options = recording.options(grad, budgets);
    std::vector<pst_zero_draft> drafts(PST_ZERO_MOST_DRAFTS);
    size_t count = 0;
    check(pst_zero_make_drafts(engine(), &options, drafts.data(), &count));
    drafts.resize(count);
    return drafts;
}

pst_zero_forecast Engine::forecast(bool grad) const {
    pst_zero_forecast forecast{};
    forecast.size = sizeof forecast;
    check(pst_zero_get_forecast(engine(), grad, &forecast));
    return forecast;
}

pst_zero_group_forecast Engine::group_forecast(bool grad, uint32_t group) const {
    pst_zero_group_forecast forecast{};
    forecast.size = sizeof forecast;
    check(pst_zero_get_group_forecast(engine(), grad, group, &forecast));
    return forecast;
}

pst_zero_stats Engine::stats() const {
    pst_zero_stats stats{};
    stats.size = sizeof stats;
    pst_zero_get_stats(engine(), &stats);
    return stats;
}

} // namespace penstock
