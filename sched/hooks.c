#include "sched/hooks.h"

#include "base/atomic.h"
#include "sched/runtime.h"

#include <sched.h>

struct pst__hook {
    pst_poison_hook call;
    void *context;
    int called;
    int running; /* a thread is in it; the last thing that this thread touches */
    pst__hook *next;
};

static pst__hook *take_uncalled(pst__hooks *hooks) {
    ck_spinlock_lock(&hooks->lock);
    pst__hook *hook = hooks->first;
    while (hook != NULL && hook->called)
        hook = hook->next;
    if (hook != NULL) hook->called = hook->running = 1;
    ck_spinlock_unlock(&hooks->lock);
    return hook;
}

void pst__hooks_call(pst_runtime *runtime, pst_status status) {
    for (pst__hook *hook; (hook = take_uncalled(&runtime->hooks)) != NULL;) {
        hook->call(hook->context, status);
        /* Release: pairs with the acquire of whoever removes the hook. */
        pst__store_release(&hook->running, 0);
    }
}

pst_status pst_runtime_add_poison_hook(pst_runtime *runtime, pst_poison_hook call, void *context) {
    if (runtime == NULL || call == NULL) return PST_EINVAL;
    pst__hook *hook = pst__heap_alloc(&runtime->heap, sizeof *hook);
    if (hook == NULL)
        return pst__runtime_fail(runtime, PST_ENOMEM, "%s", "no memory for a poison hook");
    hook->call = call;
    hook->context = context;
    ck_spinlock_lock(&runtime->hooks.lock);
    pst__hook **end = &runtime->hooks.first;
    while (*end != NULL)
        end = &(*end)->next;
    *end = hook;
    ck_spinlock_unlock(&runtime->hooks.lock);
    /* A poison sets its status before it takes the lock: it has found the hook, or is seen here. */
    const pst_status poison = pst_runtime_status(runtime);
    if (poison != PST_OK) pst__hooks_call(runtime, poison);
    return PST_OK;
}

static pst__hook *take_out(pst__hooks *hooks, pst_poison_hook call, const void *context) {
    ck_spinlock_lock(&hooks->lock);
    pst__hook **link = &hooks->first;
    while (*link != NULL && ((*link)->call != call || (*link)->context != context))
        link = &(*link)->next;
    pst__hook *found = *link;
    if (found != NULL) *link = found->next;
    ck_spinlock_unlock(&hooks->lock);
    return found;
}

void pst_runtime_remove_poison_hook(pst_runtime *runtime, pst_poison_hook call, void *context) {
    if (runtime == NULL) return;
    pst__hook *hook = take_out(&runtime->hooks, call, context);
    if (hook == NULL) return;
    while (pst__load_acquire(&hook->running)) /* pairs with the release in pst__hooks_call */
        (void)sched_yield();
    pst__heap_free(&runtime->heap, hook, sizeof *hook);
}

void pst__hooks_free(pst_runtime *runtime) {
    while (runtime->hooks.first != NULL) {
        pst__hook *next = runtime->hooks.first->next;
        pst__heap_free(&runtime->heap, runtime->hooks.first, sizeof *next);
        runtime->hooks.first = next;
    }
}
