#include "sched/lookouts.h"

#include "base/clock.h"
#include "sched/runtime.h"

#include <sched.h>

struct pst__lookout {
    void (*call)(void *context);
    void *context;
    pst__lookout *next;
};

/* ---- the list -------------------------------------------------------------------------------- */

pst_status pst__lookouts_add(pst_runtime *runtime, void (*call)(void *context), void *context) {
    pst__lookouts *looks = &runtime->lookouts;
    pst__lookout *look = pst__heap_alloc(&runtime->heap, sizeof *look);
    if (look == NULL)
        return pst__runtime_fail(runtime, PST_ENOMEM, "%s", "no memory for a lookout");
    *look = (pst__lookout){call, context, NULL};
    ck_spinlock_lock(&looks->lock);
    look->next = looks->first;
    /* Release: pairs with the acquires in take and in a walk that is on its way. */
    pst__store_release(&looks->first, look);
    ck_spinlock_unlock(&looks->lock);
    return PST_OK;
}

static pst__lookout *take_out(pst__lookouts *looks, void (*call)(void *context),
                              const void *context) {
    ck_spinlock_lock(&looks->lock);
    pst__lookout **link = &looks->first;
    while (*link != NULL && ((*link)->call != call || (*link)->context != context))
        link = &(*link)->next;
    pst__lookout *found = *link;
    /* Release: as in add. What is taken out still leads a walk on. */
    if (found != NULL) pst__store_release(link, found->next);
    ck_spinlock_unlock(&looks->lock);
    return found;
}

/* A walk that began before the look was taken out may be at it; a later one does not find it. */
static void wait_for_walk(pst__lookouts *looks) {
    while (pst__load_acquire(&looks->looking)) /* pairs with the release in take */
        (void)sched_yield();
}

void pst__lookouts_remove(pst_runtime *runtime, void (*call)(void *context), const void *context) {
    pst__lookout *look = take_out(&runtime->lookouts, call, context);
    if (look == NULL) return;
    wait_for_walk(&runtime->lookouts);
    pst__heap_free(&runtime->heap, look, sizeof *look);
}

void pst__lookouts_free(pst_runtime *runtime) {
    while (runtime->lookouts.first != NULL) {
        pst__lookout *next = runtime->lookouts.first->next;
        pst__heap_free(&runtime->heap, runtime->lookouts.first, sizeof *next);
        runtime->lookouts.first = next;
    }
}

/* ---- looking --------------------------------------------------------------------------------- */

/* 1 for one of the threads that find a look due. */
static int is_due(pst__lookouts *looks) {
    const uint64_t now = pst__now();
    uint64_t next = pst__load_relaxed(&looks->next);
    /* Acquire-release only because it is one operation for all: `looking` orders the walks. */
    return now >= next && pst__cas_acq_rel(&looks->next, &next, now + PST__LOOK_NS);
}

static int begin_walk(pst__lookouts *looks) {
    ck_spinlock_lock(&looks->lock);
    /* Acquire: pairs with the release in take: what the walk before this one did is seen. */
    const int begins = !pst__load_acquire(&looks->looking);
    if (begins) pst__store_relaxed(&looks->looking, 1); /* the lock shows it to who takes out */
    ck_spinlock_unlock(&looks->lock);
    return begins;
}

void pst__lookouts_take(pst_runtime *runtime) {
    pst__lookouts *looks = &runtime->lookouts;
    /* Relaxed: a look that is added now is called the next time. */
    if (pst__load_relaxed(&looks->first) == NULL || !is_due(looks) || !begin_walk(looks)) return;
    /* Acquires: pair with the releases in add and take_out. */
    for (pst__lookout *look = pst__load_acquire(&looks->first); look != NULL;
         look = pst__load_acquire(&look->next))
        if (pst_runtime_status(runtime) == PST_OK) look->call(look->context);
    /* Release: pairs with the acquires in begin_walk and wait_for_walk. */
    pst__store_release(&looks->looking, 0);
}
