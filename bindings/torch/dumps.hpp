// The runtimes of this process, and how their flight records come to be written: when somebody
// asks, and when the process is told to end.
#pragma once

#include <penstock/trace.h>

#include <optional>
#include <string>
#include <vector>

namespace penstock {

// From here on the runtime's record is written with the others'. Where PENSTOCK_DUMP names a
// folder SIGTERM and SIGABRT write them, too, on a thread of its own, which needs no interpreter:
// the handler that was there is called once they are written, or after 2 s, and where there was
// none the process ends then. A second SIGTERM ends it at once.
void add_to_dumps(pst_runtime *runtime);
// Before it is destroyed: waits until nobody writes it any more.
void remove_from_dumps(pst_runtime *runtime);

// Writes all records into `folder` (nullptr: that of PENSTOCK_DUMP) and returns the files. Those of
// runtimes that have failed stay as the failure has left them, unless somebody asks. Throws a
// StatusError when one cannot be written, behind the others. Without the interpreter.
std::vector<std::string> dump_all(const char *folder, pst_dump_cause cause,
                                  const std::string &reason);

// The same for Python.
inline std::vector<std::string> dump_as_asked(const std::optional<std::string> &folder,
                                              const std::string &reason, bool is_failure) {
    return dump_all(folder ? folder->c_str() : nullptr,
                    is_failure ? PST_DUMP_FAILURE : PST_DUMP_REQUEST, reason);
}

} // namespace penstock
