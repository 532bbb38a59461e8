// What a gathered parameter looks like to torch: a storage whose memory comes and goes. Tensors on
// it stay alive while it has none; its size is 0 then.
#pragma once

#include <ATen/core/Tensor.h>

namespace penstock::dc {

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

} // namespace penstock::dc
