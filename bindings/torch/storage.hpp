// The storage of a gathered parameter: it keeps its identity while its address comes and goes.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace penstock {

// A contiguous tensor of the CPU or a GPU whose storage has a size but no memory; touching it
// raises `message`.
at::Tensor make_released_tensor(at::IntArrayRef shape, at::ScalarType dtype, at::Device device,
                                const std::string &message);

// A contiguous tensor of that shape on the elements of `whole`, which it keeps, from `first` on;
// its storage is its own, and begins there.
at::Tensor make_view(const at::Tensor &whole, int64_t first, at::IntArrayRef shape);

// From now on the tensor, and every other tensor on its storage, lies at `memory` (not owned).
void bind_storage(const at::Tensor &tensor, void *memory);

// Takes the address away; any later access to the data raises an error with `message`.
void release_storage(const at::Tensor &tensor, const std::string &message);

} // namespace penstock
