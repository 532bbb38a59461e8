// A queue of the lines that the library logs, until Python can take them: it logs on any thread,
// perhaps with locks held, where nobody may wait for the interpreter.
#pragma once

#include <penstock/runtime.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace penstock {

class Log {
  public:
    struct Line {
        Line *next;
        pst_log_level level;
        bool is_raised; // as an exception
        std::string text;
    };

    Log() = default;
    ~Log();
    Log(const Log &) = delete;
    Log &operator=(const Log &) = delete;

    // Keeps a line. Any thread; waits for nobody.
    void note(pst_log_level level, const char *text) noexcept;
    bool has_lines() const;
    // The lines since the last call, the latest first. Any thread.
    std::vector<std::unique_ptr<Line>> take();

  private:
    std::atomic<Line *> latest_{nullptr};
};

} // namespace penstock
