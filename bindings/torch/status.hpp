// A C status as a C++ exception; module.cpp turns it into penstock.PenstockError.
#pragma once

#include <penstock/runtime.h>

#include <string>
#include <utility>

namespace penstock {

struct StatusError {
    pst_status status;
    std::string text;
};

inline std::string runtime_error_text(const pst_runtime *runtime) {
    std::string text(pst_runtime_error(runtime, nullptr, 0), '\0');
    if (!text.empty()) pst_runtime_error(runtime, text.data(), text.size() + 1);
    return text;
}

// Throws unless `status` is PST_OK, with the runtime's text of what happened.
inline void check(const pst_runtime *runtime, pst_status status) {
    if (status == PST_OK) return;
    std::string text = runtime_error_text(runtime);
    throw StatusError{status, text.empty() ? pst_status_text(status) : std::move(text)};
}

} // namespace penstock
