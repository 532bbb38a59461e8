/* Copies of names that outlive their owners (pst__trace_intern); for tracing's own files. */
#ifndef PST_TRACING_NAMES_H
#define PST_TRACING_NAMES_H

#include "base/heap.h"

#include <pthread.h>

typedef struct pst__name {
    struct pst__name *next;
    char *text;
} pst__name;

#define PST__NAME_LISTS 1024u /* so that a name is found in one step, in a run with hundreds */

/* With a lock of its own: tasks are named while another thread copies rings under the trace's. */
typedef struct pst__names {
    pst__name *lists[PST__NAME_LISTS]; /* by their hash */
    pthread_mutex_t lock;
} pst__names;

/* Fills in zeroed names. 0, or an errno value. */
int pst__names_init(pst__names *names);
void pst__names_free(const pst__heap *heap, pst__names *names);

#endif
