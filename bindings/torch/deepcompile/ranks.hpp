// The ranks of one job: a runtime, private process groups, communicators.
#pragma once

#include "comms.hpp"
#include "segments.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

namespace penstock::dc {

class Ranks {
  public:
    int rank = 0, size = 1;
    std::shared_ptr<Runtime> runtime;
    // Nobody else uses these; nothing: the world is this one process. The first two are driven by
    // lanes, the third by the thread that asks.
    std::optional<ProcessGroup> gather, reduce, questions;
    std::optional<c10::Stream> compute; // on a GPU: the one that was current at init
    SegmentMaker segments;              // of memory that peers can map

    ~Ranks();
    // Has the others learn where this rank is, and this rank of them: also where torch waits for
    // the GPU, if there is one. With the interpreter; roll: a penstock._roll.Roll.
    void follow(pybind11::object roll, bool on_gpu);
    // The communicators, made by the first call, which blocks until all ranks are in it. Wanted:
    // "auto", or on a GPU "ce" or "nccl".
    const Comms &comms(const std::string &wanted);
    // Do peers read this rank's memory by themselves, where it was opened to them?
    bool are_read_by_peers() const {
        return comms_ && comms_->gather()->ops->open_memory != nullptr;
    }
    // "" before.
    std::string communicator() const {
        return comms_ ? comms_->name() : "";
    }
    // Do all ranks have this value? Blocks.
    bool is_equal_everywhere(uint64_t value) const;
    void check(pst_status status) const {
        runtime->check(status);
    }

  private:
    std::unique_ptr<Comms> comms_;
    pybind11::object roll_;    // that is to stop; nothing: it does not follow
    pybind11::object watched_; // the runtime, which the roll holds weakly
    std::string wanted_;
};

// A callback for who has held a tensor that was made by new.
inline void drop_tensor(void *, void *tensor) {
    delete static_cast<at::Tensor *>(tensor);
}

// While it lives, what is done on the runtime's compute stream comes behind the stream that is
// current, and the other way round after it: operators may be called on any stream.
class StreamBridge {
  public:
    explicit StreamBridge(const Ranks &ranks);
    ~StreamBridge();
    StreamBridge(const StreamBridge &) = delete;
    StreamBridge &operator=(const StreamBridge &) = delete;

  private:
    std::optional<c10::Stream> current_, compute_; // nothing: they are the same
};

} // namespace penstock::dc
