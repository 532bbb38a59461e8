// One job's DeepCompile runtime. Several live in a process; one of them is current.
#pragma once

#include "job.hpp"
#include "offload.hpp"
#include "place.hpp"
#include "zero12.hpp"
#include "zero3.hpp"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace penstock::dc {

// One thread at a time (which one may change).
class Context : public Job {
  public:
    Context(const Config &config, std::unique_ptr<Ranks> ranks);
    ~Context();
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    // stage: 1, 2 or 3.
    void register_graph(int stage, int64_t graph, const std::vector<int64_t> &ids);
    Stage &stage_of(int64_t graph);   // an error if it is not registered
    void reset();                     // graphs are forgotten
    void start_backward(bool update); // again in one pass of autograd: nothing
    // The host waits until the device has done everything (the sync_* switches).
    void synchronize_if(bool wanted) const;

    const int64_t number; // of this context, from 1
    Place place;
    Zero3 zero3;
    Zero12 zero12;
    Offload offload;

  private:
    std::unordered_map<int64_t, Stage *> graphs_;
    int64_t pass_ = -1; // of autograd, in which the latest backward began
    bool pass_updates_ = false;
};

using ContextPointer = std::shared_ptr<Context>;

// ---- the contexts of this process; any thread ---------------------------------------------------

// Makes it current.
void add_context(ContextPointer context);
// 0: none.
int64_t current_number();
void select_context(int64_t number);
// Ends the current one; its graphs are unknown from then on.
void end_current_context();
void end_all_contexts();
ContextPointer current_context(); // an error if there is none, or if it is a parent process's
std::vector<ContextPointer> all_contexts(); // of this process
// The one that registered the graph last, or the current one.
ContextPointer context_of(int64_t graph);
void own_graph(int64_t graph, const ContextPointer &context);

} // namespace penstock::dc
