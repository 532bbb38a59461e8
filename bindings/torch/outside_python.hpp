// What keeps Python out of the library's own work.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PythonDispatcherTLS.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

#include <optional>

namespace penstock {

// For a scope in which torch is called with real tensors: no trace and no transform of torch.func
// sees them, although one may be under way on this thread, where new tensors would have no memory.
// What torch hands on to threads of its own inherits that, and they need not wait for the
// interpreter.
struct RealTensors {
    torch::torch_dispatch_mode::StashTorchDispatchStackGuard no_modes;
    c10::impl::DisablePythonDispatcher no_python_dispatcher;
    c10::impl::ExcludeDispatchKeyGuard no_transforms{
        c10::DispatchKeySet{c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                            c10::DispatchKey::FuncTorchDynamicLayerBackMode}};
};

// For a scope that may wait: gives up the interpreter if this thread has it. Torch calls operators
// without it, but for its dispatcher in Python, which is at work while a graph is compiled.
class WithoutInterpreter {
  public:
    WithoutInterpreter() {
        if (PyGILState_Check() != 0) released_.emplace();
    }

  private:
    c10::impl::DisablePythonDispatcher no_python_dispatcher_; // it would take the interpreter again
    std::optional<pybind11::gil_scoped_release> released_;
};

} // namespace penstock
