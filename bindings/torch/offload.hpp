// What autograd has saved leaves the device for the host's memory and comes back:
// penstock/offload.h with storages in place of pointers.
#pragma once

#include "process.hpp"
#include "runtime.hpp"

#include <penstock/offload.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace penstock {

class Offload;

// A storage's contents on the host, which are forgotten with it. Let go of on any thread.
class Stored {
  public:
    Stored(std::shared_ptr<Offload> offload, uint64_t key, size_t bytes)
        : offload_(std::move(offload)), key_(key), bytes_(bytes) {}
    ~Stored();
    Stored(const Stored &) = delete;
    Stored &operator=(const Stored &) = delete;

    // Compute comes behind the copy to the host, and those stored before it: nobody reads their
    // storages on the device any more.
    void wait_store();
    // A tensor of bytes on a new storage like the one that was stored, which compute may use behind
    // `wait_load`. The copy comes behind all that compute was given so far.
    at::Tensor load();
    void wait_load();

  private:
    const std::shared_ptr<Offload> offload_;
    const uint64_t key_;
    const size_t bytes_;
};

// Called with the interpreter or without it, on any thread, one at a time.
class Offload : public std::enable_shared_from_this<Offload> {
  public:
    // `most_bytes`: of the host's memory, for all that is stored at a time. On a GPU the runtime's
    // stream is current.
    Offload(std::shared_ptr<Runtime> runtime, size_t most_bytes);
    ~Offload();
    Offload(const Offload &) = delete;
    Offload &operator=(const Offload &) = delete;

    // Copies the storage of a tensor, which keeps its contents until `wait_store`, and is held
    // until nobody reads it. NULL: the host has no memory for it.
    std::shared_ptr<Stored> store(const at::Tensor &tensor);
    // Waits for its copies; before the runtime is destroyed. What is stored is lost.
    void close();
    pst_offload_stats stats();

  private:
    friend class Stored;
    pst_offload *open(); // with lock_
    void forget_returned();

    const std::shared_ptr<Runtime> runtime_;
    const size_t most_bytes_;
    std::optional<c10::Stream> compute_; // on a GPU: what comes back is memory of this stream's
    const Process home_;
    std::mutex lock_; // of the C object, which one thread uses at a time
    pst_offload *offload_ = nullptr;
    uint64_t last_key_ = 0;
    std::mutex returned_lock_;       // of the next; nothing is waited for under it
    std::vector<uint64_t> returned_; // keys that nobody has any more
};

} // namespace penstock
