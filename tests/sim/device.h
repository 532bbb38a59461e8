/* The device of a run: `sim` on the run's clock, with costs, lateness and one fault drawn. */
#ifndef PST_TESTS_SIM_DEVICE_H
#define PST_TESTS_SIM_DEVICE_H

#include "sched/device/sim.h"

/* The `fail_at`-th call that can fail does; 0: none. NULL when there is no memory. */
pst_device *device_open(uint64_t seed, uint32_t fail_at);

#endif
