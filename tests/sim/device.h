/* The device of a run: `sim` on the run's clock, with costs, lateness and one fault drawn. */
#ifndef PST_TESTS_SIM_DEVICE_H
#define PST_TESTS_SIM_DEVICE_H

#include "tests/device/sim.h"

/* If it `fails`, one call of one of the functions that the scheduler calls does. NULL when there is
 * no memory. */
pst_device *device_open(uint64_t seed, int fails);

#endif
