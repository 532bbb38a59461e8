#include "comms.hpp"

#include <penstock/copy_engine.h>
#include <penstock/crossover.h>
#include <penstock/nccl.h>

namespace penstock {

Comms::Comms(Runtime &runtime, const std::optional<ProcessGroup> &gather,
             const std::optional<ProcessGroup> &reduce, const std::string &wanted, bool verify)
    : runtime_(runtime) {
    try {
        if (!gather) check(runtime_.get(), pst_local_world_create(runtime_.get(), 1, &world_));
        gather_ = open_host(gather, 0, verify);
        if (runtime_.device() == nullptr)
            reduce_ = open_host(reduce, 1, verify);
        else
            open_gpu(wanted, verify);
    } catch (...) {
        destroy();
        throw;
    }
}

void Comms::open_gpu(const std::string &wanted, bool verify) {
    check(runtime_.get(), pst_comm_exchange_open(runtime_.get(), gather_, &exchange_));
    if (wanted != "nccl") {
        pst_status status = open_copy_engines(verify);
        if (status == PST_OK && wanted == "crossover") add_small();
        if (status == PST_OK) return;
        // It fails on all ranks or on none, so all of them take the other way.
        if (wanted != "auto") check(runtime_.get(), status);
        why_not_ce_ = runtime_error_text(runtime_.get());
    }
    gather_ = open_nccl("gather");
    reduce_ = open_nccl("reduce");
}

// One queue for both directions: the copy engine is one.
pst_status Comms::open_copy_engines(bool verify) {
    pst_ce_options options{};
    options.size = sizeof options;
    options.no_verify = !verify;
    pst_comm *comm = nullptr;
    pst_status status =
        pst_ce_create(runtime_.get(), runtime_.device(), &exchange_, &options, &comm);
    if (status != PST_OK) return status;
    made_.push_back(comm);
    gather_ = reduce_ = comm;
    return PST_OK;
}

// NCCL beside them, for what is small.
void Comms::add_small() {
    pst_comm *large = gather_, *small = open_nccl("small"), *both = nullptr;
    check(runtime_.get(),
          pst_crossover_create(runtime_.get(), large, small, &exchange_, nullptr, &both));
    made_.resize(made_.size() - 2); // they belong to it
    made_.push_back(both);
    gather_ = reduce_ = both;
}

Comms::~Comms() {
    destroy();
}

pst_comm *Comms::open_host(const std::optional<ProcessGroup> &group, int channel, bool verify) {
    pst_comm *comm = nullptr;
    if (group)
        comm = create_c10d_comm(runtime_.get(), *group, verify);
    else
        check(runtime_.get(), pst_local_comm_create(world_, runtime_.get(), 0, channel, &comm));
    made_.push_back(comm);
    return comm;
}

pst_comm *Comms::open_nccl(const char *name) {
    pst_nccl_options options{};
    options.size = sizeof options;
    options.name = name;
    options.sum = PST_NCCL_SUM_IN_FP32; // the same bits whatever the communicator
    pst_comm *comm = nullptr;
    check(runtime_.get(),
          pst_nccl_comm_create(runtime_.get(), runtime_.device(), &exchange_, &options, &comm));
    made_.push_back(comm);
    return comm;
}

void Comms::destroy() {
    // The first one made serves the exchange.
    while (made_.size() > 1) {
        made_.back()->ops->destroy(made_.back());
        made_.pop_back();
    }
    if (exchange_.context != nullptr) pst_comm_exchange_close(&exchange_);
    if (!made_.empty()) made_.back()->ops->destroy(made_.back());
    made_.clear();
    if (world_ != nullptr) pst_local_world_destroy(world_);
    world_ = nullptr;
}

} // namespace penstock
