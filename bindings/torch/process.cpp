#include "process.hpp"

#include <atomic>
#include <pthread.h>

namespace penstock {
namespace {

// Written in a child of fork alone, while it has one thread: relaxed everywhere.
std::atomic<uint32_t> forks{0};

void note_fork() {
    forks.fetch_add(1, std::memory_order_relaxed);
}

// It can only fail for want of memory, when the process starts.
const int is_noted = pthread_atfork(nullptr, nullptr, note_fork);

} // namespace

Process::Process() : generation_(forks.load(std::memory_order_relaxed)) {
    (void)is_noted;
}

bool Process::is_this() const {
    return generation_ == forks.load(std::memory_order_relaxed);
}

} // namespace penstock
