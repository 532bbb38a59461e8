/* A program for a run: random lanes, a random graph, several threads that use it. */
#ifndef PST_TESTS_SIM_GRAPHS_H
#define PST_TESTS_SIM_GRAPHS_H

/* `argument`: a uint64_t, the seed. Ends with sim_fail when something does not hold. */
void graphs_run(void *argument);

#endif
