// Memory that shards are pieces of.
#pragma once

#include "segments.hpp"

#include <c10/core/Storage.h>

namespace penstock::dc {

// The contents go to memory that `make` gives, under all tensors on this storage, which keep what
// they are. Blocks until the device has done everything; the memory before is free then.
void move_memory(c10::Storage &home, const SegmentMaker &make);

} // namespace penstock::dc
