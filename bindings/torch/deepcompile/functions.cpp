// The extension module penstock._dc: the functions of DeepCompile's native module.
#include "context.hpp"
#include "dumps.hpp"
#include "outside_python.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace penstock::dc {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

template <typename Field> void read(const py::object &config, const char *name, Field &field) {
    if (py::hasattr(config, name)) field = config.attr(name).cast<Field>();
}

Config config_of(const py::object &object, int64_t bucket_elements) {
    Config config;
    config.bucket_elements = bucket_elements;
    read(object, "double_buffer", config.double_buffer);
    read(object, "symmetric_memory", config.symmetric_memory);
    read(object, "free_activation_threshold", config.free_activation_threshold);
    read(object, "sync_before_reduce", config.sync_before_reduce);
    read(object, "sync_after_reduce", config.sync_after_reduce);
    read(object, "sync_before_allgather", config.sync_before_allgather);
    read(object, "sync_after_allgather", config.sync_after_allgather);
    read(object, "offload_activation_pin_memory", config.offload_activation_pin_memory);
    return config;
}

// Blocks until all ranks of the group are here.
void init(const py::object &group, const py::object &object, int64_t bucket_elements) {
    const Config config = config_of(object, bucket_elements);
    const py::object world = py::module_::import("penstock._world").attr("world_of")(group);
    auto ranks = std::make_unique<Ranks>();
    ranks->rank = world.attr("rank").cast<int>();
    ranks->size = world.attr("size").cast<int>();
    const auto device = world.attr("device").cast<at::Device>();
    const auto stream = world.attr("stream").cast<uintptr_t>();
    const auto deadline = world.attr("timeout").cast<double>();
    py::object roll = world.attr("roll");
    ranks->gather = world.attr("gather").cast<std::optional<ProcessGroup>>();
    ranks->reduce = world.attr("reduce").cast<std::optional<ProcessGroup>>();
    ranks->questions = world.attr("questions").cast<std::optional<ProcessGroup>>();
    ranks->segments = world.attr("segments").cast<SegmentMaker>();
    const auto name = "deepcompile-" + roll.attr("run").cast<std::string>();
    if (device.is_cuda())
        ranks->compute = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    ranks->runtime =
        make_own<Runtime>(name, ranks->rank, ranks->size, deadline, device, stream, roll);
    ranks->follow(std::move(roll), device.is_cuda());
    add_context(make_own<Context>(config, std::move(ranks)));
}

void register_graph(int stage, int64_t graph, const std::vector<int64_t> &ids) {
    const ContextPointer context = current_context();
    context->register_graph(stage, graph, ids);
    own_graph(graph, context);
}

py::dict stats() {
    const pst_flat_stats stats = current_context()->zero3.stats();
    py::dict result;
#define PST_PUT(field) result[#field] = stats.field
    PST_PUT(gathers);
    PST_PUT(gathered);
    PST_PUT(gather_bytes);
    PST_PUT(ahead);
    PST_PUT(unused);
    PST_PUT(reduces);
    PST_PUT(reduce_bytes);
    PST_PUT(exposed_ns);
    PST_PUT(late_launches);
    PST_PUT(arena_reserved);
    PST_PUT(arena_peak);
    PST_PUT(bucket_bytes);
    PST_PUT(source_bytes);
#undef PST_PUT
    return result;
}

void bind_life(py::module_ &module) {
    // As a roll (penstock._roll) takes it; penstock._C has a class of that name for its own ones.
    py::class_<Runtime, std::shared_ptr<Runtime>>(module, "Runtime", py::module_local())
        .def("recent", &Runtime::recent)
        .def("stop", &Runtime::stop, Unlocked());
    module.def("init", &init, py::arg("pg"), py::arg("config"),
               py::arg("initial_reduce_bucket_size"));
    module.def("cleanup", &end_current_context, Unlocked());
    // What makes their memory is the interpreter's.
    py::module_::import("atexit").attr("register")(py::cpp_function(&end_all_contexts, Unlocked()));
    module.def("dump", &dump_as_asked, Unlocked(), py::arg("folder"), py::arg("reason"),
               py::arg("is_failure"), "As penstock._C.dump, of DeepCompile's runtimes.");
    module.def("current", &current_number, "The number of the current runtime; 0: none.");
    module.def("select", &select_context, py::arg("context"));
    module.def(
        "reset", [] { current_context()->reset(); }, Unlocked());
    module.def(
        "communicator", [] { return current_context()->ranks->communicator(); },
        "Which kind of communicator serves the current runtime; empty before there are "
        "parameters.");
    module.def("stats", &stats, "Figures of ZeRO-3 so far.");
}

void bind_tracing(py::module_ &module) {
    module.def("rank", [] { return current_context()->ranks->rank; });
    module.def("world_size", [] { return current_context()->ranks->size; });
    module.def("trace_start", [] { current_context()->ranks->runtime->trace_start(); });
    module.def("trace_stop", [] { current_context()->ranks->runtime->trace_stop(); });
    module.def(
        "trace_write",
        [](const std::string &path, uint64_t most_bytes) {
            current_context()->ranks->runtime->trace_write(path, most_bytes);
        },
        py::arg("path"), py::arg("most_bytes"), Unlocked());
}

void bind_profiling(py::module_ &module) {
    module.def(
        "enable_profiling",
        [](bool enable, bool dry) {
            const ContextPointer context = current_context();
            context->profiling = enable;
            context->dry = enable && dry;
        },
        py::arg("enable"), py::arg("dry") = false,
        "Reductions do nothing; gathers are real, or with `dry` tensors without values.");
    module.def("is_profiling", [] { return current_context()->profiling; });
    module.def(
        "invalidate_gathered_param", [](int64_t id) { current_context()->zero3.invalidate(id); },
        py::arg("ds_id"), Unlocked());
    module.def(
        "clear_all_gathered_params", [] { current_context()->zero3.clear_gathered(); }, Unlocked());
}

// Passes call it while a graph is traced.
void set_persistent(int64_t id) {
    const RealTensors real_tensors;
    current_context()->zero3.set_persistent(id);
}

void bind_parameters(py::module_ &module) {
    module.def(
        "register_param",
        [](int64_t id, const std::vector<int64_t> &shape, const at::Tensor &,
           at::Tensor grad_buffer, int64_t offset) {
            current_context()->zero12.register_parameter(id, shape, std::move(grad_buffer), offset);
        },
        py::arg("ds_id"), py::arg("ds_shape"), py::arg("ds_tensor"), py::arg("grad_buffer"),
        py::arg("offset"), Unlocked());
    module.def(
        "update_param_grad_buffer",
        [](int64_t id, at::Tensor grad_buffer, int64_t offset) {
            const ContextPointer context = current_context();
            if (context->zero3.has(id))
                context->zero3.update_grad_buffer(id, grad_buffer);
            else
                context->zero12.update_grad_buffer(id, std::move(grad_buffer), offset);
        },
        py::arg("ds_id"), py::arg("grad_buffer"), py::arg("offset"), Unlocked());
    module.def(
        "register_z3_param",
        [](int64_t id, std::vector<int64_t> shape, at::Tensor tensor, at::Tensor grad_buffer,
           bool persistent, std::optional<at::ScalarType> expected_grad_dtype) {
            current_context()->zero3.register_parameter(id, std::move(shape), std::move(tensor),
                                                        std::move(grad_buffer), persistent,
                                                        expected_grad_dtype);
        },
        py::arg("ds_id"), py::arg("ds_shape"), py::arg("ds_tensor"), py::arg("grad_buffer"),
        py::arg("persistent"), py::arg("expected_grad_dtype") = py::none(), Unlocked());
    module.def("set_persistent", &set_persistent, py::arg("ds_id"), Unlocked());
}

void bind_graphs(py::module_ &module) {
    for (int stage : {1, 2, 3})
        module.def(("register_graph_z" + std::to_string(stage)).c_str(),
                   [stage](int64_t graph, const std::vector<int64_t> &ids) {
                       register_graph(stage, graph, ids);
                   },
                   py::arg("graph_id"), py::arg("ds_ids"), Unlocked());
}

void bind_passes(py::module_ &module) {
    module.def(
        "start_forward", [] { current_context()->place.begin_forward(); }, Unlocked());
    module.def(
        "end_forward", [] { current_context()->place.end_forward(); }, Unlocked());
    module.def(
        "reduce_bucket_bytes", [] { return current_context()->zero12.bucket_bytes(); },
        "Memory that ZeRO-1's and 2's reductions hold now.");
    module.def(
        "step_ends",
        [] {
            const ContextPointer context = current_context();
            context->zero3.step_ends();
            context->place.end_optimizer();
        },
        Unlocked(),
        "The optimizer is through; without this call a boundary's end_backward stands for it.");
    module.def(
        "shards_written",
        [] {
            for (const ContextPointer &context : all_contexts())
                context->zero3.shards_written();
        },
        Unlocked(),
        "Shards were written, or put elsewhere, behind the runtimes' back; all ranks call it.");
    module.def(
        "start_backward", [](bool update) { current_context()->start_backward(update); },
        py::arg("update"), Unlocked());
}

} // namespace

PYBIND11_MODULE(_dc, module) {
    module.doc() = "DeepCompile's native module on Penstock; use penstock.dc.";
    py::register_exception_translator(&translate_error);
    bind_life(module);
    bind_tracing(module);
    bind_profiling(module);
    bind_parameters(module);
    bind_graphs(module);
    bind_passes(module);
}

} // namespace penstock::dc
