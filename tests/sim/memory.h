/* The metadata heap of a run: counts what is alive, fails when told to, and watches what was freed
 * for later writes. */
#ifndef PST_TESTS_SIM_MEMORY_H
#define PST_TESTS_SIM_MEMORY_H

#include <penstock/runtime.h>

/* A new run: the `fail_at`-th allocation from now on yields NULL; 0: none. */
void memory_begin(uint64_t fail_at);
/* Ends the run with sim_fail when something is not freed or was written to after it was. */
void memory_end(void);
/* No allocation fails from here on. */
void memory_stop_failing(void);
/* 1 once an allocation has failed. */
int memory_has_failed(void);
pst_allocator memory_allocator(void);

#endif
