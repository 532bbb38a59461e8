/* Copies of gradients that take long, and of which the first is not followed by its reduction. */
#ifndef PST_TESTS_OPS_SLOW_COPIES_H
#define PST_TESTS_OPS_SLOW_COPIES_H

#include "world.h"

/* All atomic: the workers record events, too. */
static int is_refused;
static int is_copied;

/* The only rank's stream of copies, while a record behind them is to be refused. */
static pst_stream *copying;

static inline pst_status copy_slowly_now(void *argument) {
    (void)argument;
    async_sleep(20000);
    return PST_OK;
}

static inline pst_status copied_now(void *argument) {
    (void)argument;
    __atomic_store_n(&is_copied, 1, __ATOMIC_RELEASE);
    return PST_OK;
}

static inline pst_status slow_cast(pst_device *device, pst_stream *stream, const pst_cast *pieces,
                                   size_t piece_count, double scale) {
    if (!__atomic_load_n(&is_refused, __ATOMIC_RELAXED))
        return async_cast_scale_copy(device, stream, pieces, piece_count, scale);
    __atomic_store_n(&copying, stream, __ATOMIC_RELAXED);
    pst_stream *unused = stream;
    async_call(async_of(device), stream, copy_slowly_now, &unused, sizeof unused);
    pst_status status = async_cast_scale_copy(device, stream, pieces, piece_count, scale);
    async_call(async_of(device), stream, copied_now, &unused, sizeof unused);
    return status;
}

/* Of a bucket: the only record there between a copy and the batch's own. */
static inline pst_status refuse_record(pst_device *device, pst_event *event, pst_stream *stream) {
    if (stream != __atomic_load_n(&copying, __ATOMIC_RELAXED))
        return async_event_record(device, event, stream);
    __atomic_store_n(&copying, NULL, __ATOMIC_RELAXED);
    __atomic_store_n(&is_refused, 0, __ATOMIC_RELAXED);
    return PST_EDEVICE;
}

static inline pst_status look_now(void *argument) {
    rank_state *state = *(rank_state **)argument;
    if (!__atomic_load_n(&is_copied, __ATOMIC_ACQUIRE))
        note_wrong(state, "gradient let go before its copy", 0, 0, 0, 1);
    return PST_OK;
}

/* Before the rank's lanes are there: their threads read the device's calls. */
static inline void watch_copies(const rank_state *state) {
    __atomic_store_n(&copying, NULL, __ATOMIC_RELAXED);
    __atomic_store_n(&is_copied, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&is_refused, 0, __ATOMIC_RELAXED);
    state->async->ops.cast_scale_copy = slow_cast;
    state->async->ops.event_record = refuse_record;
}

/* From here on, on the only rank. */
static inline void refuse_behind_copies(void) {
    __atomic_store_n(&is_refused, 1, __ATOMIC_RELAXED);
}

/* What compute does next comes behind the copies. */
static inline void check_copied(rank_state *state) {
    on_compute(state, look_now, &state, sizeof state);
}

#endif
