/* A communicator around another: writes down what each rank starts, and fails when told to. */
#ifndef PST_TESTS_SIM_COMMS_H
#define PST_TESTS_SIM_COMMS_H

#include <penstock/comm.h>

#define COMMS_RANKS    4
#define COMMS_CHANNELS 2

/* If it `fails`, one call of one function does, of all ranks together, and sometimes an abort after
 * that. */
void comms_begin(uint64_t seed, int fails);
/* Takes over `inner`, a rank's communicator of this channel; it goes with the one returned. */
pst_comm *comms_wrap(pst_comm *inner, int channel);
/* Fails when two ranks have started different collectives at one place of a channel's order. */
void comms_check(void);

#endif
