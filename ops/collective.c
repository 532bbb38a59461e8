#include <penstock/comm.h>

static const char *const names[PST_COLLECTIVE_KIND_COUNT] = {
    [PST_ALL_GATHER] = "all_gather", [PST_REDUCE_SCATTER] = "reduce_scatter",
    [PST_ALL_REDUCE] = "all_reduce", [PST_BROADCAST] = "broadcast",
    [PST_BARRIER] = "barrier",
};

const char *pst_collective_name(pst_collective_kind kind) {
    return (unsigned)kind < PST_COLLECTIVE_KIND_COUNT ? names[kind] : "unknown";
}

static pst_status start_work(void *argument, pst_stream *stream) {
    pst_collective_work *work = argument;
    work->request = NULL;
    work->status = work->comm->ops->start(work->comm, &work->collective, stream, &work->request);
    return work->status;
}

static pst_status test_work(void *argument) {
    pst_collective_work *work = argument;
    work->status = work->comm->ops->test(work->comm, work->request);
    return work->status;
}

pst_work pst_collective_as_work(pst_collective_work *work) {
    return (pst_work){start_work, test_work, work};
}
