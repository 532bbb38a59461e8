#include "segments.hpp"

#include "outside_python.hpp"

#include <ATen/Functions.h>

#include <new>
#include <utility>

namespace penstock {

SegmentMaker segments_of(c10::Device device) {
    return [device](size_t bytes) {
        return at::empty({static_cast<int64_t>(bytes)},
                         at::TensorOptions().dtype(at::kByte).device(device));
    };
}

Segments::~Segments() {
    if (held_.empty()) return;
    new (std::nothrow) std::pair<SegmentMaker, decltype(held_)>(std::move(make_), std::move(held_));
}

at::Tensor Segments::find(const void *memory) const {
    const auto wanted = reinterpret_cast<uintptr_t>(memory);
    for (const auto &[begin, segment] : held_)
        if (wanted - reinterpret_cast<uintptr_t>(begin) < segment.nbytes()) return segment;
    return {};
}

pst_status Segments::alloc(void *context, size_t bytes, void **memory) {
    auto &self = *static_cast<Segments *>(context);
    const RealTensors real_tensors;
    try {
        at::Tensor made = self.make_(bytes);
        *memory = made.mutable_data_ptr();
        // An alias that Python does not know of, so that it may go on any thread.
        self.held_.emplace(*memory, made.alias());
        return PST_OK;
    } catch (const std::exception &) {
        return PST_ENOMEM;
    }
}

void Segments::free(void *context, void *memory, size_t) {
    static_cast<Segments *>(context)->held_.erase(memory);
}

} // namespace penstock
