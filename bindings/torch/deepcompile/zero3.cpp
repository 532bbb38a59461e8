#include "zero3.hpp"

#include "context.hpp"
#include "not_built.hpp"

#include <ATen/ATen.h>

namespace penstock::dc {

void Zero3::register_parameter(int64_t, std::vector<int64_t>, at::Tensor, at::Tensor, bool,
                               std::optional<at::ScalarType>) {
    not_built("register_z3_param");
}
void Zero3::set_persistent(int64_t) {
    not_built("set_persistent");
}
void Zero3::invalidate(int64_t) {
    not_built("invalidate_gathered_param");
}
void Zero3::clear_gathered() {
    not_built("clear_all_gathered_params");
}
at::Tensor Zero3::describe(int64_t, std::optional<at::ScalarType>) const {
    not_built("allgather_param");
}
at::Tensor Zero3::gather(int64_t, int64_t, std::optional<at::ScalarType>) {
    not_built("allgather_param");
}
void Zero3::prefetch(int64_t, const std::vector<int64_t> &,
                     const std::optional<std::vector<at::ScalarType>> &) {
    not_built("prefetch_params_fused");
}
void Zero3::wait(int64_t, int64_t) {
    not_built("wait_allgather");
}
void Zero3::release(int64_t, int64_t, int64_t) {
    not_built("release_param");
}
void Zero3::register_graph(int64_t, const std::vector<int64_t> &) {
    not_built("register_graph_z3");
}
void Zero3::forget_graphs() {}
void Zero3::start_backward(bool) {}
void Zero3::reduce_grad(const at::Tensor &, int64_t, int64_t) {
    not_built("reduce_grad");
}
void Zero3::end_backward(int64_t, bool) {
    not_built("end_backward");
}

} // namespace penstock::dc
