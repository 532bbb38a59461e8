#include "sched/lane.h"

#include <unistd.h>

pst_stream *pst_lane_stream(const pst_lane *lane) {
    return lane == NULL ? NULL : lane->stream;
}

const char *pst_lane_name(const pst_lane *lane) {
    return lane == NULL ? "" : lane->name;
}

void pst__lane_close(pst_lane *lane) {
    pst_runtime *runtime = lane->runtime;
    if (lane->device != NULL) {
        const pst_device_ops *ops = lane->device->ops;
        if (lane->in_flight.tail_event != NULL)
            ops->event_destroy(lane->device, lane->in_flight.tail_event);
        if (lane->owns_stream && lane->stream != NULL)
            ops->stream_destroy(lane->device, lane->stream);
    }
    pst__heap_free_text(&runtime->heap, lane->name);
    lane->in_flight.tail_event = NULL;
    lane->stream = NULL;
    lane->owns_stream = 0;
    lane->name = NULL;
}

void pst__lane_free(pst_lane *lane) {
    pst__lane_close(lane);
    pst__heap_free(&lane->runtime->heap, lane, sizeof *lane);
}

/* ---- whose turn ------------------------------------------------------------------------- */

static int try_to_own(const void *leader) {
    return pst__lane_try_own((pst_lane *)(uintptr_t)leader);
}

pst_status pst__lane_await(pst_lane *leader) {
    return pst__wait_aside(leader->runtime, try_to_own, leader);
}

static void make_readable(int descriptor) {
    const uint64_t one = 1;
    /* It can only fail when the count is at its end, and then the descriptor is readable. */
    if (write(descriptor, &one, sizeof one) < 0) return;
}

/* A store-load fence lies between what the caller has published and this call. */
static void call_pumps(pst__pump *pump) {
    /* Relaxed, after the caller's fence: pairs with the fence in take_back (pump.c). A 1 that is
     * about to be taken back suffices: the turn after that finds what the caller has published. */
    if (pst__load_relaxed(&pump->signalled)) return;
    /* Acquire-release: take_back, when it finds this 1, finds what was published, too. */
    if (pst__swap_acq_rel(&pump->signalled, 1)) return;
    /* Acquire: pairs with the release in pst_fd, which makes a new descriptor readable itself. */
    const int descriptor = pst__load_acquire(&pump->descriptor);
    if (descriptor >= 0) make_readable(descriptor);
}

void pst__lane_notify(pst_lane *lane) {
    /* Acquire: pairs with the release in pst__worker_adopt, which may come late for a borrowed
     * lane. */
    pst__worker *worker = pst__load_acquire(&lane->worker);
    if (worker != NULL) {
        pst__park_wake(&worker->loop.park);
        return;
    }
    /* Its fence is that of the calls, too. */
    pst__runtime_wake_waiters(lane->runtime);
    call_pumps(&lane->runtime->pump);
}

void pst_lane_wake(pst_lane *lane) {
    if (lane != NULL) pst__lane_notify(lane);
}

void pst__lane_disown(pst_lane *lane, int changed, const pst__worker *self) {
    /* Release: pairs with the acquire in pst__lane_try_own. */
    pst__store_release(&lane->owned, 0);
    /* Relaxed: it is the worker that asks, and a lane keeps its worker. */
    if (self != NULL && self == pst__load_relaxed(&lane->worker)) return;
    /* Orders the store above with the looks below: the worker that found the lane owned has asked
     * to be woken before it looked again, and whoever woke it has pushed before that. Pairs with
     * the fence in worker.c, try_own. */
    pst__fence_store_load();
    const uint32_t missed = pst__load_relaxed(&lane->missed);
    if (missed) pst__store_relaxed(&lane->missed, 0);
    if (changed || missed || !pst__arrivals_empty(&lane->arrivals)) pst__lane_notify(lane);
}
