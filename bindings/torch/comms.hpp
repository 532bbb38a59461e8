// The communicators of an engine, over the ranks of torch process groups.
#pragma once

#include "c10d.hpp"
#include "runtime.hpp"

#include <penstock/exchange.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace penstock {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// The ranks of this node, and those of its place in all nodes; for this engine alone.
using Nodes = std::pair<ProcessGroup, ProcessGroup>;

// On the CPU the groups' own collectives; on a GPU those of copy engines where all ranks reach each
// other's memory, of copy engines within nodes and NCCL between them, or NCCL's; there the groups
// serve at set-up, and where NCCL's collectives are verified. Without groups the world is this one
// process.
class Comms {
  public:
    // The groups are for this engine alone: both or neither. wanted: "auto", or on a GPU "ce" or
    // "nccl", or "crossover" of both; "hierarchy", which wants nodes. "auto" with nodes is a
    // hierarchy where each node can have copy engines. `replicas`: the ranks that have the same
    // shards, where these groups are of one replica of several. All ranks create alike; blocks.
    Comms(Runtime &runtime, const std::optional<ProcessGroup> &gather,
          const std::optional<ProcessGroup> &reduce, const std::string &wanted, bool verify,
          const std::optional<Nodes> &nodes = std::nullopt,
          const std::optional<ProcessGroup> &replicas = std::nullopt);
    ~Comms();
    Comms(const Comms &) = delete;
    Comms &operator=(const Comms &) = delete;

    const char *name() const {
        return gather_->ops->name;
    }
    // Where "auto" has found that copy engines cannot serve: which rank, and why.
    const std::string &why_not_ce() const {
        return why_not_ce_;
    }
    pst_comm *gather() const {
        return gather_;
    }
    pst_comm *reduce() const {
        return reduce_;
    }
    // Between replicas: NCCL's on a GPU, else the group's. NULL: there is one.
    pst_comm *replicas() const {
        return replicas_;
    }

  private:
    pst_comm *open_host(const std::optional<ProcessGroup> &group, int channel, bool verify,
                        Numbers numbers = {});
    void open_gpu(const std::optional<ProcessGroup> &gather,
                  const std::optional<ProcessGroup> &reduce, const std::string &wanted, bool verify,
                  const std::optional<Nodes> &nodes);
    pst_status open_copy_engines(const pst_exchange &exchange, bool verify);
    pst_status open_node(const ProcessGroup &node, bool verify);
    bool open_hierarchy(const Nodes &nodes, bool verify);
    void open_replicas(const ProcessGroup &replicas, bool verify);
    void open_host_hierarchy(const Nodes &nodes, bool verify);
    void join_nodes();
    pst_comm *open_audit(const std::optional<ProcessGroup> &group, bool verify);
    pst_comm *open_nccl(const char *name, const pst_exchange &exchange, pst_comm *audit);
    void add_small();
    void destroy();

    Runtime &runtime_;
    pst_local_world *world_ = nullptr;
    std::vector<pst_comm *> made_;   // in this order, destroyed in reverse
    std::vector<pst_comm *> audits_; // over which those that were made verify
    pst_exchange exchange_{};
    std::string why_not_ce_;
    Numbers numbers_; // of the ranks of gather and reduce
    pst_comm *gather_ = nullptr, *reduce_ = nullptr, *replicas_ = nullptr;
};

} // namespace penstock
