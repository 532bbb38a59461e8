#include "ranks.hpp"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace penstock::dc {

Ranks::~Ranks() {
    comms_.reset();
    const pybind11::gil_scoped_acquire gil;
    try {
        if (roll_) roll_.attr("stop")();
    } catch (pybind11::error_already_set &error) {
        error.discard_as_unraisable("the end of a DeepCompile runtime");
    }
    roll_ = watched_ = pybind11::object();
}

void Ranks::follow(pybind11::object roll, bool on_gpu) {
    runtime->follow(roll.attr("pages"));
    roll.attr("follow")();
    roll_ = std::move(roll);
    if (!on_gpu) return;
    watched_ = pybind11::cast(runtime);
    roll_.attr("watch")(watched_);
}

const Comms &Ranks::comms(const std::string &wanted) {
    if (!comms_) {
        comms_ = std::make_unique<Comms>(*runtime, gather, reduce, wanted, true);
        wanted_ = wanted;
    } else if (wanted != wanted_ && wanted != comms_->name() && runtime->device() != nullptr) {
        throw StatusError{PST_EUNSUPPORTED, "this runtime's communicator is " + communicator() +
                                                ", and " + wanted +
                                                " is wanted: ZeRO-3 and the other stages need "
                                                "runtimes of their own (init)"};
    }
    return *comms_;
}

bool Ranks::is_equal_everywhere(uint64_t value) const {
    if (!questions) return true;
    at::Tensor mine = at::empty({1}, at::kLong);
    mine.fill_(static_cast<int64_t>(value));
    std::vector<std::vector<at::Tensor>> all(1);
    for (int i = 0; i < size; i++)
        all[0].push_back(at::empty_like(mine));
    std::vector<at::Tensor> own{mine};
    (*questions)->allgather(all, own)->wait();
    for (const at::Tensor &theirs : all[0])
        if (theirs.item<int64_t>() != mine.item<int64_t>()) return false;
    return true;
}

namespace {

void put_behind(const c10::Stream &stream, const c10::Stream &first) {
    c10::Event event(first.device_type());
    event.record(first);
    event.block(stream);
}

} // namespace

StreamBridge::StreamBridge(const Ranks &ranks) {
    if (!ranks.compute) return;
    const c10::impl::VirtualGuardImpl device(ranks.compute->device_type());
    const c10::Stream current = device.getStream(ranks.compute->device());
    if (current == *ranks.compute) return;
    current_ = current;
    compute_ = ranks.compute;
    put_behind(*compute_, *current_);
}

StreamBridge::~StreamBridge() {
    if (compute_) put_behind(*current_, *compute_);
}

} // namespace penstock::dc
