#include "segments.hpp"

#include <c10/core/DeviceGuard.h>

#include <exception>

namespace penstock::dc {

pst_status Segments::allocate(void *segments, size_t bytes, void **memory) {
    auto &self = *static_cast<Segments *>(segments);
    try {
        c10::DeviceGuard guard(self.device_);
        c10::DataPtr piece = c10::GetAllocator(self.device_.type())->allocate(bytes);
        *memory = piece.get();
        self.live_[*memory] = std::move(piece);
        return PST_OK;
    } catch (const std::exception &) {
        return PST_ENOMEM;
    }
}

void Segments::free(void *segments, void *memory, size_t) {
    static_cast<Segments *>(segments)->live_.erase(memory);
}

} // namespace penstock::dc
