// The ranks of one job: runtime and communicators on private process groups.
#pragma once

#include "comms.hpp"

#include <memory>

namespace penstock::dc {

struct Ranks {
    int rank = 0, size = 1;
    std::shared_ptr<Runtime> runtime;
    std::unique_ptr<Comms> comms; // destroyed before the runtime

    ~Ranks() {
        comms.reset();
    }
    void check(pst_status status) const {
        penstock::check(runtime->get(), status);
    }
};

} // namespace penstock::dc
