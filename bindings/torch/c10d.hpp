// A pst_comm over any torch process group with a CPU back end.
#pragma once

#include <penstock/comm.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace penstock {

// What texts call the ranks of a group that are a part of others: `first` and each `step` further.
struct Numbers {
    int first = 0, step = 1;
};

// The communicator keeps the group alive and must be the only user of it. With `verify` the ranks
// exchange what they are about to do before they do it, so that ranks whose collectives differ get
// PST_EMISMATCH (a back end like gloo ends the process instead). Destroy it with its ops.
pst_comm *create_c10d_comm(pst_runtime *runtime, c10::intrusive_ptr<c10d::ProcessGroup> group,
                           bool verify, Numbers numbers = {});

} // namespace penstock
