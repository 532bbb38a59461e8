#include "offload.hpp"

#include "context.hpp"
#include "not_built.hpp"

#include <ATen/ATen.h>

namespace penstock::dc {

at::Tensor Offload::offload(const at::Tensor &, int64_t, int64_t) {
    not_built("offload_tensor");
}
at::Tensor Offload::wait_offload(const at::Tensor &, int64_t, int64_t) {
    not_built("wait_offload");
}
at::Tensor Offload::reload(const at::Tensor &, int64_t, int64_t) {
    not_built("reload_tensor");
}
at::Tensor Offload::wait_reload(const at::Tensor &, int64_t, int64_t) {
    not_built("wait_reload");
}
void Offload::offload_parameter(const at::Tensor &, int64_t, int64_t) {
    not_built("offload_parameter");
}
void Offload::reload_parameter(const at::Tensor &, int64_t, int64_t) {
    not_built("reload_parameter");
}
void Offload::free_tensors(const std::vector<at::Tensor> &) {
    not_built("free_tensors");
}

} // namespace penstock::dc
