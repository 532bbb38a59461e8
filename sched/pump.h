/* Lanes without a thread of their own, and what tells the thread that pumps them to come back. */
#ifndef PST_SCHED_PUMP_H
#define PST_SCHED_PUMP_H

#include <penstock/runtime.h>

/* `signalled` is 1 from a notification until a turn for which it was taken back has found nothing
 * to do. The descriptor is readable then; it may be readable once too often, never too seldom. */
typedef struct pst__pump {
    uint32_t signalled;
    int descriptor; /* an eventfd; -1 until somebody asks for it */
    uint64_t poll;  /* low half: ns until what is launched is worth asking again, 0: nothing is;
                       high half: counts the changes */
} pst__pump;

void pst__pump_init(pst__pump *pump);
void pst__pump_close(pst__pump *pump);

/* There is something for a lane that has no worker. The caller has published it, and a store-load
 * fence lies between that and this call. Any thread, never blocks. */
void pst__pump_signal(pst__pump *pump);

/* One turn over all lanes that nobody owns; 1 when something was done. *pending (may be NULL) gets
 * 1 when a lane without a worker is to be asked again soon. */
int pst__runtime_help(pst_runtime *runtime, uint32_t budget, int *pending);
/* The same over the lanes that have a worker (1) or those that have none (0). */
int pst__runtime_help_some(pst_runtime *runtime, int have_worker, uint32_t budget);

#endif
