// The extension module penstock._C.
#include "adamw.hpp"
#include "dumps.hpp"
#include "engine.hpp"
#include "hooks.hpp"
#include "offload.hpp"
#include "outside_python.hpp"
#include "storage.hpp"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace penstock {
namespace {

py::dict stats_dict(const pst_zero_stats &stats) {
    py::dict result;
#define PST_PUT(field) result[#field] = stats.field
    PST_PUT(gathers);
    PST_PUT(gather_bytes);
    PST_PUT(reduces);
    PST_PUT(reduce_bytes);
    PST_PUT(exposed_ns);
    PST_PUT(exposed_gather_ns);
    PST_PUT(exposed_reduce_ns);
    PST_PUT(forwards);
    PST_PUT(backwards);
    PST_PUT(planned_passes);
    PST_PUT(replayed_passes);
    PST_PUT(updates);
    PST_PUT(deviations);
    PST_PUT(prefetches);
    PST_PUT(arena_peak);
    PST_PUT(arena_reserved);
    PST_PUT(bucket_peak);
    PST_PUT(plan_peak);
    PST_PUT(plan_lower_bound);
    PST_PUT(late_launches);
    PST_PUT(device_gather_ns);
    PST_PUT(device_reduce_ns);
    PST_PUT(timed_waits);
    PST_PUT(untimed_waits);
    PST_PUT(places_reserved);
    PST_PUT(sources_reserved);
    PST_PUT(staging_reserved);
    PST_PUT(passes_ns);
    PST_PUT(timed_passes);
    PST_PUT(graphs_ns);
    PST_PUT(timed_graphs);
    PST_PUT(all_reduces);
    PST_PUT(all_reduce_bytes);
#undef PST_PUT
    return result;
}

// What a profiler shows of the training: see _phases.py.
void bind_profiler(py::module_ &module) {
    module.def("is_profiled", [] { return pst_profiler_is_attached() != 0; });
    module.def("begin_range", &pst_profiler_begin);
    module.def("end_range", &pst_profiler_end);
}

void bind_pages(py::module_ &module) {
    py::class_<Page>(module, "Page", py::buffer_protocol())
        .def(py::init<>())
        .def_property_readonly("descriptor", &Page::descriptor)
        .def_property_readonly("count", &Page::count)
        .def("describe", [](const Page &page) { return to_python(page.describe()); })
        .def("name_units", &Page::name_units)
        .def("reach", &Page::reach)
        .def_buffer([](Page &page) {
            return py::buffer_info(reinterpret_cast<uint8_t *>(page.get()), PST_PAGE_BYTES);
        });
    module.def("describe_page",
               [](const py::buffer &buffer) { return to_python(describe_page(buffer)); });
}

void bind_runtime(py::module_ &module) {
    py::class_<Runtime, std::shared_ptr<Runtime>>(module, "Runtime")
        .def(py::init(&make_own<Runtime, const std::string &, int, int, double, at::Device,
                                uintptr_t, py::object>),
             py::arg("name"), py::arg("rank"), py::arg("world_size"), py::arg("deadline_seconds"),
             py::arg("device"), py::arg("stream"), py::arg("roll"))
        .def("destroy", &Runtime::destroy, py::call_guard<py::gil_scoped_release>())
        .def("follow", &Runtime::follow)
        .def("recent", &Runtime::recent)
        .def("stop", &Runtime::stop, py::call_guard<py::gil_scoped_release>())
        .def("trace_start", &Runtime::trace_start)
        .def("trace_stop", &Runtime::trace_stop)
        .def("trace_write", &Runtime::trace_write, py::call_guard<py::gil_scoped_release>())
        .def("trace_slice", &Runtime::trace_slice);
}

void bind_layouts(py::module_ &module) {
    py::class_<pst_group_layout>(module, "GroupLayout")
        .def_readonly("shard_bytes", &pst_group_layout::shard_bytes)
        .def_readonly("gathered_bytes", &pst_group_layout::gathered_bytes)
        .def_readonly("gradient_bytes", &pst_group_layout::gradient_bytes);
    py::class_<pst_parameter_layout>(module, "ParameterLayout")
        .def_readonly("first_row", &pst_parameter_layout::first_row)
        .def_readonly("shard_rows", &pst_parameter_layout::shard_rows)
        .def_readonly("shard_offset", &pst_parameter_layout::shard_offset)
        .def_readonly("gradient_offset", &pst_parameter_layout::gradient_offset);
    py::class_<pst_zero_plan>(module, "ZeroPlan")
        .def_readonly("groups", &pst_zero_plan::groups)
        .def_readonly("uses", &pst_zero_plan::uses)
        .def_readonly("peak_bytes", &pst_zero_plan::peak_bytes)
        .def_readonly("lower_bound_bytes", &pst_zero_plan::lower_bound_bytes)
        .def_readonly("hash", &pst_zero_plan::hash);
}

void bind_plans(py::module_ &module) {
    py::class_<Recording>(module, "Recording").def(py::init<const std::vector<Operation> &>());
    py::class_<pst_zero_forecast>(module, "Forecast")
        .def_readonly("step_ns", &pst_zero_forecast::step_ns)
        .def_readonly("exposed_ns", &pst_zero_forecast::exposed_ns)
        .def_readonly("peak_bytes", &pst_zero_forecast::peak_bytes)
        .def_readonly("kept_bytes", &pst_zero_forecast::kept_bytes)
        .def_readonly("keep_bytes", &pst_zero_forecast::keep_bytes);
    py::class_<pst_zero_draft>(module, "Draft")
        .def_readonly("prefetch_ahead", &pst_zero_draft::prefetch_ahead)
        .def_readonly("keep_bytes", &pst_zero_draft::keep_bytes)
        .def_readonly("peak_bytes", &pst_zero_draft::peak_bytes)
        .def_readonly("step_ns", &pst_zero_draft::step_ns)
        .def_readonly("exposed_ns", &pst_zero_draft::exposed_ns);
    module.def("predict", &predict);
    py::class_<pst_zero_gather_forecast>(module, "GatherForecast")
        .def_readonly("start_ns", &pst_zero_gather_forecast::start_ns)
        .def_readonly("lands_ns", &pst_zero_gather_forecast::lands_ns)
        .def_readonly("used_ns", &pst_zero_gather_forecast::used_ns);
    py::class_<pst_zero_group_forecast>(module, "GroupForecast")
        .def_readonly("bytes", &pst_zero_group_forecast::bytes)
        .def_property_readonly(
            "keep",
            [](const pst_zero_group_forecast &group) { return static_cast<int>(group.keep); })
        .def_readonly("gather_ns", &pst_zero_group_forecast::gather_ns)
        .def_readonly("reduce_ns", &pst_zero_group_forecast::reduce_ns)
        .def_readonly("forward", &pst_zero_group_forecast::forward)
        .def_readonly("backward", &pst_zero_group_forecast::backward);
}

std::shared_ptr<Engine>
create_engine(std::shared_ptr<Runtime> runtime, std::string name, std::string communicator,
              int stage, const std::optional<ProcessGroup> &gather,
              const std::optional<ProcessGroup> &reduce, const std::optional<Nodes> &nodes,
              const std::optional<ProcessGroup> &replicas, uint32_t prefetch_ahead,
              size_t prefetch_bytes, size_t bucket_bytes, size_t part_bytes, bool verify,
              bool time_waits, bool shards_on_host, bool transient_copies, bool in_callers_order,
              SegmentMaker segments) {
    const EngineOptions options{std::move(name),
                                std::move(communicator),
                                stage,
                                prefetch_ahead,
                                prefetch_bytes,
                                bucket_bytes,
                                part_bytes,
                                verify,
                                time_waits,
                                shards_on_host,
                                transient_copies,
                                in_callers_order};
    const WithoutInterpreter without; // it waits for its peers
    return make_own<Engine>(std::move(runtime), options, gather, reduce, nodes, replicas,
                            std::move(segments));
}

// What a signal's handler has raised meanwhile is raised when all is given back.
void destroy_engine(Engine &engine) {
    engine.destroy();
    engine.runtime().check(PST_OK);
}

// The function may be let go of on any thread, with the interpreter or without it.
void set_filler(Engine &engine, py::object function) {
    const auto held =
        std::make_shared<c10::SafePyObject>(function.release().ptr(), getPyInterpreter());
    engine.set_filler([held](uint32_t group, const at::Tensor &copy) {
        const py::gil_scoped_acquire gil;
        py::handle(held->ptr(getPyInterpreter()))(group, copy);
    });
}

// Everything that may wait, or that moves much memory, runs without the interpreter's lock.
void bind_engine(py::module_ &module) {
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
        .def(py::init(&create_engine), py::kw_only(), py::arg("runtime"), py::arg("name"),
             py::arg("communicator"), py::arg("stage"), py::arg("gather"), py::arg("reduce"),
             py::arg("nodes"), py::arg("replicas"), py::arg("prefetch_ahead"),
             py::arg("prefetch_bytes"), py::arg("bucket_bytes"), py::arg("part_bytes"),
             py::arg("verify"), py::arg("time_waits"), py::arg("shards_on_host"),
             py::arg("transient_copies"), py::arg("in_callers_order"), py::arg("segments"))
        .def("destroy", &destroy_engine, Unlocked())
        .def("communicator", &Engine::communicator)
        .def("why_not_ce", &Engine::why_not_ce)
        .def("add_parameter", &Engine::add_parameter)
        .def("add_group", &Engine::add_group)
        .def("seal", &Engine::call<pst_zero_seal>, Unlocked())
        .def("group_layout", &Engine::group_layout)
        .def("parameter_layout", &Engine::parameter_layout)
        .def("make_shard", &Engine::make_shard)
        .def("bind_shard", &Engine::bind_shard)
        .def("attach", &Engine::attach)
        .def("set_filler", &set_filler)
        .def("add_unit", &Engine::add_unit)
        .def("begin_forward", &Engine::begin_forward, Unlocked())
        .def("use", &Engine::use, Unlocked())
        .def("done", &Engine::done)
        .def("refuse_written", py::overload_cast<>(&Engine::refuse_written))
        .def("end_forward", &Engine::call<pst_zero_end_forward>, Unlocked())
        .def("begin_backward", &Engine::call<pst_zero_begin_backward, bool>, Unlocked())
        .def("may_update", &Engine::call<pst_zero_may_update, uint32_t>)
        .def("update", &Engine::update, Unlocked())
        .def("is_updated", &Engine::call<pst_zero_is_updated, uint32_t>)
        .def("gradients", &Engine::gradients, Unlocked())
        .def("unreported", &Engine::unreported)
        .def("set_gradient", &Engine::set_gradient)
        .def("take_gradients", &Engine::take_gradients)
        .def("end_backward", &Engine::call<pst_zero_end_backward>, Unlocked())
        .def("have_gradients", &Engine::have_gradients)
        .def("has_written", &Engine::call<pst_zero_has_written, uint32_t>)
        .def("updated", &Engine::call<pst_zero_updated>)
        .def("is_steady", &Engine::call<pst_zero_is_steady>)
        .def("drain", &Engine::drain, Unlocked())
        .def("begin_capture", &Engine::begin_capture)
        .def("end_capture", &Engine::call<pst_zero_end_capture>)
        .def("before_graph", &Engine::call<pst_zero_before_graph>)
        .def("after_graph", &Engine::call<pst_zero_after_graph>)
        .def("recorded", &Engine::recorded)
        .def("compile", &Engine::compile, Unlocked())
        .def("make_drafts", &Engine::make_drafts, Unlocked())
        .def("plan_with", &Engine::call<pst_zero_plan_with, uint32_t, size_t>)
        .def("forecast", &Engine::forecast)
        .def("group_forecast", &Engine::group_forecast)
        .def("set_replay", &Engine::call<pst_zero_set_replay, bool>)
        .def("set_timing", &Engine::call<pst_zero_set_timing, bool>)
        .def("stats", [](const Engine &engine) { return stats_dict(engine.stats()); })
        .def("reset_stats", &Engine::call<pst_zero_reset_stats>);
}

AdamWSettings settings_of(const py::kwargs &given) {
    using Tensor = std::optional<at::Tensor>;
    return {given["lr"].cast<double>(),
            given["beta1"].cast<double>(),
            given["beta2"].cast<double>(),
            given["eps"].cast<double>(),
            given["weight_decay"].cast<double>(),
            given["maximize"].cast<bool>(),
            given["seed"].cast<uint64_t>(),
            given["lr_at"].cast<Tensor>(),
            given["gradient_scale"].cast<Tensor>(),
            given["gradient_factor"].cast<Tensor>(),
            given["found_inf"].cast<Tensor>()};
}

AdamWTensors tensors_of(const py::kwargs &given) {
    using Tensors = std::vector<at::Tensor>;
    return {given["parameters"].cast<Tensors>(),  given["gradients"].cast<Tensors>(),
            given["exp_avgs"].cast<Tensors>(),    given["exp_avg_sqs"].cast<Tensors>(),
            given["largest"].cast<Tensors>(),     given["copies"].cast<Tensors>(),
            given["steps"].cast<Tensors>(),       given["firsts"].cast<std::vector<uint64_t>>(),
            given["rounds_randomly"].cast<bool>()};
}

void bind_adamw(py::module_ &module) {
    py::class_<AdamWUpdates, std::shared_ptr<AdamWUpdates>>(module, "AdamWUpdates");
    py::class_<AdamW, std::shared_ptr<AdamW>>(module, "AdamW")
        .def(py::init(&make_own<AdamW, at::Device>), py::arg("device"))
        .def("step",
             [](AdamW &self, uintptr_t stream, const py::kwargs &given) {
                 const AdamWSettings settings = settings_of(given);
                 AdamWTensors tensors = tensors_of(given);
                 const py::gil_scoped_release unlocked;
                 self.step(stream, settings, std::move(tensors));
             })
        .def("prepare_updates", [](AdamW &self, uintptr_t stream, std::vector<uint32_t> numbers,
                                   const py::kwargs &given) {
            const AdamWSettings settings = settings_of(given);
            AdamWTensors tensors = tensors_of(given);
            const py::gil_scoped_release unlocked;
            return self.prepare_updates(stream, settings, std::move(tensors), std::move(numbers));
        });
}

int64_t sum_versions(const std::vector<at::Tensor> &tensors) {
    int64_t sum = 0;
    for (const at::Tensor &tensor : tensors)
        sum += tensor._version();
    return sum;
}

void bind_hooks(py::module_ &module) {
    module.def("call_before", &call_before);
    module.def("mark", &mark);
    py::class_<Arrived, std::shared_ptr<Arrived>>(module, "Arrived")
        .def(py::init<py::object>())
        .def("watch", &Arrived::watch)
        .def("add", &Arrived::add)
        .def("note", &Arrived::note)
        .def("clear", &Arrived::clear)
        .def_property_readonly("count", &Arrived::count)
        .def_property(
            "expected", [](const Arrived &arrived) { return arrived.expected.load(); },
            [](Arrived &arrived, size_t expected) { arrived.expected = expected; });
}

// Each of them gives up the interpreter where it may wait.
void bind_offload(py::module_ &module) {
    py::class_<Stored, std::shared_ptr<Stored>>(module, "Stored")
        .def("wait_store", &Stored::wait_store)
        .def("load", &Stored::load)
        .def("wait_load", &Stored::wait_load);
    py::class_<Offload, std::shared_ptr<Offload>>(module, "Offload")
        .def(py::init(&make_own<Offload, const std::shared_ptr<Runtime> &, size_t>),
             py::arg("runtime"), py::arg("most_bytes"))
        .def("store", &Offload::store)
        .def("close", &Offload::close)
        .def("stats", [](Offload &offload) {
            const pst_offload_stats stats = offload.stats();
            py::dict result;
            result["stores"] = stats.stores;
            result["store_bytes"] = stats.store_bytes;
            result["loads"] = stats.loads;
            result["load_bytes"] = stats.load_bytes;
            result["host_bytes"] = stats.host_bytes;
            result["host_peak"] = stats.host_peak;
            return result;
        });
}

} // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() = "Penstock's ZeRO engine over libtorch; use the package `penstock`.";
    module.attr("__version__") = PENSTOCK_VERSION;
    py::register_exception_translator(&translate_error);
    bind_profiler(module);
    bind_pages(module);
    bind_runtime(module);
    bind_layouts(module);
    bind_plans(module);
    bind_engine(module);
    bind_adamw(module);
    bind_hooks(module);
    bind_offload(module);
    module.def("dump", &dump_as_asked, py::call_guard<py::gil_scoped_release>(), py::arg("folder"),
               py::arg("reason"), py::arg("is_failure"),
               "Writes the flight records of all runtimes of this module; returns the files.");
    module.def(
        "make_released_tensor", &make_released_tensor,
        "A tensor with a shape and no memory: the engine gives it some while it is gathered.");
    module.def("sum_versions", &sum_versions,
               "A number that grows with every in-place operation on one of the tensors.");
    module.def("make_view", &make_view, "A part of a flat tensor, in a storage of its own.");
    module.def(
        "bind",
        [](const at::Tensor &tensor, const at::Tensor &memory) {
            bind_storage(tensor, memory.mutable_data_ptr());
        },
        "Gives the memory of another tensor, which has to live, to all tensors on a storage.");
    module.def("release", &release_storage, "Takes the memory away from all tensors on a storage.");
}

} // namespace penstock
