#include "context.hpp"

#include <ATen/DeviceAccelerator.h>
#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <map>
#include <mutex>

namespace penstock::dc {
namespace {

struct Contexts {
    std::mutex lock; // of what follows
    std::map<int64_t, ContextPointer> live;
    std::unordered_map<int64_t, int64_t> owners; // graph to context
    int64_t current = 0;
};

Contexts &contexts() {
    static Contexts all;
    return all;
}

int64_t next_number() {
    static std::atomic<int64_t> last{0};
    return last.fetch_add(1, std::memory_order_relaxed) + 1; // unique, orders nothing
}

ContextPointer found_in(const Contexts &all, int64_t number) {
    const auto found = all.live.find(number);
    if (found == all.live.end())
        throw StatusError{PST_ESTATE, "no DeepCompile runtime: call init first"};
    found->second->ranks->runtime->check_process("this DeepCompile runtime");
    return found->second;
}

} // namespace

Context::Context(const Config &options, std::unique_ptr<Ranks> world)
    : Job{options, std::move(world)}, number(next_number()), place(ranks->runtime->page()),
      zero3(*this, offload), zero12(*this), offload(*this) {}

Context::~Context() = default;

void Context::register_graph(int stage, int64_t graph, const std::vector<int64_t> &ids) {
    Stage &owner = stage == 3 ? static_cast<Stage &>(zero3) : zero12;
    if (stage != 3) zero12.set_stage(stage);
    owner.register_graph(graph, ids);
    graphs_[graph] = &owner;
}

Stage &Context::stage_of(int64_t graph) {
    const auto found = graphs_.find(graph);
    if (found == graphs_.end())
        throw StatusError{PST_EINVAL, "graph " + std::to_string(graph) +
                                          " is not registered: call register_graph_z1, _z2 or _z3"};
    return *found->second;
}

void Context::reset() {
    graphs_.clear();
    zero3.forget_graphs();
    zero12.forget_graphs();
    offload.forget_graphs();
}

void Context::start_backward(bool update) {
    // May be called for each of the forwards that this pass of autograd goes back over.
    const int64_t pass = torch::autograd::get_current_graph_task_id();
    if (pass != -1 && pass == pass_ && update == pass_updates_) return;
    pass_ = pass;
    pass_updates_ = update;
    place.begin_backward(update);
    zero3.start_backward(update);
    zero12.start_backward(update);
}

void Context::synchronize_if(bool wanted) const {
    if (!wanted || ranks->runtime->device() == nullptr) return;
    at::accelerator::synchronizeDevice(ranks->runtime->where().index());
}

void add_context(ContextPointer context) {
    Contexts &all = contexts();
    std::lock_guard<std::mutex> guard(all.lock);
    all.current = context->number;
    all.live[context->number] = std::move(context);
}

int64_t current_number() {
    Contexts &all = contexts();
    std::lock_guard<std::mutex> guard(all.lock);
    return all.current;
}

void select_context(int64_t number) {
    Contexts &all = contexts();
    std::lock_guard<std::mutex> guard(all.lock);
    if (number != 0 && all.live.count(number) == 0)
        throw StatusError{PST_EINVAL, "there is no DeepCompile runtime " + std::to_string(number)};
    all.current = number;
}

void end_current_context() {
    ContextPointer ended; // destroyed last, without the lock
    Contexts &all = contexts();
    std::lock_guard<std::mutex> guard(all.lock);
    const auto found = all.live.find(all.current);
    if (found == all.live.end()) return;
    ended = found->second;
    all.live.erase(found);
    all.current = 0;
    for (auto it = all.owners.begin(); it != all.owners.end();)
        it = it->second == ended->number ? all.owners.erase(it) : std::next(it);
}

void end_all_contexts() {
    std::map<int64_t, ContextPointer> ended; // destroyed last, without the lock
    Contexts &all = contexts();
    std::lock_guard<std::mutex> guard(all.lock);
    ended.swap(all.live);
    all.owners.clear();
    all.current = 0;
}

ContextPointer current_context() {
    Contexts &all = contexts();
    std::lock_guard<std::mutex> guard(all.lock);
    return found_in(all, all.current);
}

std::vector<ContextPointer> all_contexts() {
    Contexts &all = contexts();
    std::lock_guard<std::mutex> guard(all.lock);
    std::vector<ContextPointer> found;
    for (const auto &[number, context] : all.live)
        if (context->ranks->runtime->is_here()) found.push_back(context);
    return found;
}

ContextPointer context_of(int64_t graph) {
    Contexts &all = contexts();
    std::lock_guard<std::mutex> guard(all.lock);
    const auto owner = all.owners.find(graph);
    return found_in(all, owner == all.owners.end() ? all.current : owner->second);
}

void own_graph(int64_t graph, const ContextPointer &context) {
    Contexts &all = contexts();
    std::lock_guard<std::mutex> guard(all.lock);
    all.owners[graph] = context->number;
}

} // namespace penstock::dc
