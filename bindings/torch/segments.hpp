// Segments of an engine's arenas that are tensors of torch's, so that its allocator counts them.
#pragma once

#include <penstock/status.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <unordered_map>

namespace penstock {

// A tensor of so many bytes. What peers are to map lies at the begin of what torch has got from
// penstock_segment_alloc (exportable.hpp). Empty: segments come from the device itself.
using SegmentMaker = std::function<at::Tensor(size_t)>;

// Ordinary memory of torch's on this device: what is freed may be used by its current stream at
// once.
SegmentMaker segments_of(c10::Device device);

class Segments {
  public:
    explicit Segments(SegmentMaker make) : make_(std::move(make)) {}
    // Tensors that the engine has left behind, because something may still write to them, stay.
    ~Segments();
    Segments(const Segments &) = delete;
    Segments &operator=(const Segments &) = delete;

    explicit operator bool() const {
        return static_cast<bool>(make_);
    }
    // The segment that this memory lies in, which lives as long as what is returned; undefined:
    // in none of them.
    at::Tensor find(const void *memory) const;
    // As pst_zero_options wants them; the context is the object.
    static pst_status alloc(void *context, size_t bytes, void **memory);
    static void free(void *context, void *memory, size_t bytes);

  private:
    SegmentMaker make_;
    std::unordered_map<void *, at::Tensor> held_;
};

} // namespace penstock
