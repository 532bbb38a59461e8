// A C status as a C++ exception; module.cpp turns it into penstock.PenstockError.
#pragma once

#include <penstock/runtime.h>

#include <string>

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

} // namespace penstock
