#include "hooks.hpp"

#include "status.hpp"

#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/PyInterpreter.h>

namespace penstock {

using torch::autograd::variable_list;

Callback::Callback(pybind11::object function)
    : function_(function.release().ptr(), getPyInterpreter()) {}

void Callback::operator()() const {
    const pybind11::gil_scoped_acquire gil;
    PyObject *result = PyObject_CallNoArgs(function_.ptr(getPyInterpreter()));
    if (result == nullptr) throw pybind11::error_already_set();
    Py_DECREF(result);
}

namespace {

using torch::dynamo::autograd::CompiledNodeArgs;

// Compiled autograd asks each hook of a graph what of it is to be compiled.
[[noreturn]] void refuse_compiled_autograd() {
    const pybind11::gil_scoped_acquire gil;
    set_python_error({PST_EUNSUPPORTED,
                      "the backward of a sharded model cannot be compiled: call it outside of "
                      "torch.compile, without compiled autograd; compiled forwards are served"});
    throw pybind11::error_already_set();
}

struct Before : torch::autograd::FunctionPreHook {
    explicit Before(pybind11::object function) : call(std::move(function)) {}
    variable_list operator()(const variable_list &gradients) override {
        call();
        return gradients;
    }
    void compiled_args(CompiledNodeArgs &) const override {
        refuse_compiled_autograd();
    }
    Callback call;
};

struct After : torch::autograd::FunctionPostHook {
    explicit After(pybind11::object function) : call(std::move(function)) {}
    variable_list operator()(const variable_list &outputs, const variable_list &) override {
        call();
        return outputs;
    }
    void compiled_args(CompiledNodeArgs &) const override {
        refuse_compiled_autograd();
    }
    Callback call;
};

} // namespace

void call_before(const at::Tensor &tensor, pybind11::object function) {
    tensor.grad_fn()->add_tensor_pre_hook(std::make_unique<Before>(std::move(function)));
}

// The node of an alias is cheaper than that of any other view.
std::pair<at::Tensor, uint64_t> mark(const at::Tensor &tensor, pybind11::object function) {
    at::Tensor marked = at::alias(tensor);
    const std::shared_ptr<torch::autograd::Node> node = marked.grad_fn();
    node->add_post_hook(std::make_unique<After>(std::move(function)));
    return {std::move(marked), node->sequence_nr()};
}

// ---- gradients of parameters ------------------------------------------------------------------

struct Arrived::Hook : torch::autograd::PostAccumulateGradHook {
    Hook(std::shared_ptr<Arrived> arrived, size_t index)
        : arrived(std::move(arrived)), index(index) {}
    void operator()(const at::Tensor &) override {
        arrived->note(index);
    }
    void compiled_args(CompiledNodeArgs &) const override {
        refuse_compiled_autograd();
    }
    const std::shared_ptr<Arrived> arrived;
    const size_t index;
};

Arrived::Arrived(pybind11::object function) : all_are_there_(std::move(function)) {}

void Arrived::watch(const at::Tensor &parameter) {
    auto hook = std::make_unique<Hook>(shared_from_this(), add());
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
}

size_t Arrived::add() {
    is_there_.push_back(false);
    return is_there_.size() - 1;
}

void Arrived::note(size_t index) {
    size_t count = 0;
    {
        const std::lock_guard lock(mutex_); // not while Python runs, which clears
        if (!is_there_[index]) count_++;
        is_there_[index] = true;
        count = count_;
    }
    if (count >= expected) all_are_there_();
}

size_t Arrived::count() const {
    const std::lock_guard lock(mutex_);
    return count_;
}

void Arrived::clear() {
    const std::lock_guard lock(mutex_);
    is_there_.assign(is_there_.size(), false);
    count_ = 0;
}

} // namespace penstock
