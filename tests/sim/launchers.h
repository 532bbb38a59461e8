/* A program for a run: several threads, each with graphs of its own, that launch over the same
 * lanes, from callbacks too, cancel, also behind a lane that is held, and destroy a graph as soon
 * as they have seen its end. */
#ifndef PST_TESTS_SIM_LAUNCHERS_H
#define PST_TESTS_SIM_LAUNCHERS_H

/* `argument`: a uint64_t, the seed. Ends with sim_fail when something does not hold. */
void launchers_run(void *argument);

#endif
