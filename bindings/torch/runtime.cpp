#include "runtime.hpp"

#include "dumps.hpp"
#include "outside_python.hpp"

#include <penstock/cuda.h>

#include <algorithm>
#include <unistd.h>
#include <vector>

namespace penstock {
namespace {

constexpr uint64_t longest_watch_ns = 60'000'000'000;
constexpr size_t most_recent = 64;

// The host's waits end at the deadline by themselves, and the watchdog reports tasks that take
// too long. Torch waits for a GPU, too, without a limit: there the watchdog ends the wait, and
// before that the roll's beat, if another rank has failed.
void set_watchdog(pst_runtime_options &options, bool on_gpu) {
    options.watchdog_poisons = on_gpu;
    options.watchdog_ns =
        on_gpu ? options.deadline_ns : std::min(options.deadline_ns / 4, longest_watch_ns);
}

pst_page *page_of(const pybind11::object &roll) {
    const pybind11::gil_scoped_acquire gil;
    const auto buffer = roll.attr("page").cast<pybind11::buffer>();
    return static_cast<pst_page *>(buffer.request(true).ptr);
}

} // namespace

// ---- life -------------------------------------------------------------------------------------

Runtime::Runtime(const std::string &name, int rank, int world_size, double deadline_seconds,
                 c10::Device device, uintptr_t stream, pybind11::object roll)
    : where_(device), pid_(getpid()), roll_(std::move(roll)), page_(page_of(roll_)),
      log_(std::make_unique<Log>()) {
    pst_runtime_options options{};
    options.size = sizeof options;
    options.rank = rank;
    options.world_size = world_size;
    options.deadline_ns = static_cast<uint64_t>(deadline_seconds * 1e9);
    set_watchdog(options, device.is_cuda());
    options.log = [](void *log, pst_log_level level, const char *text) {
        static_cast<Log *>(log)->note(level, text);
    };
    options.log_context = log_.get();
    options.waiting = [](void *self, const pst_waiting *waiting) {
        static_cast<Runtime *>(self)->on_waiting(*waiting);
    };
    options.waiting_context = this;
    options.dump_name = name.c_str();
    options.page = page_;
    pst_status status = pst_runtime_create(&options, &runtime_);
    if (status != PST_OK)
        throw StatusError{status, std::string("no runtime: ") + pst_status_text(status)};
    add_to_dumps(runtime_);
    if (!device.is_cuda()) return;
    try {
        open_gpu(stream);
    } catch (...) {
        end();
        throw;
    }
}

void Runtime::open_gpu(uintptr_t stream) {
    pst_cuda_options options{};
    options.size = sizeof options;
    options.ordinal = where_.index();
    check(pst_cuda_device_create(runtime_, &options, &device_));
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python hands over native streams as numbers
    check(device_->ops->stream_wrap(device_, reinterpret_cast<void *>(stream), &stream_));
    pst_lane_options lane{};
    lane.size = sizeof lane;
    lane.name = "compute";
    lane.device = device_;
    lane.stream = stream_;
    lane.mode = PST_LANE_BORROWED;
    check(pst_lane_create(runtime_, &lane, &compute_));
}

// The device comes last: lanes of the runtime use it to the end.
void Runtime::destroy() {
    if (!home_.is_this()) return;
    std::unique_lock<std::mutex> lock(ending_);
    if (runtime_ != nullptr) remove_from_dumps(runtime_);
    const pst_status status = pst_runtime_destroy(runtime_);
    if (status == PST_OK) {
        if (stream_ != nullptr) device_->ops->stream_destroy(device_, stream_);
        if (device_ != nullptr) device_->ops->destroy(device_);
        runtime_ = nullptr;
        stream_ = nullptr;
        device_ = nullptr;
        compute_ = nullptr;
    }
    lock.unlock();
    check(status);
}

void Runtime::end() noexcept {
    try {
        destroy();
    } catch (...) {
        if (runtime_ != nullptr)
            (void)log_.release(); // the thread that has not ended may log to it
    }
}

Runtime::~Runtime() {
    ignore_signals();
    {
        const WithoutInterpreter without; // a worker that is to end may be waiting for it
        end();
    }
    const pybind11::gil_scoped_acquire gil;
    try {
        if (log_) forward_log();
    } catch (pybind11::error_already_set &error) {
        error.discard_as_unraisable("penstock's log");
    }
    if (runtime_ != nullptr) { // nor may it lose the pages: this rank's, and those it follows
        (void)roll_.release();
        (void)followed_.release();
    }
    roll_ = pybind11::object();
    followed_.reset();
}

void Runtime::check_process(const std::string &what) const {
    if (home_.is_this()) return;
    throw StatusError{PST_ESTATE, what + " belongs to process " + std::to_string(pid_) +
                                      ", and this is process " + std::to_string(getpid()) +
                                      ", forked from it without its threads: train there, or "
                                      "start this process by spawn and begin anew in it"};
}

pst_runtime *Runtime::open() {
    check_process("this sharded model");
    if (runtime_ == nullptr) throw StatusError{PST_ESTATE, "this sharded model was closed"};
    return runtime_;
}

// ---- the flight record ------------------------------------------------------------------------

void Runtime::follow(const pybind11::dict &pages) {
    for (const auto &[rank, page] : pages) {
        pybind11::buffer_info info = page.cast<pybind11::buffer>().request();
        check(pst_runtime_follow(open(), rank.cast<int>(), page_in(info)));
        followed_->push_back(std::move(info));
    }
}

// ---- the trace --------------------------------------------------------------------------------

void Runtime::trace_start() {
    check(pst_trace_start(open()));
}

void Runtime::trace_stop() {
    check(pst_trace_stop(open()));
}

void Runtime::trace_write(const std::string &path, uint64_t most_bytes) {
    if (path.find('\0') != std::string::npos)
        throw StatusError{PST_EINVAL, "trace: the path has a NUL in it: give another one"};
    check(pst_trace_write_newest(open(), path.c_str(), most_bytes));
}

void Runtime::trace_slice(const std::string &name, uint64_t begin_ns, uint64_t end_ns) {
    pst_trace_slice(open(), name.c_str(), begin_ns, end_ns);
}

// ---- failing ----------------------------------------------------------------------------------

std::string Runtime::lost(pst_status status, const std::string &text) {
    if (!lost_.empty()) return lost_;
    const pybind11::gil_scoped_acquire gil;
    lost_ = roll_.attr("lost")(pst_status_name(status), to_python(text)).cast<std::string>();
    return lost_;
}

void Runtime::check(pst_status status) {
    if (log_->has_lines()) forward_log();
    if (raised_) {
        (void)lost(PST_ECANCELED, runtime_error_text(runtime_));
        std::rethrow_exception(std::exchange(raised_, nullptr));
    }
    if (status == PST_OK) return;
    std::string text = runtime_error_text(runtime_);
    if (text.empty()) text = pst_status_text(status);
    if (status == pst_runtime_status(runtime_)) text = lost(status, text);
    throw StatusError{status, text};
}

void Runtime::stop(const std::string &why) {
    const std::lock_guard<std::mutex> guard(ending_);
    if (runtime_ != nullptr) pst_runtime_poison(runtime_, PST_EPEER, why.c_str());
}

// ---- waiting ----------------------------------------------------------------------------------

namespace {

std::vector<pst_recent> recent_launches(pst_runtime *runtime) {
    std::vector<pst_recent> launches(most_recent);
    launches.resize(pst_runtime_recent(runtime, launches.data(), launches.size()));
    return launches;
}

pybind11::list list_of(const std::vector<pst_recent> &launches) {
    pybind11::list list;
    for (const pst_recent &launch : launches)
        list.append(
            pybind11::make_tuple(to_python(launch.lane), to_python(launch.task), launch.ticket));
    return list;
}

} // namespace

pybind11::list Runtime::recent() {
    std::vector<pst_recent> launches;
    {
        const pybind11::gil_scoped_release release; // what ends may be waiting for the interpreter
        const std::lock_guard<std::mutex> guard(ending_);
        launches = recent_launches(runtime_);
    }
    return list_of(launches);
}

// On the thread that waits, which poisons without the interpreter: others may hold the library's
// locks and want that.
void Runtime::on_waiting(const pst_waiting &waiting) {
    if (ignores_signals_ || raised_) return;
    const auto [status, why] = call_python(waiting);
    if (status != PST_OK) pst_runtime_poison(runtime_, status, why.c_str());
}

// Returns whether to give up, and why. A signal's handler in Python runs when the main thread looks
// for it.
std::pair<pst_status, std::string> Runtime::call_python(const pst_waiting &waiting) {
    const pybind11::gil_scoped_acquire gil;
    try {
        if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
        forward_log();
        const double seconds = static_cast<double>(waiting.waited_ns) / 1e9;
        auto why = roll_
                       .attr("waits")(seconds, waiting.lane, waiting.ticket,
                                      list_of(recent_launches(runtime_)))
                       .cast<std::string>();
        return {why.empty() ? PST_OK : PST_EPEER, std::move(why)};
    } catch (const pybind11::error_already_set &error) {
        raised_ = std::current_exception();
        const auto name = pybind11::str(error.type().attr("__name__")).cast<std::string>();
        return {PST_ECANCELED, "a wait was broken off by " + name};
    } catch (const std::exception &) { // no memory: the next look comes soon
        return {PST_OK, {}};
    }
}

// ---- the log ----------------------------------------------------------------------------------

void Runtime::forward_log() {
    const std::vector<std::unique_ptr<Log::Line>> lines = log_->take();
    if (lines.empty()) return;
    const pybind11::gil_scoped_acquire gil;
    for (auto line = lines.rbegin(); line != lines.rend(); ++line)
        roll_.attr("log")(static_cast<int>((*line)->level), (*line)->is_raised,
                          to_python((*line)->text));
}

} // namespace penstock
