#include "c10d.hpp"

#include "outside_python.hpp"

#include <ATen/ATen.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace penstock {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;
using Future = c10::intrusive_ptr<c10::ivalue::Future>;

// What a rank is about to do; all ranks exchange these before the payload moves.
struct Header {
    uint64_t ticket, bytes, count;
    uint32_t kind, dtype, reduce, root;
    char name[88]; // NUL-terminated, cut
};

// What the back end's threads touch. They hold it, so it may outlive request and communicator.
struct Shared {
    std::mutex lock;
    void (*wake)(void *) = nullptr; // NULL once the collective has ended
    void *argument = nullptr;
    std::atomic<bool> complete{false};
};

struct Comm : pst_comm {
    pst_device *device = nullptr;
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    bool verify = true;
    Numbers numbers;
    // Requests begun and not complete; those that an abort gave up stay here.
    std::mutex lock; // of what follows; held for a few instructions
    std::vector<std::shared_ptr<Shared>> in_flight;
    pst_status failed = PST_OK;
    std::string text; // stays as it is once it is set, with `failed`

    int number_of(int of) const {
        return numbers.first + of * numbers.step;
    }
    pst_status fail(pst_status status, const std::string &why) {
        std::lock_guard<std::mutex> guard(lock);
        if (failed == PST_OK) {
            failed = status;
            text = why;
        }
        return failed;
    }
    pst_status state() {
        std::lock_guard<std::mutex> guard(lock);
        return failed;
    }
    void forget_complete() {
        std::lock_guard<std::mutex> guard(lock);
        for (size_t i = in_flight.size(); i-- > 0;)
            // Pairs with the release in `watch`: the back end's last access to memory came before.
            if (in_flight[i]->complete.load(std::memory_order_acquire))
                in_flight.erase(in_flight.begin() + static_cast<ptrdiff_t>(i));
    }
};

Comm &comm_of(pst_comm *comm) {
    return *static_cast<Comm *>(comm);
}

struct Request {
    const pst_collective &collective;
    pst_stream *const stream;
    bool checking = false; // the exchange of headers is under way, not the payload
    at::Tensor mine, all;  // headers
    Work work;
    Future future; // of `work`; null when its back end has none
    std::shared_ptr<Shared> shared;

    Request(const pst_collective &what, pst_stream *where) : collective(what), stream(where) {}
    ~Request() {
        disarm();
    }
    void disarm() const {
        if (!shared) return;
        std::lock_guard<std::mutex> guard(shared->lock);
        shared->wake = nullptr;
    }
};

// ---- what the back end is doing ---------------------------------------------------------------

Future future_of(const Work &work) {
    try {
        return work->getFuture();
    } catch (const std::exception &) {
        return nullptr;
    }
}

// Counted before it begins, so that whatever fails from there on leaves it counted.
template <typename Begin> void watch(Comm &comm, Request &request, Begin begin) {
    auto shared = std::make_shared<Shared>();
    shared->wake = request.collective.wake;
    shared->argument = request.collective.wake_argument;
    request.disarm();
    request.shared = shared;
    {
        std::lock_guard<std::mutex> guard(comm.lock);
        comm.in_flight.push_back(shared);
    }
    try {
        request.work = begin();
    } catch (...) {
        shared->complete.store(true, std::memory_order_release); // pairs with forget_complete
        throw;
    }
    request.future = future_of(request.work);
    if (!request.future) return; // `test` polls
    request.future->addCallback([shared](c10::ivalue::Future &) {
        shared->complete.store(true, std::memory_order_release); // pairs with forget_complete
        std::lock_guard<std::mutex> guard(shared->lock);
        if (shared->wake != nullptr) shared->wake(shared->argument);
    });
}

bool is_complete(const Request &request) {
    // The future first: gloo completes it, and calls back, before the work says so.
    return request.future ? request.future->completed() : request.work->isCompleted();
}

// Why the complete operation failed; empty if it did not.
std::string failure_of(const Request &request) {
    if (request.future)
        return request.future->hasError() ? request.future->tryRetrieveErrorMessage() : "";
    std::exception_ptr error = request.work->exception();
    if (!error) return "";
    try {
        std::rethrow_exception(error);
    } catch (const std::exception &what) {
        return what.what();
    }
}

pst_status status_of_failure(const std::string &text) {
    const bool timed_out = text.find("imed out") != std::string::npos;
    return timed_out ? PST_ETIMEDOUT : PST_EPEER;
}

// Strings that are joined: a process that has a second libstdc++ in it, as a library of the user's
// may bring one along, crashes where a stream of one looks for the locale of the other.
std::string describe(const Comm &comm, const pst_collective &collective) {
    return "rank " + std::to_string(comm.number_of(comm.rank)) + ": " +
           pst_collective_name(collective.kind) + " '" +
           (collective.name != nullptr ? collective.name : "") + "' (ticket " +
           std::to_string(collective.ticket) + ")";
}

// ---- agreement --------------------------------------------------------------------------------

Header header_of(const pst_collective &collective) {
    Header header{};
    header.ticket = collective.ticket;
    header.kind = static_cast<uint32_t>(collective.kind);
    header.dtype = static_cast<uint32_t>(collective.dtype);
    header.bytes = collective.source_bytes;
    header.count = collective.count;
    header.reduce = static_cast<uint32_t>(collective.reduce);
    header.root = static_cast<uint32_t>(collective.root);
    if (collective.name != nullptr)
        std::strncpy(header.name, collective.name, sizeof header.name - 1);
    return header;
}

std::string describe(int rank, const Header &header) {
    const auto dtype = static_cast<pst_dtype>(header.dtype);
    const bool counted = header.kind == PST_ALL_REDUCE || header.kind == PST_BROADCAST;
    const uint64_t bytes = counted ? header.count * pst_dtype_size(dtype) : header.bytes;
    std::string text = "rank " + std::to_string(rank) + ": " +
                       pst_collective_name(static_cast<pst_collective_kind>(header.kind)) + " '" +
                       header.name + "' of " + std::to_string(bytes) + " bytes";
    if (header.kind == PST_REDUCE_SCATTER || counted)
        text += std::string(" of ") + pst_dtype_name(dtype);
    return text + ", ticket " + std::to_string(header.ticket);
}

void begin_check(Comm &comm, Request &request) {
    const Header header = header_of(request.collective);
    request.mine = at::empty({sizeof header}, at::kByte);
    request.all = at::empty({static_cast<int64_t>(sizeof header) * comm.size}, at::kByte);
    std::memcpy(request.mine.mutable_data_ptr(), &header, sizeof header);
    request.checking = true;
    watch(comm, request, [&] { return comm.group->_allgather_base(request.all, request.mine); });
}

pst_status end_check(Comm &comm, Request &request) {
    request.checking = false;
    const auto *headers = static_cast<const Header *>(request.all.const_data_ptr());
    for (int rank = 1; rank < comm.size; rank++) {
        if (std::memcmp(&headers[0], &headers[rank], sizeof(Header)) == 0) continue;
        return comm.fail(
            PST_EMISMATCH,
            "ranks started different collectives: " + describe(comm.number_of(0), headers[0]) +
                "; " + describe(comm.number_of(rank), headers[rank]) +
                ". All ranks must run the same model on the same code path");
    }
    return PST_OK;
}

// ---- payloads ---------------------------------------------------------------------------------

at::Tensor bytes_at(const void *memory, size_t bytes) {
    return at::from_blob(const_cast<void *>(memory), {static_cast<int64_t>(bytes)}, at::kByte);
}

at::ScalarType scalar_type(pst_dtype dtype) {
    switch (dtype) {
    case PST_FLOAT32:
        return at::kFloat;
    case PST_FLOAT64:
        return at::kDouble;
    case PST_FLOAT16:
        return at::kHalf;
    case PST_BFLOAT16:
        return at::kBFloat16;
    case PST_INT8:
        return at::kChar;
    case PST_INT16:
        return at::kShort;
    case PST_INT32:
        return at::kInt;
    case PST_INT64:
        return at::kLong;
    default:
        return at::kByte;
    }
}

// Reduce-scatter: where the chunks of all ranks arrive; before it lies the packed source, if the
// source has to be packed.
char *received(const Comm &comm, const pst_collective &collective) {
    const bool packed = collective.stride != collective.source_bytes;
    const size_t chunks = collective.source_bytes * static_cast<size_t>(comm.size);
    return static_cast<char *>(collective.staging) + (packed ? chunks : 0);
}

const void *packed_source(const Comm &comm, const pst_collective &collective, pst_stream *stream,
                          pst_status *status) {
    if (collective.stride == collective.source_bytes) return collective.source;
    std::vector<pst_copy> copies(static_cast<size_t>(comm.size));
    for (size_t rank = 0; rank < copies.size(); rank++)
        copies[rank] = {static_cast<char *>(collective.staging) + rank * collective.source_bytes,
                        static_cast<const char *>(collective.source) + rank * collective.stride,
                        collective.source_bytes};
    *status = comm.device->ops->copy(comm.device, stream, copies.data(), copies.size());
    return collective.staging;
}

pst_status begin_reduce_scatter(Comm &comm, Request &request) {
    const pst_collective &collective = request.collective;
    const size_t chunks = collective.source_bytes * static_cast<size_t>(comm.size);
    pst_status status = PST_OK;
    const void *source = packed_source(comm, collective, request.stream, &status);
    if (status != PST_OK) return status;
    at::Tensor input = bytes_at(source, chunks);
    at::Tensor output = bytes_at(received(comm, collective), chunks);
    std::vector<int64_t> even;
    watch(comm, request, [&] { return comm.group->alltoall_base(output, input, even, even); });
    return PST_PENDING;
}

pst_status begin_all_gather(Comm &comm, Request &request) {
    const pst_collective &collective = request.collective;
    const size_t total = collective.source_bytes * static_cast<size_t>(comm.size);
    at::Tensor input = bytes_at(collective.source, collective.source_bytes);
    at::Tensor output = bytes_at(collective.staging, total);
    watch(comm, request, [&] { return comm.group->_allgather_base(output, input); });
    return PST_PENDING;
}

pst_status begin_in_place(Comm &comm, Request &request) {
    const pst_collective &collective = request.collective;
    std::vector<at::Tensor> tensors;
    if (collective.kind == PST_BROADCAST) {
        tensors = {
            bytes_at(collective.destination, collective.count * pst_dtype_size(collective.dtype))};
        c10d::BroadcastOptions options;
        options.rootRank = collective.root;
        watch(comm, request, [&] { return comm.group->broadcast(tensors, options); });
    } else {
        tensors = {at::from_blob(collective.destination, {static_cast<int64_t>(collective.count)},
                                 scalar_type(collective.dtype))};
        c10d::AllreduceOptions options;
        options.reduceOp =
            collective.reduce == PST_REDUCE_MAX ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
        watch(comm, request, [&] { return comm.group->allreduce(tensors, options); });
    }
    return PST_PENDING;
}

bool has_payload(const pst_collective &collective) {
    if (collective.kind == PST_BARRIER) return false; // the exchange of headers is the barrier
    return collective.source_bytes > 0 || collective.count > 0;
}

pst_status begin_payload(Comm &comm, Request &request) {
    if (!has_payload(request.collective)) return PST_OK;
    switch (request.collective.kind) {
    case PST_ALL_GATHER:
        return begin_all_gather(comm, request);
    case PST_REDUCE_SCATTER:
        return begin_reduce_scatter(comm, request);
    default:
        return begin_in_place(comm, request);
    }
}

pst_status end_all_gather(Comm &comm, const Request &request) {
    const pst_collective &collective = request.collective;
    std::vector<pst_copy> copies(collective.segment_count);
    for (size_t i = 0; i < copies.size(); i++) {
        const pst_segment &segment = collective.segments[i];
        copies[i] = {static_cast<char *>(collective.destination) + segment.destination,
                     static_cast<char *>(collective.staging) +
                         segment.peer * collective.source_bytes + segment.source,
                     segment.bytes};
    }
    return comm.device->ops->copy(comm.device, request.stream, copies.data(), copies.size());
}

pst_status end_reduce_scatter(Comm &comm, const Request &request) {
    const pst_collective &collective = request.collective;
    std::vector<const void *> sources(static_cast<size_t>(comm.size));
    for (size_t i = 0; i < collective.piece_count; i++) {
        const pst_reduce_piece &piece = collective.pieces[i];
        for (size_t rank = 0; rank < sources.size(); rank++)
            sources[rank] =
                received(comm, collective) + rank * collective.source_bytes + piece.offset;
        pst_sum sum{};
        sum.destination = piece.destination;
        sum.sources = sources.data();
        sum.source_count = sources.size();
        sum.count = piece.count;
        sum.scale = collective.scale == 0 ? 1.0 : collective.scale;
        sum.accumulate = piece.accumulate;
        sum.destination_dtype = piece.destination_dtype;
        sum.source_dtype = collective.dtype;
        pst_status status = comm.device->ops->sum(comm.device, request.stream, &sum);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

pst_status end_all_reduce(Comm &comm, const Request &request) {
    const pst_collective &collective = request.collective;
    const bool scaled = collective.scale != 0 && collective.scale != 1.0;
    if (collective.reduce != PST_REDUCE_SUM || !scaled) return PST_OK;
    const void *source = collective.destination;
    pst_sum sum{};
    sum.destination = collective.destination;
    sum.sources = &source;
    sum.source_count = 1;
    sum.count = collective.count;
    sum.scale = collective.scale;
    sum.destination_dtype = collective.dtype;
    sum.source_dtype = collective.dtype;
    return comm.device->ops->sum(comm.device, request.stream, &sum);
}

pst_status end_payload(Comm &comm, const Request &request) {
    switch (request.collective.kind) {
    case PST_ALL_GATHER:
        return end_all_gather(comm, request);
    case PST_REDUCE_SCATTER:
        return end_reduce_scatter(comm, request);
    case PST_ALL_REDUCE:
        return end_all_reduce(comm, request);
    default:
        return PST_OK;
    }
}

// ---- the operations of the table ----------------------------------------------------------------

// Runs `step`, which calls torch; what torch throws becomes the communicator's error. A thread that
// waits may launch what is not its own, also in the middle of a trace.
template <typename Step>
pst_status guarded(Comm &comm, const pst_collective &collective, Step step) {
    const RealTensors real_tensors;
    try {
        return step();
    } catch (const std::bad_alloc &) {
        return comm.fail(PST_ENOMEM, describe(comm, collective) + ": out of memory");
    } catch (const std::exception &what) {
        return comm.fail(PST_EPEER, describe(comm, collective) + ": " + what.what());
    }
}

pst_status advance(Comm &comm, Request &request) {
    if (!is_complete(request)) return PST_PENDING;
    request.shared->complete.store(true, std::memory_order_release); // pairs with forget_complete
    comm.forget_complete();
    const std::string failure = failure_of(request);
    if (!failure.empty())
        return comm.fail(status_of_failure(failure),
                         describe(comm, request.collective) + ": " + failure);
    if (!request.checking) return end_payload(comm, request);
    pst_status status = end_check(comm, request);
    return status == PST_OK ? begin_payload(comm, request) : status;
}

size_t comm_staging_bytes(pst_comm *base, const pst_collective *collective) {
    const Comm &comm = comm_of(base);
    const size_t chunks = collective->source_bytes * static_cast<size_t>(comm.size);
    if (collective->kind == PST_ALL_GATHER) return chunks;
    if (collective->kind != PST_REDUCE_SCATTER) return 0;
    return collective->stride == collective->source_bytes ? chunks : 2 * chunks;
}

pst_status comm_start(pst_comm *base, const pst_collective *collective, pst_stream *stream,
                      void **handle) {
    Comm &comm = comm_of(base);
    pst_status status = comm.state();
    if (status != PST_OK) return status;
    auto request = std::unique_ptr<Request>(new (std::nothrow) Request(*collective, stream));
    if (!request) return PST_ENOMEM;
    const bool check = comm.verify || collective->kind == PST_BARRIER;
    status = guarded(comm, *collective, [&] {
        if (!check) return begin_payload(comm, *request);
        begin_check(comm, *request);
        return PST_PENDING;
    });
    if (status == PST_PENDING) *handle = request.release();
    return status;
}

pst_status comm_test(pst_comm *base, void *handle) {
    Comm &comm = comm_of(base);
    auto *request = static_cast<Request *>(handle);
    pst_status status = comm.state();
    if (status == PST_OK)
        status = guarded(comm, request->collective, [&] { return advance(comm, *request); });
    if (status != PST_PENDING) delete request;
    return status;
}

// A torch group cannot be cancelled: what is in flight there ends by itself, at the latest by
// the group's own time-out.
pst_status comm_abort(pst_comm *base, pst_status status) {
    Comm &comm = comm_of(base);
    comm.fail(status, "aborted");
    comm.forget_complete();
    std::lock_guard<std::mutex> guard(comm.lock);
    return comm.in_flight.empty() ? PST_OK : PST_EBUSY;
}

pst_status comm_status(pst_comm *base) {
    return comm_of(base).state();
}

const char *comm_error_text(pst_comm *base) {
    Comm &comm = comm_of(base);
    std::lock_guard<std::mutex> guard(comm.lock);
    return comm.failed == PST_OK ? "" : comm.text.c_str();
}

// What is still in flight keeps the group: the group's end would wait for it, up to its time-out.
void comm_destroy(pst_comm *base) {
    Comm &comm = comm_of(base);
    comm.forget_complete();
    if (!comm.in_flight.empty())
        new (std::nothrow) c10::intrusive_ptr<c10d::ProcessGroup>(std::move(comm.group));
    delete &comm;
}

constexpr unsigned kinds = (1u << PST_COLLECTIVE_KIND_COUNT) - 1;

pst_comm_ops make_ops() {
    pst_comm_ops ops{};
    ops.api_version = PST_COMM_API_VERSION;
    ops.kinds = kinds;
    ops.name = "c10d";
    ops.staging_bytes = comm_staging_bytes;
    ops.start = comm_start;
    ops.test = comm_test;
    ops.abort = comm_abort;
    ops.status = comm_status;
    ops.error_text = comm_error_text;
    ops.destroy = comm_destroy;
    return ops;
}
const pst_comm_ops comm_ops = make_ops();

} // namespace

pst_comm *create_c10d_comm(pst_runtime *runtime, c10::intrusive_ptr<c10d::ProcessGroup> group,
                           bool verify, Numbers numbers) {
    auto *comm = new Comm();
    comm->ops = &comm_ops;
    comm->context = comm;
    comm->rank = group->getRank();
    comm->size = group->getSize();
    comm->device = pst_runtime_host(runtime);
    comm->group = std::move(group);
    comm->verify = verify;
    comm->numbers = numbers;
    return comm;
}

} // namespace penstock
