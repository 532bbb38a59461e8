#include "zero12.hpp"

#include "context.hpp"
#include "not_built.hpp"

namespace penstock::dc {

void Zero12::set_stage(int) {
    not_built("register_graph_z1, register_graph_z2");
}
void Zero12::register_parameter(int64_t, std::vector<int64_t>, at::Tensor, at::Tensor, int64_t) {
    not_built("register_param");
}
void Zero12::update_grad_buffer(int64_t, at::Tensor, int64_t) {
    not_built("update_param_grad_buffer");
}
void Zero12::register_graph(int64_t, const std::vector<int64_t> &) {
    not_built("register_graph_z1, register_graph_z2");
}
void Zero12::forget_graphs() {}
void Zero12::start_backward(bool) {}
void Zero12::reduce_grad(const at::Tensor &, int64_t, int64_t) {
    not_built("reduce_grad");
}
void Zero12::end_backward(int64_t, bool) {
    not_built("end_backward");
}

} // namespace penstock::dc
