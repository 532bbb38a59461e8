// Device memory of the library's arenas, out of torch's allocator: so it is seen in torch's memory
// statistics.
#pragma once

#include <penstock/status.h>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <map>

namespace penstock::dc {

// What is freed may be used by the current stream at once, so the library's streams are through
// with it by then.
class Segments {
  public:
    explicit Segments(c10::Device device) : device_(device) {}
    static pst_status allocate(void *segments, size_t bytes, void **memory);
    static void free(void *segments, void *memory, size_t bytes);

  private:
    c10::Device device_;
    std::map<void *, c10::DataPtr> live_;
};

} // namespace penstock::dc
