#include "dumps.hpp"

#include "process.hpp"
#include "status.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <mutex>
#include <thread>
#include <unistd.h>

namespace penstock {
namespace {

constexpr size_t most_path = 1024;

// A child of fork begins anew: its parent's runtimes are not its own.
struct Runtimes {
    const Process home;
    std::mutex lock;
    std::vector<pst_runtime *> all;
};

// Never destroyed: the thread below may be writing when the process ends.
Runtimes &runtimes() {
    static std::atomic<Runtimes *> kept{new Runtimes};
    Runtimes *found = kept.load(std::memory_order_acquire); // pairs with the release below
    if (found->home.is_this()) return *found;
    found = new Runtimes; // the child has one thread yet
    kept.store(found, std::memory_order_release);
    return *found;
}

// ---- signals ------------------------------------------------------------------------------------

constexpr int watched_signals[] = {SIGTERM, SIGABRT};
constexpr const char *signal_names[] = {"SIGTERM", "SIGABRT"};
constexpr int most_looks = 1000; // of 2 ms: how long a signal waits for the records

// What a handler reads is written before it is installed, and never again in this process.
struct Watched {
    struct sigaction before = {};
    std::atomic<int> came{0}, written{0}; // relaxed: numbers, they order nothing
};
struct Ending {
    pid_t pid = 0; // where the thread is
    int wake = -1; // that it reads from
    Watched of[2];
};
Ending ending;

bool has_handler(const struct sigaction &action) {
    return (action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL;
}

// The process ends, by the signal, as soon as it is not blocked.
void end_by(int signal) {
    (void)std::signal(signal, SIG_DFL);
    (void)raise(signal);
}

void wait_until_written(const Watched &watched) {
    const timespec pause{0, 2'000'000};
    for (int i = 0; i < most_looks && watched.written.load(std::memory_order_relaxed) == 0; i++)
        (void)nanosleep(&pause, nullptr);
}

// Calls nothing that a handler must not call. Who aborts waits here, and so does who has a handler
// that may end what the record is of; perhaps with locks that the thread needs: so not for ever.
void on_signal(int signal, siginfo_t *info, void *context) {
    const int index = signal == SIGABRT;
    Watched &watched = ending.of[index];
    const struct sigaction &before = watched.before;
    const bool is_here = ending.pid == getpid(); // and not in a child of fork
    const bool is_first = watched.came.fetch_add(1, std::memory_order_relaxed) == 0;
    const auto byte = static_cast<char>(index);
    const int saved = errno;
    if (is_here && is_first) watched.written.store(0, std::memory_order_relaxed);
    const bool is_told = is_here && is_first && write(ending.wake, &byte, 1) == 1;
    if (is_told && (signal == SIGABRT || has_handler(before))) wait_until_written(watched);
    errno = saved;
    if ((before.sa_flags & SA_SIGINFO) != 0)
        before.sa_sigaction(signal, info, context);
    else if (has_handler(before))
        before.sa_handler(signal);
    else if (!is_told || signal == SIGABRT)
        end_by(signal);
}

bool is_ours(const struct sigaction &action) {
    return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_signal;
}

void write_when_told(int told) {
    char index = 0;
    while (read(told, &index, 1) == 1) {
        Watched &watched = ending.of[static_cast<int>(index)];
        try {
            (void)dump_all(nullptr, PST_DUMP_SIGNAL, signal_names[static_cast<int>(index)]);
        } catch (...) {
            // Nobody is there to be told, and the process is to end.
        }
        watched.written.store(1, std::memory_order_relaxed);
        if (watched_signals[static_cast<int>(index)] == SIGABRT) continue;
        if (has_handler(watched.before)) {
            watched.came.store(0, std::memory_order_relaxed); // the process may go on
            continue;
        }
        (void)std::signal(SIGTERM, SIG_DFL);
        (void)kill(getpid(), SIGTERM);
    }
}

// The thread takes no signals: the handlers of others do not expect it.
bool start_thread(int told) {
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    bool is_started = true;
    try {
        std::thread(write_when_told, told).detach();
    } catch (const std::system_error &) {
        is_started = false; // signals do what they did
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return is_started;
}

// In front of the handler that is there. Not where the signal is ignored, and not where somebody
// has put another handler in front of this one, which is called if that calls it.
void install(int index) {
    struct sigaction present = {};
    struct sigaction ours = {};
    if (sigaction(watched_signals[index], nullptr, &present) != 0) return;
    if ((present.sa_flags & SA_SIGINFO) == 0 && present.sa_handler == SIG_IGN) return;
    if (!is_ours(present)) ending.of[index].before = present; // else a child of fork has it
    ours.sa_sigaction = on_signal;
    ours.sa_flags = SA_SIGINFO | (present.sa_flags & (SA_RESTART | SA_ONSTACK));
    ours.sa_mask = present.sa_mask;
    (void)sigaction(watched_signals[index], &ours, nullptr);
}

void watch_signals() {
    int ends[2];
    if (ending.pid == getpid() || pipe2(ends, O_CLOEXEC) != 0) return;
    for (Watched &watched : ending.of) {
        watched.came.store(0, std::memory_order_relaxed);
        watched.written.store(0, std::memory_order_relaxed);
    }
    ending.wake = ends[1];
    if (!start_thread(ends[0])) return;
    ending.pid = getpid();
    for (int index = 0; index < 2; index++)
        install(index);
}

bool has_folder() {
    const char *folder = std::getenv("PENSTOCK_DUMP");
    return folder != nullptr && *folder != '\0';
}

} // namespace

// ---- the runtimes -------------------------------------------------------------------------------

void add_to_dumps(pst_runtime *runtime) {
    Runtimes &known = runtimes();
    const std::lock_guard<std::mutex> guard(known.lock);
    known.all.push_back(runtime);
    if (has_folder()) watch_signals();
}

void remove_from_dumps(pst_runtime *runtime) {
    Runtimes &known = runtimes();
    const std::lock_guard<std::mutex> guard(known.lock);
    known.all.erase(std::remove(known.all.begin(), known.all.end(), runtime), known.all.end());
}

std::vector<std::string> dump_all(const char *folder, pst_dump_cause cause,
                                  const std::string &reason) {
    Runtimes &known = runtimes();
    const std::lock_guard<std::mutex> guard(known.lock);
    std::vector<std::string> files;
    std::optional<StatusError> failure;
    for (pst_runtime *runtime : known.all) {
        if (cause != PST_DUMP_REQUEST && pst_runtime_status(runtime) != PST_OK) continue;
        std::vector<char> path(most_path);
        const pst_status status =
            pst_trace_dump(runtime, folder, cause, reason.c_str(), path.data(), path.size());
        if (status == PST_OK)
            files.emplace_back(path.data());
        else if (!failure)
            failure = StatusError{status, runtime_error_text(runtime)};
    }
    if (failure) throw StatusError(*failure);
    return files;
}

} // namespace penstock
