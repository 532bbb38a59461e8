// A runtime and the device that an engine works on.
#pragma once

#include "log.hpp"
#include "page.hpp"
#include "process.hpp"
#include "status.hpp"

#include <penstock/graph.h>
#include <penstock/trace.h>

#include <c10/core/Device.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace penstock {

// One thread at a time, which may have the interpreter or not.
class Runtime {
  public:
    // `stream`: on a GPU the native handle of the stream to train on (0: the default stream).
    // `name`: with which the files of its flight record begin, the same on all ranks and another
    // one than of other engines. `roll`: a penstock._roll.Roll, which learns of waits and failures,
    // and has this rank's page.
    Runtime(const std::string &name, int rank, int world_size, double deadline_seconds,
            c10::Device device, uintptr_t stream, pybind11::object roll);
    ~Runtime();
    Runtime(const Runtime &) = delete;
    Runtime &operator=(const Runtime &) = delete;

    // Ends its threads; what works on it has ended before. Throws if one does not come back by the
    // deadline. Nothing in a child of fork.
    void destroy();
    // From now on waits do not look for signals: what their handlers raise could not be reported.
    void ignore_signals() {
        ignores_signals_ = true;
    }
    // Whether this is the process that made it, and not a child of fork.
    bool is_here() const {
        return home_.is_this();
    }
    // Throws unless it is. `what` it is that cannot be used.
    void check_process(const std::string &what) const;

    // NULL when it was destroyed.
    pst_runtime *get() const {
        return runtime_;
    }
    c10::Device where() const {
        return where_;
    }
    // NULL on the CPU: the runtime's host device, and the calling thread.
    pst_device *device() const {
        return device_;
    }
    pst_lane *compute() const {
        return compute_;
    }
    // This rank's; lives as long as this.
    pst_page *page() const {
        return page_;
    }
    // Throws what a signal's handler has raised meanwhile, and else unless `status` is PST_OK, with
    // the runtime's text of what happened; where the runtime has failed, with what is known of
    // other ranks. Hands on what the library has logged.
    void check(pst_status status);
    // Has the flight record say where other ranks are: `pages` has theirs, mapped, by rank.
    void follow(const pybind11::dict &pages);
    // The last launches, as Roll.waits takes them; with the interpreter. These two: any thread,
    // also beside destroy and behind it.
    pybind11::list recent();
    // Ends all waits, also those for the device: another rank has failed. Without the interpreter.
    void stop(const std::string &why);
    void trace_start();
    void trace_stop();
    void trace_write(const std::string &path, uint64_t most_bytes);
    void trace_slice(const std::string &name, uint64_t begin_ns, uint64_t end_ns);

  private:
    void open_gpu(uintptr_t stream);
    void end() noexcept;
    pst_runtime *open();
    void on_waiting(const pst_waiting &waiting);
    std::pair<pst_status, std::string> call_python(const pst_waiting &waiting);
    void forward_log();
    std::string lost(pst_status status, const std::string &text);

    pst_runtime *runtime_ = nullptr;
    std::mutex ending_; // held while it ends, and by other threads that use it
    c10::Device where_;
    pst_device *device_ = nullptr;
    pst_stream *stream_ = nullptr;
    pst_lane *compute_ = nullptr;

    const Process home_;
    const int64_t pid_;
    pybind11::object roll_;
    pst_page *const page_; // which the roll keeps
    // Outlive `runtime_`, as the next one; these keep other ranks' pages.
    std::unique_ptr<std::vector<pybind11::buffer_info>> followed_ =
        std::make_unique<std::vector<pybind11::buffer_info>>();
    std::unique_ptr<Log> log_;
    std::exception_ptr raised_; // by a signal's handler, in a wait
    bool ignores_signals_ = false;
    std::string lost_; // what is known of the failure, once it was asked
};

} // namespace penstock
