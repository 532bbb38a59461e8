#include "log.hpp"

#include <Python.h>

#include <new>

namespace penstock {

Log::~Log() {
    (void)take();
}

// What fails on a thread of Python's own comes back to it as an exception.
void Log::note(pst_log_level level, const char *text) noexcept {
    const bool is_raised = level == PST_LOG_ERROR && PyGILState_GetThisThreadState() != nullptr;
    try {
        Line *line = new Line{nullptr, level, is_raised, text};
        line->next = latest_.load(std::memory_order_relaxed);
        // Release: pairs with the acquire in take, which reads the line.
        while (!latest_.compare_exchange_weak(line->next, line, std::memory_order_release,
                                              std::memory_order_relaxed)) {
        }
    } catch (const std::bad_alloc &) {
        // It is lost.
    }
}

bool Log::has_lines() const {
    return latest_.load(std::memory_order_relaxed) != nullptr; // take orders what follows
}

std::vector<std::unique_ptr<Log::Line>> Log::take() {
    std::vector<std::unique_ptr<Line>> lines;
    // Acquire: pairs with the release in note.
    for (Line *line = latest_.exchange(nullptr, std::memory_order_acquire); line != nullptr;
         line = line->next)
        lines.emplace_back(line);
    return lines;
}

} // namespace penstock
