/* The life of a communicator `hierarchy`, and how a collective goes from step to step. */
#include "ops/comm/join/hierarchy.h"

#include "base/options.h"
#include "ops/comm/exchange.h"
#include "sched/runtime.h"

#include <stdio.h>

static pst__hierarchy *hierarchy_of(const pst_comm *comm) {
    return comm->context;
}

/* ---- who still reads ------------------------------------------------------------------------- */

static pst_status wait_for_readers(pst__hierarchy *own, int side, uint64_t ticket) {
    pst_comm *comm = own->parts[side].comm;
    if (ticket == 0 || comm->ops->source_wait == NULL) return PST_OK;
    pst_status status = comm->ops->source_wait(comm, own->stream, ticket);
    return status == PST_OK ? PST_OK : pst__pair_fail_part(&own->pair, side, status);
}

/* Before this half of the relay buffer is written again. */
static pst_status wait_for_half(pst__hierarchy *own) {
    pst_status status = PST_OK;
    for (int side = 0; side < PST__SIDES && status == PST_OK; side++)
        status = wait_for_readers(own, side, own->parts[side].relay_read[own->half]);
    return status;
}

/* Before the caller may write its memory again. */
static pst_status wait_for_caller_memory(pst__hierarchy *own) {
    pst_status status = PST_OK;
    for (int side = 0; side < PST__SIDES && status == PST_OK; side++)
        status = wait_for_readers(own, side, own->parts[side].caller_read);
    return status;
}

/* ---- driving; all with `driving` held -------------------------------------------------------- */

static pst_status copy_step(pst__hierarchy *own, const pst__hierarchy_step *step) {
    pst_device *device = own->device;
    if (step->copy.bytes == 0) return PST_OK;
    pst_status status = device->ops->copy(device, own->stream, &step->copy, 1);
    return status == PST_OK ? PST_OK
                            : pst__pair_fail(&own->pair, status, "a copy on the device failed");
}

static void prepare(pst__hierarchy *own, const pst__hierarchy_step *step) {
    pst__hierarchy_part *part = &own->parts[step->side];
    const pst_collective *whole = own->collective;
    own->stepping = part;
    own->step = step->collective;
    own->step.name = whole->name;
    own->step.ticket = ++part->tickets;
    own->step.staging = whole->staging;
    own->step.wake = whole->wake;
    own->step.wake_argument = whole->wake_argument;
    if (step->reads_relay)
        part->relay_read[own->half] = part->tickets;
    else
        part->caller_read = part->tickets;
}

/* The sums follow at once: what comes next needs them. */
static pst_status end_step(pst__hierarchy *own, pst_status status) {
    pst_comm *comm = own->stepping->comm;
    if (status == PST_PENDING) return status;
    if (status == PST_OK && own->step.kind == PST_REDUCE_SCATTER && comm->ops->combine != NULL)
        status = comm->ops->combine(comm, &own->step, own->stream);
    return status == PST_OK
               ? PST_OK
               : pst__pair_fail_part(&own->pair, (int)(own->stepping - own->parts), status);
}

static pst_status begin_step(pst__hierarchy *own) {
    const pst__hierarchy_step step =
        pst__hierarchy_step_of(own, own->collective, &own->course, own->round, own->phase,
                               own->relay + own->half * own->half_bytes, &own->lists);
    pst_status status = step.begins_half ? wait_for_half(own) : PST_OK;
    if (status != PST_OK) return status;
    if (step.side == PST__SIDES) return copy_step(own, &step);
    prepare(own, &step);
    pst_comm *comm = own->stepping->comm;
    return end_step(own, comm->ops->start(comm, &own->step, own->stream, &own->request));
}

static void go_on(pst__hierarchy *own) {
    if (++own->phase < own->course.phases) return;
    own->phase = 0;
    own->round++;
    own->half ^= 1u;
}

/* Until something is pending, has failed or all is done. */
static pst_status advance(pst__hierarchy *own, pst_status status) {
    while (status == PST_OK) {
        status = pst__pair_failure(&own->pair);
        if (status != PST_OK) break;
        if (own->round == own->course.rounds) {
            status = wait_for_caller_memory(own);
            break;
        }
        status = begin_step(own);
        if (status == PST_OK) go_on(own);
    }
    if (status != PST_PENDING) own->collective = NULL;
    return status;
}

static pst_status make_room(pst__hierarchy *own, const pst_collective *collective) {
    pst__hierarchy_lists *lists = &own->lists;
    void *segments = lists->segments, *pieces = lists->pieces;
    pst_status status = pst__heap_grow(own->pair.heap, &segments, &lists->segment_capacity,
                                       collective->segment_count + (size_t)own->pair.comm.size,
                                       sizeof *lists->segments);
    lists->segments = segments;
    if (status != PST_OK) return status;
    status = pst__heap_grow(own->pair.heap, &pieces, &lists->piece_capacity,
                            collective->piece_count + 1, sizeof *lists->pieces);
    lists->pieces = pieces;
    return status;
}

static pst_status begin(pst__hierarchy *own, const pst_collective *collective, pst_stream *stream) {
    if (own->collective != NULL) return PST_ESTATE;
    pst_status status = pst__pair_failure(&own->pair);
    if (status == PST_OK) status = make_room(own, collective);
    if (status != PST_OK) return status;
    own->collective = collective;
    own->stream = stream;
    own->course = pst__hierarchy_course_of(own, collective);
    own->round = own->phase = 0;
    for (int side = 0; side < PST__SIDES; side++)
        own->parts[side].caller_read = 0;
    return advance(own, PST_OK);
}

/* ---- the table ------------------------------------------------------------------------------- */

/* The first round is the largest. */
static size_t hierarchy_staging_bytes(pst_comm *comm, const pst_collective *collective) {
    const pst__hierarchy *own = hierarchy_of(comm);
    const pst__hierarchy_course course = pst__hierarchy_course_of(own, collective);
    size_t most = 0;
    for (size_t phase = 0; course.rounds > 0 && phase < course.phases; phase++) {
        const pst__hierarchy_step step =
            pst__hierarchy_step_of(own, collective, &course, 0, phase, own->relay, NULL);
        if (step.side == PST__SIDES) continue;
        pst_comm *part = own->parts[step.side].comm;
        const size_t bytes = part->ops->staging_bytes(part, &step.collective);
        if (bytes > most) most = bytes;
    }
    return most;
}

static pst_status hierarchy_start(pst_comm *comm, const pst_collective *collective,
                                  pst_stream *stream, void **request) {
    pst__hierarchy *own = hierarchy_of(comm);
    ck_spinlock_lock(&own->driving);
    pst_status status = begin(own, collective, stream);
    ck_spinlock_unlock(&own->driving);
    *request = own;
    return status;
}

static pst_status hierarchy_test(pst_comm *comm, void *request) {
    pst__hierarchy *own = hierarchy_of(comm);
    (void)request;
    ck_spinlock_lock(&own->driving);
    pst_status status = pst__pair_failure(&own->pair);
    if (own->collective != NULL) {
        pst_comm *part = own->stepping->comm;
        status = end_step(own, part->ops->test(part, own->request));
        if (status == PST_OK) go_on(own);
        status = advance(own, status);
    }
    ck_spinlock_unlock(&own->driving);
    return status;
}

/* Who drives it at this moment finds that it has failed before the next step. */
static pst_status hierarchy_abort(pst_comm *comm, pst_status status) {
    pst__hierarchy *own = hierarchy_of(comm);
    const pst_status ended = pst__pair_abort(&own->pair, status);
    if (!ck_spinlock_trylock(&own->driving)) return PST_EBUSY;
    ck_spinlock_unlock(&own->driving);
    return ended;
}

static const char *hierarchy_path(pst_comm *comm, const pst_collective *collective) {
    (void)collective;
    return hierarchy_of(comm)->path;
}

/* ---- the end --------------------------------------------------------------------------------- */

static void hierarchy_free(pst__hierarchy *own) {
    const pst__heap *heap = own->pair.heap;
    if (own->relay != NULL)
        own->device->ops->free(own->device, PST_MEMORY_DEVICE, own->relay, 2 * own->half_bytes);
    pst__heap_free(heap, own->lists.segments,
                   own->lists.segment_capacity * sizeof *own->lists.segments);
    pst__heap_free(heap, own->lists.pieces, own->lists.piece_capacity * sizeof *own->lists.pieces);
    pst__heap_free_text(heap, own->pair.name);
    pst__heap_free(heap, own, sizeof *own);
}

/* What an abort has not been able to end may still use the relay buffer. */
static void hierarchy_destroy(pst_comm *comm) {
    pst__hierarchy *own = hierarchy_of(comm);
    if (pst__pair_failure(&own->pair) != PST_OK && hierarchy_abort(comm, PST_ECANCELED) != PST_OK) {
        pst__log(own->pair.error, PST_LOG_WARNING,
                 "rank %d, '%s': a collective may still write to its relay buffer, which is not "
                 "freed",
                 comm->rank, own->pair.name);
        own->relay = NULL;
    }
    pst__pair_destroy_parts(&own->pair);
    hierarchy_free(own);
}

static const pst_comm_ops hierarchy_ops = {
    .api_version = PST_COMM_API_VERSION,
    .name = "hierarchy",
    .staging_bytes = hierarchy_staging_bytes,
    .start = hierarchy_start,
    .test = hierarchy_test,
    .abort = hierarchy_abort,
    .destroy = hierarchy_destroy,
    .path = hierarchy_path,
};

/* ---- creation -------------------------------------------------------------------------------- */

#define RELAY_BYTES ((size_t)64 << 20)
#define LEAST_HALF  ((size_t)1024) /* a rank */

static const char *const roles[] = {"inner", "outer"};

/* What a rank says of itself when all meet. */
typedef struct shape {
    int places, place, nodes, node;
} shape;

static pst_status check_shape(const pst__meeting_place *place, const shape *all) {
    for (int rank = 0; rank < place->exchange->size; rank++) {
        const shape *its = &all[rank];
        if (its->places == all->places && its->nodes == all->nodes &&
            its->places * its->nodes == place->exchange->size &&
            its->node * its->places + its->place == rank)
            continue;
        return pst__fail(
            place->error, PST_EINVAL,
            "rank %d, %s: rank %d is place %d of %d in node %d of %d; with rank 0 in a "
            "node of %d and %d ranks in all, nodes must be equal and full, and ranks "
            "count from node to node",
            place->exchange->rank, place->what, rank, its->place, its->places, its->node,
            its->nodes, all->places, place->exchange->size);
    }
    return PST_OK;
}

static pst_status compare_shapes(const pst__meeting_place *place, const pst_comm *inner,
                                 const pst_comm *outer) {
    const size_t bytes = sizeof(shape) * (size_t)place->exchange->size;
    const shape mine = {inner->size, inner->rank, outer->size, outer->rank};
    shape *all = pst__heap_alloc(place->heap, bytes);
    pst_status status =
        all != NULL ? PST_OK : pst__fail(place->error, PST_ENOMEM, "%s: no memory", place->what);
    status = pst__exchange_settle(place, status);
    if (status == PST_OK) status = pst__exchange_all_gather(place, &mine, sizeof mine, all);
    if (status == PST_OK) status = check_shape(place, all);
    pst__heap_free(place->heap, all, bytes);
    return status;
}

static pst_status check_options(const pst__meeting_place *place, const pst_comm *inner,
                                const pst_comm *outer, const pst_hierarchy_options *options,
                                size_t half) {
    if (options->size == 0)
        return pst__fail(place->error, PST_EINVAL, "%s: options->size is not set", place->what);
    if ((inner->ops->kinds & outer->ops->kinds) == 0)
        return pst__fail(place->error, PST_EUNSUPPORTED,
                         "%s: '%s' and '%s' have no kind of collective in common", place->what,
                         inner->ops->name, outer->ops->name);
    if (half < LEAST_HALF * (size_t)place->exchange->size)
        return pst__fail(place->error, PST_EINVAL,
                         "%s: a relay buffer of %zu bytes is too small for %d ranks, which need "
                         "%zu",
                         place->what, options->relay_bytes, place->exchange->size,
                         2 * LEAST_HALF * (size_t)place->exchange->size);
    return PST_OK;
}

static pst_status allocate(const pst__meeting_place *place, pst_device *device, pst_comm *inner,
                           pst_comm *outer, size_t half, pst__hierarchy **made) {
    pst__hierarchy *own = pst__heap_alloc(place->heap, sizeof *own);
    void *relay = NULL;
    *made = own;
    if (own == NULL) return pst__fail(place->error, PST_ENOMEM, "%s: no memory", place->what);
    own->device = device;
    own->parts[PST__INNER].comm = inner;
    own->parts[PST__OUTER].comm = outer;
    own->half_bytes = half;
    (void)snprintf(own->path, sizeof own->path, "%s+%s", inner->ops->name, outer->ops->name);
    ck_spinlock_init(&own->driving);
    pst_status status = pst__pair_init(&own->pair, place, &hierarchy_ops, inner, outer, roles);
    if (status == PST_OK) status = device->ops->alloc(device, PST_MEMORY_DEVICE, 2 * half, &relay);
    own->relay = relay;
    if (status == PST_OK) return PST_OK;
    return pst__fail(place->error, status, "rank %d, %s: no memory for a relay buffer of %zu bytes",
                     place->exchange->rank, place->what, 2 * half);
}

static pst_status create(const pst__meeting_place *place, pst_device *device, pst_comm *inner,
                         pst_comm *outer, const pst_hierarchy_options *options,
                         pst__hierarchy **made) {
    const size_t wanted = options->relay_bytes == 0 ? RELAY_BYTES : options->relay_bytes;
    const size_t half = wanted / 2 / 512 * 512;
    pst_status status = check_options(place, inner, outer, options, half);
    status = pst__exchange_settle(place, status);
    if (status == PST_OK) status = compare_shapes(place, inner, outer);
    if (status == PST_OK) status = pst__exchange_agree(place, "relay_bytes", wanted);
    if (status != PST_OK) return status;
    status = allocate(place, device, inner, outer, half, made);
    status = pst__exchange_settle(place, status);
    return status == PST_OK
               ? pst__exchange_settle(
                     place, pst__pair_open_memory(&(*made)->pair, (*made)->relay, 2 * half))
               : status;
}

pst_status pst_hierarchy_create(pst_runtime *runtime, pst_device *device, pst_comm *inner,
                                pst_comm *outer, const pst_exchange *exchange,
                                const pst_hierarchy_options *given, pst_comm **comm) {
    pst_hierarchy_options options;
    pst__read_optional(&options, sizeof options, given);
    pst__meeting_place place;
    pst__hierarchy *own = NULL;
    *comm = NULL;
    pst_status status = pst__exchange_begin(
        runtime, exchange, options.name == NULL ? "hierarchy" : options.name, &place);
    if (status == PST_OK) status = create(&place, device, inner, outer, &options, &own);
    if (status != PST_OK) {
        if (own != NULL) hierarchy_free(own);
        return status;
    }
    pst__log(place.error, PST_LOG_INFO,
             "rank %d, '%s': %d nodes of %d ranks, '%s' within a node and '%s' between nodes",
             own->pair.comm.rank, own->pair.name, outer->size, inner->size, inner->ops->name,
             outer->ops->name);
    *comm = &own->pair.comm;
    return PST_OK;
}
