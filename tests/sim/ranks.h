/* A program for a run: a small model trained over 2 to 4 ranks, each a thread with workers of its
 * own, over the communicator `local`. */
#ifndef PST_TESTS_SIM_RANKS_H
#define PST_TESTS_SIM_RANKS_H

/* `argument`: a uint64_t, the seed. Ends with sim_fail when something does not hold. */
void ranks_run(void *argument);
/* The same with flat shards in place of the engine. */
void flat_run(void *argument);

#endif
