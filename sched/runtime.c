#include "sched/runtime.h"

#include "base/clock.h"
#include "base/options.h"

#include <stdarg.h>
#include <stdio.h>

#define ASIDE_SPIN     200u
#define ASIDE_SLEEP_NS 200000u

pst_device *pst_runtime_host(pst_runtime *runtime) {
    return runtime == NULL ? NULL : runtime->host;
}

pst_status pst__runtime_fail(pst_runtime *runtime, pst_status status, const char *format, ...) {
    char text[PST__ERROR_BYTES];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return pst__fail(&runtime->error, status, "rank %d: %s", runtime->rank, text);
}

size_t pst_runtime_error(const pst_runtime *runtime, char *buffer, size_t size) {
    if (runtime == NULL || (buffer == NULL && size > 0)) return 0;
    /* The text's lock is taken for reading, too. */
    return pst__error_get((pst__error *)(uintptr_t)&runtime->error, buffer, size);
}

pst_status pst_runtime_status(const pst_runtime *runtime) {
    if (runtime == NULL) return PST_EINVAL;
    /* Acquire: pairs with the exchange in pst__runtime_stop, so that poison_at is seen as well. */
    return (pst_status)pst__load_acquire(&runtime->poison);
}

void pst_runtime_get_stats(const pst_runtime *runtime, pst_runtime_stats *stats) {
    if (stats == NULL) return;
    pst_runtime_stats now = {0};
    if (runtime != NULL) {
        /* Relaxed: figures, each on its own. */
        now.late_launches = pst__load_relaxed(&runtime->late_launches);
        now.late_launch_ns = pst__load_relaxed(&runtime->late_launch_ns);
        now.watchdog_reports = pst__load_relaxed(&runtime->watchdog.reports);
    }
    pst__write_sized(stats, &now, sizeof now);
}

/* ---- waiting ---------------------------------------------------------------------------- */

void pst__runtime_wake_waiters(pst_runtime *runtime) {
    pst__fence_store_load();
    if (pst__load_relaxed(&runtime->waiters) != 0) pst__park_wake(&runtime->waiting);
}

/* Without the fence of other waits: a wake-up that is missed costs one short sleep. */
pst_status pst__wait_aside(pst_runtime *runtime, int (*holds)(const void *argument),
                           const void *argument) {
    for (uint32_t i = 0; i < ASIDE_SPIN; i++) {
        if (holds(argument)) return PST_OK;
        ck_pr_stall();
    }
    const uint64_t begin = pst__now();
    for (;;) {
        const uint32_t count = pst__park_count(&runtime->waiting);
        (void)pst__add_acq_rel(&runtime->waiters, 1);
        const int has_come = holds(argument);
        if (!has_come) pst__park_wait(&runtime->waiting, count, ASIDE_SLEEP_NS);
        (void)pst__sub_acq_rel(&runtime->waiters, 1);
        if (has_come) return PST_OK;
        if (runtime->deadline_ns != 0 && pst__now() - begin > runtime->deadline_ns)
            return PST_ETIMEDOUT;
    }
}

void pst__wait_call_hook(pst_runtime *runtime, pst_waiting *waiting, uint64_t waited_ns) {
    if (runtime->waiting_hook == NULL || waited_ns - waiting->waited_ns < PST__WAITING_HOOK_NS)
        return;
    waiting->waited_ns = waited_ns;
    runtime->waiting_hook(runtime->waiting_context, waiting);
}

/* ---- loops ------------------------------------------------------------------------------ */

void pst__loop_leave(pst__loop *loop, pst_runtime *runtime) {
    pst__store_release(&loop->ended, 1); /* pairs with the acquire in has_ended */
    pst__runtime_wake_waiters(runtime);
}

void pst__loop_stop(pst__loop *loop) {
    /* Relaxed: who may start it has done so. */
    if (!pst__load_relaxed(&loop->has_thread)) return;
    pst__store_release(&loop->stop, 1); /* pairs with the acquires in the threads' `run` */
    pst__park_wake(&loop->park);
}

static int has_ended(const void *loop) {
    /* Acquire: pairs with the release in pst__loop_leave. */
    return (int)pst__load_acquire(&((const pst__loop *)loop)->ended);
}

pst_status pst__loop_join(pst__loop *loop, pst_runtime *runtime) {
    if (!pst__load_relaxed(&loop->has_thread)) return PST_OK; /* see pst__loop_stop */
    if (pst__wait_aside(runtime, has_ended, loop) != PST_OK) return PST_ETIMEDOUT;
    (void)pthread_join(loop->thread, NULL);
    pst__store_relaxed(&loop->has_thread, 0);
    return PST_OK;
}
