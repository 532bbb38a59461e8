#include "ops/comm/ce/ce.h"

#include "base/atomic.h"
#include "base/options.h"
#include "sched/device/device.h"
#include "sched/runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How far an abort raises the flags: beyond all that is waited for, and less than half of the
 * numbers, so that it counts as beyond. */
#define FAR_AHEAD (UINT32_C(1) << 30)

/* Sequence numbers, two a ticket, that are further apart than 2^31 compare the wrong way. */
#define MOST_BEHIND (UINT64_C(1) << 28)

static pst__ce *ce_of(const pst_comm *comm) {
    return comm->context;
}

/* ---- failing --------------------------------------------------------------------------------- */

static pst_status failure_of(const pst__ce *ce) {
    return pst__failure_status(&ce->failure);
}

static void publish_failure(void *context, pst_status status, const char *text) {
    pst__ce *ce = context;
    pst__boards_fail(&ce->boards, status, text);
}

pst_status pst__ce_fail(pst__ce *ce, pst_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)pst__failure_set(&ce->failure, status, format, arguments);
    va_end(arguments);
    return failure_of(ce);
}

static pst_status fail_device(pst__ce *ce, pst_status status, const pst_collective *collective) {
    return pst__ce_fail(
        ce, status, "%s '%s' (ticket %llu): %s %s", pst_collective_name(collective->kind),
        collective->name == NULL ? "" : collective->name, (unsigned long long)collective->ticket,
        pst_status_text(status), pst__device_text(ce->device));
}

/* A peer that has failed makes this rank fail: what it has sent since is of no use. */
static pst_status look_at_peers(pst__ce *ce) {
    pst_status theirs;
    const int peer = pst__boards_find_failed(&ce->boards, &theirs);
    if (peer < 0) return PST_OK;
    return pst__ce_fail(ce, theirs == PST_EMISMATCH ? PST_EMISMATCH : PST_EPEER,
                        "rank %d has failed: %s", peer, pst__boards_text(&ce->boards, peer));
}

/* A rank that leaves in good order has published that before. */
static pst_status look_for_dead(pst__ce *ce) {
    const uint32_t closed = pst__link_closed(&ce->link);
    for (int peer = 0; peer < ce->comm.size; peer++)
        if ((closed >> peer & 1u) != 0 && !pst__boards_has_left(&ce->boards, peer))
            return pst__ce_fail(ce, PST_EPEER, "the process of rank %d has ended", peer);
    return PST_OK;
}

static pst_status ce_status(pst_comm *comm) {
    pst__ce *ce = ce_of(comm);
    pst_status status = failure_of(ce);
    if (status == PST_OK) status = look_at_peers(ce);
    if (status == PST_OK) status = look_for_dead(ce);
    return status;
}

static const char *ce_error_text(pst_comm *comm) {
    return pst__failure_text(&ce_of(comm)->failure);
}

/* ---- collectives ----------------------------------------------------------------------------- */

static size_t ce_staging_bytes(pst_comm *comm, const pst_collective *collective) {
    return pst__ce_staging_bytes(ce_of(comm), collective);
}

typedef pst_status enqueue_function(pst__ce *ce, const pst_collective *collective,
                                    pst_stream *stream);

static pst_status enqueue(pst__ce *ce, enqueue_function *function, const pst_collective *collective,
                          pst_stream *stream) {
    pst_status status = failure_of(ce);
    if (status == PST_OK) status = look_at_peers(ce);
    if (status != PST_OK) return status;
    status = function(ce, collective, stream);
    return status == PST_OK ? PST_OK : fail_device(ce, status, collective);
}

static pst_status ce_start(pst_comm *comm, const pst_collective *collective, pst_stream *stream,
                           void **request) {
    *request = NULL;
    return enqueue(ce_of(comm), pst__ce_pull, collective, stream);
}

static pst_status ce_pass(pst_comm *comm, const pst_collective *collective, pst_stream *stream) {
    return enqueue(ce_of(comm), pst__ce_pass, collective, stream);
}

/* Nothing is pending on an asynchronous device. */
static pst_status ce_test(pst_comm *comm, void *request) {
    (void)request;
    return failure_of(ce_of(comm));
}

static int is_of_graph(uint64_t ticket) {
    return ticket >> 63 != 0;
}

static int is_of_this_capture(const pst__ce *ce, uint64_t ticket) {
    const uint64_t index = PST_MOST_CAPTURED;
    return ce->captured != 0 && (ticket & ~index) == (ce->captured & ~index);
}

/* Who has read a later ticket has read this one. What graphs read is read when they have ended. */
static uint64_t as_near(pst__ce *ce, uint64_t ticket) {
    const uint64_t latest = pst__load_acquire(&ce->tickets); /* see is_idle */
    if (is_of_graph(ticket)) return latest;
    return latest > MOST_BEHIND && ticket < latest - MOST_BEHIND ? latest - MOST_BEHIND : ticket;
}

static pst_status ce_source_wait(pst_comm *comm, pst_stream *stream, uint64_t ticket) {
    pst__ce *ce = ce_of(comm);
    pst_status status = failure_of(ce);
    pst__flag_steps steps = {.count = 0};
    const int is_captured = ce->flags.is_captured;
    if (ticket == 0 || status != PST_OK) return status;
    if (is_captured && !is_of_this_capture(ce, ticket)) return PST_OK; /* read before a launch */
    if (!is_captured) ticket = as_near(ce, ticket);
    const uint32_t sequence = pst__ce_sequence(ce, ticket, 1);
    for (int peer = 0; peer < comm->size; peer++)
        if (peer != comm->rank) pst__flag_wait(&ce->flags, &steps, PST__FLAG_DONE, peer, sequence);
    return pst__flags_enqueue(&ce->flags, stream, &steps);
}

static pst_status ce_graph_launched(pst_comm *comm, pst_stream *stream) {
    return pst__ce_mark_end(ce_of(comm), stream);
}

static pst_status ce_combine(pst_comm *comm, const pst_collective *collective, pst_stream *stream) {
    pst__ce *ce = ce_of(comm);
    pst_status status = failure_of(ce);
    if (status != PST_OK || collective->kind != PST_REDUCE_SCATTER) return status;
    status = pst__ce_combine(ce, collective, stream);
    return status == PST_OK ? PST_OK : fail_device(ce, status, collective);
}

/* ---- the end --------------------------------------------------------------------------------- */

/* 1 when all that was enqueued by `start` is done. */
static int is_idle(pst__ce *ce) {
    /* Acquires: with the releases of both counters, `ended` is the record behind this ticket. */
    const uint64_t tickets = pst__load_acquire(&ce->tickets);
    if (pst__load_acquire(&ce->marked) != tickets) return 0;
    return ce->device->ops->event_query(ce->device, ce->ended) == PST_OK;
}

/* First the board, then the flags and the link: whoever sees something that a released wait has let
 * through can know it. A start that goes on beside this finds its flags raised, too. */
static pst_status ce_abort(pst_comm *comm, pst_status status) {
    pst__ce *ce = ce_of(comm);
    if (status >= PST_OK) status = PST_ECANCELED;
    (void)pst__ce_fail(ce, status, "aborted: %s", pst_status_text(status));
    /* Acquire: pairs with the release in pst__ce_pull. */
    const uint64_t tickets = pst__load_acquire(&ce->tickets);
    (void)pst__flags_set(&ce->flags, pst__flag_sequence(ce->first_sequence, tickets, 0) + FAR_AHEAD,
                         FAR_AHEAD);
    pst__link_shut(&ce->link);
    return is_idle(ce) ? PST_OK : PST_EBUSY;
}

static void destroy_streams(const pst__ce *ce) {
    pst_device *device = ce->device;
    if (ce->ended != NULL) device->ops->event_destroy(device, ce->ended);
    if (ce->join != NULL) device->ops->event_destroy(device, ce->join);
    if (ce->fork != NULL) device->ops->event_destroy(device, ce->fork);
    if (ce->aside != NULL) device->ops->stream_destroy(device, ce->aside);
}

static void free_memory(pst__ce *ce) {
    pst_device *device = ce->device;
    if (ce->regions.link != NULL) pst__regions_clear(&ce->regions);
    if (ce->bounce != NULL)
        device->ops->free(device, PST_MEMORY_DEVICE, ce->bounce, PST_CE_BOUNCE_BYTES);
    if (ce->own_flags != NULL)
        device->ops->free(device, PST_MEMORY_SHARED, ce->own_flags,
                          pst__flags_bytes(ce->comm.size));
}

static void ce_free(pst__ce *ce) {
    destroy_streams(ce);
    pst__link_close(&ce->link);
    pst__boards_close(&ce->boards);
    pst__heap_free(ce->heap, ce->copies, ce->copy_capacity * sizeof *ce->copies);
    pst__heap_free(ce->heap, ce->casts, ce->cast_capacity * sizeof *ce->casts);
    pst__heap_free_text(ce->heap, ce->name);
    pst__heap_free(ce->heap, ce, sizeof *ce);
}

/* Peers' memory and the own flags stay mapped while streams may still use them. */
static void ce_destroy(pst_comm *comm) {
    pst__ce *ce = ce_of(comm);
    pst__boards_leave(&ce->boards);
    if (is_idle(ce)) free_memory(ce);
    ce_free(ce);
}

static const pst_comm_ops ce_ops = {
    .api_version = PST_COMM_API_VERSION,
    .kinds = (1u << PST_COLLECTIVE_KIND_COUNT) - 1u,
    .name = "ce",
    .staging_bytes = ce_staging_bytes,
    .start = ce_start,
    .test = ce_test,
    .abort = ce_abort,
    .status = ce_status,
    .error_text = ce_error_text,
    .destroy = ce_destroy,
    .combine = ce_combine,
    .open_memory = pst_ce_register,
    .source_wait = ce_source_wait,
    .pass = ce_pass,
    .capture_begin = pst__ce_capture_begin,
    .capture_end = pst__ce_capture_end,
    .graph_launched = ce_graph_launched,
    .pushes = 1,
    .updates = 1,
    .gathers_within = 1,
    .rows = 1,
};

/* ---- creation -------------------------------------------------------------------------------- */

static pst_status check(const pst__meeting_place *place, const pst_device *device,
                        const pst_ce_options *options) {
    const pst_device_ops *ops = device->ops;
    if (options->size == 0)
        return pst__fail(place->error, PST_EINVAL, "%s: options->size is not set", place->what);
    if (place->exchange->size > PST_CE_MAX_RANKS)
        return pst__fail(place->error, PST_EUNSUPPORTED, "%s: %d ranks are more than %d",
                         place->what, place->exchange->size, PST_CE_MAX_RANKS);
    if (ops->stream_write32 == NULL || ops->stream_wait32 == NULL || ops->flag_write32 == NULL ||
        ops->memory_export == NULL || ops->memory_import == NULL || ops->memory_unmap == NULL)
        return pst__fail(place->error, PST_EUNSUPPORTED,
                         "%s: the device '%s' has no flags or no memory that peers can map",
                         place->what, ops->name);
    return PST_OK;
}

/* Streams that wait for flags must not share a hardware queue with what the flags wait for. */
static void check_connections(const pst__ce *ce) {
    const char *given = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (ce->comm.size == 1 || strcmp(ce->device->ops->name, "cuda") != 0) return;
    if (given == NULL || strtol(given, NULL, 10) < 32)
        pst__log(ce->error, PST_LOG_WARNING,
                 "rank %d, '%s': set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process starts: "
                 "streams that share a queue of the GPU with one that waits for a peer may lock up",
                 ce->comm.rank, ce->name);
}

static pst__ce *ce_create(const pst__meeting_place *place, pst_device *device,
                          const pst_ce_options *options) {
    pst__ce *ce = pst__heap_alloc(place->heap, sizeof *ce);
    if (ce == NULL) return NULL;
    ce->name = pst__heap_text(place->heap, place->what);
    if (ce->name == NULL) {
        pst__heap_free(place->heap, ce, sizeof *ce);
        return NULL;
    }
    ce->comm = (pst_comm){&ce_ops, ce, place->exchange->rank, place->exchange->size};
    ce->heap = place->heap;
    ce->error = place->error;
    ce->device = device;
    ce->no_verify = options->no_verify;
    ce->first_sequence = options->first_sequence;
    ce->turn_bytes = options->turn_bytes == 0 ? SIZE_MAX : options->turn_bytes;
    ce->sums_pass = options->sums_pass;
    ce->flags = (pst__flags){.device = device, .rank = ce->comm.rank, .size = ce->comm.size};
    pst__failure_init(&ce->failure, ce->comm.rank, "", ce->name);
    ce->failure.publish = publish_failure;
    ce->failure.context = ce;
    return ce;
}

static pst_status create_streams(pst__ce *ce) {
    pst_device *device = ce->device;
    const pst_device_ops *ops = device->ops;
    /* Not urgent: compute needs what is gathered later, and multiprocessors now. */
    pst_status status = ops->stream_create(device, 0, &ce->aside);
    if (status == PST_OK) status = ops->event_create(device, 0, &ce->fork);
    if (status == PST_OK) status = ops->event_create(device, 0, &ce->join);
    if (status == PST_OK) status = ops->event_create(device, 0, &ce->ended);
    return status;
}

static pst_status alloc_own_memory(pst__ce *ce) {
    pst_device *device = ce->device;
    void *bounce = NULL, *flags = NULL;
    pst_status status = create_streams(ce);
    if (status == PST_OK)
        status = device->ops->alloc(device, PST_MEMORY_DEVICE, PST_CE_BOUNCE_BYTES, &bounce);
    if (status == PST_OK)
        status =
            device->ops->alloc(device, PST_MEMORY_SHARED, pst__flags_bytes(ce->comm.size), &flags);
    ce->bounce = bounce;
    ce->own_flags = flags;
    return status;
}

static pst_status set_flags(pst__ce *ce) {
    const uint32_t first = pst__flag_sequence(ce->first_sequence, 0, 0);
    for (int rank = 0; rank < ce->comm.size; rank++)
        ce->flags.rows[rank] =
            (uint32_t *)(void *)ce->regions.regions[PST__CE_FLAG_REGION].views[rank];
    ce->turns = (pst__turns){&ce->flags, first};
    return pst__flags_set(&ce->flags, first, 0);
}

static pst_status share(const pst__meeting_place *place, pst__ce *ce, void *memory, size_t bytes) {
    char text[PST__CE_TEXT] = "";
    pst_status status = pst__regions_add(&ce->regions, memory, bytes, text, sizeof text);
    if (status == PST_OK) return PST_OK;
    return pst__fail(place->error, status, "rank %d, %s: %s", ce->comm.rank, place->what, text);
}

/* Ends with a meeting: nobody writes a peer's flags before that peer has set them. */
static pst_status open_memory(const pst__meeting_place *place, pst__ce *ce) {
    pst_status status = pst__exchange_settle(place, alloc_own_memory(ce));
    if (status != PST_OK)
        return pst__fail(place->error, status, "%s: no memory or streams of the device",
                         place->what);
    ce->regions.device = ce->device;
    ce->regions.link = &ce->link;
    status = share(place, ce, ce->bounce, PST_CE_BOUNCE_BYTES);
    if (status == PST_OK) status = share(place, ce, ce->own_flags, pst__flags_bytes(ce->comm.size));
    return status == PST_OK ? pst__exchange_settle(place, set_flags(ce)) : status;
}

static pst_status open_boards(const pst__meeting_place *place, pst__ce *ce) {
    pst_status status = pst__boards_open(&ce->link, &ce->boards);
    if (status == PST_OK) return PST_OK;
    return pst__fail(place->error, status,
                     "rank %d, %s: the ranks cannot share a page of memory; is there a file "
                     "descriptor left on each (ulimit -n)?",
                     ce->comm.rank, place->what);
}

/* What all ranks have to give alike. */
static uint64_t digest(const pst_ce_options *options) {
    const uint64_t all = (uint64_t)options->first_sequence << 1 | (options->no_verify != 0);
    return all ^ (uint64_t)options->turn_bytes * 0x9e3779b97f4a7c15u;
}

static pst_status open_all(const pst__meeting_place *place, pst__ce *ce, uint64_t deadline_ns) {
    pst_status status = pst__link_open(place, deadline_ns, &ce->link);
    if (status == PST_OK) status = open_boards(place, ce);
    return status == PST_OK ? open_memory(place, ce) : status;
}

pst_status pst_ce_create(pst_runtime *runtime, pst_device *device, const pst_exchange *exchange,
                         const pst_ce_options *given, pst_comm **comm) {
    pst_ce_options options;
    pst__read_optional(&options, sizeof options, given);
    pst__meeting_place place;
    *comm = NULL;
    pst_status status =
        pst__exchange_begin(runtime, exchange, options.name == NULL ? "ce" : options.name, &place);
    if (status != PST_OK) return status;
    status = check(&place, device, &options);
    pst__ce *ce = status == PST_OK ? ce_create(&place, device, &options) : NULL;
    if (status == PST_OK && ce == NULL)
        status = pst__fail(place.error, PST_ENOMEM, "%s: no memory", place.what);
    status = pst__exchange_settle(&place, status);
    if (status == PST_OK) status = pst__exchange_agree(&place, "options", digest(&options));
    if (status == PST_OK) status = open_all(&place, ce, pst__runtime_deadline(runtime));
    if (status != PST_OK) {
        if (ce == NULL) return status;
        free_memory(ce);
        ce_free(ce);
        return status;
    }
    check_connections(ce);
    pst__log(place.error, PST_LOG_INFO, "rank %d, '%s': collectives of %d ranks by copy engines",
             ce->comm.rank, ce->name, ce->comm.size);
    *comm = &ce->comm;
    return PST_OK;
}

/* ---- registration ---------------------------------------------------------------------------- */

/* What a slow peer sends later would be taken for its part in the next registration. */
static void fail_out_of_step(pst__ce *ce, const char *why) {
    (void)pst__ce_fail(ce, PST_ETIMEDOUT, "%s", why);
    pst__link_shut(&ce->link);
}

/* The text is both the runtime's and this communicator's. */
pst_status pst_ce_register(pst_comm *comm, void *memory, size_t bytes) {
    pst__ce *ce = ce_of(comm);
    char why[PST__CE_TEXT] = "", text[PST__CE_TEXT];
    pst_status status = pst__regions_add(&ce->regions, memory, bytes, why, sizeof why);
    if (status == PST_OK) return PST_OK;
    if (status == PST_ETIMEDOUT) fail_out_of_step(ce, why);
    (void)snprintf(text, sizeof text, "rank %d, '%.64s': registering %zu bytes: %.350s", comm->rank,
                   ce->name, bytes, why);
    pst__failure_note(&ce->failure, text);
    return pst__fail(ce->error, status, "%s", text);
}

void pst_ce_unregister(pst_comm *comm, void *memory) {
    pst__regions_remove(&ce_of(comm)->regions, memory);
}
