#include "comms.hpp"

#include <penstock/copy_engine.h>
#include <penstock/crossover.h>
#include <penstock/hierarchy.h>
#include <penstock/nccl.h>

namespace penstock {

Comms::Comms(Runtime &runtime, const std::optional<ProcessGroup> &gather,
             const std::optional<ProcessGroup> &reduce, const std::string &wanted, bool verify,
             const std::optional<Nodes> &nodes, const std::optional<ProcessGroup> &replicas)
    : runtime_(runtime) {
    try {
        if (replicas) numbers_.first = (*replicas)->getRank() * (*gather)->getSize();
        if (!gather) runtime_.check(pst_local_world_create(runtime_.get(), 1, &world_));
        gather_ = open_host(gather, 0, verify, numbers_);
        if (runtime_.device() != nullptr)
            open_gpu(gather, reduce, wanted, verify, nodes);
        else if (wanted == "hierarchy" && nodes)
            open_host_hierarchy(*nodes, verify);
        else
            reduce_ = open_host(reduce, 1, verify, numbers_);
        if (replicas) open_replicas(*replicas, verify);
    } catch (...) {
        destroy();
        throw;
    }
}

void Comms::open_gpu(const std::optional<ProcessGroup> &gather,
                     const std::optional<ProcessGroup> &reduce, const std::string &wanted,
                     bool verify, const std::optional<Nodes> &nodes) {
    runtime_.check(pst_comm_exchange_open(runtime_.get(), gather_, &exchange_));
    if (nodes && (wanted == "hierarchy" || wanted == "auto")) {
        if (open_hierarchy(*nodes, verify)) return;
        if (wanted == "hierarchy") throw StatusError{PST_EUNSUPPORTED, why_not_ce_};
    } else if (wanted != "nccl") {
        pst_status status = open_copy_engines(exchange_, verify);
        if (status == PST_OK && wanted == "crossover") add_small();
        if (status == PST_OK) return;
        // It fails on all ranks or on none, so all of them take the other way.
        if (wanted != "auto") runtime_.check(status);
        why_not_ce_ = runtime_error_text(runtime_.get());
    }
    gather_ = open_nccl("gather", exchange_, open_audit(gather, verify));
    reduce_ = open_nccl("reduce", exchange_, open_audit(reduce, verify));
}

// One queue for both directions: the copy engine is one.
pst_status Comms::open_copy_engines(const pst_exchange &exchange, bool verify) {
    pst_ce_options options{};
    options.size = sizeof options;
    options.no_verify = !verify;
    options.sums_pass = 1; // gradients are read by nobody before the optimizer
    pst_comm *comm = nullptr;
    pst_status status =
        pst_ce_create(runtime_.get(), runtime_.device(), &exchange, &options, &comm);
    if (status != PST_OK) return status;
    made_.push_back(comm);
    gather_ = reduce_ = comm;
    return PST_OK;
}

// ---- nodes ------------------------------------------------------------------------------------

namespace {

// An exchange over a process group, while it lives.
class GroupExchange {
  public:
    GroupExchange(Runtime &runtime, const ProcessGroup &group)
        : comm_(create_c10d_comm(runtime.get(), group, false)) {
        pst_status status = pst_comm_exchange_open(runtime.get(), comm_, &exchange_);
        if (status == PST_OK) return;
        comm_->ops->destroy(comm_);
        runtime.check(status);
    }
    ~GroupExchange() {
        pst_comm_exchange_close(&exchange_);
        comm_->ops->destroy(comm_);
    }
    GroupExchange(const GroupExchange &) = delete;
    GroupExchange &operator=(const GroupExchange &) = delete;
    const pst_exchange &get() const {
        return exchange_;
    }

  private:
    pst_comm *comm_;
    pst_exchange exchange_{};
};

} // namespace

// PST_OK on all ranks of all nodes, or on none.
pst_status Comms::open_node(const ProcessGroup &node, bool verify) {
    const GroupExchange within(runtime_, node);
    const pst_status mine = open_copy_engines(within.get(), verify);
    const std::string why = mine == PST_OK ? "" : runtime_error_text(runtime_.get());
    std::vector<int> all(static_cast<size_t>(exchange_.size));
    const int own = mine;
    runtime_.check(exchange_.all_gather(exchange_.context, &own, sizeof own, all.data()));
    for (size_t rank = 0; rank < all.size(); rank++) {
        if (all[rank] == PST_OK) continue;
        why_not_ce_ = mine != PST_OK ? why
                                     : "copy engines cannot serve in the node of rank " +
                                           std::to_string(rank) + ": " +
                                           pst_status_text(static_cast<pst_status>(all[rank]));
        return static_cast<pst_status>(all[rank]);
    }
    return PST_OK;
}

bool Comms::open_hierarchy(const Nodes &nodes, bool verify) {
    const size_t before = made_.size();
    if (open_node(nodes.first, verify) == PST_OK) {
        const GroupExchange between(runtime_, nodes.second);
        (void)open_nccl("between nodes", between.get(), open_audit(nodes.second, verify));
        join_nodes();
        return true;
    }
    for (; made_.size() > before; made_.pop_back())
        made_.back()->ops->destroy(made_.back());
    return false;
}

void Comms::open_replicas(const ProcessGroup &replicas, bool verify) {
    if (runtime_.device() == nullptr) {
        replicas_ = open_host(replicas, 0, verify, {gather_->rank, gather_->size});
        return;
    }
    const GroupExchange between(runtime_, replicas);
    replicas_ = open_nccl("replicas", between.get(), open_audit(replicas, verify));
}

void Comms::open_host_hierarchy(const Nodes &nodes, bool verify) {
    runtime_.check(pst_comm_exchange_open(runtime_.get(), gather_, &exchange_));
    for (const ProcessGroup &group : {nodes.first, nodes.second})
        made_.push_back(create_c10d_comm(runtime_.get(), group, verify));
    join_nodes();
}

// The last two are the parts.
void Comms::join_nodes() {
    pst_comm *inner = made_[made_.size() - 2], *outer = made_.back(), *both = nullptr;
    pst_device *device = runtime_.device();
    runtime_.check(pst_hierarchy_create(
        runtime_.get(), device != nullptr ? device : pst_runtime_host(runtime_.get()), inner, outer,
        &exchange_, nullptr, &both));
    made_.resize(made_.size() - 2); // they belong to it
    made_.push_back(both);
    gather_ = reduce_ = both;
}

// ---- parts ------------------------------------------------------------------------------------

// NCCL beside them, for what is small; the copy engines' ranks compare that, too.
void Comms::add_small() {
    pst_comm *large = gather_, *small = open_nccl("small", exchange_, nullptr), *both = nullptr;
    runtime_.check(pst_crossover_create(runtime_.get(), large, small, &exchange_, nullptr, &both));
    made_.resize(made_.size() - 2); // they belong to it
    made_.push_back(both);
    gather_ = reduce_ = both;
}

Comms::~Comms() {
    destroy();
}

pst_comm *Comms::open_host(const std::optional<ProcessGroup> &group, int channel, bool verify,
                           Numbers numbers) {
    pst_comm *comm = nullptr;
    if (group)
        comm = create_c10d_comm(runtime_.get(), *group, verify, numbers);
    else
        runtime_.check(pst_local_comm_create(world_, runtime_.get(), 0, channel, &comm));
    made_.push_back(comm);
    return comm;
}

pst_comm *Comms::open_audit(const std::optional<ProcessGroup> &group, bool verify) {
    if (!verify || !group) return nullptr;
    audits_.push_back(create_c10d_comm(runtime_.get(), *group, false));
    return audits_.back();
}

pst_comm *Comms::open_nccl(const char *name, const pst_exchange &exchange, pst_comm *audit) {
    pst_nccl_options options{};
    options.size = sizeof options;
    options.name = name;
    options.verify_over = audit;
    pst_comm *comm = nullptr;
    runtime_.check(
        pst_nccl_comm_create(runtime_.get(), runtime_.device(), &exchange, &options, &comm));
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
    for (pst_comm *audit : audits_)
        audit->ops->destroy(audit);
    audits_.clear();
    if (world_ != nullptr) pst_local_world_destroy(world_);
    world_ = nullptr;
}

} // namespace penstock
