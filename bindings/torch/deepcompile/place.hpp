// Where a job's training is: on this rank's page (penstock/page.h), for the other ranks and for
// `penstock.top`. A step ends where the next one's forward begins.
#pragma once

#include <penstock/page.h>

#include <cstdint>

namespace penstock::dc {

// One thread at a time.
class Place {
  public:
    explicit Place(pst_page *page) : page_(page) {}

    void begin_forward() {
        if (updates_) step_++;
        updates_ = false;
        reach(PST_PHASE_FORWARD, false);
    }
    void end_forward() {
        reach(PST_PHASE_FORWARD, true);
    }
    void begin_backward(bool updates) {
        updates_ |= updates;
        reach(PST_PHASE_BACKWARD, false);
    }
    // A gradient comes: behind the end of another graph's backward this is the next one's.
    void go_backward() {
        if (phase_ != PST_PHASE_BACKWARD || is_behind_) reach(PST_PHASE_BACKWARD, false);
    }
    void end_backward() {
        reach(PST_PHASE_BACKWARD, true);
    }
    void end_optimizer() {
        reach(PST_PHASE_OPTIMIZER, true);
    }

  private:
    void reach(pst_phase phase, bool is_behind) {
        phase_ = phase;
        is_behind_ = is_behind;
        pst_page_reach(page_, step_, 0, phase, is_behind);
    }

    pst_page *page_;
    uint32_t step_ = 0;
    bool updates_ = false; // the optimizer steps behind a backward of this step
    pst_phase phase_ = PST_PHASE_NONE;
    bool is_behind_ = false;
};

} // namespace penstock::dc
