#include <penstock/comm.h>

static const char *const names[PST_COLLECTIVE_KIND_COUNT] = {
    [PST_ALL_GATHER] = "all_gather", [PST_REDUCE_SCATTER] = "reduce_scatter",
    [PST_ALL_REDUCE] = "all_reduce", [PST_BROADCAST] = "broadcast",
    [PST_BARRIER] = "barrier",
};

const char *pst_collective_name(pst_collective_kind kind) {
    return (unsigned)kind < PST_COLLECTIVE_KIND_COUNT ? names[kind] : "unknown";
}

const char *pst_comm_path(pst_comm *comm, const pst_collective *collective) {
    return comm->ops->path == NULL ? comm->ops->name : comm->ops->path(comm, collective);
}

static pst_status combine_work(void *argument, pst_stream *stream) {
    pst_collective_work *work = argument;
    pst_comm *comm = work->comm;
    if (comm->ops->combine == NULL || work->collective.kind != PST_REDUCE_SCATTER) return PST_OK;
    work->status = comm->ops->combine(comm, &work->collective, stream);
    return work->status;
}

static pst_status start_work(void *argument, pst_stream *stream) {
    pst_collective_work *work = argument;
    work->request = NULL;
    work->status = work->comm->ops->start(work->comm, &work->collective, stream, &work->request);
    if (work->status != PST_OK || work->combine_apart) return work->status;
    return combine_work(work, stream);
}

static pst_status test_work(void *argument) {
    pst_collective_work *work = argument;
    work->status = work->comm->ops->test(work->comm, work->request);
    return work->status;
}

pst_work pst_collective_as_work(pst_collective_work *work) {
    return (pst_work){start_work, test_work, work};
}

pst_work pst_combine_as_work(pst_collective_work *work) {
    return (pst_work){combine_work, NULL, work};
}
