// The operators of the namespace `dc`, with DeepCompile's schemas. They may be called from any
// thread, one at a time for each job; what goes wrong is raised under the operator's name.
#include "context.hpp"
#include "outside_python.hpp"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace penstock::dc {
namespace {

using at::Tensor;
using Dtype = std::optional<at::ScalarType>;
using Dtypes = std::optional<std::vector<at::ScalarType>>;

// Runs an operator's body; torch knows how to carry its own errors to Python.
template <typename Body> auto guarded(const char *name, const Body &body) {
    try {
        return body();
    } catch (const StatusError &error) {
        TORCH_CHECK(false, "dc::", name, ": ", error.text, " (", pst_status_name(error.status),
                    ")");
    }
}

// A context at work for the stream that is current, which may mean to wait for other ranks.
class Session {
  public:
    explicit Session(ContextPointer context)
        : context_(std::move(context)), bridge_(*context_->ranks) {}
    Context *operator->() const {
        return context_.get();
    }

  private:
    WithoutInterpreter without_;
    ContextPointer context_;
    StreamBridge bridge_;
};

Tensor empty_of(const Tensor &grad) {
    return at::empty({0}, grad.options());
}

Tensor allgather_param(const Tensor &, int64_t graph, int64_t id, Dtype dtype) {
    return guarded("allgather_param", [&] {
        const Session context(context_of(graph));
        context->synchronize_if(context->config.sync_before_allgather);
        Tensor gathered = context->zero3.gather(graph, id, dtype);
        context->synchronize_if(context->config.sync_after_allgather);
        return gathered;
    });
}

Tensor allgather_param_meta(const Tensor &, int64_t graph, int64_t id, Dtype dtype) {
    return guarded("allgather_param", [&] { return context_of(graph)->zero3.describe(id, dtype); });
}

void prefetch_params_fused(int64_t graph, const std::vector<Tensor> &,
                           const std::vector<int64_t> &ids, const Dtypes &dtypes) {
    guarded("prefetch_params_fused",
            [&] { Session(context_of(graph))->zero3.prefetch(graph, ids, dtypes); });
}

Tensor wait_allgather(const Tensor &gathered, int64_t graph, int64_t id) {
    guarded("wait_allgather", [&] { Session(context_of(graph))->zero3.wait(graph, id); });
    return gathered;
}

Tensor release_param(const Tensor &value, int64_t graph, int64_t id, int64_t users) {
    guarded("release_param", [&] { Session(context_of(graph))->zero3.release(graph, id, users); });
    return value;
}

Tensor reduce_grad(const Tensor &grad, int64_t graph, int64_t id) {
    guarded("reduce_grad", [&] {
        const Session context(context_of(graph));
        context->synchronize_if(context->config.sync_before_reduce);
        Stage &stage = context->stage_of(graph);
        if (!context->profiling) {
            context->place.go_backward();
            stage.reduce_grad(grad, graph, id);
        }
        context->synchronize_if(context->config.sync_after_reduce);
    });
    return empty_of(grad);
}

void end_backward(const c10::IValue &, int64_t graph, bool release_reduce_buckets) {
    guarded("end_backward", [&] {
        const Session context(context_of(graph));
        context->stage_of(graph).end_backward(graph, release_reduce_buckets);
        if (!context->profiling) context->place.end_backward();
    });
}

void free_tensors(const std::vector<Tensor> &tensors) {
    guarded("free_tensors", [&] {
        const Session context(current_context());
        if (!context->profiling) context->offload.free_tensors(tensors);
    });
}

Tensor offload_tensor(const Tensor &tensor, int64_t graph, int64_t id) {
    return guarded("offload_tensor",
                   [&] { return Session(context_of(graph))->offload.offload(tensor, graph, id); });
}

Tensor wait_offload(const Tensor &tensor, int64_t graph, int64_t id) {
    return guarded("wait_offload", [&] {
        return Session(context_of(graph))->offload.wait_offload(tensor, graph, id);
    });
}

Tensor reload_tensor(const Tensor &tensor, int64_t graph, int64_t id) {
    return guarded("reload_tensor",
                   [&] { return Session(context_of(graph))->offload.reload(tensor, graph, id); });
}

Tensor wait_reload(const Tensor &tensor, int64_t graph, int64_t id) {
    return guarded("wait_reload", [&] {
        return Session(context_of(graph))->offload.wait_reload(tensor, graph, id);
    });
}

// The host has the shard that counts: nothing goes back to it.
void offload_parameter(const Tensor &, int64_t graph, int64_t id) {
    guarded("offload_parameter", [&] { Session(context_of(graph))->zero3.drop(id); });
}

void reload_parameter(const Tensor &, int64_t graph, int64_t id) {
    guarded("reload_parameter", [&] { Session(context_of(graph))->zero3.reload(id); });
}

Tensor test_call(const Tensor &tensor) {
    return tensor;
}

// ---- shapes alone -------------------------------------------------------------------------------

Tensor same_meta(const Tensor &tensor, int64_t, int64_t) {
    return tensor;
}
Tensor like_meta(const Tensor &tensor, int64_t, int64_t) {
    return at::empty_like(tensor);
}
Tensor release_meta(const Tensor &tensor, int64_t, int64_t, int64_t) {
    return tensor;
}
Tensor reduce_meta(const Tensor &grad, int64_t, int64_t) {
    return empty_of(grad);
}
void parameter_meta(const Tensor &, int64_t, int64_t) {}
void prefetch_meta(int64_t, const std::vector<Tensor> &, const std::vector<int64_t> &,
                   const Dtypes &) {}
void free_meta(const std::vector<Tensor> &) {}
void end_backward_meta(const c10::IValue &, int64_t, bool) {}

void implement(torch::Library &library) {
    library.impl("allgather_param", &allgather_param);
    library.impl("prefetch_params_fused", &prefetch_params_fused);
    library.impl("wait_allgather", &wait_allgather);
    library.impl("release_param", &release_param);
    library.impl("reduce_grad", &reduce_grad);
    library.impl("free_tensors", &free_tensors);
    library.impl("offload_tensor", &offload_tensor);
    library.impl("reload_tensor", &reload_tensor);
    library.impl("wait_offload", &wait_offload);
    library.impl("wait_reload", &wait_reload);
    library.impl("offload_parameter", &offload_parameter);
    library.impl("reload_parameter", &reload_parameter);
    library.impl("end_backward", &end_backward);
    library.impl("test_call", &test_call);
}

} // namespace

TORCH_LIBRARY(dc, library) {
    library.def("allgather_param(Tensor a, int graph_id, int id, ScalarType? dtype=None)"
                " -> Tensor");
    library.def("prefetch_params_fused(int graph_id, Tensor[] params, int[] ids,"
                " ScalarType[]? dtypes=None) -> ()");
    library.def("wait_allgather(Tensor(a) a, int graph_id, int id) -> Tensor(a)");
    library.def("release_param(Tensor(a) a, int graph_id, int id, int n_users) -> Tensor(a)");
    library.def("reduce_grad(Tensor a, int graph_id, int id) -> Tensor");
    library.def("free_tensors(Tensor[] a) -> ()");
    library.def("offload_tensor(Tensor a, int id, int id) -> Tensor");
    library.def("reload_tensor(Tensor a, int id, int id) -> Tensor");
    library.def("wait_offload(Tensor a, int id, int id) -> Tensor");
    library.def("wait_reload(Tensor a, int id, int id) -> Tensor");
    library.def("offload_parameter(Tensor a, int id, int id) -> ()");
    library.def("reload_parameter(Tensor a, int id, int id) -> ()");
    library.def("end_backward(Any deps, int graph_id, bool release_reduce_buckets) -> ()");
    library.def("test_call(Tensor a) -> Tensor");
}

TORCH_LIBRARY_IMPL(dc, CPU, library) {
    implement(library);
}

TORCH_LIBRARY_IMPL(dc, CUDA, library) {
    implement(library);
}

TORCH_LIBRARY_IMPL(dc, Meta, library) {
    library.impl("allgather_param", &allgather_param_meta);
    library.impl("prefetch_params_fused", &prefetch_meta);
    library.impl("wait_allgather", &same_meta);
    library.impl("release_param", &release_meta);
    library.impl("reduce_grad", &reduce_meta);
    library.impl("free_tensors", &free_meta);
    library.impl("offload_tensor", &like_meta);
    library.impl("reload_tensor", &like_meta);
    library.impl("wait_offload", &like_meta);
    library.impl("wait_reload", &like_meta);
    library.impl("offload_parameter", &parameter_meta);
    library.impl("reload_parameter", &parameter_meta);
    library.impl("end_backward", &end_backward_meta);
    library.impl("test_call", &test_call);
}

// What a backward's end depends on may all be None, and then the dispatcher sees no tensor.
TORCH_LIBRARY_IMPL(dc, Undefined, library) {
    library.impl("end_backward", &end_backward);
}

} // namespace penstock::dc
