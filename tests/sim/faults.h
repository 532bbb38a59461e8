/* One call that fails: the n-th of one function of a table. */
#ifndef PST_TESTS_SIM_FAULTS_H
#define PST_TESTS_SIM_FAULTS_H

#include "tests/random.h"

#include <string.h>

typedef struct fault {
    const char *call;
    uint32_t nth; /* 0: none fails */
} fault;

/* 1 at the call that is to fail. */
static inline int fault_strikes(fault *fault, const char *call) {
    return fault->nth != 0 && strcmp(fault->call, call) == 0 && --fault->nth == 0;
}

static inline fault fault_draw(uint64_t *random, const char *const *calls, uint32_t count,
                               uint32_t most) {
    const char *call = calls[random_below(random, count)];
    /* Early calls are drawn more often: some functions are called a few times in a run. */
    return (fault){call, 1 + random_below(random, 1 + random_below(random, most))};
}

#endif
