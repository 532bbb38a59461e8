// Storages whose memory comes and goes, under the tensors on them.
#pragma once

#include "segments.hpp"

#include <ATen/core/Tensor.h>

namespace penstock::dc {

// What a gathered parameter looks like to torch. Tensors on it stay alive while it has no memory;
// its size is 0 then.
class Gathered {
  public:
    Gathered(c10::Device device, at::ScalarType dtype);

    // The memory is not owned.
    void bind(void *memory, size_t bytes);
    void clear();
    at::Tensor view(at::IntArrayRef shape) const;

  private:
    c10::Storage storage_;
    at::ScalarType dtype_;
};

// A contiguous tensor at the begin of a storage.
at::Tensor tensor_on(c10::Storage storage, at::ScalarType dtype, at::IntArrayRef shape);

// The memory of a storage goes. Tensors on it stay alive.
void free_storage(c10::StorageImpl &storage);

// The contents go to memory that `make` gives, under all tensors on this storage, which keep what
// they are. Blocks until the device has done everything; the memory before is free then.
void move_memory(c10::Storage &home, const SegmentMaker &make);

} // namespace penstock::dc
