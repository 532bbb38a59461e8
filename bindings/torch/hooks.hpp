// Hooks on autograd's graphs that call Python, and nothing more. Those that torch makes in Python
// have a dictionary and a handle each, and wrap tensors that ours do not look at.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace penstock {

// A function of Python without arguments: called and let go of on any thread, with the interpreter
// or without it.
class Callback {
  public:
    explicit Callback(pybind11::object function);
    void operator()() const;

  private:
    c10::SafePyObject function_;
};

// Calls the function before each run of the node that has made the tensor.
void call_before(const at::Tensor &tensor, pybind11::object function);
// A view of all of a tensor that gets a gradient, whose own node calls the function after each run,
// and that node's number, which is greater than those of older ones.
std::pair<at::Tensor, uint64_t> mark(const at::Tensor &tensor, pybind11::object function);

// Which gradients of a group are computed. It holds no tensors, so that their hooks may hold it.
class Arrived : public std::enable_shared_from_this<Arrived> {
  public:
    // The function is called when as many as are expected are there, and for each one from then on.
    explicit Arrived(pybind11::object function);
    // Counts this parameter's gradient whenever it is computed, once until `clear`.
    void watch(const at::Tensor &parameter);
    // Counts one more gradient, whenever it is noted by the number that this returns.
    size_t add();
    void note(size_t index);
    size_t count() const;
    void clear();
    std::atomic<size_t> expected = 0; // 0 while no backward runs

  private:
    struct Hook;
    mutable std::mutex mutex_;   // autograd's threads note
    std::vector<bool> is_there_; // a parameter each
    size_t count_ = 0;
    Callback all_are_there_;
};

} // namespace penstock
